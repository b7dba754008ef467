"""Integers out of the words that checkpoints pack them into, and scales as one for each output and group.

Nothing here looks at values, so that shapes are found on `meta`.
"""

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions in a word of eight neighbouring numbers in AWQ."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """(rows, numbers) uint8 of (rows, words) int32 in which numbers of 4 or 8 bits lie, the first lowest."""
    numbers: Tensor = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    halves: Tensor = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
    return halves


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack 4 bits in AWQ's order, like `unpack`."""
    numbers = unpack(words, 4)
    ordered: Tensor = numbers.view(numbers.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)
    return ordered


def signed(numbers: Tensor, bits: int) -> Tensor:
    """int8 of counts from 0: half of their range less."""
    centred: Tensor = numbers.to(torch.int16) - 2 ** (bits - 1)
    return centred.to(torch.int8)


def scales_of(scales: Tensor, outputs: int, block_rows: int = 1) -> Tensor:
    """(outputs, groups) of scales for a whole weight, for each output, or for blocks of outputs and groups."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    if scales.dim() == 1:
        return scales[:, None]
    if scales.shape[0] != outputs and block_rows > 1:
        return scales.repeat_interleave(block_rows, 0)[:outputs]
    return scales
