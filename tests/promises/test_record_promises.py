"""Promises of everything that counts: what is recorded, compared, predicted and diagnosed.

- requests and statistics: tokens, keys and counts end at one place; a sum has every count; a copy stays as it was
- evaluation: a statistic is as large as its degrees of freedom say; intervals are mirrored by exchanging the sides;
  what ran together is one observation
- tuning: a replay counts what a loop counts, and forgets; a sample is spread over all traces; costs are as defined
- diagnosis: shares are those that NumPy counts; limits are on the right side of what is measured
- inputs: only the padding at an end is taken off; each request's place is told by its own line
- batches of a dataset: one category each, in order, and each sample once
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from commands.inputs.dataset import Sample, load_samples
from commands.inputs.prompts import read_prompts
from commands.options.sampling_flags import SamplingOptions
from commands.output.tables.drafts import _histogram_table
from commands.summarize.document import _category
from commands.summarize.work import by_category, make_batches
from runtime.checkpoint.config import BuildConfig, MachineSpeed, StepCost
from runtime.checkpoint.costs import CostModel
from runtime.core.generation import Work
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.core.sampling import gumbel
from runtime.core.stats import LoopTimes, RequestStats, StateStats, sum_stats
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import KVCacheConfig
from runtime.loop import orchestrator
from runtime.loop.lossless.check import _first_difference
from runtime.loop.lossless.chi_squared import chi_squared_of
from runtime.loop.opening import OpenDrafter
from runtime.loop.session import Session
from runtime.measure.diagnosis.diagnose import (
    DraftedStep,
    Drafting,
    Machine,
    Observations,
    StateUse,
    _seconds_of_a_token,
    more_threads_than_cores,
    state_slots_full,
)
from runtime.measure.diagnosis.observe import _look_at_weights
from runtime.measure.evaluation.comparison import _as, _groups
from runtime.measure.evaluation.significance import Interval, paired_shift, unpaired_shift
from runtime.measure.evaluation.systems import SampleRun, SystemRun, evaluate_engine
from runtime.measure.tuning.replay import ReplayedStep, replay_batches
from runtime.measure.tuning.search import Replayer, step_s
from runtime.text.trace_lines import Trace
from scripts.campaigns.cases import Recorder
from scripts.campaigns.oracle import CheckedEngine, ExactModel, one_by_one

# --- requests and statistics ---

steps = st.lists(st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=6)


@given(
    drafts=steps, max_new_tokens=st.integers(1, 20), end=st.none() | st.integers(0, 12), num_predicted=st.integers(0, 5)
)
def test_commit_ends_tokens_keys_and_counts_at_one_place(
    drafts: list[tuple[int, int]], max_new_tokens: int, end: int | None, num_predicted: int
) -> None:
    """Against a list of the tokens that come, one by one, up to the end id or the budget."""
    sequence = Sequence.start(Request(0, (900, 901), max_new_tokens, frozenset() if end is None else frozenset([end])))
    come, number, kept = list[int](), 0, list[int]()
    for num_drafted, num_accepted in drafts:
        tokens = [number + i for i in range(num_drafted + 1)]
        draft = Draft(tokens[:num_drafted], num_predicted=min(num_predicted, num_drafted))
        sequence.num_computed = len(sequence.tokens) + num_accepted
        new = sequence.commit(draft, VerifyResult(num_accepted, tokens[num_accepted]))
        for token in tokens[: num_accepted + 1]:
            come.append(token)
            if len(come) == max_new_tokens or token == end:
                break
        number += num_accepted + 1
        kept.append(len(new))
        assert sequence.output_tokens == come
        assert sequence.num_computed <= len(sequence.tokens)
        over = len(come) == max_new_tokens or come[-1] == end
        assert sequence.is_over == over
        if over:
            break
    stats, used = sequence.stats, drafts[: len(kept)]
    accepted = [min(num_accepted, new) for (_, num_accepted), new in zip(used, kept, strict=True)]
    assert stats.per_step_accepted == accepted and sum(accepted) == stats.num_accepted_draft_tokens
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in used)
    predicted = [min(num_predicted, drafted) for drafted, _ in used]
    assert stats.num_predicted_tokens == sum(predicted)
    assert stats.num_accepted_predicted_tokens == sum(map(min, predicted, accepted))
    assert stats.num_generated_tokens == len(come)


@given(num=st.integers(0, 6), num_predicted=st.integers(0, 6), max_len=st.integers(0, 6))
def test_cut_draft_speaks_of_what_it_still_has(num: int, num_predicted: int, max_len: int) -> None:
    whole = Draft(list(range(num)), torch.eye(8)[:num], 3, num_predicted=min(num_predicted, num))
    cut = whole.cut(max_len)
    assert cut.tokens == list(range(min(num, max_len))) and cut.probs is not None and len(cut.probs) == len(cut.tokens)
    assert cut.num_predicted == min(num_predicted, num, max_len) and cut.match_len == 3


def stats_of(drafts: list[tuple[int, int]]) -> RequestStats:
    stats = RequestStats()
    for num_drafted, num_accepted in drafts:
        stats.record_step(num_drafted, num_accepted, num_accepted + 1)
    stats.num_reused_tokens = 3 * len(drafts)
    stats.num_predicted_tokens, stats.num_accepted_predicted_tokens = len(drafts), len(drafts) // 2
    return stats


@given(all_drafts=st.lists(steps, min_size=1, max_size=4))
def test_sum_has_every_count_and_changes_nothing(all_drafts: list[list[tuple[int, int]]]) -> None:
    all_stats = [stats_of(drafts) for drafts in all_drafts]
    before = copy.deepcopy(all_stats)
    total = sum_stats(all_stats)
    assert all_stats == before
    for name in (field.name for field in fields(RequestStats)):
        values = [getattr(stats, name) for stats in all_stats]
        if name.startswith("num_"):
            assert getattr(total, name) == sum(values), name
        elif name in ("acceptance_histogram", "drafted_per_position", "accepted_per_position"):
            added = Counter[int]()
            for value in values:
                added.update(dict(enumerate(value)))
            assert {i: n for i, n in enumerate(getattr(total, name)) if n} == {i: n for i, n in added.items() if n}


@given(first=steps, then=steps)
def test_copy_stays_as_it_was(first: list[tuple[int, int]], then: list[tuple[int, int]]) -> None:
    stats = stats_of(first)
    copied, before = stats.copy(), copy.deepcopy(stats)
    for num_drafted, num_accepted in then:
        stats.record_step(num_drafted, num_accepted, num_accepted + 1)
    assert copied == before


def test_times_of_loops_add_up_in_every_field() -> None:
    names = [field.name for field in fields(LoopTimes)]
    total = LoopTimes(**{name: 10.0**i for i, name in enumerate(names)})  # type: ignore[arg-type]
    total.add(LoopTimes(**{name: 2 * 10.0**i for i, name in enumerate(names)}))  # type: ignore[arg-type]
    assert vars(total) == {name: 3 * 10.0**i for i, name in enumerate(names)}


@given(
    num=st.integers(2, 50),
    first=st.floats(0.1, 5, allow_subnormal=False),
    each=st.floats(0.01, 2, allow_subnormal=False),
    other=st.integers(1, 50),
)  # seconds by a clock
def test_times_for_a_token_leave_out_the_first_and_speedups_are_of_a_token(
    num: int, first: float, each: float, other: int
) -> None:
    stats = RequestStats(num_generated_tokens=num, start_s=1.0, first_token_s=1.0 + first)
    stats.end_s = 1.0 + first + each * (num - 1)
    assert stats.tpot_s == pytest.approx(each) and stats.ttft_s == pytest.approx(first)
    fast, slow = Work(each * num, num), Work(2 * each * other, other)
    assert fast.speedup_over(slow) == pytest.approx(2)


# --- evaluation ---


def test_statistic_is_as_large_as_its_degrees_of_freedom() -> None:
    """The mean of chi-squared is its degrees of freedom, of counts that follow the distribution."""
    generator, distribution = torch.Generator().manual_seed(0), torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    found = []
    for _ in range(600):
        drawn = torch.multinomial(distribution, 200, replacement=True, generator=generator).tolist()
        found.append(chi_squared_of(Counter(drawn), distribution))
    (freedom,) = {one for _, one in found}
    assert freedom == 3
    assert abs(np.mean([one for one, _ in found]) - freedom) < 5 * (2 * freedom / len(found)) ** 0.5


@given(
    a=st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=7, max_size=12),
    shift=st.floats(-3, 3, allow_subnormal=False),
    seed=st.integers(0, 99),
)
def test_intervals_are_mirrored_by_exchanging_the_sides(a: list[float], shift: float, seed: int) -> None:
    rng = random.Random(seed)
    b = [x + shift + rng.uniform(-1, 1) for x in a]
    for compare in (paired_shift, unpaired_shift):
        there, back = compare(a, b), compare(b, a)
        assert there is not None and back is not None
        assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
        assert there.low <= there.estimate <= there.high


@given(
    low=st.floats(0.1, 5, allow_subnormal=False),
    width=st.floats(0.0, 3, allow_subnormal=False),
    more=st.floats(0.0, 3, allow_subnormal=False),
)
def test_control_of_a_rate_is_an_interval_too(low: float, width: float, more: float) -> None:
    control = Interval(low + width, low, low + width + more)
    for unit in ("tokens/s", "s"):
        found = _as(unit, control)  # type: ignore[arg-type]
        assert found.low <= found.estimate <= found.high
    assert _as("tokens/s", control).low == pytest.approx(1 / control.high)


@given(num=st.integers(1, 20), size=st.integers(1, 6))
def test_requests_that_ran_together_are_one_observation(num: int, size: int) -> None:
    document = {
        "requests": [{}] * num,
        "settings": {},
        "command": "run",
        "engine": {"build_config": {"max_batch_size": size}},
    }
    assert Counter(_groups("time", document)) == Counter(i // size for i in range(num))
    assert len(set(_groups("count", document))) == num


MODEL = ExactModel(1, 12)


def engine_of(batch_size: int) -> CheckedEngine:
    build = BuildConfig("none", batch_size, 100, 200, 4, 4, "draft_tokens_external")
    return CheckedEngine(MODEL, build, KVCacheConfig(), 512)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_near_ties_are_judged_in_the_models_own_logits(temperature: float) -> None:
    """Samples count with the noise by which they were chosen, times the temperature."""
    params = SamplingConfig(temperature=temperature, top_k=0)
    request = Request(0, (1, 2, 3), 9, sampling=params)
    sequence = Sequence.start(request)
    sequence.tokens += one_by_one(MODEL, request)
    for position in range(4):
        prefix = sequence.tokens[: 3 + position]
        own, other = sequence.tokens[3 + position], (sequence.tokens[3 + position] + 5) % 12
        different = Sequence(request, [*prefix, other, 1, 2])
        found = _first_difference(engine_of(1), sequence, different)
        assert (found.position, found.token, found.token_without_drafter) == (position, own, other)
        logits = MODEL.logits(prefix)[0].double().numpy()
        noise = gumbel(sequence.sampler.noise_key(len(prefix)), np.arange(12, dtype=np.uint32)) * temperature
        assert found.logit_margin == pytest.approx((logits + noise)[own] - (logits + noise)[other], abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_times_of_samples_add_up_to_those_of_their_batches(batch_size: int) -> None:
    requests = [[i, 1, 2] for i in range(7)]
    batches = [requests[i : i + batch_size] for i in range(0, 7, batch_size)]
    question: Any = SimpleNamespace(llm=SimpleNamespace(tokenizer=None), template=Request(0, (1,), 5))
    session = Session(engine_of(batch_size), "leader", opened=OpenDrafter(NgramLookup(2), 4))
    runs = evaluate_engine(question, session, batches, lambda: None)
    assert [run.name for run in runs] == ["engine", "engine_no_drafter"]
    for run in runs:
        whole, of_all = run.work, run.work_on(list(range(7)))
        assert of_all.num_tokens == whole.num_tokens == sum(len(one.output_tokens) for one in run.samples)
        assert of_all.wall_s == pytest.approx(whole.wall_s)
        assert [one.output_tokens for one in run.samples] == [
            one_by_one(MODEL, Request(i, tuple(prompt), 5)) for i, prompt in enumerate(requests)
        ]


# --- tuning ---


def traces_of(seed: int, num: int) -> list[Trace]:
    draw = random.Random(seed)
    traces = []
    for i in range(num):
        prompt = tuple(draw.choices(range(12), k=draw.randrange(1, 12)))
        output = one_by_one(MODEL, Request(i, prompt, draw.randrange(1, 30)))
        traces.append(Trace(prompt, tuple(output)))
    return traces


class Greedy:
    """A drafter that drafts as much as it is asked for, whatever the budget."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([sequence.tokens[-1]] * max_draft_len) for sequence in sequences]

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize("make", [lambda: NgramLookup(2), Greedy], ids=["ngram", "greedy"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_counts_what_the_loop_counts_and_forgets(seed: int, make: Callable[[], Any]) -> None:
    traces, batch_size = traces_of(seed, 5), 1 + seed % 3
    engine = engine_of(batch_size)
    requests = [Request(i, one.prompt_tokens, len(one.output_tokens)) for i, one in enumerate(traces)]
    sequences = dict[int, Sequence]()
    for sequence, _ in orchestrator.generate(engine, requests, make(), 4):
        sequences[sequence.request.id] = sequence
    recorder = Recorder(make())
    replayed = replay_batches(traces, recorder, 4, batch_size)
    assert not recorder.remembered
    for i, stats in enumerate(replayed.stats):
        expected = sequences[i].stats
        assert stats.per_step_drafted == expected.per_step_drafted
        assert stats.per_step_accepted == expected.per_step_accepted


@given(num=st.integers(1, 40), length=st.integers(1, 30), most=st.integers(1, 300))
def test_sample_is_spread_over_all_traces(num: int, length: int, most: int) -> None:
    replayer = Replayer([Trace((i,), (1,) * length) for i in range(num)])
    chosen = [trace.prompt_tokens[0] for trace in replayer.thinned(most).traces]
    gaps = {b - a for a, b in pairwise(chosen)}
    assert chosen[0] == 0 and len(gaps) <= 1 and num - chosen[-1] <= max(gaps, default=num)
    assert len(chosen) * length <= most + length


LINEAR = CostModel([StepCost(1, c, n, 1e-3 * (5 + 2 * n) + 1e-6 * c) for c in (0, 1000) for n in (1, 21)], host_s=0.5)


@given(num_tokens=st.integers(1, 900), draft_len=st.integers(0, 10))
def test_costs_are_their_definition(num_tokens: int, draft_len: int) -> None:
    """A step of n + 1 tokens after c: on the lines that were measured."""
    expected = 1e-3 * (5 + 2 * (draft_len + 1)) + 1e-6 * (num_tokens - 1) + 0.5
    step = ReplayedStep((num_tokens,), (draft_len,), is_first=False)
    assert step_s(step, LINEAR, 16) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert LINEAR.iteration_s(1, num_tokens - 1, draft_len) == pytest.approx(expected, rel=1e-9)


@given(num_tokens=st.integers(1, 100), chunk=st.integers(1, 20))
def test_prompt_costs_the_tokens_that_it_has(num_tokens: int, chunk: int) -> None:
    starts = range(0, num_tokens, chunk)
    expected = sum(LINEAR.step_s(1, start, min(chunk, num_tokens - start)) for start in starts)
    assert LINEAR.context_s(num_tokens, chunk) == pytest.approx(expected)
    assert LINEAR.context_s(num_tokens, num_tokens) == pytest.approx(1e-3 * (5 + 2 * num_tokens), rel=0.2)


# --- diagnosis ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_subnormal_numbers_are_those_of_numpy(dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    """Random bits, with zeros of both signs and the numbers beside the smallest normal one."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 500, dtype=np.uint32)
    edges = [0, 0x80000000, 0x00800000, 0x007FFFFF, 0x807FFFFF, 0x80800000, 1, 0x00010000, 0x007F0000]
    bits = np.concatenate([bits, rng.choice(np.array(edges, np.uint32), 300)])
    if dtype == torch.bfloat16:
        bits &= np.uint32(0xFFFF0000)
        stored = torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    else:
        stored = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    save_file({"a": stored, "ids": torch.arange(5)}, tmp_path / "weights")
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    found = _look_at_weights(tmp_path / "weights")
    assert (found.num_sampled, found.num_denormal) == (800, int(((exponent == 0) & (mantissa != 0)).sum()))


def observations(**given: Any) -> Observations:
    machine = Machine(MachineSpeed(4, 1e9), None, 4, 1.0, 1, None, 1)
    nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(Observations)), None)
    return Observations(**(nothing | {"machine": machine, "steps": ()} | given))


