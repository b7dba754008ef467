"""Reference for an engine: transformers' own model, with attention over K/V quantized as in the engine, wider products
where torch is slow, and a record of its choices of experts.

Engines with 8-bit K/V are compared with it, and it tells how much quality they lose.
"""

import platform
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.utils import logging as transformers_logging

from runtime.checkpoint.gguf.reader import is_gguf
from runtime.core.kv_cache import KVPool, dequantize_kv, largest_error, quantize_kv
from runtime.model.attention import capped, weights_beside_sinks
from runtime.model.causal_heads import model_class
from runtime.model.pretrained import parse_pretrained_config
from runtime.model.read_model import read_numbers
from runtime.util.locks import MODEL_INIT_LOCK

QUANTIZED_KV = "specdec_quantized_kv"
_NARROW = (torch.bfloat16, torch.float16)
_WIDENED_AT_ONCE = 1 << 20
"""Numbers of a weight that are widened at once: few enough to stay in the processor's cache until they are read."""

QuantizeKV = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Quantizer of a layer's visible keys [1, kv heads, tokens, dim] and values [1, kv heads, tokens, value dim]."""


def quantized_kv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    quantize_kv: QuantizeKV,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over quantized K/V like transformers' eager attention, in float32. Takes [1, heads, tokens, dim] and
    returns [1, tokens, heads, value dim].
    """
    key, value = quantize_kv(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    num_groups = query.shape[1] // key.shape[1]
    keys, values = (numbers.float().repeat_interleave(num_groups, 1) for numbers in (key, value))
    scaling = kwargs.get("scaling")
    scores = query.float() @ keys.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores, sinks = capped(scores, kwargs.get("softcap")), kwargs.get("s_aux")
    if (slopes := kwargs.get("slopes")) is not None:
        positions = torch.arange(keys.shape[2], device=keys.device)
        scores = scores + slopes.view(1, -1, 1, 1) * (positions - positions[:, None])
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = weights_beside_sinks(scores, None if sinks is None else sinks.view(1, -1, 1, 1))
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class Quantized:
    """Quantizes keys and values itself."""

    dtype: torch.dtype

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        quantized = (dequantize_kv(*quantize_kv(numbers, self.dtype), numbers.dtype) for numbers in (key, value))
        return next(quantized), next(quantized)


@dataclass(frozen=True)
class Stored:
    """Takes the K/V that an engine's step has stored for a sequence, where they are valid roundings: of a number
    between two neighbouring codes, its last bits decide, and either code is right. Other numbers, and the heads of
    other ranks, are quantized here.
    """

    pool: KVPool
    block_table: list[int]
    tolerance: float
    """Tolerance of quantized values, relative to the largest number of their token and head."""

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        place = self.pool.places[layer]
        keys = self.pool.keys[place][self.block_table].permute(1, 0, 3, 2)
        values = self.pool.values[place][self.block_table].transpose(0, 1)
        scales = self.pool.scales[place][self.block_table].permute(2, 1, 0, 3).flatten(2)
        return self._where_near(key, keys, scales[0]), self._where_near(value, values, scales[1])

    def _where_near(self, ours: Tensor, stored: Tensor, scales: Tensor) -> Tensor:
        num_heads, n = stored.shape[0], ours.shape[2]
        theirs = dequantize_kv(stored.flatten(1, 2)[:, :n], scales[:, :n], torch.float32)[None]
        quantized, our_scales = quantize_kv(ours, stored.dtype)
        seen = dequantize_kv(quantized, our_scales, torch.float32)
        largest = ours.float().abs().amax(-1, keepdim=True)
        allowed = largest_error(ours, stored.dtype) + self.tolerance * largest
        is_near = (theirs - ours[:, :num_heads].float()).abs() <= allowed[:, :num_heads]
        seen[:, :num_heads] = theirs.where(is_near, seen[:, :num_heads])
        return seen.to(ours.dtype)


def has_slow_products(dtype: torch.dtype, device: torch.device) -> bool:
    """True if torch multiplies numbers of this dtype more slowly than float32."""
    is_without = platform.machine() == "x86_64" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return dtype in _NARROW and device.type == "cpu" and is_without


class WideProducts(TorchFunctionMode):
    """Computes linear layers and matrix products of 16-bit numbers in float32, and rounds each result once, as torch
    does.

    Without instructions for 16 bits (AVX2), torch takes seven times as long for a linear layer of a model with 1.1 B
    parameters as it takes to widen the weight, piece by piece, and multiply by it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is torch.nn.functional.linear and _are_narrow(args[:2]) and args[1].dim() == 2:
            return _linear(*args, **given)
        if function is torch.matmul and not given and _are_narrow(args):
            return torch.matmul(args[0].float(), args[1].float()).to(args[0].dtype)
        return function(*args, **given)


