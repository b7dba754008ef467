"""How a model's weights are split over ranks: by transformers' own plan of its family (`base_model_tp_plan`).

A layer's outputs are split, or its inputs, and then the ranks' outputs are added up. Heads stay whole: where there are
fewer K/V heads than ranks, several ranks hold the same. The plans leave embeddings whole; here they are split like the
output layer, by the vocabulary, where both can be.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.config import LayerShape
from runtime.errors import SpecDecError

Kind = Literal["outputs", "gathered_outputs", "inputs", "own_inputs", "vocabulary"]

_KINDS: dict[str, Kind | None] = {
    "colwise": "outputs",
    "colwise_gather_output": "gathered_outputs",
    "rowwise": "inputs",
    "rowwise_split_input": "own_inputs",
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "keep_full_weight": None,
}
"""transformers' words. None: each rank holds all of it."""
_KV_PROJECTIONS = {"k_proj", "v_proj"}
_GROUPED = ("weight_scales", "weight_zeros", "weight_offsets")
_ANOTHER_SIZE = "split it over another number of devices"


@dataclass(frozen=True)
class Split:
    """How a layer lies on ranks; `num_pieces` are fewer than ranks where neighbours hold the same piece."""

    kind: Kind
    num_pieces: int

    def dimension(self, part: str) -> int | None:
        """The one in which the layer's tensor of this name is cut; None: each rank holds all of it."""
        if self.kind not in ("inputs", "own_inputs"):
            return None if part == "weight_order" else 0
        return None if part == "bias" else 1


