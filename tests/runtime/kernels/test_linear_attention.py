"""Linear attention and selective scans over slots, by the kernel and by torch, against float64's recurrence, one token
after the other."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny import make_model
from torch import Tensor

from runtime.checkpoint.config import RecurrentShape, StateShape
from runtime.core.states import CHUNK_SIZE, state_pools
from runtime.kernels.ops import load_kernels
from runtime.model.placing import place_modules
from runtime.model.recurrences import linear_attention, selective_scan

NUM_SLOTS, NUM_BACK = 4, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


Rows = list[tuple[int, int, int]]
"""Texts, and for each its first token in the step and their number."""


def in_rows(texts: Any, rows: Rows) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Inputs of a step: each part of the texts [1, rows x longest, ...], padded by
    zeros, and positions, slots of tokens and slots of states; text i has slot i + 1.
    """
    longest = max(number for _, _, number in rows)
    positions, slots = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    padded = [part.new_zeros(len(rows), longest, *part.shape[1:]) for part in texts[0]]
    for b, (text, start, number) in enumerate(rows):
        positions[b, :number], slots[b, :number] = torch.arange(start, start + number), 1
        for part, whole in zip(texts[text], padded, strict=True):
            whole[b, :number] = part[start : start + number]
    places = (positions, slots, torch.tensor([text + 1 for text, _, _ in rows]))
    return [part.flatten(0, 1)[None] for part in padded], places


def of_rows(output: Tensor, rows: Rows) -> list[Tensor]:
    """The outputs [number, ...] of each row, from [1, rows x longest, ...]."""
    by_row = output[0].unflatten(0, (len(rows), -1))
    return [by_row[b, :number] for b, (_, _, number) in enumerate(rows)]


def of_steps(steps: list[Rows], outputs: list[Tensor], compute: Callable[[Rows], list[Tensor]]) -> list[Tensor]:
    """The outputs of whole texts: what a later step computes again replaces what was of a rejected draft."""
    for rows in steps:
        for (text, start, number), made in zip(rows, compute(rows), strict=True):
            outputs[text][start : start + number] = made
    return outputs


def check_pieces(
    text: Any, other: Any, expected: Tensor, compute: Callable[[Any, Rows, Tensor], list[Tensor]], pool: Tensor
) -> None:
    """The bits of 100 tokens: one by one, and in pieces behind which a draft of the other text is rejected."""
    for sizes in ([1] * 100, [64, 36], [7, 25, 33, 31, 4]):
        own_pool, start = pool.clone(), 0
        for size in sizes:
            end = start + size
            drafted = [torch.cat([own[:end], drafts[end:]]) for own, drafts in zip(text, other, strict=True)]
            (made,) = compute(type(text)(*drafted), [(0, start, min(size + NUM_BACK, 100 - start))], own_pool)
            assert torch.equal(made[:size], expected[start:end])
            start = end


@contextmanager
def other_threads() -> Iterator[None]:
    """Two threads where one computed, and one where more did."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    yield
    torch.set_num_threads(threads)


class Shape(NamedTuple):
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_decays: int = 1


SHAPES = [
    *(Shape(2, 4, 16, 32), Shape(1, 3, 20, 72), Shape(2, 2, 128, 128)),  # registers filled and not
    *(Shape(2, 2, 32, 16, 32), Shape(1, 3, 20, 72, 20)),  # of each number of a key
]


class Text(NamedTuple):
    """Inputs of a layer's tokens: (T, heads, numbers) each, and (T, heads), as decays are too where they are one."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def text_of(num_tokens: int, shape: Shape, dtype: torch.dtype, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=generator)

    query, key = (draw(shape.num_key_heads, shape.key_dim).to(dtype) for _ in range(2))
    value = draw(shape.num_heads, shape.value_dim).to(dtype)
    decays = draw(shape.num_heads) if shape.num_decays == 1 else draw(shape.num_heads, shape.num_decays)
    return Text(query, key, value, -F.softplus(decays), torch.sigmoid(draw(shape.num_heads)))


