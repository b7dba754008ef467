"""Modules of transformers' that compute in a way that a step cannot, replaced by class.

Those of Llama 4 take a token's place in its row for its position, rotate by complex numbers, and have every expert
compute every token. Indices of keys choose all of them as far as `pretrained.num_positions` goes. Layers of StableLM
and Nemotron do not hand keywords on to their attention, nor do Mamba's models and blocks to their mixers. GPT-J,
GPT-Neo, Falcon and their like compute attention in a method of their own, without transformers' interface. DBRX, JetMoE
and LongCat sort tokens by the experts that they choose, by their values. DiffLlama attends twice in a layer, and HRM's
layers are passed several times.

Without a step's paged inputs, or with another attention than ours, they stay transformers'.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.model.attention import CACHE, KERNEL, PAGED, PROBE, PagedInputs, Recorded
from runtime.model.experts import chosen_product, computes_by_kernel, expert_product


def place_modules(model: PreTrainedModel) -> None:
    """Replace those of the model's modules that are among these."""
    for name, module in model.named_modules():
        if is_linear(module):
            module.__class__ = nn.Linear
        ours = _OURS.get(type(module).__name__)
        if ours is _OwnAttention and not hasattr(module, "_attn"):
            continue  # GPT-J's and CodeGen's, which is by the interface since transformers 5.24
        if ours is not None and not isinstance(module, ours):
            if ours is _Rotary:
                _rotate_real_numbers(type(module).__module__)
            module.model_config = model.config
            if issubclass(ours, _Attends):
                module.config = model.config
                module.layer_idx = next(int(part) for part in name.split(".") if part.isdecimal())
            module.__class__ = _placed(type(module), ours)  # type: ignore[arg-type]
            if issubclass(ours, _Biased):
                module.register_buffer("slopes", module.slopes_of_heads(model.device), persistent=False)
            if ours is _MptAttention:
                _mask_anyway(_own_module(module))


def is_linear(module: nn.Module) -> bool:
    """True for Falcon's linear layers, which are torch's but for the order of a product's sum."""
    return type(module).__name__ == "FalconLinear"


