"""Tokens whose logits nobody wants are not computed after the last attention; the others' logits stay the same."""

import copy
from typing import Any

import pytest
import torch
from by_torch import SizedForm, traced_for
from tiny import FAMILIES, make_model
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from runtime.compiler.capture import example_pool, example_rows, example_states
from runtime.compiler.selection import select_early
from runtime.core.batch import pack
from runtime.model.attention import PAGED
from runtime.model.model import Step, probe_config

BLOCK_SIZE = 16
# Linear layers after the last attention, the output layer aside. Who folds tokens into another shape keeps them all.
NUM_LATE = {"gpt2": 0, "opt": 0, "phi3": 3, "gpt-neox": 3}


def num_linears(program: GraphModule, num_tokens: str) -> int:
    """Linear layers that compute so many tokens."""
    layers = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    return sum(str(layer.meta["val"].shape[-2]) == num_tokens for layer in layers)


# As few layers as there are kinds of them, and two of llama's.
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]},
}


TRACED = [family for family in FAMILIES if family not in ("qwen3.5", "mixtral", "qwen2-moe")]
"""Torch's own linear attention loops as often as values say, and its experts' product has no form in float32: steps of
these are traced with kernels alone."""


@pytest.mark.one_in(20)
@pytest.mark.parametrize("layers", ["few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", TRACED)
def test_unwanted_tokens_are_not_computed_and_logits_stay(family: str, layers: str) -> None:
    model = make_model(family, **({} if layers == "all" else LAYERS.get(family, {"num_hidden_layers": 1})))
    model.set_attn_implementation(PAGED)
    shapes = probe_config(copy.deepcopy(model.config))
    step = Step(model)
    pool = example_pool(shapes, 40, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    rows = example_rows([7, 2], 0, 40, BLOCK_SIZE, 2)
    batch, states = pack(rows, BLOCK_SIZE, torch.device("cpu")), example_states(shapes, rows, torch.float32)
    with torch.no_grad():
        expected = step(*batch.tensors(), *pool.tensors(), *states)
        given = (*batch.tensors(), *pool.tensors(), *states)
        program = SizedForm(step, shapes, BLOCK_SIZE, torch.float32, given).graph()
        indices = next(n for n in program.graph.nodes if n.name == "logit_indices").meta["val"]
        num_wanted = str(indices.shape[0])
        assert num_linears(program, num_wanted) == 1
        select_early(program, "logit_indices")
        assert num_linears(program, num_wanted) == 1 + NUM_LATE.get(family, 4)
        program.graph.lint()
        (logits,) = program(*tree_leaves(given))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_operation_that_looks_at_other_tokens_is_not_passed() -> None:
    """Layers that add tokens up must see them all; those after them need not."""

    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return (x.cumsum(1) * 2)[:, indices]

    x, indices = torch.arange(15.0).reshape(1, 5, 3), torch.tensor([1, 4])
    program = traced_for(Sums(), (x, indices))
    select_early(program, "indices")
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function" and "assert" not in str(n.target)]
    assert targets[-3:] == ["aten.cumsum.default", "aten.index.Tensor", "aten.mul.Tensor"]
    assert torch.equal(program(x, indices)[0], (x.cumsum(1) * 2)[:, indices])


def test_tokens_are_not_picked_before_they_are_changed() -> None:
    """A step of such a model was refused, whose logits differed."""

    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            made[..., :2] = made[..., :2] * 2
            return self.last(made)[:, indices]

    module, x, indices = Changes().eval(), torch.rand(1, 5, 4), torch.tensor([1, 4])
    with torch.no_grad():
        program = traced_for(module, (x, indices))
        select_early(program, "indices")
        torch.testing.assert_close(program(x, indices)[0], module(x, indices))
