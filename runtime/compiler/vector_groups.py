"""Groups of vector operations that are carried out as one (`csrc/vector_groups.h`), with the same bits as alone.

They are found by their computation: norms, rotary embeddings, gates, and sums. Where it can, a group reads a kernel's
outputs directly from their arrays, and writes its own outputs into the array that the next kernel reads.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.compiler.vectors import FLOATS, GROUPS, NUMBER, WEIGHT, Call, Rows, Source, View, has_loops

_GATES = {"silu": "gate_silu", "gelu": "gate_gelu", "gelu_tanh": "gate_gelu_tanh"}
_NUM_READ = {"add_arrays": 2, "rms_norm": 1, "layer_norm": 1, "rotary": 3, **dict.fromkeys(_GATES.values(), 2)}
"""Number of a group's operands that may lie in arrays; the operands after these are weights."""


def grouped(calls: Seq[Call]) -> tuple[list[Call], Rows]:
    """The calls with groups in place of the operations that they consist of, and the sources that are read or written
    in arrays and so need no place in a token's memory.
    """
    block = _Calls(calls)
    for call in calls:
        for match in (_rms_norm, _layer_norm, _rotary, _gate):
            found = match(block, call)
            if found is not None:
                block.replace(call, *found)
                break
    block.replace_sums()
    rows = block.in_arrays()
    return [one for one in block.calls if not _is_in(one, rows)], rows


class _Calls:
    """A block's operations by the sources that they write and read. A source is written before it is read."""

    def __init__(self, calls: Seq[Call]) -> None:
        self.calls = list(calls)
        self.makers: dict[Source, list[Call]] = {}
        self.readers: dict[Source, list[Call]] = {}
        for call in calls:
            self._know(call)

    def _know(self, call: Call) -> None:
        if call.out is not None and call.out.source is not None:
            self.makers.setdefault(call.out.source, []).append(call)
        for source in dict.fromkeys(view.source for view in call.operands if view.source is not None):
            self.readers.setdefault(source, []).append(call)

    def replace(self, last: Call, group: Call, others: list[Call]) -> None:
        """Put a group in place of the operation `last`, and remove `others`."""
        gone = [last, *others]
        self.calls = [group if one is last else one for one in self.calls if one not in others]
        for known in (self.makers, self.readers):
            for source, those in known.items():
                known[source] = [one for one in those if one not in gone]
        self._know(group)

    def maker(self, view: View, name: str, *, num_readers: int = 1) -> Call | None:
        """The call that writes the whole view, if it is the operation `name` and `num_readers` calls read it."""
        source = view.source
        if source is None or len(self.readers.get(source, [])) != num_readers or not _each_once(view).is_whole():
            return None
        makers = self.makers.get(source, [])
        is_all = len(makers) == 1 and makers[0].out is not None and _each_once(makers[0].out).is_whole()
        return makers[0] if is_all and makers[0].name == name else None

    def replace_sums(self) -> None:
        """Replace additions along dense last dimensions by the operation that reads and writes arrays."""
        for call in self.calls:
            if call.name == "add" and _is_along_last([call.out, *call.operands]) and has_loops(call):
                call.name = "add_arrays"

    def in_arrays(self) -> dict[Source, tuple[int, int]]:
        """Sources that only groups read, or make, in the dtype of an array: for each, the array's number and the
        numbers in its row.

        If a group is not of float32, all its operands except weights must be in arrays too.
        """
        found: dict[Source, tuple[int, int]] = {}
        for call in self.calls:
            if call.name == "load" and call.out is not None and call.out.source is not None:
                found[call.out.source] = (call.number, call.out.source.count)
            elif call.name == "store" and (source := call.operands[0].source) is not None and source not in found:
                made = self.makers.get(source, [])
                if len(made) == 1 and made[0].name in GROUPS and made[0].out is not None and made[0].out.is_whole():
                    found[source] = (call.number, source.count)
        while gone := [source for source in found if not self._fits(source, found)]:
            for source in gone:
                del found[source]
        return found

    def _fits(self, source: Source, found: Rows) -> bool:
        makers = [one for one in self.makers.get(source, []) if one.name != "load"]
        readers = [one for one in self.readers.get(source, []) if one.name != "store"]
        stores = [one for one in self.readers.get(source, []) if one.name == "store"]
        if any(one.dtype != source.dtype for one in (*makers, *readers)) or source.dtype not in FLOATS:
            return False
        if len(stores) > (1 if makers else 0):
            return False
        return all(_reads_arrays(one, source, found) for one in readers)


