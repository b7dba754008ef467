"""Tensor-parallel split of a model's weights, by transformers' plan for its family (`base_model_tp_plan`).

A layer is split by its outputs, or by its inputs, and then the ranks' outputs are added up. Every rank has a piece of
every expert; experts' outputs are added up after they are weighted. Heads stay whole: with fewer K/V heads than ranks,
several ranks hold the same head. The plans leave embeddings whole; here they are split by the vocabulary, like the
output layer, if both can be.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.checkpoint.config import LayerShape
from runtime.util.errors import SpecDecError

Kind = Literal["outputs", "gathered_outputs", "inputs", "own_inputs", "vocabulary", "experts", "heads"]


@dataclass(frozen=True)
class Cut:
    """The dimension along which a tensor is cut, and the number of matrices stacked in it, each of which is cut."""

    dimension: int
    num_packed: int = 1


_OUTPUTS, _INPUTS = Cut(0), Cut(1)

_KINDS: dict[str, Kind | None] = {
    "colwise": "outputs",
    "colwise_gather_output": "gathered_outputs",
    "rowwise": "inputs",
    "rowwise_split_input": "own_inputs",
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "keep_full_weight": None,
    "mla_kv_a_proj": None,
    "moe_tp_experts": "experts",
    "local_params": "heads",
}
"""Cuts by transformers' words for linear layers; None if each rank holds the whole weight."""
_EXPERTS_CUTS = {"colwise": Cut(-2), "packed_colwise": Cut(-2, 2), "rowwise": Cut(-1), "packed_rowwise": Cut(-1, 2)}
"""transformers' words for weights [experts, outputs, inputs] or [experts, inputs, outputs]."""
_OWN_PARTS = ("weight", "bias")
_KV_PROJECTIONS = {"k_proj", "v_proj"}
_GROUPED = ("weight_scales", "weight_zeros", "weight_offsets")
_ROW_BYTES = 16
_ANOTHER_SIZE = "split it over another number of devices"


@dataclass(frozen=True)
class Split:
    """Split of a layer over ranks. With fewer pieces than ranks, neighbouring ranks hold the same piece."""

    kind: Kind
    num_pieces: int
    cuts: tuple[tuple[str, Cut], ...] = ()
    """Cuts of a non-linear layer, by the names of its tensors."""

    def cut(self, part: str) -> Cut | None:
        """Cut of the layer's tensor with this name; None if every rank holds all of it."""
        if self.cuts:
            return dict(self.cuts).get(part)
        if part == "weight_book":
            return None
        if self.kind not in ("inputs", "own_inputs"):
            return None if part == "weight_order" else _OUTPUTS
        return None if part == "bias" else _INPUTS


