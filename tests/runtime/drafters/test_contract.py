"""The contract that every drafter of the registry keeps, whatever it drafts.

- lossless: greedy outputs are Hugging Face's, sampled ones are those without a drafter, in both loops
- roll-back: so they are where sequences are preempted, prompts are computed in chunks, and K/V are found again
- budget: a draft is no longer than was asked for, and proposing leaves the sequences as they are
- statistics: drafted and accepted tokens are counted as they are seen from outside
- receipts: what was generated with drafts is exact by its receipts, as an engine checks it that never drafts
- close: of a request that ended, failed or was left nothing is kept, and no block is held

What a drafter drafts is tested by its own module: against brute force, a formula or transformers' own class.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import drafting
import pytest
import torch
from heads import copy_with_mtp, make_assistant, make_block, make_eagle, save_block, save_eagle
from lookups import MAKE_DRAFTER
from tiny import hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.checkpoint.config import SelfDraft
from runtime.core.params import Mode, SamplingConfig
from runtime.core.request import Draft, Request
from runtime.core.request import Sequence as RequestSequence
from runtime.drafters.opened import OpenDrafter
from runtime.drafters.protocol import Drafter
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import (
    DRAFTERS,
    AnswerDrafter,
    AssistantDrafter,
    ChainDrafter,
    DFlashDrafter,
    DraftTargetDrafter,
    EagleDrafter,
    GrammarDrafter,
    InlineDrafter,
    MtpDrafter,
    NgramDrafter,
    PardDrafter,
    SelfDrafter,
    SuffixDrafter,
    lookups,
)
from runtime.loop.session import Session
from runtime.proof.receipts import Read, receipt_of
from specdec_cli import LLM, KVCacheConfig, SpecDecError

FIRST_ID = 7000
"""Larger than any token, so that what is kept of a request is found by its number."""
NUM_NEW_TOKENS = 12
SAMPLED = SamplingConfig(temperature=0.9, top_k=0, top_p=0.95, random_seed=5)
PENALISED = SamplingConfig(top_k=10, repetition_penalty=1.3, no_repeat_ngram_size=3, frequency_penalty=0.1)
EAGLE_READS, BLOCK_READS = (0, 1, 1), (1, 2)
COMPILED: dict[str, Any] = {"compiler": "aot"}
"""The target that most cases share: its steps take a fifth of the time."""
DENSE = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}


@dataclass(frozen=True)
class Made:
    """A target, the directory of its engine, and a drafter for it: what `LLM.session` takes."""

    target: PreTrainedModel
    engine_dir: Path
    drafter: Any


Make = Callable[[Callable[..., Path], Path], Made]
"""(make_engine_dir, an empty directory) -> what a case needs."""


@cache
def llama() -> PreTrainedModel:
    return make_model("llama")


def made_by(drafter: Any, **build: Any) -> Make:
    def make(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
        target = llama()
        return Made(target, make_engine_dir(target, **COMPILED, **build), drafter)

    return make


def with_draft_model(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    target, other = llama(), make_model("llama", num_hidden_layers=1)
    draft_dir = make_engine_dir(other, max_draft_len=0, max_seq_len=160, speculative_decoding_mode="none")
    return Made(target, make_engine_dir(target, **COMPILED), DraftTargetDrafter(draft_dir, 4))


def with_pard(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    target, other = llama(), make_model("llama", num_hidden_layers=1, pard_token=31)
    return Made(target, make_engine_dir(target, **COMPILED), PardDrafter(make_engine_dir(other, max_seq_len=160), 4))


def with_pard_in_a_chain(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    made = with_pard(make_engine_dir, directory)
    return replace(made, drafter=ChainDrafter([NgramDrafter(4), made.drafter]))


def with_answers_before_others(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    made = with_draft_model(make_engine_dir, directory)
    return replace(made, drafter=ChainDrafter([AnswerDrafter(4), SuffixDrafter(3), made.drafter]))


def with_eagle(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    target = llama()
    head = save_eagle(make_eagle(target, states=EAGLE_READS, draft_vocab=20), directory, "speculators")
    return Made(target, make_engine_dir(target, hidden_states=EAGLE_READS), EagleDrafter(head, 4))


def with_block(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    target = llama()
    head = save_block(make_block(target, states=BLOCK_READS), directory, "z-lab", num_target_layers=2)
    return Made(target, make_engine_dir(target, hidden_states=BLOCK_READS, head_dir=head), DFlashDrafter(head, 4))


def with_mtp(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    target = llama()
    target.save_pretrained(directory / "model")
    head = copy_with_mtp(directory / "model", directory / "head")
    return Made(target, make_engine_dir(target, hidden_states=(2,)), MtpDrafter(head, 4))


def with_assistant(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    kinds = ["sliding_attention", "full_attention"]
    target = make_model("gemma4-moe", num_hidden_layers=2, layer_types=kinds, **DENSE)
    head = make_assistant(target, directory, num_centroids=8)
    return Made(target, make_engine_dir(target, hidden_states=(2,)), AssistantDrafter(head, 4))


def with_head_in_a_chain(make_engine_dir: Callable[..., Path], directory: Path) -> Made:
    made = with_eagle(make_engine_dir, directory)
    return replace(made, drafter=ChainDrafter([NgramDrafter(4), SuffixDrafter(3), made.drafter]))


LOOKUPS = ("suffix, small pool", "adaptive, public")
"""Settings that change what a lookup keeps of its requests. What they change in its drafts has tests of its own."""
WITH_COPY: dict[str, Any] = {"self_draft": SelfDraft("int4")}
CASES: dict[str, Make] = {
    **{spec.description.name: made_by(spec()) for spec in lookups()},
    **{f"lookup: {name}": made_by(MAKE_DRAFTER[name]) for name in LOOKUPS},
    "grammar": made_by(GrammarDrafter(4)),
    "inline": made_by(InlineDrafter(lambda tokens, most: tokens[-3:][:most])),
    "draft-target": with_draft_model,
    "pard": with_pard,
    "self": made_by(SelfDrafter(4), **WITH_COPY),
    "eagle": with_eagle,
    "dflash": with_block,
    "mtp": with_mtp,
    "assistant": with_assistant,
    "answers": made_by(AnswerDrafter(4)),
    "answers before others": with_answers_before_others,
    "chain of lookups": made_by(ChainDrafter([NgramDrafter(4), SuffixDrafter(5)])),
    "chain with a copy": made_by(ChainDrafter([NgramDrafter(4), SelfDrafter(4)]), **WITH_COPY),
    "chain with a parallel draft model": with_pard_in_a_chain,
    "chain with a head": with_head_in_a_chain,
}
MODELS = [name for name, make in CASES.items() if not name.startswith("lookup: ")]


def test_every_drafter_of_the_registry_has_a_case() -> None:
    assert DRAFTERS.keys() - {"custom"} <= CASES.keys()


@pytest.fixture(scope="module")
def make(make_engine_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """`make(case)`: the same each time, because a case comes again in each of the tests."""
    return cache(lambda case: CASES[case](make_engine_dir, tmp_path_factory.mktemp("head")))


@pytest.fixture
def made(request: pytest.FixtureRequest, make: Callable[[str], Made]) -> Made:
    return make(request.param)


def on(cases: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("made", cases, indirect=True)


class Watch:
    """Passes proposals on; keeps what they were for, and checks that nothing else came of them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.seen: list[tuple[int, list[int], Draft]] = []
        self.forgotten = set[int]()
        self.fails_at: int | None = None

    def propose(self, sequences: list[RequestSequence], max_draft_len: int) -> list[Draft]:
        if self.fails_at is not None and len(self.seen) >= self.fails_at:
            raise SpecDecError("no draft today")
        before = [(list(s.tokens), s.num_computed, s.stats.num_steps) for s in sequences]
        drafts = self.drafter.propose(sequences, max_draft_len)
        assert [(s.tokens, s.num_computed, s.stats.num_steps) for s in sequences] == before
        assert len(drafts) == len(sequences)
        for sequence, draft in zip(sequences, drafts, strict=True):
            assert len(draft.tokens) <= max_draft_len
            self.seen.append((sequence.request.id, list(sequence.tokens), draft))
        return drafts

    def forget(self, request_id: int) -> None:
        self.forgotten.add(request_id)
        self.drafter.forget(request_id)