@given(num_threads=st.integers(1, 64), cores=st.floats(0.1, 64, allow_subnormal=False))
def test_threads_may_be_as_many_as_cores_that_have_begun(num_threads: int, cores: float) -> None:
    machine = replace(observations().machine, now=MachineSpeed(num_threads, 1e9), num_cores=cores)
    judgement = more_threads_than_cores(observations(machine=machine))
    assert judgement is not None and judgement.is_fault == (num_threads - 1 >= cores)


@given(num_waits=st.integers(0, 2), num_evictions=st.integers(0, 3), num_misses=st.integers(0, 2))
def test_evicted_states_count_where_somebody_missed_one(num_waits: int, num_evictions: int, num_misses: int) -> None:
    stats = StateStats(num_waits=num_waits, num_evictions=num_evictions, num_misses=num_misses)
    judgement = state_slots_full(observations(states=StateUse(stats, 4)))
    assert judgement is not None and judgement.is_fault == bool(num_waits or (num_evictions and num_misses))


@given(drafts=steps, max_draft_len=st.integers(0, 5))
def test_seconds_of_a_token_are_those_of_drafts_that_were_cut(
    drafts: list[tuple[int, int]], max_draft_len: int
) -> None:
    """Each step is replayed with its draft cut, and its accepted tokens too."""
    costs = tuple(StepCost(1, 0, n, 1e-3 * (9 + n)) for n in (1, 11))
    made = tuple(DraftedStep(100, drafted, accepted) for drafted, accepted in drafts)
    found = _seconds_of_a_token(Drafting({"ngram": 1}, "fixed", made, LoopTimes(), costs), max_draft_len)
    seconds = num_tokens = 0.0
    for drafted, accepted in drafts:
        seconds += 1e-3 * (10 + min(drafted, max_draft_len))
        num_tokens += min(accepted, max_draft_len) + 1
    assert found == pytest.approx(seconds / num_tokens)


