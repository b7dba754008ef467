"""A step cut into token programs: its beginning, a program for each kind of layer, and its end.

While the step is traced, its layers are calls of an operation that computes nothing. The last layer is traced as a part
of the end: there only the tokens are computed whose logits are wanted. Layers are of one kind if they have the same
modules, settings and shapes, and are called in the same way. The first and the last layer of a kind are traced by
themselves, and must give the same graph.

Operations that depend on constants alone, such as the packing of weights, are not part of the programs: they are
carried out here, once for each layer.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from runtime.checkpoint.config import Shapes
from runtime.compiler.capture import (
    CannotBeTraced,
    Inputs,
    NoTokenProgram,
    Sizes,
    StepForm,
    attribute_of,
    by_trace,
    is_multiple,
    memory_of,
    unrecorded,
)
from runtime.compiler.linears import look_up_in_output, use_kernels
from runtime.compiler.selection import select_early
from runtime.model.attention import PagedInputs
from runtime.model.weights import Layout, layout_of, num_bytes_of, present

torch.library.define("specdec_cut::layer", "(Tensor hidden, Tensor[] others, int layer) -> Tensor")
torch.library.register_fake("specdec_cut::layer", lambda hidden, others, layer: torch.empty_like(hidden))
_LAYER = torch.ops.specdec_cut.layer.default


class CannotBeCut(Exception):
    """A step cannot be cut into layers and stays one program; the message says why."""


@dataclass(frozen=True)
class ProgramCall:
    """A call of a program in a step. Tensors have numbers, and the step's inputs come first."""

    program: int
    inputs: list[int]
    outputs: list[int]
    layout: Layout
    """Shapes and dtypes of the program's constants, by their names in the program."""
    recipe: "Recipe"
    """Operations that compute the constants."""
    get: Callable[[str], Tensor]
    """Function that finds the model's tensor for an attribute's name."""

    @property
    def sources(self) -> list[Tensor]:
        return [self.get(name) for name in self.recipe.names]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The program's constants by name, computed anew at each call. Their attributes must be present."""
        return self.recipe.weights(self.get)

    def without(self, names: Collection[str]) -> "ProgramCall":
        """The call without the constants of these names, which another call stores."""
        layout = {name: form for name, form in self.layout.items() if name not in names}
        made = {name: number for name, number in self.recipe.made.items() if name not in names}
        return replace(self, layout=layout, recipe=replace(self.recipe, made=made))


class Made(int):
    """The result of an operation, by the operation's number in the recipe."""


def _made_in(arguments: Any) -> list[int]:
    return [one for one in pytree.tree_leaves(arguments) if isinstance(one, Made)]


