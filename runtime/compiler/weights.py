"""A compiled step's weights: in a file of their own, laid out as the step wants them, and in memory once.

Packaged with the step they would be in memory twice, mapped and copied, and the package unpacked at every opening.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.compiler.memory import huge_pages

_ALIGNMENT = 64  # bytes: a cache line, and what the compiled step may assume
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file of contiguous tensors; those that share memory are written each for itself."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: weight.detach().clone() for name, weight in weights.items()}, path)
    path.chmod(mode)  # or nobody else could read it


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
            file.readinto(values.numpy().data)
            weights[name] = values.view(_DTYPES[entry["dtype"]]).view(entry["shape"])
            start += _aligned(sizes[name])
    return weights


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
