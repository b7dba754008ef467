"""Attention over a paged K/V cache, registered with transformers under two names.

`specdec_paged` consists of torch's own operations and runs on every device; `specdec_kernel` computes the same by the
CPU kernel of `runtime.kernels.ops`, which reads K/V in place. The model sees one row of B x Q tokens; only attention
knows that they are B sequences of Q tokens each. Whether a query may see a key is computed from positions alone: no
mask function is registered, so transformers hands over `attention_mask=None`, and nothing here may rely on it.

A third function, `specdec_probe`, computes nothing and records each layer's K/V shape and window. A model is supported
when every one of its layers was recorded (transformers' Falcon and BLOOM never call a registered function, and would
be silently wrong), and asks for the window that transformers' own mask has (Phi-MoE gives a window to its mask alone).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast

from runtime.checkpoint.config import LayerShape, StateShape
from runtime.core.kv_cache import are_quantizable, dequantize_kv, quantize_kv
from runtime.util.errors import SpecDecError

PAGED, KERNEL, PROBE = "specdec_paged", "specdec_kernel", "specdec_probe"
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of transformers' parameter for its cache: `cache` since 5.24."""
SEE_MODELS = "docs/models.md lists the model families that work"


@dataclass
class PagedInputs:
    """Inputs of attention that the model itself does not have; they are passed on as the forward keyword `paged`."""

    key_pools: list[Tensor]  # per layer (num_blocks, Hk, D, block_size)
    value_pools: list[Tensor]  # per layer (num_blocks, Hk, block_size, Dv)
    scale_pools: list[Tensor]  # of K/V in 8 bits per layer (num_blocks, Hk, 2, block_size)
    positions: Tensor  # (B, Q) int64
    slot_mapping: Tensor  # (B, Q) int64
    block_tables: Tensor  # (B, N) int64
    layers: tuple[int, ...]  # numbers of layers that have keys and values
    state_layers: tuple[int, ...] = ()  # numbers of layers that have a state
    state_slots: Tensor | None = None  # (B,) int64
    state_pools: list[Tensor] = field(default_factory=list)  # see `runtime.core.states.state_pools`
    masks: dict[tuple[int | None, int | None, int], Tensor] = field(default_factory=dict)

    def kv_place(self, layer: int) -> int:
        """Index of the layer's pools in the lists of key pools and value pools."""
        return self.layers.index(layer)

    def pools_of_state(self, layer: int) -> list[Tensor]:
        """The layer's pools for its convolution's last inputs and for its recurrent state, if it has them."""
        return self.state_pools[self.state_layers.index(layer) :: len(self.state_layers)]

    def mask(self, sliding_window: int | None, attention_chunk: int | None, num_groups: int) -> Tensor:
        """Mask [B, 1, G x Q, N x block_size] bool, True if the query may see the key; made once for each kind of layer.

        Key j of a row is at position j: the query at position 5 sees keys 0..5, with a window of 3 keys 3..5, and in
        chunks of 4 keys 4..5.
        """
        if (sliding_window, attention_chunk, num_groups) not in self.masks:
            block_size = self.key_pools[0].shape[3]
            key_positions = torch.arange(self.block_tables.shape[1] * block_size, device=self.positions.device)
            query_positions = self.positions[:, None, :, None]
            visible = key_positions <= query_positions
            if sliding_window is not None:
                visible = visible & (key_positions > query_positions - sliding_window)
            if attention_chunk is not None:
                visible = visible & (key_positions >= query_positions // attention_chunk * attention_chunk)
            self.masks[sliding_window, attention_chunk, num_groups] = visible.repeat(1, 1, num_groups, 1)
        return self.masks[sliding_window, attention_chunk, num_groups]

    def written(self) -> Tensor:
        """Flags bool [B, N x block_size], False behind a row's last token: blocks have old numbers there."""
        num_slots = self.block_tables.shape[1] * self.key_pools[0].shape[3]
        return torch.arange(num_slots, device=self.positions.device) <= self.positions.amax(1, keepdim=True)


@dataclass
class Recorded:
    """Shapes of layers, recorded by a forward on `meta`."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    states: dict[int, StateShape] = field(default_factory=dict)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, B x Q, D)
    key: Tensor,  # (1, Hk, B x Q, D)
    value: Tensor,  # (1, Hk, B x Q, Dv)
    attention_mask: Tensor | None,
    *,
    paged: PagedInputs,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # (H,) a sink: each head's logit of a key without a value
    slopes: Tensor | None = None,  # (H,) by which a logit falls with each token between query and key
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write this step's K/V into the pool, then attend over each row's blocks. Returns [1, B x Q, heads, value dim]."""
    _refuse_unsupported(module, kwargs)
    B, Q = paged.slot_mapping.shape
    (H, D), (Hk, Dv) = (query.shape[1], query.shape[3]), (value.shape[1], value.shape[3])
    layer = paged.kv_place(_layer_index(module))
    write_kv(paged, layer, key[0], value[0])
    keys, values = _read(paged, layer, query.dtype)
    broken = keys[..., 0].isnan()
    usable = (paged.written()[:, None] & ~broken).unsqueeze(-1)
    keys, values = keys.where(usable, 0), values.where(usable, 0)
    # The query heads of one KV head are folded into the query length: for Q = 1 in bfloat16 SDPA is then ten
    # times faster than with enable_gqa. Row g * Q + i of a KV head is query i of its head g.
    rows = query.reshape(H, B, Q, D).transpose(0, 1).reshape(B, Hk, H // Hk * Q, D)
    mask = paged.mask(sliding_window, attention_chunk_of(module), H // Hk)
    if softcap is None and s_aux is None and slopes is None:
        output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = capped(rows.float() @ keys.float().mT * (D**-0.5 if scaling is None else scaling), softcap)
        if slopes is not None:
            key_positions = torch.arange(keys.shape[2], device=keys.device)
            distances = (key_positions - paged.positions[:, None, :, None]).repeat(1, 1, H // Hk, 1)
            scores = scores + slopes.view(1, Hk, H // Hk, 1).repeat_interleave(Q, 2) * distances
        sinks = None if s_aux is None else s_aux.view(1, Hk, H // Hk, 1).repeat_interleave(Q, 2)
        weights = weights_beside_sinks(scores.masked_fill(~mask, -torch.inf), sinks)
        output = (weights @ values.float()).to(query.dtype)
    output = output.masked_fill((mask & broken.unsqueeze(2)).any(-1, keepdim=True), torch.nan)
    # Contiguous, like the output of transformers' own attention: some models take a view of it (AFMoE).
    return output.reshape(B, H, Q, Dv).transpose(1, 2).reshape(1, B * Q, H, Dv).contiguous(), None


def attention_chunk_of(module: nn.Module) -> int | None:
    """Length of the module's attention chunks, or None: a query sees no key before its chunk's beginning. transformers
    gives this length to the mask alone, not to attention (Llama 4).
    """
    config: Any = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None) or (), _layer_index(module)
    return config.attention_chunk_size if list(types[layer : layer + 1]) == ["chunked_attention"] else None


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def weights_beside_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over masked scores [..., keys] and a sink's logit for each row, [..., 1], whose weight is left out."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def write_kv(paged: PagedInputs, layer: int, key: Tensor, value: Tensor) -> None:
    """Put keys [Hk, B x Q, D] and values [Hk, B x Q, Dv] into their slots.

    A mask adds -inf to a score and multiplies a value by 0, so NaN or infinity in a masked token would spread. A token
    with such numbers is therefore stored as zeros with a key of NaN, and makes NaN only of outputs that see it.
    """
    key_pool, value_pool = paged.key_pools[layer], paged.value_pools[layer]
    slots, block_size = paged.slot_mapping.flatten(), key_pool.shape[3]
    at = slots // block_size, slots % block_size
    finite = key.isfinite().all(-1) & value.isfinite().all(-1)
    if paged.scale_pools:
        finite = finite & are_quantizable(key) & are_quantizable(value)
        (key, of_key), (value, of_value) = (
            quantize_kv(numbers.where(finite.unsqueeze(-1), 0), key_pool.dtype) for numbers in (key, value)
        )
        scales = torch.stack([of_key.where(finite, torch.nan), of_value], -1)
        paged.scale_pools[layer].permute(0, 3, 1, 2).index_put_(at, scales.transpose(0, 1))
    else:
        key, value = key.where(finite.unsqueeze(-1), torch.nan), value.where(finite.unsqueeze(-1), 0)
    key_pool.permute(0, 3, 1, 2).index_put_(at, key.transpose(0, 1))
    value_pool.transpose(1, 2).index_put_(at, value.transpose(0, 1))


def _read(paged: PagedInputs, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [B, kv heads, N x block_size, dim] and values [..., value dim] of all the rows' blocks."""
    tables = paged.block_tables
    keys = paged.key_pools[layer][tables].permute(0, 2, 1, 4, 3).flatten(2, 3)
    values = paged.value_pools[layer][tables].transpose(1, 2).flatten(2, 3)
    if not paged.scale_pools:
        return keys, values
    scales = paged.scale_pools[layer][tables].permute(0, 2, 3, 1, 4).flatten(3)
    return dequantize_kv(keys, scales[:, :, 0], dtype), dequantize_kv(values, scales[:, :, 1], dtype)


def kernel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedInputs,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`paged_attention` by the CPU kernel, which must be loaded."""
    _refuse_unsupported(module, kwargs)
    layer = paged.kv_place(_layer_index(module))
    output = torch.ops.specdec.paged_attention(
        query,
        key,
        value,
        paged.key_pools[layer],
        paged.value_pools[layer],
        paged.positions,
        paged.slot_mapping,
        paged.block_tables,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        0,  # the arithmetic, which `runtime.compiler.linears` sets
        scales=paged.scale_pools[layer] if paged.scale_pools else None,
        sinks=s_aux,
        softcap=softcap or 0.0,
        attention_chunk=attention_chunk_of(module) or 0,
        slopes=slopes,
    )
    return output[None], None


_FAR = 2**40, 2**40 + 12345  # positions beyond every window


@contextmanager
def chunks_without_padding() -> Iterator[None]:
    """Have chunked masks ignore padding, whose values are not known on `meta`."""
    theirs = masking_utils.chunked_causal_mask_function

    def of_unpadded(chunk_size: int, left_padding: Tensor) -> Any:
        return theirs(chunk_size, torch.zeros(left_padding.shape, dtype=torch.long, device="cpu"))

    masking_utils.chunked_causal_mask_function = of_unpadded
    try:
        yield
    finally:
        masking_utils.chunked_causal_mask_function = theirs


def probe_mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> Tensor:
    """The first key that transformers' mask shows to each of two far queries, [1, 1, 1, 2]; -1 if it shows a later key
    or hides the query's own.
    """
    return torch.tensor([[[[_first_seen(mask_function, query) for query in _FAR]]]], device="cpu")


def _first_seen(mask_function: Callable[..., Any], query: int) -> int:
    zero = torch.tensor(0, device="cpu")

    def sees(key: int) -> bool:
        query_index, key_index = torch.tensor(query, device="cpu"), torch.tensor(key, device="cpu")
        return bool(mask_function(zero, zero, query_index, key_index))

    if sees(query + 1) or not sees(query):
        return -1
    return bisect_left(range(query), True, key=sees)


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Recorded | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record the layer's K/V shape in `paged`; returns zeros in the shape of attention's output."""
    if paged is None:  # it did not reach attention, and would not in a step
        refuse_own_attention(getattr(getattr(module, "config", None), "model_type", type(module).__name__))
    _refuse_unsupported(module, kwargs)
    layer, attention_chunk = _layer_index(module), attention_chunk_of(module)
    shape = LayerShape(layer, key.shape[1], key.shape[-1], value.shape[-1], sliding_window, attention_chunk)
    if attention_mask is not None and attention_mask.device.type == "cpu":  # made by `probe_mask`
        positions = getattr(module.config, "max_position_embeddings", None) or _FAR[0]
        _refuse_other_mask(shape, attention_mask.flatten().tolist(), positions)
    if layer in paged.layers:
        raise SpecDecError(
            f"a layer computes attention twice, which its K/V cache cannot serve: layer {layer}", hint=SEE_MODELS
        )
    paged.layers[layer] = shape
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _layer_index(module: nn.Module) -> int:
    return int(module.layer_idx)  # type: ignore[arg-type]  # what transformers puts on attention modules


def refuse_own_attention(name: str) -> NoReturn:
    raise SpecDecError(
        f"this model computes its attention itself, out of reach of a paged K/V cache: {name}", hint=SEE_MODELS
    )


def _refuse_other_mask(shape: LayerShape, first_seen: list[int], positions: int) -> None:
    """SpecDecError if the mask's first visible key, for queries at `_FAR`, does not follow from the layer's window. A
    window as long as the model's `positions` hides nothing.
    """
    num_seen = (
        [query + 1 - first for query, first in zip(_FAR, firsts, strict=True)]
        for firsts in (first_seen, [shape.first_seen(query) for query in _FAR])
    )
    sees, asks = (["all" if count >= positions else count for count in counts] for counts in num_seen)
    if sees == asks and -1 not in first_seen:
        return
    if -1 in first_seen or sees[0] != sees[1]:
        raise SpecDecError(
            f"attention that sees neither all keys nor a window is not supported: layer {shape.layer}", hint=SEE_MODELS
        )
    raise SpecDecError(
        f"the model's mask has a window that its attention is not told of: layer {shape.layer} sees "
        f"{sees[0]} keys, and its attention asks for {asks[0]}",
        hint=SEE_MODELS,
    )


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if kwargs.get("position_bias") is not None:
        raise SpecDecError(f"attention with a position bias is not supported: {name}", hint=SEE_MODELS)
    if not getattr(module, "is_causal", True):
        raise SpecDecError(f"attention that is not causal is not supported: {name}", hint=SEE_MODELS)


AttentionInterface.register(PAGED, paged_attention)
AttentionInterface.register(KERNEL, kernel_attention)
AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, probe_mask)
