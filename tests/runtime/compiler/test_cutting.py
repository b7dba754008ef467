"""A step is cut into its beginning, a layer of each kind, and its end. `test_token_program.py` computes the pieces."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama.modeling_llama import LlamaAttention

from runtime.compiler.capture import StepForm
from runtime.compiler.cutting import CutStep, cut_step, describe
from runtime.kernels.ops import describe_kernels, load_kernels
from runtime.model.attention import KERNEL, PagedInputs
from runtime.model.experts import experts_by_kernel
from runtime.model.model import Step, probe_config
from runtime.model.weights import num_bytes_of
from scripts.tools.families import random_model, small_config

BLOCK_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def loaded(kernels: Path) -> None:
    load_kernels(kernels)
    describe_kernels()


def cut(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> CutStep:
    shapes = probe_config(deepcopy(model.config))
    model.set_attn_implementation(KERNEL)
    with torch.no_grad(), experts_by_kernel(model):
        step = cut_step(StepForm(Step(model), shapes, BLOCK_SIZE, dtype), 0)
    assert isinstance(step, CutStep), step
    return step


ACT = {"hidden_act": "gelu_pytorch_tanh"}
"""transformers' module for it has a partial function, of which each layer has its own."""


@pytest.fixture(scope="module")
def two_layers(loaded: None) -> CutStep:
    return cut(make_model("llama", num_hidden_layers=2, **ACT))


@pytest.fixture(scope="module")
def three_layers(loaded: None) -> CutStep:
    return cut(make_model("llama", num_hidden_layers=3, **ACT))


def test_layers_of_one_kind_are_one_program_with_weights_of_their_own(three_layers: CutStep) -> None:
    """The last is of the end's program."""
    assert len(three_layers.programs) == 3 and len(three_layers.calls) == 4
    layers = [call for call in three_layers.calls if call.program == three_layers.calls[1].program]
    assert len(layers) == 2
    first, second = (dict(call.weights()) for call in layers[:2])
    assert first.keys() == second.keys() and not any(torch.equal(first[name], second[name]) for name in first)


def test_what_is_largest_is_made_before_others_fill_the_memory(three_layers: CutStep) -> None:
    """Weights that were made stay in memory, beside what one call's are made of: the fewer then, the larger that is."""
    sizes = [num_bytes_of(call.layout) for call in three_layers.calls]
    numbers = [int(name[:4]) for weights in three_layers.weights() for name in weights]
    turns = list(dict.fromkeys(numbers))
    assert sorted(turns) == list(range(len(sizes))) and len(set(sizes)) > 1
    assert [sizes[i] for i in turns] == sorted(sizes, reverse=True)
    assert numbers == sorted(numbers, key=turns.index)  # what a call's are made of is read once


def test_a_pool_that_something_else_reads_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer reads the first one's keys here."""
    place = PagedInputs.kv_place
    monkeypatch.setattr(PagedInputs, "kv_place", lambda self, layer: 0 if layer == 2 else place(self, layer))
    step = cut(make_model("llama", num_hidden_layers=3))
    keys = [call.inputs for call in step.calls]
    assert set(keys[-1]) & set(range(5, 8)) == {5} == set(keys[1]) & set(range(5, 8))


def test_a_program_is_the_same_in_a_deeper_model_of_that_width(two_layers: CutStep, three_layers: CutStep) -> None:
    assert [describe(program) for program in two_layers.programs] == [
        describe(program) for program in three_layers.programs
    ]


def test_a_wider_layer_is_another_program(two_layers: CutStep) -> None:
    other = cut(make_model("llama", num_hidden_layers=2, intermediate_size=64, **ACT))
    changed = [describe(a) != describe(b) for a, b in zip(two_layers.programs, other.programs, strict=True)]
    assert changed.count(False) == 1  # the beginning


def test_programs_and_weights_have_an_order_that_does_not_depend_on_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma's class makes angles for `set(config.layer_types)`, whose order is another in each process."""

    def stored(order: Callable[[Any], list[Any]]) -> tuple[list[str], list[Any], list[tuple[str, bytes]]]:
        monkeypatch.setattr(modeling_gemma3, "set", order, raising=False)
        step = cut(make_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]))
        weights = [(name, one.numpy().tobytes()) for of_call in step.weights() for name, one in of_call.items()]
        calls = [(call.program, call.inputs, call.outputs) for call in step.calls]
        return [describe(program) for program in step.programs], calls, weights

    assert stored(sorted) == stored(lambda names: sorted(names, reverse=True))


def test_layers_that_compute_by_their_number_are_not_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LlamaAttention.forward

    def scaled(self: LlamaAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        output, _ = attend(self, *args, **kwargs)
        return output * (1 + self.layer_idx), None

    monkeypatch.setattr(LlamaAttention, "forward", scaled)
    assert cut(make_model("llama", num_hidden_layers=3)).why_whole == "its layers compute by their number"


def test_a_model_of_one_layer_is_not_cut() -> None:
    step = cut(make_model("llama", num_hidden_layers=1))
    assert step.why_whole == "it has no list of several layers" and len(step.calls) == len(step.programs) == 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bamba", "its layers return more than hidden states"),
        pytest.param("gemma3n_text", "its layers share what they make", marks=pytest.mark.slow),
    ],
)
def test_layers_that_return_more_or_share_what_they_make_are_not_cut(family: str, reason: str) -> None:
    """Found before layers are calls: what follows them would be handed something else."""
    assert cut(random_model(family, small_config(family), 0.3, 0.3)).why_whole == reason
