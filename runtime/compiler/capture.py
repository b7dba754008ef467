"""A module's operations as a graph in which some sizes stay open.

An open size, such as the number of tokens, is a large prime number while the module is called. Its inputs have shapes
and dtypes but no numbers. A number that was computed from an open size is recognised by its prime factors. A second
trace, with small primes instead, must give the same graph: that shows that nothing else depends on the size.
(`torch.export` traces with symbols, and asks sympy about each size of each tensor, which takes seconds.)
"""

import inspect
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.checkpoint.config import Shapes
from runtime.core.batch import Row, pack
from runtime.core.kv_cache import KVPool
from runtime.core.states import state_inputs, state_pools

if TYPE_CHECKING:
    from runtime.model.model import Step
    from runtime.model.quantized import QuantizedLinear

_PRIMES = (
    *(100003, 100019, 100043, 100049, 100057, 100069, 100103, 100109, 100129, 100151, 100153, 100169, 100183, 100189),
    *(100193, 100207, 100213, 100237, 100267, 100271, 100279, 100291, 100297, 100313),
)
_SMALL = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101)
"""Open sizes in the second trace, which must give the same graph apart from them."""

Inputs = tuple[Tensor | list[Tensor], ...]
Sizes = tuple[dict[int, str] | list[dict[int, str]], ...]
"""Names of the open sizes of each input, by dimension. Sizes with the same name are equal."""


_CONSTANT = "constant_"


@dataclass(frozen=True)
class NoTokenProgram:
    """Answer in place of a token program, for a module that cannot become one."""

    reason: str
    """Operations that token programs lack, or what the trace needs and does not have."""


class CannotBeTraced(Exception):
    """The module cannot be traced: its operations depend on numbers that a trace does not have."""


@dataclass(frozen=True)
class StepForm:
    """All that a step's graph depends on."""

    step: "Step"
    shapes: Shapes
    block_size: int
    kv_dtype: torch.dtype
    tied: "QuantizedLinear | None" = None
    """The output layer, if embeddings are looked up in its packed weight; None if they are stored by themselves."""

    def graph(self, stand_ins: list[int] | None = None) -> GraphModule:
        """The step's graph, for any number of rows, tokens, blocks, slots and logits.

        `stand_ins` has the number of a pool for each layer with keys and values: with [0, 0, 1] the graph has two pools
        of K/V, and the first two layers both use pool 0.
        """
        self.step.stand_ins = stand_ins
        try:
            return by_trace(self.step, *self.inputs(stand_ins))
        finally:
            self.step.stand_ins = None

    def inputs(self, stand_ins: list[int] | None = None) -> tuple[Inputs, Sizes]:
        num_tokens = 2 * self.block_size + 1 + 5
        parameter = next(self.step.parameters())
        pool = example_pool(self.shapes, num_tokens, self.block_size, self.kv_dtype, parameter.device)
        rows = example_rows([5, 3], 2 * self.block_size + 1, num_tokens, self.block_size, 2)
        batch = pack(rows, self.block_size, parameter.device)
        # Memory of their own: to trace views of other memory takes long.
        pools = [[torch.empty_like(one) for one in part] for part in pool.tensors]
        if stand_ins is not None:
            few, num_layers = [stand_ins.index(i) for i in sorted(set(stand_ins))], len(stand_ins)
            pools = [[part[start + i] for start in range(0, len(part), num_layers) for i in few] for part in pools]
        of_tokens, of_tables = {0: "rows", 1: "tokens"}, {0: "rows", 1: "blocks of a row"}
        of_pools = [[{0: "num_blocks"}] * len(part) for part in pools]  # all layers have the same number of blocks
        sizes: list[Any] = [of_tokens, of_tokens, of_tokens, of_tables, {0: "logits"}, *of_pools]
        if states := self.shapes.states:  # slots of one kind of layer are of one length
            kinds = [(one, f"length_{one.num_before}", f"numbers_{i}") for i, one in enumerate(states)]
            numbers = {one.recurrent: name for one, _, name in kinds if one.recurrent}
            inputs_of = [{0: "num_slots", 1: length} for one, length, _ in kinds if one.width]
            recurrent = [{0: "num_slots", 2: numbers[one.recurrent]} for one, *_ in kinds if one.recurrent]
            sizes += [{0: "rows"}, inputs_of + recurrent]
        return (*batch, *pools, *example_states(self.shapes, rows, parameter.dtype)), tuple(sizes)


