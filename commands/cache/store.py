"""Work and output of `specdec cache` for the keys and values on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.core.block_store import FILE, BlockStore, Damaged, StoredEngine, Unwritable
from runtime.util.errors import SpecDecError


@dataclass(frozen=True)
class Kept:
    """The keys and values that a directory holds."""

    directory: Path
    num_bytes: int
    max_bytes: int
    engines: list[StoredEngine]


def kept_in(directory: Path, *, is_named: bool) -> Kept | None:
    """Summary of the keys and values in a directory; None if the directory was not named by the user and has none.
    SpecDecError for a directory that was named and has none, or that cannot be read.
    """
    if not is_named and not _has_store(directory):
        return None
    with _opened(directory) as store:
        return Kept(directory, store.num_bytes, store.max_bytes, store.engines())


def prune_store(directory: Path, max_bytes: int, *, is_dry_run: bool) -> tuple[int, int]:
    """Remove the least recently used keys and values, until `max_bytes` are left. Returns the bytes that were removed
    and the bytes that are left; with `is_dry_run` the same numbers, and nothing is removed.
    """
    with _opened(directory) as store:
        if is_dry_run:
            freed = max(store.num_bytes - max_bytes, 0)
            return freed, store.num_bytes - freed
        return store.prune(max_bytes), store.num_bytes


def _has_store(directory: Path) -> bool:
    """True unless the file is missing or empty. Opening an empty file would turn it into a database."""
    path = directory / FILE
    return path.is_file() and path.stat().st_size > 0


@contextmanager
def _opened(directory: Path) -> Iterator[BlockStore]:
    directory = directory.expanduser()
    if not _has_store(directory):
        raise SpecDecError(f"there are no keys and values in: {directory}", hint="name a `--kv-cache-dir` of a run")
    try:
        store = BlockStore(directory, renews=False)
        try:
            yield store
        finally:
            store.close()
    except Unwritable as error:
        raise SpecDecError(
            f"no keys and values can be removed ({error}): {directory}", hint="make it writable"
        ) from None
    except (Damaged, TimeoutError) as error:
        raise SpecDecError(f"the keys and values cannot be read ({error}): {directory}", hint="remove them") from None