@dataclass(frozen=True)
class Recipe:
    """Constants of a program: the operations that make them from the model's attributes, in order."""

    operations: list[tuple[Any, Any, Any]]
    """Each operation with its positional and named arguments; for an attribute, None and the attribute's name."""
    made: dict[str, int]
    """Number of the operation that makes each constant."""

    @property
    def names(self) -> list[str]:
        """Names of the attributes from which the constants are made."""
        return [self.operations[i][1] for i in self._needed if self.operations[i][0] is None]

    @property
    def _needed(self) -> list[int]:
        """Numbers of the operations that the constants need, in order."""
        needed, waiting = set[int](), list(self.made.values())
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting += map(int, _made_in(self.operations[number][1:]))
        return sorted(needed)

    def origin(self, name: str, get: Callable[[str], Tensor]) -> tuple[int, ...] | None:
        """Identities of the attributes that a weight is packed from; None for other weights."""
        operation, args, _ = self.operations[self.made[name]]
        of = [self.operations[one] for one in args if isinstance(one, Made)]
        if operation is not torch.ops.specdec.pack_quantized.default or any(one is not None for one, *_ in of):
            return None
        return tuple(id(get(attribute)) for _, attribute, _ in of)

    def weights(self, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The constants, one after the other, computed from the attributes that `get` finds, which must be in memory.

        The result of an operation is freed as soon as no later operation needs it.
        """
        names: dict[int, list[str]] = {}
        for name, i in self.made.items():
            names.setdefault(i, []).append(name)
        needed = [(i, *self.operations[i]) for i in self._needed]
        read_last = {one: i for i, _, *given in needed for one in _made_in(given)}
        known: dict[int, Any] = {}
        for i, operation, args, kwargs in needed:
            if operation is None:
                known[i] = get(args)
            else:
                given = torch.fx.node.map_aggregate(
                    (args, kwargs), lambda one: known[one] if isinstance(one, Made) else one
                )
                known[i] = operation(*given[0], **given[1])
                del given
            for name in names.get(i, ()):
                yield name, known[i].detach().contiguous()
            for one in [one for one in known if read_last.get(one, one) <= i]:
                del known[one]


@dataclass(frozen=True)
class CutStep:
    """The programs of a step, and the calls of these programs in the order in which they compute the step. The last
    call returns logits, and hidden states if an engine gives them to a trained drafter.

    Weights of programs have no values.
    """

    programs: list[GraphModule]
    calls: list[ProgramCall]
    why_whole: str | None = None
    """The reason why the step is a single program; None if it is cut into layers."""
    twins: dict[str, str] = field(default_factory=dict)
    """Packed weights that are not stored again: the weight's name, and its name in the earlier call that has it."""

    @property
    def layout(self) -> Layout:
        """Shapes and dtypes of all calls' weights, by name."""
        return {_of_call(i, name): form for i, call in enumerate(self.calls) for name, form in call.layout.items()}

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """The weights, one after the other; each is in memory only until the next is asked for.

        The largest call comes first: while a call's weights are made, the tensors that they are made from and the
        operations' results are in memory too.
        """
        for i, call in sorted(enumerate(self.calls), key=lambda one: -num_bytes_of(one[1].layout)):
            with present(*call.sources):
                for name, weight in call.weights():
                    yield {_of_call(i, name): weight}
                    del weight


def _of_call(number: int, name: str) -> str:
    """Name of a call's weight in the file, such as `0012.weight_3`. Names sort in the order of the calls."""
    return f"{number:04}.{name}"


def cut_step(form: StepForm, arithmetic: int) -> CutStep | NoTokenProgram:
    """The step, with linear layers in `arithmetic`: cut into layers, or as one program; NoTokenProgram if it cannot be
    traced.
    """
    try:
        return _shared(_cut(form, arithmetic))
    except (CannotBeCut, CannotBeTraced) as error:
        why_whole = str(error)
    try:
        graph = form.graph()
    except CannotBeTraced as error:
        return NoTokenProgram(str(error))
    _use_kernels(graph, form, arithmetic)
    return _shared(replace(_in_order(graph, _Programs(), {}), why_whole=why_whole))


def _cut(form: StepForm, arithmetic: int) -> CutStep:
    shapes = form.shapes
    layers = layers_of(form.step.model, shapes)
    graph, calls = _with_layers_as_calls(layers[:-1], form, arithmetic)
    nodes = {node.args[2]: node for node in graph.graph.nodes if node.target is _LAYER}
    kinds: dict[str, list[int]] = {}
    for i, node in nodes.items():
        kept = [replace(one, layer=0) for one in shapes.of(i)]
        kind = f"{_structure(layers[i])} {kept} {calls[i].kind} {[_form(one) for one in _inputs(node)]}"
        kinds.setdefault(kind, []).append(i)
    if len(kinds) > len(nodes) // 2 + 1:
        raise CannotBeCut(f"its {len(layers)} layers are of {len(kinds)} kinds")
    programs, made = _Programs(), {}
    for alike in kinds.values():
        program, *others = (
            _traced_layer(layers[i], nodes[i], calls[i], arithmetic) for i in dict.fromkeys((alike[0], alike[-1]))
        )
        for last in others:
            if describe(program) != describe(last):
                raise CannotBeCut("its layers compute by their number")
        are_read = _without_unread(program)
        folded = _fold(program)
        number = programs.number(folded.graph)
        for i in alike:
            get, read = _in_layer(layers[i], program), list(compress(_inputs(nodes[i]), are_read))
            made[nodes[i]] = _NodeCall(number, folded, get, read, [nodes[i]])
    return _in_order(graph, programs, made)


def _with_layers_as_calls(
    layers: nn.ModuleList, form: StepForm, arithmetic: int
) -> tuple[GraphModule, dict[int, "_LayerCall"]]:
    """The step's graph with these layers as calls, and the calls' arguments.

    Tracing an input for the pool of each layer takes long, so layers of the same shape share an input at first.
    """

    def captured(stand_ins: list[int] | None = None) -> tuple[GraphModule, dict[int, "_LayerCall"]]:
        calls: dict[int, _LayerCall] = {}
        with _layers_as_calls(layers, calls):
            step = form.graph(stand_ins)
        _use_kernels(step, form, arithmetic)
        return step, calls

    stand_ins = _stand_ins(form.shapes)
    if len(set(stand_ins)) < len(stand_ins):
        graph, calls = captured(stand_ins)
        if _have_own_pools(graph.graph, calls, stand_ins):
            return graph, calls
    return captured()


def _use_kernels(step: GraphModule, form: StepForm, arithmetic: int) -> None:
    """Have kernels compute the operations outside the layers: embeddings, norms between layers, the output layer."""
    select_early(step, "logit_indices")
    use_kernels(step, arithmetic)
    if form.tied is not None:
        embeddings: Any = form.step.model.get_input_embeddings()
        look_up_in_output(step, embeddings.weight, form.tied)


def _shared(step: CutStep) -> CutStep:
    """The step with packed weights that several calls read stored once, at the first of these calls."""
    first, twins, calls = dict[tuple[int, ...], str](), dict[str, str](), list[ProgramCall]()
    for i, call in enumerate(step.calls):
        origins = ((name, call.recipe.origin(name, call.get)) for name in call.recipe.made)
        places = {name: first.setdefault(origin, _of_call(i, name)) for name, origin in origins if origin is not None}
        others = {name: place for name, place in places.items() if place != _of_call(i, name)}
        twins |= {_of_call(i, name): place for name, place in others.items()}
        calls.append(call.without(others) if others else call)
    return replace(step, calls=calls, twins=twins)


def whole_step(module: nn.Module, inputs: Inputs, sizes: Sizes, arithmetic: int) -> CutStep | NoTokenProgram:
    """A module's forward as one program, with linear layers in `arithmetic`; NoTokenProgram if it cannot be traced."""
    try:
        graph = by_trace(module, inputs, sizes)
    except CannotBeTraced as error:
        return NoTokenProgram(str(error))
    select_early(graph, "logit_indices")
    use_kernels(graph, arithmetic)
    return _in_order(graph, _Programs(), {})


# --- layers ---


@dataclass(frozen=True)
class _LayerCall:
    """A call of a layer in the model, and its arguments after the first."""

    layer: int
    structure: pytree.TreeSpec
    arguments: list[Any]
    """The arguments, flat, with the class `Tensor` in the place of each tensor."""
    num_of_state: int
    """Number of tensors of the layer's state."""
    num_of_kv: int
    """Number of tensors of the layer's keys and values: block tables, a pool of keys, a pool of values, and with 8 bits
    a pool of scales; 0 for a layer without keys and values.
    """

    @property
    def kind(self) -> str:
        return f"{self.structure} {[self._described(value) for value in self.arguments]}"

    def _described(self, value: Any) -> Any:
        """Description of an argument: `layer` for the layer's own number, which differs within a kind."""
        if isinstance(value, PagedInputs):
            return PagedInputs
        return "layer" if type(value) is int and value == self.layer else value


def layers_of(model: nn.Module, shapes: Shapes) -> nn.ModuleList:
    """The model's `ModuleList` whose entries are its layers. Raises CannotBeCut if there is none."""

    def numbers(layer: nn.Module) -> set[Any]:
        return {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}

    least = max(2, *(1 + one.layer for one in shapes.layers + shapes.states))
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) >= least]
    for layers in lists:
        if all(numbers(layer) == {i} for i, layer in enumerate(layers)):
            return layers
    raise CannotBeCut("it has no list of several layers")


