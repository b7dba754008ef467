"""Checksums: an artefact records its files and its own content when it is written; here both are compared with that
record.

A directory's `config.json` records the size and SHA-256 of the files beside it, and in `config_digest` a digest of its
own content; a JSON document in a single file has its digest under `digest`. Checksums find damage and mistakes, not
malice: whoever can change a file can change its record.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from runtime.checkpoint.config import CheckpointConfig, EngineConfig, FileRecord, Mapping, as_json
from runtime.checkpoint.tokenizer import SAVED, TEMPLATE_DIR, TOKENIZER_FILES
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular, write_json

CONFIG = "config.json"
NOT_RECORDED = frozenset({CONFIG, "generation_config.json", "chat_template.jinja"})
"""Files that have no record, since people edit them: how outputs end, and how a conversation is written."""


def is_recorded(name: str) -> bool:
    """False for a file that people edit."""
    return name not in NOT_RECORDED and not name.startswith(f"{TEMPLATE_DIR}/")


@dataclass(frozen=True)
class Artefact:
    """Words for errors about an artefact, such as `the engine was built`, and the remedy if its files have changed."""

    since: str
    hint: str
    code: str

    def wrong(self, said: str) -> SpecDecError:
        return SpecDecError(said, hint=self.hint, code=self.code)

    def changed(self, path: Path, how: str) -> SpecDecError:
        return self.wrong(f"`{path}` has changed since {self.since}: {how}")


def document_digest(data: dict[str, Any], key: str) -> str:
    """Digest of a JSON document without its own digest under `key`, independent of layout."""
    return digest([json.dumps({name: value for name, value in data.items() if name != key}, sort_keys=True)])


def config_digest(data: dict[str, Any]) -> str:
    """Digest of a directory's `config.json`."""
    return document_digest(data, "config_digest")


Config = TypeVar("Config", CheckpointConfig, EngineConfig)


def write_config(directory: Path, config: Config) -> Config:
    """Write a directory's `config.json` with its digest; returns the configuration with the digest."""
    config = dataclasses.replace(config, config_digest=config_digest(as_json(config)))
    write_json(directory / CONFIG, as_json(config))
    return config


def record_files(directory: Path) -> tuple[FileRecord, ...]:
    """Records of a directory's files as they are now."""
    return tuple(
        FileRecord(name, path.stat().st_size, file_digest(path))
        for name, path in files_in(directory).items()
        if is_recorded(name)
    )


def files_in(directory: Path) -> dict[str, Path]:
    """Every file of a directory, hidden files too, by its path inside it."""
    paths = sorted(path for path in directory.rglob("*") if not path.is_dir())
    return {path.relative_to(directory).as_posix(): path for path in paths}


def is_of_tokenizer(record: FileRecord) -> bool:
    return record.name in (*TOKENIZER_FILES, SAVED)


def check_mapping(mapping: Mapping, directory: Path, artefact: Artefact) -> None:
    """SpecDecError unless a directory's config.json says that it has all ranks."""
    if mapping != Mapping(mapping.tp_size, mapping.tp_size):
        raise artefact.wrong(
            f"the {artefact.code} is split over devices in a way that this version does not read: {directory}"
        )


def check_recorded(names: Iterable[str], records: Iterable[FileRecord], directory: Path, artefact: Artefact) -> None:
    """SpecDecError unless a directory's config.json has a record of each name, or of a file in a directory with it."""
    recorded = {record.name for record in records}
    recorded |= {parent.as_posix() for name in recorded for parent in PurePosixPath(name).parents}
    for name in names:
        if name not in recorded:
            raise artefact.wrong(f"`{directory / CONFIG}` has no record of the file: {name}")


def check_config(path: Path, text: str, artefact: Artefact) -> None:
    """SpecDecError unless a `config.json` is unchanged since it was written; `text` is its content."""
    recorded, found = _digests_of_config(text)
    if recorded != found:
        raise artefact.changed(path, f"digest {found[:12]}…, written with {recorded[:12] or 'none'}…")


@lru_cache(maxsize=16)
def _digests_of_config(text: str) -> tuple[str, str]:
    """The digest that the text records, and its content's. Cached: a config is often opened several times."""
    data = json.loads(text)
    return str(data.get("config_digest", "")), config_digest(data)


def check_sizes(directory: Path, records: Iterable[FileRecord], artefact: Artefact) -> None:
    """SpecDecError for a file that is missing, or has another size than recorded. Reads no file."""
    for record in records:
        path = directory / record.name
        check_regular(path)
        if not path.is_file():
            raise artefact.wrong(f"file is missing: {path}")
        if difference := size_difference(path, record):
            raise artefact.changed(path, difference)


def check_contents(directory: Path, records: Iterable[FileRecord], artefact: Artefact) -> None:
    """SpecDecError for a file that has changed since it was written. A file whose digest is known is not read."""
    for record in records:
        if difference := content_difference(directory / record.name, record, file_digest):
            raise artefact.changed(directory / record.name, difference)


def size_difference(path: Path, record: FileRecord) -> str | None:
    num_bytes = path.stat().st_size
    return None if num_bytes == record.num_bytes else f"{num_bytes:,} bytes, written with {record.num_bytes:,}"


def content_difference(path: Path, record: FileRecord, digest_of: Callable[[Path], str]) -> str | None:
    found = digest_of(path)
    return None if found == record.sha256 else f"SHA-256 {found[:12]}…, written with {record.sha256[:12]}…"
