"""Translate a GGUF file's metadata to Hugging Face's terms: the config, the names of weights, the order of rows.

Every key of the model's is used, is known to change nothing at the value that it has, or is refused by name.
"""

import math
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.ends import end_ids_of, token_id
from runtime.checkpoint.gguf.reader import ORIGINAL, GGUFHeader, GGUFTensor, read_gguf
from runtime.util.errors import SpecDecError, SpecDecWarning

_USED = {
    "context_length", "embedding_length", "feed_forward_length", "block_count", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_NOTES = {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
"""Keys that llama.cpp stores but does not compute with, for the rope types supported here."""
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "attention.scale": 0,
    "attention.sliding_window": 0, "attn_logit_softcapping": 0, "embedding_scale": 1, "expert_count": 0,
    "expert_shared_count": 0, "expert_used_count": 0, "final_logit_softcapping": 0, "logit_scale": 1,
    "pooling_type": 0, "residual_scale": 1, "rope.scaling.attn_factor": 1, "use_parallel_residual": False,
    "rope.scaling.yarn_attn_factor": 1, "rope.scaling.yarn_ext_factor": 1,
}  # fmt: skip
"""The values at which other keys change nothing."""
_TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10000.0
_LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # whose attention has a scale of its own


@dataclass(frozen=True)
class _Model:
    """The metadata of one model, each value checked where it is asked for."""

    header: GGUFHeader
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """A number; SpecDecError for a key that is missing, where there is no default, or something else."""
        name = f"{self.header.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if value is None:
            raise SpecDecError(f"`{self.path}` lacks a value of its model: {name}", hint="download it again")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpecDecError(f"`{self.path}` has a value that is no number: {name}", hint="download it again")
        return value

    def by_layer(self, key: str, default: Any = None) -> list[int]:
        """A number of each layer, of which a file may have one for all; SpecDecError as by `get`."""
        num_layers = int(self.get("block_count"))
        if isinstance(found := self.find(key), list):
            if len(found) != num_layers or not all(isinstance(one, int) for one in found):
                self.refuse(key)
            return [int(one) for one in found]
        return [int(self.get(key, default))] * num_layers

    def find(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}")

    @cached_property
    def head_dim(self) -> int:
        """SpecDecError where keys, values and rotary positions are not all of that size."""
        size = self.size_of_heads(self.of_head_dim)
        is_partial = family_in(self.header).is_partial and 0 < self.get("rope.dimension_count", size) < size
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, size) != size and not (is_partial and key == "rope.dimension_count"):
                self.refuse(key, *self.of_head_dim)
        return size

    def size_of_heads(self, keys: tuple[str, ...]) -> int:
        """Size that one key says, or the width of all heads and their number."""
        size, *number = (int(self.get(key)) for key in keys)
        return size // max(number[0], 1) if number else size

    @property
    def of_head_dim(self) -> tuple[str, ...]:
        """The keys that `head_dim` comes of."""
        own = "attention.key_length"
        return ("embedding_length", "attention.head_count") if self.find(own) is None else (own,)

    def said(self, *keys: str) -> str:
        """The keys with their values."""
        values = {f"{self.header.architecture}.{key}": self.find(key) for key in dict.fromkeys(keys)}
        return ", ".join(f"`{name}` {'none' if value is None else value}" for name, value in values.items())

    def refuse(self, key: str, *beside: str) -> None:
        """SpecDecError for a value, which may be one only beside those of other keys."""
        also = f" beside {self.said(*beside)}" if beside else ""
        raise SpecDecError(
            f"GGUF models with this value are not read, {self.said(key)}{also}: {self.path}",
            hint=ORIGINAL,
        )

    def check_keys(self) -> None:
        """SpecDecError for a key of the model's that is not known, or whose value would change what it computes."""
        used = _USED | family_in(self.header).used
        for name, value in self.header.metadata.items():
            space, _, key = name.partition(".")
            if space != self.header.architecture or key in used or key in _NOTES:
                continue
            if key not in _NEUTRAL or value != _NEUTRAL[key]:
                self.refuse(key)


