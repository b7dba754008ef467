"""Plans how each tensor of a model is written to the checkpoint: copied, quantized, or kept in its quantized form.

Also counts the weights that the checkpoint's dtype cannot hold.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.config import LayersActivations, QuantAlgo, QuantConfig, QuantFormat, Quantization
from runtime.checkpoint.quant.quantize import group_size_for, quantize_weight
from runtime.checkpoint.quant.weight import ACTIVATIONS, QuantizedWeight
from runtime.checkpoint.source import SourceTensor, load_tensors
from runtime.checkpoint.tensor_writer import Piece, forms_of
from runtime.util.errors import SpecDecError, SpecDecWarning

_ALGORITHMS: dict[str, QuantAlgo] = {"int8": "W8A16", "int4": "W4A16", "fp8": "FP8_PER_CHANNEL_PER_TOKEN"}
_FEW = 1e-4  # share of a sound model's weights that are so near zero that float16 has only zero for them


class Losses:
    """Counts the weights that are too large or too small for a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = str(dtype).removeprefix("torch.")
        self._num_weights = 0
        self._infinite: dict[str, int] = {}
        self._zero: dict[str, int] = {}

    def check(self, saved: Tensor, written: Tensor, entry: SourceTensor) -> None:
        """Count the numbers of a tensor that became infinite or 0 when they were cast from `saved` to `written`.
        SpecDecError if saved numbers are NaN or infinite already.
        """
        if not saved.dtype.is_floating_point:
            return
        self._num_weights += saved.numel()
        if not _are_finite(written):
            check_numbers(saved, entry.source_name, entry.file)
            self._infinite[entry.name] = int((~written.isfinite()).sum())
        if saved.dtype != written.dtype:
            num_zero = int(saved.count_nonzero() - written.count_nonzero())
            if num_zero:
                self._zero[entry.name] = num_zero

    def messages(self) -> list[str]:
        """Warnings about weights that became infinite, and about zeros if there are many."""
        said = []
        num_infinite, num_zero = sum(self._infinite.values()), sum(self._zero.values())
        if num_infinite:
            said.append(
                f"weights too large for {self._dtype} became infinite: {num_infinite:,}, such as in "
                f"`{next(iter(self._infinite))}`; bfloat16 holds them"
            )
        if num_zero > self._num_weights * _FEW:
            said.append(
                f"weights too small for {self._dtype} became zero: {num_zero:,} ({num_zero / self._num_weights:.2%}), "
                f"such as in `{max(self._zero, key=lambda name: self._zero[name])}`; bfloat16 holds them"
            )
        return said


def check_numbers(saved: Tensor, name: str, file: Path) -> None:
    """SpecDecError if saved weights are NaN or infinite."""
    if saved.dtype.is_floating_point and not _are_finite(saved):
        num_bad = int((~saved.isfinite()).sum())
        raise SpecDecError(
            f"{num_bad:,} of {saved.numel():,} numbers of `{name}` are NaN or infinite: {file}",
            hint="the model is damaged; download it again, or train it again",
        )


def load_numbers(tensors: Seq[SourceTensor]) -> list[Tensor]:
    """The tensors' values. SpecDecError if a number is NaN or infinite, or a file has changed."""
    loaded = load_tensors(tensors)
    for one, values in zip(tensors, loaded, strict=True):
        if one.is_float:
            check_numbers(values, one.source_name, one.file)
    return loaded


def _are_finite(weights: Tensor) -> bool:
    """True if no number is NaN or infinite, seen from the two extremes in a fortieth of the time."""
    return not weights.numel() or all(bool(extreme.isfinite()) for extreme in weights.aminmax())


@dataclass(frozen=True)
class PrequantizedLayer:
    """A layer that is quantized in the file: the tensors of its weight, and the function that reads them."""

    parts: Mapping[str, SourceTensor]
    read: Callable[[dict[str, Tensor]], QuantizedWeight]
    quant_algo: QuantAlgo

    def load(self) -> QuantizedWeight:
        """The layer's weight, checked; SpecDecError if its tensors do not fit each other or a file has changed."""
        weight = self.read(dict(zip(self.parts, load_tensors(list(self.parts.values())), strict=True)))
        weight.check(next(iter(self.parts.values())).source_name.rpartition(".")[0])
        return weight


