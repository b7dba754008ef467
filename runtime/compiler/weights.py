"""A compiled step's weights: in a file of their own, laid out as the step wants them, and in memory once.

Packaged with the step they would be in memory twice, mapped and copied, and the package unpacked at every opening.
"""

import json
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runtime.compiler.memory import huge_pages
from runtime.errors import SpecDecError
from runtime.source import DTYPES
from runtime.tensor_file import TensorEntry, read_header

_ALIGNMENT = 64  # bytes: a cache line, and what the compiled step may assume
_SHARED = "shared"
_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}

Layout = dict[str, tuple[str, list[int]]]
"""The dtype and shape of each weight, by its name."""


def save_weights(path: Path, weights: dict[str, Tensor], known: Mapping[str, Tensor] | None = None) -> None:
    """Write a safetensors file of contiguous tensors; those that share memory are written each for itself.

    Of those that are among the `known` ones of another step only the name there is written.
    """
    shared = {name: other for name, weight in weights.items() if (other := _find(weight, known or {})) is not None}
    path.touch()
    mode = path.stat().st_mode
    own = {name: weight.detach().clone() for name, weight in weights.items() if name not in shared}
    save_file(own, path, metadata={_SHARED: json.dumps(shared)} if shared else None)
    path.chmod(mode)  # or no other user could read it


def _find(weight: Tensor, known: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor of the same bits."""
    for name, other in known.items():
        if (other.dtype, other.shape) == (weight.dtype, weight.shape) and torch.equal(other, weight):
            return name
    return None


def layout_of(weights: dict[str, Tensor]) -> Layout:
    return {name: (str(weight.dtype).removeprefix("torch."), list(weight.shape)) for name, weight in weights.items()}


def open_weights(path: Path, wanted: Layout, known: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The file's tensors, in one piece of memory, and behind them those of `known` that the file names.

    Raises SafetensorError where it is damaged. SpecDecError unless they are what the step wants: it reads their memory
    as it was compiled to.
    """
    with path.open("rb") as file:
        header = read_header(file)
        tensors, shared = header.tensors, _shared(path, header.metadata, known or {})
        _check_layout(path, _layout_in(tensors) | layout_of(shared), wanted)
        memory = huge_pages(sum(_aligned(entry.num_bytes) for entry in tensors.values()))
        weights, start = {}, 0
        for name, entry in tensors.items():
            weights[name] = _read(file, entry, memory[start : start + entry.num_bytes])
            start += _aligned(entry.num_bytes)
    return weights | shared


def _layout_in(tensors: dict[str, TensorEntry]) -> Layout:
    return {name: (_NAMES.get(entry.dtype, entry.dtype), list(entry.shape)) for name, entry in tensors.items()}


def _shared(path: Path, metadata: dict[str, str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of another step that the file names."""
    try:
        names = dict(json.loads(metadata.get(_SHARED, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise SafetensorError(f"`{_SHARED}` does not say which weights are the target's: {error}") from error
    if missing := sorted(set(names.values()) - set(known)):
        _refuse(path, f"names {len(missing)} of the target's weights that it has not, such as: {missing[0]}")
    return {name: known[other] for name, other in names.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The file's tensors, each in memory of its own. Raises SafetensorError where it is damaged.

    Read, not mapped: a file that is written over ends no process, now or later.
    """
    with path.open("rb") as file:
        tensors = read_header(file).tensors
        for name, entry in tensors.items():
            if entry.dtype not in DTYPES:
                raise SafetensorError(f"`{name}` has a dtype that no checkpoint has: {entry.dtype}")
        return {
            name: _read(file, entry, torch.empty(entry.num_bytes, dtype=torch.uint8)) for name, entry in tensors.items()
        }


def _read(file: BufferedReader, entry: TensorEntry, values: Tensor) -> Tensor:
    """A tensor of the file, in the bytes `values`."""
    file.seek(entry.start)
    if file.readinto(values.numpy().data) != entry.num_bytes:
        raise SafetensorError("the file ends before its weights do")
    return values.view(DTYPES[entry.dtype]).view(entry.shape)


def _check_layout(path: Path, found: Layout, wanted: Layout) -> None:
    lacking, foreign = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
    if lacking:
        _refuse(path, f"lacks {len(lacking)} of the step's weights, such as: {lacking[0]}")
    if foreign:
        _refuse(path, f"has {len(foreign)} weights that the step has not, such as: {foreign[0]}")
    for name, (dtype, shape) in wanted.items():
        if found[name] != (dtype, shape):
            _refuse(path, f"has {found[name][0]} {found[name][1]} where the step wants {dtype} {shape}: {name}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise SpecDecError(f"`{path}` {problem}", hint="build it again", code="engine")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
