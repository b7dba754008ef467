"""Weights in nf4 and fp4 of bitsandbytes, dequantized when they are read: the 16 numbers of their code books have
fractions, and our kernels' code books have integers.

number[i] = quant_map[code[i]] x absmax[i // blocksize] in float32, then in the dtype that the file names. absmax is
float32, or has 8 bits with its own map, scales and offset (double quantization).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.quant.weight import damaged
from runtime.checkpoint.source import SourceTensor, load_tensors

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_PARTS = ("absmax", "quant_map")
_NESTED = ("nested_absmax", "nested_quant_map")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_STATE_BYTES = 4096


@dataclass(frozen=True)
class _Numbers:
    """Computes a weight's numbers from its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int
    nested_block_size: int
    offset: float

    def __call__(
        self,
        codes: Tensor,  # (bytes, 1) of any dtype, two codes a byte, the first in the upper half
        scales: Tensor,  # (blocks,) float32, or uint8 codes
        numbers: Tensor,  # (16,) float32
        scales_of_scales: Tensor | None = None,  # (blocks of scales,) float32
        numbers_of_scales: Tensor | None = None,  # (256,) float32
    ) -> Tensor:
        data = codes.flatten().view(torch.uint8)
        if scales_of_scales is not None and numbers_of_scales is not None:
            of_blocks = scales_of_scales.repeat_interleave(self.nested_block_size)[: len(scales)]
            scales = numbers_of_scales[scales.int()] * of_blocks + self.offset
        meant = numbers[torch.stack((data >> 4, data & 15), dim=-1).flatten().int()]
        meant *= scales.repeat_interleave(self.block_size)[: len(meant)]
        return meant.view(self.shape).to(self.dtype)


def numbers_of_4_bits(tensors: list[SourceTensor]) -> list[SourceTensor]:
    """The tensors, with one in place of all parts of a quantized weight. SpecDecError if the parts do not fit."""
    by_name = {tensor.name: tensor for tensor in tensors}
    states = {name.removesuffix(end): name for name in by_name for end in _STATES if name.endswith(end)}
    made, taken = [], set()
    for name, state in states.items():
        parts = [name, *(f"{name}.{part}" for part in _PARTS)]
        if f"{name}.{_NESTED[0]}" in by_name:
            parts += [f"{name}.{part}" for part in _NESTED]
        missing = next((part for part in parts if part not in by_name), None)
        if missing is not None:
            raise damaged(f"a tensor of a quantized layer is missing: {missing}")
        made.append(_weight(name, by_name[state], [by_name[part] for part in parts]))
        taken |= {*parts, state}
    others = [tensor for name, tensor in by_name.items() if name not in taken]
    alone = next((one.name for one in others if one.name.endswith(f".{_PARTS[0]}")), None)
    if alone is not None:
        missing = alone.removesuffix(_PARTS[0]) + "quant_state"
        raise damaged(f"a tensor of a quantized layer is missing: {missing}")
    return made + others


def _weight(name: str, state: SourceTensor, parts: list[SourceTensor]) -> SourceTensor:
    make, codes = _numbers_of(name, _read_state(name, state)), parts[0]
    num_blocks = math.ceil(math.prod(make.shape) / make.block_size)
    wanted = [(num_blocks,), (16,)]
    if is_nested := len(parts) > 3:
        wanted += [(math.ceil(num_blocks / make.nested_block_size),), (256,)]
    dtypes = [torch.uint8 if is_nested else torch.float32, *[torch.float32] * (len(wanted) - 1)]
    forms = [(one.shape, one.dtype) for one in parts[1:]]
    has_codes = codes.num_elements * codes.dtype.itemsize * 2 == math.prod(make.shape)
    if forms != list(zip(wanted, dtypes, strict=True)) or not has_codes:
        shapes = ", ".join(f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in parts)
        raise damaged(
            f"the tensors of `{name}`, {list(make.shape)} in blocks of {make.block_size}, do not fit each other: "
            f"{shapes}"
        )
    return replace(codes, shape=make.shape, dtype=make.dtype, made_of=tuple(parts), make=make)


def _read_state(name: str, state: SourceTensor) -> Mapping[str, Any]:
    if state.dtype != torch.uint8 or state.num_elements > _MAX_STATE_BYTES:
        return {}
    try:
        said = json.loads(bytes(load_tensors([state])[0].tolist()))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _numbers_of(name: str, said: Mapping[str, Any]) -> _Numbers:
    try:
        shape, dtype = tuple(map(int, said["shape"])), _DTYPES[said["dtype"]]
        block_size, nested = int(said["blocksize"]), int(said.get("nested_blocksize", 1))
        made = _Numbers(shape, dtype, block_size, nested, float(said.get("nested_offset", 0.0)))
        if min(block_size, nested, *shape) < 1 or not math.isfinite(made.offset):
            raise ValueError("it is not positive")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(f"`{name}.quant_state` does not say what the weight is: {error!r}") from error
    return made
