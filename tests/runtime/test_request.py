"""A commit cuts tokens, K/V, logits and counters at the same place, wherever in an accepted run that is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import eager_logits, forward, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, FinishReason, Request, Sequence, StopCheck, VerifyResult
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.loop.step import judge

PROMPT = (1, 2, 3)
DRAFT = [11, 12, 13]
DRAFT_LEN = 5
# float32 against float32: the logits are of the order of 10, and sums are taken in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
MODES = {
    "greedy": SamplingConfig(),
    "sampling": SamplingConfig(temperature=1.2, top_k=0, top_p=0.95, repetition_penalty=1.2, random_seed=3),
}


def commit(request: Request, num_accepted: int = 3, next_token: int = 14) -> tuple[Sequence, list[int]]:
    """Commit 11 12 13 14 as an engine leaves it: the accepted tokens' K/V computed, the last token's not."""
    sequence = Sequence.start(request)
    sequence.num_computed = len(sequence.tokens) + num_accepted
    new_tokens = sequence.commit(Draft(DRAFT), VerifyResult(num_accepted, next_token))
    return sequence, new_tokens


def check_cut(sequence: Sequence, new_tokens: list[int], num_new: int, finish_reason: str | None) -> None:
    """After `num_new` of 11 12 13 14, three of them draft tokens."""
    assert new_tokens == sequence.output_tokens == [11, 12, 13, 14][:num_new]
    assert sequence.finish_reason == finish_reason
    assert sequence.num_generated == num_new
    assert sequence.num_computed == min(len(PROMPT) + 3, len(PROMPT) + num_new)
    stats = sequence.stats
    assert (stats.num_steps, stats.num_spec_steps, stats.num_generated_tokens) == (1, 1, num_new)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, min(num_new, 3))
    assert stats.acceptance_histogram == [0] * min(num_new, 3) + [1]
    assert stats.accepted_per_position == [1] * min(num_new, 3)
    assert stats.per_step_accepted == [min(num_new, 3)]
    assert (stats.end_s is None) == (finish_reason is None)


def test_without_a_reason_to_end_everything_is_kept() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10))
    check_cut(sequence, new_tokens, 4, None)
    assert sequence.num_remaining == 6


@pytest.mark.parametrize("position", range(4))
def test_end_id_cuts_an_accepted_run(position: int) -> None:
    """The end id itself is kept, as Hugging Face keeps it."""
    end_ids = frozenset([99, [11, 12, 13, 14][position]])
    check_cut(*commit(Request(0, PROMPT, 10, end_ids)), position + 1, "end_id")


@pytest.mark.parametrize("position", range(4))
def test_stop_word_cuts_an_accepted_run(position: int) -> None:
    last = [11, 12, 13, 14][position]

    def stop_check(tokens: list[int], num_prompt_tokens: int) -> bool:
        assert num_prompt_tokens == 3 and len(tokens) > 3
        return tokens[-1] == last

    check_cut(*commit(Request(0, PROMPT, 10, stop_check=stop_check)), position + 1, "stop")


@pytest.mark.parametrize("max_new_tokens", range(1, 5))
def test_budget_cuts_an_accepted_run(max_new_tokens: int) -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, max_new_tokens))
    check_cut(sequence, new_tokens, max_new_tokens, "length")
    assert sequence.num_remaining == 0


def test_end_id_comes_before_stop_word_before_budget() -> None:
    def stops(tokens: list[int], num_prompt_tokens: int) -> bool:
        return tokens[-1] == 12

    for end_ids, stop_check, finish_reason in (
        (frozenset([12]), stops, "end_id"),
        (frozenset[int](), stops, "stop"),
        (frozenset[int](), None, "length"),
    ):
        sequence, new_tokens = commit(Request(0, PROMPT, 2, end_ids, stop_check))
        check_cut(sequence, new_tokens, 2, finish_reason)


def test_end_id_in_the_prompt_or_after_a_rejection_does_not_end() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10, frozenset([2, 12])), num_accepted=1, next_token=20)
    assert (new_tokens, sequence.finish_reason) == ([11, 20], None)
    assert sequence.num_computed == len(PROMPT) + 1


def test_recovered_token_is_not_counted_as_accepted() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10), num_accepted=0, next_token=20)
    assert new_tokens == [20]
    stats = sequence.stats
    assert (stats.num_accepted_draft_tokens, stats.acceptance_histogram, stats.accepted_per_position) == (0, [1], [])


def test_sequence_does_not_change_the_prompt() -> None:
    request = Request(0, PROMPT, 10)
    commit(request)
    assert request.prompt_tokens == PROMPT and Sequence.start(request).tokens == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_end_where_the_tokens_end(dtype: torch.dtype) -> None:
    """Logits are kept on the CPU in float32; a copy, not a view that keeps a whole step's logits alive."""
    logits = torch.randn(4, 7, dtype=dtype)
    for max_new_tokens in (1, 2, 3, 4, 10):
        sequence = Sequence.start(Request(0, PROMPT, max_new_tokens, keep_logits=True))
        sequence.commit(Draft(DRAFT), VerifyResult(3, 14, logits))
        torch.testing.assert_close(
            torch.stack(sequence.logits), logits[: min(max_new_tokens, 4)].float(), rtol=0, atol=0
        )
    before = [row.clone() for row in sequence.logits]
    logits.zero_()
    assert all(torch.equal(*rows) for rows in zip(sequence.logits, before, strict=True))


