"""A captured step that computes only the tokens whose logits are wanted, from its last attention on.

A model picks these tokens before its output layer. For a prompt only the last token is picked, so the last layer's
feed-forward network would compute all other tokens in vain. Token-wise operations give the same result for a picked
token if the picking is done before them. (llama.cpp does so in each family's graph; here any graph is changed.)
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

_ATEN = torch.ops.aten
_NORMS = {_ATEN.layer_norm.default, _ATEN.rms_norm.default}
_READS_FIRST = {_ATEN.linear.default, *_NORMS, _ATEN.mean.dim, _ATEN.chunk.default, getitem}
_READS_FIRST |= {_ATEN.dropout.default, _ATEN.contiguous.default, _ATEN.to.dtype, _ATEN.type_as.default}
"""Operations that compute each token of their first argument by itself, and whose other arguments have no tokens."""
_SUMS = ("specdec.all_reduce.default",)  # by name: the operation is there where models are split


def select_early(module: GraphModule, indices: str) -> None:
    """Move the picking of tokens, `hidden[:, indices]` of [1, tokens, hidden], in place, up to the last operation in
    which tokens look at each other.
    """
    graph = module.graph
    picks = [
        n for n in graph.nodes if n.target is _ATEN.index.Tensor and [str(i) for i in n.args[1]] == ["None", indices]
    ]
    if len(picks) != 1:
        return
    (pick,) = picks
    num_tokens = pick.args[0].meta["val"].shape[1]
    changed = _changed(graph)
    late = {pick}  # nodes computed from picked tokens
    for node in reversed(list(graph.nodes)):
        users = {user for user in node.users if user.target is not _ATEN._assert_tensor_metadata.default}
        reads_changed = not changed.isdisjoint(node.all_input_nodes)  # picked early, it would lack what comes later
        if users and users <= late and not reads_changed and _is_token_wise(node, num_tokens):
            late.add(node)
    # If a split has other readers too, only this part of it is picked.
    late -= {node for node in late if node.target is getitem and node.args[0] not in late}
    picked: dict[Node, Node] = {}
    for node in [n for n in graph.nodes if n in late and n is not pick]:
        for source in _token_inputs(node, num_tokens):
            if source in late:
                continue
            if source not in picked:
                with graph.inserting_after(source):
                    picked[source] = graph.call_function(pick.target, (source, pick.args[1]))
                picked[source].meta["val"] = _evaluate(picked[source])
            node.replace_input_with(source, picked[source])
        node.meta["val"] = _evaluate(node)
    if pick.args[0] in late:
        pick.replace_all_uses_with(pick.args[0])
        graph.erase_node(pick)
    module.recompile()


def _changed(graph: Graph) -> set[Node]:
    """Tensors that an operation of torch changes in place; if such a tensor is a view, its base tensor too."""
    changed: set[Node] = set()
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not str(node.target).startswith("aten."):
            continue
        aliased = any(one.alias_info is not None for one in schema.returns)
        if node.all_input_nodes and (schema.is_mutable or (node in changed and aliased)):
            changed |= {node, node.all_input_nodes[0]}
    return changed


def _is_token_wise(node: Node, num_tokens: int) -> bool:
    """True if each token of a tensor `[1, S, C]` depends only on the same token of its inputs `[1, S, ...]`."""
    target: Any = node.target
    if node.op != "call_function" or not _has_tokens(node, num_tokens):
        return False
    if target in _READS_FIRST and not _has_tokens(node.all_input_nodes[0], num_tokens):
        return False  # of (1, S, N, C), such as several residual streams
    if target is _ATEN.mean.dim:
        return node.args[1] in ([-1], [2])
    if target is _ATEN.chunk.default:
        return node.args[2:] in ((-1,), (2,))
    if target in _NORMS:
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    if target in _READS_FIRST or str(target) in _SUMS:
        return True
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def _token_inputs(node: Node, num_tokens: int) -> list[Node]:
    sources = node.all_input_nodes[:1] if node.target in _READS_FIRST else node.all_input_nodes
    return [source for source in sources if _has_tokens(source, num_tokens)]


def _has_tokens(node: Node, num_tokens: int) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(tensor, Tensor) and tensor.ndim == 3 and tensor.shape[1] == num_tokens for tensor in tensors)


def _evaluate(node: Node) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]