@contextmanager
def opened(made: Made, mode: Mode, **options: Any) -> Iterator[tuple[LLM, Session, Watch]]:
    with LLM(made.engine_dir, mode=mode, **options) as llm:
        is_bare = not isinstance(made.drafter, DrafterSpec | ChainDrafter)
        session = llm.session(None if is_bare else made.drafter, "fixed")
        inside = OpenDrafter(made.drafter(), 4) if is_bare else session.opened
        assert inside is not None
        watch = Watch(inside.drafter)
        yield llm, replace(session, opened=replace(inside, drafter=watch)), watch


def check_idle(session: Session, watch: Watch) -> None:
    """No engine holds a block, and nothing that the drafter is made of knows a request by its number."""
    for engine in (session.engine, session.draft_engine):
        if engine is not None:
            drafting.check_idle(engine)
    kept, todo = list[object](), [watch.drafter]
    while todo:
        one = todo.pop()
        if any(one is other for other in kept):
            continue
        kept.append(one)
        for value in getattr(one, "__dict__", {}).values():
            for part in value if isinstance(value, list | tuple) else [value]:
                if type(part).__module__.startswith("runtime.drafters"):
                    todo.append(part)
                elif isinstance(part, dict | set):
                    assert not any(isinstance(key, int) and key >= FIRST_ID for key in part), (type(one), part)