def _is_in(call: Call, rows: Rows) -> bool:
    """True for a load or store that a group makes unnecessary, because it uses the array directly."""
    if call.name == "load":
        return call.out is not None and call.out.source in rows
    return call.name == "store" and call.operands[0].source in rows


def _reads_arrays(call: Call, source: Source, found: Rows) -> bool:
    if call.name not in GROUPS:
        return False
    read, rest = call.operands[: _NUM_READ[call.name]], call.operands[_NUM_READ[call.name] :]
    if any(one.source is source for one in rest):
        return False
    return call.dtype == torch.float32 or all(one.source in found for one in read)


def _each_once(view: View) -> View:
    """The view with its broadcast dimensions reduced to size 1."""
    dims = zip(view.shape, view.strides, strict=True)
    kept = [(1, 0) if stride == 0 or size == 1 else (size, stride) for size, stride in dims]
    return replace(view, shape=tuple(size for size, _ in kept), strides=tuple(stride for _, stride in kept))


def _is_along_last(views: Seq[View | None]) -> bool:
    """True if the last loop runs over numbers that lie side by side in memory."""
    return all(one is not None and one.source is not None and one.shape and one.strides[-1] == 1 for one in views)


def _is_weight(view: View) -> bool:
    return view.source is None and view.constant[0] == WEIGHT and bool(view.shape) and view.strides[-1] == 1


def _are_equal(one: View, other: View) -> bool:
    """True if both views show the same numbers in the same order."""
    return replace(one, dtype=other.dtype) == other


def _orders(call: Call) -> tuple[tuple[View, View], tuple[View, View]]:
    first, second = call.operands
    return (first, second), (second, first)


_Found = tuple[Call, list[Call]]
"""A group, and the operations that it replaces beside its last."""


def _group(name: str, last: Call, operands: list[View], others: list[Call], **settings: Any) -> _Found | None:
    group = Call(name, last.dtype, last.out, operands, last.sizes, **settings)
    reads = _NUM_READ[name]
    return (group, others) if _is_along_last([last.out, *operands[:reads]]) and has_loops(group) else None


def _rms_norm(block: _Calls, last: Call) -> _Found | None:
    if last.name != "mul":
        return None
    for weight, scaled in _orders(last):
        if not _is_weight(weight) or (product := block.maker(scaled, "mul")) is None:
            continue
        if product.sizes != last.sizes or product.dtype not in (torch.float32, last.dtype):
            continue
        for x, factor in _orders(product):
            found = _inverse_root(block, factor)
            if found is None or not all(_are_equal(one, x) for one in found.square.operands):
                continue
            rounds = product.dtype != torch.float32
            operations = [product, *found.operations]
            return _group("rms_norm", last, [x, weight], operations, number=found.epsilon, rounds_within=rounds)
    return None


@dataclass(frozen=True)
class _InverseRoot:
    """A chain of calls that computes 1 / sqrt(mean(x * x) + epsilon); `square` is the call of x * x."""

    square: Call
    epsilon: int
    operations: list[Call]


def _inverse_root(block: _Calls, view: View) -> _InverseRoot | None:
    root = block.maker(view, "rsqrt")
    shifted = root and block.maker(root.operands[0], "add")
    if root is None or shifted is None:
        return None
    for mean_of, epsilon in _orders(shifted):
        mean = block.maker(mean_of, "mean")
        square = mean and block.maker(mean.operands[0], "mul")
        if mean is None or square is None or epsilon.source is not None or epsilon.constant[0] != NUMBER:
            continue
        operations = [root, shifted, mean, square]
        if all(one.dtype == torch.float32 for one in operations):
            return _InverseRoot(square, epsilon.constant[1], operations)
    return None


