"""Digests of texts and of files. The cache keeps those of files: a large file is read again only if it has changed."""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from runtime.util.cache import OF_ALL_TO_READ, cache_dir, check_private_file, make_cache_dir
from runtime.util.files import Stamp, remove_if_abandoned, stamp_of, write_file

_CHUNK_BYTES = 1 << 22
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 512
_TIME_STEP_NS = 100_000_000  # longer than a tick of any file system's clock
_SHA256 = re.compile("[0-9a-f]{64}")
Range = tuple[int, int]
"""A range of a file's bytes: the first, and one past the last."""
_seen: dict[tuple[Stamp | Range, ...], str] = {}  # by this process
_begun: dict[Stamp, "Future[str]"] = {}
_LARGE_BYTES = 16 << 20


def digest(parts: Iterable[str]) -> str:
    """A digest of `parts`, which names the things made from them."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(path: Path, ranges: Sequence[Range] = ()) -> str:
    """The digest of a file, as from `read_digest`, kept in the cache, so that a large file is read again only if it has
    changed.

    A change is noticed by inode, size, times and a sample of the bytes. The file's name does not matter: an engine's
    directory is renamed when it is complete. The time of change cannot be set back, but is coarse: a new file may be
    written again within the same tick, so its digest is not kept yet. A file whose state this process has seen is not
    even opened.
    """
    stamp = stamp_of(path.stat())
    if (seen := _seen.get((stamp, *ranges))) is not None:
        return seen
    if not ranges and (begun := _begun.pop(stamp, None)) is not None:
        return begun.result()
    return _find_digest(path, ranges)


def begin_digests(paths: Iterable[Path]) -> None:
    """Have a thread compute the `file_digest` of large files. The process does not wait for it at its end."""
    begun: dict[Stamp, tuple[Path, Future[str]]] = {}
    for path in paths:
        if (stamp := stamp_of(path.stat())).num_bytes > _LARGE_BYTES and stamp not in _begun:
            begun[stamp] = path, Future()

    def find() -> None:
        for path, future in begun.values():
            try:
                future.set_result(_find_digest(path, ()))
            except BaseException as error:  # raised in `file_digest`
                future.set_exception(error)

    _begun.update({stamp: future for stamp, (_, future) in begun.items()})
    Thread(target=find, daemon=True).start()


def is_digest_awaited() -> bool:
    """True if a digest that `begin_digests` began, and that nobody has asked for, is not ready yet."""
    return not all(begun.done() for begun in tuple(_begun.values()))  # a copy: other threads change `_begun`


def _find_digest(path: Path, ranges: Sequence[Range]) -> str:
    with path.open("rb") as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        kept = cache_dir() / "digests" / _known_as(file, stamp, ranges)
        if (found := read_kept_digest(kept)) is not None:
            _seen[stamp, *ranges] = found
            return found
        sha256 = _digest_of(file, ranges)
        # Not kept: the digest of a file that was written meanwhile, or may be written within its present tick.
        is_settled = time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) > _TIME_STEP_NS
        if not is_settled or stamp_of(os.fstat(file.fileno())) != stamp:
            return sha256
    _keep(kept, stamp, ranges, sha256)
    return sha256


def keep_digest(path: Path, sha256: str) -> None:
    """Keep the SHA-256, for `file_digest`, of a file that this process has just written and no other writes."""
    with path.open("rb") as file:
        stamp = stamp_of(os.fstat(file.fileno()))
        # Wait for the next tick: a later write must change the file's time.
        time.sleep(max(stamp.mtime_ns + _TIME_STEP_NS - time.time_ns(), 0) / 1e9)
        kept = cache_dir() / "digests" / _known_as(file, stamp, ())
    _keep(kept, stamp, (), sha256)


def _keep(kept: Path, stamp: Stamp, ranges: Sequence[Range], sha256: str) -> None:
    _seen[stamp, *ranges] = sha256
    with contextlib.suppress(OSError):  # this process has the digest in `_seen`
        make_cache_dir()
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        for left_over in kept.parent.glob(".*.tmp"):
            remove_if_abandoned(left_over)
        write_file(kept, f"{sha256} {digest([kept.name, sha256])}".encode(), OF_ALL_TO_READ)


def _known_as(file: BinaryIO, stamp: Stamp, ranges: Sequence[Range]) -> str:
    """The name under which the digest of a file in this state is kept."""
    sample = hashlib.sha256()
    for start in range(0, stamp.num_bytes, max(stamp.num_bytes // _NUM_SAMPLES, 1)):
        file.seek(start)
        sample.update(file.read(_SAMPLE_BYTES))
    return digest([*map(str, (*stamp, *ranges)), sample.hexdigest()])


def read_digest(path: Path, ranges: Sequence[Range] = ()) -> str:
    """SHA-256 of a file, or of these ranges of it in order; it always reads the file."""
    with path.open("rb") as file:
        return _digest_of(file, ranges)


def read_kept_digest(path: Path) -> str | None:
    """A digest that `file_digest` kept, with a checksum over digest and name. None if it is absent or damaged.
    SpecDecError if other users may write it.
    """
    check_private_file(path)
    try:
        kept, _, check = path.read_text(encoding="utf-8").partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    return kept if _SHA256.fullmatch(kept) and check == digest([path.name, kept]) else None


def _digest_of(file: BinaryIO, ranges: Sequence[Range]) -> str:
    sha256 = hashlib.sha256()
    whole = (0, os.fstat(file.fileno()).st_size)
    for start, end in ranges or [whole]:
        file.seek(start)
        while chunk := file.read(min(_CHUNK_BYTES, end - file.tell())):
            sha256.update(chunk)
    return sha256.hexdigest()
