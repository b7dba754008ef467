"""Quantizes a weight: each number is rounded to the nearest multiple of its group's scale. In integers the scale is the
one of a few with the least squared error.

No data is needed: scales are tried from the smallest that holds the group's largest number downwards, and the best is
refined. Clipping rare large numbers makes the steps for all others finer. In e4m3 only the first scale is used.
"""

import math

import torch
from torch import Tensor

from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.quant.weight import QuantizedWeight, pack_int4
from runtime.util.errors import SpecDecError

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
_REFINEMENTS = 2
_MIN_GROUP = 16
_E4M3_MAX = 448.0
_OF_KERNEL = (torch.float32, torch.bfloat16, torch.float16)
_ROWS_BYTES = 2**21  # of the weight that is quantized at a time: several as large stay in the cache


def group_size_for(name: str, inputs: int, wanted: int | None) -> int:
    """The wanted group size, for None all inputs, or a smaller power of two from 16 on. SpecDecError if none fits."""
    if wanted is None:
        return inputs
    size = math.gcd(inputs, wanted)
    if size < min(_MIN_GROUP, wanted):
        raise SpecDecError(
            f"groups of {wanted} do not divide the {inputs} inputs of `{name}`",
            hint="quantize whole rows, or to int8",
            code="group_size",
        )
    return size


def quantize_weight(weight: Tensor, precision: QuantConfig, group_size: int) -> QuantizedWeight:
    """The weight [outputs, inputs] in the format of `precision`."""
    if weight.is_meta:
        return _form(weight, precision, group_size)
    if precision.qformat != "fp8" and _has_kernel(weight):
        return QuantizedWeight(*_by_kernel(weight, group_size, is_int4=precision.qformat == "int4"))
    rows = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    pieces = [_quantize_rows(piece.float(), precision, group_size) for piece in torch.split(weight, rows)]
    return QuantizedWeight(torch.cat([values for values, _ in pieces]), torch.cat([scales for _, scales in pieces]))


def _has_kernel(weight: Tensor) -> bool:
    """True if our kernels are loaded, and read a weight on this device and in this dtype."""
    is_loaded = hasattr(torch.ops.specdec, "quantize_integers")
    return is_loaded and weight.device.type == "cpu" and weight.dtype in _OF_KERNEL


def _by_kernel(weight: Tensor, group_size: int, *, is_int4: bool) -> tuple[Tensor, Tensor]:
    """`_quantize_rows` for integers, with the same bits, in a tenth of the time."""
    quantize, highest = torch.ops.specdec.quantize_integers, 7 if is_int4 else 127
    made: tuple[Tensor, Tensor] = quantize(
        weight, is_int4, group_size, _CLIPS, _errs_less_than_a_clip(highest, group_size), _REFINEMENTS
    )
    return made


def _form(weight: Tensor, precision: QuantConfig, group_size: int) -> QuantizedWeight:
    """The quantized weight on the device `meta`, where a search for scales would only cost time."""
    scales = weight.reshape(len(weight), -1, group_size)[:, :, 0].to(torch.float16)
    if precision.qformat == "fp8":
        return QuantizedWeight(weight.to(torch.float8_e4m3fn), scales.float())
    integers = weight.to(torch.int8)
    return QuantizedWeight(pack_int4(integers) if precision.qformat == "int4" else integers, scales)


def _quantize_rows(weight: Tensor, precision: QuantConfig, group_size: int) -> tuple[Tensor, Tensor]:
    """Values, and scales [outputs, groups]: float16 for integers, float32 for e4m3."""
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, -1, group_size)
    if precision.qformat == "fp8":
        scales = groups.abs().amax(-1) / _E4M3_MAX
        values = (groups / _without_zeros(scales)[:, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX)
        return values.to(torch.float8_e4m3fn).view(outputs, inputs), scales
    lowest, highest = (-8, 7) if precision.qformat == "int4" else (-127, 127)
    # The number with the largest magnitude becomes the lowest integer: 4 bits have -8, and no 8.
    extremes = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[:, :, 0]
    best, best_error = torch.zeros_like(extremes), torch.full_like(extremes, torch.inf, dtype=torch.float64)
    clips = _CLIPS[:1] if _is_best_unclipped(extremes, highest, group_size) else _CLIPS
    for i in range(len(clips) + _REFINEMENTS):
        if i < len(clips):
            scales = (extremes * (clips[i] / lowest)).half().float()  # rounded first: the stored scale is measured
        else:
            scales = _fitted(groups, _nearest(groups, best, lowest, highest))
        rounded = _nearest(groups, scales, lowest, highest) * scales[:, :, None]
        error = (rounded - groups).square_().sum(-1, dtype=torch.float64)
        best, best_error = torch.where(error < best_error, scales, best), torch.minimum(error, best_error)
    integers = _nearest(groups, best, lowest, highest).to(torch.int8).view(outputs, inputs)
    return (pack_int4(integers) if precision.qformat == "int4" else integers), best.half()


def _is_best_unclipped(extremes: Tensor, highest: int, group_size: int) -> bool:
    """True if clipping cannot win, as in int8 in groups of up to 128: cutting the largest number by 5 % costs more than
    rounding all numbers of the group by half a step each. Scales must be 0 or at least 2^-14, where float16 is exact to
    one part in 2,048.
    """
    steps = extremes.abs() / highest
    is_exact = bool(((steps >= 2**-14) | (steps == 0)).all())
    return is_exact and _errs_less_than_a_clip(highest, group_size)


def _errs_less_than_a_clip(highest: int, group_size: int) -> bool:
    return group_size * (0.5 / highest) ** 2 < (1 - _CLIPS[1] - 2**-10) ** 2


def _fitted(groups: Tensor, integers: Tensor) -> Tensor:
    """Least-squares scales for these integers, as float16 has them. Rounding with them may give other integers."""
    product = (groups * integers).sum(-1, dtype=torch.float64)
    return (product / integers.square().sum(-1, dtype=torch.float64).clamp(min=1)).float().half().float()


def _nearest(groups: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    return (groups / _without_zeros(scales)[:, :, None]).round_().clamp_(lowest, highest)


def _without_zeros(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
