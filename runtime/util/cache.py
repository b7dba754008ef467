"""The cache directory: files that can be made again from their inputs, named after a digest of these inputs.

It holds code that is run, and digests that stand for files, so only its user may write there.

The process that makes an entry holds the entry's lock, and other processes wait. An entry is written whole or not at
all; a killed process leaves at most a hidden directory, which the next process removes.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from filelock import FileLock, Timeout

from runtime.util.errors import SpecDecError
from runtime.util.files import (
    Stamp,
    directory_bytes,
    files_below,
    flocked,
    remove_if_abandoned,
    stamp_of,
    write_file,
)

_CHUNK_BYTES = 1 << 22
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZES = "bytes, or a number with K, M, G or T (1,000 bytes and so on: 20G) or Ki, Mi, Gi or Ti (1,024: 20GiB)"
"""Forms of a size such as 20G, for hints."""
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 512
_TIME_STEP_NS = 100_000_000  # longer than a tick of any file system's clock
_SHA256 = re.compile("[0-9a-f]{64}")
_PACKAGE = Path(__file__).parents[1]
PROFILES = "profiles"
"""Directory of the models' default profiles (`runtime.builder.profile`)."""
WEIGHTS = "weights"
"""Directory of files that several engines share, each named by its SHA-256 (`share_files`)."""
_PARTS = ("engines", "digests", PROFILES, WEIGHTS)
_SHARED_BYTES = 1 << 20  # smaller files are not worth a link
_USUAL_SIZE = "50G"
LEFT_OUT = {
    "demo": "models and articles: an engine's identity has the digests of its model's files",
    "drafters": "drafts are made while an engine runs; `drafters/heads`, which engines are built for, is not left out",
    "llm": "opens engines",
    "loop": "runs engines; the costs of steps lie beside an engine, and are measured again by another version",
    "measure": "measures engines",
    "proof": "checks what an engine has answered",
    "training": "writes the files of heads, whose digests are in an engine's identity",
}
"""Parts of `runtime` that do not determine an engine's content, with the reason. Every other source is part of an
engine's identity.
"""
_BUT = ("drafters/heads",)
OF_ALL_TO_READ = 0o644
"""Mode of files in the cache, whatever the umask is: a file that others may write is refused."""
KV_CACHE = "kv"
"""Directory of keys and values, unless another is named."""
COSTS = ".costs"
"""Suffix of the file of measured step costs (`runtime.checkpoint.costs`), beside an engine."""

Range = tuple[int, int]
"""A range of a file's bytes: the first, and one past the last."""
_seen: dict[tuple[Stamp | Range, ...], str] = {}  # by this process
_begun: dict[Stamp, "Future[str]"] = {}
_LARGE_BYTES = 16 << 20


def cache_dir() -> Path:
    """`SPECDEC_CACHE_DIR`, else `specdec` in the user's cache directory. It may not exist yet.

    SpecDecError if other users could have written into it.
    """
    directory = _place()
    check_private_dir(directory)
    for name in _PARTS:
        check_private_dir(directory / name, directory)
    return directory


def _place() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    return Path(os.environ.get("SPECDEC_CACHE_DIR") or default).absolute()


def build_code(package: Path = _PACKAGE) -> list[Path]:
    """Sources in `runtime` that an engine's content depends on: all except `LEFT_OUT`."""
    found = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return sorted(path for path in found if not is_left_out(path.relative_to(package)))


def is_left_out(path: Path) -> bool:
    """True for a source, given by its path in `runtime`, that does not determine an engine's content."""
    return path.parts[0] in LEFT_OUT and not any(path.is_relative_to(folder) for folder in _BUT)


def digests_of_build_code(package: Path = _PACKAGE) -> list[str]:
    """Names and digests of the sources in `build_code`."""
    return [f"{path.relative_to(package)} {digest([path.read_text('utf-8')])}" for path in build_code(package)]


def make_cache_dir() -> Path:
    """The cache directory, made if it does not exist; OSError if it cannot be made."""
    directory = cache_dir()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return cache_dir()


def check_private_dir(directory: Path, *above: Path) -> None:
    """SpecDecError for a directory that belongs to another user (root is allowed), or that other users may write into.

    A group's write permission is allowed inside a directory `above` that the group cannot enter: with umask 002 all
    parts of a cache have it, and the cache itself has mode 0700. It is not allowed in a link's target, which may be
    reachable by another path.
    """
    try:
        stat = directory.stat()
        is_closed = not directory.is_symlink() and any(not parent.stat().st_mode & 0o011 for parent in above)
    except OSError:
        return
    if stat.st_uid not in (os.getuid(), 0):
        hint = "name another directory in SPECDEC_CACHE_DIR"
        raise SpecDecError(_owned(stat, "the cache directory", directory), hint=hint, code="cache_of_others")
    if stat.st_mode & 0o022 and not is_closed:
        raise _open_to_others("the cache directory", directory)


