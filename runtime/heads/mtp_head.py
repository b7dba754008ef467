"""Heads that models have for the tokens after the next (MTP): made of layers of the model's own, and their names.

Checkpoints name them in a dozen ways. `_name_in_mtp` has these in one place, for loading and for writing what was
trained: a tensor is written under the name that it was read by.
"""

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.batch import Batch
from runtime.compiler.attention import PAGED
from runtime.compiler.model import ModelKind, Step, model_of_weights, parameter_shapes, probe_config
from runtime.compiler.pretrained import parse_pretrained_config
from runtime.config import LayerShape
from runtime.errors import SpecDecError
from runtime.files import read_json
from runtime.heads.draft_vocab import among_all
from runtime.heads.head_attention import HEAD, for_kernels, paged_pairs
from runtime.heads.head_config import BY_WEIGHTS, HeadConfig, check_weights, num_layers_of
from runtime.kv_cache import KVPool
from runtime.quantization.formats import find_layers, format_of, without_quantization
from runtime.quantization.planning import PrequantizedLayer
from runtime.source import SourceTensor, load_tensors, read_tensors


class MtpHead(nn.Module):
    """A head of one layer of the target's own, which reads embedding and last hidden state as one projection.

    `model` is a model of that layer, with the target's embeddings and output layer and the head's own norm; `parts` are
    the weights before it. As transformers' `MtpLayer` and vLLM have it, its hidden states are behind the target's norm,
    and behind its own where a draft goes on.
    """

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs, drafts_at_once, longest_draft = HEAD, 1, False, False, None
    draft_ids: Tensor | None
    depth = 0
    """Its number among several."""

    def __init__(
        self, config: HeadConfig, model: PreTrainedModel, parts: dict[str, Tensor], *, has_norm: bool = True
    ) -> None:
        super().__init__()
        self.config, self.step = config, Step(model)
        self.register_buffer("draft_ids", None, persistent=False)
        self._shapes = probe_config(model.config).layers
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.decoder = decoder
        last = next(name for name in ("norm", "norm_f") if hasattr(decoder, name))
        norms = (copy.deepcopy(getattr(decoder, last)) for _ in range(2))
        self.enorm, self.hnorm = norms
        if not has_norm:
            setattr(decoder, last, nn.Identity())
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        wanted = {name: one for name, one in self.named_parameters() if name.split(".")[0] in _BEFORE_LAYER}
        check_weights(config, *({name: one.shape for name, one in of.items()} for of in (wanted, parts)))
        self.load_state_dict(parts, assign=True, strict=False)

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    def reduce(self, states: Tensor) -> Tensor:
        return states

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        paged = paged_pairs(batch, pool, tuple(one.layer for one in self._shapes), self.depth)
        ids, positions = batch.input_ids.reshape(1, -1), batch.positions.reshape(1, -1)
        return self.outputs_at(ids, states[None], positions, paged=paged)[0]

    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """(B, T, hidden) outputs for (B, T) tokens at these (B or 1, T) positions and the (B, T, hidden) states before
        them; `attention` is what its layer takes besides."""
        embedded = self.decoder.get_input_embeddings()(ids)
        pairs = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        output = self.decoder(inputs_embeds=pairs, position_ids=positions, use_cache=False, **attention)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, outputs: Tensor, num_drafted: int = 0, last_ids: Tensor | None = None) -> Tensor:
        return among_all(self.own_logits(outputs), self.draft_ids)

    def own_logits(self, outputs: Tensor) -> Tensor:
        """(..., vocabulary) of (..., hidden) outputs."""
        logits: Tensor = self.step.model.get_output_embeddings()(outputs)  # type: ignore[no-untyped-call]
        return logits

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        return for_kernels(self._shapes) if self.uses_kernels else self._shapes


