"""Drafts of a parallel draft model (PARD): one pass over the sequence and mask tokens behind it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Recorded
from heads import some
from sentences import Said
from strength import draws
from tiny import hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel

from runtime.core.request import Request, Sequence
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState
from runtime.drafters.parallel import ParallelDraftModel
from runtime.drafters.specs import PardDrafter
from specdec_cli import LLM, KVCacheConfig, SpecDecError

MASK, DRAFT_LEN, NUM_NEW_TOKENS = 31, 5, 16
PROMPTS = [tuple(repetitive_prompt(i, 6 + 5 * i, vocab_size=20)) for i in range(4)]
FORMS = ("gemma3", "qwen3.5")
"""The first has a window of 8, the other states, which masks must not change."""


def parallel_drafts(model: PreTrainedModel, tokens: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Greedy draft in float64 by brute force, and the smallest gap between its tokens' logits and the next ones."""
    with torch.no_grad():
        logits = model(torch.tensor([[*tokens, *[MASK] * (num_tokens - 1)]]), use_cache=False).logits[0, -num_tokens:]
    best = logits.topk(2).values
    return logits.argmax(-1).tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_the_formulas(form: str, make_engine_dir: Callable[..., Path]) -> None:
    """The cache is small: sequences are preempted, and prompts are found again the second time."""
    target, draft = make_model("llama"), make_model(form, pard_token=MASK)
    draft_dir = make_engine_dir(draft, max_seq_len=160)
    with LLM(make_engine_dir(target), mode="leader", kv_cache=KVCacheConfig(max_tokens=124)) as llm:
        session = llm.session(PardDrafter(draft_dir, DRAFT_LEN), "fixed")
        assert session.opened is not None
        recorded = Recorded(session.opened.drafter)
        session = replace(session, opened=replace(session.opened, drafter=recorded))
        for _ in range(2):
            sequences = session.run([Request(i, p, NUM_NEW_TOKENS) for i, p in enumerate(PROMPTS[1:])]).sequences
            assert [s.output_tokens for s in sequences] == [hf_greedy(target, p, NUM_NEW_TOKENS) for p in PROMPTS[1:]]
    draft, num_decided = draft.double(), 0
    for tokens, drafted in some(recorded.drafted):
        expected, gap = parallel_drafts(draft, tokens, len(drafted))
        assert drafted == expected or gap < 1e-3, tokens
        num_decided += len(drafted) if gap >= 1e-3 else 0
    assert num_decided >= draws(80, 25)


def test_a_draft_of_one_pass_ends_where_it_is_unsure(make_engine_dir: Callable[..., Path]) -> None:
    """And the model computes no more than a pass for a draft, however long that is."""
    target, draft = make_model("llama"), make_model("llama", num_hidden_layers=1, pard_token=MASK)
    draft_dir = make_engine_dir(draft, max_seq_len=160)
    with LLM(make_engine_dir(target), mode="leader") as llm:
        opened = llm.session(PardDrafter(draft_dir, DRAFT_LEN), "fixed").opened
        assert opened is not None and isinstance(opened.draft_model, ParallelDraftModel)
        model, sure, passes = opened.draft_model, list[float](), list[int]()
        step = model.engine.step
        model.engine.step = lambda rows: passes.append(len(rows)) or step(rows)  # type: ignore[method-assign, func-returns-value]

        class Told(ConfidenceStop):
            def draft_token(self, draft_state: DraftState, logits: Tensor, sure_of: float | None = None) -> None:
                sure.append(float(logits.softmax(-1).max()))
                super().draft_token(draft_state, logits, sure_of)

        model.confidence_stop = Told(lambda size, context, length: 1 + 0.3 * length, lambda *_: 0.1, at_once=True)
        sequences = [Sequence.start(Request(i, prompt, NUM_NEW_TOKENS)) for i, prompt in enumerate(PROMPTS)]
        drafts = model.propose(sequences, DRAFT_LEN)
        assert passes == [4]
        assert len({len(one.tokens) for one in drafts}) > 1 and len(sure) >= sum(len(one.tokens) for one in drafts)
        assert all(
            one.num_computed == len(s.tokens) for one, s in zip(model._draft_sequences.values(), sequences, strict=True)
        )
        for sequence in sequences:
            model.forget(sequence.request.id)


# Name -> (config of the draft model, its drafts' length, what is said).
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no mask token": ({}, 4, "config.json has no `pard_token`, the mask token that PARD drafts by"),
    "a mask outside": ({"pard_token": 32}, 4, "`pard_token` is outside the draft model's vocabulary of 32: 32"),
    "a mask that is no id": ({"pard_token": "<mask>"}, 4, "must be a whole number: '<mask>'"),
    "another vocabulary": ({"pard_token": 31, "vocab_size": 40}, 4, "different vocabularies"),
    "longer drafts": (
        {"pard_token": 31},
        8,
        "was built for drafts of at most 6 tokens, and the drafter's have up to 8",
    ),
}


def test_what_cannot_draft_in_parallel_is_one_sentence(make_engine_dir: Callable[..., Path], said: Said) -> None:
    with LLM(make_engine_dir(make_model("llama"), max_draft_len=8)) as llm:
        for config, draft_len, words in BAD.values():
            draft_dir = make_engine_dir(make_model("llama", num_hidden_layers=1, **config), max_draft_len=5)
            with pytest.raises(SpecDecError) as error:
                llm.session(PardDrafter(draft_dir, draft_len))
            assert words in error.value.message and "\n" not in error.value.message and error.value.hint
            if error.value.code is not None:
                said(error)