def _layer_norm(block: _Calls, last: Call) -> _Found | None:
    if last.name == "mul" and last.out is not None and last.out.source is not None:
        readers = block.readers.get(last.out.source, [])
        if len(readers) == 1 and readers[0].name == "add" and any(_is_weight(one) for one in readers[0].operands):
            return None  # the product is a part of that norm
        return _scaled_difference(block, last, last, [], [])
    if last.name != "add":
        return None
    for scaled, bias in _orders(last):
        product = block.maker(scaled, "mul")
        if _is_weight(bias) and product is not None and product.dtype == torch.float32 and product.sizes == last.sizes:
            return _scaled_difference(block, last, product, [bias], [product])
    return None


def _scaled_difference(
    block: _Calls, last: Call, product: Call, bias: list[View], operations: list[Call]
) -> _Found | None:
    """Layer norm: a weight times the difference of x from its mean, divided by the root of the mean square of that
    difference. None if the calls compute something else.
    """
    for weight, scaled in _orders(product):
        normed = block.maker(scaled, "mul") if _is_weight(weight) else None
        if normed is None or normed.dtype != torch.float32 or normed.sizes != product.sizes:
            continue
        for centered, factor in _orders(normed):
            found = _inverse_root(block, factor)
            x, differences = _centered(block, centered, found.square) if found else (None, [])
            if found is not None and x is not None:
                parts = [*operations, normed, *found.operations, *differences]
                return _group("layer_norm", last, [x, weight, *bias], parts, number=found.epsilon)
    return None


def _centered(block: _Calls, centered: View, square: Call) -> tuple[View | None, list[Call]]:
    """The view x, if `centered` is x less its mean and `square` is the square of the same difference; otherwise None.
    Also the operations of the difference.
    """
    first, second = square.operands
    own = block.maker(centered, "sub", num_readers=2) or block.maker(centered, "sub")
    squared = block.maker(first, "sub", num_readers=2) or block.maker(first, "sub")
    if own is None or squared is None or not _are_equal(first, second):
        return None, []
    differences = [own] if own is squared else [own, squared]
    mean = block.maker(own.operands[1], "mean", num_readers=len(differences))
    x = own.operands[0]
    if mean is None or not all(
        _are_equal(one, other) for one, other in zip(own.operands, squared.operands, strict=True)
    ):
        return None, []
    is_same = _are_equal(mean.operands[0], x) and mean.dtype == torch.float32
    return (x, [*differences, mean]) if is_same and own.dtype == squared.dtype == torch.float32 else (None, [])


def _rotary(block: _Calls, last: Call) -> _Found | None:
    if last.name != "add":
        return None
    for one, other in _orders(last):
        along, across = block.maker(one, "mul"), block.maker(other, "mul")
        if along is None or across is None:
            continue
        if any((product.sizes, product.dtype) != (last.sizes, last.dtype) for product in (along, across)):
            continue
        for x, cosine in _orders(along):
            for turned, sine in _orders(across):
                parts = _halves_swapped(block, turned, x)
                if parts:
                    return _group("rotary", last, [x, cosine, sine], [along, across, *parts])
    return None


def _halves_swapped(block: _Calls, turned: View, x: View) -> list[Call]:
    """The operations that put the second half of x, negated, before its first half; empty for another `turned`."""
    source, size = turned.source, x.shape[-1]
    if source is None or size % 2 or len(block.readers.get(source, [])) != 1 or not _each_once(turned).is_whole():
        return []
    parts = {one.name: one for one in block.makers.get(source, [])}
    if parts.keys() != {"neg", "copy"} or len(block.makers[source]) != 2:
        return []
    for name, begin in (("neg", 0), ("copy", size // 2)):
        made, read = parts[name].out, parts[name].operands[0]
        if made is None or not _are_equal(_each_once(made), _each_once(_half(turned, begin))):
            return []
        if not _are_equal(_each_once(read), _each_once(_half(x, size // 2 - begin))):
            return []
    return list(parts.values())


def _half(view: View, begin: int) -> View:
    shape = (*view.shape[:-1], view.shape[-1] // 2)
    return replace(view, shape=shape, offset=view.offset + begin * view.strides[-1])


def _gate(block: _Calls, last: Call) -> _Found | None:
    if last.name != "mul":
        return None
    for gate, x in _orders(last):
        for name, group in _GATES.items():
            function = block.maker(gate, name)
            if function is not None and (function.sizes, function.dtype) == (last.sizes, last.dtype):
                return _group(group, last, [function.operands[0], x], [function])
    return None