def config_of(path: Path) -> dict[str, Any]:
    """The Hugging Face config that the metadata stands for; SpecDecError for other families, or unknown keys."""
    header = read_gguf(path)
    if header.architecture not in _FAMILIES:
        read = ", ".join(f"`{name}`" for name in _FAMILIES)
        raise SpecDecError(
            f"GGUF models of this family are not read, `{header.architecture}`: {path}", hint=f"{read} are"
        )
    model, tensors, family = _Model(header, path), header.tensors, family_in(header)
    model.check_keys()
    if "token_embd.weight" not in tensors:
        raise SpecDecError(f"`{path}` lacks the tensor: token_embd.weight", hint="it holds no language model")
    _check_num_blocks(model)
    _check_sizes(model)
    num_ids = tensors["token_embd.weight"].shape[0]
    if (said := model.find("vocab_size")) not in (None, num_ids):
        name = f"{header.architecture}.vocab_size"
        told = f"`{name}` is {said}, and the file has embeddings of {num_ids} ids, which count: {path}"
        warnings.warn(told, SpecDecWarning, stacklevel=2)
    config = {
        "model_type": family.model_type,
        "hidden_size": model.get("embedding_length"),
        "intermediate_size": model.by_layer("feed_forward_length", model.find("expert_feed_forward_length"))[0],
        "num_hidden_layers": model.get("block_count"),
        "num_attention_heads": model.get("attention.head_count"),
        "num_key_value_heads": model.by_layer("attention.head_count_kv", model.get("attention.head_count"))[0],
        "head_dim": model.head_dim,
        "max_position_embeddings": model.get("context_length"),
        "rms_norm_eps": model.get("attention.layer_norm_rms_epsilon"),
        "vocab_size": num_ids,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": None,
        "pad_token_id": None,  # or it were that of the family's first model, in another vocabulary
    }
    config |= {"hidden_act": "silu", "rope_parameters": family.rope(model)}
    if family.is_partial:
        config["rope_parameters"]["partial_rotary_factor"] = (
            model.get("rope.dimension_count", model.head_dim) / model.head_dim
        )
    if model.get("expert_used_count", 0) > model.get("expert_count", 0):
        model.refuse("expert_used_count", "expert_count")
    config |= family.settings(model)
    if not family.layers_differ:
        for key in ("feed_forward_length", "attention.head_count_kv"):
            if len(set(model.by_layer(key, 0))) > 1:
                model.refuse(key)
    for key, name in _TOKENS.items():
        if (token := token_id(header.metadata, name)) is not None:
            config[key] = token
    if end_ids := end_ids_of(header.metadata):
        config["eos_token_id"] = end_ids
    return config


def _check_num_blocks(model: _Model) -> None:
    """SpecDecError where there is no layer, or tensors are of one that the metadata do not count."""
    if (num_blocks := model.get("block_count")) < 1:
        model.refuse("block_count")
    if num_blocks > (num_tensors := len(model.header.tensors)):
        raise SpecDecError(
            f"metadata and tensors are of two models, `{model.header.architecture}.block_count` {num_blocks} and "
            f"{num_tensors} tensors: {model.path}",
            hint="download it again",
        )
    for name in model.header.tensors:
        space, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if space == "blk" and number.isdigit() and int(number) >= num_blocks:
            raise SpecDecError(
                f"metadata and tensors are of two models, `{model.header.architecture}.block_count` {num_blocks} and "
                f"`{name}`: {model.path}",
                hint="download it again",
            )


def _check_sizes(model: _Model) -> None:
    """SpecDecError where a tensor has another size than the metadata make it."""
    _check_size(model, "token_embd", 1, int(model.get("embedding_length")), "embedding_length")
    heads, kv_heads = int(model.get(_HEADS)), model.by_layer(_KV_HEADS, model.get(_HEADS))
    of_kv_heads, of_experts = (
        key if model.find(key) is not None else other for key, other in ((_KV_HEADS, _HEADS), (_EXPERT_WIDTHS, _WIDTHS))
    )
    local = model.find("attention.sliding_window_pattern") if model.find(_LOCAL_HEAD_DIM) is not None else None
    expert_widths = model.by_layer(of_experts)
    for i, width in enumerate(model.by_layer(_WIDTHS, model.find(_EXPERT_WIDTHS))):
        of_size = model.of_head_dim
        if isinstance(local, list) and local[i : i + 1] == [True]:
            of_size = (_LOCAL_HEAD_DIM,)
        size = model.size_of_heads(of_size)
        sizes: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
            ("attn_q", 0, heads * size, (_HEADS, *of_size)),
            ("attn_output", 1, heads * size, (_HEADS, *of_size)),
            ("attn_k", 0, kv_heads[i] * size, (of_kv_heads, *of_size)),
            ("attn_v", 0, kv_heads[i] * size, (of_kv_heads, *of_size)),
            ("attn_qkv", 0, (heads + 2 * kv_heads[i]) * size, (_HEADS, of_kv_heads, *of_size)),
            ("ffn_down", 1, width, (_WIDTHS,)),
            ("ffn_down_exps", 2, expert_widths[i], (of_experts,)),
            ("ffn_down_shexp", 1, int(model.get(_SHARED_WIDTH, 0)), (_SHARED_WIDTH,)),
            ("ffn_down_exps", 0, int(model.get(_EXPERTS, 0)), (_EXPERTS,)),
            ("ffn_gate_inp", 0, int(model.get(_EXPERTS, 0)), (_EXPERTS,)),
        )
        for name, axis, wanted, keys in sizes:
            _check_size(model, f"blk.{i}.{name}", axis, wanted, *keys)