def test_cut_draft_keeps_its_first_tokens_and_their_distribution() -> None:
    probs = torch.rand(3, 20, dtype=torch.float64)
    for max_len in range(5):
        lookup, drawn = Draft(DRAFT).cut(max_len), Draft(DRAFT, probs).cut(max_len)
        assert lookup.tokens == drawn.tokens == DRAFT[:max_len]
        assert lookup.probs is None and drawn.probs is not None and torch.equal(drawn.probs, probs[:max_len])
    assert DRAFT == [11, 12, 13]


class Oracle:
    """Drafts what it is given: the true continuation, the same for every sequence; with wrong tokens if told so."""

    def __init__(self, output: list[int], wrong_every: int = 1000) -> None:
        self.output = [token ^ (i % wrong_every == wrong_every - 1) for i, token in enumerate(output)]

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [
            Draft(self.output[s.num_generated :][: max(min(max_draft_len, s.num_remaining - 1), 0)]) for s in sequences
        ]

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize(
    ("num_generated", "num_remaining", "max_draft_len"), [(0, 5, 4), (3, 2, 1), (4, 1, 0), (5, 0, 0)]
)
def test_draft_leaves_room_for_the_targets_own_token(
    num_generated: int, num_remaining: int, max_draft_len: int
) -> None:
    sequence = Sequence.start(Request(0, PROMPT, 5))
    sequence.tokens += [9] * num_generated
    sequence.stats.num_generated_tokens = num_generated
    assert (sequence.num_remaining, sequence.max_draft_len) == (num_remaining, max_draft_len)


def run(engine: Engine, request: Request, drafter: Any = None, max_draft_len: int = DRAFT_LEN) -> Sequence:
    *_, (sequence, _) = generate(engine, [request], drafter, max_draft_len)
    return sequence


def check_logits(model: PreTrainedModel, sequence: Sequence) -> None:
    """One row per generated token, Hugging Face's of the position before it."""
    num_prompt = len(sequence.request.prompt_tokens)
    assert len(sequence.logits) == sequence.num_generated
    expected = eager_logits(model, sequence.tokens[:-1])[num_prompt - 1 :]
    for logits in sequence.logits:
        assert (logits.shape, logits.dtype, logits.device.type) == (expected[0].shape, torch.float32, "cpu")
    torch.testing.assert_close(torch.stack(sequence.logits), expected, **TOLERANCE)


def check_kv(engine: Engine, model: PreTrainedModel, tokens: list[int], num_computed: int) -> None:
    """A finished sequence's K/V are found by one that goes on from it, up to `num_computed`, and are true."""
    again = Sequence.start(Request(99, (*tokens, 7), 5))
    assert engine.admit(again)
    assert again.num_computed == num_computed
    (logits,) = forward(engine, [again], [[8, 9]])
    expected: Tensor = eager_logits(model, [*again.tokens, 8, 9])[-3:]
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    engine.release(again)


