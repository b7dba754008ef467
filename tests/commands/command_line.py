"""What the tests of the command line share: a command's result, and what it left on disk."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NGRAM = "[4,2,[0]]"
PROMPT = "The little dog had a red ball. The little dog had a"


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; fails if there is anything else."""
        assert self.exit_code == 0, self.stderr
        data: dict[str, Any] = json.loads(self.stdout)
        return data


Specdec = Callable[..., Result]


def tree(directory: Path) -> list[str]:
    """Everything below a directory, hidden files included."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one out. `a__b` is key `b` in the object `a`."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        target = data
        for name in outer:
            target = target[name]
        if value is None:
            del target[last]
        else:
            target[last] = value
    path.write_text(json.dumps(data))
