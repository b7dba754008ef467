"""A captured step whose linear layers are computed by the CPU kernel of `runtime.kernels.ops`, in the same arithmetic
as attention. Layers that read the same input, as query, key and value do, are joined into one. Weights are packed by an
operation of the graph, which is carried out once, because its input is constant: the package holds packed weights only.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from runtime.compiler.capture import attribute_of
from runtime.model.quantized import QuantizedLinear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ATEN = torch.ops.aten


def use_kernels(module: GraphModule, arithmetic: int) -> None:
    """Replace linear layers of a graph by the kernel, in place, if it supports their dtype and their number of inputs
    is even. `arithmetic` says how the kernels multiply, in linear layers, in experts and in attention.
    """
    graph = module.graph
    _say_as_linear(graph, _constants(module))
    constants = _constants(module)
    groups: dict[tuple[Node, bool, torch.dtype], list[Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.linear.default and node.args[1] in constants and _can_serve(node.args[1]):
            has_bias = len(node.args) > 2 and node.args[2] is not None
            groups.setdefault((node.args[0], has_bias, node.args[1].meta["val"].dtype), []).append(node)
        elif node.target is torch.ops.specdec.paged_attention.default:
            node.args = (*node.args[:-1], arithmetic)
        elif node.target is torch.ops.specdec.experts_linear.default:
            node.args = (*node.args[:4], arithmetic, node.args[5])
    for (_, has_bias, _), layers in groups.items():
        _replace(graph, layers, arithmetic, has_bias=has_bias)
    for layers in _rounded_layers(graph, arithmetic):
        _replace_rounded(graph, layers, arithmetic)
    module.recompile()


def look_up_in_output(module: GraphModule, table: Tensor, output: QuantizedLinear) -> None:
    """Read embeddings from the packed weight of `output`, which equals `table` [vocab, hidden], not from `table`."""
    graph, get = module.graph, attribute_of(module)
    attributes = {id(get(str(node.target))): node for node in reversed(graph.find_nodes(op="get_attr"))}
    parts = [attributes.get(id(part)) for part in (output.values, output.scales)]
    if None in parts:  # the graph is one that does not compute logits
        return
    for node in graph.find_nodes(op="call_function", target=_ATEN.embedding.default):
        of = node.args[0]
        if not isinstance(of, Node) or of.op != "get_attr" or get(str(of.target)) is not table:
            continue
        with graph.inserting_before(node):
            values, scales = (graph.node_copy(part) for part in parts if part is not None)
            packed = _call(graph, torch.ops.specdec.pack_quantized.default, values, scales, None, None)
            rows = torch.ops.specdec.quantized_rows.default
            found = _call(graph, rows, node.args[1], packed, *output.quantized.shape, table.dtype)
        node.replace_all_uses_with(found)
        graph.erase_node(node)
    module.recompile()


def _say_as_linear(graph: Graph, constants: set[Node]) -> None:
    """Turn products with transposed weights, `[inputs, outputs]` as in GPT-2, into linear layers."""
    for node in graph.nodes:
        if node.target is not _ATEN.addmm.default or node.args[2] not in constants or node.kwargs:
            continue
        bias, x, weight = node.args
        if len(bias.meta["val"].shape) == 1:
            with graph.inserting_before(node):
                rows = _call(graph, _ATEN.t.default, weight)
                node.replace_all_uses_with(_call(graph, _ATEN.linear.default, x, rows, bias))
            graph.erase_node(node)


def _constants(module: GraphModule) -> set[Node]:
    """Nodes that are parameters, or are computed from parameters alone, such as a router's weights in float32."""
    found: set[Node] = set()
    get = attribute_of(module)
    for node in module.graph.nodes:
        is_parameter = node.op == "get_attr" and isinstance(get(str(node.target)), nn.Parameter)
        if is_parameter or (
            node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return found


def _can_serve(weight: Node) -> bool:
    value = weight.meta["val"]
    return value.dtype in _DTYPES and value.shape[1] % 2 == 0


def _replace(graph: Graph, layers: list[Node], arithmetic: int, *, has_bias: bool) -> None:
    x = layers[0].args[0]  # read again: the layer that made it may have been replaced meanwhile
    sizes = [layer.args[1].meta["val"].shape[0] for layer in layers]  # type: ignore[union-attr]
    with graph.inserting_before(layers[0]):
        packed = _call(graph, torch.ops.specdec.pack_linear.default, _joined(graph, layers, 1))
        bias = _joined(graph, layers, 2) if has_bias else None
        outputs = _call(graph, torch.ops.specdec.linear.default, x, packed, bias, sum(sizes), arithmetic)
        _hand_out(graph, layers, outputs, sizes)


def _rounded_layers(graph: Graph, arithmetic: int) -> list[list[Node]]:
    """Groups of quantized layers with the same input whose weights are packed together; other layers stay alone."""
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.specdec.quantized_linear.default:
            x, packed, bias, _, _, token_bits = node.args
            if packed.target is not torch.ops.specdec.pack_quantized.default:
                node.args = (*node.args[:4], arithmetic, token_bits)
                continue
            parts = tuple(
                part and (part.meta["val"].dtype, part.meta["val"].shape[1:]) for part in (*packed.args, None, None)[:4]
            )
            groups.setdefault((x, bias is None, token_bits, parts), []).append(node)
    return list(groups.values())


def _replace_rounded(graph: Graph, layers: list[Node], arithmetic: int) -> None:
    x, _, bias, _, _, token_bits = layers[0].args
    sizes: list[int] = [layer.args[3] for layer in layers]  # type: ignore[misc]
    packs: list[Node] = [layer.args[1] for layer in layers]  # type: ignore[misc]
    kernels = torch.ops.specdec
    with graph.inserting_before(layers[0]):
        parts = [part and _joined(graph, packs, i) for i, part in enumerate(packs[0].args)]
        packed = _call(graph, kernels.pack_quantized.default, *parts)
        joined_bias = None if bias is None else _joined(graph, layers, 2)
        arguments = (x, packed, joined_bias, sum(sizes), arithmetic, token_bits)
        outputs = _call(graph, kernels.quantized_linear.default, *arguments)
        _hand_out(graph, layers, outputs, sizes)
    for pack in packs:
        graph.erase_node(pack)


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def _joined(graph: Graph, nodes: list[Node], index: int) -> Node:
    """The argument number `index` of several nodes, concatenated along the outputs."""
    parts = [node.args[index] for node in nodes]
    if len(parts) == 1:
        return parts[0]  # type: ignore[return-value]
    return _call(graph, torch.ops.aten.cat.default, parts, 0)


def _hand_out(graph: Graph, layers: list[Node], outputs: Node, sizes: list[int]) -> None:
    """Give each layer's share of the joined outputs to the nodes that read the layer."""
    if len(layers) == 1:
        layers[0].replace_all_uses_with(outputs)
    else:
        split = _call(graph, torch.ops.aten.split_with_sizes.default, outputs, sizes, -1)
        for i, layer in enumerate(layers):
            layer.replace_all_uses_with(_call(graph, getitem, split, i))
    for layer in layers:
        graph.erase_node(layer)
