"""Vectors of one token: views of the numbers that an operation or a kernel has made, and operations on them.

A graph's tensors are known by one token: `(1, T, C)` is a vector of `C`, `(1, H, T, D)` is H of them, and what is
reshaped, split, transposed or expanded is another view of the same numbers.
"""

import math
from dataclasses import dataclass, replace

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT, NUMBER = 1, 2
"""Places of constants: see `View.constant`."""

Shape = tuple[int, ...]


class CannotBeLowered(Exception):
    """The reason why a graph is left to the compiler."""


@dataclass(eq=False)
class Source:
    """Numbers of a token, side by side: an input, or what an operation or a kernel has made."""

    space: str
    """The number of rows, as the graph names it: tokens, or those whose logits are wanted."""
    dtype: torch.dtype
    count: int
    time: int
    """Kernels in a row before it, of those that must be computed before it."""
    array: int | None = None
    """Number of the array that holds it in memory, if one does."""


@dataclass(frozen=True)
class View:
    """A tensor of one token: a source's numbers (None: a weight's, or one number) in a shape. Rows are of size 1."""

    source: Source | None
    constant: tuple[int, int]
    """A weight or number: where it is kept, and its number there."""
    dtype: torch.dtype
    shape: Shape
    strides: Shape
    offset: int = 0

    @property
    def time(self) -> int:
        return self.source.time if self.source else 0

    def is_whole(self) -> bool:
        """True if these are all numbers of its source, in order."""
        count = math.prod(self.shape)
        return self.source is not None and self.offset == 0 and count == self.source.count and self.is_dense()

    def overlaps(self, other: "View") -> bool:
        """True if a number may be in both."""
        ends = [one.offset + _extent(one.shape, one.strides) for one in (self, other)]
        return self.source is other.source and self.offset < ends[1] and other.offset < ends[0]

    def is_dense(self) -> bool:
        dense = strides_of(self.shape)
        return all(size == 1 or own == other for size, own, other in zip(self.shape, self.strides, dense, strict=True))


def _extent(shape: Shape, strides: Shape) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def strides_of(shape: Shape) -> Shape:
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


@dataclass(eq=False)
class Call:
    """An operation on vectors."""

    name: str
    dtype: torch.dtype
    out: "View | None"
    operands: "list[View]"
    sizes: Shape
    number: int = 0
    rounds_within: bool = False
    """True for a group that rounds what its last operation takes."""


def whole_of(source: Source) -> View:
    return View(source, (0, 0), source.dtype, (source.count,), (1,))


def moved(view: View, source: Source) -> View:
    return replace(view, source=source)


def transposed(view: View, first: int, second: int) -> View:
    dims = list(range(len(view.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    shape, strides = (tuple(one[dim] for dim in dims) for one in (view.shape, view.strides))
    return replace(view, shape=shape, strides=strides)


def without(view: View, dim: int) -> View:
    shape, strides = ((*one[:dim], *one[dim + 1 :]) for one in (view.shape, view.strides))
    return replace(view, shape=shape, strides=strides)


def expanded(view: View, shape: Shape) -> View:
    """Broadcast: dimensions of size 1 are read again and again."""
    missing = len(shape) - len(view.shape)
    sizes, strides = (1,) * missing + view.shape, (0,) * missing + view.strides
    if missing < 0 or any(own not in (1, size) for own, size in zip(sizes, shape, strict=True)):
        raise CannotBeLowered(f"{view.shape} cannot be expanded to {shape}")
    wide = tuple(0 if own == 1 else stride for own, stride in zip(sizes, strides, strict=True))
    return replace(view, shape=shape, strides=wide)