@dataclass(frozen=True)
class Splitting:
    """A model's layers, by name, as they lie on `tp_size` ranks; those that are not named are whole on each."""

    tp_size: int
    layers: Mapping[str, Split]
    whole: tuple[str, ...] = ()
    """Of the embeddings and the output layer those that are not split."""

    def piece(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """What rank `rank` has of a checkpoint's tensor; SpecDecError where it cannot be cut in so many pieces."""
        cut = self._cut(name, tuple(tensor.shape))
        if cut is None:
            return tensor
        dimension, num_pieces = cut
        return tensor.chunk(num_pieces, dimension)[rank * num_pieces // self.tp_size]

    def form(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's piece of a tensor."""
        cut = self._cut(name, shape)
        if cut is None:
            return shape
        dimension, num_pieces = cut
        return tuple(size // num_pieces if i == dimension else size for i, size in enumerate(shape))

    def join(self, name: str, pieces: Seq[Tensor]) -> Tensor:
        """The whole tensor of all ranks' pieces.

        A scale of all of an output's inputs, which each rank has, becomes one for each rank's inputs: that says the
        same.
        """
        layer, _, part = name.rpartition(".")
        split = self.layers.get(layer)
        dimension = split.dimension(part) if split else None
        if split is None or dimension is None:
            return pieces[0]
        return torch.cat(list(pieces)[:: self.tp_size // split.num_pieces], dimension)

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """In which dimension a tensor is cut, and into how many pieces."""
        layer, _, part = name.rpartition(".")
        split = self.layers.get(layer)
        dimension = split.dimension(part) if split else None
        is_of_all_inputs = dimension == 1 and part in _GROUPED and shape[1] == 1
        if split is None or dimension is None or is_of_all_inputs:
            return None
        if part == "weight_order":
            raise SpecDecError(
                f"the inputs of a layer that is to be split have an order of their own: {layer}",
                hint="run the model on one device",
            )
        # Two numbers of 4 bits lie in a byte, and scales are of groups of inputs: none of them is cut through.
        if shape[dimension] % split.num_pieces:
            what = {"weight": "inputs", "weight_values": "columns"}.get(part, "groups of inputs")
            raise SpecDecError(
                f"{self.tp_size} devices do not divide the {shape[dimension]} "
                f"{what if dimension else 'outputs'} of `{layer}`",
                hint=_ANOTHER_SIZE,
            )
        return dimension, split.num_pieces


def split_model(model: PreTrainedModel, layers: Seq[LayerShape], tp_size: int) -> Splitting:
    """How the model, which may be without weights, is split; `layers` are its K/V shapes.

    SpecDecError, by the family's name, where transformers has no plan for it or one that is not supported here.
    """
    kind = model.config.model_type
    plan = _plan_of(model)
    if not plan:
        raise SpecDecError(
            f"transformers has no plan for splitting this model over devices: {kind}", hint="run it on one device"
        )
    heads = getattr(model.config, "num_attention_heads", tp_size)
    if heads % tp_size:
        raise SpecDecError(f"{tp_size} devices do not divide {heads} attention heads: {kind}", hint=_ANOTHER_SIZE)
    kv_pieces = _kv_pieces(layers, tp_size, kind)
    splits = {}
    for name, module in model.named_modules():
        style = _kind_of(plan, name, kind)
        if style is None or not isinstance(module, nn.Linear):
            continue
        is_kv = name.rpartition(".")[2] in _KV_PROJECTIONS and style == "outputs"
        splits[name] = Split(style, kv_pieces if is_kv else tp_size)
    _refuse_parameters(model, plan)
    return _with_vocabulary(model, splits, tp_size)


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan, by patterns of the model's own names."""
    prefix = model.base_model_prefix
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    own = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}.{name}": style for name, style in base.items()} | dict(own) if base else {}


def _kind_of(plan: Mapping[str, str], name: str, family: str) -> Kind | None:
    style = next((style for pattern, style in plan.items() if _matches(pattern, name)), None)
    if style is None:
        return None
    if style not in _KINDS and not style.startswith("embedding"):
        _refuse(family, style)
    return _KINDS.get(style)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _refuse(family: str, style: str) -> None:
    what = "experts" if "moe" in style else "layers"
    raise SpecDecError(
        f"transformers splits this model's {what} over devices in a way that is not supported ({style}): {family}",
        hint="run it on one device",
    )


def _refuse_parameters(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Weights that lie in no linear layer, such as those of experts."""
    for pattern, style in plan.items():
        if _KINDS.get(style, "unknown") is None:
            continue
        for name, _ in model.named_parameters():
            if _matches(pattern, name):
                _refuse(model.config.model_type, style)


def _kv_pieces(layers: Seq[LayerShape], tp_size: int, family: str) -> int:
    counts = {layer.num_kv_heads for layer in layers}
    odd = next((count for count in sorted(counts) if count % tp_size and tp_size % count), None)
    if odd is not None or len({min(count, tp_size) for count in counts}) > 1:
        raise SpecDecError(
            f"{tp_size} devices neither divide {odd or max(counts)} K/V heads nor are divided by them: {family}",
            hint=_ANOTHER_SIZE,
        )
    return min(min(counts), tp_size)


def _with_vocabulary(model: PreTrainedModel, splits: dict[str, Split], tp_size: int) -> Splitting:
    """The embeddings split like the output layer, where both can be or are not one; otherwise whole."""
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = {id(module): name for name, module in model.named_modules()}
    embeddings_name, head_name = names[id(embeddings)], names.get(id(head), "")
    is_tied = getattr(head, "weight", None) is embeddings.weight or bool(
        getattr(model.config, "tie_word_embeddings", False)
    )
    can_embed = type(embeddings) is nn.Embedding and embeddings.num_embeddings % tp_size == 0
    can_output = head_name in splits and head.weight.shape[0] % tp_size == 0
    if is_tied:
        can_embed = can_output = can_embed and can_output
    if can_embed:
        splits[embeddings_name] = Split("vocabulary", tp_size)
    if not can_output:
        splits.pop(head_name, None)
    whole = [name for name, split in ((embeddings_name, can_embed), (head_name, can_output)) if name and not split]
    return Splitting(tp_size, splits, tuple(whole))
