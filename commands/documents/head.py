"""What the documents of `--json` begin with, so that a program (and `compare`) knows what it reads."""

import json
from pathlib import Path
from typing import Any

from runtime.errors import SpecDecError
from runtime.reading import parse_json, read_utf8
from runtime.version import specdec_version

SCHEMA_VERSION = 2
"""The version of all commands' documents; changed when a key changes its meaning or goes away."""

_COMMANDS = ("run", "summarize")


def document_head(command: str) -> dict[str, Any]:
    return {"command": command, "schema_version": SCHEMA_VERSION, "specdec_version": specdec_version()}


def read_document(path: Path) -> dict[str, Any]:
    """A document of `run` or `summarize`, as `--json` printed it; SpecDecError for anything else."""
    text = read_utf8(path)
    data = parse_json(text, path)
    command = data.get("command") if isinstance(data, dict) else None
    if not isinstance(data, dict) or "schema_version" not in data or not isinstance(command, str):
        raise SpecDecError(
            f"not a document of specdec: {path}", hint="give what `specdec run --json` or `summarize --json` printed"
        )
    if command not in _COMMANDS:
        raise SpecDecError(
            f"not a document of `run` or `summarize` but of `{command}`: {path}",
            hint="give what `specdec run --json` or `summarize --json` printed",
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecDecError(
            f"the schema version is {data['schema_version']}, and this specdec reads {SCHEMA_VERSION}: {path}",
            hint="make it again with this specdec",
        )
    _check_schema(data, command, path)
    return data


def _check_schema(data: dict[str, Any], command: str, path: Path) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    schema = json.loads((Path(__file__).parents[1] / "schemas" / f"{command}.json").read_text(encoding="utf-8"))
    error = best_match(Draft202012Validator(schema).iter_errors(data))
    if error is not None:
        raise SpecDecError(
            f"the document is not as its schema says, at {error.json_path}: {error.message[:200]}: {path}",
            hint="it is damaged or was edited; make it again",
        )
