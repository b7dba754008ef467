"""This process's directory for files that are run, or that are removed when it ends: unpacked packages, compilers'
outputs.

In the common directory for temporary files, other users could put code under a predictable name. This directory is new,
readable by its owner alone, and locked while the process lives; the next process removes the directories of killed
ones.
"""

import atexit
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from runtime.util.errors import SpecDecError
from runtime.util.files import locked_directory, remove_if_abandoned

_PREFIX = "specdec.work."
# Where the compilers put their files: C++'s libraries, Inductor and Triton.
_VARIABLES = {"TMPDIR": ".", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def temporary_dir() -> Path:
    """This process's own directory; SpecDecError if none can be made, or not safely."""
    try:
        return _made_in(Path(tempfile.gettempdir()))
    except OSError as error:
        raise SpecDecError(
            f"no directory for temporary files can be made: {error.strerror or error}",
            hint="name another directory in TMPDIR",
        ) from error


@cache
def _made_in(parent: Path) -> Path:
    if (found := parent.stat()).st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise SpecDecError(
            f"other users may replace files in the directory for temporary files: {parent}",
            hint=f"name another directory in TMPDIR, or `chmod +t {parent}`",
        )
    for left_over in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left_over.lstat().st_uid == os.getuid() and not left_over.is_symlink():
                remove_if_abandoned(left_over)
    directory = parent / f"{_PREFIX}{secrets.token_hex(8)}"
    stack = ExitStack()
    stack.enter_context(locked_directory(directory, mode=0o700))
    atexit.register(_remove, directory, os.getpid(), stack)
    return directory


def _remove(directory: Path, process_id: int, lock: ExitStack) -> None:
    """Remove the directory, unless this process is a fork, which does not own it."""
    if os.getpid() == process_id:
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()


@contextmanager
def own_temporary_files() -> Iterator[None]:
    """Within the block, have compilers, and loaders of their output, use a directory of this process."""
    directory = temporary_dir()
    before = {name: os.environ.get(name) for name in _VARIABLES}
    pythons, tempfile.tempdir = tempfile.tempdir, str(directory)
    os.environ.update({name: str(directory / place) for name, place in _VARIABLES.items()})
    try:
        yield
    finally:
        tempfile.tempdir = pythons
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
