"""Tiny models with random weights, one per family, and what Hugging Face makes of them.

Weights are large (initializer_range 0.3) and every bias and norm is random, so that logits are far apart, greedy
outputs are not constant, and no parameter can be forgotten without a difference.
"""

import hashlib
import zlib
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.builder.build import BuildEffort, DraftSource, build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig, CheckpointConfig, Dtype, EngineConfig, KVCacheQuantAlgo, QuantConfig
from runtime.core.batch import generation_row
from runtime.core.request import Sequence
from runtime.drafters.heads.head_config import read_head
from runtime.engine.engine import Engine

VOCAB_SIZE = 32
SLIDING_WINDOW = 8

_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
# Family -> (model_type, what differs from `_COMMON`).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": SLIDING_WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "phi3": ("phi3", {}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "cohere": ("cohere", {"logit_scale": 0.3, "use_qk_norm": False}),
    "gpt2": ("gpt2", {"n_inner": 48}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 12,
            **_DELTA_NET,
        },
    ),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
}
FAMILIES = tuple(_FAMILIES)
# Made for what compiling them needs: experts by the kernel.
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 20,
            **_DELTA_NET,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 5],
            "linear_head_dim": 16,
            "linear_num_heads": 3,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "minimax": (
        "minimax",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 12,
            "block_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "linear_attn_alpha_factor": 0.8,
            "linear_attn_beta_factor": 1.2,
        },
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {
            "num_hidden_layers": 6,
            "intermediate_size": 96,
            "attention_window_size": SLIDING_WINDOW,
            "w_init_variance_scale": 4.0,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
            "head_dim": 12,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "ssm_state_size": 8,
            "n_groups": 2,
            "time_step_min": 1e-9,  # transformers has a least time step for prompts, and none for one token
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    # Its router computes in float32; its first layer is none of a mixture.
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            "head_dim": 12,
            "global_head_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
}
MIXTURES = tuple(_MIXTURES)
# Without any attention: no keys and values at all.
_WITHOUT_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "use_bias": True},
    )
}
_MAMBA = {
    "state_size": 8,
    "time_step_rank": 4,
    "intermediate_size": 80,
    "use_bias": True,
    "initializer_range": 1.0,  # of embeddings alone
    "time_step_min": 0.1,
    "time_step_max": 1.0,
}
_WITHOUT_ATTENTION |= {"mamba": ("mamba", _MAMBA), "falcon-mamba": ("falcon_mamba", _MAMBA)}
WITHOUT_ATTENTION = tuple(_WITHOUT_ATTENTION)
# One attention's weights in several layers, which each have keys and values, and a state beside them.
_SHARED = {
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", "hybrid"] * 3,
            "num_mem_blocks": 2,
            "adapter_rank": 16,
            "num_key_value_heads": 4,  # its adapters have as many outputs as queries
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "initializer_range": 0.2,
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "time_step_min": 1e-9,  # transformers has a least time step for prompts, and none for one token
        },
    ),
    "zamba": (
        "zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
}
# Made for kinds of attention.
_ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # Soft caps, so low that scores reach them.
    "gemma2": (
        "gemma2",
        {
            "head_dim": 12,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
        },
    ),
    # Sinks; experts with biases.
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 12,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Chunks, and queries whose temperature changes with every few positions.
    "llama4": (
        "llama4_text",
        {
            "head_dim": 12,
            "attention_chunk_size": SLIDING_WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 5,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
ATTENTIONS = tuple(_ATTENTIONS)
# Whose attention is a method of their own, GPT-Neo's without a scale and with windows in every other layer.
_OWN_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gpt-neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": SLIDING_WINDOW}),
    "bloom": ("bloom", {}),  # whose scores lose with distance, as MPT's
    "mpt": ("mpt", {"max_seq_len": 256}),
}
OWN_ATTENTION = tuple(_OWN_ATTENTION)
# Falcon's three architectures, a token's experts sorted by value, a layer that attends twice, and one passed again.
_REPLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": ("falcon", {"num_kv_heads": 4}),
    "falcon-sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "jetmoe": ("jetmoe", {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "longcat": (
        "longcat_flash",
        {
            **{"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "n_routed_experts": 4},
            **{"zero_expert_num": 2, "moe_topk": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
            **{"qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
        },
    ),
    "diffllama": ("diffllama", {}),
    "hrm": ("hrm_text", {"head_dim": 8}),
}
REPLACED = tuple(_REPLACED)
# Whose layers are not compiled one by one, because they return tuples.
_UNCUT: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": (
        "falcon_h1",
        {
            "head_dim": 12, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3],
        },
    ),
    "ernie4_5": ("ernie4_5", {}),
    "glm4": ("glm4", {}),
    "mistral3": ("ministral3", {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
}  # fmt: skip
# Of which only the heads need a test of their own.
_WITH_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-unified": (
        "gemma4_unified_text",
        {"head_dim": 12, "global_head_dim": 16, "sliding_window": SLIDING_WINDOW},
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        {
            "head_dim": 12, "v_head_dim": 8, "sliding_window": SLIDING_WINDOW, "moe_intermediate_size": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    kinds = _FAMILIES | _MIXTURES | _WITHOUT_ATTENTION | _SHARED | _ATTENTIONS | _OWN_ATTENTION | _REPLACED | _UNCUT
    model_type, own = (kinds | _WITH_HEADS)[family]
    settings = _COMMON | own | overrides
    if model_type in ("bloom", "dbrx", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt"):
        del settings["num_key_value_heads"]  # every head has its own
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**settings)
    return config


def make_model(family: str, **overrides: Any) -> PreTrainedModel:
    """The same weights on every call; float32, eager attention."""
    config = make_config(family, **overrides)
    torch.default_generator.manual_seed(zlib.crc32(family.encode()))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval().float()


def make_build(**settings: Any) -> BuildConfig:
    """Room for drafts of 10 and for requests of 160 tokens, in blocks of 4."""
    defaults: dict[str, Any] = {
        "compiler": "none", "max_batch_size": 4, "max_input_len": 96, "max_seq_len": 170, "max_draft_len": 10,
        "tokens_per_block": 4, "speculative_decoding_mode": "draft_tokens_external",
    }  # fmt: skip
    return BuildConfig(**(defaults | settings))


def run_convert(model_dir: Path, output_dir: Path, dtype: Dtype | None = None, **settings: Any) -> CheckpointConfig:
    """Convert; `settings` are more of `convert`'s."""
    return convert(model_dir, output_dir, dtype, progress=lambda done, total: None, **{"replace": False} | settings)


_UNMEASURED = BuildEffort(measure_costs=False)


def run_build(checkpoint_dir: Path, output_dir: Path, effort: BuildEffort = _UNMEASURED, **build: Any) -> EngineConfig:
    """Build on the CPU; `build` as for `make_build`. What steps cost is measured only for who reads it."""
    arguments = checkpoint_dir, output_dir, make_build(**build), torch.device("cpu")
    return build_engine(*arguments, replace=False, phase=lambda name: None, effort=effort)


def build_tiny(
    model_dir: Path,
    work_dir: Path,
    *,
    dtype: Dtype | None = None, kv_cache: KVCacheQuantAlgo | None = None, tp_size: int = 1, measure_costs: bool = False,
    draft_ids: tuple[int, ...] = (), head_dir: Path | None = None, precision: QuantConfig | None = None, **build: Any,
) -> Path:  # fmt: skip
    """Convert and build; `build` as for `make_build`."""
    precision = precision or QuantConfig(kv_cache=kv_cache)
    run_convert(model_dir, work_dir / "checkpoint", dtype, precision=precision, tp_size=tp_size)
    drafts = DraftSource(draft_ids, None if head_dir is None else read_head(head_dir))
    run_build(work_dir / "checkpoint", work_dir / "engine", BuildEffort(measure_costs, drafts=drafts), **build)
    return work_dir / "engine"


def eager_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(len(tokens), vocab) Hugging Face's logits of every position, computed at once without a cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def hf_greedy(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_token_id: int = -1, **settings: Any
) -> list[int]:
    """Output ids of Hugging Face `generate`, the end id included. -1: no end id. `settings` are more of `generate`'s.

    Asked for again by another test, of a model with the same weights, they are not computed again.
    """
    asked = (_digest(model), tuple(prompt), max_new_tokens, eos_token_id, repr(sorted(settings.items())))
    if asked not in _answers:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0, **settings,
        )  # fmt: skip
        _answers[asked] = tuple(output[0, len(prompt) :].tolist())
    return list(_answers[asked])


_answers: dict[tuple[object, ...], tuple[int, ...]] = {}


def _digest(model: PreTrainedModel) -> bytes:
    """Digest of all that a model's answers are made of: class, settings and numbers."""
    digest = hashlib.sha256(f"{type(model)} {model.config.to_json_string()} {model.generation_config}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()


def repetitive_prompt(seed: int, length: int, vocab_size: int = VOCAB_SIZE, period: int = 7) -> list[int]:
    """A phrase repeated with some tokens changed, so that lookups find continuations, right and wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    phrase = torch.randint(3, vocab_size, (period,), generator=generator)
    tokens = phrase.repeat(-(-length // period))[:length]
    changed = torch.rand(length, generator=generator) < 0.15
    tokens[changed] = torch.randint(3, vocab_size, (int(changed.sum()),), generator=generator)
    return tokens.tolist()


def forward(engine: Engine, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> list[Tensor]:
    """Per sequence the (draft_len + 1, vocab) logits after its last token, and after each token of its draft."""
    for sequence in sequences:
        engine.catch_up(sequence)
    return engine.step([generation_row(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)])
