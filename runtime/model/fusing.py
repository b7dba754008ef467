"""Weights that are in pieces in the files and one tensor in the model, such as experts': they are joined as
transformers joins them.

A checkpoint has them joined, so loading need not join them, and the plan of a tensor-parallel split refers to them in
this form.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from runtime.checkpoint.quant.planning import PrequantizedLayer
from runtime.checkpoint.quant.weight import QuantizedWeight
from runtime.checkpoint.tensor_writer import Forms, Piece, forms_of
from runtime.util.errors import SpecDecError


@dataclass(frozen=True)
class _Fused:
    """A weight of the model and the tensors that form it: their names, and the converter's patterns."""

    model: PreTrainedModel
    target: str
    converter: WeightConverter
    parts: list[tuple[str, str]]

    def convert(self, parts: Seq[Tensor]) -> dict[str, Tensor]:
        """The target weight, and others that transformers makes of the same tensors (Ernie 4.5 VL's for images)."""
        one = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.parts, parts, strict=True):
            one.add_tensor(self.target, name, pattern, tensor)  # type: ignore[arg-type]  # it takes functions too
        made = one.convert(self.target, model=self.model, config=self.model.config)
        tensors = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def convert_forms(self, forms: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> Forms:
        """Shapes as from `convert`, without numbers; empty if the shapes do not fit together."""
        try:
            return forms_of(self.convert([torch.empty(size, dtype=dtype, device="meta") for dtype, size in forms]))
        except (KeyError, RuntimeError, ValueError):
            return {}


def _group(model: PreTrainedModel, names: Iterable[str], wanted: Container[str]) -> dict[str, _Fused]:
    """The `wanted` weights of the model that are formed from tensors with these names."""
    mapping = get_model_conversion_mapping(model)
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        target, pattern = rename_source_key(name, [], converters)
        if pattern is not None and target in wanted:
            parts.setdefault(target, []).append((name, pattern))
    return {
        target: _Fused(model, target, by_pattern[found[0][1]], sorted(found, key=lambda part: dot_natural_key(part[0])))
        for target, found in parts.items()
    }


def fused_names(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Yield the model's names for the weights stored under these names, after joining or splitting."""
    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    targets = {pattern: one.target_patterns for one in converters for pattern in one.source_patterns}
    for name in names:
        found, pattern = rename_source_key(name, [], converters)
        yield found
        first, *others = targets.get(pattern or "", [""])
        yield from (found.replace(first, other) for other in others)


def fuse(model: PreTrainedModel, pieces: Seq[Piece], wanted: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    """The pieces, with one piece for each `wanted` weight in place of its parts. `wanted` has the shapes in the model,
    which may be on `meta`. SpecDecError for a weight that cannot be joined.
    """
    by_name = {next(iter(piece.forms)): piece for piece in pieces}
    groups = _group(model, by_name, wanted)
    taken = {name for group in groups.values() for name, _ in group.parts}
    others = [piece for name, piece in by_name.items() if name not in taken]
    return others + [_fused(group, by_name, wanted[target]) for target, group in groups.items()]


def _fused(group: _Fused, by_name: Mapping[str, Piece], shape: tuple[int, ...]) -> Piece:
    parts = [(by_name[name], name) for name, _ in group.parts]

    def make(values: list[Tensor]) -> dict[str, Tensor]:
        tensors: list[Tensor] = []
        rest = values
        for piece, name in parts:
            own, rest = rest[: len(piece.sources)], rest[len(piece.sources) :]
            tensors.append(piece.make(own)[name])
        return group.convert(tensors)

    forms = group.convert_forms(piece.forms[name] for piece, name in parts)
    found = forms[group.target][1] if group.target in forms else None
    if found != shape:
        wrong = "do not have all of the weights of a layer's experts"
        if found is not None:
            wrong = (
                f"have weights of a layer's experts that are {list(found)} together, and by config.json {list(shape)}"
            )
        raise SpecDecError(f"the model's files {wrong}: {group.target}", hint="download or save the model again")
    return Piece(tuple(source for piece, _ in parts for source in piece.sources), forms, make)


def fuse_layers(
    model: PreTrainedModel, layers: Mapping[str, PrequantizedLayer], wanted: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, PrequantizedLayer], dict[str, PrequantizedLayer]]:
    """Join quantized layers into the `wanted` weights [experts, outputs, inputs] without dequantizing; also return the
    layers left over. Layers of different formats or groups stay apart, and so do layers with reordered inputs.
    """
    made: dict[str, PrequantizedLayer] = {}
    left = dict(layers)
    for group in _group(model, (f"{name}.weight" for name in layers), wanted).values():
        parts = {name: layers[name] for name in (part.removesuffix(".weight") for part, _ in group.parts)}
        if targets := _fusable(group, list(parts.values()), wanted):
            made |= {target: _fused_layer(group, list(parts.values()), target) for target in targets}
            left = {name: layer for name, layer in left.items() if name not in parts}
    return made, left


def _fusable(group: _Fused, layers: Seq[PrequantizedLayer], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights that these layers can be joined into; empty if they must stay apart."""
    weights = [layer.read({part: one.without_values() for part, one in layer.parts.items()}) for layer in layers]
    parts = [weight.by_output() for weight in weights]
    kinds = [
        ({part: one.dtype for part, one in of_one.items()}, weight.book is None)
        for of_one, weight in zip(parts, weights, strict=True)
    ]
    if any(kind != kinds[0] for kind in kinds) or any(weight.order is not None for weight in weights):
        return []
    made = [group.convert_forms((one[part].dtype, tuple(one[part].shape)) for one in parts) for part in parts[0]]
    targets = list(made[0])
    fit = all(
        list(forms) == targets and all(name in wanted and forms[name][1][:2] == wanted[name][:2] for name in targets)
        for forms in made
    )
    return targets if fit else []


def _fused_layer(group: _Fused, layers: Seq[PrequantizedLayer], target: str) -> PrequantizedLayer:
    parts = {f"{i}.{part}": tensor for i, layer in enumerate(layers) for part, tensor in layer.parts.items()}

    def read(tensors: dict[str, Tensor]) -> QuantizedWeight:
        weights = [layer.read({part: tensors[f"{i}.{part}"] for part in layer.parts}) for i, layer in enumerate(layers)]
        book = weights[0].book
        assert book is None or all(torch.equal(book, one.book) for one in weights if one.book is not None)
        rows = {
            part: group.convert([weight.by_output()[part] for weight in weights])[target].flatten(0, 1)
            for part in weights[0].by_output()
        }
        return replace(weights[0], **rows)

    algorithms = {layer.quant_algo for layer in layers}
    return PrequantizedLayer(parts, read, algorithms.pop() if len(algorithms) == 1 else "MIXED_PRECISION")