def _are_narrow(args: Any) -> bool:
    return len(args) == 2 and args[0].dtype in _NARROW and args[1].dtype == args[0].dtype


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Output [..., outputs] in the dtype of `x` [..., inputs]. The weight [outputs, inputs] is widened in pieces."""
    wide = x.reshape(-1, weight.shape[1]).float()
    outputs = x.new_empty(len(wide), len(weight))
    at_once, end = max(1, _WIDENED_AT_ONCE // max(1, weight.shape[1])), 0
    for rows in torch.split(weight, at_once):
        start, end = end, end + len(rows)
        own_bias = None if bias is None else bias[start:end].float()
        outputs[:, start:end] = torch.nn.functional.linear(wide, rows.float(), own_bias)
    return outputs.view(*x.shape[:-1], len(weight))


class Choices(TorchFunctionMode):
    """Records the scores [..., experts] by which a model's routers choose experts, in the order of the calls, and how
    far other scores are from the bound below which experts are left out (Phi-3.5).

    Rounding decides between experts with nearly equal scores. A correct step that takes the other expert is far from
    transformers' in that token, and in all tokens that see it. With `ties`, a margin for each call, the last expert
    taken and the first left out change places if their scores differ by no more than the margin, and likewise at a
    bound. If `every` is above 1, this happens for one token in each `every`: the token number `turn`.
    """

    def __init__(self, ties: Seq[float] | None = None, every: int = 1, turn: int = 0) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        self._ties, self._every, self._turn = ties, every, turn
        self._has_best = False
        """True if the last decision was for one expert, whose score then gives the bound of others."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        decided = function(*args, **given)
        scores: Any = args[0] if args else given.get("input")
        if function in (torch.topk, Tensor.topk):
            return self._of_highest(scores, decided, torch.return_types.topk)
        if function in (torch.max, Tensor.max) and isinstance(decided, tuple) and given.get("keepdim"):
            return self._of_highest(scores, decided, torch.return_types.max)
        if function in (torch.gt, Tensor.gt, Tensor.__gt__) and self._has_best and scores.is_floating_point():
            self._has_best = False
            return self._of_bound(scores, args[1], decided)
        return decided

    def _of_highest(self, scores: Tensor, taken: Any, kind: Any) -> Any:
        """The k highest scores and their indices, [..., k] each."""
        if scores.shape[:-1] != taken.indices.shape[:-1] or scores.shape[-1] == (k := taken.indices.shape[-1]):
            return taken
        self._has_best = kind is torch.return_types.max
        if (margin := self._margin(scores)) is None:
            return taken
        best = scores.topk(k + 1)
        is_tie = self._in_turn(best.values[..., k - 1 : k] - best.values[..., k:] <= margin).squeeze(-1)
        indices = best.indices[..., :k].clone()
        indices[..., -1] = best.indices[..., k].where(is_tie, indices[..., -1])
        return kind((scores.gather(-1, indices), indices))

    def _of_bound(self, distances: Tensor, bound: float, decided: Tensor) -> Tensor:
        """True where a score is too far from the best to take its expert; ties in turn are decided otherwise."""
        if (margin := self._margin(distances)) is None:
            return decided
        return decided ^ self._in_turn(((distances - bound).abs() <= margin) & (distances != 0))

    def _margin(self, scores: Tensor) -> float | None:
        self.scores.append(scores.float())
        return None if self._ties is None else self._ties[len(self.scores) - 1]

    def _in_turn(self, is_tie: Tensor) -> Tensor:
        """`is_tie` [..., experts], False for tokens whose turn it is not."""
        rows = is_tie.reshape(-1, is_tie.shape[-1])
        has_turn = torch.arange(len(rows), device=rows.device) % self._every == self._turn
        return (rows & has_turn[:, None]).view_as(is_tie)


def near_ties(rounded: Choices, exact: Choices) -> list[float]:
    """Margins, one for each call, within which rounding may exchange scores: twice a typical token's move."""
    return [
        2 * (ours - theirs).nan_to_num(0).abs().amax(-1).median().item()  # -inf - -inf: experts that neither may take
        for ours, theirs in zip(rounded.scores, exact.scores, strict=True)
    ]


AttentionInterface.register(QUANTIZED_KV, quantized_kv_attention)
AttentionMaskInterface.register(QUANTIZED_KV, eager_mask)


def load_original(model_dir: Path, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The unconverted model: transformers' own, in `dtype`, with its default attention unless another is named.

    A GGUF file's weights are dequantized here: transformers would need another package, and does not read all files.
    Exceptions are transformers' own.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if is_gguf(model_dir):
        config, weights = read_numbers(model_dir, dtype)
        pretrained = parse_pretrained_config(config, str(model_dir))
        with MODEL_INIT_LOCK:
            made: PreTrainedModel = model_class(pretrained).from_pretrained(
                None, config=pretrained, state_dict=weights, dtype=dtype, attn_implementation=attention
            )
        return made
    with MODEL_INIT_LOCK:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
    return loaded
