"""Messages from rank 0 to the others: lists of whole numbers on a pipe, each after its length. Nothing is answered."""

import os
from collections.abc import Sequence as Seq
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

STEP, POOL, COPY = 0, 1, 2
"""A batch to compute; a new K/V pool, with numbers of blocks and of tokens per block; a block to copy to another."""


def send(pipe: int, *parts: Seq[int] | Tensor) -> None:
    """Raises OSError if the reader has closed."""
    flat = [np.asarray(part, dtype=np.int64).ravel() for part in parts]
    numbers = np.concatenate([np.array([sum(map(len, flat))], dtype=np.int64), *flat])
    left = memoryview(numbers.tobytes())
    while left:
        left = left[os.write(pipe, left) :]


def receive(pipe: BinaryIO) -> Tensor | None:
    """The next message, int64; None when there will be no more."""
    length = pipe.read(8)
    if len(length) < 8:
        return None
    num_bytes = 8 * int.from_bytes(length, "little")
    data = bytearray(pipe.read(num_bytes))
    return torch.frombuffer(data, dtype=torch.int64) if len(data) == num_bytes else None


def of_batch(tensors: Seq[Tensor]) -> list[Seq[int] | Tensor]:
    """A batch's tensors as a message: B, Q, N and T before them."""
    (B, Q), N, T = tensors[0].shape, tensors[3].shape[1], tensors[4].shape[0]
    return [(STEP, B, Q, N, T), *(tensor.cpu() for tensor in tensors)]


def to_batch(message: Tensor, device: torch.device) -> list[Tensor]:
    B, Q, N, T = message[1:5].tolist()
    flat = message[5:].to(device).split_with_sizes([B * Q, B * Q, B * Q, B * N, T])
    return [*(part.view(B, Q) for part in flat[:3]), flat[3].view(B, N), flat[4]]
