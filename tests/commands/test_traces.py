"""Traces are read back as they were written, and a line that is none is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPTS, Result, each, ids_of
from sentences import Said
from transformers import PreTrainedTokenizerFast

from runtime.text.trace_lines import Trace
from runtime.text.traces import read_traces
from runtime.util.errors import SpecDecError

IDS = '{"prompt_ids": [5, 6], "output_ids": [7]}\n'


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ids_and_texts_are_read_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"prompt_ids": [5, 6], "output_ids": [7], "category": "a"},
        {"prompt": "The dog", "output": " had a ball."},
        {"prompt": "The dog", "output_ids": [299], "category": None},
    )
    dog = tuple(tokenizer("The dog")["input_ids"])
    ball = tuple(tokenizer(" had a ball.", add_special_tokens=False)["input_ids"])
    expected = [Trace((5, 6), (7,), "a"), Trace(dog, ball, None), Trace(dog, (299,), None)]
    assert read_traces(path, tokenizer, 300) == expected


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, ""),
        (b"\xff\xfe", "1"),
        (IDS + "{", "2"),
        (IDS + "[1]", "2; [1]"),
        (IDS + "{}", "2; `prompt`; `prompt_ids`; []"),
        (IDS + '{"output_ids": [1]}', "2; `prompt`; `prompt_ids`"),
        ('{"prompt": "a", "prompt_ids": [1], "output_ids": [1]}', "1; `prompt`"),
        ('{"prompt_ids": [1], "output": "a", "output_ids": [1]}', "1; `output`"),
        ('{"prompt_ids": [], "output_ids": [1]}', "`prompt_ids`; 1"),
        ('{"prompt_ids": [1], "output_ids": [1, 2.0]}', "2; 2.0; `output_ids`; 1"),
        ('{"prompt_ids": [1], "output_ids": [true]}', "1; `output_ids`"),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "1; -1; `prompt_ids`"),
        ('{"prompt_ids": [1], "output_ids": [9, 300]}', "`output_ids`; 1"),
        ('{"prompt_ids": [1], "output": ""}', "`output`; 1; ''"),
        ('{"prompt": 5, "output_ids": [1]}', "`prompt`; 1; 5"),
        ('{"prompt_ids": [1], "output_ids": [1], "category": 5}', "`category`; 1; 5"),
    ],
)
def test_line_that_is_no_trace_is_named(
    content: str | bytes | None, wrong: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, said: Said
) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecDecError) as raised:
        read_traces(path, tokenizer, 300)
    said(raised, *wrong.split("; "))
    assert str(path) in raised.value.message or "vocabulary" in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize("row", [{"prompt": "a", "output_ids": [1]}, {"prompt_ids": [1], "output": "a"}])
def test_text_needs_a_tokenizer(row: dict[str, Any], tmp_path: Path, said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        read_traces(write(tmp_path / "t.jsonl", row), None)
    said(raised, "1", "no_tokenizer")
    assert raised.value.hint


def test_what_run_writes_is_read_back_to_the_same_tokens(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    flags = ["--spec-decode-algo", "NGRAM", "--output-traces", path, "--json"]
    document = run(*each("--input-text", PROMPTS), *flags).document
    traces = read_traces(path, None)
    assert [list(trace.output_tokens) for trace in traces] == ids_of(document)
    assert [list(trace.prompt_tokens) for trace in traces] == [r["prompt_ids"] for r in document["requests"]]
    assert {trace.category for trace in traces} == {None}
