"""Short convolutions over slots, by the kernel and by torch, against float64's convolution of the whole text."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear_attention import Rows, in_rows, of_rows, of_steps
from torch import Tensor

from runtime.kernels.ops import load_kernels
from runtime.model.recurrences import short_conv

NUM_SLOTS, CHANNELS = 5, 300  # more than one thread takes together, and no multiple of a vector
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def by_kernel(*inputs: Any) -> Tensor:
    output: Tensor = torch.ops.specdec.short_conv(*inputs)
    return output


@pytest.fixture(params=["kernel", "torch"])
def convolve(request: pytest.FixtureRequest, kernels: Path) -> Any:
    load_kernels(kernels)
    return by_kernel if request.param == "kernel" else short_conv


def step(convolve: Any, texts: list[Tensor], rows: Rows, weight: Tensor, bias: Any, pool: Tensor) -> list[Tensor]:
    (padded,), places = in_rows([(text,) for text in texts], rows)
    return of_rows(convolve(padded, weight, bias, pool, *places), rows)


@pytest.mark.parametrize("kernel_size", [3, 4, 7])
@pytest.mark.parametrize("keeps_float32", [False, True])  # GLM-5.3-Flash keeps these weights, whatever its dtype
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pieces_rejected_drafts_and_batches_give_the_convolution_of_the_text(
    dtype: torch.dtype, keeps_float32: bool, kernel_size: int, convolve: Any
) -> None:
    generator = torch.Generator().manual_seed(kernel_size)
    texts = [torch.randn(length, CHANNELS, generator=generator).to(dtype) for length in (70, 25)]
    weight_dtype = torch.float32 if keeps_float32 else dtype
    weight = torch.randn(CHANNELS, kernel_size, generator=generator).to(weight_dtype)
    bias = torch.randn(CHANNELS, generator=generator).to(weight_dtype) if kernel_size != 4 else None
    pool = torch.full((NUM_SLOTS, kernel_size - 1 + 12, CHANNELS), torch.nan, dtype=dtype)  # what others left there
    steps = [
        [(0, 0, 50)],
        [(1, 0, 2), (0, 50, 1)],
        [(0, 51, 8), (1, 2, 5)],
        [(1, 4, 1), (0, 53, 1)],
        [(0, 54, 16), (1, 5, 20)],
    ]
    outputs = [torch.zeros_like(text) for text in texts]
    of_steps(steps, outputs, lambda rows: step(convolve, texts, rows, weight, bias, pool))
    for text, output in zip(texts, outputs, strict=True):
        whole = F.pad(text.double().T, (kernel_size - 1, 0))
        expected = F.conv1d(
            whole, weight.double().unsqueeze(1), None if bias is None else bias.double(), groups=CHANNELS
        ).T
        error = (output.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype]


def test_what_is_not_finite_stays_in_its_sequence(convolve: Any) -> None:
    texts = [torch.ones(6, CHANNELS), torch.ones(6, CHANNELS)]
    texts[0][2] = torch.inf
    weight, pool = torch.ones(CHANNELS, 3), torch.zeros(NUM_SLOTS, 20, CHANNELS)
    first, second = step(convolve, texts, [(0, 0, 6), (1, 0, 6)], weight, None, pool)
    assert first[2:5].isinf().all() and first[5].isfinite().all() and second.isfinite().all()
