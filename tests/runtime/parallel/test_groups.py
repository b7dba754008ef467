"""What ranks do together gives the same bits whichever way they reach each other."""

import time
from pathlib import Path

import pytest
import torch
from ranks_as_threads import together
from torch import Tensor

from runtime.compiler.kernels import load_kernels
from runtime.config import Compiler
from runtime.parallel.groups import Meeting, Way, join, way_of
from runtime.parallel.operations import all_reduce, gather_columns, own_columns, own_embeddings

WAYS: tuple[Way, ...] = ("shared", "gloo")


@pytest.mark.parametrize(
    ("compiler", "device", "way"),
    [
        ("aot", "cpu", "shared"),
        ("torch-compile", "cpu", "shared"),
        ("none", "cpu", "gloo"),  # without kernels, and so without a C++ compiler
        ("torch-compile", "cuda", "nccl"),
        ("none", "cuda", "nccl"),
    ],
)
def test_the_way_is_the_steps(compiler: Compiler, device: str, way: Way) -> None:
    assert way_of(compiler, device) == way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_sums_are_taken_in_the_order_of_ranks(way: Way, dtype: torch.dtype, tp_size: int, kernels: Path) -> None:
    load_kernels(kernels)
    generator = torch.Generator().manual_seed(tp_size)
    parts = [torch.randn(3, 5, 40, generator=generator).mul(100).to(dtype) for _ in range(tp_size)]
    wanted = parts[0].double()
    for part in parts[1:]:
        wanted = (wanted + part.double()).float().double()  # each sum rounded by itself
    found = together(way, tp_size, lambda rank: all_reduce(parts[rank], shares_memory=way == "shared"))
    assert all(torch.equal(one, wanted.to(dtype)) for one in found)


@pytest.mark.parametrize("way", WAYS)
def test_columns_and_embeddings(way: Way, kernels: Path) -> None:
    load_kernels(kernels)
    whole, table = torch.arange(24.0).view(3, 8), torch.randn(12, 5)
    table[7] = float("nan")  # of another rank it is zeros
    ids = torch.tensor([[0, 11, 5], [6, 3, 8]])

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own = own_columns(whole, 4, shares_memory=way == "shared")
        back = gather_columns(own, 4, shares_memory=way == "shared")
        rows = own_embeddings(ids, table[3 * rank : 3 * rank + 3].contiguous(), shares_memory=way == "shared")
        return own, back, rows

    found = together(way, 4, work)
    for rank, (own, back, rows) in enumerate(found):
        assert torch.equal(own, whole[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(back, whole)
        is_own = (ids // 3 == rank).unsqueeze(-1)
        assert torch.equal(rows, torch.where(is_own, table[ids], 0.0))


def test_a_rank_that_never_comes_is_no_reason_to_wait_for_it() -> None:
    """Who opens an engine watches its processes while the group is joined."""
    start = time.monotonic()
    meeting = Meeting("gloo", 2)
    join(meeting, 0, 2).stop()
    meeting.close()
    assert time.monotonic() - start < 5
