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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.util.errors import SpecDecError
from runtime.util.files import flocked

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZES = "bytes, or a number with K, M, G or T (1,000 bytes and so on: 20G) or Ki, Mi, Gi or Ti (1,024: 20GiB)"
"""Forms of a size such as 20G, for hints."""
PROFILES = "profiles"
"""Directory of the models' default profiles (`runtime.builder.profile`)."""
WEIGHTS = "weights"
"""Directory of files that several engines share, each named by its SHA-256 (`runtime.checkpoint.cached_engines`)."""
_PARTS = ("engines", "digests", PROFILES, WEIGHTS)
_USUAL_SIZE = "50G"
OF_ALL_TO_READ = 0o644
"""Mode of files in the cache, whatever the umask is: a file that others may write is refused."""
KV_CACHE = "kv"
"""Directory of keys and values, unless another is named."""


def cache_dir() -> Path:
    """`SPECDEC_CACHE_DIR`, else `specdec` in the user's cache directory. It may not exist yet.

    SpecDecError if other users could have written into it.
    """
    directory = cache_path()
    check_private_dir(directory)
    for name in _PARTS:
        check_private_dir(directory / name, directory)
    return directory


def cache_path() -> Path:
    """The path of the cache directory, which may not exist, and is not checked."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    return Path(os.environ.get("SPECDEC_CACHE_DIR") or default).absolute()


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
        is_closed = not path.is_symlink() and not cache_path().stat().st_mode & 0o011 and stat.st_nlink == 1
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
    if path.is_relative_to(cache_path()):
        check_private_file(path)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    size = len(data) - hashlib.sha256().digest_size
    return data[:size] if size > 0 and sealed(data[:size]) == data else None


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