# --- inputs, and batches of a dataset ---


@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5))
def test_padding_is_taken_off_the_end_alone(rows: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = [[*row, 1] for row in rows]  # none is of padding alone
    longest = max(map(len, rows))
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.array([row + [0] * (longest - len(row)) for row in rows]))
    assert [list(prompt.ids or ()) for prompt in read_prompts([], path, pad_id=0)] == rows


@pytest.mark.parametrize("number", [1, 2, 5])
def test_bad_line_is_named_by_its_own_number(number: int, tmp_path: Path) -> None:
    lines = ["a text"] * 6
    lines[number - 1] = "half a pair \udc80"
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join('{"prompt": ' + ascii(line).replace("'", '"') + "}\n" for line in lines))
    with pytest.raises(Exception, match=f"line {number} of"):
        read_prompts([], path)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_samples_are_in_the_order_of_datasets(seed: int, tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"article": "text {i}", "highlights": "h", "id": "{i}"}}\n' for i in range(30)))
    found = load_samples(str(path), eval_task="summarize", dataset_dir=None, max_samples=None, seed=seed)
    shuffled = datasets.Dataset.from_dict({"i": list(range(30))}).shuffle(seed=seed)
    assert [int(sample.id) for sample in found] == list(shuffled["i"])


def samples_of(categories: list[str]) -> list[Sample]:
    return [Sample(str(i), category, f"text {i}", f"reference {i}") for i, category in enumerate(categories)]


