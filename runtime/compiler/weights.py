"""A compiled step's weights: in a file of their own, laid out as the step wants them, and in memory once.

Packaged with the step they would be in memory twice, mapped and copied, and the package unpacked at every opening.
"""

import json
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.compiler.memory import huge_pages
from runtime.errors import SpecDecError

_ALIGNMENT = 64  # bytes: a cache line, and what the compiled step may assume
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}
_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in _DTYPES.items()}

Layout = dict[str, tuple[str, list[int]]]
"""The dtype and shape of each weight, by its name."""


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file of contiguous tensors; those that share memory are written each for itself."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: weight.detach().clone() for name, weight in weights.items()}, path)
    path.chmod(mode)  # or nobody else could read it


def layout_of(weights: dict[str, Tensor]) -> Layout:
    return {name: (str(weight.dtype).removeprefix("torch."), list(weight.shape)) for name, weight in weights.items()}


def check_layout(path: Path, wanted: Layout) -> None:
    """SpecDecError unless the file has the weights that a step wants: a step reads its memory as it was compiled to."""
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        lacking, foreign = sorted(set(wanted) - names), sorted(names - set(wanted))
        if lacking:
            _refuse(path, f"lacks {len(lacking)} of the step's weights, such as: {lacking[0]}")
        if foreign:
            _refuse(path, f"has {len(foreign)} weights that the step has not, such as: {foreign[0]}")
        for name, (dtype, shape) in wanted.items():
            weight = file.get_slice(name)
            found = (_NAMES.get(weight.get_dtype(), weight.get_dtype()), weight.get_shape())
            if found != (dtype, shape):
                _refuse(path, f"has {found[0]} {found[1]} where the step wants {dtype} {shape}: {name}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise SpecDecError(f"`{path}` {problem}", hint="build it again", fact="engine")


def open_weights(path: Path) -> dict[str, Tensor]:
    """The file's tensors, in one piece of memory. Raises SafetensorError where it is damaged."""
    with safe_open(path, "pt"):  # checks the header, and that the file goes on to its end
        pass
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        data_start = file.tell()
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
    return weights


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
