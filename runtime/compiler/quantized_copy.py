"""The copy by which a model drafts for itself: the same model with the weights of its linear layers in fewer bits.

It is compiled as a step of its own, in a directory of its own within the engine's. What it does not quantize is the
target's own memory: embeddings, norms, the layer that computes logits, and the K/V pools.
"""

import copy
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from runtime.compiler.attention import KERNEL
from runtime.compiler.compilation import WEIGHTS
from runtime.compiler.model import Step, linear_layers
from runtime.compiler.quantized import QuantizedLinear, QuantizedModule, place_quantized
from runtime.compiler.weights import present, read_weights, save_weights
from runtime.config import Activations, QuantConfig, SelfDraft
from runtime.errors import SpecDecError
from runtime.quantization.quantize import group_size_for, quantize_weight
from runtime.quantization.weight import QuantizedWeight, take_quantized

COPY_ACTIVATIONS: Activations = "int8"
"""Activations of the copy's layers: drafts are verified, so the fastest format is best."""


def quantize_layers(
    model: PreTrainedModel, pretrained: PreTrainedConfig, self_draft: SelfDraft
) -> dict[str, QuantizedWeight]:
    """The weights of the copy's linear layers, quantized as a conversion does; what computes logits stays as it is.

    Layers that are in as few bits already stay too. SpecDecError if that leaves none.
    """
    names, head = linear_layers(pretrained)
    bits = 4 if self_draft.qformat == "int4" else 8
    layers: dict[str, QuantizedWeight] = {}
    for name in names:
        layer = model.get_submodule(name)
        if name == head or (isinstance(layer, QuantizedLinear) and layer.quantized.bits <= bits):
            continue
        with present(layer):
            layers[name] = _quantized(name, _weight(layer), self_draft)
    if not layers:
        raise SpecDecError(
            f"the model has no linear layers of more bits than its copy's would have: {self_draft.qformat}",
            hint="build it without a copy that drafts",
            code="nothing_to_quantize",
        )
    return layers


def _quantized(name: str, weight: Tensor, self_draft: SelfDraft) -> QuantizedWeight:
    group_size = group_size_for(name, weight.shape[1], self_draft.group_size)
    if self_draft.qformat == "int4" and weight.shape[1] % 2:
        raise SpecDecError(
            f"numbers of 4 bits are stored in pairs, and `{name}` has an odd number of inputs: {weight.shape[1]}",
            hint="quantize to int8",
        )
    quantized = quantize_weight(weight, QuantConfig(self_draft.qformat), group_size)
    quantized.check(name)
    return quantized


def _weight(layer: nn.Module) -> Tensor:
    if isinstance(layer, QuantizedLinear):
        return layer.quantized.dequantize()
    assert isinstance(layer, nn.Linear | Conv1D)
    weight = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


def copy_of(model: PreTrainedModel, layers: dict[str, QuantizedWeight]) -> PreTrainedModel:
    """The model with these layers in the place of its own, and all else in the model's own memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    place_quantized(copied, layers, COPY_ACTIVATIONS, with_kernels=model.config._attn_implementation == KERNEL)
    Step(copied).to(next(model.parameters()).device)
    return copied


def write_layers(copied: PreTrainedModel, directory: Path) -> None:
    """The quantized layers of the copy, and of the model that it is of, where that has any."""
    layers = {name: one.quantized for name, one in copied.named_modules() if isinstance(one, QuantizedModule)}
    tensors = {f"{name}.{part}": tensor for name, one in layers.items() for part, tensor in one.tensors().items()}
    save_weights(directory / WEIGHTS, tensors)


def read_layers(directory: Path) -> dict[str, QuantizedWeight]:
    """Read the output of `write_layers`; SpecDecError if it is damaged."""
    try:
        return take_quantized(read_weights(directory / WEIGHTS))
    except SafetensorError as error:
        raise SpecDecError(
            f"`{directory / WEIGHTS}` is damaged: {error}", hint="build it again", code="engine"
        ) from error
