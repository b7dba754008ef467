"""Flags of structured output: outputs are of the form, documents say it, and mistakes are one clear error."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import Result, Specdec, assert_valid, each, texts_of
from sentences import Said

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["dog", "ball"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "<" [a-z] [a-z]? ">"\n'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(json.dumps(SCHEMA))
    Path("grammar.gbnf").write_text(GRAMMAR)
    Path("empty.json").write_text("\n")


@pytest.mark.parametrize(
    ("flags", "kind", "form"),
    [
        (["--json-schema", json.dumps(SCHEMA)], "json_schema", None),
        (["--grammar", "grammar.gbnf", "--grammar-config", "8"], "grammar", "<[a-z]{1,2}>"),
        (each("--choice", ["aab", "bba"]), "choice", "aab|bba"),
    ],
)
def test_outputs_are_of_the_form(
    run: Callable[..., Result], files: None, flags: list[str], kind: str, form: str | None
) -> None:
    document = run(*flags, "--temperature", 1, "--max-output-len", 60, "--json").document
    assert_valid("run", document)
    assert document["settings"]["sampling"]["grammar"]["kind"] == kind
    (text,) = texts_of(document)
    if form is None:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(form, text)


def test_requests_of_a_batch_have_their_own_form_or_that_of_the_command(
    specdec: Specdec, llama_engine_dir: Path, files: None, tmp_path: Path
) -> None:
    own = {"prompt": "The dog", "max_tokens": 60, "response_format": {"type": "json_schema", "schema": SCHEMA}}
    rows: list[dict[str, Any]] = [{"prompt": "The dog"}, own, {"prompt": "The dog", "json_schema": {"type": "x"}}]
    Path("requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--engine-dir", llama_engine_dir]
    result = specdec(*arguments, "--regex", "[ab]{3}", "--json")
    assert_valid("batch", result.document)
    assert result.document["settings"]["defaults"]["grammar"] == {"kind": "regex", "text": "[ab]{3}"}
    first, second, third = (json.loads(line)["response"] for line in Path("results.jsonl").read_text().splitlines())
    assert re.fullmatch("[ab]{3}", first["body"]["choices"][0]["text"])
    jsonschema.validate(json.loads(second["body"]["choices"][0]["text"]), SCHEMA)
    assert third["status_code"] == 400 and third["body"]["error"]["param"] == "json_schema"
    assert specdec(*arguments, "--regex", "[ab]{4}").exit_code == 1  # these are other results


WRONG = [
    ["--json-schema", "nowhere.json"],
    ["--json-schema", '{"type": "strange"}'],
    ["--regex", "(a"],
    ["--regex", "a", "--choice", "b"],
    ["--choice", ""],
]


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
def test_mistakes_are_one_clear_error(run: Callable[..., Result], files: None, flags: list[str], said: Said) -> None:
    result = run(*flags, "--max-output-len", 8)
    assert result.exit_code in (1, 2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    said(result)


def test_hugging_faces_model_has_no_form(specdec: Specdec, llama_engine_dir: Path, llama_dir: Path, said: Said) -> None:
    arguments = ["--engine-dir", llama_engine_dir, "--hf-model-dir", llama_dir, "--test-engine", "--test-hf"]
    result = specdec("summarize", *arguments, "--regex", "a")
    assert result.exit_code == 2
    said(result)
