"""Collectives of a split step, as opaque operations for the compiler.

Each exists twice: over memory that ranks share, for processors alone (`runtime/kernels/csrc/collectives.cpp`), and by
torch.distributed, for every device. Both give the same bits. The rank and its group are not part of the program, so one
program serves all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.groups import distributed_group

_NAMESPACES = {True: "specdec", False: "specdec_distributed"}
"""Namespaces of the operations, by whether ranks share memory."""
_SCHEMAS = (
    "all_reduce(Tensor x) -> Tensor",
    "gather_columns(Tensor x, int size) -> Tensor",
    "own_columns(Tensor x, int size) -> Tensor",
    "own_embeddings(Tensor ids, Tensor weight) -> Tensor",
)


def _reduced(x: Tensor) -> Tensor:
    parts = distributed_group().gather(x)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(x.dtype)


def _gathered_columns(x: Tensor, size: int) -> Tensor:
    group = distributed_group()
    if size != group.size:
        raise RuntimeError(f"a step of {size} ranks, and there are {group.size}")
    return torch.cat(list(group.gather(x)), dim=-1)


def _own_columns(x: Tensor, size: int) -> Tensor:
    width = x.shape[-1] // size
    return x.narrow(-1, distributed_group().rank * width, width).clone(memory_format=torch.contiguous_format)


def _own_embeddings(ids: Tensor, weight: Tensor) -> Tensor:
    rows = weight.shape[0]
    own = ids - distributed_group().rank * rows
    found = torch.nn.functional.embedding(own.clamp(0, rows - 1), weight)
    return found.masked_fill(((own < 0) | (own >= rows)).unsqueeze(-1), 0)


_distributed: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _reduced,
    "gather_columns": _gathered_columns,
    "own_columns": _own_columns,
    "own_embeddings": _own_embeddings,
}
_shapes: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "gather_columns": lambda x, size: x.new_empty(*x.shape[:-1], x.shape[-1] * size),
    "own_columns": lambda x, size: x.new_empty(*x.shape[:-1], x.shape[-1] // size),
    "own_embeddings": lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[-1]),
}
_libraries: dict[str, Any] = {
    name: torch.library.Library(name, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _NAMESPACES.values()
}
for _namespace, _library in _libraries.items():
    for _schema in _SCHEMAS:
        _library.define(_schema)
    for _name, _shape_of in _shapes.items():
        torch.library.register_fake(f"{_namespace}::{_name}", _shape_of)
for _name, _compute in _distributed.items():
    for _device in ("CPU", "CUDA"):
        _libraries["specdec_distributed"].impl(_name, _compute, _device)


def _operation(name: str, shares_memory: bool) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(getattr(torch.ops, _NAMESPACES[shares_memory]), name)
    return found


def all_reduce(x: Tensor, *, shares_memory: bool) -> Tensor:
    """The sum of x over all ranks, added in the order of ranks, so that each rank has the same bits."""
    return _operation("all_reduce", shares_memory)(x)


def gather_columns(x: Tensor, size: int, *, shares_memory: bool) -> Tensor:
    """Columns [..., N x size] of all `size` ranks, in the order of ranks, from this rank's columns [..., N]."""
    return _operation("gather_columns", shares_memory)(x, size)


def own_columns(x: Tensor, size: int, *, shares_memory: bool) -> Tensor:
    """This rank's share of the columns, [..., N / size], from all columns [..., N], which all `size` ranks have."""
    return _operation("own_columns", shares_memory)(x, size)


def own_embeddings(ids: Tensor, weight: Tensor, *, shares_memory: bool) -> Tensor:
    """Embeddings [*ids, C] from this rank's part of the vocabulary, [vocab / ranks, C]; zeros for other ids."""
    return _operation("own_embeddings", shares_memory)(ids, weight)