def check_counts(sequences: list[RequestSequence], watch: Watch) -> None:
    """Tokens of a draft were accepted as far as the output goes on with them; the last draft may be cut by its end."""
    drafts: dict[int, dict[int, list[int]]] = {}
    for request_id, tokens, draft in watch.seen:
        drafts.setdefault(request_id, {})[len(tokens)] = draft.tokens
    for sequence in sequences:
        stats, place = sequence.stats, len(sequence.request.prompt_tokens)
        for num_drafted, num_accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True):
            draft = drafts[sequence.request.id].get(place, [])[:num_drafted]
            assert len(draft) == num_drafted
            rest = sequence.tokens[place:]
            num_right = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            assert num_accepted == min(num_right, len(rest))
            place += min(num_accepted + 1, len(rest))
        assert place == len(sequence.tokens)
        assert stats.num_draft_tokens == sum(stats.per_step_drafted)
        assert stats.num_accepted_draft_tokens == sum(stats.per_step_accepted)
        assert stats.num_generated_tokens == len(sequence.output_tokens)
        assert sum(stats.acceptance_histogram) == stats.num_spec_steps


SMALL: dict[str, Any] = {"kv_cache": KVCacheConfig(max_tokens=124), "max_num_tokens": 8}
"""Room for the longest request, or two or three of the others; prompts are computed eight tokens at a time."""


