"""The cache's engines, and which of them go when they are to take less: those that were not used for longest."""

from dataclasses import dataclass
from pathlib import Path

from runtime.cache import cache_dir, is_used, remove_unused_entry
from runtime.files import directory_bytes


@dataclass(frozen=True)
class CachedEngine:
    """An entry of the cache."""

    path: Path
    num_bytes: int
    used_s: float
    """Time of last use, in seconds since 1970."""
    is_used: bool
    """True if a process uses it now."""


def cached_engines() -> list[CachedEngine]:
    """Complete engines, the last used first."""
    directory = cache_dir() / "engines"
    paths = [path for path in directory.iterdir() if _is_entry(path)] if directory.is_dir() else []
    found = [CachedEngine(path, directory_bytes(path), path.stat().st_mtime, is_used(path)) for path in paths]
    return sorted(found, key=lambda engine: (engine.used_s, engine.path), reverse=True)


def other_bytes() -> int:
    """Size of everything else in the cache: compiled kernels, digests, and what interrupted commands have left."""
    directory = cache_dir()
    whole = directory_bytes(directory) if directory.is_dir() else 0
    return whole - sum(engine.num_bytes for engine in cached_engines())


def engines_to_prune(engines: list[CachedEngine], max_bytes: int) -> list[CachedEngine]:
    """Engines to remove so that the rest take no more than `max_bytes`; those in use are passed over."""
    num_bytes = sum(engine.num_bytes for engine in engines)
    chosen = []
    for engine in reversed(engines):
        if num_bytes > max_bytes and not engine.is_used:
            chosen.append(engine)
            num_bytes -= engine.num_bytes
    return chosen


def prune(engines: list[CachedEngine]) -> list[CachedEngine]:
    """Remove these; returns those that are gone: who has begun to use one in the meantime keeps it."""
    return [engine for engine in engines if remove_unused_entry(engine.path)]


def _is_entry(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")
