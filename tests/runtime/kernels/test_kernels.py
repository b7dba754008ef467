"""The kernels compute what their formulas say, whatever the shapes, the blocks, the dtype and the threads."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sentences import Said
from torch import Tensor, nn

from runtime.checkpoint.config import QuantConfig, QuantFormat
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.compiler.linears import use_kernels
from runtime.kernels.library import compile_kernels
from runtime.kernels.ops import describe_kernels, load_kernels
from runtime.util.errors import SpecDecError

CHOOSING = str(Path(__file__).parents[1] / "core" / "test_sampling_kernels.py")


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels(kernels: Path) -> None:
    load_kernels(kernels)


@pytest.fixture(params=[1, 8], ids=["1 thread", "8 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads; with more of them than rows of heads the keys are divided too."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    B: int
    Q: int
    H: int
    Hk: int
    D: int
    Dv: int
    block_size: int
    context: int
    window: int = 0
    attention_chunk: int = 0
    softcap: float = 0
    has_sinks: bool = False
    has_slopes: bool = False


CASES = [
    Case(1, 1, 12, 4, 64, 64, 32, 1000 + 3),  # an odd number of keys in the last block
    Case(1, 6, 4, 4, 32, 32, 16, 60, window=21),
    Case(1, 1, 12, 4, 64, 64, 32, 1000),
    Case(1, 11, 12, 4, 64, 64, 32, 1000),
    Case(3, 5, 8, 2, 64, 64, 32, 777),
    Case(1, 100, 4, 4, 32, 32, 16, 60),  # a prompt: more rows than a task has, more than one chunk of keys
    Case(2, 3, 4, 2, 12, 12, 4, 50),  # heads that are no multiple of a vector, blocks shorter than one
    Case(2, 3, 6, 2, 80, 80, 32, 333),
    Case(2, 7, 4, 4, 16, 8, 1, 20),  # values narrower than keys, blocks of one token
    Case(1, 4, 8, 1, 128, 128, 256, 700),  # blocks longer than a chunk
    Case(1, 1, 2, 1, 64, 64, 32, 5000),
    Case(1, 9, 12, 4, 64, 64, 32, 1000, window=37),
    Case(2, 40, 4, 2, 16, 16, 8, 100, window=5),
    Case(1, 3, 4, 2, 16, 16, 4, 0),
    Case(1, 3, 4, 2, 16, 16, 4, 2, window=1),
    Case(1, 9, 12, 4, 64, 64, 32, 1000, attention_chunk=300),
    Case(2, 40, 4, 2, 16, 16, 8, 100, attention_chunk=25, softcap=0.7, has_sinks=True, has_slopes=True),
    Case(3, 5, 8, 2, 64, 64, 32, 777, softcap=2),
    Case(1, 100, 6, 3, 80, 80, 32, 60, window=37, has_sinks=True, has_slopes=True),
    Case(1, 1, 12, 4, 64, 64, 32, 1003, has_sinks=True),
    Case(3, 5, 8, 2, 64, 64, 32, 777, has_slopes=True),
]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
KINDS = [*((dtype, 0) for dtype in TOLERANCE), (torch.bfloat16, 1)]  # dtypes, and the arithmetics that they have
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# Also as what keys and values are stored.
QUANTIZED_KINDS = [(dtype, 0, stored) for dtype in TOLERANCE for stored in (INT8, FP8)]
IN_TILES = [(torch.bfloat16, 2, stored) for stored in (None, INT8, FP8)]  # where there are none in float32
ATTENTION_KINDS = [*((*kind, None) for kind in KINDS), *QUANTIZED_KINDS, (torch.bfloat16, 1, INT8), *IN_TILES]
FEW_ATTENTION_KINDS = [*((*kind, None) for kind in KINDS), *IN_TILES[:2], (torch.float32, 0, FP8)]
LINEAR_KINDS = [*KINDS, (torch.bfloat16, 2), (torch.float16, 2)]  # the last is then computed in float32


def in_8_bits(numbers: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., D) numbers as they are stored, and their (...) scales: by definition."""
    scales = numbers.float().abs().amax(-1) / (127 if stored == INT8 else 448)
    over_scale = numbers.float() / scales[..., None]
    return (over_scale.round() if stored == INT8 else over_scale).to(stored), scales


