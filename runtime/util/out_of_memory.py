"""Errors about memory that ran out, as a sentence: which limit was met, and how much would have been enough.

Imports no torch: memory may be too small even for that.
"""

import errno
import re
import resource
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from runtime.util.control_groups import free_memory
from runtime.util.errors import SpecDecError

_SAID = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|bad_alloc|failed to map segment|not enough memory",
    re.I,
)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.I)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): failed to map")
LEAST_ADDRESSES = 760 << 20
"""Address space that torch's libraries take, in bytes, before a model is read."""


class _Limit(NamedTuple):
    """A limit of the shell's `ulimit`."""

    flag: str
    what: str
    kind: int
    line: str
    """Name of the line in /proc/self/status with the bytes in use."""


_LIMITS = (
    _Limit("-v", "address space", resource.RLIMIT_AS, "VmSize"),
    _Limit("-d", "data", resource.RLIMIT_DATA, "VmData"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error, or an error that caused it, says that memory ran out."""
    return any(_is_of_memory(one) for one in _chain(error))


def out_of_memory(error: BaseException) -> SpecDecError:
    """The error to show for an error for which `is_out_of_memory` is true, with a hint about the limit that was met."""
    found = next(one for one in _chain(error) if _is_of_memory(one))
    asked = _bytes_asked(found)
    said = "there is not enough memory" + (f" for {_megabytes(asked)} more" if asked else "")
    if "cuda" in str(found).lower():
        return SpecDecError(f"{said} on the GPU", hint="free memory on the device, or lower the K/V cache's share")
    free = free_memory()
    for limit in _LIMITS:
        most, taken = resource.getrlimit(limit.kind)[0], _taken(limit.line)
        # Memory that was in use when the allocation failed may be free by now.
        if most != resource.RLIM_INFINITY and (taken + asked >= most or free > 2 * asked):
            return _beyond(limit, said, most, taken + asked)
    return SpecDecError(
        f"{said}: {_megabytes(free)} are free on this machine, or left by its control group",
        hint="free memory, raise the group's limit, or give a smaller K/V cache or model",
    )


def check_address_space() -> None:
    """SpecDecError if `ulimit -v` leaves too little for torch: some libraries would end without a message."""
    limit, most = _LIMITS[0], resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES:
        raise _beyond(limit, "there is not enough memory for torch", most, LEAST_ADDRESSES)


def _beyond(limit: _Limit, said: str, most: int, needed: int) -> SpecDecError:
    enough = -(-max(needed, most, LEAST_ADDRESSES) * 3 // 2048)
    return SpecDecError(
        f"{said}: `ulimit {limit.flag}` limits this process to {_megabytes(most)} of {limit.what}, and more than "
        f"{_megabytes(max(needed, most))} are needed",
        hint=f"raise it, to `ulimit {limit.flag} {enough}` or more, or lift it: `ulimit {limit.flag} unlimited`",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(10):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, SpecDecError):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = isinstance(error, RuntimeError | ImportError) and _SAID.search(str(error)) is not None
    return isinstance(error, MemoryError) or said


def _bytes_asked(error: BaseException) -> int:
    """Number of bytes that the failed allocation asked for; 0 if the error does not say."""
    if asked := _ASKED.search(str(error)):
        return int(float(asked[1]) * _UNITS[asked[2].lower()])
    library, torch = _LIBRARY.search(str(error)), find_spec("torch")
    if library and torch and torch.origin:
        path = Path(torch.origin).parent / "lib" / library[1]
        return path.stat().st_size if path.exists() else 0
    return 0


def _taken(line: str) -> int:
    """Bytes of memory that this process has in use; 0 if Linux does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(rf"^{line}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