def example_pool(shapes: Shapes, num_tokens: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """A K/V pool with just enough slots for two rows of `num_tokens` tokens."""
    num_blocks = 2 * math.ceil(num_tokens / block_size) + 1
    return KVPool(shapes.layers, num_blocks, block_size, dtype, device)


def example_states(shapes: Shapes, rows: Seq[Row], dtype: torch.dtype) -> tuple[()] | tuple[Tensor, list[Tensor]]:
    """Further inputs of a step whose layers have recurrent states: a few slots, and the slot of each row."""
    return state_inputs(rows, state_pools(shapes.states, 3, 4, dtype, torch.device("cpu")))


def example_rows(row_lengths: list[int], start: int, num_tokens: int, block_size: int, num_logits: int) -> list[Row]:
    """Rows at position `start` of sequences that own `num_tokens` slots each."""
    num_blocks = math.ceil(num_tokens / block_size)
    return [
        Row([1] * length, start, list(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)), num_logits)
        for i, length in enumerate(row_lengths)
    ]


# --- open sizes ---


def open_dims(value: Tensor) -> list[int]:
    """Dimensions of a graph's tensor whose sizes the batch determines, such as the number of tokens."""
    return [dim for dim, size in enumerate(value.shape) if is_multiple(size)]


def is_multiple(size: int) -> bool:
    """True for a number that was computed from an open size."""
    return size >= _PRIMES[0] and any(size % prime == 0 for prime in _PRIMES)


def split_open(sizes: list[int]) -> tuple[int, str]:
    """The product of open sizes as a factor, and a text for the rest: 3 and `s0*s1` for `3 * rows * tokens`."""
    factor, numbers = _factors(math.prod(sizes))
    return factor, "*".join(f"s{number}" for number in numbers)


def _factors(size: int) -> tuple[int, list[int]]:
    """The rest of a number after dividing by the primes, and the primes' indices, with repetition."""
    numbers = []
    for number, prime in enumerate(_PRIMES):
        while size and size % prime == 0:
            size //= prime
            numbers.append(number)
    return size, numbers


def _smaller(size: int) -> int:
    """The size that takes this size's place in the second trace. Negative sizes count from the end."""
    if size < 0:
        return -_smaller(-size)
    factor, numbers = _factors(size) if is_multiple(size) else (size, [])
    return factor * math.prod(_SMALL[number] for number in numbers)


def with_open_sizes(inputs: Inputs, sizes: Sizes) -> Inputs:
    """Tensors without numbers that have the inputs' shapes and dtypes, with a prime number in place of each open size.
    Raises CannotBeTraced if there are more open sizes than primes.
    """
    tensors, structure = pytree.tree_flatten(inputs)
    of_each: list[dict[int, str]] = pytree.tree_leaves(sizes, is_leaf=lambda one: isinstance(one, dict))
    names = list(dict.fromkeys(name for one in of_each for name in one.values()))
    if len(names) > len(_PRIMES):
        raise CannotBeTraced(f"{len(names)} sizes are open")
    primes = dict(zip(names, _PRIMES, strict=False))

    def shape_of(tensor: Tensor, own: dict[int, str]) -> list[int]:
        return [primes[own[dim]] if dim in own else size for dim, size in enumerate(tensor.shape)]

    with _WithoutNumbers():
        made = [torch.empty(shape_of(one, own), dtype=one.dtype) for one, own in zip(tensors, of_each, strict=True)]
    return pytree.tree_unflatten(made, structure)  # type: ignore[no-any-return]