@dataclass(frozen=True)
class Source:
    """A model to be converted, and what its config says of its tensors."""

    config: dict[str, Any]
    """The model's config, without its quantization."""
    tensors: list[SourceTensor]
    """Tensors outside of quantized layers."""
    layers: dict[str, PrequantizedLayer]
    linears: list[str]
    """Linear layers that can be quantized."""
    transposed: Collection[str]
    """Linear layers whose weights are [inputs, outputs] in the model."""
    head: str | None
    """Linear layer that computes logits; None if no linear layer does."""
    name: str
    """The model's name, as it was given."""
    format: str | None = None
    """Format of the quantized layers in the model's files, such as `AWQ`."""
    experts: Collection[str] = ()
    """Names in `layers` that hold all experts of a layer, and stay quantized."""


def plan_pieces(
    source: Source, dtype_of: Callable[[str], torch.dtype], precision: QuantConfig, losses: Losses
) -> tuple[list[Piece], Quantization | None]:
    """The pieces to write, and the checkpoint's quantization record, None without quantization. A tensor that is not
    quantized has the dtype that `dtype_of` gives for its name.
    """
    quantized = {} if precision.qformat is None else _sizes(source, precision)
    pieces = [
        _quantized(tensor, precision, quantized[name], losses, is_transposed=name in source.transposed)
        if (name := tensor.name.removesuffix(".weight")) in quantized
        else _copied(tensor, dtype_of(tensor.name), losses)
        for tensor in source.tensors
    ]
    layers = source.layers | _tied_head(source)
    read = {name: _read(name, layer, source, dtype_of(f"{name}.weight")) for name, layer in layers.items()}
    pieces += [piece for piece, _ in read.values()]
    kept = {name: weight for name, (_, weight) in read.items() if weight is not None}
    _check_activations(precision, {precision.qformat} if quantized else {weight.kind for weight in kept.values()})
    if quantized:
        pieces += _untied_head(source, precision, quantized, losses)
        return pieces, _quantized_as(source, precision, quantized)
    if kept:
        return pieces, _read_as(source, precision, layers, kept)
    if precision.kv_cache is not None:
        return pieces, Quantization(None, precision.kv_cache, source="none", unrounded=source.name)
    return pieces, None


def quantize_experts(pieces: Seq[Piece], experts: Mapping[str, bool], precision: QuantConfig) -> list[Piece]:
    """The pieces with `experts` quantized like linear layers; True marks [experts, inputs, outputs]."""
    return [
        _with_quantized_experts(piece, experts, precision) if experts.keys() & piece.forms else piece
        for piece in pieces
    ]


def _with_quantized_experts(piece: Piece, experts: Mapping[str, bool], precision: QuantConfig) -> Piece:
    """The piece with its experts quantized. Ernie 4.5 VL has a piece of two such weights, for texts and images."""
    group_sizes = {
        name: _group_size_of_experts(name, shape[1 if experts[name] else 2], precision)
        for name, (_, shape) in piece.forms.items()
        if name in experts
    }

    def quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
        if name not in experts:
            return {name: weight}
        rows = (weight.transpose(1, 2) if experts[name] else weight).flatten(0, 1)
        return _named(name, quantize_weight(rows, precision, group_sizes[name]))

    def all_quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {part: made for name, weight in tensors.items() for part, made in quantized(name, weight).items()}

    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in piece.forms.items()}
    return Piece(piece.sources, forms_of(all_quantized(empty)), lambda values: all_quantized(piece.make(values)))


def _group_size_of_experts(name: str, num_inputs: int, precision: QuantConfig) -> int:
    if precision.qformat == "int4" and num_inputs % 2:
        raise _odd(name, num_inputs)
    return group_size_for(name, num_inputs, precision.group_size)


