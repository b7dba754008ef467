"""Trained drafters (heads) as modules: layers of transformers' own, over the pages of a `HeadCache`.

Of a token a head takes the pair of its embedding and what it knows of the token before: the target's hidden states, or
in a draft its own output. It gives its output, from which `logits` predicts the next token, and which takes the place
of the hidden states when the draft goes on.
"""

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from runtime.batch import Batch
from runtime.compiler.attention import PAGED, PagedInputs, kernel_attention
from runtime.compiler.model import ModelKind, Step, model_of_weights, parameter_shapes, probe_config
from runtime.compiler.pretrained import parse_pretrained_config
from runtime.compiler.quantized import QuantizedLinear
from runtime.compiler.quantized_copy import DRAFT_ACTIVATIONS, rows_of
from runtime.config import LayerShape
from runtime.errors import SpecDecError
from runtime.files import read_json
from runtime.heads.assistant import load_assistant
from runtime.heads.block_head import BlockHead, own_name
from runtime.heads.draft_vocab import among_all, rows_by_id
from runtime.heads.head_config import BY_WEIGHTS, HeadConfig, num_layers_of
from runtime.kv_cache import KVPool
from runtime.locks import MODEL_INIT_LOCK, quiet_transformers
from runtime.quantization.formats import find_layers, format_of, without_quantization
from runtime.quantization.planning import PrequantizedLayer
from runtime.quantization.weight import QuantizedWeight
from runtime.source import SourceTensor, load_tensors, read_tensors

_OTHER_MODEL = "config.json and weights are of two heads; download the head again"


_NOT_SEEN = -3e4
"""Score, before it is scaled, of what no query sees."""


@dataclass
class PagedPairs(PagedInputs):
    """Inputs of a head's attention: a sequence's first token has no pair, and no key that a query may see.

    The kernel knows no such key. So it is handed queries and keys with two more numbers, `_EXTRA`, by which the first
    token's key, of which nothing else is there, has a score of `_NOT_SEEN`. And so have those of `num_hidden` - 1
    tokens behind it, of layers that begin later.
    """

    num_hidden: int = 1

    def mask(self, sliding_window: int | None, attention_chunk: int | None, num_groups: int) -> Tensor:
        visible = super().mask(sliding_window, attention_chunk, num_groups)
        return visible & (torch.arange(visible.shape[-1], device=visible.device) >= self.num_hidden)


_EXTRA = 2
HEAD = "specdec_head"


def head_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a head over its pages, by the kernel (`runtime.compiler.attention`)."""
    if kwargs.get("scaling") is None:
        kwargs["scaling"] = query.shape[-1] ** -0.5
    query = F.pad(query, (0, _EXTRA))
    query[..., -_EXTRA] = 1
    key = F.pad(key, (0, _EXTRA))
    paged: PagedPairs = kwargs["paged"]
    if paged.num_hidden > 1:
        key[..., -_EXTRA].masked_fill_(paged.positions.flatten() < paged.num_hidden, _NOT_SEEN)
    return kernel_attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(HEAD, head_attention)


def hide_first(pool: KVPool, block: int) -> None:
    """Give the first token of a sequence that begins with this block a key that no query sees."""
    for keys, values in zip(pool.keys, pool.values, strict=True):
        keys[block, :, :, 0], values[block, :, 0] = 0, 0
        keys[block, :, -_EXTRA, 0] = _NOT_SEEN


class PackedQuantized(nn.Module):
    """A quantized linear layer by the CPU's kernel, in the kernel's layout alone."""

    def __init__(self, layer: QuantizedLinear, arithmetic: int) -> None:
        super().__init__()
        self.packed, self.bias, self.num_outputs = layer.pack(), layer.bias, layer.out_features
        self.arithmetic, self.token_bits = arithmetic, layer.token_bits

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.specdec.quantized_linear(
            x, self.packed, self.bias, self.num_outputs, self.arithmetic, self.token_bits
        )
        return outputs


class PackedLinear(nn.Module):
    """A linear layer by the CPU's kernel. `known` are weights of the target's step, of which one may be the same."""

    def __init__(self, layer: nn.Linear, arithmetic: int, known: dict[str, Tensor]) -> None:
        super().__init__()
        packed: Tensor = torch.ops.specdec.pack_linear(layer.weight.detach())
        same = (one for one in known.values() if one.shape == packed.shape and one.dtype == packed.dtype)
        self.packed = next((one for one in same if torch.equal(one, packed)), packed)
        self.bias, self.num_outputs, self.arithmetic = layer.bias, layer.out_features, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.specdec.linear(x, self.packed, self.bias, self.num_outputs, self.arithmetic)
        return outputs


def use_kernels(head: nn.Module, arithmetic: int, known: dict[str, Tensor]) -> None:
    """Have the CPU's kernels, which must be loaded, compute the head's attention and linear layers."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.in_features % 2 == 0:
                setattr(module, name, PackedLinear(child, arithmetic, known))
            elif type(child) is QuantizedLinear:
                setattr(module, name, PackedQuantized(child, arithmetic))
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = str(head.attention)
    head.uses_kernels = True  # type: ignore[assignment]


