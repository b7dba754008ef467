"""Result of a command, its JSON, what it left on disk, and a few prompts: what tests of the command line share."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from shared import edit_json as edit_json

from commands.schema.schemas import DOCUMENTS, schema_of

NGRAM = "[4,2,[0]]"
NGRAM_RECORD: dict[str, Any] = {
    "max_draft_len": 4,
    "max_matching_ngram_size": 2,
    "device_id": 0,
    "device_ids": [0],
    "min_matching_ngram_size": 1, "ranking": "oldest", "pool": "private", "corpus": None,
}  # fmt: skip
PROMPT = "The little dog had a red ball. The little dog had a"
PROMPTS = [PROMPT, "One day", "Then a little girl found the red ball and", "the ball the ball the ball the", "The dog"]


@dataclass(frozen=True)
class Result:
    """Exit code and texts that a command left behind."""

    exit_code: int
    stdout: str
    stderr: str
    command: str = ""
    code: str | None = None
    """The code of the error, where it was raised in this process."""

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; fails if there is anything else."""
        assert self.exit_code == 0, self.stderr
        data: dict[str, Any] = json.loads(self.stdout)
        return data


Specdec = Callable[..., Result]


def each(flag: str, values: Iterable[Any]) -> list[Any]:
    """A repeatable flag with all of its values."""
    return [argument for value in values for argument in (flag, value)]


def with_last_values(arguments: Sequence[object]) -> list[str]:
    """The arguments of a base and of what a test has otherwise: of a flag with two values the last."""
    words = list(map(str, arguments))
    places = {word: place for place, word in enumerate(words) if word.startswith("--")}
    kept, rest = list[str](), enumerate(words)
    for place, argument in rest:
        if place < places.get(argument, place) and argument not in ("--input-text", "--text"):
            next(rest)
        else:
            kept.append(argument)
    return kept


def draft_model(draft_engine_dir: Path, config: str = "[4,[0],[0],False]") -> list[object]:
    """The two flags of a draft model."""
    return ["--draft-engine-dir", draft_engine_dir, "--draft-target-model-config", config]


def ids_of(document: dict[str, Any]) -> list[list[int]]:
    return [request["output_ids"] for request in document["requests"]]


def texts_of(document: dict[str, Any]) -> list[str]:
    return [request["output_text"] for request in document["requests"]]


def assert_valid(command: str, document: dict[str, Any]) -> None:
    """Check the document by its record, and by its JSON schema with `jsonschema`."""
    DOCUMENTS[command].model_validate_json(json.dumps(document))
    _validator(command).validate(document)


@cache
def _validator(command: str) -> Draft202012Validator:
    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def line_of(text: str, beginning: str) -> str:
    """The only line of a text that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(beginning))
    return line


def tree(directory: Path) -> list[str]:
    """Everything below a directory, hidden files included."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
