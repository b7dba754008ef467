"""Families of models as llama.cpp stores them: the config of each, and its names of tensors."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.checkpoint.gguf.metadata import WIDTHS, Metadata
from runtime.checkpoint.gguf.reader import GGUFHeader, damaged
from runtime.checkpoint.gguf.ropes import (
    ATTENTION_FACTOR,
    LONG,
    LONGROPE,
    ORIGINAL_CONTEXT,
    ROPE_FACTORS,
    SHORT,
    numbers_of,
    own_factors,
    rope_of,
)

_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10000.0
_LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # these two models have another scale of attention


def _of_llama(model: Metadata) -> dict[str, Any]:
    return _attention_bias(model) | {"mlp_bias": "blk.0.ffn_up.bias" in model.header.tensors}


def _attention_bias(model: Metadata) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in model.header.tensors}


def _of_qwen3_moe(model: Metadata) -> dict[str, Any]:
    """Every layer has experts; weights of a token's chosen experts add up to 1."""
    return {
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _of_qwen2_moe(model: Metadata) -> dict[str, Any]:
    """A shared expert computes every token too. Weights of all experts, not of the chosen experts, add up to 1."""
    shared = model.get("expert_shared_feed_forward_length")
    return _of_qwen3_moe(model) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _of_mixtral(model: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "sliding_window": None,
    }


def _types_of(have_windows: Iterable[bool]) -> list[str]:
    return ["sliding_attention" if has_window else "full_attention" for has_window in have_windows]


def _alternating(model: Metadata) -> list[str]:
    """Types of layers of which every other has a window, from the first on."""
    return _types_of(i % 2 == 0 for i in range(int(model.get("block_count"))))


def _of_gpt_oss(model: Metadata) -> dict[str, Any]:
    """Settings of gpt-oss, which does not round the bounds of yarn's range."""
    rope = rope_of(model)
    return {
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "intermediate_size": model.get("expert_feed_forward_length"),
        "layer_types": _alternating(model),
        "sliding_window": model.get("attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _of_mistral_3(model: Metadata) -> dict[str, Any]:
    """Queries are scaled up at each multiple of the original context length, which rotary parameters always have."""
    rope = rope_of(model)
    own = {
        "llama_4_scaling_beta": model.get("attention.temperature_scale", 0.0),
        "original_max_position_embeddings": model.get(ORIGINAL_CONTEXT, model.get("context_length")),
    }
    if rope["rope_type"] == "yarn":
        own |= {"mscale": 1.0, "mscale_all_dim": model.get("rope.scaling.yarn_log_multiplier", 0.0)}
    return {"rope_parameters": rope | own, "sliding_window": None}


def _of_phi_3(model: Metadata) -> dict[str, Any]:
    """All layers have a window, or none has. The original context length is in longrope's parameters too."""
    return {
        "sliding_window": model.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": model.get(ORIGINAL_CONTEXT, model.get("context_length")),
    }


def _of_granite(model: Metadata) -> dict[str, Any]:
    """Granite's multipliers. A multiplier that is missing or 0 has its default."""
    return {
        "attention_multiplier": model.get("attention.scale", 0) or model.head_dim**-0.5,
        "embedding_multiplier": model.get("embedding_scale", 0) or 1.0,
        "residual_multiplier": model.get("residual_scale", 0) or 1.0,
        "logits_scaling": model.get("logit_scale", 0) or 1.0,
    }


def _of_gemma_2(model: Metadata) -> dict[str, Any]:
    return _of_gemma(model) | {
        "layer_types": _alternating(model),
        "sliding_window": model.get("attention.sliding_window", 4096),
        "final_logit_softcapping": model.get("final_logit_softcapping", 30.0) or None,
        "attn_logit_softcapping": model.get("attn_logit_softcapping", 50.0) or None,
    }


def _of_gemma_3(model: Metadata) -> dict[str, Any]:
    """Layers with a window and full layers, each kind with rotary positions of its own."""
    num_layers = int(model.get("block_count"))
    pattern = model.find("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        sliding = [bool(one) for one in pattern[:num_layers]]
    else:
        every = int(model.get("attention.sliding_window_pattern", _GEMMA_PATTERN))
        sliding = [every > 0 and (i + 1) % every != 0 for i in range(num_layers)]
    local = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)}
    return _of_gemma(model) | {
        "layer_types": _types_of(sliding),
        "sliding_window": model.get("attention.sliding_window"),
        "rope_parameters": {"full_attention": _rope_without_yarn(model), "sliding_attention": local},
        "final_logit_softcapping": model.get("final_logit_softcapping", 0) or None,
        "attn_logit_softcapping": None,
    }


def _rope_without_yarn(model: Metadata) -> dict[str, Any]:
    return rope_of(model, has_yarn=False)


def _of_gemma(model: Metadata) -> dict[str, Any]:
    is_27b = model.get("block_count") == _LAYERS_OF_GEMMA_27B[model.header.architecture]
    per_head = model.get("embedding_length") // model.get("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else model.head_dim,
    }


def _of_gemma_4(model: Metadata) -> dict[str, Any]:
    """Layers with a window have heads of another size than full layers. The last layers may share the keys and values
    of layers before them, and have a feed-forward layer of twice the width.
    """
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
    for is_other, key in ((max(map(len, of_kind)) > 1, "attention.head_count_kv"), (widths != wanted, WIDTHS)):
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
        "layer_types": _types_of(sliding),
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


def _head_dim_of_windows(model: Metadata) -> int:
    size = int(model.get("attention.key_length_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if model.get(key, size) != size:
            model.refuse(key)
    return size


def _rope_of_gemma_4(model: Metadata) -> dict[str, Any]:
    """Full layers turn the first numbers of each half of a head: their factors are 1, and all others `_STILL`."""
    if model.find("rope.scaling.type") not in (None, "none"):
        model.refuse("rope.scaling.type")
    if ROPE_FACTORS not in model.header.tensors:
        raise damaged(f"`{model.path}` lacks the tensor: {ROPE_FACTORS}")
    found = numbers_of(model.header.tensors[ROPE_FACTORS], model.path)
    num_turned = sum(one == 1 for one in found)
    still = [math.isclose(one, _STILL, rel_tol=1e-6) for one in found[num_turned:]]
    if len(found) != model.head_dim // 2 or set(found[:num_turned]) != {1.0} or not all(still):
        raise own_factors(model.path)
    share, theta = num_turned / len(found), model.get("rope.freq_base", 10000.0)
    local = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)}
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    return {"full_attention": full, "sliding_attention": local}


_STILL = 1e30


def _rope_of_phi_3(model: Metadata) -> dict[str, Any]:
    """Two sets of factors, for positions within the original context length and beyond it; none for short contexts."""
    tensors = model.header.tensors
    missing = sorted(LONGROPE - tensors.keys())
    if len(missing) == len(LONGROPE):
        if model.get(ATTENTION_FACTOR, 1.0) != 1:
            model.refuse(ATTENTION_FACTOR)
        return rope_of(model)
    if missing:
        raise damaged(f"`{model.path}` lacks the tensor: {missing[0]}")
    factors = {name: numbers_of(tensors[name], model.path) for name in sorted(LONGROPE)}
    wanted = int(model.get("rope.dimension_count", model.head_dim)) // 2
    for name, found in factors.items():
        if len(found) != wanted:
            raise damaged(f"`{name}` has {len(found)} rotary factors, and the model needs {wanted}: {model.path}")
    if model.find("rope.scaling.type") not in (None, "none", "longrope"):
        model.refuse("rope.scaling.type")
    rope = {
        "rope_type": "longrope",
        "rope_theta": model.get("rope.freq_base", 10000.0),
        "original_max_position_embeddings": model.get(ORIGINAL_CONTEXT),
    }
    if model.find(ATTENTION_FACTOR):
        rope["attention_factor"] = float(model.get(ATTENTION_FACTOR))
    return rope | {"long_factor": factors[LONG], "short_factor": factors[SHORT]}


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
class GGUFFamily:
    """A family of models as llama.cpp stores it; `model_type` is its name in Hugging Face's configs."""

    model_type: str
    settings: Callable[[Metadata], dict[str, Any]] = lambda model: {}
    """This family's own settings in the config."""
    used: frozenset[str] = frozenset()
    """Further keys that `settings` or `rope` reads."""
    of_block: Mapping[str, str] = field(default_factory=lambda: _OF_BLOCK)
    """Modules of a block, by the names of their tensors in the file."""
    is_interleaved: bool = False
    """True if the file has the rows of queries and keys in another order."""
    shift: float = 0.0
    """Number to add to the weights of norms: llama.cpp stores Gemma's with the 1 that the model adds."""
    is_partial: bool = False
    """True if rotary positions may turn only a part of each head."""
    rope: Callable[[Metadata], dict[str, Any]] = rope_of
    experts: str = "mlp.experts"
    """Name of a block's module of experts."""
    layers_differ: bool = False
    """True if `settings` reads widths and numbers of heads layer by layer."""
    alternates: bool = False
    """True if an expert's gates and up-projections alternate in the model, with matrices [inputs, outputs]."""


SINKS = "self_attn.sinks"
LAYER_SCALE = "layer_scalar"
ROUTER_SCALES = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
"""Scales of Gemma 4's mixtures of experts, by their names in a block."""
SHARED_EXPERT_GATE = "mlp.shared_expert_gate"
"""A matrix of one row, which llama.cpp may keep as a vector."""
EXPERTS = {
    "ffn_gate_up_exps": "gate_up_proj", "ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj",
    "ffn_down_exps": "down_proj",
}  # fmt: skip
"""Parameters of all experts of a layer, by the tensors in the file that they consist of, in this order."""
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
    "layer_output_scale": LAYER_SCALE, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
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
FAMILIES = {
    "llama": GGUFFamily("llama", _of_llama, is_interleaved=True),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "qwen2moe": GGUFFamily(
        "qwen2_moe", _of_qwen2_moe, _OF_MIXTURE | {"expert_shared_feed_forward_length"}, _OF_QWEN_2_MOE_BLOCK
    ),
    "qwen3moe": GGUFFamily("qwen3_moe", _of_qwen3_moe, _OF_MIXTURE, _OF_BLOCK | _WITH_ROUTER),
    "gemma2": GGUFFamily("gemma2", _of_gemma_2, _OF_GEMMA_2, _OF_GEMMA_BLOCK, shift=-1.0, rope=_rope_without_yarn),
    "gemma3": GGUFFamily("gemma3_text", _of_gemma_3, _OF_GEMMA_3, _OF_GEMMA_BLOCK, shift=-1.0, rope=_rope_without_yarn),
    "gemma4": GGUFFamily(
        *("gemma4_text", _of_gemma_4, _OF_GEMMA_4, _OF_GEMMA_4_BLOCK),
        rope=_rope_of_gemma_4,
        experts="experts",
        layers_differ=True,
    ),
    "granite": GGUFFamily("granite", _of_granite, _SCALES, is_interleaved=True),
    "smollm3": GGUFFamily("smollm3", is_interleaved=True),
    "olmo2": GGUFFamily("olmo2", of_block=_OF_GEMMA_BLOCK),
    "ernie4_5": GGUFFamily("ernie4_5"),
    "phi3": GGUFFamily(
        *("phi3", _of_phi_3, frozenset({"attention.sliding_window", ATTENTION_FACTOR}), _OF_PHI_3_BLOCK),
        is_partial=True,
        rope=_rope_of_phi_3,
    ),
    "glm4": GGUFFamily("glm4", _attention_bias, of_block=_OF_GLM_4_BLOCK, is_partial=True),
    "mistral3": GGUFFamily(
        *("ministral3", _of_mistral_3, frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"})),
        is_interleaved=True,
    ),
    "gpt-oss": GGUFFamily(
        *("gpt_oss", _of_gpt_oss, _OF_MIXTURE | {"attention.sliding_window"}, _OF_GPT_OSS_BLOCK),
        alternates=True,
    ),
    "hunyuan-dense": GGUFFamily("hunyuan_v1_dense", of_block=_OF_HUNYUAN_BLOCK),
}
_MIXTRAL = GGUFFamily("mixtral", _of_mixtral, _OF_MIXTURE, _OF_BLOCK | _WITH_ROUTER, is_interleaved=True)
"""Mixtral: a `llama` with experts in the file."""


def family_in(header: GGUFHeader) -> GGUFFamily:
    """Family of a file whose architecture is supported."""
    if header.architecture == "llama" and header.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return FAMILIES[header.architecture]


def family_of(config: Mapping[str, Any]) -> GGUFFamily:
    families = (*FAMILIES.values(), _MIXTRAL)
    return next(family for family in families if family.model_type == config["model_type"])