@contextmanager
def _layers_as_calls(layers: Iterable[nn.Module], calls: dict[int, _LayerCall]) -> Iterator[None]:
    """Have layers compute nothing within the block, and record their calls in `calls`.

    The layers' tensors are taken out meanwhile, since a trace with thousands of unused tensors takes long. Only the
    first layer of each class keeps its tensors: it is called to see what such a layer returns.
    """
    layers = list(layers)
    shown: dict[type[nn.Module], nn.Module] = {}
    for layer in layers:
        shown.setdefault(type(layer), layer)
    modules = [one for layer in layers if shown[type(layer)] is not layer for one in layer.modules()]
    tensors = [(module._parameters, module._buffers) for module in modules]
    for i, layer in enumerate(layers):
        layer.forward = _stand_in(i, layer if shown[type(layer)] is layer else None, calls)
    for module in modules:
        module._parameters, module._buffers = {}, {}
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        for module, (parameters, buffers) in zip(modules, tensors, strict=True):
            module._parameters, module._buffers = parameters, buffers


def _stand_in(i: int, shown: nn.Module | None, calls: dict[int, _LayerCall]) -> Callable[..., Tensor]:
    """A forward for layer `i` that records its call in `calls` and computes nothing. `shown` is the layer, if its own
    forward is to be called too, to check what it returns; otherwise None.
    """

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _keep_unread((*args, *kwargs.values()))
        arguments, structure = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        paged = next((value for value in arguments if isinstance(value, PagedInputs)), None)
        if paged is None:
            raise CannotBeCut("its layers are not handed where their keys and values lie")
        if shown is not None:
            with unrecorded(hidden):
                _check_output(hidden, type(shown).forward(shown, hidden, *args, **kwargs))
        of_state, of_kv = _tensors_of(paged, i)
        kept = [Tensor if isinstance(value, Tensor) else value for value in arguments]
        calls[i] = _LayerCall(i, structure, kept, len(of_state), len(of_kv))
        tensors += [paged.positions, paged.slot_mapping, *of_state, *of_kv]
        output: Tensor = torch.ops.specdec_cut.layer(hidden, tensors, i)
        return output

    return forward


