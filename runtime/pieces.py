"""What a checkpoint is written of, one piece at a time, so that memory does not grow with the model."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.source import DTYPES, SourceTensor, load_tensors

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by their names."""


@dataclass(frozen=True)
class Piece:
    """Tensors that are written, and how they are made of the model's. Their forms are known before their values."""

    sources: tuple[SourceTensor, ...]
    forms: Forms
    make: Callable[[list[Tensor]], dict[str, Tensor]]


def forms_of(tensors: Mapping[str, Tensor]) -> Forms:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_pieces(path: Path, pieces: Seq[Piece], progress: Progress) -> None:
    """Write a safetensors file: a length (8 bytes, little endian), a JSON header, then the data."""
    header, offset = {}, 0
    for piece in pieces:
        for name, (dtype, shape) in piece.forms.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of 8
    done = 0
    with open(path, "wb") as output:
        output.write(struct.pack("<Q", len(encoded)) + encoded)
        for piece in pieces:
            made = piece.make(load_tensors(piece.sources))
            assert forms_of(made) == piece.forms
            for tensor in (made[name] for name in piece.forms):
                output.write(_bytes_of(tensor))
                done += tensor.nbytes
                progress(done, offset)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return array.data
