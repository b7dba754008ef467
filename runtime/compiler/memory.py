"""Memory from the system itself: zeroed page by page when it is first used, in huge pages where there are such."""

import mmap

import torch
from torch import Tensor


def huge_pages(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 zeros. Weights are read 3 to 5 % faster from huge pages than from those of 4 KiB."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