@dataclass(frozen=True)
class Splitting:
    """A model's layers, by name, as split over `tp_size` ranks; a layer without an entry is whole on each rank."""

    tp_size: int
    layers: Mapping[str, Split]
    whole: tuple[str, ...] = ()
    """Embeddings and output layer that are not split."""

    def piece(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """The part of a checkpoint's tensor that a rank holds; SpecDecError if the tensor cannot be divided so."""
        found = self._cut(name, tuple(tensor.shape))
        if found is None:
            return tensor
        cut, num_pieces = found
        packed = tensor.chunk(cut.num_packed, cut.dimension)
        pieces = [one.chunk(num_pieces, cut.dimension)[rank * num_pieces // self.tp_size] for one in packed]
        piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dimension)
        if self.layers[name.rpartition(".")[0]].kind == "experts":
            self._check_rows(name, piece)
        return piece

    def _check_rows(self, name: str, piece: Tensor) -> None:
        """SpecDecError for a piece with which torch's product of experts would fail in the middle of a step."""
        if (row_bytes := piece.shape[-1] * piece.element_size()) % _ROW_BYTES:
            raise SpecDecError(
                f"with {self.tp_size} devices each has {row_bytes} bytes of a row of an expert's weights, which must "
                f"be a multiple of {_ROW_BYTES}: {name}",
                hint=_ANOTHER_SIZE,
            )

    def form(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rank's piece of a tensor; SpecDecError if the tensor cannot be divided so."""
        found = self._cut(name, shape)
        if found is None:
            return shape
        cut, num_pieces = found
        whole = list(shape)
        whole[cut.dimension] //= num_pieces
        return tuple(whole)

    def join(self, name: str, pieces: Seq[Tensor]) -> Tensor:
        """The whole tensor, from all ranks' pieces.

        A scale for all inputs of an output, which is equal on all ranks, becomes a scale for each rank's inputs; both
        mean the same.
        """
        split, cut = self._split_and_cut(name)
        if split is None or cut is None:
            return pieces[0]
        distinct = list(pieces)[:: self.tp_size // split.num_pieces]
        packed = zip(*(piece.chunk(cut.num_packed, cut.dimension) for piece in distinct), strict=True)
        return torch.cat([torch.cat(one, cut.dimension) for one in packed], cut.dimension)

    def is_cut(self, name: str) -> bool:
        """True if ranks hold only parts of the parameter with this name."""
        split, cut = self._split_and_cut(name)
        return split is not None and cut is not None and (bool(split.cuts) or name.rpartition(".")[2] in _OWN_PARTS)

    def _split_and_cut(self, name: str) -> tuple[Split | None, Cut | None]:
        layer, _, part = name.rpartition(".")
        split = self.layers.get(layer)
        return split, split.cut(part) if split else None

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[Cut, int] | None:
        """Cut of a tensor, and its number of pieces."""
        layer, _, part = name.rpartition(".")
        split, cut = self._split_and_cut(name)
        is_of_all_inputs = cut == _INPUTS and part in _GROUPED and shape[1] == 1
        if split is None or cut is None or is_of_all_inputs:
            return None
        if part == "weight_order":
            raise SpecDecError(
                f"a layer that is to be split over devices has its inputs reordered: {layer}",
                hint="run the model on one device",
            )
        # A cut goes neither through a byte of two 4-bit numbers nor through a group of inputs with one scale.
        size = shape[cut.dimension] // cut.num_packed
        if size % split.num_pieces:
            what = {"weight": "inputs", "weight_values": "columns"}.get(part, "groups of inputs")
            if split.kind == "experts":
                what = f"rows of `{part}`" if cut.dimension == -2 else f"columns of `{part}`"
            raise SpecDecError(
                f"{self.tp_size} devices do not divide the {size} "
                f"{'outputs' if cut == _OUTPUTS else what} of `{layer}`",
                hint=_ANOTHER_SIZE,
            )
        return cut, split.num_pieces


def split_model(model: PreTrainedModel, layers: Seq[LayerShape], tp_size: int) -> Splitting:
    """Plan the split of a model, which may be on `meta`; `layers` are its K/V shapes.

    SpecDecError, naming the family, if transformers has no plan for it or a plan that is not supported.
    """
    kind = model.config.model_type
    plan = _plan_of(model)
    if not plan:
        raise SpecDecError(
            f"transformers has no plan for splitting this model over devices: {kind}", hint="run it on one device"
        )
    for heads in sorted(_numbers_of_heads(model.config)):
        if heads % tp_size:
            raise SpecDecError(f"{tp_size} devices do not divide {heads} attention heads: {kind}", hint=_ANOTHER_SIZE)
    kv_pieces = _kv_pieces(layers, tp_size, kind)
    splits = {}
    for name, module in model.named_modules():
        style = _kind_of(plan, name, kind)
        if style == "experts":
            splits[name] = Split(style, tp_size, _cuts_of_experts(plan, name, module, kind))
        if style == "heads" and (cuts := _cuts_of_heads(plan, name, module, kind)):
            splits[name] = Split(style, tp_size, cuts)
        if style is None or not isinstance(module, nn.Linear):
            continue
        if style == "inputs" and _is_of_whole_mixer(plan, name, model, layers):
            style = "own_inputs"
        is_kv = name.rpartition(".")[2] in _KV_PROJECTIONS and style == "outputs"
        splits[name] = Split(style, kv_pieces if is_kv else tp_size)
    _refuse_parameters(model, plan, splits)
    if any(getattr(module, "activation_sparsity", 0) for module in model.modules()):
        _refuse(kind, "by the mean of all of a layer's outputs, of which the plan says nothing")
    return _with_vocabulary(model, splits, tp_size)


def _is_of_whole_mixer(plan: Mapping[str, str], name: str, model: nn.Module, layers: Seq[LayerShape]) -> bool:
    """True for the last projection of a layer with a state whose other projections the plan leaves whole. GLM-5.3-Flash
    has such a plan: it names attention's projections, and the last projection of a mixer has the same name.
    """
    number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    if number is None or number in {layer.layer for layer in layers}:
        return False
    parent = name.rpartition(".")[0]
    beside = (f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children())
    return not any(_style_of(plan, one) for one in beside if one != name)


def _numbers_of_heads(config: PreTrainedConfig) -> set[int]:
    """Numbers of attention heads that layers may have; Step 3.7's layers have two."""
    by_layer = getattr(config, "per_layer_config", None) or {}
    configs = [by_layer[i] for i in range(config.num_hidden_layers)] if by_layer else [config]
    return {one.num_attention_heads for one in configs if hasattr(one, "num_attention_heads")}


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan: patterns of the model's own names."""
    prefix = model.base_model_prefix
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    own = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}.{name}": style for name, style in base.items()} | dict(own) if base else {}


def _kind_of(plan: Mapping[str, str], name: str, family: str) -> Kind | None:
    style = _style_of(plan, name)
    if style is None:
        return None
    if style not in _KINDS and not style.startswith("embedding"):
        _refuse(family, style)
    return _KINDS.get(style)


def _style_of(plan: Mapping[str, str], name: str) -> str | None:
    regexes = ((re.escape(pattern).replace(r"\*", r"\d+"), style) for pattern, style in plan.items())
    return next((style for regex, style in regexes if re.fullmatch(regex, name)), None)


def _refuse(family: str, style: str) -> NoReturn:
    what = "experts" if "moe" in style or "expert" in style else "layers"
    raise SpecDecError(
        f"transformers splits this model's {what} over devices in a way that is not supported ({style}): {family}",
        hint="run it on one device",
    )


def _cuts_of_experts(
    plan: Mapping[str, str], name: str, experts: nn.Module, family: str
) -> tuple[tuple[str, Cut], ...]:
    """Cut of the experts' own weights. Without a cut, every rank would add a whole weight's output."""
    cuts = []
    for part, _ in experts.named_parameters():
        style = _style_of(plan, f"{name}.{part}") or f"{part} whole"
        if style not in _EXPERTS_CUTS:
            _refuse(family, f"experts' {style}")
        cuts.append((part, _EXPERTS_CUTS[style]))
    if not cuts or getattr(experts, "has_post_expert_norm", False):
        _refuse(family, "experts with layers of their own")
    return tuple(cuts)


def _cuts_of_heads(
    plan: Mapping[str, str], name: str, attention: nn.Module, family: str
) -> tuple[tuple[str, Cut], ...]:
    """Cut of attention's parameters that have one number for each head."""
    cuts = []
    for part, parameter in attention.named_parameters(recurse=False):
        style = _style_of(plan, f"{name}.{part}")
        if style is not None and (style != "colwise" or parameter.dim() != 1):
            _refuse(family, style)
        if style is not None:
            cuts.append((part, _OUTPUTS))
    return tuple(cuts)


def _refuse_parameters(model: PreTrainedModel, plan: Mapping[str, str], splits: Mapping[str, Split]) -> None:
    """SpecDecError for parameters that are in no split layer but would have to be split."""
    known = {name for name, split in splits.items() if split.cuts}
    for name, _ in model.named_parameters():
        style = _style_of(plan, name)
        if style is not None and _KINDS.get(style, "unknown") is not None and name.rpartition(".")[0] not in known:
            _refuse(model.config.model_type, style)


def _kv_pieces(layers: Seq[LayerShape], tp_size: int, family: str) -> int:
    counts = {layer.num_kv_heads for layer in layers}
    odd = next((count for count in sorted(counts) if count % tp_size and tp_size % count), None)
    if odd is not None or len({min(count, tp_size) for count in counts}) > 1:
        raise SpecDecError(
            f"{tp_size} devices cannot share {odd or max(counts)} K/V heads, neither number divides the other: "
            f"{family}",
            hint=_ANOTHER_SIZE,
        )
    return min(min(counts), tp_size)


def _with_vocabulary(model: PreTrainedModel, splits: dict[str, Split], tp_size: int) -> Splitting:
    """The splits, with embeddings and output layer: each is split if its rows divide; tied ones both or neither."""
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
