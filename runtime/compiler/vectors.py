"""Vectors of one token: views of numbers that an operation or a kernel has made, operations on them, and their code.

Of a graph's tensors only one token's part is described: [1, tokens, C] is a vector of C numbers, [1, H, tokens, D] is H
vectors of D. A tensor that is reshaped, split, transposed or expanded is another view of the same numbers. The code,
which `csrc/token_program.h` reads, is a list of numbers. They say for each operation what it computes, in which loops,
and where its numbers lie.
"""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

OPERATIONS = (
    *("load", "pick", "store", "embed", "copy", "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "sqrt"),
    *("rsqrt", "pow", "exp", "sin", "cos", "tanh", "sigmoid", "silu", "relu", "softplus", "gelu", "gelu_tanh", "sum"),
    *("mean", "softmax", "topk", "gather", "floor", "log", "greater", "unequal", "scatter", "select", "add_arrays"),
    *("rms_norm", "layer_norm", "rotary", "gate_silu", "gate_gelu", "gate_gelu_tanh"),
)
"""Names of operations on vectors; the index is the operation's number in the code."""
DTYPES = {torch.float32: 6, torch.bfloat16: 15, torch.float16: 5, torch.int64: 4}
"""Numbers of dtypes in the code, which are those of at::ScalarType."""
GROUPS = OPERATIONS[OPERATIONS.index("add_arrays") :]
"""Operations that do the work of several others."""
_OF_THREE = {"select", *GROUPS}
_ROUNDINGS = {torch.bfloat16: 1, torch.float16: 2}
_SCRATCH, _ARRAY = 0, 3
_ALONG_LAST = {"sum", "mean", "softmax", "topk", "gather", "scatter", *GROUPS}
_MADE_ELSEWHERE = {"load", "pick", "store", "embed"}
ELEMENTWISE = {*OPERATIONS} - _ALONG_LAST - _MADE_ELSEWHERE - {"select"}
"""Operations that read only the same element of their operands: the result may overwrite an operand."""
_HEAVY = {"silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "softplus", "exp", "softmax", "topk", *GROUPS} - {
    "add_arrays"
}
_SLOW = {"sin", "cos", "pow", "log"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT, NUMBER = 1, 2
"""Kinds of constants: see `View.constant`."""

Shape = tuple[int, ...]


class CannotBeLowered(Exception):
    """A graph has an operation that token programs lack, or that they lack in this form."""


@dataclass(eq=False)
class Source:
    """Numbers of a token, side by side: an input, or the result of an operation or a kernel."""

    space: str
    """Name of the number of rows in the graph: all tokens, or the tokens whose logits are wanted."""
    dtype: torch.dtype
    count: int
    time: int
    """Number of kernels that must run one after the other before it can be computed."""
    array: int | None = None
    """Number of the array that holds the source in memory; None if none does."""


@dataclass(frozen=True)
class View:
    """A tensor of one token: numbers of a source in a shape. Without a source it is a weight's numbers, or a single
    number. Dimensions of rows have size 1.
    """

    source: Source | None
    constant: tuple[int, int]
    """Kind of a constant (weight or number), and its index among these."""
    dtype: torch.dtype
    shape: Shape
    strides: Shape
    offset: int = 0

    @property
    def time(self) -> int:
        return self.source.time if self.source else 0

    def is_whole(self) -> bool:
        """True if the view shows all numbers of its source, in order."""
        count = math.prod(self.shape)
        return self.source is not None and self.offset == 0 and count == self.source.count and self.is_dense()

    def is_dense(self) -> bool:
        dense = strides_of(self.shape)
        return all(size == 1 or own == other for size, own, other in zip(self.shape, self.strides, dense, strict=True))


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
    """Number of the array of a load, pick or store; of the table's weight of an `embed`; of the constant that is a
    norm's epsilon. Of a `topk` the k.
    """
    rounds_within: bool = False
    """True for a group that rounds the operand of its last operation."""


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


def widened(view: View, dim: int) -> View:
    """The view with a dimension of size 1 inserted before dimension `dim`."""
    shape, strides = ((*one[:dim], new, *one[dim:]) for one, new in ((view.shape, 1), (view.strides, 0)))
    return replace(view, shape=shape, strides=strides)


def expanded(view: View, shape: Shape) -> View:
    """The view broadcast to a shape: dimensions of size 1 are read again and again."""
    missing = len(shape) - len(view.shape)
    sizes, strides = (1,) * missing + view.shape, (0,) * missing + view.strides
    if missing < 0 or any(own not in (1, size) for own, size in zip(sizes, shape, strict=True)):
        raise CannotBeLowered(f"{view.shape} cannot be expanded to {shape}")
    wide = tuple(0 if own == 1 else stride for own, stride in zip(sizes, strides, strict=True))
    return replace(view, shape=shape, strides=wide)


# --- code ---

Rows = Mapping[Source, tuple[int, int]]
"""Sources that are read and written in arrays: for each the array's number, and the numbers in a row."""


def cost_of(call: Call) -> int:
    """A call's cost in elements. An element counts 8 times for functions like `exp`, 64 times for `sin` or `pow`."""
    return math.prod(call.sizes) * (8 if call.name in _HEAVY else 64 if call.name in _SLOW else 1)


def code_of_calls(calls: Seq[Call], rows: Rows) -> tuple[list[int], int]:
    """The operations' code, and the size of the memory that they need for a token, in float32 numbers."""
    places, num_floats = _placed(calls, rows)
    return [number for call in calls for number in _code_of_call(call, places, rows)], num_floats


def _placed(calls: Seq[Call], rows: Rows) -> tuple[dict[Source, int], int]:
    """The place of each source in a token's memory, used again when it is free, and the memory's size in numbers."""
    last: dict[Source, int] = {}
    for number, call in enumerate(calls):
        for view in (call.out, *call.operands):
            if view is not None and view.source is not None and view.source not in rows:
                last[view.source] = number
    places: dict[Source, int] = {}
    free: dict[int, list[int]] = {}
    size = 0
    for number, call in enumerate(calls):
        views = (call.out, *call.operands)
        sources = dict.fromkeys(view.source for view in views if view and view.source and view.source not in rows)
        over = [one for one in sources if last[one] == number]
        made = call.out.source if call.out else None
        if made in sources and made not in places and (taken := _overwritten(call, over)) is not None:
            places[made] = places[taken]
            over.remove(taken)
        for source in sources:
            room = -(-source.count // 16) * 16
            if source not in places and free.get(room):
                places[source] = free[room].pop()
            elif source not in places:
                places[source] = size
                size += room
        for source in over:
            free.setdefault(-(-source.count // 16) * 16, []).append(places[source])
    return places, size


def _overwritten(call: Call, over: list[Source]) -> Source | None:
    """A source that nothing reads again, in whose memory an elementwise operation can write its result; or None."""
    if call.name not in ELEMENTWISE or call.out is None or not call.out.is_whole():
        return None
    for view in call.operands:
        others = [one for one in call.operands if one.source is view.source and one != view]
        if view.source in over and view.is_whole() and not others:
            return view.source
    return None


def _code_of_call(call: Call, places: Mapping[Source, int], rows: Rows) -> list[int]:
    operands = [call.out, *call.operands]
    views = [one for one in operands if one is not None]
    if call.name in _MADE_ELSEWHERE:
        sizes: Shape = (1, 1, math.prod(call.sizes))
        strides: list[Shape] = [(0, 0, 1)] * len(views)
    else:
        sizes, strides = _loops(call.sizes, [one.strides for one in views], keeps_last=call.name in _ALONG_LAST)
    own = iter(strides)
    codes = [
        [_SCRATCH, 0, 0, 0, 0, 0] if view is None else _code_of_view(view, next(own), places, rows)
        for view in (*operands, None, None, None)
    ]
    code = [OPERATIONS.index(call.name), _ROUNDINGS.get(call.dtype, 0), call.number, *sizes]
    code += itertools.chain(*codes[:3])
    return [*code, *codes[3], int(call.rounds_within)] if call.name in _OF_THREE else code


def _code_of_view(view: View, strides: Shape, places: Mapping[Source, int], rows: Rows) -> list[int]:
    if view.source is None:
        return [*view.constant, view.offset, *strides]
    if view.source in rows:
        array, count = rows[view.source]
        return [_ARRAY, array, view.offset, *strides, count]
    return [_SCRATCH, 0, places[view.source] + view.offset, *strides]


def has_loops(call: Call) -> bool:
    """True if three nested loops can go through the operation's elements."""
    views = [one for one in (call.out, *call.operands) if one is not None]
    try:
        _loops(call.sizes, [one.strides for one in views], keeps_last=call.name in _ALONG_LAST)
    except CannotBeLowered:
        return False
    return True


def _loops(shape: Shape, strides: Seq[Shape], *, keeps_last: bool) -> tuple[Shape, list[Shape]]:
    """Sizes [3] of the loops through an operation's elements, and for each operand its strides [3]. Dimensions are
    merged where all operands allow it; with `keeps_last` the last one stays the innermost loop. Raises CannotBeLowered
    if more than three loops are left.
    """
    dims = [(size, tuple(one[i] for one in strides)) for i, size in enumerate(shape)]
    last = dims.pop() if keeps_last else None
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, own in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(stride * size for stride in own):
            merged[-1] = (merged[-1][0] * size, own)
        else:
            merged.append((size, own))
    merged += [last] if last is not None else []
    while len(merged) < 3:
        merged.insert(0, (1, (0,) * len(strides)))
    if len(merged) > 3:
        raise CannotBeLowered("an operation has more than three loops")
    return tuple(size for size, _ in merged), [tuple(own[i] for _, own in merged) for i in range(len(strides))]