def _odd(name: str, num_inputs: int) -> SpecDecError:
    return SpecDecError(
        f"numbers of 4 bits are stored in pairs, and `{name}` has an odd number of inputs: {num_inputs}",
        hint="quantize to int8",
    )


def _sizes(source: Source, precision: QuantConfig) -> dict[str, int]:
    """Group sizes of the layers to quantize, by name. SpecDecError if there is no such layer, if groups do not divide a
    layer's inputs, or if 4-bit numbers have no pair.
    """
    matrices = {tensor.name.removesuffix(".weight"): tensor for tensor in source.tensors if len(tensor.shape) == 2}
    inputs = {name: tensor.shape[0 if name in source.transposed else 1] for name, tensor in matrices.items()}
    names = [name for name in source.linears if name in inputs and name != source.head]
    if not names:
        kind, has_others = source.config["model_type"], any(name != source.head for name in source.linears)
        raise SpecDecError(
            f"the model's linear layers have other names in its files, and cannot be quantized: {kind}"
            if has_others
            else f"the model has no linear layers that can be quantized: {kind}",
            hint="convert the model without quantizing it",
        )
    if precision.quantize_lm_head and source.head is not None and source.head not in source.linears:
        kind = source.config["model_type"]
        warnings.warn(
            f"`{source.head}` is not quantized: transformers keeps it in float32 ({kind})", SpecDecWarning, stacklevel=4
        )
    elif precision.quantize_lm_head and source.head is not None:
        names.append(source.head)
        inputs.setdefault(source.head, _tied(source).shape[-1])
    sizes = {name: group_size_for(name, inputs[name], precision.group_size) for name in names}
    odd = next((name for name in names if precision.qformat == "int4" and inputs[name] % 2), None)
    if odd is not None:
        raise _odd(odd, inputs[odd])
    return sizes


def _tied(source: Source) -> SourceTensor:
    """The embeddings, which an output layer without a weight uses. SpecDecError if the model has none by that name."""
    found = next((tensor for tensor in source.tensors if tensor.name.endswith("embed_tokens.weight")), None)
    if found is None:
        raise SpecDecError(
            f"the layer that computes logits has no weight of its own to quantize: {source.config['model_type']}",
            hint="do not quantize that layer",
        )
    return found


def _untied_head(source: Source, precision: QuantConfig, sizes: dict[str, int], losses: Losses) -> list[Piece]:
    """A quantized copy of tied embeddings, for the output layer."""
    head = source.head
    if head is None or head not in sizes or _has_own_weight(source, head):
        return []
    return [_quantized(replace(_tied(source), name=f"{head}.weight"), precision, sizes[head], losses)]


def _tied_head(source: Source) -> dict[str, PrequantizedLayer]:
    """The output layer, if it has no weight and the embeddings are quantized (GGUF). It keeps their bits, since each
    token reads all of it. The embeddings themselves are written dequantized: a token reads a single row.
    """
    if source.head is None or source.head in source.layers or _has_own_weight(source, source.head):
        return {}
    embeddings = [layer for name, layer in source.layers.items() if name.endswith("embed_tokens")]
    return {source.head: embeddings[0]} if embeddings else {}


def _has_own_weight(source: Source, name: str) -> bool:
    return any(tensor.name == f"{name}.weight" for tensor in source.tensors)


def _copied(tensor: SourceTensor, dtype: torch.dtype, losses: Losses) -> Piece:
    written = dtype if tensor.is_float else tensor.dtype

    def make(values: list[Tensor]) -> dict[str, Tensor]:
        cast = values[0].to(written)
        losses.check(values[0], cast, tensor)
        return {tensor.name: cast}

    return Piece((tensor,), {tensor.name: (written, tensor.shape)}, make)


