"""Trained drafters (heads) as modules: transformers' own layers, over the pages of a `HeadCache`.

For each token a head reads a pair: the token's embedding, and a state of the token before. That state is the target's
hidden states or, within a draft, the head's own output. The output predicts the next token (`logits`), and is the state
for the next pair of the draft.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from runtime.checkpoint.config import LayerShape
from runtime.checkpoint.quant.planning import load_numbers
from runtime.checkpoint.quant.weight import QuantizedWeight
from runtime.checkpoint.source import SourceTensor, read_tensors
from runtime.compiler.quantized_copy import DRAFT_ACTIVATIONS, rows_of
from runtime.core.batch import Batch
from runtime.core.kv_cache import KVPool
from runtime.drafters.heads.assistant import load_assistant
from runtime.drafters.heads.block_head import BlockHead, own_name
from runtime.drafters.heads.head_config import OF_TWO_HEADS, HeadConfig, check_weights
from runtime.drafters.heads.mtp_head import ChainedMtp, MtpHead, embeddings_of, load_mtp, shapes_of, shared_with_target
from runtime.drafters.heads.paged_head import HEAD, PagedHead, PagedPairs, for_kernels, kv_shapes, paged_pairs
from runtime.engine.draft_vocab import among_all
from runtime.model.attention import PAGED
from runtime.model.model import is_quantizable
from runtime.model.quantized import QuantizedLinear
from runtime.util.errors import SpecDecError
from runtime.util.locks import MODEL_INIT_LOCK, quiet_transformers


class PackedQuantized(nn.Module):
    """A quantized linear layer in the layout of the CPU's kernel."""

    packed: Tensor

    def __init__(self, layer: QuantizedLinear, arithmetic: int) -> None:
        super().__init__()
        self.register_buffer("packed", layer.pack(), persistent=False)
        self.bias, self.num_outputs = layer.bias, layer.out_features
        self.arithmetic, self.token_bits = arithmetic, layer.token_bits

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.specdec.quantized_linear(
            x, self.packed, self.bias, self.num_outputs, self.arithmetic, self.token_bits
        )
        return outputs


class PackedLinear(nn.Module):
    """A linear layer for the CPU's kernel. `known` has packed weights of the target's step; an equal one is shared."""

    packed: Tensor

    def __init__(self, layer: nn.Linear, arithmetic: int, known: dict[str, Tensor]) -> None:
        super().__init__()
        packed: Tensor = torch.ops.specdec.pack_linear(layer.weight.detach())
        same = (one for one in known.values() if one.shape == packed.shape and one.dtype == packed.dtype)
        same_one = next((one for one in same if torch.equal(one, packed)), packed)
        self.register_buffer("packed", same_one, persistent=False)
        self.bias, self.num_outputs, self.arithmetic = layer.bias, layer.out_features, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.specdec.linear(x, self.packed, self.bias, self.num_outputs, self.arithmetic)
        return outputs


class FusedNorm(nn.Module):
    """An RMSNorm by torch's fused operation. A family's own class calls seven operations, and these calls cost more
    than the arithmetic.
    """

    scale: Tensor

    def __init__(self, scale: Tensor, eps: float, weight: Tensor) -> None:
        super().__init__()
        self.eps, self.weight = eps, weight  # layers ask for the weight's dtype
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale, self.eps).to(x.dtype)