def _check_size(model: _Model, name: str, axis: int, size: int, *keys: str) -> None:
    tensor = model.header.tensors.get(f"{name}.weight")
    if tensor is None or axis >= len(tensor.shape) or tensor.shape[axis] == size:
        return
    wanted = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
    raise SpecDecError(
        f"metadata and tensors are of two models, `{tensor.name}` is {list(tensor.shape)}, and by "
        f"{model.said(*keys)} {wanted}: {model.path}",
        hint="download it again",
    )


def _of_llama(model: _Model) -> dict[str, Any]:
    tensors = model.header.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _of_qwen3_moe(model: _Model) -> dict[str, Any]:
    """Every layer has experts, whose shares are of those that were chosen."""
    return {
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _of_qwen2_moe(model: _Model) -> dict[str, Any]:
    """An expert for all tokens besides, and shares that are not of those that were chosen alone."""
    shared = model.get("expert_shared_feed_forward_length")
    return _of_qwen3_moe(model) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _of_mixtral(model: _Model) -> dict[str, Any]:
    return {
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "sliding_window": None,
    }


def _of_gpt_oss(model: _Model) -> dict[str, Any]:
    """Every other layer sees a window, the first one too. The ranges of its rotary positions are no whole numbers."""
    num_layers = int(model.get("block_count"))
    rope = _rope_of(model)
    return {
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "intermediate_size": model.get("expert_feed_forward_length"),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "sliding_window": model.get("attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _of_mistral_3(model: _Model) -> dict[str, Any]:
    """Queries whose temperature changes with every original context, and yarn, of which the config speaks too."""
    rope = _rope_of(model)
    own = {
        "llama_4_scaling_beta": model.get("attention.temperature_scale", 0.0),
        "original_max_position_embeddings": model.get(_ORIGINAL_CONTEXT, model.get("context_length")),
    }
    if rope["rope_type"] == "yarn":
        own |= {"mscale": 1.0, "mscale_all_dim": model.get("rope.scaling.yarn_log_multiplier", 0.0)}
    return {"rope_parameters": rope | own, "sliding_window": None}


_ORIGINAL_CONTEXT, _ATTENTION_FACTOR = "rope.scaling.original_context_length", "rope.scaling.attn_factor"


def _of_phi_3(model: _Model) -> dict[str, Any]:
    """A window in all layers, or in none; and an original context, of which the config says the same twice."""
    return {
        "sliding_window": model.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": model.get(_ORIGINAL_CONTEXT, model.get("context_length")),
    }


def _of_glm_4(model: _Model) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in model.header.tensors}


def _of_granite(model: _Model) -> dict[str, Any]:
    """Multipliers, of which none, as 0, is the usual one."""
    return {
        "attention_multiplier": model.get("attention.scale", 0) or model.head_dim**-0.5,
        "embedding_multiplier": model.get("embedding_scale", 0) or 1.0,
        "residual_multiplier": model.get("residual_scale", 0) or 1.0,
        "logits_scaling": model.get("logit_scale", 0) or 1.0,
    }


def _of_gemma_2(model: _Model) -> dict[str, Any]:
    """Every other layer sees a window, the first one too."""
    num_layers = int(model.get("block_count"))
    return _of_gemma(model) | {
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "sliding_window": model.get("attention.sliding_window", 4096),
        "final_logit_softcapping": model.get("final_logit_softcapping", 30.0) or None,
        "attn_logit_softcapping": model.get("attn_logit_softcapping", 50.0) or None,
    }


def _of_gemma_3(model: _Model) -> dict[str, Any]:
    """Layers that see a window, each kind with positions of its own."""
    num_layers = int(model.get("block_count"))
    pattern = model.find("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        sliding = [bool(one) for one in pattern[:num_layers]]
    else:
        every = int(model.get("attention.sliding_window_pattern", _GEMMA_PATTERN))
        sliding = [every > 0 and (i + 1) % every != 0 for i in range(num_layers)]
    local = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)}
    return _of_gemma(model) | {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": model.get("attention.sliding_window"),
        "rope_parameters": {"full_attention": _rope_of(model), "sliding_attention": local},
        "final_logit_softcapping": model.get("final_logit_softcapping", 0) or None,
        "attn_logit_softcapping": None,
    }


def _of_gemma(model: _Model) -> dict[str, Any]:
    is_27b = model.get("block_count") == _LAYERS_OF_GEMMA_27B[model.header.architecture]
    per_head = model.get("embedding_length") // model.get("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else model.head_dim,
    }