def _quantized(
    tensor: SourceTensor, precision: QuantConfig, group_size: int, losses: Losses, *, is_transposed: bool = False
) -> Piece:
    name = tensor.name.removesuffix(".weight")

    def quantized(weight: Tensor) -> dict[str, Tensor]:
        return _named(name, quantize_weight(weight.t() if is_transposed else weight, precision, group_size))

    def make(values: list[Tensor]) -> dict[str, Tensor]:
        losses.check(values[0], values[0], tensor)
        return quantized(values[0])

    forms = forms_of(quantized(tensor.without_values()))
    return Piece((tensor,), forms, make)


def _read(
    name: str, layer: PrequantizedLayer, source: Source, dtype: torch.dtype
) -> tuple[Piece, QuantizedWeight | None]:
    """The piece that writes a layer of the file. A linear layer, or a layer's experts, stays quantized, and its weight
    without values comes beside the piece; other weights, such as embeddings, are dequantized.
    """
    keys = tuple(layer.parts)
    without_values = layer.read({key: tensor.without_values() for key, tensor in layer.parts.items()})
    without_values.check(name)
    is_kept = name in source.linears or name in source.experts

    def make(values: list[Tensor]) -> dict[str, Tensor]:
        weight = layer.read(dict(zip(keys, values, strict=True)))
        weight.check(name)
        return _named(name, weight) if is_kept else {f"{name}.weight": weight.dequantize(dtype)}

    forms = forms_of(_named(name, without_values)) if is_kept else {f"{name}.weight": (dtype, without_values.shape)}
    return Piece(tuple(layer.parts.values()), forms, make), without_values if is_kept else None


def _named(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    return {f"{name}.{part}": tensor for part, tensor in weight.tensors().items()}


def _quantized_as(source: Source, precision: QuantConfig, sizes: dict[str, int]) -> Quantization:
    assert precision.qformat is not None
    return Quantization(
        _ALGORITHMS[precision.qformat],
        precision.kv_cache,
        precision.group_size,
        exclude_modules=_left_out(source, sizes),
        activations=precision.activations or _default_activations({precision.qformat}),
        unrounded=source.name,
    )


def _read_as(
    source: Source, precision: QuantConfig, layers: Mapping[str, PrequantizedLayer], kept: dict[str, QuantizedWeight]
) -> Quantization:
    algorithms = {layers[name].quant_algo for name in kept}
    sizes = {weight.group_size for weight in kept.values() if weight.group_size != weight.shape[1]}
    layers_kinds = {weight.kind for name, weight in kept.items() if name != source.head}
    head_kind = kept[source.head].kind if source.head in kept else None
    return Quantization(
        algorithms.pop() if len(algorithms) == 1 else "MIXED_PRECISION",
        precision.kv_cache,
        sizes.pop() if len(sizes) == 1 else None,
        has_zero_point=any(weight.zeros is not None or weight.offsets is not None for weight in kept.values()),
        exclude_modules=_left_out(source, kept),
        activations=precision.activations or _default_activations(layers_kinds, head_kind),
        source=str(source.format),
    )


def _check_activations(precision: QuantConfig, kinds: Collection[str | None]) -> None:
    """SpecDecError for activations of integers if no layer's weights are integers."""
    if precision.activations not in (None, "float") and not {"int8", "int4"} & set(kinds):
        raise SpecDecError(
            f"quantized activations need weights that are integers, and this model has none: {precision.activations}",
            hint="leave the activations as they are, or quantize the weights to int8 or int4",
        )


def _default_activations(layers: Collection[QuantFormat], head: QuantFormat | None = None) -> LayersActivations:
    """Format of activations for layers and an output layer of these kinds. It is the same for all layers, unless an
    8-bit output layer's format would slow down the 4-bit layers before it.
    """
    if head == "int8" and "int4" in layers and "int8" not in layers:
        return "mixed"
    kinds = {*layers, head}
    return ACTIVATIONS["int8" if "int8" in kinds else "int4" if "int4" in kinds else "fp8"]


def _left_out(source: Source, quantized: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name for name in source.linears if name not in quantized)
