"""`specdec schema`: the schemas of documents are made of their records, and real documents are valid by them."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec, assert_valid
from jsonschema import Draft202012Validator, ValidationError

from commands.schema.schemas import DOCUMENTS, LINES, schema_of

METRICS = (
    "num_spec_steps", "num_steps", "num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate",
    "mean_acceptance_length", "tokens_per_step", "acceptance_histogram", "acceptance_rate_per_position",
    "num_reused_tokens",
)  # fmt: skip
TIMES = ("ttft_s", "tpot_s", "latency_s")
SERIES = ("per_step_drafted", "per_step_accepted")


@cache
def schema(name: str) -> dict[str, Any]:
    """The schema as anything that reads JSON has it."""
    data: dict[str, Any] = json.loads(json.dumps(schema_of(name)))
    return data


def test_the_command_lists_the_documents_and_prints_their_schemas(specdec: Specdec) -> None:
    names = specdec("schema").stdout.split()
    assert names == [*DOCUMENTS, *LINES] and len(names) == 23
    for name in ("run", "cache_list", "cache-list"):
        printed = json.loads(specdec("schema", name).stdout)
        Draft202012Validator.check_schema(printed)
        assert printed == schema(name.replace("-", "_"))
    assert printed["title"] == "specdec cache list --json"


def test_a_name_without_a_document_is_told_with_the_names(specdec: Specdec) -> None:
    result = specdec("schema", "runs")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "runs" in result.stderr and all(name in result.stderr for name in DOCUMENTS)


def test_a_schema_is_printed_without_torch(specdec_process: Specdec) -> None:
    """The modules of all documents are imported for any of them."""
    result = specdec_process("schema", "tune", environment={"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.exit_code == 0 and json.loads(result.stdout)["title"] == "specdec tune --json"
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "commands.tune.document" in loaded and not loaded & {"torch", "transformers", "datasets"}


def test_real_documents_are_valid_by_their_schemas(
    specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents that take no engine; a change of one key is found."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "engines" / "old-1").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    (tmp_path / "text.txt").write_text("The little dog had a red ball. The little dog had a ball.")
    made = ("corpus", "create", "--tokenizer-dir", llama_dir, "--text", tmp_path / "text.txt")
    documents = {
        "convert": specdec("convert", "--model-dir", llama_dir, "--output-dir", tmp_path / "checkpoint", "--json"),
        "verify": specdec("verify", tmp_path / "checkpoint", "--json"),
        "corpus": specdec(*made, "--output", tmp_path / "corpus", "--json"),
        "cache_list": specdec("cache", "list", "--json"),
        "cache_prune": specdec("cache", "prune", "--max-size", "0", "--json"),
    }
    for name, result in documents.items():
        document = result.document
        assert_valid(name, document)
        for key in document:
            without = {other: value for other, value in document.items() if other != key}
            with pytest.raises(ValidationError):
                Draft202012Validator(schema(name)).validate(without)
        with pytest.raises(ValidationError):
            Draft202012Validator(schema(name)).validate(document | {"another": 1})


def test_every_document_is_compared_with_its_schema_somewhere() -> None:
    """Tests of the other commands call `assert_valid` with what the command printed."""
    calls = set()
    for path in (Path(__file__).parents[1]).rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        calls |= set(re.findall(r'assert_valid\("(\w+)", ', source))
        if path == Path(__file__):
            calls |= set(re.findall(r'^        "(\w+)": specdec\(', source, re.MULTILINE))
    assert calls == set(DOCUMENTS)


@pytest.mark.parametrize("name", [*DOCUMENTS, *LINES])
def test_schemas_name_every_object_they_allow(name: str) -> None:
    def closed(node: Any) -> bool:
        if isinstance(node, list):
            return all(map(closed, node))
        if not isinstance(node, dict):
            return True
        return ("properties" not in node or node.get("additionalProperties") is False) and all(
            map(closed, node.values())
        )

    assert closed(schema(name))


@pytest.mark.parametrize("name", ["run", "summarize"])
def test_schemas_hold_every_metric_of_the_vocabulary(name: str) -> None:
    definitions = schema(name)["$defs"]
    assert set(METRICS + TIMES + SERIES) <= set(definitions["RequestCounts"]["properties"])
    assert {*METRICS, "output_tokens_per_second", "draft_time_s", "target_time_s", "host_time_s"} <= set(
        definitions["Total"]["properties"]
    )
