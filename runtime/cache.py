"""The cache directory: what can be made again from its inputs, named after a digest of all of them.

Whoever makes an entry holds its lock, so that of several processes one works and the others wait. An entry is written
whole or not at all; a process that is killed leaves at most a hidden directory, which the next one removes.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.errors import SpecDecError
from runtime.files import write_file

_CHUNK_BYTES = 1 << 22


def cache_dir() -> Path:
    """`SPECDEC_CACHE_DIR`, else `specdec` in the user's cache directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    return Path(os.environ.get("SPECDEC_CACHE_DIR") or default).absolute()


@contextmanager
def locked_entry(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Be the only process that makes the cache's entry `path`; what a killed one left of it is gone.

    Calls `on_wait` if another process is at it. SpecDecError if the cache cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        raise SpecDecError(
            f"the cache directory cannot be written ({error.strerror or error}): {cache_dir()}",
            hint="SPECDEC_CACHE_DIR names another",
            fact="cache_unwritable",
        ) from error
    try:
        for left_over in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield
    finally:
        lock.release()


def digest(parts: Iterable[str]) -> str:
    """A name for what is made of `parts`."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file. It is kept, so that a large file is read again only if its size or time has changed.

    Under which name it lies does not matter: an engine's directory is renamed when it is whole.
    """
    stat = path.stat()
    name = digest([str(stat.st_dev), str(stat.st_ino), str(stat.st_size), str(stat.st_mtime_ns)])
    kept = cache_dir() / "digests" / name
    try:
        return kept.read_text()
    except OSError:
        pass
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
    with contextlib.suppress(OSError):  # kept for the next time only
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, sha256.hexdigest().encode())
    return sha256.hexdigest()