@given(categories=st.lists(st.sampled_from("abc"), min_size=1, max_size=20), batch_size=st.integers(1, 5))
def test_batches_are_of_one_category_and_have_each_sample_once(categories: list[str], batch_size: int) -> None:
    samples = by_category(samples_of(categories))
    batches = make_batches(samples, [[int(sample.id)] for sample in samples], batch_size)
    numbers = [[prompt[0] for prompt in batch] for batch in batches]
    assert sorted(i for batch in numbers for i in batch) == list(range(len(categories)))
    for batch in numbers:
        assert 1 <= len(batch) <= batch_size and len({categories[i] for i in batch}) == 1
    of_category = Counter(categories)
    assert len(batches) == sum(-(-number // batch_size) for number in of_category.values())


def test_scores_of_a_category_are_of_its_own_references() -> None:
    """Every output is its reference, so that ROUGE is 100 whatever the categories."""
    samples = samples_of(["b", "a", "b", "a", "b"])
    run = SystemRun("hf", [SampleRun([1], f"reference {i}", 0.1, 0.1, 0.1, 0.1) for i in range(5)])
    samples = [replace(one, reference=f"reference {word}") for one, word in zip(samples, "vwxyz", strict=True)]
    run.samples = [
        replace(one, output_text=f"reference {word}") for one, word in zip(run.samples, "vwxyz", strict=True)
    ]
    for category, number in (("a", 2), ("b", 3)):
        found = _category(4, samples, [run], category)
        assert found.num_samples == found.num_references == number
        assert found.rouge["hf"] is not None and found.rouge["hf"].rouge1 == pytest.approx(100)


@given(histogram=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any))
def test_shares_of_a_histogram_add_up_to_all_drafts(histogram: list[int]) -> None:
    total: Any = SimpleNamespace(acceptance_histogram=histogram, num_spec_steps=sum(histogram))
    table = _histogram_table(total)
    shares = [float(str(cell).rstrip(" %")) for cell in table.columns[-1]._cells]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


@given(
    temperature=st.sampled_from([None, 0.0, 0.7, 1.0]),
    top_p=st.sampled_from([None, 0.5]),
    min_p=st.sampled_from([None, 0.1]),
    top_k=st.sampled_from([None, 0, 1, 5]),
)
@pytest.mark.filterwarnings("ignore")
def test_who_asks_for_samples_gets_them(
    temperature: float | None, top_p: float | None, min_p: float | None, top_k: int | None
) -> None:
    params = SamplingOptions(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k).params()
    asks = temperature is not None or top_p is not None or min_p is not None
    is_greedy = temperature == 0 or top_k == 1 or (top_k is None and not asks)
    assert params.config().is_greedy == is_greedy
