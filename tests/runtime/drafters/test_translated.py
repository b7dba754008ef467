"""Drafts of a model with another tokenizer: what the model reads is the sequence's text as its tokenizer writes it, and
what it drafts comes in the target's tokens. Compared with whole texts, written by the tokenizers themselves."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_fallback, byte_level
from tiny import make_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from runtime.checkpoint.resolve import resolve_model
from runtime.core.params import SamplingParams
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.specs import DraftTargetDrafter
from runtime.drafters.translated import TranslatedDraftModel
from runtime.llm import LLM
from runtime.util.errors import SpecDecError, SpecDecWarning

TEXT = "the dog ate a bad dog. 🙂 be the dog,\n  the good  dog é€ ate; the dogdog the hot bead\nabba"
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {"bytes": byte_level, "SentencePiece": byte_fallback}


class Knowing:
    """Drafts the text, in its tokenizer's tokens, as far as it has come; keeps what it has read."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        limits = SimpleNamespace(build_config=SimpleNamespace(max_request_len=10_000))
        self.engine: Any = SimpleNamespace(config=limits, num_cache_tokens=10_000)
        self.tokens: list[int] = tokenizer(text)["input_ids"]
        self.read: list[list[int]] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.read += [list(sequence.tokens) for sequence in sequences]
        known = [sequence.tokens == self.tokens[: len(sequence.tokens)] for sequence in sequences]
        there = [self.tokens[len(s.tokens) :][:max_draft_len] for s in sequences]
        return [Draft(tokens if one else []) for tokens, one in zip(there, known, strict=True)]

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize(("target", "draft"), itertools.product(TOKENIZERS, repeat=2))
def test_texts_are_those_of_the_tokenizers(target: str, draft: str) -> None:
    tokenizer, other = TOKENIZERS[target](), TOKENIZERS[draft]()
    own = tokenizer(TEXT)["input_ids"]
    knowing = Knowing(other, TEXT)
    drafter = TranslatedDraftModel(knowing, other, tokenizer)  # type: ignore[arg-type]
    request = Request(0, tuple(own[:3]), 1000)
    num_right = num_drafted = 0
    for i in range(3, len(own)):
        (draft_of_it,) = drafter.propose([Sequence(request, own[:i])], 4)
        whole = tokenizer.decode(own[:i])
        if "\ufffd" not in whole:
            assert knowing.read[-1] == other(whole)["input_ids"], whole
        num_drafted += len(draft_of_it.tokens)
        num_right += next((n for n, (a, b) in enumerate(zip(draft_of_it.tokens, own[i:], strict=False)) if a != b),
                          len(draft_of_it.tokens))  # fmt: skip
    # The last token of a draft may be the beginning of a longer one, and one in the middle of a character drafts none.
    assert num_drafted > len(own) and num_right > 0.85 * num_drafted, (num_right, num_drafted)


def in_other_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    """The model and its tokenizer with their ids mixed, saved."""
    size = model.config.vocab_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    mixed = copy.deepcopy(model)
    for weight in {mixed.get_input_embeddings().weight, mixed.get_output_embeddings().weight}:  # which may be one
        weight.data = torch.empty_like(weight).index_copy(0, order, weight.detach())
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {token: int(order[i]) for token, i in state["model"]["vocab"].items()}
    state["added_tokens"] = [one | {"id": int(order[one["id"]])} for one in state["added_tokens"]]
    names = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token, "bos_token": tokenizer.bos_token}
    mixed.generation_config.eos_token_id = mixed.config.eos_token_id = None
    mixed.save_pretrained(directory)
    made = Tokenizer.from_str(json.dumps(state))
    PreTrainedTokenizerFast(tokenizer_object=made, **{k: v for k, v in names.items() if v}).save_pretrained(directory)
    return directory


PROMPTS = ["How to draw a plot? TL;DR:", "def area(width, height):\n    return", "The mean of an array is"]


@pytest.fixture(scope="module")
def mixed_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shipped = resolve_model("demo-draft")
    model = AutoModelForCausalLM.from_pretrained(shipped)
    return in_other_ids(model, AutoTokenizer.from_pretrained(shipped), tmp_path_factory.mktemp("mixed") / "model")


def test_a_draft_model_in_other_ids_drafts_what_it_drafts_in_the_targets(mixed_draft: Path) -> None:
    """The shipped draft model, whose output is text; greedy, and with a seed."""
    with LLM("demo", compiler="none") as llm:
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=16, temperature=temperature, seed=3)
            plain = [one.token_ids for one in llm.generate(PROMPTS, params)]
            accepted = []
            for model in (mixed_draft,) if temperature else (mixed_draft, "demo-draft"):  # its drafts are greedy
                outputs = llm.generate(PROMPTS, params, drafter=DraftTargetDrafter(model, 4), draft_len_mode="fixed")
                assert [one.token_ids for one in outputs] == plain
                accepted.append(sum(one.stats.num_accepted_draft_tokens for one in outputs))
            assert accepted[0] >= 0.75 * accepted[-1] > 0
            assert temperature or accepted[-1] > 10


def test_random_texts_and_refusals(llama_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Outputs of random weights are no text, and what is drafted of them is wrong or nothing."""
    draft = in_other_ids(make_model("llama", vocab_size=len(tokenizer)), tokenizer, tmp_path / "draft")
    params = [SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.9, seed=1)]
    with LLM(llama_dir, compiler="none", max_seq_len=80) as llm:
        prompts = ["the little dog", "once upon a time there was a ball"]
        plain = [one.token_ids for one in llm.generate(prompts, params)]
        with pytest.warns(SpecDecWarning, match="another tokenizer .*: drafts are re-tokenized"):
            outputs = llm.generate(prompts, params, drafter=DraftTargetDrafter(draft, 4), draft_len_mode="fixed")
        assert [one.token_ids for one in outputs] == plain
        assert sum(one.stats.num_draft_tokens for one in outputs) > 0
        with pytest.raises(SpecDecError, match="drafts by probabilities need the target's own") as error:
            llm.generate(prompts, params, drafter=DraftTargetDrafter(draft, 4, use_logits=True))
        assert error.value.hint and "\n" not in error.value.message