class Head(Protocol):
    """A head in memory."""

    uses_kernels: bool
    """True if the CPU's kernels compute it: `hide_first` is for those."""

    reads_target: bool
    """True if it has no keys and values, and reads the target's, at the position of a sequence's last token."""

    config: HeadConfig
    attention: str
    """Name of its attention where kernels compute it."""

    first_token: int
    """The first token of a sequence that it has keys and values of."""

    keeps_outputs: bool
    """True if its outputs for a sequence's own tokens are read again."""

    drafts_at_once: bool
    """True if one pass drafts all tokens."""

    longest_draft: int | None
    """Tokens that it can draft in a row; None: as many as are asked for."""

    draft_ids: Tensor | None
    """(vocabulary,) row of the output layer of each of the target's ids, or the number of rows; None: they are the
    same."""

    @property
    def state_size(self) -> int: ...

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]: ...

    def reduce(self, states: Tensor) -> Tensor:
        """Compute what is kept of a token's hidden states: the first numbers of a state. Those behind them are of the
        head's own output."""
        ...

    def to(self, device: torch.device) -> "Head": ...

    def __call__(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        """(B x Q, state_size) outputs of the batch's tokens, whose states before them are (B x Q, state_size).

        The tokens are the last ones of drafts of `num_drafted`, or the sequences' own.
        """
        ...

    def logits(self, outputs: Tensor, num_drafted: int = 0, last_ids: Tensor | None = None) -> Tensor:
        """(T, vocab) of (T, state_size) outputs; -inf for tokens that it never drafts. (T,) `last_ids` are the tokens
        that they come behind."""
        ...


class EagleHead(nn.Module):
    """An EAGLE-3 head (arXiv 2503.01840): its first layer attends over embedding and hidden state side by side."""

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs = HEAD, 1, False
    embedding: Tensor
    draft_ids: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.drafts_at_once = config.block is not None
        self.longest_draft = config.max_draft_len if self.drafts_at_once else None
        with torch.device("meta"):
            model = _layers_of(config)
            self.layers, self.norm = model.layers, model.norm
            first, own, size = self.layers[0], config.hidden_size, config.target_hidden_size
            for name in ("q_proj", "k_proj", "v_proj"):
                layer = getattr(first.self_attn, name)
                wide = nn.Linear(2 * own, layer.out_features, bias=layer.bias is not None)
                setattr(first.self_attn, name, wide)
            norm = type(first.input_layernorm)
            eps: float = model.config.rms_norm_eps
            first.hidden_norm = norm(own, eps=eps)
            num_states = 3 if config.hidden_states is None else len(config.hidden_states)
            self.fc = nn.Linear(num_states * size, own, bias=False)
            self.lm_head = nn.Linear(own, config.draft_vocab_size, bias=False)
            if self.drafts_at_once:
                self.mask_hidden = nn.Parameter(torch.empty(num_states * size))
            if "norm_before_fc" in config.flags:
                self.input_norm = norm(num_states * size, eps=eps)
            if "fc_norm" in config.flags:
                self.fc_norm = nn.ModuleList(norm(size, eps=eps) for _ in range(num_states))
        self.rotary_emb = _rotary_of(model)
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        shapes = tuple(_kv_shape(layer.self_attn, i) for i, layer in enumerate(self.layers))
        return _for_kernels(shapes) if self.uses_kernels else shapes

    def reduce(self, states: Tensor) -> Tensor:
        if "norm_before_fc" in self.config.flags:
            states = self.input_norm(states)
        if "fc_norm" in self.config.flags:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        reduced: Tensor = self.fc(states)
        return reduced

    @property
    def mask_state(self) -> Tensor:
        """(state_size,) state of what nothing is known of (P-EAGLE)."""
        return self.reduce(self.mask_hidden)

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        attention = _attention_inputs(batch, pool, states, self.rotary_emb)
        return self.outputs(batch.input_ids.reshape(1, -1), states[None], attention)[0]

    def outputs(self, ids: Tensor, states: Tensor, attention: dict[str, Any]) -> Tensor:
        """(B, T, hidden) outputs for (B, T) tokens and the (B, T, hidden) states before them; `attention` is what its
        layers take besides."""
        first = self.layers[0]
        normed = first.hidden_norm(states)
        residual = states if "norm_before_residual" not in self.config.flags else normed
        embedded = F.embedding(ids, self.embedding)
        pairs = torch.cat([first.input_layernorm(embedded), normed], -1)
        attended, _ = first.self_attn(hidden_states=pairs, **attention)
        hidden: Tensor = residual + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden, **attention)
        if "norm_output" in self.config.flags:
            hidden = self.norm(hidden)
        return hidden

    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """`outputs` for tokens at these (B or 1, T) positions."""
        rotary = self.rotary_emb(states, positions)
        return self.outputs(ids, states, {"position_embeddings": rotary, "attention_mask": None, **attention})

    def logits(self, outputs: Tensor, num_drafted: int = 0, last_ids: Tensor | None = None) -> Tensor:
        return among_all(self.own_logits(outputs), self.draft_ids)

    def own_logits(self, outputs: Tensor) -> Tensor:
        """(..., draft vocabulary) of (..., hidden) outputs."""
        normed = outputs if "norm_output" in self.config.flags else self.norm(outputs)
        drafted: Tensor = self.lm_head(normed) * self.config.logit_scale
        return drafted


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
        _check_weights(config, wanted, parts)
        self.load_state_dict(parts, assign=True, strict=False)

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    def reduce(self, states: Tensor) -> Tensor:
        return states

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        paged = _paged_pairs(batch, pool, tuple(one.layer for one in self._shapes), self.depth)
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
        return _for_kernels(self._shapes) if self.uses_kernels else self._shapes


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
        return _for_kernels(shapes) if self.uses_kernels else shapes

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


