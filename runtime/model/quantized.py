"""Linear layers with quantized weights. Their inputs stay as they are, or are quantized to 8 or 16 bits."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from runtime.checkpoint.config import Activations, LayersActivations
from runtime.checkpoint.quant.weight import ACTIVATIONS, QuantizedWeight
from runtime.kernels.ops import kernel_group_size
from runtime.model.weights import present
from runtime.util.errors import SpecDecError

EXPERTS_KERNEL = "specdec_kernel"
"""Name under which `runtime.model.experts` is registered with transformers."""
_TOKEN_BITS: dict[Activations, int] = {"float": 0, "int8": 8, "int16": 16}
_ROWS_COMPARED = 4096
"""Rows of embeddings that are compared at a time, few enough for a processor's cache."""
_LARGEST = {8: 127, 16: 127 * 256 + 127}
"""Largest integer of a quantized token, by bits. 127 x 256 + 127 is two bytes of which the lower has a sign too."""


def fake_quantize_tokens(x: Tensor, columns: int, bits: int) -> Tensor:
    """`x` [..., inputs] quantized to `bits` bits and dequantized, for each token and group of `columns` columns."""
    groups = x.float().reshape(*x.shape[:-1], -1, columns)
    steps = groups.abs().amax(-1, keepdim=True) / _LARGEST[bits]
    is_nothing = steps < torch.finfo(torch.float32).tiny
    rounded = torch.where(is_nothing, 0.0, (groups / steps).round() * steps)
    # As in the kernels, one NaN or infinity makes NaN of the token's whole group.
    return torch.where(steps.isfinite(), rounded, torch.nan).flatten(-2)


class QuantizedModule(nn.Module):
    """A module that holds a weight in its checkpoint form."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    order: Tensor | None
    book: Tensor | None

    packed: Tensor | None
    """The weight in the kernels' layout; None where a compiled step has its own (`pack_layers`)."""

    def __init__(self, weight: QuantizedWeight, activations: LayersActivations, *, with_kernels: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for name in ("values", "scales", "zeros", "offsets", "order", "book"):
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("packed", None, persistent=False)
        self.with_kernels = with_kernels
        own = ACTIVATIONS[weight.kind] if activations == "mixed" else activations
        self.token_bits = 0 if weight.kind == "fp8" else _TOKEN_BITS[own]

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scales, self.zeros, self.offsets, self.order, self.book)

    def pack(self) -> Tensor:
        """The weight in the kernels' layout."""
        return self._pack(self.values, self.scales, self.zeros, self.offsets)

    def _pack(self, values: Tensor | None, scales: Tensor | None, *others: Tensor | None) -> Tensor:
        kernels = torch.ops.specdec
        packed: Tensor = (
            kernels.pack_quantized(values, scales, *others)
            if self.book is None
            else kernels.pack_codes(values, scales, self.book)
        )
        return packed

    def _ordered(self, x: Tensor) -> Tensor:
        """`x` [..., inputs] with its columns in the order in which the weight's are stored."""
        return x if self.order is None else x[..., self.order]

    def _rounded(self, x: Tensor) -> Tensor:
        """The tokens `x`, quantized as the kernels quantize them."""
        if not self.token_bits:
            return x
        return fake_quantize_tokens(x, kernel_group_size(self.quantized.group_size), self.token_bits)


class QuantizedLinear(QuantizedModule):
    """A linear layer: a kernel multiplies by the quantized weight, or torch by the dequantized weight."""

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, activations: LayersActivations, *, with_kernels: bool
    ) -> None:
        super().__init__(weight, activations, with_kernels=with_kernels)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
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
        return nn.functional.linear(self._rounded(x), weight, bias).to(x.dtype)


