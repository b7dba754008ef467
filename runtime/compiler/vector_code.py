"""Code of operations on a token's vectors, as `csrc/token_program.h` reads it: numbers by which each of them is told
what it does, in which loops, and where its numbers lie in the token's memory."""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from runtime.compiler.vectors import Call, CannotBeLowered, Shape, Source, View

OPERATIONS = (
    *("load", "pick", "store", "embed", "copy", "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "sqrt"),
    *("rsqrt", "pow", "exp", "sin", "cos", "tanh", "sigmoid", "silu", "relu", "gelu", "gelu_tanh", "sum", "mean"),
    *("softmax", "topk", "gather", "floor", "log", "greater", "unequal", "scatter", "select", "add_arrays", "rms_norm"),
    *("layer_norm", "rotary", "gate_silu", "gate_gelu", "gate_gelu_tanh"),
)
"""Names of operations on vectors, by their numbers in the code."""
DTYPES = {torch.float32: 6, torch.bfloat16: 15, torch.float16: 5, torch.int64: 4}
"""Numbers of at::ScalarType."""
GROUPS = OPERATIONS[OPERATIONS.index("add_arrays") :]
"""Operations that are several of the others."""
_OF_THREE = {"select", *GROUPS}
_ROUNDINGS = {torch.bfloat16: 1, torch.float16: 2}
_SCRATCH, _ARRAY = 0, 3
_ALONG_LAST = {"sum", "mean", "softmax", "topk", "gather", "scatter", *GROUPS}
_MADE_ELSEWHERE = {"load", "pick", "store", "embed"}
ELEMENTWISE = {*OPERATIONS} - _ALONG_LAST - _MADE_ELSEWHERE - {"select"}
"""Operations that look at no other element; where they leave what they make, may be what they read."""

Rows = Mapping[Source, tuple[int, int]]
"""What is read and written in an array: its number, and how many numbers a row has."""


def cost(call: Call) -> int:
    """About the elements that are touched; functions are some ten additions."""
    heavy = {
        "silu",
        "gelu",
        "gelu_tanh",
        "tanh",
        "sigmoid",
        "exp",
        "softmax",
        "topk",
        "rotary",
        "rms_norm",
        "layer_norm",
    }
    heavy |= {name for name in GROUPS if name.startswith("gate")}
    slow = {"sin", "cos", "pow", "log"}
    return math.prod(call.sizes) * (8 if call.name in heavy else 64 if call.name in slow else 1)


def code_of_calls(calls: Seq[Call], rows: Rows) -> tuple[list[int], int]:
    """The operations' code, and how many numbers they need in a token's memory."""
    places, num_floats = _placed(calls, rows)
    return [number for call in calls for number in _code_of_call(call, places, rows)], num_floats


def _placed(calls: Seq[Call], rows: Rows) -> tuple[dict[Source, int], int]:
    """The place of each source in a token's memory, which another takes when it is not read again; and its size."""
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
    """One of the sources that are not read again, in whose place an operation on elements can leave what it makes."""
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
    """True if the operation's elements can be told in three loops."""
    views = [one for one in (call.out, *call.operands) if one is not None]
    try:
        _loops(call.sizes, [one.strides for one in views], keeps_last=call.name in _ALONG_LAST)
    except CannotBeLowered:
        return False
    return True


def _loops(shape: Shape, strides: Seq[Shape], *, keeps_last: bool) -> tuple[Shape, list[Shape]]:
    """The same elements in three loops: dimensions are one where all operands' numbers allow it."""
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