def _load_mtp(config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype) -> MtpHead | ChainedMtp:
    entries, embeddings = read_tensors(config.directory), _embeddings_of(config)
    shared = _shared_with_target(entries, embeddings)
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
    entries = list(_shared_with_target(read_tensors(config.directory), _embeddings_of(config)).values())
    return dict(zip((one.name for one in entries), load_tensors(entries), strict=True))


def _is_nemotron(config: HeadConfig) -> bool:
    return config.layers.get("model_type") == "nemotron_h"


def _embeddings_of(config: HeadConfig) -> str:
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


def _shared_with_target(entries: list[SourceTensor], embeddings: str) -> dict[str, SourceTensor]:
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


def output_tensor(config: HeadConfig) -> SourceTensor:
    """The (rows, hidden) weight of the head's output layer, in its files; of an MTP head it is the model's own."""
    entries = read_tensors(config.directory)
    named = {_own_name(one.name): one for one in entries}
    if config.kind == "mtp":
        named = _shared_with_target(entries, _embeddings_of(config))
    tied = ("model.embed_tokens.weight", "model.embeddings.weight", "embed_tokens.weight")
    found = next((named[name] for name in ("lm_head.weight", *tied) if name in named), None)
    if found is None or not found.is_float or config.reads_target_output:
        raise SpecDecError(
            f"the head has no output layer that could be quantized: {config.directory}", hint="draft with it as it is"
        )
    return found


