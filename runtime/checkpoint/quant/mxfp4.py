"""Weights of experts in MXFP4 (OCP Microscaling Formats, version 1.0), as in gpt-oss: 4-bit numbers, and a power of 2
for each 32 numbers of a row. The weights stay in 4 bits, or are dequantized to bfloat16, which holds them exactly.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.quant.weight import QuantizedWeight, damaged
from runtime.checkpoint.source import SourceTensor
from runtime.util.errors import SpecDecError

MXFP4 = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_SIZE = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_TWICE = tuple(int(2 * number) for number in _E2M1)
"""Twice the number that each code stands for: an integer."""


def experts_of_blocks(tensors: list[SourceTensor], model_dir: Path) -> list[SourceTensor]:
    """The tensors, with one tensor in place of each pair of blocks and scales. SpecDecError if there is no pair, if one
    of a pair is missing, or if the two do not fit each other.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    made = []
    for name, tensor in by_name.items():
        if name.endswith(_BLOCKS):
            if (numbers := name.removesuffix(_BLOCKS)) in by_name:
                raise SpecDecError(
                    f"the files have a weight twice, quantized and unquantized: `{numbers}` and `{name}`: {model_dir}",
                    hint="download or save the model again",
                )
            made.append(_experts(tensor, _beside(by_name, name, _BLOCKS, _SCALES)))
        elif name.endswith(_SCALES):
            _beside(by_name, name, _SCALES, _BLOCKS)
        else:
            made.append(tensor)
    if len(made) == len(tensors):
        raise damaged(f"config.json says that weights are quantized ({MXFP4}), and none are: {model_dir}")
    return made


def _beside(tensors: dict[str, SourceTensor], name: str, own: str, other: str) -> SourceTensor:
    wanted = name.removesuffix(own) + other
    if wanted not in tensors:
        raise damaged(f"a tensor of a quantized layer is missing: {wanted}")
    return tensors[wanted]


def _experts(blocks: SourceTensor, scales: SourceTensor) -> SourceTensor:
    *rows, num_bytes = blocks.shape
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not are_bytes or len(rows) != 3 or num_bytes * 2 != _BLOCK_SIZE or scales.shape != tuple(rows):
        raise damaged(
            f"the tensors of `{blocks.name.removesuffix(_BLOCKS)}` do not fit each other: {list(blocks.shape)} "
            f"{blocks.dtype} and {list(scales.shape)} {scales.dtype}"
        )
    num_experts, num_outputs, num_blocks = rows
    return replace(
        blocks,
        name=blocks.name.removesuffix(_BLOCKS),
        shape=(num_experts, num_blocks * _BLOCK_SIZE, num_outputs),
        dtype=torch.bfloat16,
        made_of=(blocks, scales),
        make=dequantize,
    )


def is_in_codes(tensor: SourceTensor) -> bool:
    """True for experts that `experts_of_blocks` made from blocks and scales."""
    return tensor.make is dequantize


def codes_of(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """The weights of all experts as one quantized weight [experts x outputs, inputs]. Its code book has twice the 4-bit
    numbers, and its bfloat16 scales are half the powers of 2.
    """
    powers = powers_of(scales) / 2
    book = torch.tensor(E2M1_TWICE, dtype=torch.int8)
    return QuantizedWeight(blocks.flatten(2).flatten(0, 1), powers.flatten(0, 1), book=book)


def half_powers(exponents: Tensor) -> Tensor:
    """Halves of the powers of 2 for 8-bit exponents, bfloat16: 2^(exponent - 128)."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128).to(torch.bfloat16)


def powers_of(exponents: Tensor) -> Tensor:
    """Powers of 2 for 8-bit exponents (ue8m0), bfloat16: 2^(exponent - 127), and NaN for 255."""
    return (half_powers(exponents) * 2).masked_fill(exponents == 255, torch.nan)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [experts, inputs, outputs] from bytes [experts, outputs, blocks, 16], lower halves first."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    numbers = torch.tensor(_E2M1, dtype=torch.bfloat16)[codes.int()]
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127).masked_fill(scales == 255, torch.nan)
    return (numbers * powers.to(torch.bfloat16).unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()
