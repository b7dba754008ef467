"""Token programs: a step without compilation, as kernels and, between them, operations on a token's vectors.

All operations between two kernels are a block. A block is carried out token by token (`csrc/token_program.h`), in
memory that stays in the processor's cache. There all numbers are float32, and are rounded where the graph's tensor has
16 bits.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from runtime.compiler.capture import NoTokenProgram, is_multiple, memory_of, name_of, open_dims, split_open
from runtime.compiler.vector_groups import grouped
from runtime.compiler.vectors import (
    DTYPES,
    ELEMENTWISE,
    FLOATS,
    NUMBER,
    WEIGHT,
    Call,
    CannotBeLowered,
    Shape,
    Source,
    View,
    code_of_calls,
    cost_of,
    expanded,
    moved,
    strides_of,
    transposed,
    whole_of,
    widened,
    without,
)

KERNELS = (
    *("vectors", "linear", "quantized_linear", "experts_linear", "paged_attention", "all_reduce", "short_conv"),
    *("linear_attention", "gather_columns", "own_columns", "own_embeddings", "selective_scan"),
    "quantized_rows",
)
"""Names of a program's stages; the index is the stage's number in the code."""
_MOST_ADDED = 16
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class TokenProgram:
    """A program's code, and the constants and weight names that the code refers to."""

    code: list[int]
    numbers: list[float]
    weights: list[str]


def lower(graph: GraphModule, *, groups: bool = True) -> TokenProgram | NoTokenProgram:
    """The program that computes the graph, or NoTokenProgram, with all operations that programs lack. Without `groups`
    each operation is carried out by itself, with the same bits.
    """
    if lacking := dict.fromkeys(_lacking_name(node) for node in graph.graph.nodes if _is_lacking(node)):
        return NoTokenProgram(", ".join(lacking))
    try:
        return _Lowering(graph, groups=groups).program()
    except CannotBeLowered as why:
        return NoTokenProgram(str(why))


def _is_lacking(node: Node) -> bool:
    is_computed = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | list | tuple)
    return is_computed and bool(node.users) and node.target is not getitem and str(node.target) not in _METHODS


def _lacking_name(node: Node) -> str:
    if node.target is not _ATEN.linear.default:
        return name_of(node.target)
    return f"linear with {node.args[1].meta['val'].shape[1]} inputs"  # type: ignore[union-attr]


@dataclass
class _Block:
    """The operations on vectors between two kernels."""

    space: str
    calls: list[Call] = field(default_factory=list)
    loaded: dict[Source, Source] = field(default_factory=dict)
    picked: dict[Source, Source] = field(default_factory=dict)
    picked_by: int = -1
    made: dict[int, tuple[torch.dtype, Shape]] = field(default_factory=dict)