@cache
def requests_of(target: PreTrainedModel) -> tuple[list[Request], list[list[int]]]:
    """Requests that end each in another way, and Hugging Face's outputs."""
    prompts = [repetitive_prompt(i, 6 + 5 * i, vocab_size=20) for i in range(5)]
    plain = [hf_greedy(target, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    end_id, word = plain[1][5], plain[2][9:11]

    def stops(tokens: list[int], num_prompt_tokens: int) -> bool:
        return len(tokens) - num_prompt_tokens >= 2 and tokens[-2:] == word

    by_word = next(plain[2][: i + 2] for i in range(NUM_NEW_TOKENS - 1) if plain[2][i : i + 2] == word)
    long_prompt = repetitive_prompt(3, 90, vocab_size=20)
    endings: list[tuple[list[int], dict[str, Any], list[int]]] = [
        (prompts[0], {}, plain[0]),
        (prompts[1], {"end_ids": frozenset([end_id])}, hf_greedy(target, prompts[1], NUM_NEW_TOKENS, end_id)),
        (prompts[2], {"stop_check": stops}, by_word),
        (prompts[3], {"max_new_tokens": 1}, plain[3][:1]),
        (prompts[4], {"max_new_tokens": 7}, plain[4][:7]),
        (long_prompt, {}, hf_greedy(target, long_prompt, NUM_NEW_TOKENS)),
    ]
    requests = [
        Request(FIRST_ID + i, tuple(prompt), **({"max_new_tokens": NUM_NEW_TOKENS} | how))
        for i, (prompt, how, _) in enumerate(endings)
    ]
    return requests, [output for _, _, output in endings]


@pytest.mark.parametrize(
    ("made", "mode"),
    [
        *((case, "leader") for case in CASES),
        *((case, "orchestrator") for case in ("self", "eagle")),
    ],
    indirect=["made"],
)
def test_greedy_output_is_hugging_faces(made: Made, mode: Mode) -> None:
    with opened(made, mode, **(SMALL if mode == "leader" else {})) as (_, session, watch):
        requests, expected = requests_of(made.target)
        num_drafted = 0
        for first in (0, 4):  # the second time, prompts are found in the cache
            watch.seen.clear()
            watch.forgotten.clear()
            sequences = session.run(requests[first:]).sequences
            assert [sequence.output_tokens for sequence in sequences] == expected[first:]
            check_counts(sequences, watch)
            assert watch.forgotten == {request.id for request in requests[first:]}
            check_idle(session, watch)
            num_drafted += sum(sequence.stats.num_draft_tokens for sequence in sequences)
        assert (num_drafted > 0) == (not isinstance(made.drafter, GrammarDrafter)), "which drafts what is forced"


@pytest.mark.one_in(2)
@on(MODELS)
def test_sampled_texts_are_those_without_a_drafter(made: Made) -> None:
    prompts = [tuple(repetitive_prompt(i, 6 + 5 * i, vocab_size=20)) for i in range(2)]
    requests = [
        Request(FIRST_ID + i, prompt, 12, sampling=sampling)
        for i, (prompt, sampling) in enumerate((p, s) for p in prompts for s in (SAMPLED, PENALISED))
    ]
    with opened(made, "leader") as (llm, session, watch):
        drafted = session.run(requests).sequences
        llm.engine.clear_cache()
        plain = session.run(requests, speculate=False).sequences
        assert [one.output_tokens for one in drafted] == [one.output_tokens for one in plain]
        check_counts(drafted, watch)


IN_A_MODE = pytest.mark.parametrize(
    ("made", "mode"), [(case, ("orchestrator", "leader")[i % 2]) for i, case in enumerate(MODELS)], indirect=["made"]
)


@pytest.mark.one_in(6)
@IN_A_MODE
def test_receipts_are_exact(made: Made, mode: Mode, tmp_path: Path) -> None:
    """The answers have `n`, penalties and end ids, in batches, in a small cache where prompts are found again; the
    second engine finds them on disk.
    """
    long_prompt = tuple(repetitive_prompt(3, 40, vocab_size=20))
    requests: list[Request] = []
    for prompt, sampling in ((long_prompt, PENALISED), (long_prompt[:19], SAMPLED)):
        template = Request(0, prompt, 12, frozenset([3]), sampling=sampling)
        requests += [template.with_prompt(FIRST_ID + len(requests) + i, prompt, i) for i in range(2)]
    sequences: list[RequestSequence] = []
    cache = KVCacheConfig(max_tokens=124, disk_dir=tmp_path)
    for asked in (requests, requests[::-1]):
        with opened(made, mode, **SMALL | {"kv_cache": cache}) as (llm, session, _):
            sequences += session.run(asked).sequences
            reads = [Read(str(i), receipt_of(one, llm.fingerprint)) for i, one in enumerate(sequences)]
            num_on_disk = llm.engine.prompt_tokens.num_on_disk
    assert num_on_disk > 0 and any(one.stats.num_reused_tokens for one in sequences)
    with LLM(made.engine_dir) as alone:
        findings = list(alone.checker("tokens").check(reads))
    assert [one.verdict for one in findings] == ["exact"] * 8, [one for one in findings if not one.passed]


@pytest.mark.one_in(3)
@IN_A_MODE
def test_what_is_left_or_fails_leaves_nothing(made: Made, mode: Mode) -> None:
    """And the session goes on; closed, it says so."""
    requests, expected = requests_of(made.target)
    with opened(made, mode) as (llm, session, watch):
        steps = session.steps(requests)
        for _ in range(9):
            next(steps)
        steps.close()
        check_idle(session, watch)
        watch.fails_at = len(watch.seen) + 4
        with pytest.raises(SpecDecError, match="no draft today"):
            session.run(requests)
        check_idle(session, watch)
        watch.fails_at = None
        sequences = session.run(requests).sequences
        assert [sequence.output_tokens for sequence in sequences] == expected
        llm.close()
        with pytest.raises(SpecDecError, match="closed"):
            session.run(requests)


@on(["pard", "self", "dflash", "mtp", "assistant"])  # an EAGLE head and a draft model have a test of their own
def test_drafts_that_are_never_sent_change_no_later_draft(made: Made) -> None:
    """Every third step has its draft, another has somebody else's, and one none: it drafts what it drafts in turn."""
    requests, expected = (one[::2] for one in requests_of(made.target))
    with opened(made, "leader") as (llm, session, watch):
        session.run(requests)
        in_turn = {tuple(tokens): draft.tokens for _, tokens, draft in watch.seen}
        llm.engine.clear_cache()
        number, recorded = 0, drafting.Recorded(watch.drafter)

        class Alternating:
            def propose(self, sequences: list[RequestSequence], max_draft_len: int) -> list[Draft]:
                nonlocal number
                number += 1
                if number % 3 == 0:
                    return recorded.propose(sequences, max_draft_len)
                return [Draft([7, 9, 7][: s.max_draft_len] if number % 3 == 1 else []) for s in sequences]

            def forget(self, request_id: int) -> None:
                recorded.forget(request_id)

        watch.drafter = Alternating()
        assert [sequence.output_tokens for sequence in session.run(requests).sequences] == expected
        watch.drafter = recorded.drafter
        check_idle(session, watch)
    pairs = [(draft, in_turn.get(tuple(tokens), [])) for tokens, draft in recorded.drafted]
    of_one_length = [(draft, other) for draft, other in pairs if len(draft) == len(other)]
    assert len(of_one_length) > 1 and all(draft == other for draft, other in of_one_length)


@on(["draft-target", "pard", "self", "eagle", "dflash", "mtp", "assistant"])
def test_probabilities_are_distributions_of_what_was_drawn(made: Made) -> None:
    made = replace(made, drafter=replace(made.drafter, use_logits=True))
    requests = [Request(FIRST_ID + i, tuple(repetitive_prompt(i, 9, 20)), 20, sampling=SAMPLED) for i in range(2)]
    with opened(made, "leader") as (_, session, watch):
        session.run(requests)
        drafts = [draft for _, _, draft in watch.seen if draft.tokens]
        assert sum(len(draft.tokens) for draft in drafts) > 20
        for draft in drafts:
            assert draft.probs is not None and draft.probs.shape == (len(draft.tokens), 32)
            torch.testing.assert_close(draft.probs.sum(1), torch.ones(len(draft.tokens)).double())
            assert draft.probs.gather(1, torch.tensor(draft.tokens)[:, None]).min() > 0