def check_private_file(path: Path) -> None:
    """SpecDecError as from `check_private_dir`, for a file or a directory inside the cache.

    No file may be writable by all users. A group's write permission (umask 002) is allowed if the group cannot enter
    the cache's directory, and the file has no other name elsewhere.
    """
    try:
        stat = path.stat()
        is_closed = not path.is_symlink() and not _place().stat().st_mode & 0o011 and stat.st_nlink == 1
    except OSError:
        return
    if stat.st_uid not in (os.getuid(), 0):
        raise SpecDecError(_owned(stat, "a file in the cache", path), hint="remove it")
    if stat.st_mode & (0o002 if is_closed else 0o022):
        raise _open_to_others("a file in the cache", path)


def _owned(stat: os.stat_result, what: str, path: Path) -> str:
    return f"{what} belongs to another user (number {stat.st_uid}), who could have put code into it: {path}"


def _open_to_others(what: str, path: Path) -> SpecDecError:
    return SpecDecError(
        f"other users may write into {what}, and could have put code into it: {path}",
        hint=f"remove it, or trust what is there: chmod go-w {path}",
    )


def check_private_entry(entry: Path) -> None:
    """`check_private_file`, for a directory in the cache and everything in it."""
    for path in entry.rglob("*"):
        check_private_file(path)


def make_private(entry: Path) -> None:
    """Take away other users' permission to write into a directory that this process has just made (umask 000)."""
    for path in (entry, *entry.rglob("*")):
        if not path.is_symlink() and (mode := path.stat().st_mode) & 0o022:
            path.chmod(mode & ~0o022)


@contextmanager
def locked_entry(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Within the block, be the only process that makes the cache's entry `path`. Files of it that a killed process left
    are removed. Calls `on_wait` if another process is making it. SpecDecError if the cache cannot be written.
    """
    try:
        make_cache_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        raise unwritable(error) from error
    try:
        for left_over in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield
    finally:
        lock.release()


def unwritable(error: OSError) -> SpecDecError:
    return SpecDecError(
        f"the cache directory cannot be written ({error.strerror or error}): {cache_dir()}",
        hint="name another directory in SPECDEC_CACHE_DIR",
        code="cache_unwritable",
    )


@contextmanager
def used_entry(path: Path) -> Iterator[bool]:
    """Yield True if the cache's entry `path` exists; then it is marked as used, and protected within the block."""
    with flocked(path, fcntl.LOCK_SH) as is_there:
        if is_there:
            with contextlib.suppress(OSError):  # a cache that is only read
                os.utime(path)
        yield is_there


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


def is_used(path: Path) -> bool:
    """True if a process uses an entry now, and always on a file system without locks."""
    with flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_unused:
        return not is_unused


def remove_left_over(path: Path) -> None:
    """Remove hidden directories left by a process that was killed after the cache's entry `path` existed."""
    if any(path.parent.glob(f".{path.name}.*")):
        with contextlib.suppress(SpecDecError), locked_entry(path, lambda: None):
            pass


def sealed(data: bytes) -> bytes:
    """Content of a cache file, followed by its SHA-256, so that a cut-off file is noticed."""
    return data + hashlib.sha256(data).digest()


def read_sealed(path: Path) -> bytes | None:
    """Read sealed content; None if absent or damaged. SpecDecError for a file in the cache that others may write."""
    if path.is_relative_to(_place()):
        check_private_file(path)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    size = len(data) - hashlib.sha256().digest_size
    return data[:size] if size > 0 and sealed(data[:size]) == data else None


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
    if not (_place() / WEIGHTS).is_dir():
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


def size_in_bytes(text: str) -> int | None:
    """Bytes of `500M`, `1.5T` (M is 1,000 K), `20GiB` (Gi is 1,024 Mi) or a number; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if found is None:
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[(found[2] or "").upper()])


def max_cache_bytes() -> int:
    """Most bytes that engines may take: SPECDEC_CACHE_SIZE, such as 20G. SpecDecError if it is no size."""
    text = os.environ.get("SPECDEC_CACHE_SIZE") or _USUAL_SIZE
    size = size_in_bytes(text)
    if size is None:
        raise SpecDecError(f"SPECDEC_CACHE_SIZE is no size: {text}", hint=f"write {SIZES}")
    return size


def unique_bytes(paths: Iterable[Path]) -> int:
    """Bytes of all files in these directories; a file with several links counts once."""
    found = (state for path in paths for _, state in files_below(path))
    return sum({(state.st_dev, state.st_ino): state.st_size for state in found}.values())


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
