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


def test_logits_end_where_the_tokens_end() -> None:
    """Logits are kept on the CPU in float32; a copy, not a view that keeps a whole step's logits alive."""
    logits = torch.randn(4, 7, dtype=torch.bfloat16)
    for max_new_tokens in (1, 2, 3, 4, 10):
        sequence = Sequence.start(Request(0, PROMPT, max_new_tokens, keep_logits=True))
        sequence.commit(Draft(DRAFT), VerifyResult(3, 14, logits))
        torch.testing.assert_close(
            torch.stack(sequence.logits), logits[: min(max_new_tokens, 4)].float(), rtol=0, atol=0
        )
    before = [row.clone() for row in sequence.logits]
    logits.zero_()
    assert all(torch.equal(*rows) for rows in zip(sequence.logits, before, strict=True))


class Oracle:
    """Drafts what it is given: the true continuation, the same for every sequence; with wrong tokens if told so."""

    def __init__(self, output: list[int], wrong_every: int = 1000) -> None:
        self.output = [token ^ (i % wrong_every == wrong_every - 1) for i, token in enumerate(output)]

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [
            Draft(self.output[s.num_generated :][: max(min(max_draft_len, s.num_remaining - 1), 0)]) for s in sequences
        ]

    def forget(self, request_id: int) -> None: ...


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
@pytest.mark.parametrize("position", [0, 2, 4, 5])
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