def by_trace(module: nn.Module, inputs: Inputs, sizes: Sizes | None = None) -> GraphModule:
    """The module's graph, for inputs with open sizes or inputs of another graph. Raises CannotBeTraced."""
    given = inputs if sizes is None else with_open_sizes(inputs, sizes)
    with _WithoutNumbers():
        small = [torch.empty([*map(_smaller, one.shape)], dtype=one.dtype) for one in pytree.tree_leaves(given)]
    other = trace(module, pytree.tree_unflatten(small, pytree.tree_structure(given)))
    graph = trace(module, given)  # traced last: tensors that the module kept belong to it
    _check_same(graph, other)
    return graph


def _check_same(graph: GraphModule, other: GraphModule) -> None:
    """Raise CannotBeTraced if the graphs differ: then an operation depends on more than multiples of a size."""
    nodes, others = list(graph.graph.nodes), list(other.graph.nodes)
    numbers = {node: number for one in (nodes, others) for number, node in enumerate(one)}

    def form_of(value: Any, smaller: Callable[[int], int]) -> Any:
        if isinstance(value, Node):
            return numbers[value]
        if isinstance(value, Tensor):
            return value.dtype, [smaller(size) for size in value.shape]
        return smaller(value) if type(value) is int else value

    def forms(node: Node, smaller: Callable[[int], int]) -> list[Any]:
        all_of_it = node.op, str(node.target), node.args, node.kwargs, node.meta.get("val")
        return [form_of(one, smaller) for one in pytree.tree_leaves(all_of_it)]

    for one, two in zip_longest(nodes, others):
        if one is None or two is None or forms(one, _smaller) != forms(two, int):
            raise CannotBeTraced(f"`{one}` depends on a size")
    for name in (str(node.target) for node in nodes if node.op == "get_attr"):
        if name.startswith(_CONSTANT) and not torch.equal(getattr(graph, name), getattr(other, name)):
            raise CannotBeTraced(f"`{name}` depends on a size")


