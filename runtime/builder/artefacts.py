"""Integrity checks of artefacts on disk: every file is read, and compared with the digest that was recorded when it was
written, if there is one.

Opening an artefact skips files that have not changed since they were last read; these checks skip none. Nothing here
needs torch.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from runtime.builder.profile import read_profile
from runtime.checkpoint.bundle import ENGINE, parse_engine_config
from runtime.checkpoint.checkpoint_dir import CHECKPOINT, parse_checkpoint_config
from runtime.checkpoint.checksums import (
    CONFIG,
    Artefact,
    check_config,
    content_difference,
    files_in,
    is_recorded,
    size_difference,
)
from runtime.checkpoint.config import FileRecord
from runtime.checkpoint.gguf.reader import check_part, gguf_files, read_gguf
from runtime.checkpoint.hub import MODEL_FILES
from runtime.checkpoint.resolve import INDEX, files_of_index, files_of_model, read_model_config
from runtime.text.corpus import Corpus, is_corpus
from runtime.util.cache import cache_dir, check_private_file, read_sealed
from runtime.util.digests import read_digest, read_kept_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import check_model_files, read_json, read_json_and_text
from runtime.util.tensor_file import read_header

Kind = Literal["engine", "checkpoint", "corpus", "profile", "traces", "model", "cache"]
Status = Literal["ok", "no_checksum", "changed", "missing", "unknown", "damaged"]
_LEFT_OVER = "left by a command that was interrupted, or is at work"


@dataclass(frozen=True)
class FileCheck:
    """Result of checking a file. `note` says what is wrong, or why there is no record to compare the file with."""

    name: str
    status: Status
    num_bytes: int | None = None
    note: str | None = None

    @property
    def is_sound(self) -> bool:
        return self.status in ("ok", "no_checksum")


@dataclass(frozen=True)
class ArtefactCheck:
    """Kind of an artefact, and the result for each of its files."""

    kind: Kind
    files: list[FileCheck]


def check_directory(directory: Path) -> ArtefactCheck:
    """Check an engine, a checkpoint, a model or a cache; SpecDecError for any other directory."""
    if not (directory / CONFIG).is_file() and _is_cache(directory):
        return ArtefactCheck("cache", list(_check_cache(directory)))
    check_model_files(directory)
    data = read_json(directory / CONFIG)
    if "build_config" in data:
        return ArtefactCheck("engine", _check_recorded(directory, parse_engine_config, ENGINE))
    if "format_version" in data:
        return ArtefactCheck("checkpoint", _check_recorded(directory, parse_checkpoint_config, CHECKPOINT))
    if "model_type" in data:
        return ArtefactCheck("model", list(_check_model(directory)))
    raise SpecDecError(
        f"config.json does not belong to an engine, checkpoint, model or cache: {directory}",
        hint="if the directory was one of these, config.json is damaged: make or download the directory again",
    )


def check_corpus_or_profile(path: Path) -> ArtefactCheck | None:
    """Check a corpus or a profile; None for a file of another kind."""
    if is_corpus(path):
        return ArtefactCheck("corpus", [check_file(path, lambda: Corpus.open(path).check_content())])
    try:
        data = read_json(path)
    except SpecDecError:
        return None
    if "engine" in data and "format_version" in data:
        return ArtefactCheck("profile", [check_file(path, lambda: read_profile(path))])
    return None


def check_model_file(path: Path) -> ArtefactCheck:
    """Check a GGUF model in one file or several: all data that the headers describe is there. It has no checksums."""
    try:
        files = gguf_files(path)
    except SpecDecError as error:
        return ArtefactCheck("model", [FileCheck(path.name, "damaged", _size(path), error.message)])
    checks = [check_file(one, partial(check_part, one)) for one in files]
    if all(one.is_sound for one in checks):
        checks[0] = check_file(path, lambda: read_gguf(path))  # that they are of one model
    return ArtefactCheck("model", [_with_digest(one, None) for one in checks])


def check_file(path: Path, check: Callable[[], object]) -> FileCheck:
    """Check a single file; it counts as damaged if `check` raises SpecDecError."""
    try:
        check()
    except SpecDecError as error:
        return FileCheck(path.name, "damaged", path.stat().st_size, error.message)
    return FileCheck(path.name, "ok", path.stat().st_size)


def _check_recorded(
    directory: Path, parse: Callable[[dict[str, Any], Path], Any], artefact: Artefact
) -> list[FileCheck]:
    """Check the files that a directory's configuration records."""
    records: tuple[FileRecord, ...] | None = None
    note = None
    data, text = read_json_and_text(directory / CONFIG)
    try:
        records = parse(data, directory).files
        check_config(directory / CONFIG, text, artefact)
    except SpecDecError as error:
        note = error.message
    num_bytes = (directory / CONFIG).stat().st_size
    checks = [FileCheck(CONFIG, "damaged" if note else "ok", num_bytes, note)]
    others = {name: path for name, path in files_in(directory).items() if name != CONFIG}
    if records is None:
        unread = "config.json is damaged, which records it"
        return [*checks, *(FileCheck(name, "no_checksum", _size(path), unread) for name, path in others.items())]
    checks += [_check_record(directory / record.name, record) for record in records]
    recorded = {record.name for record in records}
    for name, path in others.items():
        if not is_recorded(name):
            checks.append(_check_unrecorded(path, "may be changed"))
        elif name not in recorded:
            checks.append(FileCheck(name, "unknown", _size(path), f"was not there when {artefact.since}"))
    return checks


