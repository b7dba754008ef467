"""Operations of ranks together give the same bits whichever way they reach each other."""

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
from ranks_as_threads import WAYS, together
from torch import Tensor
from waiting import HANG_S

from runtime.checkpoint.config import Compiler
from runtime.kernels.collectives import all_reduce, gather_columns, own_columns, own_embeddings
from runtime.kernels.groups import _WAITS, Rendezvous, Way, join, way_of
from runtime.kernels.ops import load_kernels


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


def test_a_compiler_leaves_sums_whole() -> None:
    """Compiled as one graph, for any number of tokens, whatever a rank's number is: as a GPU's step is."""
    torch.manual_seed(1)
    layer, tokens = torch.nn.Linear(8, 6, bias=False).requires_grad_(False), torch.randn(5, 16)

    def own_part(x: Tensor) -> Tensor:
        return all_reduce(layer(own_columns(x, 2, shares_memory=False)), shares_memory=False)

    compiled = torch.compile(own_part, backend="aot_eager", fullgraph=True, dynamic=True)
    wanted = layer(tokens[:, :8]) + layer(tokens[:, 8:])
    for num_tokens in (3, 5):
        found = together("gloo", 2, lambda rank, n=num_tokens: compiled(tokens[:n]))
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], wanted[:num_tokens])


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
    """The process that opens an engine watches the others while the group is joined."""

    def come_and_go() -> None:
        rendezvous = Rendezvous("gloo", 2)
        join("gloo", rendezvous.number, 0, 2, rendezvous.store).stop()
        rendezvous.close()

    assert timedelta(seconds=HANG_S) < _WAITS
    alone = Thread(target=come_and_go, daemon=True)
    alone.start()
    alone.join(HANG_S)
    assert not alone.is_alive()