class ChainedMtp(nn.Module):
    """Several MTP layers in a row, the first of which drafts the first token of a draft, the second the second one.

    Each reads the output of the one below it where that read the target's hidden state: layer k the pair of token j
    and of what layer k - 1 made of token j - 1. So its first pair is that of token k + 1. As transformers' `MtpModel`.

    A state has the hidden state of a token, and behind it the outputs of all layers but the last for it. A draft has no
    hidden states; there the last layer's output lies in their place.
    """

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs, drafts_at_once = HEAD, 1, True, False
    draft_ids: Tensor | None
    longest_draft: int | None

    def __init__(self, heads: Seq[MtpHead]) -> None:
        super().__init__()
        self.config, self.longest_draft = heads[0].config, len(heads)
        self.heads: Any = nn.ModuleList(heads)
        self.register_buffer("draft_ids", None, persistent=False)
        for depth, head in enumerate(heads):
            head.depth = depth
            if depth > 0:
                head.step.model.set_output_embeddings(nn.Identity())  # type: ignore[no-untyped-call]

    @property
    def step(self) -> Step:
        """The model that has the output layer."""
        found: Step = self.heads[0].step
        return found

    @property
    def state_size(self) -> int:
        return len(self.heads) * self.config.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        shapes = tuple(shape for head in self.heads for shape in head._shapes)
        return for_kernels(shapes) if self.uses_kernels else shapes

    def reduce(self, states: Tensor) -> Tensor:
        return states

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        (B, Q), before = batch.input_ids.shape, list(states.chunk(len(self.heads), -1))
        outputs = [*before[1:], before[0]]
        for depth, head in enumerate(self.heads):
            if depth < num_drafted:
                continue  # it has drafted, and what it would make of these tokens is not read again
            if depth > num_drafted and Q > 1:
                below = outputs[depth - 1].view(B, Q, -1)[:, :-1]
                before[depth] = torch.cat([before[depth].view(B, Q, -1)[:, :1], below], 1).flatten(0, 1)
            is_there = (batch.positions > depth).view(-1, 1)
            outputs[depth] = head(batch, before[depth].where(is_there, 0), pool)
        return torch.cat([outputs[-1], *outputs[:-1]], -1)

    def logits(self, outputs: Tensor, num_drafted: int = 0, last_ids: Tensor | None = None) -> Tensor:
        parts = outputs.chunk(len(self.heads), -1)
        drafted: Tensor = self.heads[0].logits(parts[(num_drafted + 1) % len(parts)])
        return among_all(drafted, self.draft_ids)


_MAKE_EAGLE = "leave it out, and an EAGLE-3 head is made"
_BEFORE_LAYER = ("enorm", "hnorm", "eh_proj")
_QWENS = {"mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm."}
_QWENS |= {"mtp.layers.": "model.layers.", "mtp.norm.": "model.norm."}
_ERNIES = {"model.mtp_emb_norm.N.": "enorm.", "model.mtp_hidden_norm.N.": "hnorm."}
_ERNIES |= {"model.mtp_linear_proj.N.": "eh_proj.", "model.mtp_block.N.": "model.layers.0."}
_MIMOS = {f"model.mtp.layers.N.{name}.": f"{name}." for name in _BEFORE_LAYER}
_MIMOS |= {"model.mtp.layers.N.pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm."}
_MIMOS |= {"model.mtp.layers.N.final_layernorm.": "model.norm.", "model.mtp.layers.N.": "model.layers.0."}
_STATE_FIRST = "model.mtp_layers."  # MiMo 7B's: its projection is of [state, embedding]
_MIMOS |= {f"{_STATE_FIRST}N.token_layernorm.": "enorm.", f"{_STATE_FIRST}N.hidden_layernorm.": "hnorm."}
_MIMOS |= {f"{_STATE_FIRST}N.input_proj.": "eh_proj.", f"{_STATE_FIRST}N.final_layernorm.": "model.norm."}
_MIMOS |= {f"{_STATE_FIRST}N.": "model.layers.0."}


