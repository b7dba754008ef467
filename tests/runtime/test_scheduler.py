"""The V2 loop: whatever arrives, waits, is put back and continued, each request ends with Hugging Face's tokens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentences import Said
from tiny import hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import SpecDecError

NUM_NEW_TOKENS = 24
DRAFTERS = ["none", "ngram", "draft model"]


@pytest.fixture
def open_engine(llama_engine_dir: Path) -> Any:
    """The engine of fixture `llama`: max_batch_size 4, blocks of 4."""
    return lambda **kv_cache: Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(**kv_cache))


@pytest.fixture(scope="session")
def draft_engine_dir(make_engine_dir: Any, tokenizer: Any) -> Path:
    directory: Path = make_engine_dir(make_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1))
    return directory


@pytest.fixture
def make_drafter(draft_engine_dir: Path, tokenizer: Any) -> Any:
    def make(kind: str) -> Any:
        if kind == "draft model":
            return DraftModel(Engine.open(draft_engine_dir), len(tokenizer), use_logits=False)
        return NgramLookup(2) if kind == "ngram" else None

    return make


def make_requests(num_requests: int, **settings: Any) -> list[Request]:
    return [
        Request(i, tuple(repetitive_prompt(i, 6 + 5 * i)), NUM_NEW_TOKENS - i, **settings) for i in range(num_requests)
    ]


def finish(engine: Engine, requests: list[Request], drafter: Any = None, loop: Any = scheduler) -> dict[int, Sequence]:
    """Run to the end; blocks are all given back, and what was streamed is what came out."""
    streamed: dict[int, list[int]] = {request.id: [] for request in requests}
    finished: dict[int, Sequence] = {}
    for sequence, new_tokens in loop.generate(engine, requests, drafter, 5 if drafter else 0):
        assert new_tokens and sequence.request.id not in finished
        engine._blocks.check_integrity()
        streamed[sequence.request.id] += new_tokens
        if sequence.finish_reason is not None:
            finished[sequence.request.id] = sequence
    assert {i: sequence.output_tokens for i, sequence in finished.items()} == streamed
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    return finished


def expected(llama: PreTrainedModel, requests: list[Request]) -> dict[int, list[int]]:
    return {r.id: hf_greedy(llama, list(r.prompt_tokens), r.max_new_tokens) for r in requests}


def outputs(finished: dict[int, Sequence]) -> dict[int, list[int]]:
    return {i: finished[i].output_tokens for i in sorted(finished)}


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("num_requests", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 3)), 9])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_v2_is_v1_is_hugging_face(
    drafter: str, num_requests: int, reuse: bool, open_engine: Any, make_drafter: Any, llama: PreTrainedModel
) -> None:
    requests = make_requests(num_requests)
    v2 = finish(open_engine(block_reuse=reuse), requests, make_drafter(drafter))
    assert outputs(v2) == expected(llama, requests)
    v1 = finish(open_engine(), requests, make_drafter(drafter), orchestrator)
    assert outputs(v1) == outputs(v2)
    assert [v1[i].stats.per_step_accepted for i in v1] == [v2[i].stats.per_step_accepted for i in v1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_seed_same_text_in_v1_and_v2(drafter: str, open_engine: Any, make_drafter: Any) -> None:
    requests = make_requests(6, sampling=SamplingConfig(temperature=0.9, top_k=0, random_seed=3))
    v1 = finish(open_engine(), requests, None, orchestrator)
    assert outputs(finish(open_engine(), requests, make_drafter(drafter))) == outputs(v1)


def test_requests_join_as_others_finish(open_engine: Any) -> None:
    """Five requests, four places: the fifth starts in the step after the first end, not when all four have ended."""
    requests = [Request(i, (5, 6, 7), 3 if i == 1 else 12) for i in range(5)]
    times = LoopTimes()
    for _ in scheduler.generate(open_engine(), requests, None, 0, times):
        pass
    assert times.num_iterations == 3 + 12


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [60, 76, 100])
def test_sequences_put_back_and_continued_end_the_same(
    max_tokens: int, drafter: str, open_engine: Any, make_drafter: Any, llama: PreTrainedModel
) -> None:
    """Together they need 140 tokens of K/V, and all are admitted at first: prompts are short, outputs long."""
    requests = [Request(i, tuple(repetitive_prompt(i, 5)), 30) for i in range(4)]
    engine = open_engine(max_tokens=max_tokens)
    released: list[int] = []
    release = engine.release

    def count(sequence: Sequence) -> None:
        released.append(sequence.request.id)
        release(sequence)

    engine.release = count
    assert outputs(finish(engine, requests, make_drafter(drafter))) == expected(llama, requests)
    assert len(released) > len(requests), "nobody was put back"
    assert released.count(0) == 1, "the oldest was put back"


def test_who_was_put_back_comes_before_who_never_ran(open_engine: Any) -> None:
    """Two of three fit and grow until the second is put back. The third runs beside it when the first has ended."""
    requests = [Request(i, (5, 6, 7, 8 + i), 30) for i in range(3)]
    order = [s.request.id for s, _ in scheduler.generate(open_engine(max_tokens=36), requests, None, 0)]
    last = {i: len(order) - 1 - order[::-1].index(i) for i in range(3)}
    assert last[0] < last[1] < last[2]
    assert last[0] < order.index(2) < last[1]


@pytest.mark.parametrize("max_num_tokens", [1, 3, 7, 40, 512])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chunked_prompts_are_whole_prompts(
    drafter: str, max_num_tokens: int, open_engine: Any, make_drafter: Any, llama: PreTrainedModel
) -> None:
    requests = make_requests(5)
    engine = open_engine()
    engine.max_num_tokens = max_num_tokens
    assert outputs(finish(engine, requests, make_drafter(drafter))) == expected(llama, requests)


def test_long_prompt_does_not_hold_up_running_rows(open_engine: Any) -> None:
    """Its 90 tokens are computed 10 at a time, while the other row gets a token in every iteration."""
    engine = open_engine()
    engine.max_num_tokens = 10
    requests = [Request(0, (5, 6), 20), Request(1, tuple(repetitive_prompt(1, 90)), 4)]
    order = [s.request.id for s, _ in scheduler.generate(engine, requests, None, 0)]
    assert order.index(1) >= 8
    assert order[:8] == [0] * 8


def test_prompts_share_what_an_iteration_may_compute(open_engine: Any) -> None:
    """25 tokens at a time: the first prompt of 20 and 5 of the second; the other 15 and 10 of the third; the rest."""
    engine = open_engine()
    engine.max_num_tokens = 25
    requests = [Request(i, tuple(repetitive_prompt(i, 20)), 3) for i in range(3)]
    order = [s.request.id for s, _ in scheduler.generate(engine, requests, None, 0)]
    assert order == [0, 0, 1, 0, 1, 2, 1, 2, 2]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=9),
    max_tokens=st.integers(92, 300),
    max_num_tokens=st.integers(1, 64),
    drafter=st.sampled_from(["none", "ngram"]),
    reuse=st.booleans(),
)
def test_any_requests_end_with_the_right_tokens(
    lengths: list[tuple[int, int]],
    max_tokens: int,
    max_num_tokens: int,
    drafter: str,
    reuse: bool,
    open_engine: Any,
    make_drafter: Any,
    llama: PreTrainedModel,
) -> None:
    requests = [Request(i, tuple(repetitive_prompt(n, n)), new) for i, (n, new) in enumerate(lengths)]
    engine = open_engine(max_tokens=max_tokens, block_reuse=reuse)
    engine.max_num_tokens = max_num_tokens
    assert outputs(finish(engine, requests, make_drafter(drafter))) == expected(llama, requests)


@pytest.mark.parametrize("loop", [orchestrator, scheduler], ids=["orchestrator", "leader"])
def test_times_are_those_of_all_steps(loop: Any, open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is taken by a clock on which drafting takes a second, a step of the target ten, and all else no time."""
    now = 0.0

    def spend(seconds: float, result: Any) -> Any:
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr("time.perf_counter", lambda: now)
    engine, drafter, times = open_engine(), NgramLookup(2), LoopTimes()
    step, propose = engine._step, drafter.propose
    monkeypatch.setattr(engine, "_step", lambda *inputs: spend(10, step(*inputs)))
    monkeypatch.setattr(drafter, "propose", lambda *asked: spend(1, propose(*asked)))
    for _ in loop.generate(engine, make_requests(2), drafter, 5, times):
        pass
    n = times.num_iterations
    assert n > 5
    assert times == LoopTimes(wall_s=11 * n, draft_time_s=n, target_time_s=10 * n, num_iterations=n)