def set_output(head: Head, ids: Tensor | None, quantized: QuantizedWeight | None) -> None:
    """Have a head with all ids draft (n,) `ids` alone, and any head by a quantized output layer, of these rows."""
    if (ids is None and quantized is None) or "centroids" in head.config.flags:
        return
    is_mtp = isinstance(head, MtpHead | ChainedMtp)
    owner: Any = head.step.model if isinstance(head, MtpHead | ChainedMtp) else head
    output: nn.Linear = owner.get_output_embeddings() if is_mtp else owner.lm_head
    if ids is not None:
        head.draft_ids = rows_by_id(ids, output.out_features)
        if isinstance(head, BlockHead) and head.block.markov_rank:
            head.markov_w2 = rows_of(head.markov_w2, ids).requires_grad_(requires_grad=False)
    if quantized is not None:
        made: nn.Module = QuantizedLinear(quantized, output.bias, DRAFT_ACTIVATIONS, with_kernels=False)
    else:
        assert ids is not None
        made = rows_of(output, ids)
    made.requires_grad_(requires_grad=False)
    if is_mtp:
        owner.set_output_embeddings(made)
    else:
        owner.lm_head = made


def load_head(
    config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype, target_output: Tensor | None = None
) -> Head:
    """The head with its weights on the CPU; `target_embedding` (vocab, hidden) for one that has none of its own, and
    `target_output` of the same shape for one that has no output layer.

    SpecDecError where weights are missing, or do not have the shapes that its config says.
    """
    with torch.no_grad():
        load: Any = {"mtp": _load_mtp, "assistant": load_assistant}.get(config.kind)
        head: Any = (
            load(config, target_embedding, dtype)
            if load is not None
            else _load_layers(config, target_embedding, dtype, target_output)
        )
    made: Head = head.requires_grad_(requires_grad=False).eval()
    return made


def _load_layers(
    config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype, target_output: Tensor | None
) -> EagleHead | BlockHead:
    """A head of layers in files of its own."""
    is_block = config.kind == "dflash"
    entries = {(own_name if is_block else _own_name)(one.name): one for one in read_tensors(config.directory)}
    tensors = dict(zip(entries, load_tensors(list(entries.values())), strict=True))
    head = BlockHead(config, _layers_of(config)) if is_block else EagleHead(config)
    if config.reads_target_output and target_output is not None:
        tensors["lm_head.weight"] = target_output
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if is_block and "confidence.weight" in tensors:  # DeepSeek V4's has none
        tensors.setdefault("confidence.bias", torch.zeros(1))
    embedding, offsets = tensors.pop("embed_tokens.weight", None), tensors.pop("d2t", None)
    wanted = dict(head.named_parameters())
    _check_weights(config, wanted, tensors)
    head.load_state_dict({name: tensors[name].to(dtype) for name in wanted}, assign=True)
    head.embedding = _embedding(config, embedding, target_embedding).to(dtype)
    head.draft_ids = _draft_ids(config, offsets)
    return head


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _check_weights(config: HeadConfig, wanted: dict[str, nn.Parameter], found: dict[str, Tensor]) -> None:
    if missing := sorted(wanted.keys() - found.keys()):
        raise SpecDecError(
            f"the head lacks {len(missing)} of its weights, such as {missing[0]}: {config.directory}", hint=_OTHER_MODEL
        )
    layers = sorted(name for name in found.keys() - wanted.keys() if name.startswith("layers."))
    if layers:
        raise SpecDecError(
            f"the head has {len(layers)} weights that its config does not speak of, such as {layers[0]}: "
            f"{config.directory}",
            hint=_OTHER_MODEL,
        )
    for name, parameter in wanted.items():
        if parameter.shape != found[name].shape:
            raise SpecDecError(
                f"the head has {name} of {list(found[name].shape)}, and by its config it is of "
                f"{list(parameter.shape)}: {config.directory}",
                hint=_OTHER_MODEL,
            )


