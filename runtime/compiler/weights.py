"""A compiled step's weights: in a file of their own, laid out as the step wants them, and in memory once.

Packaged with the step they would be in memory twice, mapped and copied, and the package unpacked at every opening.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

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


def open_weights(path: Path, wanted: Layout) -> dict[str, Tensor]:
    """The file's tensors, in one piece of memory. Raises SafetensorError where it is damaged.

    SpecDecError unless they are what the step wants: it reads their memory as it was compiled to.
    """
    with safe_open(path, "pt"):  # checks the header, and that the file goes on to its end
        pass
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        data_start = file.tell()
        _check_layout(path, header, wanted)
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


def _check_layout(path: Path, header: dict[str, Any], wanted: Layout) -> None:
    lacking, foreign = sorted(wanted.keys() - header), sorted(header.keys() - wanted)
    if lacking:
        _refuse(path, f"lacks {len(lacking)} of the step's weights, such as: {lacking[0]}")
    if foreign:
        _refuse(path, f"has {len(foreign)} weights that the step has not, such as: {foreign[0]}")
    for name, (dtype, shape) in wanted.items():
        found = _NAMES.get(header[name]["dtype"], header[name]["dtype"])
        if (found, header[name]["shape"]) != (dtype, shape):
            _refuse(path, f"has {found} {header[name]['shape']} where the step wants {dtype} {shape}: {name}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise SpecDecError(f"`{path}` {problem}", hint="build it again", fact="engine")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
