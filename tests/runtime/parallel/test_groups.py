"""What ranks do together gives the same bits whichever way they reach each other, and it ends when one of them does."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from runtime.compiler.kernels import load_kernels
from runtime.config import Compiler
from runtime.parallel.groups import Group, Meeting, Way, join, join_by_number, way_of
from runtime.parallel.operations import all_reduce, gather_columns, own_columns, own_embeddings

WAYS: tuple[Way, ...] = ("shared", "gloo")
Done = TypeVar("Done")


def together(way: Way, tp_size: int, work: Callable[[int], Done]) -> list[Done]:
    """What each rank's thread makes of its number."""
    meeting = Meeting(way, tp_size)
    groups: list[Group] = [join(meeting, 0, tp_size)]
    groups += [join_by_number(way, meeting.number, rank, tp_size) for rank in range(1, tp_size)]

    def of_rank(rank: int) -> Done:
        groups[rank].use()
        return work(rank)

    try:
        with ThreadPoolExecutor(tp_size) as threads:
            return list(threads.map(of_rank, range(tp_size)))
    finally:
        for group in groups:
            group.leave()
        meeting.close()


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


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_a_rank_hears_that_it_has_ended(way: Way, kernels: Path) -> None:
    load_kernels(kernels)
    meeting = Meeting(way, 2)
    own, other = join(meeting, 0, 2), join_by_number(way, meeting.number, 1, 2)
    other.use()
    own.use()
    threading.Timer(0.3, own.stop).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        all_reduce(torch.ones(3), shares_memory=way == "shared")
    assert time.monotonic() - start < 5
    for group in (own, other):
        group.leave()
    meeting.close()


def test_a_rank_that_never_comes_is_no_reason_to_wait_for_it() -> None:
    """Who opens an engine watches its processes while the group is joined."""
    start = time.monotonic()
    meeting = Meeting("gloo", 2)
    join(meeting, 0, 2).stop()
    meeting.close()
    assert time.monotonic() - start < 5
