"""`echo` and `logprobs` of a prompt are Hugging Face's, however they are computed."""

from typing import Any

import pytest
import torch
from serving_models import PROMPT, MakeServed, Served
from tiny import eager_logits
from transformers import PreTrainedModel

from runtime.drafters.specs import NgramDrafter

TEXTS = [
    PROMPT,
    "Once upon a time there was a little dog. The little dog had a red ball.",
    "the ball the ball the ball",
]


def scored(served: Served, prompt: Any, **body: Any) -> dict[str, Any]:
    found = served.complete(**({"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1} | body))
    logprobs: dict[str, Any] = found["choices"][0]["logprobs"]
    return logprobs


def hugging_face(llama: PreTrainedModel, tokens: list[int]) -> list[float]:
    logprobs = torch.log_softmax(eager_logits(llama, tokens).double(), dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("text", TEXTS)
def test_log_probabilities_of_a_prompt_are_hugging_faces(served: Served, llama: PreTrainedModel, text: str) -> None:
    tokens = served.llm.encode(text)[0]
    logprobs = scored(served, text)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(tokens)] == pytest.approx(hugging_face(llama, tokens), abs=1e-4)
    assert len(logprobs["token_logprobs"]) == len(tokens) + 1  # and the generated one
    best = torch.log_softmax(eager_logits(llama, tokens), dim=-1).max(dim=-1).values[:-1].tolist()
    top = [max(one.values()) for one in logprobs["top_logprobs"][1 : len(tokens)]]
    assert top == pytest.approx(best, abs=1e-4)
    assert "".join(logprobs["tokens"][: len(tokens)]) == text
    assert logprobs["text_offset"][: len(tokens)] == [len("".join(logprobs["tokens"][:i])) for i in range(len(tokens))]


def test_prompts_found_in_the_cache_or_not_in_pieces_or_not_have_the_same(
    make_served: MakeServed, served: Served, llama: PreTrainedModel
) -> None:
    """A, B, A: what was computed before leaves no trace, neither does speculation, nor how much is computed at once."""
    small = make_served(NgramDrafter(10, 2))
    small.llm.engine.max_num_tokens = 7
    first = [scored(served, text) for text in TEXTS]
    again = [scored(served, text) for text in TEXTS]
    without = [scored(served, text, speculative=False) for text in TEXTS]
    in_pieces = [scored(small, text) for text in TEXTS]
    for found in (again, without, in_pieces):
        for one, other in zip(found, first, strict=True):
            assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-5)


def test_nothing_but_the_prompt_is_scored_without_output(served: Served) -> None:
    logprobs = scored(served, PROMPT, max_tokens=0)
    assert len(logprobs["token_logprobs"]) == len(served.llm.encode(PROMPT)[0])
