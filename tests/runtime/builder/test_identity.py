"""A model's weights are told from others by the sum of their bits, whatever dtype they are in and are cast to."""

import struct

import pytest
import torch

from runtime.builder.identity import _SUMMED_AT_ONCE, BitSums, _sum_of_bits
from scripts.tools import families

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


@pytest.mark.parametrize(
    ("name", "is_told"), [("mlp.gate.e_score_correction_bias", True), ("input_layernorm.weight", False)]
)
def test_only_what_stays_in_float32_is_told_apart_by_more_than_16_bits(name: str, is_told: bool) -> None:
    """8.02 is 8.0 in bfloat16; a router's bias is not in bfloat16."""
    model = families.random_model("glm4_moe", families.small_config("glm4_moe"), 0.1, 0.1)
    weight = model.state_dict()[f"model.layers.1.{name}"]
    digests = []
    for value in (8.0, 8.02):
        weight.fill_(value)
        digests.append(BitSums(model, torch.bfloat16).digest())
    assert (digests[0] != digests[1]) == is_told