def _of_gemma_4(model: _Model) -> dict[str, Any]:
    """Layers that see a window, with heads of another size than the others'; the last ones may have no keys and values
    of their own, and a wider network."""
    tensors, num_layers = model.header.tensors, int(model.get("block_count"))
    sliding = [bool(one) for one in model.by_layer("attention.sliding_window_pattern")]
    if sliding[-1] or not any(sliding):
        model.refuse("attention.sliding_window_pattern")
    num_shared = int(model.get("attention.shared_kv_layers", 0))
    with_kv = num_layers - num_shared
    of_kind = [
        {heads for heads, one in zip(model.by_layer("attention.head_count_kv"), sliding, strict=True) if one == kind}
        for kind in (True, False)
    ]
    widths = model.by_layer("feed_forward_length")
    is_wide = num_shared > 0 and widths[-1] == 2 * widths[0]
    wanted = [widths[0] * (2 if is_wide and i >= with_kv else 1) for i in range(num_layers)]
    for is_other, key in ((max(map(len, of_kind)) > 1, "attention.head_count_kv"), (widths != wanted, _WIDTHS)):
        if is_other:
            model.refuse(key)
    per_layer = int(model.get("embedding_length_per_layer_input", 0))
    settings = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": _head_dim_of_windows(model),
        "global_head_dim": model.head_dim,
        "num_key_value_heads": of_kind[0].pop(),
        "num_global_key_value_heads": of_kind[1].pop(),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in range(with_kv) if not sliding[i]),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
        "sliding_window": model.get("attention.sliding_window"),
        "final_logit_softcapping": model.get("final_logit_softcapping", 0) or None,
        "hidden_size_per_layer_input": per_layer,
    }
    if per_layer and (embeddings := tensors.get("per_layer_token_embd.weight")) is not None:
        settings["vocab_size_per_layer_input"] = embeddings.shape[0]
    if model.find("expert_count"):
        settings |= {
            "enable_moe_block": True,
            "num_experts": model.get("expert_count"),
            "top_k_experts": model.get("expert_used_count"),
            "moe_intermediate_size": model.get("expert_feed_forward_length"),
        }
    return settings


_WIDTHS, _EXPERT_WIDTHS = "feed_forward_length", "expert_feed_forward_length"
_SHARED_WIDTH, _EXPERTS = "expert_shared_feed_forward_length", "expert_count"
_HEADS, _KV_HEADS, _LOCAL_HEAD_DIM = "attention.head_count", "attention.head_count_kv", "attention.key_length_swa"


def _head_dim_of_windows(model: _Model) -> int:
    size = int(model.get("attention.key_length_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if model.get(key, size) != size:
            model.refuse(key)
    return size


def _rope_of_gemma_4(model: _Model) -> dict[str, Any]:
    """Full layers turn the first numbers of each half of a head, which the file says by factors of 1, and of `_STILL`
    for the rest."""
    if model.find("rope.scaling.type") not in (None, "none"):
        model.refuse("rope.scaling.type")
    if ROPE_FACTORS not in model.header.tensors:
        raise SpecDecError(f"`{model.path}` lacks the tensor: {ROPE_FACTORS}", hint="download it again")
    found = _numbers_of(model.header.tensors[ROPE_FACTORS], model.path)
    num_turned = sum(one == 1 for one in found)
    still = [math.isclose(one, _STILL, rel_tol=1e-6) for one in found[num_turned:]]
    if len(found) != model.head_dim // 2 or set(found[:num_turned]) != {1.0} or not all(still):
        raise SpecDecError(f"GGUF models with rotary factors of their own are not read: {model.path}", hint=ORIGINAL)
    share, theta = num_turned / len(found), model.get("rope.freq_base", 10000.0)
    local = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)}
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    return {"full_attention": full, "sliding_attention": local}


