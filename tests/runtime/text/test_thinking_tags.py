"""Thinking as budgets count it is what the parser of outputs reports as reasoning, in every format."""

import random

import byte_tokenizers
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from runtime.core.thinking_budget import ThinkingBudget
from runtime.text.call_formats import REASONING_FORMATS, ReasoningFormat, named_tool_format
from runtime.text.parser import OutputForm, OutputParser, joined
from runtime.text.text import TextStream
from runtime.text.thinking_tags import thinking_of
from runtime.text.token_text import special_token_ids

ANSWERS = {"gpt_oss": "final<|message|>So"}


def made(form: ReasoningFormat, *, has_tokens: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with the format's tags as special tokens or as texts."""
    backend = Tokenizer.from_str(byte_tokenizers.byte_level().backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    if has_tokens:
        words = [tag.removesuffix("thought\n") for tag in (form.open, *form.closes) if "analysis" not in tag]
        words += ["<|message|>"] * (form.name == "gpt_oss")
        tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    return tokenizer


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("form", REASONING_FORMATS, ids=lambda form: form.name)
def test_tokens_within_the_budget_are_the_parsers_reasoning(form: ReasoningFormat, has_tokens: bool) -> None:
    """Random thoughts, some of which look like tags, up to the forced end; then an answer, which is content."""
    tokenizer = made(form, has_tokens=has_tokens)
    calls = named_tool_format("gpt_oss") if form.name == "gpt_oss" else None
    output_form = OutputForm.of(calls, form, special_token_ids(tokenizer), ())
    texts = ["a", "é", "🙂", " the dog", "\n", form.close[:-1], form.open[:3]]
    for seed in range(30):
        generator, output = random.Random(seed), tokenizer(form.open)["input_ids"]
        num_before, budget = len(output), generator.randrange(12)
        rule = ThinkingBudget(thinking_of(form, tokenizer), budget, [])
        supply = [token for text in generator.choices(texts, k=12) for token in tokenizer(text)["input_ids"]]
        while not (forced := rule.forced(output, [])):
            output.append(supply.pop(0))
        thoughts = output[num_before:]
        output += [*forced, *tokenizer(ANSWERS.get(form.name, "So"))["input_ids"]]
        assert len(thoughts) == budget
        shown = output_form.special.shown
        parser = OutputParser(output_form)
        said = joined(
            [*parser.feed(TextStream(tokenizer, shown=shown).next_piece(output, finished=True)), *parser.end()]
        )
        begun = tokenizer.decode([*thoughts, *forced]).partition(form.close)[0] if not has_tokens else None
        thought = tokenizer.decode(thoughts) if begun is None else begun
        assert "".join(text for kind, text in said if kind == "reasoning").strip() == thought.strip()
        assert "".join(text for kind, text in said if kind == "content") == "So"


@pytest.mark.parametrize("form", REASONING_FORMATS[:1])
def test_a_prompt_may_have_opened_it(form: ReasoningFormat) -> None:
    tokenizer = made(form, has_tokens=False)
    thinking = thinking_of(form, tokenizer)
    for prompt, is_open in (
        ("<think>\n", True),
        ("<think>a</think>", False),
        ("Say <think> twice", False),
        ("", False),
    ):
        assert thinking.is_open_after(tokenizer(prompt)["input_ids"]) == is_open
