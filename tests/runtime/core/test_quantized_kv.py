"""Keys and values in 8 bits are the nearest numbers that their format has."""

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.core.kv_cache import are_quantizable, dequantize_kv, largest_error, quantize_kv


def rows() -> Tensor:
    """(n, 24) of any size: halves of units too, zeros, and numbers that are hardly more than 0."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(40, 24, generator=generator) * 10.0 ** torch.randint(-6, 7, (40, 1), generator=generator)
    halves = torch.arange(24.0) - 11.5
    halves[0] = 127.0  # so that the scale of int8 is 1
    return torch.cat([random, halves[None], torch.zeros(1, 24), torch.full((1, 24), 1e-44), -random[:1]])


def nearest(over_scale: np.ndarray, stored: torch.dtype) -> np.ndarray:
    """Round by trying all numbers that the format has; of two as near the one of the even code."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(stored)
    numbers = codes.double().numpy()
    usable = np.isfinite(numbers) & (np.abs(numbers) <= (127 if stored == torch.int8 else 448))
    is_odd = np.arange(256) % 2
    distances = np.where(usable, np.abs(over_scale[..., None].astype(np.float64) - numbers), np.inf)
    order = np.lexsort(np.broadcast_arrays(is_odd, distances))
    return numbers[order[..., 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_become_the_nearest(stored: torch.dtype, dtype: torch.dtype) -> None:
    numbers = rows().clamp(-6e4, 6e4).to(dtype)
    found, scales = quantize_kv(numbers, stored)
    assert found.dtype == stored and scales.dtype == torch.float32
    wide = numbers.float().numpy()
    expected_scales = np.abs(wide).max(-1) / np.float32(127 if stored == torch.int8 else 448)
    assert np.array_equal(scales.numpy(), expected_scales)
    with np.errstate(all="ignore"):
        over_scale = wide / np.where(expected_scales > 0, expected_scales, np.inf)[:, None]
    assert np.array_equal(found.double().numpy(), nearest(over_scale, stored))
    changed = (dequantize_kv(found, scales, torch.float64) - numbers.double()).abs()
    normal = expected_scales > 1e-30  # else it has few bits itself
    assert bool((changed <= largest_error(numbers, stored) * (1 + 1e-5))[normal].all())
    assert changed[normal].max() > 0


def test_what_would_be_infinite_is_not_quantized() -> None:
    numbers = torch.tensor([[1.0, -2.0], [torch.finfo(torch.float32).max, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    can = are_quantizable(numbers)
    assert can[0] and not can[2] and not can[3]
    for stored in (torch.int8, torch.float8_e4m3fn):
        assert dequantize_kv(*quantize_kv(numbers[can], stored), torch.float32).isfinite().all()
