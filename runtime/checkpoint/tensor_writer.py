"""Tensors of a checkpoint, written one at a time so that memory does not grow with the model."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoint.source import DTYPES, SourceTensor, load_tensors

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of tensors, by the tensors' names."""


@dataclass(frozen=True)
class Piece:
    """Tensors to write, and how to make them from the model's tensors. Their forms are known before their values."""

    sources: tuple[SourceTensor, ...]
    forms: Forms
    make: Callable[[list[Tensor]], dict[str, Tensor]]


def forms_of(tensors: Mapping[str, Tensor]) -> Forms:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


Share = Callable[[str, Tensor], Tensor]
"""Function that is called with a tensor's name and the tensor, and gives the part that one of several files gets."""


def write_pieces(path: Path, pieces: Seq[Piece], progress: Progress) -> None:
    """Write a safetensors file: a length (8 bytes, little endian), a JSON header, then the data."""
    write_shares({path: lambda name, tensor: tensor}, pieces, progress)


def write_shares(files: Mapping[Path, Share], pieces: Seq[Piece], progress: Progress) -> None:
    """Write several files at once, each with its share of every tensor."""
    forms = {path: _shared_forms(pieces, share) for path, share in files.items()}
    num_bytes = sum(map(_num_bytes, forms.values()))
    done = 0
    with ExitStack() as stack:
        outputs = {path: stack.enter_context(path.open("wb")) for path in files}
        for path, output in outputs.items():
            output.write(_header(forms[path]))
        progress(done, num_bytes)
        for piece in pieces:
            made = piece.make(load_tensors(piece.sources))
            assert forms_of(made) == piece.forms
            for name in piece.forms:
                for path, output in outputs.items():
                    tensor = files[path](name, made[name])
                    output.write(_bytes_of(tensor))
                    done += tensor.nbytes
                    progress(done, num_bytes)


def _num_bytes(forms: Forms) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms.values())


def _shared_forms(pieces: Seq[Piece], share: Share) -> Forms:
    forms = {name: form for piece in pieces for name, form in piece.forms.items()}
    without_values = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in forms.items()}
    return forms_of({name: share(name, tensor) for name, tensor in without_values.items()})


def _header(forms: Forms) -> bytes:
    header, offset = {}, 0
    for name, (dtype, shape) in forms.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of 8
    return struct.pack("<Q", len(encoded)) + encoded


def _bytes_of(tensor: Tensor) -> memoryview:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return array.data
