"""Traced graphs have the operations that torch exports. `test_token_program.py` traces families."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from runtime.compiler.capture import CannotBeTraced, NoTokenProgram, by_trace
from runtime.compiler.token_program import lower

ROWS = ({0: "rows", 1: "tokens"},)


class Of(nn.Module):
    """A module that computes a function, of two weights too."""

    def __init__(self, function: Callable[["Of", Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.register_buffer("kept", torch.arange(8.0))
        self.plain = torch.arange(8.0)  # no parameter, and no buffer

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def operations(graph: GraphModule) -> list[str]:
    """Operations with what they take but sizes, and what they give."""
    lines = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and "sym_size" not in str(node.target) and "val" in node.meta:
            given = [one.name if one.op == "placeholder" else str(one.target) for one in node.all_input_nodes]
            value = node.meta["val"]
            if isinstance(value, Tensor):
                given = [one for one in given if "sym_size" not in one and one != "<built-in function mul>"]
                lines.append(f"{node.target} {given} {value.dtype} {value.ndim}")
    return lines


FUNCTIONS: dict[str, Callable[[Of, Tensor], Any]] = {
    "linear": lambda own, x: own.linear(x.reshape(1, x.shape[0] * x.shape[1], 8)),
    "part by part": lambda own, x: torch.cat(x.flatten(0, 1).split([3, 5], -1)[::-1], -1),
    "in place": lambda own, x: torch.zeros_like(x).add_(x).mul_(2),
    "made anew": lambda own, x: x * torch.arange(8) + torch.zeros(8) + x.new_ones(8) + torch.full((8,), 2.0),
    "two results": lambda own, x: x.topk(3, -1)[0] + x.max(-1, keepdim=True)[0],
    "weights": lambda own, x: x * own.weight + own.kept.to(torch.float32),
    "norm": lambda own, x: F.layer_norm(x, (8,), own.weight) + F.rms_norm(x, (8,)),
    "views": lambda own, x: x.transpose(0, 1).unsqueeze(2).expand(-1, -1, 4, -1)[..., ::2].contiguous(),
    "softmax": lambda own, x: F.softmax(x.float(), -1, dtype=torch.float32).to(x.dtype),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_are_those_that_torch_exports(name: str) -> None:
    module, x = Of(FUNCTIONS[name]).eval(), torch.rand(3, 5, 8)
    with torch.no_grad():
        traced, free = by_trace(module, (x,), ROWS), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
        exported = torch.export.export(module, (x,), strict=False, dynamic_shapes=(free,)).module(check_guards=False)
    exported.graph.eliminate_dead_code()  # type: ignore[union-attr, operator]
    assert operations(traced) == operations(exported) and len(operations(traced)) > 1


def test_weights_stay_as_they_are() -> None:
    module = Of(lambda own, x: own.linear(x * own.weight))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    graph = by_trace(module, (torch.rand(3, 5, 8),), ROWS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    assert names == ["weight", "linear.weight", "linear.bias"]  # in the module's order, and no others
    assert all(isinstance(graph.get_parameter(name), nn.Parameter) for name in names)


@pytest.mark.parametrize(
    "function",
    [
        lambda own, x: x * 2 if x.sum() > 0 else x,  # of data that a trace does not have
        lambda own, x: torch.cat([x, x[:, :1]], 1),  # one token more
        lambda own, x: x[:, 1:],
        lambda own, x: x / math.sqrt(x.shape[1]),  # sizes as numbers
        lambda own, x: x + x.shape[1] // 2,
        lambda own, x: x * min(x.shape[1], 4096),
        lambda own, x: x * float(x.shape[1]),
        lambda own, x: x * torch.tensor([1.0 * x.shape[1]]),
        lambda own, x: x * (2 if x.shape[1] > 100 else 3),  # and in a branch
        lambda own, x: x.relu() if x.shape[1] > 100 else x.sigmoid(),
        lambda own, x: x + x.new_zeros(2 * 100_003)[:8],  # a size by which open ones are told
    ],
)
def test_what_depends_on_a_size_is_refused(function: Callable[[Of, Tensor], Any]) -> None:
    with pytest.raises(CannotBeTraced):
        by_trace(Of(function), (torch.rand(3, 5, 8),), ROWS)


@pytest.mark.parametrize(
    "function", [lambda own, x: x * x.shape[1], lambda own, x: x + x.numel(), lambda own, x: x * -len(x)]
)
def test_a_size_that_is_computed_with_is_not_lowered(function: Callable[[Of, Tensor], Any]) -> None:
    found = lower(by_trace(Of(function), (torch.rand(3, 5, 8),), ROWS))
    assert found == NoTokenProgram("a size is computed with")


def test_tokens_may_be_counted_from_the_end() -> None:
    """Kimi-Linear takes the last of a convolution's outputs, as many as there are tokens."""
    traced = by_trace(Of(lambda own, x: x[:, -x.shape[1] :] * 2), (torch.rand(3, 5, 8),), ROWS)
    assert [line.split()[0] for line in operations(traced)] == ["aten.slice.Tensor", "aten.mul.Tensor"]


def test_what_nobody_reads_may_depend_on_a_size() -> None:
    """GPT-Neo cuts a mask that nothing reads where the kernel attends."""

    def cut(own: Of, x: Tensor) -> Tensor:
        own.kept[: x.shape[1]]
        return x * 2

    assert len(operations(by_trace(Of(cut), (torch.rand(3, 5, 8),), ROWS))) == 1


def test_a_weight_with_a_size_by_which_open_ones_are_told_is_refused() -> None:
    module = Of(lambda own, x: F.linear(x, own.large))
    module.register_buffer("large", torch.empty(100_003, 8))
    with pytest.raises(CannotBeTraced, match="large"):
        by_trace(module, (torch.rand(3, 5, 8),), ROWS)


def test_modules_keep_nothing_of_a_trace() -> None:
    """CTRL moves its table of positions to a device, and keeps what it has moved."""

    def moving(own: Of, x: Tensor) -> Tensor:
        own.plain, own.kept = own.plain.to(torch.float32) + 1, own.kept * 1
        return x * own.plain * own.kept

    module = Of(moving)
    by_trace(module, (torch.rand(3, 5, 8),), ROWS)
    assert torch.equal(module.plain, torch.arange(8.0)) and torch.equal(module.kept, torch.arange(8.0))
