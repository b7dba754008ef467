"""Keys and values in 8 bits: what is stored of them, and the numbers that it means.

A token's key, and its value, has a scale in each head: its largest number over the largest that the format has. What is
stored is the nearest to a number over its scale, of two as near the even one. The CPU's kernel rounds in the same way.
"""

import torch
from torch import Tensor

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_kv(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., D) finite numbers as (..., D) of `dtype`, and (...) float32 scales."""
    largest = _LARGEST[dtype]
    scales = _scales(numbers, largest)
    over_scale = numbers.float() / scales.where(scales > 0, torch.inf).unsqueeze(-1)
    over_scale = over_scale.clamp(-largest, largest)  # a scale that is hardly more than 0 has few bits
    return (over_scale.round() if dtype == torch.int8 else over_scale).to(dtype), scales


def _scales(numbers: Tensor, largest: float) -> Tensor:
    return numbers.float().abs().amax(-1) / largest


def dequantize_kv(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize stored values to `dtype`."""
    return (stored.float() * scales.unsqueeze(-1)).to(dtype)


def largest_error(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., D) the largest that rounding may change each number by."""
    scales = _scales(numbers, _LARGEST[dtype]).unsqueeze(-1)
    if dtype == torch.int8:
        return scales.expand_as(numbers) / 2
    return torch.maximum(numbers.float().abs() / 16, scales * 2.0**-10)


def are_quantizable(numbers: Tensor) -> Tensor:
    """(...) whether the largest of (..., D) numbers is still finite when it is multiplied by its scale again."""
    largest_again = [_scales(numbers, largest) * largest for largest in _LARGEST.values()]
    return torch.stack(largest_again).isfinite().all(0)
