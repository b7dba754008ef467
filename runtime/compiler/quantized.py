"""Linear layers whose weights are in few bits, multiplied by tokens as they are, or quantized to 8 or 16 bits."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from runtime.compiler.kernels import kernel_group_size
from runtime.config import Activations, LayersActivations
from runtime.errors import SpecDecError
from runtime.quantization.weight import ACTIVATIONS, QuantizedWeight

_TOKEN_BITS: dict[Activations, int] = {"float": 0, "int8": 8, "int16": 16}
_LARGEST = {8: 127, 16: 127 * 256 + 127}
"""A token's integers: of 16 bits both halves, the lower one with its sign, are of the size of 8."""


def fake_quantize_tokens(x: Tensor, columns: int, bits: int) -> Tensor:
    """(..., inputs) `x` quantized to this number of bits, per token and group of columns."""
    groups = x.float().reshape(*x.shape[:-1], -1, columns)
    steps = groups.abs().amax(-1, keepdim=True) / _LARGEST[bits]
    is_nothing = steps < torch.finfo(torch.float32).tiny
    rounded = torch.where(is_nothing, 0.0, (groups / steps).round() * steps)
    # Of a token with numbers that are none the kernels have none left in a group.
    return torch.where(steps.isfinite(), rounded, torch.nan).flatten(-2)


class QuantizedLinear(nn.Module):
    """A linear layer that holds its weight as it is in the checkpoint.

    Its product is the kernels' where they are loaded, and torch's with a dequantized weight elsewhere.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    order: Tensor | None

    packed: Tensor | None
    """The weight in the kernels' layout, if it is not packed for a compiled step."""

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, activations: LayersActivations, *, with_kernels: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for name in ("values", "scales", "zeros", "offsets", "order"):
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("packed", None, persistent=False)
        self.bias = bias
        self.with_kernels = with_kernels
        own = ACTIVATIONS[weight.kind] if activations == "mixed" else activations
        self.token_bits = 0 if weight.kind == "fp8" else _TOKEN_BITS[own]

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scales, self.zeros, self.offsets, self.order)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        if self.with_kernels:
            packed = self.pack() if self.packed is None else self.packed
            outputs: Tensor = torch.ops.specdec.quantized_linear(
                x, packed, self.bias, self.out_features, 0, self.token_bits
            )
            return outputs
        weight = self.quantized.in_stored_order()
        if not self.token_bits:
            return nn.functional.linear(x, weight.to(x.dtype), self.bias)
        bias = None if self.bias is None else self.bias.float()
        quantized = fake_quantize_tokens(x, kernel_group_size(self.quantized.group_size), self.token_bits)
        return nn.functional.linear(quantized, weight, bias).to(x.dtype)

    def pack(self) -> Tensor:
        packed: Tensor = torch.ops.specdec.pack_quantized(self.values, self.scales, self.zeros, self.offsets)
        return packed


def place_quantized(
    model: PreTrainedModel, weights: dict[str, QuantizedWeight], activations: LayersActivations, *, with_kernels: bool
) -> None:
    """Put quantized weights in the place of the layers' own."""
    for name, weight in weights.items():
        parent_name, _, child = name.rpartition(".")
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if layer is None or _form(layer) != weight.shape:
            raise SpecDecError(
                f"the checkpoint has a weight of {list(weight.shape)} that the model has no layer for: {name}",
                hint="convert the model again",
                code="checkpoint",
            )
        bias = layer.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        quantized = QuantizedLinear(weight, bias, activations, with_kernels=with_kernels)
        setattr(model.get_submodule(parent_name), child, quantized)


def _form(layer: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer."""
    if isinstance(layer, nn.Linear | QuantizedLinear):
        return layer.out_features, layer.in_features
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else None


def pack_layers(model: nn.Module) -> None:
    """Once, where no compiler does so: the kernels must be loaded."""
    for layer in quantized_layers(model):
        if layer.with_kernels:
            layer.packed = layer.pack()


def placeholders(
    weights: dict[str, QuantizedWeight], dtype: torch.dtype, transposed: Collection[str]
) -> dict[str, Tensor]:
    """Placeholders of the shapes that the model has of the weights, without memory, while it is loaded."""
    shapes = {name: weight.shape[::-1] if name in transposed else weight.shape for name, weight in weights.items()}
    return {f"{name}.weight": torch.zeros((), dtype=dtype).expand(shape) for name, shape in shapes.items()}


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """Compute quantized layers by torch in the block, as the reference for the kernels."""
    layers = [(layer, layer.with_kernels) for layer in quantized_layers(model)]
    for layer, _ in layers:
        layer.with_kernels = False
    try:
        yield
    finally:
        for layer, before in layers:
            layer.with_kernels = before


def quantized_layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))