def load_mtp(config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype) -> MtpHead | ChainedMtp:
    entries, embeddings = read_tensors(config.directory), embeddings_of(config)
    shared = shared_with_target(entries, embeddings)
    if target_embedding is not None:
        shared.pop(embeddings, None)
    known = {} if target_embedding is None else {embeddings: target_embedding}
    heads = []
    for depth in range(config.num_layers):
        number = num_layers_of(config.layers) + depth
        own = {name: one for one in entries if (name := _name_in_mtp(one.name, number, depth)) is not None}
        if not own:
            which = "no MTP head" if depth == 0 else f"{depth} MTP layers and not {config.num_layers}"
            raise SpecDecError(
                f"the model's weights have {which}, of which its config.json speaks: {config.directory}",
                hint="some who pack models anew leave it out; take the original",
            )
        one_layer = _config_of_one_layer(config, own)
        shapes = parameter_shapes(one_layer)
        if depth == 0:
            known = _numbers(shared, config, dtype, shapes) | known
            known.setdefault("lm_head.weight", known[embeddings])
        heads.append(_mtp_layer(config, own, one_layer, _numbers(own, config, dtype, shapes) | known))
    return heads[0] if len(heads) == 1 else ChainedMtp(heads)


def _mtp_layer(
    config: HeadConfig, own: dict[str, SourceTensor], one_layer: PreTrainedConfig, tensors: dict[str, Tensor]
) -> MtpHead:
    parts = {name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] in _BEFORE_LAYER}
    has_norm = not any(one.name.startswith("model.mtp_block.") for one in own.values())
    if any(one.name.startswith(_STATE_FIRST) for one in own.values()):
        parts["eh_proj.weight"] = torch.cat(parts["eh_proj.weight"].chunk(2, -1)[::-1], -1)
    dtype = tensors["lm_head.weight"].dtype
    if not has_norm:  # in Ernie's none is behind the layer
        tensors["model.norm.weight"] = torch.ones(config.hidden_size, dtype=dtype)
    model = model_of_weights(ModelKind(one_layer, dtype, PAGED), tensors, str(config.directory))
    return MtpHead(config, model, parts, has_norm=has_norm)


def check_mtp_is_trained(config: HeadConfig) -> None:
    """SpecDecError for an MTP head of more than one plain layer, by the names of its weights: `tensors_of_mtp` would
    raise it when the head was loaded."""
    if config.num_layers > 1:
        raise SpecDecError(
            f"a head of {config.num_layers} MTP layers is not trained here: {config.directory}", hint=_MAKE_EAGLE
        )
    for entry in read_tensors(config.directory):
        name = _name_in_mtp(entry.name, num_layers_of(config.layers), 0)
        if name is not None and (".experts." in name or not name.endswith((".weight", ".bias"))):
            _raise_not_trained(entry, config)


def _raise_not_trained(entry: SourceTensor, config: HeadConfig) -> NoReturn:
    raise SpecDecError(
        f"an MTP head that has experts, or is quantized, is not trained here, {entry.name}: {config.directory}",
        hint=_MAKE_EAGLE,
    )


def tensors_of_mtp(head: MtpHead) -> dict[str, Tensor]:
    """The head's own weights by the names that its checkpoint has for them.

    SpecDecError where they are not its layer's one by one: quantized, or experts.
    """
    config, number = head.config, num_layers_of(head.config.layers)
    parameters = dict(head.step.model.named_parameters()) | dict(head.named_parameters())
    found = {}
    for entry in read_tensors(config.directory):
        name = _name_in_mtp(entry.name, number, 0)
        if name is None:
            continue
        if name not in parameters:
            _raise_not_trained(entry, config)
        swaps = name == "eh_proj.weight" and entry.name.startswith(_STATE_FIRST)
        one = parameters[name].detach()
        found[entry.name] = torch.cat(one.chunk(2, -1)[::-1], -1) if swaps else one
    return found


def shared_tensors_of_mtp(config: HeadConfig) -> dict[str, Tensor]:
    """Embeddings and output layer, by the names that the head's checkpoint has for them."""
    entries = list(shared_with_target(read_tensors(config.directory), embeddings_of(config)).values())
    return dict(zip((one.name for one in entries), load_tensors(entries), strict=True))


def _is_nemotron(config: HeadConfig) -> bool:
    return config.layers.get("model_type") == "nemotron_h"