def _fused_norm(norm: nn.Module) -> FusedNorm | None:
    """Fused form of an RMSNorm, whose scale is its weight w or 1 + w; None for other modules."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    with torch.no_grad():
        x = torch.linspace(1, 2, weight.numel(), device=weight.device)
        fused = FusedNorm(norm(x) / F.rms_norm(x, weight.shape, eps=eps), eps, weight)
        return fused if torch.allclose(fused(-x), norm(-x)) else None


def use_kernels(head: nn.Module, arithmetic: int, known: dict[str, Tensor]) -> None:
    """Have the CPU's kernels, which must be loaded, compute attention and linear layers; also fuse the norms."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if (norm := _fused_norm(child)) is not None:
                setattr(module, name, norm)
            elif type(child) is nn.Linear and child.in_features % 2 == 0:
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
    """True if the CPU's kernels compute the head: `hide_first` is for such heads."""

    reads_target: bool
    """True if it has no keys and values of its own, and reads the target's from a sequence's last position."""

    config: HeadConfig
    attention: str
    """transformers' name of the attention that its layers call if kernels compute them."""

    first_token: int
    """The first token of a sequence for which it has keys and values."""

    keeps_outputs: bool
    """True if its outputs for a sequence's own tokens are read later."""

    drafts_at_once: bool
    """True if a single pass drafts all tokens."""

    longest_draft: int | None
    """Most tokens that it can draft in a row; None if there is no limit."""

    draft_ids: Tensor | None
    """The target's ids of the output layer's rows [rows]; None for all ids, in order."""

    @property
    def state_size(self) -> int: ...

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]: ...

    def reduce(self, states: Tensor) -> Tensor:
        """States [tokens, state_size] from hidden states [tokens, width], to be kept; or the first numbers of these
        states, behind which the head's own outputs are kept.
        """
        ...

    def to(self, device: torch.device) -> "Head": ...

    def __call__(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        """Outputs [B x Q, state_size] for the batch's tokens; `states`, of the same shape, belong to the tokens before
        these. `num_drafted` is the number of draft tokens that the sequences end with.
        """
        ...

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        """Logits [tokens, vocab] from outputs [tokens, state_size]; -inf for ids that the head never drafts."""
        ...


class EagleHead(PagedHead):
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
        model = _layers_of(config)
        with torch.device("meta"):
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
        self.rotary_emb = type(model.rotary_emb)(model.config)  # with numbers
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        shapes = kv_shapes(self.layers)
        return for_kernels(shapes) if self.uses_kernels else shapes

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
        """The state [state_size] that stands for an unknown token (P-EAGLE)."""
        return self.reduce(self.mask_hidden)

    def pages(self, batch: Batch, pool: KVPool) -> PagedPairs:
        return paged_pairs(batch, pool, tuple(range(len(pool.keys))))

    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        attention = {"position_embeddings": self.rotary_emb(states, positions), "attention_mask": None, **attention}
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

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        return among_all(self.own_logits(outputs), self.draft_ids, self.config.vocab_size)

    def own_logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] from outputs [..., hidden]."""
        normed = outputs if "norm_output" in self.config.flags else self.norm(outputs)
        drafted: Tensor = self.lm_head(normed)
        return drafted if self.config.logit_scale == 1 else drafted * self.config.logit_scale


def output_tensor(config: HeadConfig) -> SourceTensor:
    """The weight [rows, hidden] of the head's output layer, as in its files; of an MTP head, it is the model's output
    layer. SpecDecError if the head has no output layer of its own, or only a quantized layer.
    """
    entries = read_tensors(config.directory)
    named = {_own_name(one.name): one for one in entries}
    if config.kind == "mtp":
        named = shared_with_target(entries, embeddings_of(config))
    tied = ("model.embed_tokens.weight", "model.embeddings.weight", "embed_tokens.weight")
    is_there = any(name.startswith("lm_head.") for name in named)  # also if it is quantized, under other suffixes
    found = next((named[name] for name in (("lm_head.weight",) if is_there else tied) if name in named), None)
    if found is None or not found.is_float or config.reads_target_output:
        raise SpecDecError(
            f"the head has no output layer that could be quantized: {config.directory}",
            hint="leave the output layer that drafts as it is",
        )
    return found


def set_output(head: Head, ids: Tensor | None, quantized: QuantizedWeight | None) -> None:
    """Have a head with all ids draft only `ids` [n], or replace any head's output layer by the `quantized` layer, which
    has a row for each id that may be drafted. Heads with centroids stay as they are.
    """
    if (ids is None and quantized is None) or "centroids" in head.config.flags:
        return
    mtp: Any = head.step.model if isinstance(head, MtpHead | ChainedMtp) else None
    parts: Any = head
    output: nn.Linear = parts.lm_head if mtp is None else mtp.get_output_embeddings()
    if ids is not None:
        head.draft_ids = ids
        if isinstance(head, BlockHead) and head.block.markov_rank:
            head.markov_w2 = rows_of(head.markov_w2, ids).requires_grad_(requires_grad=False)
    if quantized is not None:
        made: nn.Module = QuantizedLinear(quantized, output.bias, DRAFT_ACTIVATIONS, with_kernels=False)
    else:
        assert ids is not None
        made = rows_of(output, ids)
    made.requires_grad_(requires_grad=False)
    if mtp is None:
        parts.lm_head = made
    else:
        mtp.set_output_embeddings(made)


def quantizable_layers(head: Head) -> dict[str, nn.Linear]:
    """A head's linear layers by name, except layers that compute logits, a router's scores or
    the weights with which states are added.
    """
    parts = cast(nn.Module, head)
    output = head.step.model.get_output_embeddings() if isinstance(head, MtpHead | ChainedMtp) else None  # type: ignore[no-untyped-call]
    linear = {name: one for name, one in parts.named_modules() if type(one) is nn.Linear and one is not output}
    return {name: one for name, one in linear.items() if name not in _OF_LOGITS and is_quantizable(name)}


_OF_LOGITS = ("lm_head", "centroids", "markov_w2", "gate_proj", "confidence")


def set_layers(head: Head, layers: Mapping[str, QuantizedWeight]) -> None:
    """Replace the head's layers by quantized layers."""
    parts = cast(nn.Module, head)
    for name, weight in layers.items():
        made = QuantizedLinear(weight, parts.get_submodule(name).bias, DRAFT_ACTIVATIONS, with_kernels=False)  # type: ignore[arg-type]
        parts.set_submodule(name, made.requires_grad_(requires_grad=False))


