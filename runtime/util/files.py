"""Writes directories and files completely or not at all, and reads JSON with clear errors.

Output is written to a hidden sibling, flushed to disk and renamed. So a directory that exists is complete, and an
interrupted command leaves nothing behind. Files that a killed process leaves are removed by the next process: a process
holds a lock on the directory that it writes, and a directory without this lock is abandoned.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runtime.util.errors import SpecDecError

_MOST_TEXT_BYTES = 1 << 28
"""Most bytes of a file that is read as a whole; the largest vocabularies and indices have a tenth of that."""
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_OF_MODELS = (*_TEXTS, ".safetensors", ".gguf")
_KINDS = {
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a disk",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
}


def check_output_directory(path: Path, *, replace: bool) -> None:
    """SpecDecError unless `path` can be written: absent, empty, or (with `replace`) a directory that specdec wrote."""
    recover_directory(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SpecDecError(f"output directory is not a directory: {path}", hint="choose another name")
    if path.exists() and any(path.iterdir()):
        if not replace:
            raise SpecDecError(
                f"output directory is not empty: {path}",
                hint="allow it to be replaced, or choose another",
                code="exists",
            )
        try:
            ours = "format_version" in read_json(path / "config.json")
        except SpecDecError:
            ours = False
        if not ours:
            raise SpecDecError(
                f"output directory holds something other than a checkpoint or engine: {path}",
                hint="only specdec's own output is replaced; choose another directory or remove this one",
                code="not_ours",
            )


def check_output_is_not_input(output: Path, source: Path) -> None:
    """SpecDecError if replacing `output` would delete `source`."""
    output, source = output.resolve(), source.resolve()
    if output == source or output in source.parents:
        raise SpecDecError(
            f"the input is in the output directory, which would replace it: {output}",
            hint="write to a directory of its own",
        )


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` when the block ends without an exception."""
    check_output_directory(path, replace=replace)
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_sibling(path) as temporary:
        yield temporary
        _flush_tree(temporary)
        if path.exists():
            path.rename(_hidden_sibling(path, "old"))
        temporary.rename(path)
        _flush(path.parent)
        for old in _hidden_siblings(path, "old"):
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """A directory beside `path` for the block; siblings left by killed processes are removed."""
    remove_left_over(path)
    temporary = _hidden_sibling(path, "tmp")
    try:
        with locked_directory(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_left_over(path: Path) -> None:
    """Remove the hidden directories beside `path` that killed processes left while they wrote it."""
    for left_over in _hidden_siblings(path, "tmp"):
        remove_if_abandoned(left_over)


def recover_directory(path: Path) -> None:
    """Give a directory its name back, if a process was killed while it replaced the directory."""
    path = path.absolute()
    if path.is_symlink() or path.exists():
        return
    old = _hidden_siblings(path, "old")
    if old and all(_is_abandoned(directory) for directory in _hidden_siblings(path, "tmp")):
        with contextlib.suppress(OSError):  # another process was faster, or this process may not write here
            old[0].rename(path)


@contextmanager
def locked_directory(directory: Path, mode: int = 0o777) -> Iterator[None]:
    """Make a directory and hold its lock, which ends with the process, however the process ends."""
    while (descriptor := _make_locked(directory, mode)) is None:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _make_locked(directory: Path, mode: int) -> int | None:
    """The descriptor that holds the lock; None if another process removed the directory before it was locked."""
    directory.mkdir(mode)
    descriptor = None
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    if descriptor is not None:
        os.close(descriptor)
    return None


def remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose lock no process holds any more."""
    with flocked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_abandoned:
        if is_abandoned:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def flocked(directory: Path, operation: int) -> Iterator[bool]:
    """Try to lock the directory, as `fcntl.flock` does; yields whether that succeeded, and keeps the lock in the block.

    The directory may have been replaced by another process's directory of the same name before it was locked; then the
    lock does not count. On a file system without locks a shared lock succeeds, and an exclusive lock does not: files
    there are used, and never removed.
    """
    close = os.close  # `os` is gone from here when the interpreter ends with an `LLM` that nobody closed
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, operation)
            is_same = os.path.samestat(os.fstat(descriptor), directory.stat())
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        except OSError:
            is_same = operation == fcntl.LOCK_SH
        yield is_same
    finally:
        close(descriptor)


def _is_abandoned(directory: Path) -> bool:
    with flocked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_abandoned:
        return is_abandoned


def _flush_tree(directory: Path) -> None:
    """Flush a directory, with everything in it, to disk."""
    for parent, _, names in os.walk(directory):
        for name in names:
            _flush(Path(parent) / name)
        _flush(Path(parent))


def _flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk: content must be there before its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield the name of a temporary file that becomes `path` when the block ends without an exception."""
    if path.exists() and not replace:
        raise SpecDecError(
            f"output file exists: {path}", hint="allow it to be replaced, or choose another", code="exists"
        )
    path = path.resolve()
    with _temporary_sibling(path) as directory:
        yield directory / path.name
        (directory / path.name).chmod(0o666 & ~_umask())  # safetensors gives its files mode 0600
        _give_name(directory / path.name, path)


def try_new_file(path: Path) -> None:
    """OSError unless a file can be made at `path`. The file that is tried lies in a hidden sibling, so a process that
    is killed meanwhile leaves nothing under this name.
    """
    with _temporary_sibling(path.resolve()) as directory:
        (directory / path.name).touch()


def _give_name(written: Path, path: Path) -> None:
    _flush(written)
    written.replace(path)
    _flush(path.parent)


def _umask() -> int:
    """Read this process's umask, which is possible only by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _hidden_sibling(path: Path, suffix: str) -> Path:
    """A unique name such as `.engine.0a1b2c3d.tmp`, by which `_hidden_siblings` recognises leftovers."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def _hidden_siblings(path: Path, suffix: str) -> list[Path]:
    """Existing hidden siblings, of any process."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.{suffix}")
    with contextlib.suppress(OSError):
        return [sibling for sibling in path.parent.iterdir() if name.fullmatch(sibling.name)]
    return []


def check_regular(path: Path, most_bytes: float = math.inf) -> None:
    """SpecDecError for a path that is not a regular file and may never end (a link to /dev/zero, a named pipe), or is
    too large.

    A missing file and a directory pass: opening them gives the error. A pipe without a name passes too, such as a
    shell's `<(command)`: its other end is open.
    """
    try:
        found = path.stat()
    except OSError:
        return
    kind = next((kind for is_of, kind in _KINDS.items() if is_of(found.st_mode)), None)
    if kind is not None and not (stat.S_ISFIFO(found.st_mode) and not os.path.exists(os.path.realpath(path))):
        raise SpecDecError(f"not a file, but {kind}: {path}", hint="give a regular file")
    if found.st_size > most_bytes and stat.S_ISREG(found.st_mode):
        raise SpecDecError(
            f"the file is too large for what it should hold, {found.st_size:,} bytes: {path}",
            hint="check that this is the right file",
        )


def check_model_files(directory: Path) -> None:
    """`check_regular` for all files in a model's directory that transformers or specdec might read, by their names."""
    for inner in (directory, directory / "additional_chat_templates"):
        with contextlib.suppress(OSError):
            for path in map(Path, sorted(entry.path for entry in os.scandir(inner) if entry.name.endswith(_OF_MODELS))):
                check_regular(path, _MOST_TEXT_BYTES if path.suffix in _TEXTS else math.inf)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; SpecDecError names the file if it is missing or damaged."""
    return read_json_and_text(path)[0]


def read_json_and_text(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a JSON file, as from `read_json`, and the file's text."""
    check_regular(path, _MOST_TEXT_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except FileNotFoundError:
        raise SpecDecError(
            f"file is missing: {path}", hint="the directory is incomplete; make or download it again"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        raise SpecDecError(
            f"`{path}` is not valid JSON: {error}", hint="the file is damaged; make or download it again"
        ) from None
    if not isinstance(data, dict):
        raise SpecDecError(
            f"`{path}` is not a JSON object: {type(data).__name__}",
            hint="the file is damaged; make or download it again",
        )
    return data, text


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_file(path, (json.dumps(data, indent=2) + "\n").encode())


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write all of `data`, or leave `path` unchanged. A path that is not a regular file, such as a pipe, is written to
    directly.

    A regular file gets `mode`, less the umask. OSError names `path`, whichever file failed.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        final = path.resolve()
        with _temporary_sibling(final) as directory:
            written = directory / final.name
            with open(written, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
            _give_name(written, final)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class Stamp(NamedTuple):
    """Identity and version of a file: after a change of content the stamp is different."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    def is_written_over(self, now: os.stat_result) -> bool:
        """True if the content was written since this stamp; False if the file was only linked or its mode changed."""
        return (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.mtime_ns)


def stamp_of(stat: os.stat_result) -> Stamp:
    return Stamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def files_below(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a directory and of its subdirectories, including targets of links, each with its state. Other processes
    may work there: files that are renamed or removed meanwhile are left out.
    """
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                yield path, path.stat()


def directory_bytes(path: Path) -> int:
    return sum(state.st_size for _, state in files_below(path))


def unique_bytes(paths: Iterable[Path]) -> int:
    """Bytes of all files in these directories; a file with several links counts once."""
    found = (state for path in paths for _, state in files_below(path))
    return sum({(state.st_dev, state.st_ino): state.st_size for state in found}.values())


def make_private_directory(directory: Path) -> None:
    """Make the directory for its user alone. SpecDecError if another user owns it, or others may write there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except FileExistsError:
        raise SpecDecError(f"the place for keys and values is no directory: {directory}", hint="name another") from None
    except OSError as error:
        raise SpecDecError(
            f"the directory for keys and values cannot be made ({error.strerror or error}): {directory}",
            hint="name one that you may write",
        ) from None
    if found.st_uid not in (os.getuid(), 0):
        raise SpecDecError(
            f"the directory for keys and values belongs to another user (number {found.st_uid}): {directory}",
            hint="name a directory of your own: it holds your prompts in clear",
        )
    if found.st_mode & 0o022:
        raise SpecDecError(
            f"other users may write into the directory for keys and values: {directory}",
            hint=f"name another, or trust what is there: chmod go-w {directory}",
        )
