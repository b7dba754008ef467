"""Memory from the system, which zeroes each page at its first use: huge pages, memory that is kept, and given back."""

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

# glibc's mallopt(3), in bytes: free memory at the top of the heap that is kept (M_TRIM_THRESHOLD), by which the heap
# grows (M_TOP_PAD), and from which an allocation is outside the heap (M_MMAP_THRESHOLD, at most 32 MiB).
_MALLOC = {-1: 1 << 30, -2: 64 << 20, -3: 32 << 20}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python has no name for it before 3.13
Mapping = TypeVar("Mapping", bound=mmap.mmap)
# In bytes. A huge page of 2 MiB is zeroed, and takes memory, as a whole when its first byte is used.
_SMALL_PAGES_FIRST = 2 << 20
_LITTLE_BYTES = 256 << 20
"""Bytes of weights up to which no free memory is given back: that takes a quarter of a second."""
_shared = threading.local()
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> None:
    """Have this process keep the memory that a step frees for the next step, unless its environment sets how much is
    kept.

    Otherwise the system takes the memory back, and zeroes each page again: 28,000 pages for a prompt of 900 tokens with
    a model of 101 M parameters, which took a quarter of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and not os.environ.keys() & set(_MALLOC_VARIABLES):
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def huge_pages(num_bytes: int, *, small_first: int = 0) -> Tensor:
    """Zeros uint8 [num_bytes] in memory of this process alone: writes of a forked process go to its own copy. The first
    `small_first` bytes, a multiple of the page size, are in small pages.

    By default Python maps memory to be shared with forks. The system has huge pages for private memory only, if it may
    be asked for them (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`).
    """
    memory = _map(mmap.mmap, max(num_bytes, 1))
    if small_first:
        small_pages(memory, 0, min(small_first, len(memory)))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a device. On the CPU, unused parts take neither memory nor time. Their first bytes are in small pages:
    otherwise, with the 60 pools of a model of 135 M parameters, the first prompt would take 240 MB and a quarter of a
    second.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if getattr(_shared, "file", None) is not None:
        return _next_of_file(num_bytes).view(dtype).view(shape)
    return huge_pages(num_bytes, small_first=_SMALL_PAGES_FIRST).view(dtype).view(shape)


@contextmanager
def zeros_in(file: int) -> Iterator[None]:
    """Within the block, `zeros` on the CPU are consecutive parts of this file. Two processes that inherit the file and
    ask for the same shapes share the memory.
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
    """Zeros like `huge_pages`, as a mapping for which the system need not have all memory at once."""
    return _map(kind, num_bytes, _NO_RESERVE)


def small_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Have `num_bytes` bytes from `start` on in pages of the usual size (4 KiB), not in huge pages."""
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE, start, num_bytes)


def _map(kind: type[Mapping], num_bytes: int, flags: int = 0) -> Mapping:
    memory = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def what_is_there_stays() -> Iterator[None]:
    """Within the block, collect only garbage that was made in it: looking through all of torch's objects takes long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def trim(num_bytes: float = math.inf) -> None:
    """Give free memory, and objects that only refer to each other (such as an export's graphs), back to the system
    before `num_bytes` bytes of weights are loaded. For few bytes nothing is done, since it would take longer than it
    saves.
    """
    if num_bytes <= _LITTLE_BYTES:
        return
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if malloc_trim is not None:
        malloc_trim(0)


def give_back(memory: Tensor) -> None:
    """Give the pages of memory from `huge_pages` back to the system: the numbers of all tensors in it become zeros. For
    memory that is still referenced, but never read again.
    """
    storage = memory.untyped_storage()
    give_back_pages(storage.data_ptr(), storage.nbytes())


def give_back_pages(address: int, num_bytes: int) -> None:
    """`give_back` for the pages from this address on."""
    if hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)