def expected_of(text: Text, *, corrects: bool) -> Tensor:
    """The definition: S decays, is corrected by beta (v - k S) where k is, and is read with q."""
    query, key, value, decay, beta = (one.double() for one in text)
    num_heads = value.shape[1]
    query, key = (one.repeat_interleave(num_heads // one.shape[1], 1) for one in (query, key))
    if corrects:
        query, key = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (query, key))
    state, outputs = torch.zeros(num_heads, key.shape[2], value.shape[2], dtype=torch.float64), []
    for q, k, v, g, b in zip(query / math.sqrt(query.shape[2]), key, value, decay, beta, strict=True):
        state = state * g.reshape(num_heads, -1, 1).exp()
        added = b[:, None] * (v - (k[:, None] @ state)[:, 0]) if corrects else v
        state = state + k[:, :, None] * added[:, None]
        outputs.append((q[:, None] @ state)[:, 0])
    return torch.stack(outputs)


def by_kernel(parts: Any, pool: Tensor, places: Any, chunk_size: int, scale: float, *, normalizes: bool) -> Tensor:
    output: Tensor = torch.ops.specdec.linear_attention(*parts, pool, *places, chunk_size, scale, normalizes)
    return output


@pytest.fixture(params=["kernel", "torch"])
def attend(request: pytest.FixtureRequest, kernels: Path) -> Any:
    load_kernels(kernels)
    return by_kernel if request.param == "kernel" else linear_attention


def pool_of(shape: Shape, fill: float = math.nan) -> Tensor:
    states = [StateShape(0, 1, 1, RecurrentShape(*shape[1:]))]
    return state_pools(states, NUM_SLOTS, NUM_BACK, torch.float32, torch.device("cpu"))[1].fill_(fill)


def step(attend: Any, texts: list[Text], rows: Rows, pool: Tensor, *, corrects: bool) -> list[Tensor]:
    (query, key, value, decay, beta), places = in_rows(texts, rows)
    parts = (query, key, value, decay, beta if corrects else None)
    output = attend(parts, pool, places, CHUNK_SIZE, query.shape[3] ** -0.5, normalizes=corrects)
    assert output.dtype == value.dtype and output.shape == value.shape
    return of_rows(output, rows)


STEPS = [
    [(0, 0, 50)],
    [(1, 0, 2), (0, 50, 1)],
    [(0, 51, 30), (1, 2, 5)],  # over the beginning of a chunk, which is rejected
    [(1, 4, 1), (0, 53, 1)],
    [(0, 54, 11), (1, 5, 64)],
    [(0, 65, 100)],
    [(0, 134, 1), (1, 60, 9)],
    [(0, 135, 5)],
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "decay alone"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_rejected_drafts_and_batches_give_the_recurrence_of_the_text(
    shape: Shape, dtype: torch.dtype, corrects: bool, attend: Any
) -> None:
    texts = [text_of(length, shape, dtype, seed) for seed, length in enumerate((170, 70))]
    pool, outputs = pool_of(shape), [torch.zeros_like(text.value) for text in texts]
    of_steps(STEPS, outputs, lambda rows: step(attend, texts, rows, pool, corrects=corrects))
    for text, output in zip(texts, outputs, strict=True):
        expected = expected_of(text, corrects=corrects)
        end = 140 if len(output) == 170 else 69
        error = (output.double() - expected)[:end].abs().max() / expected[:end].abs().max()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "decay alone"])
def test_a_tokens_bits_are_its_own(corrects: bool, shape: Shape, kernels: Path) -> None:
    """Outputs by the kernel: in one piece, token by token, in pieces with rejected drafts, on one thread and two."""
    load_kernels(kernels)
    text, other = text_of(100, shape, torch.float32, 0), text_of(100, shape, torch.float32, 1)
    (expected,) = step(by_kernel, [text], [(0, 0, 100)], pool_of(shape), corrects=corrects)
    compute = partial(step, by_kernel, corrects=corrects)
    check_pieces(text, other, expected, lambda one, rows, pool: compute([one], rows, pool), pool_of(shape))
    with other_threads():
        (made,) = compute([text], [(0, 0, 100)], pool_of(shape))
    assert torch.equal(made, expected)


def test_what_is_not_finite_stays_in_its_sequence(attend: Any) -> None:
    shape = SHAPES[0]
    texts, pool = [text_of(70, shape, torch.float32, seed) for seed in range(2)], pool_of(shape)
    texts[0].value[40] = torch.inf
    first, second = step(attend, texts, [(0, 0, 70), (1, 0, 70)], pool, corrects=True)
    assert first[:40].isfinite().all() and not first[41:].isfinite().any() and second.isfinite().all()
    pool[2] = pool[1]  # a slot that another had
    (again,) = step(attend, [texts[1]] * 2, [(1, 0, 70)], pool, corrects=True)
    assert torch.equal(again, second)


# --- selective scans ---


class Scanned(NamedTuple):
    """Inputs of a layer's tokens: (T, C) what is added and steps, (T, groups x N) keys and queries."""

    added: Tensor
    steps: Tensor
    keys: Tensor
    queries: Tensor


# Channels, numbers of each, and groups with keys of their own: registers filled and not; of the RG-LRU; of Zamba.
SCANS = [(80, 8, 1), (20, 3, 2), (128, 16, 1), (96, 1, 1), (192, 16, 2)]


def scanned_text(num_tokens: int, channels: int, num_keys: int, seed: int) -> Scanned:
    generator = torch.Generator().manual_seed(seed)
    sizes = (channels, channels, num_keys, num_keys)
    added, steps, keys, queries = (torch.randn(num_tokens, size, generator=generator) for size in sizes)
    return Scanned(added, F.softplus(steps), keys, queries)


def decays_of(channels: int, numbers: int) -> Tensor:
    return -F.softplus(torch.randn(numbers, channels, generator=torch.Generator().manual_seed(7)))


