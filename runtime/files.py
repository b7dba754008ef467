"""Directories that are whole or absent, and JSON that is valid or an error.

Output is written to a hidden sibling and renamed, so a directory that exists is complete; an interrupted command
leaves nothing behind.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import SpecDecError


def check_output_directory(path: Path, *, replace: bool) -> None:
    """SpecDecError unless `path` can be written: absent, empty, or (with `replace`) one of our own directories."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SpecDecError(f"output directory is not a directory: {path}", hint="choose another name")
    if path.exists() and any(path.iterdir()):
        if not replace:
            raise SpecDecError(
                f"output directory is not empty: {path}",
                hint="allow it to be replaced, or choose another",
                fact="exists",
            )
        try:
            ours = "format_version" in read_json(path / "config.json")
        except SpecDecError:
            ours = False
        if not ours:
            raise SpecDecError(
                f"output directory holds something other than a checkpoint or engine: {path}",
                hint="only what specdec wrote is replaced; choose another directory or remove this one",
                fact="not_ours",
            )


def check_output_is_not_input(output: Path, source: Path) -> None:
    """SpecDecError if replacing `output` would take `source` away."""
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
    temporary = _hidden_sibling(path, "tmp")
    try:
        temporary.mkdir()
        yield temporary
        if path.exists():
            old = _hidden_sibling(path, "old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield the name of a temporary file that becomes `path` when the block ends without an exception."""
    if path.exists() and not replace:
        raise SpecDecError(
            f"output file exists: {path}", hint="allow it to be replaced, or choose another", fact="exists"
        )
    path = path.resolve()
    temporary = _hidden_sibling(path, "tmp")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # safetensors' files are their writer's own
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """What this process takes from the mode of new files; it can be read by changing it only."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _hidden_sibling(path: Path, suffix: str) -> Path:
    """A name that nobody else uses. It is known before there is anything of that name, so nothing is left behind."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; SpecDecError names the file if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
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
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_file(path, (json.dumps(data, indent=2) + "\n").encode())


def write_file(path: Path, data: bytes) -> None:
    """Write all of `data`, or leave `path` as it was. What is no regular file, such as a pipe, is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary = _hidden_sibling(path, "tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Stamp(NamedTuple):
    """Which file it is, and since when it is what it is: another stamp, another content."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


def stamp_of(stat: os.stat_result) -> Stamp:
    return Stamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