def pools(key_pool: Tensor, value_pool: Tensor, stored: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers as a pool has them: keys, values, and scales."""
    if stored is None:
        return key_pool, value_pool, None
    (keys, of_keys), (values, of_values) = in_8_bits(key_pool.mT, stored), in_8_bits(value_pool, stored)
    return keys.mT.contiguous(), values, torch.stack([of_keys, of_values], 2)


def meant(keys: Tensor, values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The numbers of pools, in float64."""
    if scales is None:
        return keys.double(), values.double()
    return keys.double() * scales[:, :, :1].double(), values.double() * scales[:, :, 1, :, None].double()


def run(case: Case, dtype: torch.dtype, arithmetic: int, stored: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of kernel and formula, (B x Q, H, Dv), with new K/V written by the kernel and by hand."""
    B, Q, H, Hk, D, Dv = case.B, case.Q, case.H, case.Hk, case.D, case.Dv
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = -(-(case.context + Q) // case.block_size)
    key_pool, value_pool = (random(B * num_blocks + 1, Hk, *s) for s in ((D, case.block_size), (case.block_size, Dv)))
    block_tables = (torch.randperm(B * num_blocks, generator=generator) + 1).view(B, num_blocks)
    positions = (case.context + torch.arange(Q)).repeat(B, 1)
    slots = block_tables.gather(1, positions // case.block_size) * case.block_size + positions % case.block_size
    query, key, value = (random(1, B * Q, *s).transpose(1, 2) for s in ((H, D), (Hk, D), (Hk, Dv)))
    expected_keys, expected_values = key_pool.clone(), value_pool.clone()
    for token, slot in enumerate(slots.flatten().tolist()):
        block, offset = divmod(slot, case.block_size)
        expected_keys[block, :, :, offset] = key[0, :, token]
        expected_values[block, :, offset] = value[0, :, token]
    *pair, scales = pools(key_pool, value_pool, stored)
    sinks = random(H) if case.has_sinks else None
    slopes = torch.rand(H, generator=generator) if case.has_slopes else None
    output = torch.ops.specdec.paged_attention(
        *(query, key, value, *pair, positions, slots, block_tables, D**-0.5, case.window, arithmetic),
        scales=scales,
        sinks=sinks,
        softcap=case.softcap,
        attention_chunk=case.attention_chunk,
        slopes=slopes,
    )
    expected_pools = pools(expected_keys, expected_values, stored)
    for ours, theirs in zip((*pair, scales), expected_pools, strict=True):
        assert ours is theirs or torch.equal(ours.float(), theirs.float())
    expected_keys, expected_values = meant(*expected_pools)
    keys = expected_keys[block_tables].permute(0, 2, 1, 4, 3).reshape(B, Hk, -1, D)
    values = expected_values[block_tables].transpose(1, 2).reshape(B, Hk, -1, Dv)
    rows = query[0].reshape(H, B, Q, D).transpose(0, 1).double()
    scores = rows @ keys.repeat_interleave(H // Hk, 1).transpose(-1, -2) * D**-0.5
    key_positions, query_positions = torch.arange(keys.shape[2]), positions[:, None, :, None]
    visible = key_positions <= query_positions
    if case.window:
        visible &= key_positions > query_positions - case.window
    if case.attention_chunk:
        visible &= key_positions // case.attention_chunk == query_positions // case.attention_chunk
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    if slopes is not None:
        scores = scores + slopes.double().view(H, 1, 1) * (key_positions - query_positions).clamp(max=0)
    weights = scores.exp() * visible
    sink_weights = sinks.double().exp().view(1, H, 1, 1) if sinks is not None else 0
    probs = weights / (weights.sum(-1, keepdim=True) + sink_weights)
    expected = (probs @ values.repeat_interleave(H // Hk, 1)).transpose(1, 2).reshape(B * Q, H, Dv)
    return output, expected


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("dtype", "arithmetic", "stored"), ATTENTION_KINDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_attention(
    case: Case, dtype: torch.dtype, arithmetic: int, stored: torch.dtype | None, threads: int
) -> None:
    output, expected = run(case, dtype, arithmetic, stored)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "arithmetic", "stored"), ATTENTION_KINDS, ids=str)
def test_every_number_of_rows_is_attention(dtype: torch.dtype, arithmetic: int, stored: torch.dtype | None) -> None:
    """Tasks of one head, or of several; of rows that are read where they lie, or from a copy."""
    for num_tokens in range(1, 25):
        output, expected = run(Case(1, num_tokens, 4, 2, 32, 32, 32, 60), dtype, arithmetic, stored)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_scores_far_apart_do_not_overflow() -> None:
    """Scores of thousands: the largest takes all, and nothing is infinite or no number."""
    query, key = torch.full((1, 1, 1, 16), 100.0), torch.full((1, 1, 1, 16), 100.0)
    key_pool, value_pool = torch.full((2, 1, 16, 4), -100.0), torch.ones(2, 1, 4, 16)
    positions, slots, tables = torch.tensor([[3]]), torch.tensor([[7]]), torch.tensor([[1]])
    value = torch.full((1, 1, 1, 16), 5.0)
    output = torch.ops.specdec.paged_attention(
        query, key, value, key_pool, value_pool, positions, slots, tables, 1.0, 0, 0
    )
    torch.testing.assert_close(output, torch.full((1, 1, 16), 5.0))


LINEAR_SHAPES = [  # tokens, inputs, outputs
    *((num_tokens, 64, 96) for num_tokens in range(1, 14)),
    (1, 768, 1280),
    *((num_tokens, 66, 520) for num_tokens in (1, 3, 4, 5, 6, 16)),  # panels side by side, and one that is left over
    (2, 4130, 290),
    (25, 34, 7),  # a panel that is not full, and tiles of unequal size
    (100, 130, 33),
    (40, 2, 1),
    (3, 5000, 70),  # deeper than a piece of a panel
    (3, 2048, 40),  # as deep as one piece
    (3, 4096, 40),
    (300, 4100, 40),
    (1000, 4130, 200),  # several panels of more tokens than a cache holds, a piece of each in turn
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("dtype", "arithmetic"), LINEAR_KINDS, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_inputs", "num_outputs"), LINEAR_SHAPES)
def test_kernel_is_a_linear_layer(
    num_tokens: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    arithmetic: int,
    with_bias: bool,
    threads: int,
) -> None:
    """An arithmetic that the processor or the dtype does not have is float32's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, num_inputs, generator=generator).to(dtype)[1:]
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if with_bias else None
    output = torch.ops.specdec.linear(x, torch.ops.specdec.pack_linear(weight), bias, num_outputs, arithmetic)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    assert output.dtype == dtype and output.shape == (1, num_tokens, num_outputs)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("qformat", [None, "int8", "int4"])
def test_no_token_has_no_products(qformat: QuantFormat | None) -> None:
    kernels, weight, nothing = torch.ops.specdec, torch.randn(640, 48), torch.ones(0, 48)
    if qformat is None:
        output = kernels.linear(nothing, kernels.pack_linear(weight), None, 640, 0)
    else:
        few = quantize_weight(weight, QuantConfig(qformat), 16)
        packed = kernels.pack_quantized(few.values, few.scales, few.zeros, few.offsets)
        output = kernels.quantized_linear(nothing, packed, None, 640, 0, 8)
    assert output.shape == (0, 640)


@pytest.mark.parametrize(("dtype", "arithmetic"), LINEAR_KINDS, ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 96), (34, 7), (2048, 40), (2100, 40), (98, 520)])
def test_a_token_has_the_same_bits_in_any_company(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, arithmetic: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, num_inputs, generator=generator).to(dtype)
    packed = torch.ops.specdec.pack_linear(torch.randn(num_outputs, num_inputs, generator=generator).to(dtype))
    together = torch.ops.specdec.linear(x, packed, None, num_outputs, arithmetic)
    for num_tokens in (1, 2, 5, 12, 13, 17, 33):
        for start in (0, 36, 70 - num_tokens):
            tokens = slice(start, start + num_tokens)
            alone = torch.ops.specdec.linear(x[tokens], packed, None, num_outputs, arithmetic)
            assert torch.equal(alone, together[tokens]), (num_tokens, start)