def expected_scan(text: Scanned, decays: Tensor) -> Tensor:
    """The definition, one token after the other."""
    state, outputs = torch.zeros_like(decays, dtype=torch.float64), []
    numbers, channels = decays.shape
    for added, step, *of_groups in zip(*(one.double() for one in text), strict=True):
        groups = [one.view(-1, numbers).t() for one in of_groups]
        key, query = (one.repeat_interleave(channels // one.shape[1], 1) for one in groups)
        state = (step * decays.double()).exp() * state + key * added
        outputs.append((query * state).sum(0))
    return torch.stack(outputs)


def scan_by_kernel(parts: Any, decays: Tensor, pool: Tensor, places: Any, chunk_size: int) -> Tensor:
    output: Tensor = torch.ops.specdec.selective_scan(*parts, decays, pool, *places, chunk_size)
    return output


@pytest.fixture(params=["kernel", "torch"])
def scan(request: pytest.FixtureRequest, kernels: Path) -> Any:
    load_kernels(kernels)
    return scan_by_kernel if request.param == "kernel" else selective_scan


def scan_pool(channels: int, numbers: int, groups: int, fill: float = math.nan) -> Tensor:
    width = math.gcd(channels // groups, 64)
    states = [StateShape(0, 1, 1, RecurrentShape(channels // width, numbers, width, width))]
    return state_pools(states, NUM_SLOTS, NUM_BACK, torch.float32, torch.device("cpu"))[1].fill_(fill)


def scan_step(scan: Any, texts: list[Scanned], rows: Rows, decays: Tensor, pool: Tensor) -> list[Tensor]:
    parts, places = in_rows(texts, rows)
    return of_rows(scan(parts, decays, pool, places, CHUNK_SIZE), rows)


@pytest.mark.parametrize(("channels", "numbers", "groups"), SCANS)
def test_scans_of_pieces_and_rejected_drafts_are_the_recurrence_of_the_text(
    channels: int, numbers: int, groups: int, scan: Any
) -> None:
    texts = [scanned_text(length, channels, groups * numbers, seed) for seed, length in enumerate((170, 70))]
    pool, decays = scan_pool(channels, numbers, groups), decays_of(channels, numbers)
    outputs = [torch.zeros_like(text.added) for text in texts]
    of_steps(STEPS, outputs, lambda rows: scan_step(scan, texts, rows, decays, pool))
    for text, output, end in zip(texts, outputs, (140, 69), strict=True):
        expected = expected_scan(text, decays)[:end]
        assert (output[:end].double() - expected).abs().max() / expected.abs().max() < 1e-5


def test_a_scanned_tokens_bits_are_its_own(kernels: Path) -> None:
    """Outputs by the kernel: in one piece, token by token, in pieces with rejected drafts, in rows by other threads."""
    load_kernels(kernels)
    for channels, numbers, groups in SCANS[:2]:
        text, other = (scanned_text(100, channels, groups * numbers, seed) for seed in range(2))
        decays = decays_of(channels, numbers)
        whole = scan_pool(channels, numbers, groups)
        (expected,) = scan_step(scan_by_kernel, [text], [(0, 0, 100)], decays, whole)
        pool, compute = scan_pool(channels, numbers, groups), partial(scan_step, scan_by_kernel, decays=decays)
        check_pieces(text, other, expected, lambda one, rows, own, c=compute: c([one], rows, pool=own), pool)
        with other_threads():
            made_in_rows = compute([text], [(0, start, 1) for start in range(100)], pool=pool)
        assert torch.equal(torch.cat(made_in_rows), expected)
        assert torch.equal(pool[1].nan_to_num(), whole[1].nan_to_num())


def test_what_is_not_finite_stays_in_its_scan(scan: Any) -> None:
    texts, pool, decays = [scanned_text(70, 80, 8, seed) for seed in range(2)], scan_pool(80, 8, 1), decays_of(80, 8)
    texts[0].added[40] = torch.inf
    first, second = scan_step(scan, texts, [(0, 0, 70), (1, 0, 70)], decays, pool)
    assert first[:40].isfinite().all() and not first[40:].isfinite().any() and second.isfinite().all()
    pool[2] = pool[1]  # a slot that another had
    (again,) = scan_step(scan, [texts[1]] * 2, [(1, 0, 70)], decays, pool)
    assert torch.equal(again, second)


def test_decays_of_a_model_of_16_bits_are_those_of_its_config() -> None:
    """MiniMax's are numbers that transformers computes; rounded to 16 bits they are off by more with every token."""
    exact, rounded = make_model("minimax"), make_model("minimax").bfloat16()
    place_modules(rounded)
    for whole, half in zip(exact.model.layers, rounded.model.layers, strict=True):
        if hasattr(whole.self_attn, "slope_rate"):
            assert half.self_attn.slopes.dtype == torch.float32
            torch.testing.assert_close(half.self_attn.slopes, whole.self_attn.slope_rate.flatten(), rtol=1e-6, atol=0)