def ending(kind: FinishReason, output: list[int], position: int) -> dict[str, Any]:
    """Settings of a request that ends with `output[position]`."""
    if kind == "end_id":
        assert output[position] not in output[:position]
        return {"max_new_tokens": 20, "end_ids": frozenset([output[position]])}
    if kind == "length":
        return {"max_new_tokens": position + 1}

    def stop_check(tokens: list[int], num_prompt_tokens: int) -> bool:
        return tokens[num_prompt_tokens:] == output[: position + 1]

    check: StopCheck = stop_check
    return {"max_new_tokens": 20, "stop_check": check}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("position", range(DRAFT_LEN + 1))
@pytest.mark.parametrize("kind", ["end_id", "stop", "length"])
@pytest.mark.parametrize("mode", MODES)
def test_everything_ends_together_inside_an_accepted_run(
    mode: str, kind: FinishReason, position: int, llama_engine_dir: Path, llama: PreTrainedModel
) -> None:
    """The target accepts all of a draft of 5 and adds a token; the request ends with each of these 6 tokens.

    As in plain generation, which takes a step for each token and cannot cut.
    """
    prompt, sampling = repetitive_prompt(2, 10), MODES[mode]
    output = run(Engine.open(llama_engine_dir), Request(0, tuple(prompt), 20, sampling=sampling)).output_tokens
    request = Request(0, tuple(prompt), sampling=sampling, keep_logits=True, **ending(kind, output, position))

    plain = run(Engine.open(llama_engine_dir), request)
    assert (plain.output_tokens, plain.finish_reason) == (output[: position + 1], kind)

    engine, sequence = Engine.open(llama_engine_dir), Sequence.start(request)
    assert engine.admit(sequence)
    (draft,) = Oracle(output).propose([sequence], DRAFT_LEN)
    (verdict,) = judge(engine, [sequence], [draft])
    assert verdict.num_accepted == len(draft.tokens) == (position if kind == "length" else DRAFT_LEN)
    assert sequence.commit(draft, verdict) == plain.output_tokens
    assert (sequence.tokens, sequence.finish_reason) == (plain.tokens, plain.finish_reason)

    num_accepted = min(position + 1, len(draft.tokens))
    assert sequence.stats.num_generated_tokens == plain.stats.num_generated_tokens == position + 1
    assert sequence.stats.num_accepted_draft_tokens == num_accepted
    assert sequence.stats.acceptance_histogram == ([0] * num_accepted + [1] if draft.tokens else [])
    assert sequence.stats.end_s is not None
    check_logits(llama, sequence)
    torch.testing.assert_close(torch.stack(sequence.logits), torch.stack(plain.logits), **TOLERANCE)

    assert sequence.num_computed == len(prompt) + num_accepted
    engine.release(sequence)
    engine._blocks.check_integrity()
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    check_kv(engine, llama, plain.tokens, len(prompt) + num_accepted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["none", "ngram", "right", "often wrong"])
def test_kept_logits_equal_hf(mode: str, drafter: str, llama_engine_dir: Path, llama: PreTrainedModel) -> None:
    """The target's own, before penalties and cuts, whoever drafted; nothing of what was rejected."""
    for max_new_tokens in (1, 13, 24):
        request = Request(0, tuple(repetitive_prompt(2, 10)), max_new_tokens, sampling=MODES[mode], keep_logits=True)
        plain = run(Engine.open(llama_engine_dir), request)
        drafters = {
            "none": None,
            "ngram": NgramLookup(2),
            "right": Oracle(plain.output_tokens),
            "often wrong": Oracle(plain.output_tokens, wrong_every=3),
        }
        sequence = run(Engine.open(llama_engine_dir), request, drafters[drafter])
        assert sequence.output_tokens == plain.output_tokens
        check_logits(llama, sequence)
    expected_steps = {"none": 24, "right": 4, "often wrong": 8}
    assert sequence.stats.num_steps == expected_steps.get(drafter, sequence.stats.num_steps)


def test_logits_are_not_kept_unless_asked_for(llama_engine_dir: Path) -> None:
    engine, request = Engine.open(llama_engine_dir), Request(0, tuple(repetitive_prompt(2, 10)), 6)
    assert run(engine, request).logits == []
    sequence = Sequence.start(request)
    assert engine.admit(sequence)
    (verdict,) = judge(engine, [sequence], [Draft([5, 6])])
    assert verdict.logits is None