def load_head(
    config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype, target_output: Tensor | None = None
) -> Head:
    """Load the head on the CPU. `target_embedding` and `target_output`, both [vocab, hidden], are for heads without
    embeddings or an output layer of their own. SpecDecError if weights are missing, or do not have the shapes that the
    head's config states.
    """
    with torch.no_grad():
        load: Any = {"mtp": load_mtp, "assistant": load_assistant}.get(config.kind)
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
    """Load a head whose layers are in its own files."""
    is_block = config.kind == "dflash"
    entries = {(own_name if is_block else _own_name)(one.name): one for one in read_tensors(config.directory)}
    tensors = dict(zip(entries, load_numbers(list(entries.values())), strict=True))
    head = BlockHead(config, _layers_of(config)) if is_block else EagleHead(config)
    if config.reads_target_output and target_output is not None:
        tensors["lm_head.weight"] = target_output
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if is_block and "confidence.weight" in tensors:  # DeepSeek V4's has none
        tensors.setdefault("confidence.bias", torch.zeros(1))
    embedding, offsets = tensors.pop("embed_tokens.weight", None), tensors.pop("d2t", None)
    wanted = dict(head.named_parameters())
    in_files = {one.name for one in entries.values()}
    name_in_file: Callable[[str], str] = str if is_block else partial(_name_in_files, in_files)
    check_weights(config, shapes_of(wanted), shapes_of(tensors), name_in_file)
    head.load_state_dict({name: tensors[name].to(dtype) for name in wanted}, assign=True)
    head.embedding = _embedding(config, embedding, target_embedding).to(dtype)
    head.draft_ids = _draft_ids(config, offsets)
    return head


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _name_in_files(in_files: Collection[str], name: str) -> str:
    """Name of an EAGLE-3 head's weight in files that have the names `in_files` (the inverse of `_own_name`)."""
    if name.startswith("layers.0.") and any("midlayer." in one for one in in_files):
        name = f"midlayer.{name.removeprefix('layers.0.')}"
    is_inside = name != "lm_head.weight" and any(one.startswith("model.") for one in in_files)
    return f"model.{name}" if is_inside else name


def _embedding(config: HeadConfig, own: Tensor | None, target: Tensor | None) -> Tensor:
    found = target if own is None else own
    if found is None:
        raise SpecDecError(
            "the head has no embeddings of its own, and the engine has its target's quantized only: "
            f"{config.directory}",
            hint="take a head with `embed_tokens.weight`",
        )
    if tuple(found.shape) != (config.vocab_size, config.hidden_size):
        raise SpecDecError(
            f"the head reads embeddings {[config.vocab_size, config.hidden_size]}, and "
            f"{'its target has' if own is None else 'its own are'} {list(found.shape)}: {config.directory}",
            hint="it was trained for another target" if own is None else OF_TWO_HEADS,
        )
    return found


def _draft_ids(config: HeadConfig, offsets: Tensor | None) -> Tensor | None:
    """The target's id for each of the head's ids [draft_vocab_size], from `d2t`, which holds the difference between the
    two; None for a head that drafts all ids. SpecDecError if `d2t` is missing, malformed, or names an id twice.
    """
    size = config.draft_vocab_size
    if offsets is None:
        if size == config.vocab_size:
            return None
        raise SpecDecError(
            f"the head drafts {size} of {config.vocab_size} ids, and has no `d2t` that says which: {config.directory}",
            hint=OF_TWO_HEADS,
        )
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise SpecDecError(
            f"the head's `d2t` is {str(offsets.dtype).removeprefix('torch.')} {list(offsets.shape)}, and not a whole "
            f"number for each of {size} ids: {config.directory}",
            hint=OF_TWO_HEADS,
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
        raise SpecDecError(f"the head's `d2t` names an id of the target twice: {config.directory}", hint=OF_TWO_HEADS)
    return ids


def _layers_of(config: HeadConfig) -> Any:
    """A model on `meta` from which the layers, the norm and the rotary embedding are taken. SpecDecError if
    transformers cannot make it, or if its layers are of another form.
    """
    settings = {key: value for key, value in config.layers.items() if key not in ("model_type", "architectures")}
    try:
        pretrained = AutoConfig.for_model(str(config.layers["model_type"]), **settings)
        with torch.device("meta"), MODEL_INIT_LOCK, quiet_transformers():
            model: PreTrainedModel = AutoModel.from_config(pretrained, attn_implementation=PAGED)  # type: ignore[no-untyped-call]
        first: Any = model.layers[0]  # type: ignore[index]
        assert all(hasattr(first, name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
    except Exception as error:  # whatever transformers says of a config
        raise SpecDecError(
            "the head's layers cannot be made from its config.json, whose model type is "
            f"{config.layers['model_type']}: {config.directory}",
            hint="layers like Llama's and Qwen3's are supported",
        ) from error
    return model