def embeddings_of(config: HeadConfig) -> str:
    return "model.embeddings.weight" if _is_nemotron(config) else "model.embed_tokens.weight"


def _numbers(
    entries: dict[str, SourceTensor], config: HeadConfig, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The numbers that the entries mean, by the names they are given in a model of these `shapes`; SpecDecError for a
    format that is not read."""
    tensors = [replace(one, name=name) for name, one in entries.items()]
    layers: dict[str, PrequantizedLayer] = {}
    if (few := next((one.source_name for one in tensors if not one.is_float), None)) is not None:
        found = format_of(read_json(config.directory / "config.json"), config.directory)
        if found is None:
            raise SpecDecError(
                f"the head's weights are quantized, and config.json does not say how: {few}, in {config.directory}",
                hint="take the model as it was published",
            )
        layers, tensors = find_layers(tensors, found, shapes, config.directory)
    numbers = {one.name: t.to(dtype) for one, t in zip(tensors, load_tensors(tensors), strict=True)}
    return numbers | {f"{name}.weight": layer.load().dequantize(dtype) for name, layer in layers.items()}


def shared_with_target(entries: list[SourceTensor], embeddings: str) -> dict[str, SourceTensor]:
    """The target's embeddings and output layer; copies beside the head's layer are the same."""
    ends = {embeddings: f".{embeddings.removeprefix('model.')}", "lm_head.weight": "lm_head.weight"}
    return {
        name: one
        for name, end in ends.items()
        for one in entries
        if one.name.endswith(end) and ".layers." not in one.name and not one.name.startswith("mtp.")
    }


def _name_in_mtp(name: str, number: int, depth: int) -> str | None:
    """Name in a model of that layer alone, the model's layer `number` and its head's `depth`, or of what is before it;
    None for what is of the target, or of another of the head's layers."""
    for theirs, ours in (_QWENS | _ERNIES | _MIMOS).items():
        prefix = theirs.replace(".N.", f".{depth}.")
        if name.startswith(prefix):
            own = ours + name.removeprefix(prefix)
            place, _, part = own.removeprefix("model.layers.").partition(".")  # Nemotron-H's stand in its layers
            if place.isdigit() and part.startswith("final_layernorm."):
                return f"model.norm_f.{part.removeprefix('final_layernorm.')}"
            return part if place.isdigit() and part.split(".")[0] in _BEFORE_LAYER else own
    _, is_there, own = name.partition(f".layers.{number}.")
    if not is_there or own.startswith(("embed_tokens.", "shared_head.head.")) or ".mtp.layers." in name:
        return None
    if own.startswith("shared_head.norm."):
        return f"model.norm.{own.removeprefix('shared_head.norm.')}"
    return own if own.split(".")[0] in _BEFORE_LAYER else f"model.layers.0.{own}"


def _config_of_one_layer(config: HeadConfig, own: Iterable[str]) -> PreTrainedConfig:
    """The target's config with one layer, of the kind that the head has by its `own` names: full attention, and experts
    if there are. Nemotron-H says itself of which blocks its own is made."""
    layers = without_quantization(config.layers)
    one: Any = copy.deepcopy(parse_pretrained_config(layers, str(config.directory / "config.json")))
    if _is_nemotron(config):
        one.layer_types = list(one.mtp_layers_block_type)
        return one  # type: ignore[no-any-return]
    has_experts = any(".mlp.experts." in name for name in own)
    is_mimo = config.layers.get("model_type") in BY_WEIGHTS
    settings = {
        "moe_layer_start_index": 0 if has_experts else 1,  # Ernie's
        "layer_types": ["sliding_attention" if is_mimo else "full_attention"],
        "mlp_layer_types": ["dense" if is_mimo else (getattr(one, "mlp_layer_types", None) or ["dense"])[-1]],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "num_hidden_layers": 1,
    }
    for name, value in settings.items():
        if getattr(one, name, None) is not None:
            setattr(one, name, value)
    return one  # type: ignore[no-any-return]
