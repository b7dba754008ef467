"""Modules of transformers' that compute in a way that a step cannot, replaced by class.

Those of Llama 4 take a token's place in its row for its position, rotate by complex numbers, and have every expert
compute every token. Indices of keys choose all of them as far as `pretrained.num_positions` goes. Layers of StableLM
and Nemotron do not hand keywords on to their attention, nor do Mamba's models and blocks to their mixers. GPT-J,
GPT-Neo and their like compute attention in a method of their own, without transformers' interface.

Without a step's paged inputs, or with another attention than ours, they stay transformers'.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.compiler.attention import KERNEL, PAGED, PROBE, PagedInputs, Recorded
from runtime.compiler.experts import computes_by_kernel, expert_product


def place_modules(model: PreTrainedModel) -> None:
    """Replace those of the model's modules that are among these."""
    for name, module in model.named_modules():
        ours = _OURS.get(type(module).__name__)
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

    def update(self, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return key, value


class _Attention(nn.Module):
    """Queries of layers without rotation have a temperature, by their positions."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        paged: PagedInputs | Recorded | None = kwargs.get("paged")
        if isinstance(paged, PagedInputs):
            kwargs["past_key_values"] = _KeepsNothing(paged.positions.flatten())
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

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        raise NotImplementedError

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
        with _handed(attention, _taken(kwargs)):
            return super().forward(*arguments, **kwargs)


def _taken(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take out of a model's keywords what attention by the interface takes besides the model's own, if there is any:
    a step's paged inputs, or the quantizer of the reference (`runtime.compiler.reference`)."""
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


_INDEXED = ("AXK2", "DeepseekV32", "Dots3NoteText", "GlmMoeDsa", "Glm5NextText", "HYV4")
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
    **dict.fromkeys(("BloomForCausalLM", "MptForCausalLM"), _OwnAttentionModel),
    **dict.fromkeys(
        ("GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM"),
        _OwnAttentionModel,
    ),
}