class _Unread(dict[Any, Any]):
    """Content of a mapping by which layers may hand tensors to later layers. Looking up a key raises CannotBeCut."""

    def __contains__(self, key: object) -> bool:
        raise CannotBeCut("its layers share what they make")


def _keep_unread(value: Any) -> None:
    """Make each `UserDict` in an argument raise CannotBeCut when a key is looked up. Raise CannotBeCut for other
    mappings, and for lists: a layer may write into them.
    """
    if isinstance(value, tuple):
        for one in value:
            _keep_unread(one)
    elif isinstance(value, UserDict):
        value.data = _Unread(value.data)
    elif isinstance(value, MutableMapping | MutableSequence):
        raise CannotBeCut("its layers are handed what they may write into")


def _check_output(hidden: Tensor, output: Any) -> None:
    """Raise CannotBeCut unless a layer returns a single tensor of its input's dtype, as `_LAYER` does."""
    if not isinstance(output, Tensor):
        raise CannotBeCut("its layers return more than hidden states")
    if output.dtype != hidden.dtype:
        raise CannotBeCut(f"its layers make {output.dtype} of {hidden.dtype}")


def _tensors_of(paged: PagedInputs, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of a layer's memory: of its state, the rows' slots and the pools; of its keys and values, the block
    tables and the pools. Each list is empty for a layer without such memory.
    """
    of_state = [paged.state_slots, *paged.pools_of_state(layer)] if layer in paged.state_layers else []
    if layer not in paged.layers:
        return of_state, []  # type: ignore[return-value]  # where there are states there are slots
    pools = [paged.key_pools, paged.value_pools, *([paged.scale_pools] if paged.scale_pools else [])]
    place = paged.kv_place(layer)
    return of_state, [paged.block_tables, *(pool[place] for pool in pools)]  # type: ignore[return-value]


def _of_tensors(call: _LayerCall, positions: Tensor, slot_mapping: Tensor, *kept: Tensor) -> PagedInputs:
    """The inputs of a layer by itself, from its tensors in the order of `_tensors_of`."""
    of_state, of_kv = kept[: call.num_of_state], kept[call.num_of_state :]
    tables, *pools = of_kv or (positions,)
    keys, values, scales = [[pool] for pool in pools] + [[]] * (3 - len(pools))
    slots, *states = of_state or (None,)
    layers = (call.layer,) if of_kv else (), (call.layer,) if of_state else ()
    return PagedInputs(keys, values, scales, positions, slot_mapping, tables, *layers, slots, states)


class _Layer(nn.Module):
    """A layer as a module whose arguments are tensors only, as tracing needs them."""

    def __init__(self, layer: nn.Module, call: _LayerCall) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *tensors: Tensor) -> Tensor:
        hidden, *rest = tensors
        num_own = sum(value is Tensor for value in self.call.arguments)
        own = iter(rest[:num_own])
        paged = _of_tensors(self.call, *rest[num_own:])
        arguments = [
            next(own) if value is Tensor else paged if isinstance(value, PagedInputs) else value
            for value in self.call.arguments
        ]
        args, kwargs = pytree.tree_unflatten(arguments, self.call.structure)
        output: Tensor = self.layer(hidden, *args, **kwargs)
        return output


def _traced_layer(layer: nn.Module, node: Node, call: _LayerCall, arithmetic: int) -> GraphModule:
    """The layer's graph, with the same open sizes as the layer's call in the step."""
    program = by_trace(_Layer(layer, call), tuple(source.meta["val"] for source in _inputs(node)))
    if any(one.op == "get_attr" for changing in program.graph.nodes for one in _written(changing)):
        raise CannotBeCut("its layers remember")
    use_kernels(program, arithmetic)
    return program


def _without_unread(program: GraphModule) -> list[bool]:
    """Take out inputs that nothing reads, such as positions of images; returns for each input whether it is left."""
    inputs = program.graph.find_nodes(op="placeholder")
    are_read = [bool(node.users) for node in inputs]
    for node, is_read in zip(inputs, are_read, strict=True):
        if not is_read:
            program.graph.erase_node(node)
    return are_read


_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _structure(layer: nn.Module) -> str:
    """Description of a layer by its modules, settings and shapes, without its weights' values and its own number. A
    setting that is no plain value, such as an object, is equal only to itself.
    """
    parts = []
    for name, module in layer.named_modules():
        settings = {
            key: _setting(value)
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in ("layer_idx", "forward")
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors]
        parts.append((name, type(module), sorted(settings.items()), shapes))
    return repr(parts)


def _setting(value: Any) -> Any:
    if isinstance(value, partial):  # each layer may have its own of one function
        return "partial", id(value.func), value.args, sorted(value.keywords.items())
    if isinstance(value, tuple | list):
        return [_setting(one) for one in value]
    return value if isinstance(value, _PLAIN) else id(value)


def _inputs(layer: Node) -> list[Node]:
    """The tensors among a layer's arguments."""
    hidden, others, _ = layer.args
    return [hidden, *others]  # type: ignore[list-item, misc]


# --- pools ---


_NUM_BEFORE_POOLS = 5  # a step's inputs that are its batch


def _stand_ins(shapes: Shapes) -> list[int]:
    """Number, for each layer with K/V, of the pool that stands for the layer's own. Layers of one shape share a
    pool. The last of them shares with none, since the model's last layer is not a call: [0, 0, 1] for three.
    """
    kinds = [repr(replace(one, layer=0)) for one in shapes.layers[:-1]]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return [*(numbers[kind] for kind in kinds), *[len(numbers)][: len(shapes.layers)]]


def _have_own_pools(graph: Graph, calls: dict[int, _LayerCall], stand_ins: list[int]) -> bool:
    """Give each layer's call pools of its own, as inputs of the step, in place of shared pools.

    Returns False, and changes nothing, if something other than a layer reads a shared pool: then the owner of that pool
    is not known.
    """
    with_kv = [i for i in sorted(calls) if calls[i].num_of_kv]
    num_parts, num_few = max(0, *(one.num_of_kv - 1 for one in calls.values())), len(set(stand_ins))
    inputs = [node for node in graph.nodes if node.op == "placeholder"][_NUM_BEFORE_POOLS:]
    given = [inputs[part * num_few : (part + 1) * num_few] for part in range(num_parts)]
    shared = {node for part in given for number, node in enumerate(part) if stand_ins.count(number) > 1}
    in_layers = {node.args[2]: node for node in graph.nodes if node.target is _LAYER}
    pools_of = {i: _inputs(in_layers[i])[-num_parts:] for i in with_kv}
    others = [one for i, node in in_layers.items() for one in _inputs(node)[: -num_parts if i in pools_of else None]]
    if shared & set(others) or any(user.target is not _LAYER for node in shared for user in node.users):
        return False
    own: list[list[Node]] = []
    with graph.inserting_before(given[0][0]):
        for part in given:
            own.append([graph.node_copy(part[number]) for number in stand_ins])
    for place, i in enumerate(with_kv):
        hidden, rest, number = in_layers[i].args
        in_layers[i].args = (hidden, [*rest[:-num_parts], *(part[place] for part in own)], number)
    for part, nodes in zip(given, own, strict=True):
        for number, node in enumerate(part):
            node.replace_all_uses_with(nodes[stand_ins.index(number)])
            graph.erase_node(node)
    return True


# --- constants ---


@dataclass(frozen=True)
class _Folded:
    """A graph whose constants are named weights without values, and the recipe by which they are made."""

    graph: GraphModule
    recipe: Recipe

    @property
    def layout(self) -> Layout:
        return layout_of({name: getattr(self.graph, name) for name in self.recipe.made})


def _fold(module: GraphModule) -> _Folded:
    """The graph without operations that depend on constants alone; their results become weights."""
    constants = _constants(list(module.graph.nodes))
    used = [node for node in constants if any(user not in constants for user in node.users)]
    made_by = {f"weight_{i}": node for i, node in enumerate(used)}
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node not in constants:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node in used:
            copies[node] = graph.get_attr(f"weight_{used.index(node)}")
            copies[node].meta["val"] = node.meta["val"]
    needed = set(used)
    for node in reversed(module.graph.nodes):
        needed |= set(node.all_input_nodes) if node in needed else set()
    recipe = _recipe([node for node in module.graph.nodes if node in needed], made_by)
    forms = {name: node.meta["val"] for name, node in made_by.items()}
    forms = {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in forms.items()}
    return _Folded(GraphModule(forms, graph), recipe)


def _recipe(nodes: list[Node], made_by: dict[str, Node]) -> Recipe:
    numbers = {node: Made(i) for i, node in enumerate(nodes)}
    operations: list[tuple[Any, Any, Any]] = []
    for node in nodes:
        if node.op == "get_attr":
            operations.append((None, str(node.target), {}))
        else:
            operations.append((node.target, *torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)))
    return Recipe(operations, {name: int(numbers[node]) for name, node in made_by.items()})