@cache
def _placed(module_class: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    return type(module_class.__name__, (ours, module_class), {})


class _Positions:
    """Number of tokens before a row's, of which each is told another: added to places, it is positions."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __radd__(self, places: Tensor) -> Tensor:
        return self.positions


class _KeepsNothing:
    """A cache of no keys and values, in which rows have their own positions."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = _Positions(positions)

    def get_seq_length(self, layer: int) -> _Positions:
        return self.positions

    def update(self, key: Tensor, value: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
        return key, value


class _Attention(nn.Module):
    """Queries of layers without rotation have a temperature, by their positions."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        paged: PagedInputs | Recorded | None = kwargs.get("paged")
        if isinstance(paged, PagedInputs):
            kwargs[CACHE] = _KeepsNothing(paged.positions.flatten())
        return super().forward(hidden_states, *arguments, **kwargs)


class _Layer(nn.Module):
    """A layer hands the step's paged inputs on to the module of it that mixes tokens."""

    mixing = "self_attn"

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        with _handed([self.get_submodule(self.mixing)], _taken(kwargs)):
            return super().forward(*arguments, **kwargs)


class _Block(_Layer):
    mixing = "mixer"


class _JambaLayer(_Layer):
    mixing = "mamba"


class _Model(nn.Module):
    """A model hands the step's paged inputs on to its layers, and no mask: a step has no padding.

    All of its layers get numbers of the dtype that they return, which the first one makes of embeddings.
    """

    model_config: Any
    backbone: nn.Module

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        taken = _taken(kwargs)
        if taken:
            embedded = self.backbone.embeddings(kwargs.pop("input_ids"))  # type: ignore[operator]
            kwargs["inputs_embeds"] = embedded.float() if self.model_config.residual_in_fp32 else embedded
            kwargs["attention_mask"] = None
        with _handed(self.backbone.layers, taken):  # type: ignore[arg-type]
            return super().forward(*arguments, **kwargs)


class _Attends(nn.Module):
    """Attention that its model hands the step's paged inputs on to."""

    config: Any


class _OwnAttention(_Attends):
    """Attention is by transformers' interface, in place of a method that computes it of queries, keys and values."""

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        with _handed([self], _taken(kwargs), "_attn"):
            return super().forward(*arguments, **kwargs)

    def _attn(
        self,
        query: Tensor,  # (1, H, B x Q, D), as key and value
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **taken: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not taken:
            attended: tuple[Tensor, Tensor] = super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
            return attended
        window = self.config.window_size if getattr(self, "attention_type", None) == "local" else None
        if window is not None:  # of which only GPT-Neo's own mask knows, which lies beside this one
            own = self.bias[:, :, : key.shape[2], : key.shape[2]]  # type: ignore[index]
            attention_mask = None if "paged" in taken else attention_mask.masked_fill(~own, -torch.inf)  # type: ignore[union-attr]
        divisor: Any = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", 1.0)  # GPT-Neo has none
        output, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self,
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attention_mask,
            scaling=1.0 / float(divisor),
            sliding_window=window,
            **taken,
        )
        return output.transpose(1, 2), None


class _Biased(_Attends):
    """Attention is by transformers' interface, and a logit loses with each token between query and key what its head
    loses (ALiBi, arXiv 2108.12409)."""

    slopes: Tensor  # (H,) float32

    @abstractmethod
    def slopes_of_heads(self, device: torch.device) -> Tensor:
        """(H,) float32 slopes."""

    def attended(
        self, heads: Sequence[Tensor], attention_mask: Tensor | None, scaling: float, taken: dict[str, Any]
    ) -> Tensor:
        """(1, B x Q, H x D) of queries, keys and values, (1, H, B x Q, D) each."""
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output: Tensor = attend(self, *heads, attention_mask, scaling=scaling, slopes=self.slopes, **taken)[0]
        return output.flatten(2)


class _BloomAttention(_Biased):
    num_heads: int
    inv_norm_factor: float
    query_key_value: nn.Linear
    dense: nn.Linear

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        slopes: Tensor = _own_module(self)._get_alibi_slopes(self.num_heads, device)
        return slopes

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if not (taken := _taken(kwargs)):
            return super().forward(hidden_states, residual, alibi, attention_mask, **kwargs)
        heads = self._reshape(self.query_key_value(hidden_states))  # type: ignore[operator]
        return self.dense(self.attended(heads, attention_mask, self.inv_norm_factor, taken)) + residual, None


class _MptAttention(_Biased):
    n_heads: int
    softmax_scale: float
    clip_qkv: float | None
    Wqkv: nn.Linear
    out_proj: nn.Linear

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        of_last_two: Tensor = _own_module(self).build_mpt_alibi_tensor(self.n_heads, 2, device=device)
        return -of_last_two[:, 0, 0]

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        if not (taken := _taken(kwargs)):
            return super().forward(hidden_states, *arguments, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = [part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2)]
        mask = None if "paged" in taken else _added(kwargs.get("attention_mask"), mixed.dtype)
        return self.out_proj(self.attended(heads, mask, self.softmax_scale, taken)), None


class _FalconAttention(_Attends):
    """Keys and values of all the query heads that share them are computed once, of old and new architectures alike."""

    query_key_value: nn.Module
    dense: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_norm_factor: float
    multi_query: bool
    new_decoder_architecture: bool

    def forward(self, hidden_states: Tensor, alibi: None, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        if not (taken := _taken(kwargs)):
            return super().forward(hidden_states, alibi, attention_mask, **kwargs)
        own = self.new_decoder_architecture or self.multi_query
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads if own else self.num_heads, -1))
        parts = fused.unflatten(-1, (-1, self.head_dim)).permute(0, 2, 3, 1, 4)  # (1, Hk, H / Hk + 2, B x Q, D)
        query, key, value = parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]
        query, key = _own_module(self).apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, **taken)[0]
        return self.dense(output.flatten(2)), None


def _mask_anyway(module: Any) -> None:
    """Have MPT's model, which asks its mask for another dtype, get one where attention takes none."""
    theirs: Callable[..., Tensor | None] = module.create_causal_mask
    if hasattr(theirs, "or_none"):
        return

    @wraps(theirs)
    def create_causal_mask(**kwargs: Any) -> Tensor:
        mask, embedded = theirs(**kwargs), kwargs["inputs_embeds"]
        return embedded.new_zeros(1, 1, 1, 1) if mask is None else mask

    create_causal_mask.or_none = theirs  # type: ignore[attr-defined]
    module.create_causal_mask = create_causal_mask


