"""The header of a safetensors file, read with ordinary reads and checked to its end.

If a mapped file gets shorter, the process ends with a signal; if a file that is read gets shorter, that is an error.
Nothing here needs torch.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, TypeGuard

from safetensors import SafetensorError

_LENGTH_BYTES = 8
_OF_GIT_LFS = b"version "  # and an address, a digest, a size
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound
_MAX_ELEMENTS = 2**63 - 1
_METADATA = "__metadata__"
NUM_BITS = {  # of safetensors' dtypes, in its order
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: `dtype` is safetensors' name, and bytes `start` to `end` of the file are its values."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """Header of a file; `tensors` are in the order in which they lie in the file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(file: BinaryIO) -> Header:
    """The header of a file; SafetensorError unless the tensors fill the file to its end, one after the other, each with
    as many bytes as its shape needs.
    """
    header, start = _read_json(file)
    metadata = header.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(f"`{_METADATA}` is not of texts")
    relative = {name: _parse_entry(name, entry) for name, entry in header.items()}
    tensors, first = {}, start
    for name, entry in sorted(relative.items(), key=lambda item: (item[1].start, item[1].end)):
        if first + entry.start != start:
            _refuse(f"its tensors do not lie one after the other, such as `{name}`")
        tensors[name] = TensorEntry(entry.dtype, entry.shape, start, first + entry.end)
        start = first + entry.end
    num_bytes = os.fstat(file.fileno()).st_size
    if start != num_bytes:
        _refuse(f"{num_bytes:,} bytes, where its header speaks of {start:,}")
    return Header(tensors, metadata)


def read_metadata(file: BinaryIO) -> dict[str, Any]:
    """Metadata of a file, even if it is truncated or its tensors are inconsistent. SafetensorError if it has no header
    of JSON.
    """
    metadata = _read_json(file)[0].get(_METADATA)
    return metadata if isinstance(metadata, dict) else {}


def _read_json(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The JSON object of the header, and the offset at which the tensors begin."""
    file.seek(0)
    start = file.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if start == _OF_GIT_LFS:
        _refuse("it is a pointer of Git LFS, and `git lfs pull` fetches the file")
    if len(start) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
        _refuse("it has no header")
    encoded = file.read(length)
    if len(encoded) < length:
        _refuse("it ends before its header does")
    try:
        header = json.loads(encoded.decode())
    except (ValueError, RecursionError) as error:
        raise SafetensorError(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        _refuse("its header is not a JSON object")
    return header, _LENGTH_BYTES + length


def _parse_entry(name: str, entry: Any) -> TensorEntry:
    """Parse an entry, with its offsets relative to the first tensor as in the header."""
    if not isinstance(entry, dict):
        _refuse(f"`{name}` is not described")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in NUM_BITS:
        _refuse(f"`{name}` has an unknown dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        _refuse(f"`{name}` has no shape or no place")
    start, end = offsets
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        _refuse(f"`{name}` has a shape that no memory is large enough for")
    if (end - start) * 8 != math.prod(shape) * NUM_BITS[dtype]:
        _refuse(f"`{name}` has {end - start:,} bytes, which does not match its shape")
    return TensorEntry(dtype, tuple(shape), start, end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _refuse(problem: str) -> NoReturn:
    raise SafetensorError(problem)