def _constants(nodes: list[Node]) -> dict[Node, None]:
    """Nodes that depend on attributes and numbers alone, and whose memory no node writes, in order."""
    found: dict[Node, None] = {}
    changed = {memory_of(one) for node in nodes for one in _written(node)} - {None}
    for node in nodes:
        inputs = node.all_input_nodes
        is_computed = node.op == "call_function" and (inputs or _is_constant(node))
        is_made = node.op == "get_attr" or (is_computed and all(one in found for one in inputs))
        if is_made and memory_of(node) not in changed:
            found[node] = None
    return found


def _is_constant(node: Node) -> bool:
    """True for a tensor without inputs that is the same in every step, such as `torch.arange(8)`."""
    numbers = [one for one in pytree.tree_leaves((node.args, node.kwargs)) if type(one) is int]
    draws = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    is_tensor = isinstance(node.meta.get("val"), Tensor)
    return is_tensor and not draws and not any(is_multiple(abs(one)) for one in numbers)


def _written(node: Node) -> list[Node]:
    """The tensors that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = (named.get(argument.name) for argument in schema.arguments if argument.is_write)
    return [one for one in written if isinstance(one, Node)]


def _in_layer(layer: nn.Module, program: GraphModule) -> Callable[[str], Tensor]:
    """Function from the name of a weight in one layer's program to the weight of this name in `layer`, a layer of the
    same kind. Constants that tracing made are the program's own.
    """

    def get(name: str) -> Tensor:
        try:
            return attribute_of(layer)(name.removeprefix("layer."))
        except AttributeError:
            return attribute_of(program)(name)

    return get


# --- the step around them ---


@dataclass(frozen=True)
class _NodeCall:
    """A program's call whose inputs and outputs are nodes of the graph, before they get numbers."""

    program: int
    folded: _Folded
    get: Callable[[str], Tensor]
    read: list[Node]
    made: list[Node]


