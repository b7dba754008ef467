"""Linear layers whose weights are in few bits: dequantized as they are multiplied."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.errors import SpecDecError
from runtime.quantization.weight import QuantizedWeight


class QuantizedLinear(nn.Module):
    """A linear layer that holds its weight as it is in the checkpoint.

    Its product is the kernels' where they are loaded, and torch's with a dequantized weight elsewhere.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None, *, with_kernels: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for name in ("values", "scales", "zeros", "offsets", "order"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = bias
        self.with_kernels = with_kernels

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scales, self.zeros, self.offsets, self.order)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        if self.with_kernels:
            outputs: Tensor = torch.ops.specdec.quantized_linear(
                x, self.values, self.scales, self.zeros, self.offsets, self.bias
            )
            return outputs
        return nn.functional.linear(x, self.quantized.in_stored_order().to(x.dtype), self.bias)


def place_quantized(model: PreTrainedModel, weights: dict[str, QuantizedWeight], *, with_kernels: bool) -> None:
    """Put quantized weights in the place of the layers' own."""
    for name, weight in weights.items():
        parent_name, _, child = name.rpartition(".")
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if (
            not isinstance(layer, nn.Linear | QuantizedLinear)
            or (layer.out_features, layer.in_features) != weight.shape
        ):
            raise SpecDecError(
                f"the checkpoint has a weight of {list(weight.shape)} that the model has no layer for: {name}",
                hint="convert the model again",
                fact="checkpoint",
            )
        setattr(model.get_submodule(parent_name), child, QuantizedLinear(weight, layer.bias, with_kernels=with_kernels))


def placeholders(weights: dict[str, QuantizedWeight], dtype: torch.dtype) -> dict[str, Tensor]:
    """In the place of the weights for as long as the model is loaded, of their shapes and of no memory."""
    return {f"{name}.weight": torch.zeros((), dtype=dtype).expand(weight.shape) for name, weight in weights.items()}


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """In the block quantized layers are computed by torch: what the kernels are compared with."""
    layers = [(layer, layer.with_kernels) for layer in _quantized_layers(model.modules())]
    for layer, _ in layers:
        layer.with_kernels = False
    try:
        yield
    finally:
        for layer, before in layers:
            layer.with_kernels = before


def _quantized_layers(modules: Iterable[nn.Module]) -> Iterator[QuantizedLinear]:
    return (module for module in modules if isinstance(module, QuantizedLinear))