def _embedding(config: HeadConfig, own: Tensor | None, target: Tensor | None) -> Tensor:
    found = target if own is None else own
    if found is None:
        raise SpecDecError(
            f"the head has no embeddings, and its target's are not to be had as they are: {config.directory}",
            hint="take a head with `embed_tokens.weight`",
        )
    if tuple(found.shape) != (config.vocab_size, config.hidden_size):
        raise SpecDecError(
            f"the head reads embeddings of {[config.vocab_size, config.hidden_size]}, and "
            f"{'the target has' if own is None else 'its own are'} of {list(found.shape)}: {config.directory}",
            hint="it was trained for another target" if own is None else _OTHER_MODEL,
        )
    return found


def _draft_ids(config: HeadConfig, offsets: Tensor | None) -> Tensor | None:
    """The head's ids by the target's: `d2t` has the distance of each of its own."""
    size = config.draft_vocab_size
    if offsets is None:
        if size == config.vocab_size:
            return None
        raise SpecDecError(
            f"the head drafts {size} of {config.vocab_size} ids, and has no `d2t` that says which: {config.directory}",
            hint=_OTHER_MODEL,
        )
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise SpecDecError(
            f"the head's `d2t` is {str(offsets.dtype).removeprefix('torch.')} {list(offsets.shape)}, and not a whole "
            f"number for each of {size} ids: {config.directory}",
            hint=_OTHER_MODEL,
        )
    ids = torch.arange(size) + offsets.long()
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(outside):
        raise SpecDecError(
            f"the head's `d2t` points outside the target's vocabulary of {config.vocab_size}: {int(outside[0])}, "
            f"in {config.directory}",
            hint="it was trained for another target",
        )
    if len(set(ids.tolist())) < size:
        raise SpecDecError(f"the head's `d2t` names an id of the target twice: {config.directory}", hint=_OTHER_MODEL)
    return rows_by_id(ids, config.vocab_size)


def _layers_of(config: HeadConfig) -> Any:
    """A model without memory, of which the layers, the norm and the rotary embedding are taken."""
    settings = {key: value for key, value in config.layers.items() if key not in ("model_type", "architectures")}
    try:
        pretrained = AutoConfig.for_model(str(config.layers["model_type"]), **settings)
        with MODEL_INIT_LOCK, quiet_transformers():
            model: PreTrainedModel = AutoModel.from_config(pretrained, attn_implementation=PAGED)  # type: ignore[no-untyped-call]
        first: Any = model.layers[0]  # type: ignore[index]
        assert all(hasattr(first, name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
    except Exception as error:  # whatever transformers says of a config
        raise SpecDecError(
            f"the head's layers cannot be made by its config.json, which is of {config.layers['model_type']}: "
            f"{config.directory}",
            hint="layers as Llama's and Qwen3's are supported",
        ) from error
    return model


def _rotary_of(model: Any) -> nn.Module:
    """Its own, with numbers: those of a model without memory have none."""
    rotary: nn.Module = type(model.rotary_emb)(model.config)
    return rotary


def _for_kernels(shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    return tuple(replace(one, key_head_dim=one.key_head_dim + _EXTRA) for one in shapes)


def _kv_shape(attention: Any, layer: int) -> LayerShape:
    config: PreTrainedConfig = attention.config
    heads: int = config.num_key_value_heads
    return LayerShape(layer, heads, attention.head_dim, attention.head_dim, None)


def _attention_inputs(batch: Batch, pool: KVPool, states: Tensor, rotary: nn.Module) -> dict[str, Any]:
    """Arguments of layers beside the first."""
    positions = batch.positions.reshape(1, -1)
    return {
        "position_embeddings": rotary(states[None], positions),
        "attention_mask": None,
        "paged": _paged_pairs(batch, pool, tuple(range(len(pool.keys)))),
    }


def _paged_pairs(batch: Batch, pool: KVPool, layers: tuple[int, ...], depth: int = 0) -> PagedPairs:
    """Inputs of a head's `layers`, the `depth`th of several heads that have as many."""
    own = slice(depth * len(layers), (depth + 1) * len(layers))
    return PagedPairs(
        pool.keys[own],
        pool.values[own],
        [],
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        layers,
        num_hidden=depth + 1,
    )