_STILL = 1e30
ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LONGROPE = {_LONG, _SHORT}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in all models that have factors (Llama 3.1 and later)."""


def _rope_of(model: _Model) -> dict[str, Any]:
    """Rotary parameters. As llama.cpp reads them a factor without a type is linear, and may have an older key."""
    theta, kind = model.get("rope.freq_base", 10000.0), model.find("rope.scaling.type") or "linear"
    factor = model.get("rope.scaling.factor", 0) or model.get("rope.scale_linear", 0) or 1
    factors = model.header.tensors.get(ROPE_FACTORS)
    if kind == "yarn" and factors is None and family_in(model.header).has_yarn:
        if model.find(_ORIGINAL_CONTEXT) == 0:
            model.refuse(_ORIGINAL_CONTEXT)
        return _yarn_rope(model, theta, float(model.get("rope.scaling.factor")))
    if kind not in ("none", "linear"):
        model.refuse("rope.scaling.type")
    if factors is not None:
        if kind == "linear" and factor != 1:
            model.refuse("rope.scaling.factor" if model.find("rope.scaling.factor") else "rope.scale_linear")
        return _llama3_rope(factors, theta, model)
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}


def _rope_of_phi_3(model: _Model) -> dict[str, Any]:
    """Two sets of factors, for sequences within the original context and beyond it."""
    tensors = model.header.tensors
    missing = sorted(LONGROPE - tensors.keys())
    if len(missing) == len(LONGROPE):
        if model.get(_ATTENTION_FACTOR, 1.0) != 1:
            model.refuse(_ATTENTION_FACTOR)
        return _rope_of(model)
    if missing:
        raise SpecDecError(f"`{model.path}` lacks the tensor: {missing[0]}", hint="download it again")
    factors = {name: _numbers_of(tensors[name], model.path) for name in sorted(LONGROPE)}
    wanted = int(model.get("rope.dimension_count", model.head_dim)) // 2
    for name, found in factors.items():
        if len(found) != wanted:
            raise SpecDecError(
                f"`{name}` has {len(found)} rotary factors, and the model {wanted}: {model.path}",
                hint="download it again",
            )
    if model.find("rope.scaling.type") not in (None, "none", "longrope"):
        model.refuse("rope.scaling.type")
    rope = {
        "rope_type": "longrope",
        "rope_theta": model.get("rope.freq_base", 10000.0),
        "original_max_position_embeddings": model.get(_ORIGINAL_CONTEXT),
    }
    if model.find(_ATTENTION_FACTOR):
        rope["attention_factor"] = float(model.get(_ATTENTION_FACTOR))
    return rope | {"long_factor": factors[_LONG], "short_factor": factors[_SHORT]}


def _yarn_rope(model: _Model, theta: float, factor: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": model.get(_ORIGINAL_CONTEXT, model.get("context_length")),
        "beta_fast": model.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": model.get("rope.scaling.yarn_beta_slow", 1.0),
    }


def _numbers_of(factors: GGUFTensor, path: Path) -> list[float]:
    if factors.type.name != "F32" or not factors.num_bytes:
        raise SpecDecError(f"GGUF models with rotary factors of their own are not read: {path}", hint=ORIGINAL)
    with factors.path.open("rb") as file:
        file.seek(factors.offset)
        return list(struct.unpack(f"<{prod(factors.shape)}f", file.read(factors.num_bytes)))


def _llama3_rope(factors: GGUFTensor, theta: float, model: _Model) -> dict[str, Any]:
    """The file has the factors of Llama 3.1 and later number by number, and not what they are of."""
    found, path = _numbers_of(factors, model.path), model.path
    num_pairs = model.get("rope.dimension_count", model.head_dim) // 2
    if len(found) != num_pairs or min(found) <= 0:
        raise SpecDecError(
            f"`{ROPE_FACTORS}` has {len(found)} factors, the least {min(found):g}, for {num_pairs} pairs of numbers: "
            f"{path}",
            hint="download it again",
        )
    wanted = [_llama3_factor(theta ** (i / len(found)) * 2 * math.pi, max(found)) for i in range(len(found))]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
        raise SpecDecError(f"GGUF models with rotary factors of their own are not read: {path}", hint=ORIGINAL)
    return {"rope_type": "llama3", "rope_theta": theta, "factor": max(found), **_LLAMA3}


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Factor by which a wavelength is stretched: 1 if short, `factor` if long, interpolated in between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    if turns > high or turns < low:
        return 1.0 if turns > high else factor
    share = (turns - low) / (high - low)
    return 1 / ((1 - share) / factor + share)


_WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_OF_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OF_GEMMA_BLOCK = _OF_BLOCK | {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """A family of models as llama.cpp stores it, `model_type` for Hugging Face."""

    model_type: str
    settings: Callable[[_Model], dict[str, Any]] = lambda model: {}
    """Settings of the config that others do not have."""
    used: frozenset[str] = frozenset()
    """Further keys that `settings` reads."""
    of_block: Mapping[str, str] = field(default_factory=lambda: _OF_BLOCK)
    """Names of a block's tensors, and of the modules that they are of."""
    is_interleaved: bool = False
    """True if the rows of queries and keys are stored in another order."""
    shift: float = 0.0
    """Offset of the norms' numbers: llama.cpp keeps those of Gemma with the 1 that its model adds."""
    is_partial: bool = False
    """True if positions may turn a part of each head."""
    has_yarn: bool = True
    rope: Callable[[_Model], dict[str, Any]] = lambda model: _rope_of(model)
    experts: str = "mlp.experts"
    """Name of a block's module of experts."""
    layers_differ: bool = False
    """True if `settings` reads numbers of each layer."""
    alternates: bool = False
    """True if of an expert's outputs in the model gates and others alternate, and its weights have inputs first."""


