"""Weights that lie in a model's files in pieces and in the model as one, such as its experts': put together as
transformers does when it loads them.

A checkpoint has them as the model has: what is loaded need not be put together, and of that the plan of a split speaks.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from runtime.errors import SpecDecError
from runtime.tensor_writer import Piece, forms_of


@dataclass(frozen=True)
class _Part:
    """A piece of a weight, and which of its converter's patterns the tensor's name has."""

    piece: Piece
    name: str
    pattern: str


def fuse(model: PreTrainedModel, pieces: Seq[Piece], wanted: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    """The pieces, with one instead of many for each of the `wanted` weights, of these shapes, of the model.

    The model may be without memory. SpecDecError for a weight that cannot be put together.
    """
    mapping = get_model_conversion_mapping(model)
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    others: list[Piece] = []
    parts: dict[str, list[_Part]] = {}
    for piece in pieces:
        name = next(iter(piece.forms))
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None or target not in wanted:
            others.append(piece)
        else:
            parts.setdefault(target, []).append(_Part(piece, name, pattern))
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    return others + [
        _fused(model, target, found, by_pattern[found[0].pattern], wanted[target]) for target, found in parts.items()
    ]


def _fused(
    model: PreTrainedModel, target: str, parts: list[_Part], converter: WeightConverter, shape: tuple[int, ...]
) -> Piece:
    parts = sorted(parts, key=lambda part: dot_natural_key(part.name))

    def convert(tensors: Seq[Tensor]) -> dict[str, Tensor]:
        one = deepcopy(converter)
        for part, tensor in zip(parts, tensors, strict=True):
            one.add_tensor(target, part.name, part.pattern, tensor)  # type: ignore[arg-type]  # or what makes it
        made = one.convert(target, model=model, config=model.config)
        tensor = made[target][0] if isinstance(made[target], list) else made[target]
        return {target: tensor.contiguous()}

    def make(values: list[Tensor]) -> dict[str, Tensor]:
        tensors: list[Tensor] = []
        rest = values
        for part in parts:
            own, rest = rest[: len(part.piece.sources)], rest[len(part.piece.sources) :]
            tensors.append(part.piece.make(own)[part.name])
        return convert(tensors)

    known = (part.piece.forms[part.name] for part in parts)
    try:
        forms = forms_of(convert([torch.empty(size, dtype=dtype, device="meta") for dtype, size in known]))
    except (KeyError, RuntimeError, ValueError):  # whatever does not fit together
        forms = {}
    if target not in forms or forms[target][1] != shape:
        raise SpecDecError(
            f"the model's files do not have all of the weights of a layer's experts: {target}",
            hint="download or save the model again",
        )
    return Piece(tuple(source for part in parts for source in part.piece.sources), forms, make)