class _Programs:
    """The step's programs; equal programs are stored once."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self._numbers: dict[str, int] = {}

    def number(self, graph: GraphModule) -> int:
        number = self._numbers.setdefault(describe(graph), len(self.graphs))
        if number == len(self.graphs):
            self.graphs.append(graph)
        return number


def _in_order(module: GraphModule, programs: _Programs, layers: dict[Node, _NodeCall]) -> CutStep:
    """The calls of a step. The operations before, between and behind the `layers` become programs too. Raises
    CannotBeCut if an operation writes into what was made before another layer.
    """
    nodes = _ordered_by_use(module.graph)
    times: dict[Node, int] = {}  # how many layers come before
    for node in nodes:
        times[node] = max((times[one] + (one in layers) for one in node.all_input_nodes), default=0)
        if any(times[one] != times[node] and one.op != "placeholder" for one in _written(node)):
            raise CannotBeCut("what one layer makes another writes into")
    results = pytree.tree_leaves(next(node for node in nodes if node.op == "output").args)
    last = max(times[node] for node in results)
    times |= dict.fromkeys(results, last)  # hidden states that were there before are handed out with the logits
    inputs = [node for node in nodes if node.op == "placeholder"]
    asked = _asked(nodes, times, layers) | {*results}
    given = {*inputs, *layers}
    node_calls: list[_NodeCall] = []
    for time in range(last + 1):
        outputs = [node for node in nodes if times[node] == time and node in asked and node not in given]
        if time == last:
            outputs = results
        if outputs:
            writing = [node for node in nodes if times[node] == time and _written(node)]
            piece, read = _piece(module, nodes, outputs, writing, given)
            folded = _fold(piece)
            node_calls.append(_NodeCall(programs.number(folded.graph), folded, attribute_of(piece), read, outputs))
            given |= set(outputs)
        node_calls += [call for node, call in layers.items() if times[node] == time]
    return CutStep(programs.graphs, _with_places(inputs, node_calls))


def _ordered_by_use(graph: Graph) -> list[Node]:
    """The graph's nodes, each before the first node that reads it: an order that depends on the computation alone.

    A trace has the order in which the model's code ran, which may be random: some classes of transformers make a table
    of angles for each of `set(config.layer_types)`, whose order differs from process to process. Weights are stored in
    the order of the graph, and engines share files whose bytes are equal.

    Nodes that read or write memory that some node writes keep their order. Nodes that nothing reads are left out.
    """
    nodes = list(graph.nodes)
    changed = {memory_of(one) for node in nodes for one in _written(node)} - {None}
    fixed = [node for node in nodes if any(memory_of(one) in changed for one in (node, *node.all_input_nodes))]
    inputs = [node for node in nodes if node.op == "placeholder"]
    ordered = dict[Node, None]()
    waiting = [*inputs, *fixed, nodes[-1]][::-1]
    while waiting:
        node = waiting[-1]
        unordered = [one for one in node.all_input_nodes if one not in ordered]
        waiting += unordered[::-1]
        if not unordered:
            ordered[waiting.pop()] = None
    return list(ordered)


def _asked(nodes: list[Node], times: dict[Node, int], layers: dict[Node, _NodeCall]) -> set[Node]:
    """Tensors handed from one program to another: inputs of layers, and tensors read behind a later layer."""
    constants = _constants(nodes)
    asked = {source for call in layers.values() for source in call.read}
    for node in [node for node in nodes if node not in layers]:
        early = (one for one in node.all_input_nodes if times[one] < times[node] and one not in constants)
        asked |= {one for one in early if isinstance(one.meta.get("val"), Tensor)}
    return asked


def _piece(
    module: GraphModule, ordered: list[Node], outputs: list[Node], writing: list[Node], given: set[Node]
) -> tuple[GraphModule, list[Node]]:
    """The part of the graph that computes `outputs` from the nodes in `given`, as a module; also returns the nodes of
    `given` that it reads. It includes the operations in `writing`, even if nothing reads their results.
    """
    needed: set[Node] = set()
    waiting = outputs + writing
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in given else node.all_input_nodes
    nodes = [node for node in ordered if node in needed]
    read = [node for node in nodes if node in given]
    graph, copies = Graph(), dict[Node, Node]()
    for node in read:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(module, graph), read


def _with_places(inputs: list[Node], node_calls: list[_NodeCall]) -> list[ProgramCall]:
    """The calls with a number for each tensor. A number is used again once nothing reads its tensor any more."""
    read_last = {node: number for number, one in enumerate(node_calls) for node in one.read}
    places = {node: place for place, node in enumerate(inputs)}
    new, free, calls = count(len(inputs)), list[int](), list[ProgramCall]()
    for number, call in enumerate(node_calls):
        read = [places[node] for node in call.read]
        over = dict.fromkeys(node for node in call.read if read_last[node] == number and node not in inputs)
        free += [places[node] for node in over]
        for node in call.made:
            places[node] = free.pop() if free else next(new)
        made, folded = [places[node] for node in call.made], call.folded
        calls.append(ProgramCall(call.program, read, made, folded.layout, folded.recipe, call.get))
    return calls


# --- what a graph is ---


def describe(module: GraphModule) -> str:
    """Text of a graph's operations, shapes and dtypes, without names: equal texts are the same program."""
    numbers: dict[Node, _Bare] = {}
    lines = []
    for node in module.graph.nodes:
        numbers[node] = _Bare(f"%{len(numbers)}")
        arguments = torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = "" if node.op in ("placeholder", "get_attr") else node.target
        lines.append(f"{node.op} {target} {arguments} {_form(node)}")
    return "\n".join(lines)


class _Bare(str):
    """A name whose `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def _form(node: Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return ""
