"""Documents that `--json` printed, read again."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from commands.documents.records import SCHEMA_VERSION, Record
from commands.documents.run import RunDocument
from commands.documents.summarize import SummarizeDocument
from runtime.errors import SpecDecError
from runtime.reading import parse_json, read_utf8, shown

_DOCUMENTS: dict[str, type[Record]] = {"run": RunDocument, "summarize": SummarizeDocument}


def read_document(path: Path) -> dict[str, Any]:
    """A document of `run` or `summarize`, as `--json` printed it; SpecDecError for anything else."""
    text = read_utf8(path)
    data = parse_json(text, path)
    command = data.get("command") if isinstance(data, dict) else None
    if not isinstance(data, dict) or "schema_version" not in data or not isinstance(command, str):
        raise SpecDecError(
            f"not a document of specdec: {path}", hint="give what `specdec run --json` or `summarize --json` printed"
        )
    if command not in _DOCUMENTS:
        raise SpecDecError(
            f"not a document of `run` or `summarize` but of `{command}`: {path}",
            hint="give what `specdec run --json` or `summarize --json` printed",
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecDecError(
            f"the schema version is {data['schema_version']}, and this specdec reads {SCHEMA_VERSION}: {path}",
            hint="make it again with this specdec",
        )
    try:
        _DOCUMENTS[command].model_validate_json(text)
    except ValidationError as error:
        found = min(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        raise SpecDecError(
            f"the document is not as its schema says, at {_said(found, data)}: {path}",
            hint="it is damaged or was edited; make it again",
        ) from error
    return data


def _said(error: ErrorDetails, data: Any) -> str:
    """The place, the value there, and what is wrong with it. Names of types, which pydantic has among the keys, go."""
    place, key = "$", error["loc"][-1]
    is_unknown = error["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    for part in error["loc"][:-1] if is_unknown else error["loc"]:
        if isinstance(part, int) and isinstance(data, list):
            place, data = f"{place}[{part}]", data[part]
        elif isinstance(data, dict) and part in data:
            place, data = f"{place}.{part}", data[part]
    if is_unknown:
        return f"{place}: {key!r} is an unknown key"
    if error["type"] == "missing":
        return f"{place}: {key!r} is a required key"
    return f"{place}: {shown(data)} {error['msg'].removeprefix('Input ').removeprefix('Value ')}"