def _own_module(module: nn.Module) -> Any:
    """Transformers' module of Python that a replaced module's own class is of."""
    return sys.modules[type(module).__bases__[1].__module__]


def _added(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask that is added to scores, of MPT's, which is True for keys that are not seen."""
    return None if hidden is None else torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)


class _OwnAttentionModel(nn.Module):
    """A model hands the step's paged inputs on to all of its attention at once: its layers take no others."""

    _can_set_attn_implementation_cached_value = True  # which transformers would read from the module's code

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        attention = [module for module in self.modules() if isinstance(module, _Attends)]
        with _handed(attention, _taken(kwargs) if attention else {}):
            return super().forward(*arguments, **kwargs)


def _taken(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take out of a model's keywords what attention by the interface takes besides the model's own, if there is any:
    a step's paged inputs, or the quantizer of the reference (`runtime.builder.reference`)."""
    taken = {name: kwargs.pop(name, None) for name in ("paged", "quantize_kv")}
    return {name: value for name, value in taken.items() if value is not None}


@contextmanager
def _handed(modules: Iterable[nn.Module], taken: dict[str, Any], method: str = "forward") -> Iterator[None]:
    """Have a method of modules get these keywords, if there are any, in the block.

    What stood there is put back, not taken away, which `torch.compile` has no understanding of.
    """
    before = [(module, getattr(module, method)) for module in modules] if taken else []
    for module, function in before:
        setattr(module, method, partial(function, **taken))
    try:
        yield
    finally:
        for module, function in before:
            setattr(module, method, function)


def _attends_by_ours(config: Any) -> bool:
    return config._attn_implementation in (KERNEL, PAGED, PROBE)


class _Indexer(nn.Module):
    """An index of keys that chooses all of them: a sequence has no more than it would choose."""

    model_config: Any

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        if _attends_by_ours(self.model_config):
            return hidden_states.new_zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)
        chosen: Tensor = super().forward(hidden_states, *arguments, **kwargs)
        return chosen


class _Indexed(nn.Module):
    """Attention whose mask an index would narrow."""

    model_config: Any

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("paged"), PagedInputs) and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = kwargs["hidden_states"].new_zeros(1, 1, 1, 1)  # for the index to look at
        return super().forward(*arguments, **kwargs)

    def build_attention_mask_from_topk(self, **kwargs: Any) -> Tensor | None:
        if _attends_by_ours(self.model_config):
            return None
        mask: Tensor = super().build_attention_mask_from_topk(**kwargs)  # type: ignore[misc]
        return mask


class _Rotary(nn.Module):
    """Cosines and sines (1, B x Q, D / 2, 2) instead of complex numbers."""

    model_config: Any
    inv_freq: Tensor
    attention_scaling: float

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.model_config._attn_implementation not in (KERNEL, PAGED):
            factors: Tensor = super().forward(x, position_ids)
            return factors
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


class _Mixture(nn.Module):
    """Experts compute the tokens that have chosen them."""

    model_config: Any
    top_k: int
    router: nn.Linear
    experts: nn.Module
    shared_expert: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not computes_by_kernel(self.model_config):
            output: tuple[Tensor, Tensor] = super().forward(hidden_states)
            return output
        x = hidden_states.flatten(0, -2)
        logits = F.linear(x, self.router.weight)
        best, chosen = torch.topk(logits, self.top_k, dim=1)
        scores = best.float().sigmoid().to(x.dtype)
        inputs = (x.unsqueeze(1) * scores.unsqueeze(-1)).flatten(0, 1)
        gate, up = expert_product(self.experts, "gate_up_proj", inputs, chosen.flatten()).chunk(2, -1)
        routed = expert_product(self.experts, "down_proj", up * self.experts.act_fn(gate), chosen.flatten())  # type: ignore[operator]
        summed = routed.reshape(*chosen.shape, -1).sum(1)
        return self.shared_expert(x) + summed, logits


