"""Marked outputs: each token's kind against a simulation, pieces against the text, marks with and without colour."""

import re
from collections.abc import Callable

import pytest
from byte_tokenizers import any_byte_level_tokens, byte_fallback, byte_level, texts, words
from command_line import NGRAM, PROMPTS, Result, each
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strength import examples
from transformers import PreTrainedTokenizerFast

from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.measure.text_steps import StepRange, token_kinds, token_texts, tokens_over_time
from runtime.text.text import StopWords, output_text

END_ID = 9
Run = Callable[..., Result]


class StopAfterTwins:
    """A stop check of its own kind: two equal tokens in a row."""

    def __call__(self, tokens: list[int], num_prompt_tokens: int) -> bool:
        return len(tokens) - num_prompt_tokens >= 2 and tokens[-1] == tokens[-2]


steps = st.lists(
    st.tuples(st.lists(st.integers(0, END_ID), max_size=5), st.integers(0, 5), st.integers(0, END_ID)), min_size=1
)


@settings(deadline=None, max_examples=examples(300))
@given(steps=steps, budget=st.integers(1, 20), stops=st.booleans())
@example(steps=[([1, 2, END_ID, 4], 4, 5)], budget=20, stops=False)  # cut inside a draft by the end id
@example(steps=[([1, 2, 2, 4], 4, 5)], budget=20, stops=True)  # by a stop word
@example(steps=[([1, 2, 3, 4], 4, 5)], budget=2, stops=False)  # by the budget
@example(steps=[([1, 2], 2, END_ID)], budget=3, stops=False)  # at the bonus token
def test_kinds_are_those_of_the_tokens_as_they_were_committed(
    steps: list[tuple[list[int], int, int]], budget: int, stops: bool
) -> None:
    """The simulation labels each token when it is made and drops labels with their tokens; it sees no counter."""
    request = Request(0, (0,), budget, frozenset([END_ID]), StopAfterTwins() if stops else None)
    sequence = Sequence.start(request)
    expected = []
    for draft, wanted, own in steps:
        num_accepted = min(wanted, len(draft))
        labels = ["accepted"] * num_accepted
        labels.append("plain" if not draft else "bonus" if num_accepted == len(draft) else "recovered")
        new_tokens = sequence.commit(Draft(draft), VerifyResult(num_accepted, own))
        expected.append(labels[: len(new_tokens)])
        if sequence.finish_reason is not None:
            break
    stats = sequence.stats
    kinds = token_kinds(stats.per_step_drafted, stats.per_step_accepted, sequence.num_generated)
    assert kinds == expected
    assert [kind for step in kinds for kind in step].count("accepted") == stats.num_accepted_draft_tokens


@settings(deadline=None, max_examples=examples(200))
@given(tokens=any_byte_level_tokens(), stop_words=words)
def test_pieces_join_to_the_text_and_break_no_character(tokens: list[int], stop_words: list[str]) -> None:
    tokenizer = byte_level()
    for stops in (None, StopWords(tuple(stop_words), tokenizer)):
        text = output_text(tokenizer, tokens, stops)
        assert text is not None
        pieces = token_texts(tokenizer, tokens, text)
        assert len(pieces) == len(tokens)
        assert "".join(pieces) == text
    whole = output_text(tokenizer, tokens, None)
    assert whole is not None
    shown = ""
    for i, piece in enumerate(token_texts(tokenizer, tokens, whole)[:-1]):
        shown += piece
        # What is shown after a token is text that this token and those before it make, and stays as it is.
        assert output_text(tokenizer, tokens[: i + 1], None).startswith(shown.rstrip("\ufffd"))  # type: ignore[union-attr]


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
@given(text=texts)
def test_pieces_of_either_kind_of_tokenizer_are_whole_characters(
    make_tokenizer: Callable[[], PreTrainedTokenizerFast], text: str
) -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = output_text(tokenizer, tokens, None)
    assert whole is not None
    pieces = token_texts(tokenizer, tokens, whole)
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces)


def test_ranges_of_steps_hold_every_token_once() -> None:
    steps = [[1, 3, 2, 1, 1], [4, 1], [1]]
    assert tokens_over_time(steps, 2) == [StepRange(1, 3, 6, 12), StepRange(4, 5, 2, 2)]
    assert tokens_over_time(steps, 9) == [
        StepRange(1, 1, 3, 6), StepRange(2, 2, 2, 4), StepRange(3, 3, 1, 2), StepRange(4, 4, 1, 1),
        StepRange(5, 5, 1, 1),
    ]  # fmt: skip
    assert tokens_over_time([], 3) == []


# The command

ARGUMENTS = ["--ngram-config", NGRAM, *each("--input-text", PROMPTS), "--max-output-len", 30, "--end-id", 0]
ANSI = re.compile(r"\x1b\[[\d;]*m")


def outputs_of(stdout: str) -> list[str]:
    return re.findall(r'^Output \[Text \d+\]: "(.*?)"$', stdout, re.DOTALL | re.MULTILINE)


def test_marked_outputs_are_the_outputs_and_count_as_the_json_does(run: Run) -> None:
    document = run(*ARGUMENTS, "--json").document
    result = run(*ARGUMENTS, "--show-tokens")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Tokens: ⟦accepted⟧ ⟨recovered⟩ ⟪bonus⟫ plain (of a step without a draft)"
    texts = [re.sub("[⟦⟧⟨⟩⟪⟫]", "", text) for text in outputs_of(result.stdout)]
    assert texts == [request["output_text"] for request in document["requests"]]
    counted = [line for line in lines if re.fullmatch(r"30 tokens: .*", line)]
    assert len(counted) == len(PROMPTS)
    for line, request in zip(counted, document["requests"], strict=True):
        stats = request["stats"]
        numbers = {kind: int(number) for number, kind in re.findall(r"(\d+) (accepted|recovered|bonus|plain)", line)}
        assert numbers["accepted"] == stats["num_accepted_draft_tokens"]
        assert sum(numbers.values()) == stats["num_generated_tokens"]
        assert numbers["plain"] == stats["num_steps"] - stats["num_spec_steps"]
    assert document["total"]["num_accepted_draft_tokens"] > 0


def test_colour_marks_without_a_letter_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = outputs_of(run(*ARGUMENTS).stdout)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = run(*ARGUMENTS, "--show-tokens").stdout
    assert "\x1b[32m" in coloured and "\x1b[4;33m" in coloured
    assert outputs_of(ANSI.sub("", coloured)) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦" in run(*ARGUMENTS, "--show-tokens").stdout