class QuantizedExperts(QuantizedModule):
    """Weights of all experts of a layer, stacked by outputs, in place of a parameter.

    transformers' own code for experts gets dequantized weights of the experts it looks up, in the model's dtype and
    layout; the kernel (`runtime.model.experts`) multiplies by the quantized weights.
    """

    numbers: Tensor
    """An empty tensor of the dtype in which the model computes."""

    def __init__(
        self, weight: QuantizedWeight, own: nn.Parameter, activations: LayersActivations, *, is_transposed: bool,
        with_kernels: bool,
    ) -> None:  # fmt: skip
        super().__init__(weight, activations, with_kernels=with_kernels)
        self.num_experts, self.is_transposed = own.shape[0], is_transposed
        self.out_features //= self.num_experts
        self.register_buffer("numbers", torch.empty(0, dtype=own.dtype), persistent=False)

    def __getitem__(self, ids: Tensor | int) -> Tensor:
        """Dequantized weights of these experts, [..., outputs, inputs] or [..., inputs, outputs]."""
        ids = torch.as_tensor(ids)  # Nemotron-H's take them one at a time
        weight = self._of(ids).dequantize(self.numbers.dtype).reshape(*ids.shape, self.out_features, self.in_features)
        return weight.mT if self.is_transposed else weight

    def _of(self, ids: Tensor) -> QuantizedWeight:
        """The weights of these experts, stacked by outputs."""
        whole = self.quantized
        rows = {name: self._by_expert(one)[ids].flatten(0, -2) for name, one in whole.by_output().items()}
        return replace(whole, **rows)

    def by_torch(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Product by torch, the kernel's reference: [S, outputs] from tokens [S, inputs], each with one expert."""
        weight = self._of(chosen).in_stored_order().view(len(chosen), self.out_features, self.in_features)
        read = self._rounded(self._ordered(x))
        return torch.einsum("soi,si->so", weight.to(read.dtype), read).to(x.dtype)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Product [S x k, outputs] of `x`, [S, inputs] or [S x k, inputs], with the experts `chosen`, [S x k]."""
        x = self._ordered(x)
        packed = self.pack() if self.packed is None else self.packed
        products: Tensor = torch.ops.specdec.experts_linear(x, packed, chosen, self.out_features, 0, self.token_bits)
        return products

    def pack(self) -> Tensor:
        """The weights in the kernels' layout, whole panels for each expert."""
        beyond = -self.out_features % torch.ops.specdec.panel()
        parts = (self.values, self.scales, self.zeros, self.offsets)
        return self._pack(*(self._with_rows(part, beyond) for part in parts))

    def _by_expert(self, part: Tensor) -> Tensor:
        return part.view(self.num_experts, -1, part.shape[1])

    def _with_rows(self, part: Tensor | None, beyond: int) -> Tensor | None:
        if part is None or not beyond:
            return part
        rows = self._by_expert(part)
        return torch.cat([rows, rows[:, :1].expand(-1, beyond, -1)], 1).flatten(0, 1)  # the rows beyond are never read


def place_quantized(
    model: PreTrainedModel, weights: dict[str, QuantizedWeight], activations: LayersActivations, *, with_kernels: bool
) -> None:
    """Put quantized weights in place of the layers' and experts' own. SpecDecError for a weight that fits no layer."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        parent_name, _, child = name.rpartition(".")
        own = parameters.get(name)
        if own is not None and own.dim() == 3:
            _place_experts(model.get_submodule(parent_name), child, weight, activations, with_kernels=with_kernels)
            model.set_experts_implementation(EXPERTS_KERNEL if with_kernels else "eager")
            continue
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if layer is None or _form(layer) != weight.shape:
            raise _no_layer_for(weight, name)
        bias = layer.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        quantized = QuantizedLinear(weight, bias, activations, with_kernels=with_kernels)
        setattr(model.get_submodule(parent_name), child, quantized)


def _place_experts(
    experts: nn.Module, name: str, weight: QuantizedWeight, activations: LayersActivations, *, with_kernels: bool
) -> None:
    own, is_transposed = getattr(experts, name), bool(experts.is_transposed)
    num_experts, outputs, inputs = (own.mT if is_transposed else own).shape
    if weight.shape != (num_experts * outputs, inputs):
        raise _no_layer_for(weight, name)
    placed = QuantizedExperts(weight, own, activations, is_transposed=is_transposed, with_kernels=with_kernels)
    delattr(experts, name)  # torch puts no module in the place of a parameter
    setattr(experts, name, placed)


def _no_layer_for(weight: QuantizedWeight, name: str) -> SpecDecError:
    return SpecDecError(
        f"the checkpoint has a weight of {list(weight.shape)} that the model has no layer for: {name}",
        hint="convert the model again",
        code="checkpoint",
    )


def _form(layer: nn.Module) -> tuple[int, int] | None:
    """Numbers of outputs and inputs of a linear layer; None for another layer."""
    if isinstance(layer, nn.Linear | QuantizedLinear):
        return layer.out_features, layer.in_features
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else None


def pack_layers(model: nn.Module) -> None:
    """Pack the weights once, for a model that no compiler packs; the kernels must be loaded."""
    for layer in quantized_layers(model):
        if layer.with_kernels:
            layer.packed = layer.pack()


def placeholders(
    weights: dict[str, QuantizedWeight],
    dtype: torch.dtype,
    transposed: Collection[str],
    experts: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Zeros that take no memory, in the shapes of the model's weights, for loading the model. `experts` has the shapes
    of weights that hold all experts of a layer, by name.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in weights.items():
        if name in experts:
            shapes[name] = experts[name]
        else:
            shapes[f"{name}.weight"] = weight.shape[::-1] if name in transposed else weight.shape
    return {name: torch.zeros((), dtype=dtype).expand(shape) for name, shape in shapes.items()}


def tied_output(model: PreTrainedModel) -> QuantizedLinear | None:
    """The output layer, if its quantized numbers are also the embeddings, as in a GGUF file with tied embeddings;
    otherwise None. None also for fp8, codes, reordered inputs, and zero points or offsets, which the kernels add in
    another order, so that they round differently.
    """
    table: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(table, nn.Embedding) or not isinstance(output, QuantizedLinear):
        return None
    weight = output.quantized
    is_plain = all(one is None for one in (weight.zeros, weight.offsets, weight.order, weight.book))
    if not is_plain or weight.kind == "fp8" or weight.shape != tuple(table.weight.shape):
        return None
    with present(table, output):
        rows = torch.split(torch.arange(len(weight.values)), _ROWS_COMPARED)
        is_same = (torch.equal(weight.rows(some).dequantize(table.weight.dtype), table.weight[some]) for some in rows)
        return output if all(is_same) else None


@contextmanager
def without_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Have torch compute quantized layers within the block, as the reference for the kernels."""
    layers = [(layer, layer.with_kernels) for layer in quantized_layers(model)]
    has_experts = any(isinstance(layer, QuantizedExperts) for layer, _ in layers)
    experts = model.get_experts_implementation()
    for layer, _ in layers:
        layer.with_kernels = False
    if has_experts:
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        for layer, before in layers:
            layer.with_kernels = before
        if has_experts:
            model.set_experts_implementation(experts)


def quantized_layers(model: nn.Module) -> Iterator[QuantizedModule]:
    return (module for module in model.modules() if isinstance(module, QuantizedModule))
