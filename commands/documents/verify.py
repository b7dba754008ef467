"""The JSON document of `specdec verify`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from commands.documents.records import Record
from runtime.artefacts import ArtefactCheck, Kind, Status
from runtime.config import Count


class FileRecord(Record):
    """What was found of a file."""

    name: str = Field(description="its path in the directory")
    status: Status
    num_bytes: Count | None = Field(description="null where there is no file")
    note: str | None = Field(description="what is wrong, or why there is no checksum")


class VerifyDocument(Record):
    """What `specdec verify --json` prints."""

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
