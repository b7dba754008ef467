"""The copy by which a model drafts for itself: the same model with the weights of its linear layers in fewer bits.

It is compiled as a step of its own, in a directory of its own within the engine's. Everything else is the target's own
memory: embeddings, norms and K/V pools, and the output layer unless it has fewer ids or fewer bits for drafts.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from runtime.checkpoint.bundle import STEP_WEIGHTS
from runtime.checkpoint.config import Activations, BuildConfig, QuantConfig, SelfDraft
from runtime.checkpoint.quant.quantize import group_size_for, quantize_weight
from runtime.checkpoint.quant.weight import QuantizedWeight, take_quantized
from runtime.model.attention import KERNEL
from runtime.model.model import Step, linear_layers
from runtime.model.quantized import QuantizedLinear, QuantizedModule, place_quantized
from runtime.model.weights import present, read_weights, save_weights
from runtime.util.errors import SpecDecError

DRAFT_ACTIVATIONS: Activations = "int8"
"""Activations of layers that draft. Drafts are verified, so the fastest format is best."""


def quantize_layers(
    model: PreTrainedModel, pretrained: PreTrainedConfig, build: BuildConfig, ids: Tensor | None = None
) -> dict[str, QuantizedWeight]:
    """The weights of the copy's linear layers, quantized as a conversion does. The output layer is among them if
    `draft_output` names a format, with only the rows of `ids` [n] if ids are given. Empty if there is no copy.

    Layers that have as few bits already stay as they are. SpecDecError if all layers have.
    """
    if (self_draft := build.self_draft) is None:
        return {}
    names, head = linear_layers(pretrained)
    layers: dict[str, QuantizedWeight] = {}
    for name in names:
        layer, qformat = model.get_submodule(name), self_draft.qformat
        if name == head:
            if build.draft_output.qformat is None:
                continue
            qformat = build.draft_output.qformat
        if isinstance(layer, QuantizedLinear) and layer.quantized.bits <= int(qformat.removeprefix("int")):
            continue
        with present(layer):
            weight = _weight(layer) if name != head or ids is None else _weight(layer)[ids]
            layers[name] = quantized(name, weight, replace(self_draft, qformat=qformat))
    if not layers:
        raise SpecDecError(
            f"the model has no linear layer with more bits than its copy would have: {self_draft.qformat}",
            hint="leave `self_draft` out",
            code="nothing_to_quantize",
        )
    return layers


def quantized(name: str, weight: Tensor, self_draft: SelfDraft) -> QuantizedWeight:
    """The weight [outputs, inputs] of a layer that drafts, quantized. SpecDecError, naming the layer, if groups do not
    divide its inputs, if their number is odd and the format int4, or if the quantized numbers are NaN or infinite.
    """
    group_size = group_size_for(name, weight.shape[1], self_draft.group_size)
    if self_draft.qformat == "int4" and weight.shape[1] % 2:
        raise SpecDecError(
            f"numbers of 4 bits are stored in pairs, and `{name}` has an odd number of inputs: {weight.shape[1]}",
            hint="quantize to int8",
        )
    made = quantize_weight(weight, QuantConfig(self_draft.qformat), group_size)
    made.check(name)
    return made


def _weight(layer: nn.Module) -> Tensor:
    if isinstance(layer, QuantizedLinear):
        return layer.quantized.dequantize()
    assert isinstance(layer, nn.Linear | Conv1D)
    weight = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


def output_weight(model: PreTrainedModel) -> Tensor:
    """Weight [vocab, hidden] of the output layer in the model's dtype. SpecDecError if it is not linear."""
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(output, nn.Linear | QuantizedLinear):
        raise SpecDecError(
            "the head has no output layer of its own, and the model computes its logits without a linear layer",
            hint="take a head with `lm_head.weight`",
        )
    with present(output):
        return _weight(output).to(next(model.parameters()).dtype, copy=True)


def copy_of(model: PreTrainedModel, layers: dict[str, QuantizedWeight], ids: Tensor | None = None) -> PreTrainedModel:
    """The model with these layers in place of its own; everything else is in the model's own memory. With `ids` [n] it
    computes only these ids' logits. SpecDecError if its output layer is not linear.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    if ids is not None:
        output = copied.get_output_embeddings()  # type: ignore[no-untyped-call]
        name = next((name for name, one in copied.named_modules() if one is output), None)
        if name is None or not isinstance(output, nn.Linear | QuantizedLinear):
            raise SpecDecError(
                "the model computes its logits without a linear layer, so drafts cannot have a part of its ids",
                hint="build it without a draft vocabulary",
            )
        copied.set_submodule(name, rows_of(output, ids))
    place_quantized(copied, layers, DRAFT_ACTIVATIONS, with_kernels=model.config._attn_implementation == KERNEL)
    Step(copied).to(next(model.parameters()).device)
    return copied


def rows_of(layer: nn.Linear | QuantizedLinear, rows: Tensor) -> nn.Module:
    """A linear layer that has only these rows, `[n]` ids, of the given layer."""
    with present(layer), torch.no_grad():
        bias = None if layer.bias is None else nn.Parameter(layer.bias[rows], requires_grad=False)
        if isinstance(layer, QuantizedLinear):
            made = copy.copy(layer)
            made._buffers, made._parameters = dict(layer._buffers), dict(layer._parameters)
            for name, part in layer.quantized.by_output().items():
                setattr(made, name, part[rows])
            made.bias, made.out_features = bias, len(rows)
            return made
        own = nn.Linear(layer.in_features, len(rows), bias=bias is not None, device="meta")
        own.weight, own.bias = nn.Parameter(layer.weight[rows], requires_grad=False), bias  # type: ignore[assignment]
        return own


def write_layers(copied: PreTrainedModel, directory: Path) -> None:
    """Write the quantized layers of the copy, and the target's quantized layers if it has any."""
    layers = {name: one.quantized for name, one in copied.named_modules() if isinstance(one, QuantizedModule)}
    tensors = {f"{name}.{part}": tensor for name, one in layers.items() for part, tensor in one.tensors().items()}
    save_weights(directory / STEP_WEIGHTS, tensors)


def read_layers(directory: Path) -> dict[str, QuantizedWeight]:
    """Read the output of `write_layers`; SpecDecError if it is damaged."""
    try:
        return take_quantized(read_weights(directory / STEP_WEIGHTS))
    except SafetensorError as error:
        raise SpecDecError(
            f"`{directory / STEP_WEIGHTS}` is damaged: {error}", hint="build it again", code="engine"
        ) from error