class _DbrxExperts(nn.Module):
    """Experts whose weights are one matrix, in which one follows another."""

    model_config: Any
    mlp: Any
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not _attends_by_ours(self.model_config):
            output: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return output
        gate, up, down = (
            weight.unflatten(0, (self.num_experts, -1)) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        product, chosen = partial(chosen_product, self.model_config), top_k_index.flatten()
        x = hidden_states.flatten(0, 1)
        inner = self.mlp.activation_fn(product(gate, x, chosen)) * product(up, x, chosen)
        outputs = product(down.transpose(1, 2), inner, chosen).view(*top_k_index.shape, -1)
        summed: Tensor = (outputs * top_k_weights.unsqueeze(-1)).sum(1)
        return summed.view_as(hidden_states)


class _LongcatExperts(nn.Module):
    """Experts, and beyond them some that return what they get."""

    model_config: Any
    gate_up_proj: Tensor
    down_proj: Tensor
    num_routed_experts: int
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not _attends_by_ours(self.model_config):
            output: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return output
        product, computes = partial(chosen_product, self.model_config), top_k_index < self.num_routed_experts
        chosen = top_k_index.where(computes, 0).flatten()
        gate, up = product(self.gate_up_proj[: self.num_routed_experts], hidden_states, chosen).chunk(2, -1)
        outputs: Tensor = product(self.down_proj, self.act_fn(gate) * up, chosen).view(*top_k_index.shape, -1)
        outputs = outputs.where(computes.unsqueeze(-1), hidden_states.unsqueeze(1))
        return (outputs * top_k_weights.unsqueeze(-1)).to(hidden_states.dtype).sum(1)


class _JetMoe(nn.Module):
    """Linear layers that a token's router chooses: of its feed-forward layer, and of its queries."""

    model_config: Any
    input_linear: Any  # of weights (E, outputs, inputs)
    output_linear: Any
    router: Any
    activation: Callable[[Tensor], Tensor]
    top_k: int
    bias: Tensor

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers of chosen linear layers and their weights, (S, k) each, and the router's logits, of (S, C)."""
        logits = self.router.layer(x).float()
        best, chosen = logits.topk(self.router.top_k, dim=1)
        return chosen, best.softmax(1).type_as(x), logits

    def _chosen(self, linear: Any, x: Tensor, chosen: Tensor) -> Tensor:
        return chosen_product(self.model_config, linear.weight, x, chosen.flatten())

    def _summed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Output (1, S, C) of what was computed for each chosen one, (S x k, inner size)."""
        outputs = self._chosen(self.output_linear, x, chosen) * weights.reshape(-1, 1)
        return (outputs.view(*chosen.shape, -1).sum(1) + self.bias)[None]

    def forward(self, layer_input: Tensor) -> Tensor:
        if not _attends_by_ours(self.model_config):
            output: Tensor = super().forward(layer_input)
            return output
        x = layer_input.flatten(0, 1)
        chosen, weights, _ = self._route(x)
        first, second = self._chosen(self.input_linear, x, chosen).chunk(2, -1)
        return self._summed(self.activation(first) * second, chosen, weights)


class _JetMoeAttention(nn.Module):
    """Heads of keys and values are as many as the layer computes: query heads that share one lie beside each other."""

    model_config: Any
    experts: Any
    kv_proj: nn.Linear
    num_key_value_heads: int
    top_k: int
    scaling: float

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if not _attends_by_ours(self.model_config):
            return super().forward(hidden_states, **kwargs)
        x, cos_and_sin = hidden_states.flatten(0, 1), kwargs.pop("position_embeddings")
        chosen, weights, logits = self.experts._route(x)
        queries = self.experts._chosen(self.experts.input_linear, x, chosen)  # (S x k, Hk x D)
        query = queries.view(-1, self.top_k, self.num_key_value_heads, queries.shape[-1] // self.num_key_value_heads)
        query = query.permute(2, 1, 0, 3).flatten(0, 1)[None]
        heads = self.kv_proj(hidden_states).unflatten(-1, (2 * self.num_key_value_heads, -1)).transpose(1, 2)
        key, value = heads.chunk(2, 1)
        query, key = _own_module(self).apply_rotary_pos_emb(query, key, *cos_and_sin)
        attend = ALL_ATTENTION_FUNCTIONS[self.model_config._attn_implementation]
        mask = kwargs.pop("attention_mask", None)
        output = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)[0]
        inner = output[0].unflatten(1, (-1, self.top_k)).transpose(1, 2).flatten(2).flatten(0, 1)
        return self.experts._summed(inner, chosen, weights), None, logits


class _DiffLlamaAttention(nn.Module):
    """Both halves of a layer's values are attended to by the same queries and keys: at once, as longer values."""

    model_config: Any
    head_dim: int
    scaling: float
    lambda_init: float
    groupnorm: nn.Module
    o_proj: nn.Linear

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if not _attends_by_ours(self.model_config):
            return super().forward(hidden_states, **kwargs)
        query, key, value = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = _own_module(self).apply_rotary_pos_emb(query, key, *kwargs.pop("position_embeddings"))
        value = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)
        attend = ALL_ATTENTION_FUNCTIONS[self.model_config._attn_implementation]
        mask = kwargs.pop("attention_mask", None)
        first, second = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)[0].chunk(2, 2)
        one, two = (self._weight(number).to(query.dtype) for number in "12")
        output = (1 - self.lambda_init) * self.groupnorm(first - (one - two + self.lambda_init) * second)
        return self.o_proj(output.flatten(2)), None

    def _weight(self, number: str) -> Tensor:
        product: Tensor = getattr(self, f"lambda_q{number}") * getattr(self, f"lambda_k{number}")
        return product.sum(-1, dtype=torch.float32).exp()


