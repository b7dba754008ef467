"""Directories that are whole or absent, and JSON that is valid or an error.

Output is written to a hidden sibling and renamed, so a directory that exists is complete; an interrupted command
leaves nothing behind.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import SpecDecError


def check_output_directory(path: Path, *, replace: bool) -> None:
    """SpecDecError unless `path` can be written: absent, empty, or (with `replace`) one of our own directories."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SpecDecError(f"output directory is not a directory: {path}", hint="choose another name")
    if path.exists() and any(path.iterdir()):
        if not replace:
            raise SpecDecError(f"output directory is not empty: {path}", hint="`--force` replaces it")
        try:
            ours = "format_version" in read_json(path / "config.json")
        except SpecDecError:
            ours = False
        if not ours:
            raise SpecDecError(
                f"output directory holds something other than a checkpoint or engine: {path}",
                hint="`--force` replaces only what specdec wrote; choose another directory or remove this one",
            )


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` when the block ends without an exception."""
    check_output_directory(path, replace=replace)
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; SpecDecError names the file if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecDecError(
            f"file is missing: {path}", hint="the directory is incomplete; make or download it again"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
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
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
