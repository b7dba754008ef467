"""What a step that is split over ranks does together with the others, as operations that a compiler leaves whole.

On a CPU they are the kernels' (`runtime/compiler/csrc/collectives.cpp`). Which rank this is, and of which group, is not
in the program: so one program serves all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x) -> Tensor")
_library.define("gather_columns(Tensor x, int size) -> Tensor")
_library.define("own_columns(Tensor x, int size) -> Tensor")
_library.define("own_embeddings(Tensor ids, Tensor weight) -> Tensor")


def _all_reduce(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gather_columns(x: Tensor, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * size)


def _own_columns(x: Tensor, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // size)


def _own_embeddings(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[-1])


_shapes: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _all_reduce,
    "gather_columns": _gather_columns,
    "own_columns": _own_columns,
    "own_embeddings": _own_embeddings,
}
for _name, _shape_of in _shapes.items():
    torch.library.register_fake(f"specdec::{_name}", _shape_of)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of all ranks' x, taken in the order of ranks: the same bits on each."""
    total: Tensor = torch.ops.specdec.all_reduce(x)
    return total


def gather_columns(x: Tensor, size: int) -> Tensor:
    """(..., N) of each of `size` ranks as (..., N x size), in the order of ranks."""
    gathered: Tensor = torch.ops.specdec.gather_columns(x, size)
    return gathered


def own_columns(x: Tensor, size: int) -> Tensor:
    """(..., N / size): this rank's of (..., N) that all `size` ranks have."""
    own: Tensor = torch.ops.specdec.own_columns(x, size)
    return own


def own_embeddings(ids: Tensor, weight: Tensor) -> Tensor:
    """(*ids, C) rows of this rank's (V / ranks, C) part of the vocabulary; zeros for ids of others' parts."""
    found: Tensor = torch.ops.specdec.own_embeddings(ids, weight)
    return found