class _HrmAttention(nn.Module):
    """A layer has keys and values of its own each time that it is passed."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *arguments: Any, cycle_offset: int = 0, **kwargs: Any) -> Any:
        own = self.layer_idx
        self.layer_idx = own + cycle_offset
        try:
            return super().forward(hidden_states, *arguments, **kwargs)
        finally:
            self.layer_idx = own


def _rotate_real_numbers(module_name: str) -> None:
    """Have transformers' module rotate by cosines and sines too."""
    module = sys.modules[module_name]
    theirs: Callable[..., Any] = module.apply_rotary_emb
    if hasattr(theirs, "of_complex"):
        return

    @wraps(theirs)
    def apply_rotary_emb(query: Tensor, key: Tensor, factors: Tensor) -> Any:
        if factors.is_complex():
            return theirs(query, key, factors)
        return tuple(_rotated(one, factors[:, :, None]) for one in (query, key))

    apply_rotary_emb.of_complex = theirs  # type: ignore[attr-defined]
    module.apply_rotary_emb = apply_rotary_emb  # type: ignore[attr-defined]


def _rotated(heads: Tensor, factors: Tensor) -> Tensor:
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    (first, second), (cos, sin) = ((one[..., 0], one[..., 1]) for one in (pairs, factors))
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(3).type_as(heads)


_INDEXED = ("AXK2", "DeepseekV32", "Dots3NoteText", "GlmMoeDsa", "Glm5NextText", "HYV4", "MistralLarge4Text")
_OURS: dict[str, type[nn.Module]] = {
    **{f"{name}Indexer": _Indexer for name in _INDEXED},
    **{f"{name}Attention": _Indexed for name in _INDEXED},
    "Llama4TextAttention": _Attention,
    "Llama4TextRotaryEmbedding": _Rotary,
    "Llama4TextMoe": _Mixture,
    "NemotronDecoderLayer": _Layer,
    "JambaMambaDecoderLayer": _JambaLayer,
    **dict.fromkeys(("MambaBlock", "Mamba2Block", "FalconMambaBlock"), _Block),
    **dict.fromkeys(("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"), _Model),
    "StableLmDecoderLayer": _Layer,
    **dict.fromkeys(
        ("GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention", "GPTNeoXJapaneseAttention"), _OwnAttention
    ),
    "BloomAttention": _BloomAttention,
    "MptAttention": _MptAttention,
    "FalconAttention": _FalconAttention,
    **dict.fromkeys(("BloomForCausalLM", "MptForCausalLM", "FalconForCausalLM"), _OwnAttentionModel),
    "DbrxExperts": _DbrxExperts,
    "LongcatFlashExperts": _LongcatExperts,
    **dict.fromkeys(("JetMoeMoE", "JetMoeMoA"), _JetMoe),
    "JetMoeAttention": _JetMoeAttention,
    "DiffLlamaAttention": _DiffLlamaAttention,
    "HrmTextAttention": _HrmAttention,
    **dict.fromkeys(
        ("GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM"),
        _OwnAttentionModel,
    ),
}