@pytest.mark.parametrize(("dtype", "arithmetic"), LINEAR_KINDS, ids=str)
@pytest.mark.parametrize("num_inputs", [600, 4130])
def test_a_token_has_the_same_bits_in_a_company_of_a_thousand(
    num_inputs: int, dtype: torch.dtype, arithmetic: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, num_inputs, generator=generator).to(dtype)
    packed = torch.ops.specdec.pack_linear(torch.randn(200, num_inputs, generator=generator).to(dtype))
    together = torch.ops.specdec.linear(x, packed, None, 200, arithmetic)
    for start in range(0, 1000, 28):
        alone = torch.ops.specdec.linear(x[start : start + 4], packed, None, 200, arithmetic)
        assert torch.equal(alone, together[start : start + 4]), start


@pytest.mark.parametrize(("dtype", "arithmetic"), LINEAR_KINDS, ids=str)
def test_a_token_of_tiny_numbers_has_the_same_bits_in_any_company(dtype: torch.dtype, arithmetic: int) -> None:
    """Tiles take each product and each sum that is less than normal for 0, though all of them together were normal."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(20, 64, generator=generator) * 1e-20).to(dtype)
    weight = (torch.rand(520, 64, generator=generator) * 1e-18).to(dtype)
    packed = torch.ops.specdec.pack_linear(weight)
    together = torch.ops.specdec.linear(x, packed, None, 520, arithmetic)
    alone = torch.cat([torch.ops.specdec.linear(token, packed, None, 520, arithmetic) for token in x.split(1)])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("flushes", [False, True], ids=["as is", "flushing"])
def test_every_float16_is_read_as_it_is(flushes: bool) -> None:
    """Subnormal numbers count too, where the processor takes such floats for 0."""
    weight = torch.zeros(1 << 16, 2, dtype=torch.float16)
    weight[:, 0] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    packed, one = torch.ops.specdec.pack_linear(weight), torch.tensor([[1.0, 0.0]], dtype=torch.float16)
    torch.set_flush_denormal(flushes)
    (output,) = torch.ops.specdec.linear(one, packed, None, 1 << 16, 0)
    torch.set_flush_denormal(False)
    torch.testing.assert_close(output, weight[:, 0], rtol=0, atol=0, equal_nan=True)


class Sequences:
    """Three sequences of random queries, keys and values, whose K/V lie in blocks all over a pool.

    `shared` has, by sequence, the number of tokens of sequence 0 that it begins with, in the same blocks.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        block_size: int,
        window: int,
        dtype: torch.dtype,
        arithmetic: int = 0,
        stored: torch.dtype | None = None,
        others: dict[str, Any] | None = None,
        shared: dict[int, int] | None = None,
    ) -> None:
        H, Hk, D, Dv = shape
        self.block_size, self.window, self.arithmetic, length = block_size, window, arithmetic, 1500
        generator = torch.Generator().manual_seed(0)
        of_heads = {
            "sinks": torch.randn(H, generator=generator).to(dtype),
            "slopes": torch.rand(H, generator=generator) / 20,
        }
        self.others = of_heads | others if others else {}
        self.query, self.key, self.value = (
            torch.randn(3, length, *heads, generator=generator).to(dtype) for heads in ((H, D), (Hk, D), (Hk, Dv))
        )
        num_blocks = -(-length // block_size)
        self.tables = (torch.randperm(3 * num_blocks, generator=generator) + 1).view(3, num_blocks)
        for sequence, num_tokens in (shared or {}).items():
            for numbers in (self.key, self.value):
                numbers[sequence, :num_tokens] = numbers[0, :num_tokens]
            self.tables[sequence, : num_tokens // block_size] = self.tables[0, : num_tokens // block_size]
        self.key_pool = torch.zeros(3 * num_blocks + 1, Hk, D, block_size, dtype=stored or dtype)
        self.value_pool = torch.zeros(3 * num_blocks + 1, Hk, block_size, Dv, dtype=stored or dtype)
        self.scales = None if stored is None else torch.zeros(3 * num_blocks + 1, Hk, 2, block_size)
        self.attend([(sequence, 0, length) for sequence in range(3)])

    def attend(self, rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """Outputs of a batch of rows (sequence, start, number of tokens), each (tokens, H, Dv)."""
        Q = max(num_tokens for _, _, num_tokens in rows)
        N = max(-(-(start + num_tokens) // self.block_size) for _, start, num_tokens in rows)
        positions, slots = torch.zeros(2, len(rows), Q, dtype=torch.long)
        flat = [torch.zeros(len(rows), Q, *of.shape[2:], dtype=of.dtype) for of in (self.query, self.key, self.value)]
        for b, (sequence, start, num_tokens) in enumerate(rows):
            own = torch.arange(start, start + num_tokens)
            positions[b, :num_tokens] = own
            slots[b, :num_tokens] = self.tables[sequence][own // self.block_size] * self.block_size
            slots[b, :num_tokens] += own % self.block_size
            for part, of in zip(flat, (self.query, self.key, self.value), strict=True):
                part[b, :num_tokens] = of[sequence, own]
        output = torch.ops.specdec.paged_attention(
            *(part.flatten(0, 1).transpose(0, 1)[None] for part in flat),
            *(self.key_pool, self.value_pool, positions, slots),
            torch.stack([self.tables[sequence][:N] for sequence, _, _ in rows]),
            0.2,
            self.window,
            self.arithmetic,
            scales=self.scales,
            **self.others,
        )
        return [output[b * Q : b * Q + num_tokens] for b, (_, _, num_tokens) in enumerate(rows)]


SHAPES = {
    "4 heads": (12, 4, 64, 64),
    "1 head": (4, 1, 32, 32),
    "a head for each": (3, 3, 32, 64),
    "odd heads": (4, 2, 12, 12),
}
ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1400), st.integers(1, 90)), min_size=1, max_size=6)


# Windows, and what attention is told besides; then each head has a sink and a slope too.
ATTENTIONS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "all": (0, None),
    "300": (300, None),
    "5": (5, None),
    "300, capped": (300, {"softcap": 2.0}),
    "chunks": (0, {"attention_chunk": 300}),
}


@pytest.mark.one_in(48)
@pytest.mark.parametrize("beginnings", [{}, {1: 520, 2: 1040}], ids=["apart", "beginnings in common"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("block_size", [32, 24, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "arithmetic", "stored"), FEW_ATTENTION_KINDS, ids=str)
def test_attention_of_a_token_has_the_same_bits_in_any_company(
    dtype: torch.dtype,
    arithmetic: int,
    stored: torch.dtype | None,
    shape: str,
    block_size: int,
    attention: str,
    beginnings: dict[int, int],
) -> None:
    """Batch, row and threads do not matter; compared with one token at a time, by one thread."""
    window, others = ATTENTIONS[attention]
    sequences = Sequences(SHAPES[shape], block_size, window, dtype, arithmetic, stored, others, beginnings)

    @settings(max_examples=10 if settings.get_current_profile_name() == "default" else 1000, deadline=None)
    @given(rows=ROWS, threads=st.sampled_from([1, 2, 3, 5]))
    def bits_are_equal(rows: list[tuple[int, int, int]], threads: int) -> None:
        torch.set_num_threads(threads)
        together = sequences.attend(rows)
        torch.set_num_threads(1)
        for (sequence, start, num_tokens), output in zip(rows, together, strict=True):
            for i in {0, num_tokens // 2, num_tokens - 1}:
                (alone,) = sequences.attend([(sequence, start + i, 1)])
                assert torch.equal(output[i], alone[0]), (sequence, start + i)

    bits_are_equal()


@pytest.mark.one_in(48)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("block_size", [32, 24])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "arithmetic", "stored"), FEW_ATTENTION_KINDS, ids=str)
def test_numbers_that_are_not_finite_reach_only_who_sees_them(
    dtype: torch.dtype,
    arithmetic: int,
    stored: torch.dtype | None,
    shape: str,
    block_size: int,
    window: int,
    poison: float,
    threads: int,
) -> None:
    """Poison is in the key or the value of a token in the middle, and in all that lies in blocks behind the last."""
    sequences, start, num_tokens = Sequences(SHAPES[shape], block_size, window, dtype, arithmetic, stored), 290, 41
    rows = [(0, start, num_tokens), (1, 7, 4), (2, 600, 1)]  # odd numbers of keys, and even ones
    clean = sequences.attend(rows)
    for sequence, first, count in rows:
        behind = torch.arange(first + count, 1500)
        blocks, offsets = sequences.tables[sequence][behind // block_size], behind % block_size
        for pool in (sequences.key_pool.mT, sequences.value_pool):
            pool[blocks, :, offsets] = 127 if stored == INT8 else poison
        if sequences.scales is not None:
            sequences.scales[blocks, ..., offsets] = poison
    assert all(torch.equal(a, b) for a, b in zip(sequences.attend(rows), clean, strict=True))
    for numbers in (sequences.key, sequences.value):
        kept = numbers[0, start + 20].clone()
        numbers[0, start + 20, -1, 3] = poison
        block, offset = sequences.tables[0][(start + 20) // block_size], (start + 20) % block_size
        for pool in (sequences.key_pool.mT, sequences.value_pool):  # what lies there is another sequence's
            pool[block, :, offset] = 127 if stored == INT8 else poison
        poisoned = sequences.attend(rows)
        numbers[0, start + 20] = kept
        seeing = slice(20, 20 + window if window else num_tokens)
        num_heads = SHAPES[shape][0] // SHAPES[shape][1]  # that share the last head's keys
        assert poisoned[0][seeing, -num_heads:].isnan().all()
        poisoned[0][seeing, -num_heads:] = clean[0][seeing, -num_heads:]
        assert all(torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))


@pytest.mark.parametrize("first", [0, 256, 512])
def test_position_that_sees_nan_is_nan_though_its_keys_are_divided(first: int) -> None:
    """Parts of a row are added up; one whose scores are all NaN has no largest, as one without keys."""
    sequences = Sequences(SHAPES["1 head"], 32, 0, torch.float32)
    sequences.key[0, first : first + 256] = torch.nan
    sequences.attend([(0, 0, 1500)])
    for threads in (1, 5):
        torch.set_num_threads(threads)
        (output,) = sequences.attend([(0, 1400, 1)])
        torch.set_num_threads(1)
        assert output.isnan().all()


class _Layers(nn.Module):
    """Three layers that read one input, one with a bias, one with an odd number of inputs, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, n, bias=False) for n in (24, 8, 8))
        self.biased, self.odd, self.last = nn.Linear(16, 5), nn.Linear(5, 6), nn.Linear(6, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        return mixed + self.last(self.odd(self.biased(x)))


def test_layers_of_one_input_become_one_in_a_compiled_step() -> None:
    describe_kernels()
    layers, x = _Layers().eval(), torch.randn(3, 16)
    program = torch.export.export(layers, (x,), strict=False).module(check_guards=False)
    use_kernels(program, arithmetic=0)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("specdec.linear.default") == 3  # query, key and value; biased; last
    assert targets.count("aten.linear.default") == 1  # odd
    torch.testing.assert_close(program(x), layers(x))


def test_second_library_of_other_sources_is_refused(kernels: Path, tmp_path: Path, said: Said) -> None:
    """Weights may be laid out in another way there."""
    library, sources = tmp_path / "kernels.so", torch.ops.specdec.sources().encode()
    assert kernels.read_bytes().count(sources) > 0
    library.write_bytes(kernels.read_bytes().replace(sources, b"0" * len(sources)))
    with pytest.raises(SpecDecError) as raised:
        load_kernels(library)
    said(raised)


def argmaxes(rows: Tensor) -> Tensor:
    """Tokens that greedy requests without penalties choose."""
    greedy = torch.tensor([[1.0, 1, 1, 0, 0, 1, 0, 0]], dtype=torch.float64).repeat(len(rows), 1)
    none, keys = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int64)
    bounds, no_drafts = torch.zeros(len(rows), 6, dtype=torch.int64), torch.full((len(rows),), -1)
    return torch.ops.specdec.choose(list(rows[:, None]), greedy, keys, none, none[:, 0], bounds, no_drafts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 64, 65, 1000, 16_000])
def test_argmax_is_numpys(dtype: torch.dtype, size: int, threads: int) -> None:
    """Index of the first of equal numbers; -1 where the largest is not finite, or one is no number."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(12, size + 3, generator=generator).to(dtype)[:, :size]
    rows[1] = -torch.inf
    rows[2, size // 2 :] = torch.nan
    rows[3] = 7.0
    rows[4, -1] = torch.inf
    rows[5] = rows[5].abs().neg()
    rows[6, 0] = torch.nan
    expected = [int(row.float().numpy().argmax()) for row in rows]
    for row in (1, 2, 4, 6):
        expected[row] = -1
    assert argmaxes(rows).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_finds_the_only_nan(dtype: torch.dtype) -> None:
    """A NaN is found wherever it is, and though no number after the first is larger: there is none then."""
    rows = torch.full((200, 200), -1.0, dtype=dtype)
    rows[:, 0] = 1.0
    rows.fill_diagonal_(torch.nan)
    assert argmaxes(rows).tolist() == [-1] * 200
    rows.fill_diagonal_(-torch.inf)
    assert argmaxes(rows).tolist() == [1] + [0] * 199  # of a token that is never chosen


@pytest.mark.slow
def test_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """The tests of the kernels, but the longest, with AddressSanitizer and UndefinedBehaviorSanitizer."""
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    environment = os.environ | {
        "CXX": "g++ -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr",
        "SPECDEC_CACHE_DIR": str(tmp_path),
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", __file__, CHOOSING]
    without = "not any_company and not every_thread and not corrupt_cached and not lesser and not sanitizers"
    result = subprocess.run([*command, "-k", without], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.fixture
def pretended_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that writes no library but a line that differs every time, with a cache of its own; its file of versions."""
    version, compiler = tmp_path / "version", tmp_path / "compiler"
    version.write_text("12.2")
    compiler.write_text(
        f"""#!/bin/sh
        if [ "$1" = -v ]; then cat {version} >&2; exit; fi
        case "$*" in *" -c "*) exit 0;; esac
        while [ "$1" != -o ]; do shift; done
        echo compiled >> {tmp_path}/log; wc -l < {tmp_path}/log > "$2"
        """
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return version


def compiled(path: Path) -> int:
    """Number of the compilation that made the library."""
    compile_kernels(path)
    return int(path.read_text())


def test_corrupt_cached_library_is_compiled_again(pretended_compiler: Path, tmp_path: Path) -> None:
    """Flipped, cut or empty."""
    library = tmp_path / "kernels.so"
    assert compiled(library) == compiled(library) == 1
    (cached,) = (tmp_path / "cache").glob("kernels-*.so")
    whole = cached.read_bytes()
    for number, damaged in enumerate((b"A" + whole[1:], whole[:-1] + b"A", whole[:-9], whole[:5], b""), start=2):
        cached.write_bytes(damaged)
        assert compiled(library) == compiled(library) == number


def test_cached_kernels_of_another_processor_compiler_or_c_library_are_not_taken(
    pretended_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home directory is shared by machines: each finds its own, and never what it may be unable to execute."""
    library = tmp_path / "kernels.so"
    libraries = [compiled(library), compiled(library)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("runtime.kernels.library._processor_flags", lambda: ["avx2", "fma"])
        libraries += [compiled(library), compiled(library)]
    libraries.append(compiled(library))
    pretended_compiler.write_text("13.1")
    libraries.append(compiled(library))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "3.0"))
    assert [*libraries, compiled(library)] == [1, 1, 2, 2, 1, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("march", ["x86-64", "haswell", "znver3", "skylake-avx512"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's sets of instructions")
def test_kernels_for_lesser_processors_compute_the_same(march: str) -> None:
    """All tests of the kernels with registers of 4, 8 and 16 floats, and without instructions for bfloat16."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, CHOOSING]
    result = subprocess.run(command, env=os.environ | {"SPECDEC_TEST_MARCH": march}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
