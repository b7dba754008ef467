"""Promises of what is done to a captured step, whatever its layers are.

- linear layers: with and without bias, of any sizes, in any order, they compute what torch computes of their weights
- calls of a cut step: a tensor is where it is read, until the last that reads it; what nobody reads takes no place
- layers that share a program are alike in all that it computes by
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_model
from torch import Tensor, nn

from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.compiler.capture import by_trace
from runtime.compiler.cutting import _structure, _with_places
from runtime.compiler.linears import use_kernels
from runtime.kernels.ops import describe_kernels, load_kernels
from runtime.model.quantized import QuantizedLinear

INPUTS = 16


@pytest.fixture(scope="module", autouse=True)
def loaded(kernels: Path) -> None:
    load_kernels(kernels)
    describe_kernels()


class Layers(nn.Module):
    """Layers that all read one input; their outputs side by side."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def layer_of(kind: str, outputs: int, *, has_bias: bool, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(INPUTS, outputs, bias=has_bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if kind == "float":
        return linear
    weight = quantize_weight(linear.weight.data, QuantConfig(qformat="int8"), INPUTS)
    return QuantizedLinear(weight, linear.bias, "float", with_kernels=True)


@pytest.mark.parametrize("kind", ["float", "int8", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_layers_of_one_input_compute_each_its_own(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.choice(["float", "int8"]) if kind == "mixed" else kind for _ in range(draw.randrange(2, 6))]
    biases = [True, False, *(draw.random() < 0.5 for _ in kinds[2:])]
    draw.shuffle(biases)
    layers = [
        layer_of(one, draw.randrange(1, 9) * 2, has_bias=has_bias, seed=i)
        for i, (one, has_bias) in enumerate(zip(kinds, biases, strict=True))
    ]
    module, x = Layers(layers), torch.randn(3, INPUTS)
    with torch.no_grad():
        program = by_trace(module, (x,), ({0: "rows"},))
        use_kernels(program, 0)
        targets = [str(node.target) for node in program.graph.nodes]
        assert not any("aten.linear" in target for target in targets), "a layer is left to torch"
        for rows in (1, 3, 7):
            x = torch.randn(rows, INPUTS)
            torch.testing.assert_close(program(x)[0], module(x), rtol=1e-4, atol=1e-4)


@given(data=st.data(), num_turns=st.integers(1, 12), num_inputs=st.integers(1, 3))
def test_tensors_are_where_they_are_read(data: st.DataObject, num_turns: int, num_inputs: int) -> None:
    """The calls are carried out on places that hold the names of tensors."""
    inputs: list[Any] = [f"input {i}" for i in range(num_inputs)]
    known, turns = list(inputs), list[Any]()
    for number in range(num_turns):
        read = data.draw(st.lists(st.sampled_from(known), max_size=4, unique=True))
        made = [f"{number}.{i}" for i in range(data.draw(st.integers(1, 3)))]
        folded = SimpleNamespace(layout={}, recipe=None)
        turns.append(SimpleNamespace(program=0, folded=folded, get=None, read=read, made=made, layer=None))
        known += made
    calls = _with_places(inputs, turns)
    held: dict[int, str] = dict(enumerate(inputs))
    for turn, call in zip(turns, calls, strict=True):
        assert [held[place] for place in call.inputs] == turn.read
        assert len(set(call.outputs)) == len(call.outputs)
        held |= dict(zip(call.outputs, turn.made, strict=True))
        assert [held[i] for i in range(num_inputs)] == inputs, "an input of the step was written over"


def test_layers_that_differ_in_a_setting_are_not_alike() -> None:
    first, second = make_model("llama", num_hidden_layers=2).model.layers
    assert _structure(first) == _structure(second)
    for module, name, value in (
        (second.self_attn, "scaling", 0.5),
        (second.input_layernorm, "variance_epsilon", 0.1),
        (second.self_attn, "sliding_window", 7),
    ):
        before = getattr(module, name, None)
        setattr(module, name, value)
        assert _structure(first) != _structure(second), name
        setattr(module, name, before)
    second.self_attn.sliding_window = 7
    first.self_attn.sliding_window = 7
    assert _structure(first).replace("sliding_window", "") == _structure(second).replace("sliding_window", "")
