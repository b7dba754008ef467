"""Memory from the system, zeroed page by page when it is first used: asked for in huge pages, kept, and given back."""

import ctypes
import gc
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

# mallopt(3), of glibc: what is free at the top of the heap is given back beyond the first, the heap grows by the
# second, and what is larger than the third is not of the heap (32 MiB is the most it takes).
_MALLOC = {-1: 1 << 30, -2: 64 << 20, -3: 32 << 20}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python has no name of it before 3.13
Mapping = TypeVar("Mapping", bound=mmap.mmap)
# Of what may never be used up: a huge page, 2 MiB, is zeroed as a whole when a byte of it is used, and made room for.
_SMALL_PAGES_FIRST = 2 << 20
_LITTLE_BYTES = 256 << 20
"""Weights of which what may be free is not worth to be looked for: it takes a quarter of a second."""
_shared = threading.local()
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> None:
    """Have this process keep what a step frees for the next one, unless its environment says what is to be kept.

    Else the system takes it back, and zeroes each page of it again: 28,000 of them in a prompt of 900 tokens of a model
    of 101 M parameters, a quarter of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and not os.environ.keys() & set(_MALLOC_VARIABLES):
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def huge_pages(num_bytes: int, *, small_first: int = 0) -> Tensor:
    """(num_bytes,) uint8 zeros, this process's own: what a fork of it writes there is the fork's.

    The first `small_first` bytes, a multiple of the size of a page, are in small pages.

    Python maps memory to be shared with forks unless told otherwise, and the system has huge pages for private memory
    where it may be asked for them (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`).
    """
    memory = _map(mmap.mmap, max(num_bytes, 1))
    if small_first:
        small_pages(memory, 0, min(small_first, len(memory)))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a device; on the CPU what is never used takes no memory, and zeroing it no time.

    The first of them are in small pages: of the 60 pools of a model of 135 M parameters the first prompt would take
    240 MB and a quarter of a second.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if getattr(_shared, "file", None) is not None:
        return _next_of_file(num_bytes).view(dtype).view(shape)
    return huge_pages(num_bytes, small_first=_SMALL_PAGES_FIRST).view(dtype).view(shape)


@contextmanager
def zeros_in(file: int) -> Iterator[None]:
    """Within the block, `zeros` on the CPU are memory of this file, each behind the one before.

    Two processes that inherit the file and ask for the same shapes have the same memory.
    """
    _shared.file, _shared.end = file, 0
    try:
        yield
    finally:
        _shared.file = None


def _next_of_file(num_bytes: int) -> Tensor:
    start, size = _shared.end, -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    _shared.end = start + size
    if os.fstat(_shared.file).st_size < _shared.end:
        os.ftruncate(_shared.file, _shared.end)
    return torch.frombuffer(mmap.mmap(_shared.file, size, offset=start), dtype=torch.uint8)[:num_bytes]


def reserve(kind: type[Mapping], num_bytes: int) -> Mapping:
    """Like `zeros`, as a mapping of which the system need not have all memory at once."""
    return _map(kind, num_bytes, _NO_RESERVE)


def small_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Have `num_bytes` bytes from `start` on in pages of the usual size, not in huge pages."""
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE, start, num_bytes)


def _map(kind: type[Mapping], num_bytes: int, flags: int = 0) -> Mapping:
    memory = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def what_is_there_stays() -> Iterator[None]:
    """Within the block, collect only garbage made in it: looking through all of torch's objects takes long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def trim(num_bytes: float = math.inf) -> None:
    """Give free memory, and objects that only refer to each other (such as an export's graphs), back to the system
    before `num_bytes` bytes of weights are loaded; for few bytes it is not worth the time.
    """
    if num_bytes <= _LITTLE_BYTES:
        return
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if malloc_trim is not None:
        malloc_trim(0)


def give_back(memory: Tensor) -> None:
    """Give the pages of memory from `huge_pages` back to the system, for every tensor that shares it: they become
    zeros.

    For memory that is still referenced, but never read again.
    """
    storage = memory.untyped_storage()
    give_back_pages(storage.data_ptr(), storage.nbytes())


def give_back_pages(address: int, num_bytes: int) -> None:
    """`give_back` for the pages from this address on."""
    if hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)