class _Lowering:
    def __init__(self, graph: GraphModule, *, groups: bool) -> None:
        self.graph, self.groups = graph, groups
        self.values: dict[Node, Any] = {}
        self.weights: dict[str, int] = {}
        self.numbers: dict[float, int] = {}
        self.blocks: dict[tuple[int, str], _Block] = {}
        self.kernels: dict[int, list[list[int]]] = {}  # codes of the kernels at each time
        self.homes: dict[Source, _Block] = {}  # blocks of the operations' results
        self.unfilled: dict[Source, list[tuple[View, View]]] = {}  # with the views written into their parts
        self.inputs: set[Source] = set()
        self.shown: dict[Source | None, dict[Node, None]] = {}  # nodes that are views of a source
        self.spaces: list[str] = []
        self.input_numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        self.num_arrays = len(self.input_numbers)

    def program(self) -> TokenProgram:
        for node, number in self.input_numbers.items():
            self._take_input(node, number)
        outputs: list[int] = []
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and not node.users and not node.is_impure():
                continue
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | list | tuple):
                self.values[node] = lowered = self._lower(node)
                if isinstance(lowered, View) and lowered.source is not None:
                    self.shown.setdefault(lowered.source, {})[node] = None
            elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                raise CannotBeLowered(f"{node} writes into tensors, and gives none")
            elif node.op == "get_attr":
                self.values[node] = self._weight(node)
            elif node.op == "output":
                made = node.args[0] if isinstance(node.args[0], list | tuple) else (node.args[0],)
                outputs = [self._output(one) for one in made]
        return TokenProgram(self._code(outputs), list(self.numbers), list(self.weights))

    # --- values ---

    def _take_input(self, node: Node, number: int) -> None:
        value = node.meta["val"]
        try:
            shape, space = _of_token(value)
        except CannotBeLowered:
            return  # such as a pool: kernels take it as it is
        if value.dtype in (*DTYPES, torch.bool) and space:
            source = Source(space, _in_arrays(value.dtype), math.prod(shape), 0, number)
            self.values[node] = View(source, (0, 0), value.dtype, shape, strides_of(shape))
            self.inputs.add(source)

    def _weight(self, node: Node) -> View:
        value = node.meta["val"]
        shape = tuple(value.shape)
        return View(None, (WEIGHT, self._weight_number(node)), value.dtype, shape, strides_of(shape))

    def _weight_number(self, node: Any) -> int:
        if node is None:
            return -1
        if not isinstance(node, Node) or node.op != "get_attr":
            raise CannotBeLowered(f"{node} is no weight")
        return self.weights.setdefault(str(node.target), len(self.weights))

    def _number(self, value: float, dtype: torch.dtype) -> View:
        return View(None, (NUMBER, self.numbers.setdefault(float(value), len(self.numbers))), dtype, (), ())

    def _view(self, node: Any) -> View:
        if isinstance(node, int) and is_multiple(abs(node)):
            raise CannotBeLowered("a size is computed with")
        if isinstance(node, int | float):
            return self._number(node, torch.float32)
        value = self.values.get(node)
        if isinstance(value, View) and value.source in self.unfilled:
            self._fill(value.source, memory_of(node))
            value = self.values[node]
        if not isinstance(value, View):
            raise CannotBeLowered(f"{node} is no tensor of one token")
        return value

    def _place(self, node: Any) -> View:
        """The view of a node's tensor, which may be part of a tensor that has not been filled yet."""
        value = self.values.get(node)
        return value if isinstance(value, View) and value.source in self.unfilled else self._view(node)

    def _fill(self, source: Source, memory: int | None) -> None:
        parts = self.unfilled.pop(source)
        if not parts:
            raise CannotBeLowered("an empty tensor is read")
        time = max(written.time for _, written in parts)
        block = self._block(time, source.space)
        filled = self._new(block, time, source.dtype, (source.count,)).source
        assert filled is not None
        for part, written in parts:
            inside = expanded(self._in_block(written, block), part.shape)
            block.calls.append(Call("copy", source.dtype, moved(part, filled), [inside], part.shape))
        self._rebind(source, filled, memory)

    def _rebind(self, source: Source, changed: Source, memory: int | None) -> None:
        """Replace `source` by `changed`, which has its numbers now, in all views of it that lie in this memory."""
        for node, value in self.values.items():
            if isinstance(value, View) and value.source is source and memory_of(node) == memory:
                self.values[node] = moved(value, changed)
                self.shown.setdefault(changed, {})[node] = None

    def _input_number(self, node: Any) -> int:
        """Number of a node among the program's inputs. Raises CannotBeLowered for a node that is no input."""
        if node not in self.input_numbers:
            raise CannotBeLowered(f"{node} is no input")
        return self.input_numbers[node]

    # --- places ---

    def _block(self, time: int, space: str) -> _Block:
        self._know(space)
        return self.blocks.setdefault((time, space), _Block(space))

    def _know(self, space: str) -> None:
        """Remember a space (a number of rows). All tokens come before the tokens that are picked from them."""
        if space not in self.spaces:
            self.spaces.append(space)

    def _in_block(self, view: View, block: _Block) -> View:
        """The view moved to the block's own memory. Numbers that are only in an array are loaded."""
        source = view.source
        if source is None or self.homes.get(source) is block:
            return view
        array = self._array(source)
        if source not in block.loaded:
            copy = Source(source.space, source.dtype, source.count, source.time)
            self.homes[copy] = block
            block.loaded[source] = copy
            whole = whole_of(copy)
            block.calls.append(Call("load", source.dtype, whole, [], (1, 1, source.count), array))
        return moved(view, block.loaded[source])

    def _array(self, source: Source, shape: Shape | None = None) -> int:
        """Number of the array that holds the source's numbers; the array is written if there is none yet."""
        if source.array is None:
            source.dtype = _in_arrays(source.dtype)
            home = self.homes[source]
            source.array = self._new_array()
            home.made[source.array] = (source.dtype, shape or (-1, source.count))
            home.calls.append(Call("store", source.dtype, None, [whole_of(source)], (1, 1, source.count), source.array))
        return source.array

    def _new_array(self) -> int:
        self.num_arrays += 1
        return self.num_arrays - 1

    def _compute(
        self, name: str, operands: Seq[View], dtype: torch.dtype, shape: Shape, *, into: View | None = None
    ) -> View:
        """Add an operation on elements, which makes a new tensor or writes `into` a part of an existing one."""
        if into is None:
            block, into = self._opened(operands, dtype, shape)
        else:
            block = self._block(into.time, self._common_space([*operands, into]))
        inside = [expanded(self._in_block(one, block), shape) for one in operands]
        block.calls.append(Call(name, dtype, into, inside, shape))
        return into

    def _new(self, block: _Block, time: int, dtype: torch.dtype, shape: Shape) -> View:
        if dtype not in (*DTYPES, torch.bool):
            raise CannotBeLowered(f"there are no vectors of {dtype}")
        source = Source(block.space, dtype, math.prod(shape), time)
        self.homes[source] = block
        return View(source, (0, 0), dtype, shape, strides_of(shape))

    def _common_space(self, operands: Iterable[View]) -> str:
        spaces = {one.source.space for one in operands if one.source is not None}
        if len(spaces) != 1:
            raise CannotBeLowered(f"an operation takes tensors of {len(spaces)} numbers of rows")
        return spaces.pop()

    def _contiguous(self, view: View) -> View:
        """The view itself if it shows its whole source, in the source's dtype; otherwise a copy of it."""
        if view.is_whole() and view.source is not None and view.source.dtype == view.dtype:
            return view
        return self._compute("copy", [view], view.dtype, view.shape)

    # --- operations ---

    def _lower(self, node: Node) -> Any:
        target: Any = node.target
        if target is getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        return _METHODS[str(target)](self, node)

    def _alias(self, node: Node) -> View:
        is_same_memory = memory_of(node) == memory_of(node.args[0])
        return self._place(node.args[0]) if is_same_memory else self._view(node.args[0])

    def _kept(self, node: Node) -> View:
        if node.args[2]:
            raise CannotBeLowered(f"{node} draws what it drops")
        return self._alias(node)

    def _converted(self, node: Node) -> View:
        view, dtype = self._view(node.args[0]), node.meta["val"].dtype
        if dtype == view.dtype:
            return view
        if dtype == torch.bool:
            return self._compute("unequal", [view, self._view(0)], dtype, view.shape)
        if dtype not in FLOATS or view.dtype not in (*FLOATS, torch.int64, torch.bool):
            raise CannotBeLowered(f"{node} converts {view.dtype} to {dtype}")
        if dtype == torch.float32:  # the same numbers
            return replace(view, dtype=dtype)
        made_by = self._made_for(node.args[0], view)
        if made_by is None or view.dtype != torch.float32:
            return self._compute("copy", [view], dtype, view.shape)
        made_by.dtype = dtype
        assert view.source is not None
        view.source.dtype = dtype
        return replace(view, dtype=dtype)

    def _made_for(self, node: Any, view: View) -> Call | None:
        """The elementwise operation that makes the whole view for a single reader, if no array holds it; else None."""
        showing = self.shown.get(view.source, {node: None})
        users = {user for one in showing for user in one.users if user not in showing}
        users = {user for user in users if user.target is not _ATEN._assert_tensor_metadata.default}
        if len(users) != 1 or not view.is_whole() or view.source not in self.homes or view.source.array is not None:
            return None
        calls = [one for one in self.homes[view.source].calls if one.out and one.out.source is view.source]
        return calls[0] if len(calls) == 1 and calls[0].name in ELEMENTWISE else None

    def _unary(self, name: str, node: Node) -> View:
        return self._compute(name, [self._view(node.args[0])], *_form(node))

    def _square(self, node: Node) -> View:
        view = self._view(node.args[0])
        return self._compute("mul", [view, view], *_form(node))

    def _mish(self, node: Node) -> View:
        view = self._view(node.args[0])
        made = self._compute("softplus", [view], torch.float32, view.shape)
        return self._compute("mul", [view, self._compute("tanh", [made], torch.float32, view.shape)], *_form(node))

    def _leaky(self, node: Node) -> View:
        """The larger of x and its product with a slope that is at most 1."""
        view, slope = self._view(node.args[0]), (*node.args[1:], 0.01)[0]
        if not isinstance(slope, float) or not 0 <= slope <= 1:
            raise CannotBeLowered(f"{node} has the slope {slope}")
        small = self._compute("mul", [view, self._view(slope)], torch.float32, view.shape)
        return self._compute("maximum", [view, small], *_form(node))

    def _log1p(self, node: Node) -> View:
        view = self._view(node.args[0])
        more = self._compute("add", [view, self._view(1.0)], torch.float32, view.shape)
        return self._compute("log", [more], *_form(node))

    def _expm1(self, node: Node) -> View:
        """exp(x) - 1, up to 1 as 2 tanh(x / 2) / (1 - tanh(x / 2)): there the difference would lose digits."""
        view, float32 = self._view(node.args[0]), torch.float32

        def made(name: str, *operands: View) -> View:
            return self._compute(name, operands, float32, view.shape)

        one, two = self._view(1.0), self._view(2.0)
        half = made("tanh", made("div", view, two))
        small = made("div", made("mul", half, two), made("sub", one, half))
        large = made("sub", made("exp", view), one)
        is_large = self._compute("greater", [view, one], torch.bool, view.shape)
        return self._compute("select", [is_large, large, small], *_form(node))

    def _vector_norm(self, node: Node) -> View:
        view, (order, dims, keeps) = self._view(node.args[0]), (*node.args[1:], 2, None, False)[:3]
        if order not in (1, 2) or not isinstance(dims, list | tuple) or len(dims) != 1:
            raise CannotBeLowered(f"{node} takes {node.args[1:]}")
        dim = _own_dim(node.args[0].meta["val"], dims[0])  # type: ignore[union-attr]
        name, operands = ("abs", [view]) if order == 1 else ("mul", [view, view])
        dtype = node.meta["val"].dtype
        sums = self._reduce("sum", self._compute(name, operands, torch.float32, view.shape), dim, torch.float32)
        norms = self._compute("sqrt" if order == 2 else "copy", [sums], dtype, sums.shape)
        return norms if keeps else without(norms, dim)

    def _softplus(self, node: Node) -> View:
        if tuple(node.args[1:]) not in ((), (1.0, 20.0)):
            raise CannotBeLowered(f"{node} has another slope or threshold than torch's own")
        return self._unary("softplus", node)

    def _binary(self, name: str, node: Node) -> View:
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            raise CannotBeLowered(f"{node} takes {dict(node.kwargs)}")
        views = [self._view(one) for one in node.args[:2]]
        if name in ("add", "sub") and isinstance(
            node.args[1], float
        ):  # torch rounds a number that it adds, but no factor
            views[1] = self._number(torch.tensor(node.args[1], dtype=node.meta["val"].dtype).item(), views[0].dtype)
        return self._compute(name, views, *_form(node))

    def _less(self, node: Node) -> View:
        first, second = (self._view(one) for one in node.args)
        return self._compute("greater", [second, first], *_form(node))

    def _overwrite(self, node: Node, made: View) -> View:
        """Let `made` replace the operation's first input, also in other views of the same memory.

        If the input is all of its source, these become views of `made`'s source. Otherwise they become views of a copy
        of the old source, in which the input's part is overwritten by `made`.
        """
        place = self._view(node.args[0])
        old = place.source
        if old is None or old in self.inputs:
            raise CannotBeLowered(f"{name_of(node.target)} of an input or a weight")
        if place.is_whole() and made.is_whole() and (made.dtype, made.shape) == (place.dtype, place.shape):
            new = made.source
        else:
            new = self._copy(whole_of(old), max(place.time, made.time)).source
            self._compute("copy", [made], place.dtype, place.shape, into=moved(place, new))  # type: ignore[arg-type]
        assert new is not None
        self._rebind(old, new, memory_of(node.args[0]))
        return moved(place, new)

    def _copy(self, view: View, time: int) -> View:
        """A copy of the view, made at this time (number of kernels before it)."""
        block = self._block(time, self._common_space([view]))
        out = self._new(block, time, view.dtype, view.shape)
        block.calls.append(Call("copy", view.dtype, out, [self._in_block(view, block)], view.shape))
        return out

    def _selected_by(self, node: Node) -> View:
        x, mask, value = node.args
        return self._compute("select", [self._view(mask), self._view(value), self._view(x)], *_form(node))

    def _where(self, node: Node) -> View:
        return self._compute("select", [self._view(one) for one in node.args], *_form(node))

    def _inverted(self, node: Node) -> View:
        if node.meta["val"].dtype != torch.bool:
            raise CannotBeLowered(f"{node} inverts bits")
        return self._not(self._view(node.args[0]))

    def _not(self, view: View) -> View:
        return self._compute("sub", [self._view(1), view], torch.bool, view.shape)

    def _zeros(self, node: Node) -> View:
        dtype, shape = _form(node)
        block, out = self._opened([self._view(node.args[0])], dtype, shape)
        block.calls.append(Call("copy", dtype, out, [expanded(self._view(0), shape)], shape))
        return out

    def _opened(self, read: Seq[View], dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[_Block, View]:
        """The block for operations on these views, and a new tensor in it for their result."""
        time = max(view.time for view in read)
        block = self._block(time, self._common_space(read))
        return block, self._new(block, time, dtype, shape)

    def _filled(self, value: Any, node: Node) -> View:
        """A tensor filled with one number, `value` or the operation's second argument."""
        dtype, shape = _form(node)
        number = self._view(node.args[1] if value is None else value)
        return expanded(replace(number, dtype=dtype), shape)

    def _small_product(self, node: Node) -> View:
        """A product of matrices of each token, `[..., m, k]` and `[..., k, n]` with k from 2 to 16, in float32."""
        first, second = (self._view(one) for one in node.args)
        for one in node.args:
            for dim in (-1, -2):
                _own_dim(one.meta["val"], dim)  # type: ignore[union-attr]
        num_added = first.shape[-1]
        if len(first.shape) != len(second.shape) or not 1 < num_added <= _MOST_ADDED:
            raise CannotBeLowered(f"{node} is a product of matrices that are not small")
        dtype, shape = _form(node)
        columns, rows = widened(first, len(shape)), widened(second, len(shape) - 2)
        products = self._compute("mul", [columns, rows], torch.float32, (*shape[:-1], num_added, shape[-1]))
        return without(self._added(products, len(shape) - 1, dtype), len(shape) - 1)

    def _empty(self, node: Node) -> View:
        dtype, shape = _form(node)
        _, space = _of_token(node.meta["val"])
        source = Source(space, dtype, math.prod(shape), 0)
        self.unfilled[source] = []
        return View(source, (0, 0), dtype, shape, strides_of(shape))

    def _written(self, node: Node) -> View:
        part, written = self._place(node.args[0]), self._view(node.args[1])
        if part.source not in self.unfilled:
            return self._overwrite(node, expanded(written, part.shape))
        self.unfilled[part.source].append((part, written))
        return part

    def _scattered(self, node: Node) -> View:
        """A copy of the input with one value written at the given indices along its last dimension."""
        view, places, value = self._view(node.args[0]), self._view(node.args[2]), self._view(node.args[3])
        dtype, shape = _form(node)
        if _own_dim(node.meta["val"], node.args[1]) != len(shape) - 1 or places.shape[:-1] != shape[:-1]:
            raise CannotBeLowered(f"{node} does not scatter along the last dimension")
        block, out = self._opened([view, places], dtype, shape)
        block.calls.append(Call("copy", dtype, out, [self._in_block(view, block)], shape))
        into = replace(out, shape=places.shape)
        written = [expanded(value, places.shape), self._in_block(places, block)]
        block.calls.append(Call("scatter", dtype, into, written, places.shape))
        return out

    def _power(self, node: Node) -> View:
        x, exponent = self._view(node.args[0]), node.args[1]
        dtype, shape = _form(node)
        if exponent == 2:
            return self._compute("mul", [x, x], dtype, shape)
        if exponent == 3:  # torch rounds the square where its vectors are of bfloat16
            square = self._compute("mul", [x, x], dtype if dtype == torch.bfloat16 else torch.float32, shape)
            return self._compute("mul", [square, x], dtype, shape)
        if exponent in (0.5, -0.5):
            return self._compute("sqrt" if exponent == 0.5 else "rsqrt", [x], dtype, shape)
        return self._compute("pow", [x, self._view(exponent)], dtype, shape)

    def _clamp(self, node: Node) -> View:
        low, high = (*node.args[1:], None, None)[:2]
        return self._bounded(node, (node.kwargs.get("min", low), node.kwargs.get("max", high)))

    def _bounded(self, node: Node, bounds: tuple[Any, ...]) -> View:
        """The input clamped to bounds, which are numbers, tensors or None."""
        dtype, shape = _form(node)
        view = self._view(node.args[0])
        for name, bound in zip(("maximum", "minimum"), bounds, strict=True):
            if bound is not None:
                view = self._compute(name, [view, self._view(bound)], dtype, shape)
        return view

    def _gelu(self, node: Node) -> View:
        return self._unary("gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu", node)

    def _reduced(self, name: str, node: Node) -> View:
        view = self._view(node.args[0])
        dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        if len(dims) != 1:
            raise CannotBeLowered(f"{node} sums over several dimensions")
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        dim = _own_dim(value, dims[0])
        keeps = len(node.args) > 2 and bool(node.args[2])
        dtype = node.meta["val"].dtype
        if name == "sum" and dim != len(view.shape) - 1 and 1 < view.shape[dim] <= _MOST_ADDED:
            reduced = self._added(view, dim, dtype)
        else:
            reduced = self._reduce(name, view, dim, dtype)
        return reduced if keeps else without(reduced, dim)

    def _added(self, view: View, dim: int, dtype: torch.dtype) -> View:
        """The sum over a dimension of a few rows, which are added one after the other."""
        first, *others = (self._part(view, dim, range(i, i + 1)) for i in range(view.shape[dim]))
        for i, row in enumerate(others):
            is_last = i == len(others) - 1
            first = self._compute("add", [first, row], dtype if is_last else torch.float32, row.shape)
        return first

    def _reduce(self, name: str, view: View, dim: int, dtype: torch.dtype) -> View:
        """Reduce a dimension to size 1, by `sum` or `mean`."""
        view = transposed(view, dim, len(view.shape) - 1)
        shape = (*view.shape[:-1], 1)
        block, out = self._opened([view], dtype, shape)
        block.calls.append(Call(name, dtype, expanded(out, view.shape), [self._in_block(view, block)], view.shape))
        return transposed(out, dim, len(shape) - 1)

    def _softmax(self, node: Node) -> View:
        view, dtype = self._view(node.args[0]), node.meta["val"].dtype
        dim = _own_dim(node.meta["val"], node.args[1])
        if dim != len(view.shape) - 1:
            raise CannotBeLowered(f"{node} is not over the last dimension")
        return self._compute("softmax", [view], dtype, view.shape)

    def _topk(self, node: Node) -> tuple[View, View]:
        count = node.args[1]
        largest = node.kwargs.get("largest", node.args[3] if len(node.args) > 3 else True)
        if not largest or not isinstance(count, int):
            raise CannotBeLowered(f"{node} takes {node.args[1:]}")
        return self._largest(node, count, node.args[2] if len(node.args) > 2 else -1)

    def _largest_one(self, node: Node) -> tuple[View, View]:
        value, place = self._largest(node, 1, node.args[1])
        if len(node.args) > 2 and node.args[2]:
            return value, place
        return without(value, len(value.shape) - 1), without(place, len(place.shape) - 1)

    def _largest(self, node: Node, count: int, along: Any) -> tuple[View, View]:
        """The `count` largest values along the last dimension and their indices, in falling order."""
        view, values = self._view(node.args[0]), node.meta["val"][0]
        dim = _own_dim(node.args[0].meta["val"], along)  # type: ignore[union-attr]
        if dim != len(view.shape) - 1:
            raise CannotBeLowered(f"{node} is not along the last dimension")
        shape = (*view.shape[:-1], count)
        block, both = self._opened([view], torch.float32, (2, *shape))
        first = View(both.source, (0, 0), values.dtype, shape, strides_of(shape))
        place = View(both.source, (0, 0), torch.int64, shape, strides_of(shape), math.prod(shape))
        inside = self._in_block(view, block)
        block.calls.append(Call("topk", torch.float32, first, [inside], view.shape, count))
        return first, place

    def _gather(self, node: Node) -> View:
        view, places = self._view(node.args[0]), self._view(node.args[2])
        last = len(places.shape) - 1
        dim = int(node.args[1]) % (last + 1)  # type: ignore[arg-type]
        if view.source is not None:  # from a weight tokens may choose numbers, or rows
            _own_dim(node.meta["val"], dim)
        view, places = transposed(view, dim, last), transposed(places, dim, last)
        if view.shape[:-1] != places.shape[:-1]:
            raise CannotBeLowered(f"{node} gathers from rows of another number")
        return transposed(self._gathered(view, places, view.dtype), dim, last)

    def _gathered(self, view: View, places: View, dtype: torch.dtype) -> View:
        block, out = self._opened([view, places], dtype, places.shape)
        inside = [self._in_block(one, block) for one in (view, places)]
        block.calls.append(Call("gather", dtype, out, inside, places.shape))
        return out

    def _layer_norm(self, node: Node) -> View:
        x, shape = self._view(node.args[0]), node.args[1]
        given: list[Any] = [*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :]]
        weight, bias, epsilon = given
        if len(shape) != 1:  # type: ignore[arg-type]
            raise CannotBeLowered(f"{node} is over several dimensions")
        last, f32 = len(x.shape) - 1, torch.float32
        centered = self._compute("sub", [x, self._reduce("mean", x, last, f32)], f32, x.shape)
        square = self._compute("mul", [centered, centered], f32, x.shape)
        return self._scaled(node, centered, self._reduce("mean", square, last, f32), (weight, bias, epsilon))

    def _rms_norm(self, node: Node) -> View:
        x = self._view(node.args[0])
        weight, epsilon = (*node.args[2:], None, None)[:2]
        if len(node.args[1]) != 1:  # type: ignore[arg-type]
            raise CannotBeLowered(f"{node} is over several dimensions")
        if epsilon is None:
            epsilon = torch.finfo(x.dtype).eps
        square = self._compute("mul", [x, x], torch.float32, x.shape)
        mean = self._reduce("mean", square, len(x.shape) - 1, torch.float32)
        return self._scaled(node, x, mean, (weight, None, epsilon))

    def _scaled(self, node: Node, x: View, mean_square: View, rest: tuple[Any, Any, Any]) -> View:
        weight, bias, epsilon = rest
        f32, dtype = torch.float32, node.meta["val"].dtype
        shifted = self._compute("add", [mean_square, self._view(float(epsilon))], f32, mean_square.shape)
        factor = self._compute("rsqrt", [shifted], f32, shifted.shape)
        made = self._compute("mul", [x, factor], f32 if weight is not None or bias is not None else dtype, x.shape)
        if weight is not None:
            made = self._compute("mul", [made, self._view(weight)], f32 if bias is not None else dtype, x.shape)
        return made if bias is None else self._compute("add", [made, self._view(bias)], dtype, x.shape)

    def _embedding(self, node: Node) -> View:
        return self._rows_of_table(node, node.args[0], self._view(node.args[1]))

    def _rows_of_table(self, node: Node, table: Any, ids: View) -> View:
        if not ids.is_dense():
            raise CannotBeLowered(f"{node} takes rows in another order")
        dtype, shape = _form(node)
        block, out = self._opened([ids], dtype, shape)
        number, width = self._weight_number(table), shape[-1]
        rows = replace(out, shape=(math.prod(ids.shape), width), strides=(width, 1))
        places = replace(self._in_block(ids, block), shape=rows.shape[:1], strides=(1,))
        for i in range(rows.shape[0]):
            one, place = self._part(rows, 0, range(i, i + 1)), self._part(places, 0, range(i, i + 1))
            block.calls.append(Call("embed", dtype, one, [place], one.shape, number))
        return out

    def _picked(self, node: Node) -> View:
        """Pick the tokens whose logits are wanted; or, from a weight, the rows or numbers that tokens name."""
        indices = node.args[1]
        assert isinstance(indices, list | tuple)
        view = self._view(node.args[0])
        if view.source is None and len(indices) == len(view.shape) == 1:
            places = self._view(indices[0])
            return self._gathered(expanded(view, (*places.shape[:-1], *view.shape)), places, view.dtype)
        if view.source is None and len(indices) == 1 and len(view.shape) == 2:
            return self._rows_of_table(node, node.args[0], self._view(indices[0]))
        _, space = _of_token(node.meta["val"])
        picked = [one for one in indices if one is not None]
        if view.source is None and view.strides[len(indices) - 1] == 0:
            return view  # the same for each token
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        if len(picked) != 1 or len(indices) - 1 not in open_dims(value) or view.source is None:
            raise CannotBeLowered(f"{node} is indexed in another way")
        view = self._contiguous(view)
        assert view.source is not None
        self._know(view.source.space)
        block = self._block(view.time, space)
        number = self._input_number(picked[0])
        if block.picked_by not in (-1, number):
            raise CannotBeLowered("tokens are picked by several tensors")
        block.picked_by = number
        if view.source not in block.picked:
            out = self._new(block, view.time, view.dtype, view.shape)
            assert out.source is not None
            array = self._array(view.source)
            block.calls.append(Call("pick", view.dtype, out, [], (1, 1, view.source.count), array))
            block.picked[view.source] = out.source
        return moved(view, block.picked[view.source])

    # --- views ---

    def _reshaped(self, node: Node) -> View:
        view = self._view(node.args[0])
        before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        if not ((_rows_come_first(before) and _rows_come_first(after)) or _keeps_rows(before, after)):
            raise CannotBeLowered(f"{node} mixes tokens with other dimensions")
        shape, _ = _of_token(after)
        if not view.is_dense():
            view = self._contiguous(view)
        return replace(view, shape=shape, strides=strides_of(shape))

    def _swapped(self, node: Node) -> View:
        return transposed(self._view(node.args[0]), node.args[1], node.args[2])  # type: ignore[arg-type]

    def _permuted(self, node: Node) -> View:
        view, dims = self._view(node.args[0]), list[int](node.args[1])  # type: ignore[arg-type]
        shape, strides = (tuple(one[dim] for dim in dims) for one in (view.shape, view.strides))
        return replace(view, shape=shape, strides=strides)

    def _unsqueezed(self, node: Node) -> View:
        view = self._view(node.args[0])
        return widened(view, int(node.args[1]) % (len(view.shape) + 1))  # type: ignore[arg-type]

    def _squeezed(self, node: Node) -> View:
        return without(self._view(node.args[0]), _own_dim(node.args[0].meta["val"], node.args[1]))  # type: ignore[union-attr]

    def _sliced(self, node: Node) -> View:
        view, value = self._place(node.args[0]), node.args[0].meta["val"]  # type: ignore[union-attr]
        given: Any = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        dim, begin, end, step = given
        if begin in (None, 0) and (end is None or end == 9223372036854775807) and step == 1:
            return view
        if node.meta["val"].shape == value.shape:  # such as the last tokens, as many as there are
            return view
        dim = _own_dim(value, dim)
        if not all(one is None or isinstance(one, int) for one in (begin, end, step)):
            raise CannotBeLowered(f"{node} is of a size that is not known")
        begin, end, step = slice(begin, end, step).indices(view.shape[dim])
        return self._part(view, dim, range(begin, end, step))

    def _part(self, view: View, dim: int, which: range) -> View:
        shape = (*view.shape[:dim], len(which), *view.shape[dim + 1 :])
        strides = (*view.strides[:dim], view.strides[dim] * which.step, *view.strides[dim + 1 :])
        offset = view.offset + which.start * view.strides[dim]
        return replace(view, shape=shape, strides=strides, offset=offset)

    def _selected(self, node: Node) -> View:
        view = self._place(node.args[0])
        dim, index = _own_dim(node.args[0].meta["val"], node.args[1]), int(node.args[2])  # type: ignore[union-attr, arg-type]
        return without(self._part(view, dim, range(index % view.shape[dim], index % view.shape[dim] + 1)), dim)

    def _split(self, node: Node) -> list[View]:
        view = self._view(node.args[0])
        dim = (*node.args[2:], node.kwargs.get("dim", 0))[0]
        dim = _own_dim(node.args[0].meta["val"], dim)  # type: ignore[union-attr]
        ends = list(itertools.accumulate(int(one.shape[dim]) for one in node.meta["val"]))
        return [self._part(view, dim, range(begin, end)) for begin, end in itertools.pairwise([0, *ends])]

    def _expand(self, node: Node) -> View:
        return expanded(self._view(node.args[0]), _of_token(node.meta["val"])[0])

    def _repeated(self, node: Node) -> View:
        view, times = self._view(node.args[0]), int(node.args[1])  # type: ignore[arg-type]
        dim = _own_dim(node.meta["val"], (*node.args[2:], node.kwargs.get("dim"))[0])
        return self._copies(view, dim + 1, times, _form(node))

    def _copies(self, view: View, dim: int, times: int, form: tuple[torch.dtype, tuple[int, ...]]) -> View:
        """A new tensor with the view's numbers, in which the dimensions from `dim` on are repeated `times` times."""
        dtype, shape = form
        wide = (*view.shape[:dim], times, *view.shape[dim:])
        repeated = replace(view, shape=wide, strides=(*view.strides[:dim], 0, *view.strides[dim:]))
        copy = self._compute("copy", [repeated], dtype, wide)
        return View(copy.source, copy.constant, dtype, shape, strides_of(shape))

    def _tiled(self, node: Node) -> View:
        view, times = self._view(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
        while len(view.shape) < len(times):
            view = widened(view, 0)
        dtype, shape = _form(node)
        own = [dim for dim, count in enumerate(times) if count != 1 and view.shape[dim] != 1]
        if len(own) > 1:
            raise CannotBeLowered(f"{node} repeats several dimensions")
        if own:
            dim = _own_dim(node.meta["val"], own[0])
            tiled_shape = (*view.shape[:dim], shape[dim], *view.shape[dim + 1 :])
            view = self._copies(view, dim, int(times[dim]), (dtype, tiled_shape))
        return expanded(view, shape)

    def _concatenated(self, node: Node) -> View:
        parts = [self._view(one) for one in node.args[0]]  # type: ignore[union-attr]
        dim = _own_dim(node.meta["val"], (*node.args[1:], 0)[0])
        return self._joined(node, parts, dim)

    def _stacked(self, node: Node) -> View:
        parts = [self._view(one) for one in node.args[0]]  # type: ignore[union-attr]
        dim = _own_dim(node.meta["val"], (*node.args[1:], 0)[0])
        return self._joined(node, [widened(one, dim) for one in parts], dim)

    def _joined(self, node: Node, parts: list[View], dim: int) -> View:
        dtype, shape = _form(node)
        block, whole = self._opened(parts, dtype, shape)
        begin = 0
        for one, of in zip(parts, node.args[0], strict=True):  # type: ignore[arg-type]
            end = begin + one.shape[dim]
            part = self._part(whole, dim, range(begin, end))
            made_by = self._made_for(of, one) if list(node.args[0]).count(of) == 1 else None  # type: ignore[arg-type]
            is_here = one.source is not None and self.homes.get(one.source) is block
            if made_by is not None and is_here and made_by.sizes == part.shape and one.dtype == dtype:
                made_by.out = part
            else:
                self._compute("copy", [one], dtype, one.shape, into=part)
            begin = end
        return whole

    # --- kernels ---

    def _kernel(self, node: Node, read: Seq[View], others: Seq[int], settings: list[int]) -> View:
        """Add the kernel that a node calls. Its inputs are the arrays of the views `read`, and `others` by number."""
        name = name_of(node.target)
        views = list(read) if name == "paged_attention" else [self._contiguous(one) for one in read]
        time = max(one.time for one in views)
        inputs = [self._array(one.source, self._rows_of(name, i, one)) for i, one in enumerate(views) if one.source]
        output = self._new_array()
        inputs += others
        code = [KERNELS.index(name), output, len(inputs), *inputs, len(settings), *settings]
        self.kernels.setdefault(time, []).append(code)
        shape, space = _of_token(node.meta["val"])
        source = Source(space, node.meta["val"].dtype, math.prod(shape), time + 1, output)
        return View(source, (0, 0), source.dtype, shape, strides_of(shape))

    def _rows_of(self, name: str, number: int, view: View) -> Shape:
        """Shape of the array of a kernel's input; [-3, 64] for three rows of 64 numbers for each token."""
        count = math.prod(view.shape)
        if name == "paged_attention":
            return (-1, count)
        if name in ("own_embeddings", "quantized_rows") or (name == "experts_linear" and number == 1):
            return (-count,)
        return (-(count // view.shape[-1]), view.shape[-1])

    def _linear(self, node: Node) -> View:
        x, packed, bias, *settings = node.args
        weights = [self._weight_number(packed), self._weight_number(bias)]
        return self._kernel(node, [self._view(x)], [], [*weights, *map(int, settings)])  # type: ignore[arg-type]

    def _experts_linear(self, node: Node) -> View:
        x, packed, chosen, *settings = node.args
        places = self._view(chosen)
        if places.dtype == torch.int64 and places.source is not None and places.source.dtype != torch.int64:
            places = self._compute("copy", [places], torch.int64, places.shape)
        return self._kernel(node, [self._view(x), places], [], [self._weight_number(packed), *map(int, settings)])  # type: ignore[arg-type]

    def _paged_attention(self, node: Node) -> View:
        query, key, value, *others = node.args
        tensors, (scale, window, arithmetic) = others[:5], others[5:]
        scales, *of_heads = (node.kwargs.get(name) for name in ("scales", "sinks", "slopes"))
        sinks, slopes = (self._weight_number(one) for one in of_heads)
        softcap, attention_chunk = node.kwargs.get("softcap", 0.0), node.kwargs.get("attention_chunk", 0)
        views = [self._view(one) for one in (query, key, value)]
        if any(math.prod(one.shape[:1]) != 1 or len(one.shape) != 4 or one.shape[2] != 1 for one in views):
            raise CannotBeLowered("attention takes heads in another order")
        heads = [self._in_memory(transposed(one, 1, 2)) for one in views]
        (_, number), (_, cap) = (self._number(float(one), torch.float32).constant for one in (scale, softcap))  # type: ignore[arg-type]
        read = [self._input_number(one) for one in (*tensors, scales) if one is not None]
        settings = [number, int(window), int(arithmetic), sinks, cap, int(attention_chunk), slopes]  # type: ignore[arg-type]
        for one in heads:
            assert one.source is not None
            settings += [one.shape[2], one.shape[3], one.offset, one.source.count]
        return self._kernel(node, heads, read, settings)

    def _in_memory(self, view: View) -> View:
        """The view if its numbers lie side by side in an array, perhaps beside others; otherwise a copy of it."""
        source = view.source
        is_there = source is not None and source.array is not None and source.dtype == view.dtype and view.is_dense()
        return view if is_there else self._contiguous(view)

    def _short_conv(self, node: Node) -> View:
        inputs, weight, bias, *others = node.args
        weights = [self._weight_number(weight), self._weight_number(bias)]
        read = [self._input_number(one) for one in others]
        return self._kernel(node, [self._view(inputs)], read, weights)

    def _linear_attention(self, node: Node) -> View:
        *own, chunk_size, scale, normalizes = node.args
        _, number = self._number(float(scale), torch.float32).constant  # type: ignore[arg-type]
        read = [self._view(one) for one in own[:5] if one is not None]
        others = [self._input_number(one) for one in own[5:]]
        return self._kernel(node, read, others, [number, int(chunk_size), int(bool(normalizes))])  # type: ignore[arg-type]

    def _selective_scan(self, node: Node) -> View:
        *own, chunk_size = node.args
        read, others = [self._view(one) for one in own[:4]], [self._input_number(one) for one in own[5:]]
        return self._kernel(node, read, others, [self._weight_number(own[4]), int(chunk_size)])  # type: ignore[arg-type]

    def _collective(self, node: Node) -> View:
        """The sum of all ranks' numbers, all ranks' columns side by side, or this rank's share of the columns."""
        x, *settings = node.args
        return self._kernel(node, [self._view(x)], [], [*map(int, settings)])  # type: ignore[arg-type]

    def _own_embeddings(self, node: Node) -> View:
        ids, table = node.args
        return self._kernel(node, [self._view(ids)], [], [self._weight_number(table)])

    def _quantized_rows(self, node: Node) -> View:
        ids, packed, num_rows, num_inputs, dtype = node.args
        settings = [self._weight_number(packed), int(num_rows), int(num_inputs), DTYPES[dtype]]  # type: ignore[arg-type, index]
        return self._kernel(node, [self._view(ids)], [], settings)

    # --- code ---

    def _output(self, node: Any) -> int:
        view = self._view(node)
        value = node.meta["val"]
        if view.source is None:
            raise CannotBeLowered("an output is a weight")
        if not _rows_come_first(value):
            raise CannotBeLowered("an output's tokens are not its rows")
        dims = open_dims(value)
        if len(dims) != 1:
            raise CannotBeLowered("an output has its tokens in several dimensions")
        own, _ = _of_token(value)
        wanted = tuple(-n if dim in dims else n for dim, n in enumerate(own))
        source = self._contiguous(view).source
        assert source is not None
        home = self.homes.get(source)
        if home is not None and source.array is None:
            return self._array(source, wanted)
        if home is not None and source.array is not None and home.made[source.array][1] == wanted:
            return source.array
        if len(value.shape) == 2 and home is None and source.array is not None and source.time > 0:
            return source.array  # a kernel's rows are as they should be
        copy = self._compute("copy", [view], view.dtype, view.shape)
        assert copy.source is not None
        return self._array(copy.source, wanted)

    def _code(self, outputs: list[int]) -> list[int]:
        stages: list[list[int]] = []
        for time in range(max([*self.kernels, *(when for when, _ in self.blocks), 0]) + 1):
            for space in self.spaces:
                if (time, space) in self.blocks:
                    stages.append(self._code_of_block(self.blocks[time, space]))
            stages += self.kernels.get(time, [])
        code = [len(self.input_numbers), self.num_arrays, len(stages)]
        return [*code, *itertools.chain.from_iterable(stages), len(outputs), *outputs]

    def _code_of_block(self, block: _Block) -> list[int]:
        if block.picked_by >= 0:
            rows_of, width = block.picked_by, 1
        else:
            rows_of, width = self._counted_by(block)
        calls, rows = grouped(block.calls) if self.groups else (block.calls, {})
        code_of_all, num_floats = code_of_calls(calls, rows)
        cost = sum(cost_of(call) for call in calls)
        code = [KERNELS.index("vectors"), rows_of, width, block.picked_by, num_floats, cost, len(block.made)]
        for array, (dtype, shape) in block.made.items():
            code += [array, DTYPES[dtype], len(shape), *shape]
        return [*code, len(calls), *code_of_all]

    def _counted_by(self, block: _Block) -> tuple[int, int]:
        """Number of an array that has a row for each of the block's tokens, and the size of a row."""
        for source in block.loaded:
            assert source.array is not None
            return source.array, source.count
        raise CannotBeLowered("a block reads nothing")


def _in_arrays(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arrays store a tensor's numbers; booleans are stored as 0 and 1."""
    return torch.float32 if dtype == torch.bool else dtype


def _form(node: Node) -> tuple[torch.dtype, Shape]:
    value = node.meta["val"]
    return value.dtype, _of_token(value)[0]


def _of_token(value: Tensor) -> tuple[Shape, str]:
    """The shape of one token's part of a tensor, and the open sizes that count its rows, such as `s0*s1`."""
    dims = open_dims(value)
    if not dims:
        return tuple(int(size) for size in value.shape), ""
    factor, symbols = split_open([value.shape[dim] for dim in dims])
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise CannotBeLowered(f"{tuple(value.shape)} has tokens in dimensions that are apart")
    shape = [1 if dim in dims else int(size) for dim, size in enumerate(value.shape)]
    shape[dims[-1]] = factor
    return tuple(shape), symbols


def _rows_come_first(value: Tensor) -> bool:
    """True if the numbers of one token lie side by side in memory."""
    first = next(iter(open_dims(value)), 0)
    return all(size == 1 for size in value.shape[:first])


def _keeps_rows(before: Tensor, after: Tensor) -> bool:
    """True if a reshape keeps the tokens' dimensions and the rows before: `[2, 2, tokens, 8]` to `[4, tokens, 8]`."""

    def rows_of(value: Tensor) -> tuple[int, list[int]]:
        dims = open_dims(value)
        return math.prod(value.shape[: dims[0]]), [value.shape[dim] for dim in dims]

    return rows_of(before) == rows_of(after)


def _own_dim(value: Tensor, dim: Any) -> int:
    """Index of a dimension that is not a token's; CannotBeLowered for the tokens' dimension."""
    number = int(dim) % len(value.shape)
    if number in open_dims(value):
        raise CannotBeLowered("an operation is along the tokens")
    return number


_Method = Callable[[_Lowering, Node], Any]


def _named(method: Callable[[_Lowering, Any, Node], Any], name: Any) -> _Method:
    return lambda lowering, node: method(lowering, name, node)


def _in_place(method: _Method) -> _Method:
    """The method of an operation that writes its result into its first input."""
    return lambda lowering, node: lowering._overwrite(node, method(lowering, node))


_OF_TORCH: tuple[tuple[_Method, str], ...] = (
    *((_named(_Lowering._unary, name), name) for name in ("neg", "abs", "sqrt", "rsqrt", "exp", "log", "floor")),
    *((_named(_Lowering._unary, name), name) for name in ("sin", "cos", "tanh", "sigmoid", "silu", "relu")),
    *((_named(_Lowering._binary, name), f"{name}.Tensor") for name in ("add", "sub", "mul", "div")),
    *((_in_place(_named(_Lowering._binary, name)), f"{name}_.Tensor") for name in ("add", "sub", "mul", "div")),
    (_named(_Lowering._binary, "mul"), "multiply.Tensor logical_and"),
    (_named(_Lowering._binary, "maximum"), "maximum max.other clamp_min"),
    (_named(_Lowering._binary, "minimum"), "minimum min.other clamp_max"),
    (_named(_Lowering._binary, "greater"), "gt.Scalar gt.Tensor"),
    (_Lowering._less, "lt.Scalar lt.Tensor"),
    (lambda lowering, node: lowering._not(lowering._less(node)), "ge.Scalar ge.Tensor"),
    (lambda lowering, node: lowering._not(lowering._binary("greater", node)), "le.Scalar le.Tensor"),
    (_Lowering._inverted, "bitwise_not logical_not"),
    (_Lowering._where, "where.self where.ScalarOther where.ScalarSelf"),
    (_Lowering._selected_by, "masked_fill.Scalar"),
    (_Lowering._clamp, "clamp clamp.Tensor"),
    (_in_place(_Lowering._clamp), "clamp_"),
    (lambda lowering, node: lowering._bounded(node, (*node.args[1:], -1.0, 1.0)[:2]), "hardtanh"),
    (lambda lowering, node: lowering._bounded(node, (0.0, 6.0)), "relu6"),
    (_Lowering._power, "pow.Tensor_Scalar"),
    (_Lowering._square, "square"),
    (_Lowering._log1p, "log1p"),
    (_Lowering._expm1, "expm1"),
    (_Lowering._gelu, "gelu"),
    (_Lowering._mish, "mish"),
    (_Lowering._leaky, "leaky_relu"),
    (_Lowering._softplus, "softplus"),
    (_named(_Lowering._reduced, "mean"), "mean.dim"),
    (_named(_Lowering._reduced, "sum"), "sum.dim_IntList"),
    (_Lowering._vector_norm, "linalg_vector_norm"),
    (_Lowering._softmax, "softmax.int"),
    (_Lowering._topk, "topk"),
    (_Lowering._largest_one, "max.dim"),
    (_Lowering._gather, "gather"),
    (_Lowering._scattered, "scatter.value"),
    (_in_place(_Lowering._scattered), "scatter_.value"),
    (_Lowering._small_product, "matmul"),
    (_Lowering._layer_norm, "layer_norm"),
    (_Lowering._rms_norm, "rms_norm"),
    (_Lowering._embedding, "embedding"),
    (_Lowering._picked, "index.Tensor"),
    (_Lowering._kept, "dropout"),
    (_Lowering._alias, "alias detach contiguous clone lift_fresh"),
    (_Lowering._converted, "to.dtype to.dtype_layout to.device to.other type_as _to_copy"),
    (_named(_Lowering._filled, 1), "ones ones_like"),
    (_named(_Lowering._filled, 0), "zeros"),
    (_named(_Lowering._filled, None), "full full_like"),
    (_Lowering._zeros, "zeros_like"),
    (_Lowering._empty, "new_empty"),
    (_Lowering._written, "copy_ fill_.Scalar fill_.Tensor"),
    (_Lowering._reshaped, "reshape view flatten.using_ints _unsafe_view unflatten.int view_as"),
    (_Lowering._swapped, "transpose.int"),
    (_Lowering._permuted, "permute"),
    (_Lowering._unsqueezed, "unsqueeze"),
    (_Lowering._squeezed, "squeeze.dim"),
    (_Lowering._sliced, "slice.Tensor"),
    (_Lowering._selected, "select.int"),
    (_Lowering._split, "split_with_sizes split.Tensor chunk"),
    (_Lowering._expand, "expand expand_as"),
    (_Lowering._repeated, "repeat_interleave.self_int"),
    (_Lowering._tiled, "repeat"),
    (_Lowering._concatenated, "cat concat concatenate"),
    (_Lowering._stacked, "stack"),
)
"""Method for operations of torch, by their names in ATen; a name without an overload stands for `default`."""
_OURS: tuple[tuple[_Method, str], ...] = (
    (_Lowering._linear, "linear quantized_linear"),
    (_Lowering._experts_linear, "experts_linear"),
    (_Lowering._paged_attention, "paged_attention"),
    (_Lowering._collective, "all_reduce gather_columns own_columns"),
    (_Lowering._own_embeddings, "own_embeddings"),
    (_Lowering._quantized_rows, "quantized_rows"),
    (_Lowering._short_conv, "short_conv"),
    (_Lowering._linear_attention, "linear_attention"),
    (_Lowering._selective_scan, "selective_scan"),
)
"""Method for our own operations."""
_METHODS = {
    f"{library}.{name}" if "." in name else f"{library}.{name}.default": method
    for library, table in (("aten", _OF_TORCH), ("specdec", _OURS))
    for method, names in table
    for name in names.split()
}
