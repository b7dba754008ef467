"""Engines in the cache: their places, the files that they share, and the removal of the oldest."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.checkpoint.costs import COSTS
from runtime.util.cache import WEIGHTS, cache_dir, cache_path, is_used
from runtime.util.digests import file_digest, keep_digest
from runtime.util.files import directory_bytes, files_below, flocked, unique_bytes

_SHARED_BYTES = 1 << 20  # smaller files are not worth a link


def remove_unused_entry(path: Path) -> bool:
    """Remove an entry unless a process uses or makes it; returns True if it was removed."""
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    try:
        with flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_unused:
            if is_unused:
                # A partial entry must never be visible. After a kill, the next process to make it cleans up.
                removed = path.with_name(f".{path.name}.{os.getpid()}.old")
                path.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)
                path.with_name(f"{path.name}{COSTS}").unlink(missing_ok=True)
            return is_unused
    finally:
        lock.release()


@dataclass(frozen=True)
class CachedEngine:
    """An entry of the cache."""

    path: Path
    num_bytes: int
    used_s: float
    """Time of last use, in seconds since 1970."""
    is_used: bool
    """True if a process uses it now."""


def engine_entry(name: Path, identity: str) -> Path:
    """The directory of an engine, from its model's path and a digest of everything that it is made from."""
    return cache_dir() / "engines" / f"{readable_name(name)}-{identity[:16]}"


def readable_name(name: Path) -> str:
    """The common beginning of the names of a model's engines, from its path, hub id or shipped name."""
    return re.sub(r"[^\w.-]", "_", name.expanduser().resolve().name)


def share_files(entry: Path, digests: Mapping[str, str]) -> None:
    """Replace large files of an entry that this process has just made by links, so that equal files are stored once.
    `digests` has the SHA-256 of files by their names in the entry.

    Engines of a model differ in limits, and have the same weights. A shared file that is damaged is replaced.
    """
    with _shared_files() as directory:
        for name, sha256 in digests.items():
            path, kept = entry / name, directory / f"{sha256}{Path(name).suffix}"
            if path.is_symlink() or path.stat().st_size < _SHARED_BYTES:
                continue
            if kept.is_file() and file_digest(kept) == sha256:
                path.unlink()
            else:
                path.replace(kept)
                keep_digest(kept, sha256)
            path.symlink_to(os.path.relpath(kept, path.parent))


def remove_unshared_files() -> None:
    """Remove the shared files that no engine links to any more."""
    if not (cache_path() / WEIGHTS).is_dir():
        return
    with _shared_files() as directory:
        linked = {path.resolve().name for path, _ in files_below(cache_dir() / "engines") if path.is_symlink()}
        for path in directory.iterdir():
            if path.name not in linked and not path.name.startswith("."):
                path.unlink(missing_ok=True)


@contextmanager
def _shared_files() -> Iterator[Path]:
    """The directory of shared files, which no other process changes within the block."""
    directory = cache_dir() / WEIGHTS
    directory.mkdir(mode=0o700, exist_ok=True)
    with FileLock(directory / ".lock"):
        yield directory


def cached_engines() -> list[CachedEngine]:
    """Complete engines, the last used first."""
    found = []
    for path in _entries():
        with contextlib.suppress(FileNotFoundError):  # another process removes the engine
            found.append(CachedEngine(path, directory_bytes(path), path.stat().st_mtime, is_used(path)))
    return sorted(found, key=lambda engine: (engine.used_s, engine.path), reverse=True)


def cached_names() -> list[str]:
    """Names of the models that have engines in the cache, as `specdec list` shows them."""
    return sorted({path.name.rpartition("-")[0] for path in _entries()})


def other_bytes() -> int:
    """Size of everything else in the cache: compiled kernels, digests, and leftovers of interrupted commands."""
    return unique_bytes([cache_dir()]) - engines_bytes(cached_engines())


def engines_bytes(engines: Iterable[CachedEngine]) -> int:
    """Bytes that engines take together; shared weights count once."""
    return unique_bytes(engine.path for engine in engines)


def engines_to_prune(engines: list[CachedEngine], max_bytes: int) -> list[CachedEngine]:
    """Engines to remove, the oldest first, so that the rest take at most `max_bytes`; engines in use are kept."""
    left, chosen = list(engines), list[CachedEngine]()
    for engine in reversed(engines):
        if not engine.is_used and engines_bytes(left) > max_bytes:
            chosen.append(engine)
            left.remove(engine)
    return chosen


def prune(engines: list[CachedEngine]) -> list[CachedEngine]:
    """Remove these engines, except any that is in use by now; returns the engines that were removed."""
    removed = [engine for engine in engines if remove_unused_entry(engine.path)]
    remove_unshared_files()
    return removed


def _entries() -> list[Path]:
    """Directories of complete engines."""
    directory = cache_dir() / "engines"
    found = directory.iterdir() if directory.is_dir() else ()
    return [path for path in found if path.is_dir() and not path.name.startswith(".")]
