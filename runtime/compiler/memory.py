"""Memory from the system itself: zeroed page by page when it is first used, in huge pages where there are such."""

import ctypes
import mmap

import torch
from torch import Tensor


def huge_pages(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 zeros, this process's own: what a fork of it writes there is the fork's.

    Python maps memory to be shared with forks unless told otherwise, and the system has huge pages for private memory
    where it may be asked for them (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`).
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def give_back(memory: Tensor) -> None:
    """Let the system have the pages of what `huge_pages` made, and of all that shares it: they are zeros from now on.

    For memory that somebody still refers to, and nobody reads again.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        storage = memory.untyped_storage()
        start, num_bytes = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        ctypes.CDLL(None).madvise(start, num_bytes, mmap.MADV_DONTNEED)
