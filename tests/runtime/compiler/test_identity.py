"""A model's weights are told from others by the sum of their bits, whatever dtype they are in and are cast to."""

import struct

import pytest
import torch

from runtime.compiler.identity import _SUMMED_AT_ONCE, _sum_of_bits

FORMS = {torch.float32: "<i", torch.float64: "<q", torch.int8: "<b", torch.int64: "<q"}


@pytest.mark.parametrize("dtype", FORMS)
def test_bits_are_summed_as_one_by_one(dtype: torch.dtype) -> None:
    weight = (torch.randn(3, 101, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    raw = struct.iter_unpack(FORMS[dtype], weight.numpy().tobytes())
    assert (_sum_of_bits(weight, dtype) - sum(number for (number,) in raw)) % 2**64 == 0
    assert _sum_of_bits(weight[:0], dtype) == 0


def test_pieces_are_cast_and_summed_together() -> None:
    weight = torch.full((_SUMMED_AT_ONCE + 5,), 1.0)
    bits_of_one = 0x3F80  # in bfloat16
    assert _sum_of_bits(weight, torch.bfloat16) == bits_of_one * len(weight)