def test_loop_left_early_holds_no_blocks_and_no_state(open_engine: Any) -> None:
    engine, drafter = open_engine(), NgramLookup(2)
    steps = scheduler.generate(engine, make_requests(9), drafter, 5)
    next(steps)
    assert drafter._histories
    steps.close()
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    assert drafter._histories == {}


def test_requests_are_checked_before_the_first_step(open_engine: Any, said: Said) -> None:
    engine = open_engine()
    with pytest.raises(SpecDecError) as raised:
        next(scheduler.generate(engine, [*make_requests(5), Request(5, (), 5)], None, 0))
    said(raised, "5")
    with pytest.raises(SpecDecError) as raised:
        next(scheduler.generate(engine, make_requests(1), NgramLookup(2), 11))
    said(raised, "10", "11")
    assert engine.step_time_s == 0


@pytest.mark.parametrize("loop", [scheduler, orchestrator])
def test_second_generation_takes_the_room_of_one_that_nobody_reads(
    open_engine: Any, llama: PreTrainedModel, loop: Any
) -> None:
    """The first goes on later, from its tokens."""
    engine = open_engine(max_tokens=64)
    requests = [Request(i, tuple(repetitive_prompt(i, 30)), 12) for i in range(2)]
    first = scheduler.generate(engine, requests[:1])
    next(first)
    assert finish(engine, requests[1:], loop=loop)[1].output_tokens == expected(llama, requests[1:])[1]
    assert [s.output_tokens for s, _ in first][-1] == expected(llama, requests[:1])[0]


@pytest.mark.parametrize("loop", [scheduler, orchestrator])
def test_engine_that_drafts_for_itself_without_room_is_an_error(
    open_engine: Any, tokenizer: Any, loop: Any, said: Said
) -> None:
    engine = open_engine(max_tokens=96)
    drafter = DraftModel(engine, len(tokenizer), use_logits=False)
    with pytest.raises(SpecDecError) as error:
        list(loop.generate(engine, [Request(0, tuple(repetitive_prompt(0, 30)), 50)], drafter, 5))
    said(error)
    assert error.value.hint is not None
    said(error)
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