SINKS = "self_attn.sinks"
_LAYER_SCALE = "layer_scalar"
ROUTER_SCALES = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
"""Scales of Gemma 4's mixtures, by names in a block."""
SHARED_EXPERT_GATE = "mlp.shared_expert_gate"
"""A matrix of one row, which llama.cpp may keep as a vector."""
EXPERTS = {
    "ffn_gate_up_exps": "gate_up_proj", "ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj",
    "ffn_down_exps": "down_proj",
}  # fmt: skip
"""Tensors of all experts of a layer, and the parameters that they are of, in this order."""
_WITH_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_OF_PHI_3_BLOCK = _OF_BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OF_GLM_4_BLOCK = _OF_BLOCK | {
    "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
_OF_HUNYUAN_BLOCK = _OF_BLOCK | {
    "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
}  # fmt: skip
_OF_GPT_OSS_BLOCK = _OF_BLOCK | {
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router", "attn_sinks": SINKS,
}  # fmt: skip
_OF_QWEN_2_MOE_BLOCK = _OF_BLOCK | _WITH_ROUTER | {
    "ffn_gate_inp_shexp": SHARED_EXPERT_GATE, "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_OF_GEMMA_4_BLOCK = _OF_GEMMA_BLOCK | {
    "layer_output_scale": _LAYER_SCALE, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip
_OF_MIXTURE = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_OF_GEMMA_2 = frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
_OF_GEMMA_3 = frozenset({
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping",
})  # fmt: skip
_OF_GEMMA_4 = _OF_GEMMA_3 | _OF_MIXTURE | {
    "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa", "attention.shared_kv_layers",
    "embedding_length_per_layer_input",
}  # fmt: skip
_FAMILIES = {
    "llama": _Family("llama", _of_llama, is_interleaved=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "qwen2moe": _Family(
        "qwen2_moe", _of_qwen2_moe, _OF_MIXTURE | {"expert_shared_feed_forward_length"}, _OF_QWEN_2_MOE_BLOCK
    ),
    "qwen3moe": _Family("qwen3_moe", _of_qwen3_moe, _OF_MIXTURE, _OF_BLOCK | _WITH_ROUTER),
    "gemma2": _Family("gemma2", _of_gemma_2, _OF_GEMMA_2, _OF_GEMMA_BLOCK, shift=-1.0, has_yarn=False),
    "gemma3": _Family("gemma3_text", _of_gemma_3, _OF_GEMMA_3, _OF_GEMMA_BLOCK, shift=-1.0, has_yarn=False),
    "gemma4": _Family(
        *("gemma4_text", _of_gemma_4, _OF_GEMMA_4, _OF_GEMMA_4_BLOCK),
        rope=_rope_of_gemma_4,
        experts="experts",
        layers_differ=True,
    ),
    "granite": _Family("granite", _of_granite, _SCALES, is_interleaved=True),
    "smollm3": _Family("smollm3", is_interleaved=True),
    "olmo2": _Family("olmo2", of_block=_OF_GEMMA_BLOCK),
    "ernie4_5": _Family("ernie4_5"),
    "phi3": _Family(
        *("phi3", _of_phi_3, frozenset({"attention.sliding_window", _ATTENTION_FACTOR}), _OF_PHI_3_BLOCK),
        is_partial=True,
        rope=_rope_of_phi_3,
    ),
    "glm4": _Family("glm4", _of_glm_4, of_block=_OF_GLM_4_BLOCK, is_partial=True),
    "mistral3": _Family(
        *("ministral3", _of_mistral_3, frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"})),
        is_interleaved=True,
    ),
    "gpt-oss": _Family(
        *("gpt_oss", _of_gpt_oss, _OF_MIXTURE | {"attention.sliding_window"}, _OF_GPT_OSS_BLOCK),
        alternates=True,
    ),
    "hunyuan-dense": _Family("hunyuan_v1_dense", of_block=_OF_HUNYUAN_BLOCK),
}
_MIXTRAL = _Family("mixtral", _of_mixtral, _OF_MIXTURE, _OF_BLOCK | _WITH_ROUTER, is_interleaved=True)
"""Stored as a `llama` with experts."""


def family_in(header: GGUFHeader) -> _Family:
    """Family of a file, whose architecture is known."""
    if header.architecture == "llama" and header.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return _FAMILIES[header.architecture]


def _family_of(config: Mapping[str, Any]) -> _Family:
    families = (*_FAMILIES.values(), _MIXTRAL)
    return next(family for family in families if family.model_type == config["model_type"])


def name_of(tensor: GGUFTensor, config: Mapping[str, Any], path: Path) -> str:
    """Name of the tensor in Hugging Face's models."""
    layer, _, part = tensor.name.rpartition(".")
    if layer in _WHOLE:
        return f"{_WHOLE[layer]}.{part}"
    of_block = _family_of(config).of_block
    block, _, inner = layer.removeprefix("blk.").partition(".")
    in_block = f"model.layers.{block}." if layer.startswith("blk.") and block.isdigit() else None
    has_experts = bool(config.get("num_experts_per_tok") or config.get("top_k_experts"))
    if in_block and has_experts and f"{inner}.{part}" in ROUTER_SCALES:
        return f"{in_block}{ROUTER_SCALES[f'{inner}.{part}']}"
    if in_block and has_experts and inner in EXPERTS:
        return f"{in_block}{_family_of(config).experts}.{EXPERTS[inner]}{'_bias' if part == 'bias' else ''}"
    if in_block and inner in of_block:
        return f"{in_block}{of_block[inner]}{'' if of_block[inner] in (SINKS, _LAYER_SCALE) else f'.{part}'}"
    raise SpecDecError(f"`{path}` has a tensor that its model has not: {tensor.name}", hint=ORIGINAL)


def experts_alternate(config: Mapping[str, Any]) -> bool:
    """True if of an expert's outputs gates and others alternate (gpt-oss), with its inputs first."""
    return _family_of(config).alternates


def rows_of(tensor: GGUFTensor, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Source row of each row, for queries and keys whose rows llama.cpp reorders; None: unchanged.

    Two heads of 4 rows: the halves (0, 1) and (2, 3) of the first lie as 0, 2, 1, 3: (0, 2, 1, 3, 4, ...).
    """
    kind = tensor.name.split(".")[-2]
    if not _family_of(config).is_interleaved or kind not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    half = tensor.shape[0] // heads // 2
    return tuple((head * half + i) * 2 + side for head in range(heads) for side in range(2) for i in range(half))


def shift_of(tensor: GGUFTensor, config: Mapping[str, Any]) -> float:
    """Offset added to a tensor's numbers."""
    return _family_of(config).shift if tensor.name.endswith("norm.weight") else 0.0


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_config_of(path: Path) -> dict[str, Any]:
    """Read the model's generation_config.json as stored by llama.cpp's converter (`general.sampling.*`)."""
    metadata = read_gguf(path).metadata
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    # Numbers of 32 bits, by the digits that were written.
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items() if v is not None}
