"""A compiled step's weights: in a file of their own, laid out as the step wants them, and in memory once.

Packaged with the step they would be in memory twice, mapped and copied, and the package unpacked at every opening.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.compiler.memory import huge_pages
from runtime.errors import SpecDecError

_ALIGNMENT = 64  # bytes: a cache line, and what the compiled step may assume
_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool,
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_SHARED = "shared"
_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in _DTYPES.items()}

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
    path.chmod(mode)  # or nobody else could read it


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
    with safe_open(path, "pt"):  # checks the header, and that the file goes on to its end
        pass
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shared = _shared(path, header.pop("__metadata__", {}), known or {})
        data_start = file.tell()
        found = {name: (_NAMES.get(e["dtype"], e["dtype"]), e["shape"]) for name, e in header.items()}
        _check_layout(path, found | layout_of(shared), wanted)
        sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
        memory = huge_pages(sum(_aligned(size) for size in sizes.values()))
        weights, start = {}, 0
        for name, entry in header.items():
            values = memory[start : start + sizes[name]]
            file.seek(data_start + entry["data_offsets"][0])
            if file.readinto(values.numpy().data) != sizes[name]:
                raise SafetensorError("the file ends before its weights do")
            weights[name] = values.view(_DTYPES[entry["dtype"]]).view(entry["shape"])
            start += _aligned(sizes[name])
    return weights | shared


def _shared(path: Path, metadata: dict[str, str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the tensors of another step those that the file names."""
    names = json.loads(metadata.get(_SHARED, "{}"))
    if missing := sorted(set(names.values()) - set(known)):
        _refuse(path, f"names {len(missing)} of the target's weights that it has not, such as: {missing[0]}")
    return {name: known[other] for name, other in names.items()}


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
    raise SpecDecError(f"`{path}` {problem}", hint="build it again", fact="engine")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