def _check_record(path: Path, record: FileRecord) -> FileCheck:
    """Check that a recorded file exists, has the recorded bytes, and has the form that its suffix promises."""
    if not path.is_file():
        return FileCheck(record.name, "missing")
    note = size_difference(path, record) or content_difference(path, record, read_digest)
    if note:
        return FileCheck(record.name, "changed", _size(path), note)
    return replace(check_file(path, lambda: _check_form(path)), name=record.name)


def _check_unrecorded(path: Path, why: str) -> FileCheck:
    found = check_file(path, lambda: _check_form(path))
    return replace(found, status="no_checksum", note=why) if found.is_sound else found


def _check_form(path: Path) -> None:
    """SpecDecError for JSON that does not parse, or a safetensors file whose header and size do not agree."""
    if path.suffix == ".json":
        read_json(path)
    if path.suffix == ".safetensors":
        _tensor_names(path)


def _tensor_names(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            return set(read_header(file).tensors)
    except SafetensorError as error:
        raise SpecDecError(f"`{path}` is damaged: {error}", hint="make or download it again") from None


def _size(path: Path) -> int | None:
    """Size of a file; None if a link leads nowhere."""
    return path.stat().st_size if path.exists() else None


def _check_model(directory: Path) -> Iterator[FileCheck]:
    """Check a Hugging Face model's files by the digests that the hub's client keeps of its downloads."""
    found = {path for pattern in MODEL_FILES for path in directory.glob(pattern)}
    with suppress(SpecDecError):  # of the index, which is told below
        found |= set(files_of_model(directory))
    for path in sorted(found):
        name = path.relative_to(directory).as_posix()
        if not path.is_file():
            yield FileCheck(name, "missing", note="the link leads nowhere")
            continue
        recorded = _hub_digest(directory, path)
        found_digest = None if recorded is None else _git_digest(path) if len(recorded) == 40 else read_digest(path)
        if found_digest != recorded:
            note = f"digest {str(found_digest)[:12]}…, downloaded as {str(recorded)[:12]}…"
            yield FileCheck(name, "changed", _size(path), note)
        elif name == CONFIG:
            yield _with_digest(check_file(path, lambda: read_model_config(directory)), recorded)
        else:
            check = check_file(path, lambda path=path: _check_form(path))  # type: ignore[misc]
            yield replace(_with_digest(check, recorded), name=name)
    yield from _missing_shards(directory)


def _with_digest(check: FileCheck, recorded: str | None) -> FileCheck:
    if recorded is None and check.is_sound:
        return replace(check, status="no_checksum", note="a model has none of its own")
    return check


def _missing_shards(directory: Path) -> Iterator[FileCheck]:
    """Shards in the index that do not exist, or lack a tensor that the index promises."""
    if not (directory / INDEX).is_file():
        return
    try:
        files = files_of_index(directory / INDEX)
    except SpecDecError as error:
        yield FileCheck(INDEX, "damaged", note=error.message)
        return
    for shard in sorted(set(files.values())):
        name = shard.relative_to(directory).as_posix()
        if not shard.is_file():
            yield FileCheck(name, "missing", note=f"{INDEX} names it")
            continue
        wanted = {tensor for tensor, file in files.items() if file == shard}
        try:
            absent = sorted(wanted - _tensor_names(shard))
        except SpecDecError:
            continue  # told already
        if absent:
            yield FileCheck(name, "damaged", note=f"it lacks a tensor that {INDEX} names: {absent[0]}")


def _hub_digest(directory: Path, path: Path) -> str | None:
    """Digest that the hub reported for a downloaded file: SHA-256 of a large one, git's digest of a small one."""
    target = path.resolve()
    said = target.name if path.is_symlink() and target.parent.name == "blobs" else None
    metadata = directory / ".cache" / "huggingface" / "download" / f"{path.relative_to(directory)}.metadata"
    if said is None and metadata.is_file():
        said = metadata.read_text(errors="replace").partition("\n")[2].partition("\n")[0]
    return said if said and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", said) else None


def _git_digest(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _is_cache(directory: Path) -> bool:
    is_ours = directory.resolve() == cache_dir().resolve()
    return is_ours or any((directory / name).is_dir() for name in ("engines", "digests"))


def _check_cache(directory: Path) -> Iterator[FileCheck]:
    for path in _children(directory / "engines"):
        name = f"engines/{path.name}"
        yield from _check_modes(path, name)
        if path.name.startswith("."):
            yield FileCheck(name, "no_checksum", note=_LEFT_OVER)
        elif path.is_dir():
            yield from (replace(check, name=f"{name}/{check.name}") for check in _check_entry(path))
    for path in _children(directory / "digests"):
        name = f"digests/{path.name}"
        if path.name.startswith("."):
            yield FileCheck(name, "no_checksum", note=_LEFT_OVER)
        elif found := list(_check_modes(path, name)):
            yield from found
        elif read_kept_digest(path) is None:
            yield FileCheck(name, "damaged", _size(path), "does not match its digest; it is ignored")
        else:
            yield FileCheck(name, "ok", _size(path))
    for path in _children(directory):
        if path.is_file() and (found := list(_check_modes(path, path.name))):
            yield from found
        elif path.match("kernels-*.so"):
            note = "does not match its digest; it is recompiled" if read_sealed(path) is None else None
            yield FileCheck(path.name, "damaged" if note else "ok", _size(path), note)
        elif path.is_file():
            yield FileCheck(path.name, "no_checksum", _size(path))


def _check_modes(path: Path, name: str) -> Iterator[FileCheck]:
    """The files at `path` that other users own or may write into; `name` is the path inside the cache."""
    for one in (path, *path.rglob("*")):
        try:
            check_private_file(one)
        except SpecDecError as error:
            inner = one.relative_to(path).as_posix()
            yield FileCheck(name if one == path else f"{name}/{inner}", "damaged", _size(one), error.message)


def _check_entry(engine_dir: Path) -> Iterable[FileCheck]:
    try:
        return check_directory(engine_dir).files
    except SpecDecError as error:
        return [FileCheck(CONFIG, "damaged", note=error.message)]


def _children(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