def trace(module: nn.Module, inputs: Inputs) -> GraphModule:
    """The graph of the module, called with tensors of one `_WithoutNumbers` mode. Raises CannotBeTraced."""
    mode = next(one.fake_mode for one in pytree.tree_leaves(inputs) if isinstance(one, FakeTensor))
    assert isinstance(mode, _WithoutNumbers)
    recorder = mode.recorder = _Recorder(mode)
    for name, value in inspect.signature(module.forward).bind(*inputs).arguments.items():
        recorder.take(name, value)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        recorder.take_weight(name, value)
    try:
        with _as_before(module), torch.no_grad(), mode, enable_python_dispatcher(), recorder:
            output = module(*inputs)
    finally:
        mode.recorder = None
    return recorder.graph_module(output)


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes after the block: a trace may leave tensors without numbers in them."""
    kept = [(one, dict(vars(one)), dict(one._buffers)) for one in module.modules()]
    try:
        yield
    finally:
        for one, attributes, buffers in kept:
            vars(one).clear()
            vars(one).update(attributes)
            one._buffers.clear()
            one._buffers.update(buffers)


class _WithoutNumbers(FakeTensorMode):
    """A mode in which operations compute shapes and dtypes alone."""

    recorder: "_Recorder | None" = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output: Any = super().dispatch(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.detach.default and self.recorder is not None:
            self.recorder.know_copy(output, args[0])  # torch.zeros and the like detach their result
        return output


class _Recorder(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations before torch decomposes them: only this class of modes is called then."""

    def __init__(self, mode: _WithoutNumbers) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._mode_key, self.pre_dispatch, self.enter_stack = torch._C._TorchDispatchModeKey.PROXY, True, []
        self._graph, self._fake = Graph(), mode
        self._nodes: dict[int, Node] = {}
        self._known: list[Tensor] = []  # otherwise a new tensor might get a freed one's id
        self._weights: dict[Node, Tensor] = {}
        self.is_paused = False

    def take(self, name: str, value: Tensor | list[Tensor]) -> None:
        """Make the tensor `value`, or each tensor of a list, an input of the graph."""
        if isinstance(value, Tensor):
            self._last_given = self._graph.placeholder(name)
            self._know(value, self._last_given)
        else:
            for i, tensor in enumerate(value):
                self.take(f"{name}_{i}", tensor)

    def take_weight(self, name: str, tensor: Tensor) -> Node:
        with self._graph.inserting_after(self._last_given):  # before operations, some of which are moved there
            node = self._last_given = self._graph.create_node("get_attr", name)
        self._weights[node] = tensor
        self._nodes[id(tensor)] = node
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args, kwargs or {}
        args, kwargs = map_aggregate(given, self._without_numbers)
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise CannotBeTraced(f"{name_of(func)}, which looks at numbers") from None
        if self.is_paused:
            return output
        if not isinstance(func, OpOverload) or (func._schema.is_mutable and output is None):
            raise CannotBeTraced(f"{func} gives no tensor")
        if not isinstance(output, Tensor | list | tuple):
            return output  # a number, such as a size
        node = self._graph.call_function(func, *map_aggregate(given, self._node_of))
        if isinstance(output, Tensor):
            self._know(output, node)
        else:
            node.meta["val"] = output
            for i, one in enumerate(output):
                self._know(one, self._graph.call_function(getitem, (node, i)))
        return output

    def graph_module(self, output: Any) -> GraphModule:
        self._graph.output(map_aggregate(output if isinstance(output, tuple) else (output,), self._node_of))
        self._graph.eliminate_dead_code()  # which may depend on sizes
        weights = {node: self._weights[node] for node in self._graph.nodes if node in self._weights}
        for node, tensor in weights.items():
            node.meta["val"] = self._without_numbers(tensor)
        return GraphModule({str(node.target): tensor for node, tensor in weights.items()}, self._graph)

    def know_copy(self, copy: Any, tensor: Any) -> None:
        if (node := self._nodes.get(id(tensor))) is not None:
            self._nodes[id(copy)] = node
            self._known.append(copy)

    def _know(self, tensor: Tensor, node: Node) -> None:
        if not isinstance(tensor, FakeTensor):
            raise CannotBeTraced(f"{node} is a {type(tensor).__name__}")
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._known.append(tensor)

    def _without_numbers(self, value: Any) -> Any:
        """A weight as a tensor without numbers, always the same tensor; any other value unchanged."""
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_real else value

    def _node_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (node := self._nodes.get(id(value))) is not None:
            return node
        if isinstance(value, FakeTensor):
            raise CannotBeTraced("a tensor is there that no operation gave")
        return self.take_weight(f"{_CONSTANT}{len(self._weights)}", value)


@contextmanager
def unrecorded(tensor: Tensor) -> Iterator[None]:
    """Record no operations within the block; `tensor` is any tensor of the trace."""
    assert isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, _WithoutNumbers)
    recorder = tensor.fake_mode.recorder
    assert recorder is not None
    recorder.is_paused = True
    try:
        yield
    finally:
        recorder.is_paused = False


def memory_of(node: Any) -> int | None:
    """An id of the memory of a node's tensor, equal for tensors that share memory; None for nodes of other values."""
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None


def name_of(target: Any) -> str:
    """An operation's name: `cumsum` for `aten.cumsum.default`, `linear` for `specdec.linear.default`."""
    return str(target).removeprefix("aten.").removeprefix("specdec.").partition(".")[0]


def attribute_of(module: nn.Module) -> Callable[[str], Tensor]:
    def get(name: str) -> Tensor:
        parent, _, own = name.rpartition(".")
        tensor: Tensor = getattr(module.get_submodule(parent), own)
        return tensor

    return get
