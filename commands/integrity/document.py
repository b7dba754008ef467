"""Output of `verify`: each file, its size, and the result of its check."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.table import Table

from commands.output.documents.records import Record
from commands.output.output import Output, megabytes
from runtime.builder.artefacts import ArtefactCheck, Kind, Status
from runtime.checkpoint.config import Count


class FileRecord(Record):
    """Result of checking one file."""

    name: str = Field(description="its path in the directory")
    status: Status
    num_bytes: Count | None = Field(description="null where there is no file")
    note: str | None = Field(description="what is wrong, or why there is no checksum")


class VerifyDocument(Record):
    """Document of `specdec verify --json`."""

    path: str = Field(description="as given")
    kind: Kind = Field(description="what it was found to be")
    is_sound: bool = Field(description="whether every file is `ok` or has no checksum; the exit code is 1 if not")
    files: list[FileRecord]


def verify_document(path: Path, found: ArtefactCheck) -> dict[str, Any]:
    document = VerifyDocument(
        path=str(path),
        kind=found.kind,
        is_sound=all(one.is_sound for one in found.files),
        files=[FileRecord(**asdict(one)) for one in found.files],
    )
    return document.as_json()


_MAX_SOUND = 40
"""Limit on the number of intact files listed: a cache has thousands. Damaged files are always listed."""


def show(path: Path, found: ArtefactCheck, output: Output) -> None:
    wrong = [one for one in found.files if not one.is_sound]
    named = found.files if len(found.files) <= _MAX_SOUND else wrong
    if named:
        table = Table(title=f"{found.kind.capitalize()} {path}", title_justify="left")
        table.add_column("file", overflow="fold")
        table.add_column("bytes", justify="right")
        table.add_column("state")
        table.add_column("", overflow="fold")
        for one in named:
            num_bytes = "-" if one.num_bytes is None else f"{one.num_bytes:,}"
            table.add_row(one.name, num_bytes, one.status.replace("_", " "), one.note or "")
        output.result(table)
    output.result(_summary(found))


def _summary(found: ArtefactCheck) -> str:
    counts = Counter(one.status for one in found.files)
    states = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in counts.most_common())
    size = megabytes(sum(one.num_bytes or 0 for one in found.files))
    files = "1 file" if len(found.files) == 1 else f"{len(found.files):,} files"
    return f"{found.kind} of {files}, {size}: {states or 'empty'}"
