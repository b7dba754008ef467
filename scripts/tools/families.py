"""Every decoder of transformers' registry, made tiny with random weights, against Hugging Face: a Markdown table.

Each is converted, built without a compiler, and answers three prompts in one batch, in orchestrator and leader mode,
without drafts and with those of an n-gram lookup, in float32. The prompts, of 300 tokens and more, are longer than
every window, chunk and scaled rope of the small configs. `equal`: token for token what Hugging Face's `generate`
answers. `refused`: what `convert` or `build` says. `not tried`: transformers itself makes no such model of a small
config, or does not generate with it. `wrong` is a bug, and the exit code is 1.

One that is equal is tried in other ways, some of which may be refused: compiled, with its own int4 copy drafting, and
split over two ranks, each with Hugging Face's tokens; with int8 and int4 weights, with the same tokens with and
without drafts, and the logits of the same weights in transformers' model, which `build` compares; and compiled in
bfloat16, with the same logits to the last bit with and without drafts.

    python -m scripts.tools.families [FAMILY ...]               `--ways none` or `--ways int8,int4` tries less
    python -m scripts.tools.families --write [FAMILY ...]      into tests/data/families.json, and all that stands there
        into docs/models.md, between `<!-- families -->` and `<!-- end -->`
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig, Compiler, Dtype, QuantConfig, QuantFormat, SelfDraft
from runtime.core.request import Request
from runtime.core.request import Sequence as Generated
from runtime.drafters.draft_target import SelfDraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import write_json

ROOT = Path(__file__).parents[2]
PAGE, RECORDS = ROOT / "docs" / "models.md", ROOT / "tests" / "data" / "families.json"
_MARKED = re.compile(r"(<!-- families -->).*?(<!-- end -->)", re.DOTALL)
FAMILIES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}))
CPU = torch.device("cpu")
VOCAB_SIZE, NUM_LAYERS, MAX_DRAFT_LEN = 48, 4, 6
PROMPT_LENGTHS, NUM_NEW_TOKENS = (349, 300, 326), 24  # beyond many windows of 8, and ropes scaled from `ROPE_LIMIT`
SHORT_LENGTHS = 21, 34, 5
MAX_LEN, ROPE_LIMIT = 384, 128
# Standard deviations of weights and of embeddings: the first with which outputs tell anything. Large embeddings that
# are the last layer too repeat a token for ever.
STDS = ((0.3, 0.3), (0.3, 0.03), (0.6, 0.6), (0.15, 0.15), (1.0, 1.0))

# The names that families give their sizes, by the value that is small enough.
_NAMES_BY_SIZE = {
    0: "pad_token_id num_nextn_predict_layers",
    1: "bos_token_id first_k_dense_replace num_dense_layers topk_group num_shared_experts n_shared_experts "
    "moe_num_shared_experts moe_layer_start_index",
    2: "eos_token_id num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "n_group num_expert_group max_window_layers sliding_window_pattern _sliding_window_pattern "
    "global_attn_every_n_layers num_kv_shared_layers zero_expert_num no_rope_layer_interval "
    "swa_num_key_value_heads n_groups mamba_n_groups num_query_groups encoder_layers depth "
    "attention_layers_period linear_num_key_heads index_topk_blocks",
    NUM_LAYERS: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_decoder_layers "
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads swa_num_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads linear_num_heads index_n_heads qk_rope_head_dim mamba_num_heads "
    "rotary_dim hidden_size_per_layer_input laurel_rank",
    8: "head_dim kv_channels v_head_dim qk_nope_head_dim swa_head_dim index_head_dim sliding_window "
    "sliding_window_size attention_window_size attention_chunk_size window_size local_attention "
    "local_attention_window_len dim_head d_head linear_head_dim linear_key_head_dim linear_value_head_dim "
    "attention_head_size mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_d_state ssm_state_size "
    "state_size time_step_rank chunk_size mamba_chunk_size d_rel rel_extent",
    12: "qk_head_dim",
    16: "kv_lora_rank q_lora_rank o_lora_rank moe_intermediate_size shared_expert_intermediate_size "
    "router_hidden_size shared_experts_intermediate_size expert_ffn_hidden_size gated_norm_rank adapter_rank "
    "query_pre_attn_scalar",
    32: "hidden_size d_model n_embd embedding_size dim emb_dim word_embed_proj_dim embedding_dim "
    "attention_hidden_size input_embedding_size output_embedding_size lru_width mamba_d_ssm "
    "adapter_in_dim adapter_out_dim adapter_input_size text_hidden_size audio_hidden_size embed_dim out_hidden_size "
    "projection_dim",
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input intermediate_size ffn_hidden_size ffn_dim decoder_ffn_dim "
    "dim_ff dff d_inner intermediate_size_mlp encoder_ffn_dim shared_intermediate_size dense_intermediate_size",
    512: "index_topk max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length "
    "max_target_positions",
    ROPE_LIMIT: "original_max_position_embeddings floor_scale",
}
SMALL = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
# What the names alone do not tell.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "cosmos3_edge_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
        "downsample_rate": "1/2",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        },
    },
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 8,
        "share_expert_dim": 16,
        "num_sliding_attention_heads": 8,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"] * 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 8],
        "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "emu3": {"vocabulary_map": {"<image>": 40}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron_h": {"time_step_min": 1e-9},  # transformers has a least time step for prompts, and none for one token
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 4},
    "glm4v_text": _MROPE,
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "glm_ocr_text": _MROPE,
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_section": [1, 1, 1, 1]}},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 40},
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 40},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "time_step_min": 1e-9},
    "zaya": {"num_experts_per_tok": 1},
}


# Tiers of how much people ran families in November 2026, by guides, galleries and threads of local engines.
_POPULAR = {
    1: "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text gemma4 gemma4_text gemma4_unified gemma4_unified_text "
    "gpt_oss",
    2: "qwen3 qwen3_moe qwen3_vl qwen3_vl_moe qwen3_next qwen2 qwen2_5_vl llama mistral mistral3 ministral ministral3 "
    "glm4_moe_lite glm5_next nemotron_h phi3 gemma3 gemma3_text lfm2 lfm2_moe lfm3 muse_glimmer",
    3: "qwen4_exp qwen4_exp_text llama4 llama4_text mistral4 glm4_moe glm_moe_dsa deepseek_v3 deepseek_v32 deepseek_v4 "
    "hy_v4 granite granitemoehybrid granite_swa granitemoe_swa falcon_h1 bamba zamba2 jamba olmo_hybrid kimi_linear "
    "olmo3 smollm3 exaone4 seed_oss hunyuan_v1_dense ernie4_5 ernie4_5_moe minicpm3 mellum laguna minimax_m2 "
    "phi4_multimodal mimo_v2_flash gemma2 vaultgemma gemma3n gemma3n_text",
}
POPULARITY = {family: tier for tier, families in _POPULAR.items() for family in families.split()}
WAYS = ("compiled", "bfloat16", "self-draft", "int8", "int4", "split")


@dataclass(frozen=True)
class Outcome:
    family: str
    verdict: Literal["equal", "refused", "not tried", "wrong"]
    why: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    """Results of a family that is equal: `yes`, or why it is refused."""


def small_config(model_type: str, given: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A family's own default config with small sizes, and one layer of each kind that it has, in turn.

    `given`: of a config inside another, what it has there.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**(given or {})).to_dict()
    num_layers = next((default[name] for name in _LAYER_COUNTS if isinstance(default.get(name), int)), None)
    settings: dict[str, Any] = {}
    for name, value in default.items():
        if name in SMALL and (value is not None or name == "num_key_value_heads"):
            settings[name] = [SMALL[name]] * min(len(value), NUM_LAYERS) if isinstance(value, list) else SMALL[name]
        elif isinstance(value, list) and len(value) == num_layers:
            kinds = list(dict.fromkeys(value))
            settings[name] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
        elif isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            settings[name] = small_config(value["model_type"], value).to_dict()
        elif isinstance(value, dict) and "original_max_position_embeddings" in value:  # of a rope that is scaled
            near = value | {"original_max_position_embeddings": ROPE_LIMIT}
            settings[name] = {key: one for key, one in near.items() if key != "partial_rotary_factor"}  # of other sizes
    if "kv_lora_rank" in settings:  # every head has keys and values of its own, once they are unpacked
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings.pop("head_dim", None)  # the rotary part's, as the family has it
    if default.get("is_decoder") is False and not default.get("is_encoder_decoder"):
        settings["is_decoder"] = True  # a family of encoders whose causal class needs to be told
    config: PreTrainedConfig = config_class(**settings | OVERRIDES.get(model_type, {}))
    return config


_LAYER_COUNTS = [name for name in _NAMES_BY_SIZE[NUM_LAYERS].split() if name.endswith(("layers", "layer", "blocks"))]


def random_model(family: str, config: PreTrainedConfig, std: float, embedding_std: float) -> PreTrainedModel:
    """The same weights on every call, so large that logits are far apart; none is as it was made."""
    torch.manual_seed(zlib.crc32(family.encode()))
    several_inputs = config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    auto_class = AutoModelForMultimodalLM if several_inputs else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif tensor.is_floating_point() and isinstance(tensor, torch.nn.Parameter):
                tensor.normal_(std=std)
        model.get_input_embeddings().weight.normal_(std=embedding_std)
    return model.eval()


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """A phrase repeated with some tokens changed, so that lookups find continuations, right and wrong ones."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        tokens = torch.randint(3, VOCAB_SIZE, (7,), generator=generator).repeat(length)[:length]
        changed = torch.rand(length, generator=generator) < 0.15
        tokens[changed] = torch.randint(3, VOCAB_SIZE, (int(changed.sum()),), generator=generator)
        rows.append(tokens.tolist())
    return rows


def hugging_face_outputs(model: PreTrainedModel, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    outputs = []
    for prompt in prompts(lengths):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def make_engine(
    model_dir: Path,
    work_dir: Path,
    device: torch.device,
    compiler: Compiler = "none",
    self_draft: SelfDraft | None = None,
    precision: QuantConfig | None = None,
    dtype: Dtype = "float32",
) -> Engine:
    """Converted and built; SpecDecError where that is refused."""
    convert(
        model_dir,
        work_dir / "checkpoint",
        dtype,
        replace=True,
        progress=lambda done, total: None,
        precision=precision or QuantConfig(),
    )
    build = BuildConfig(
        compiler, 4, max(PROMPT_LENGTHS), MAX_LEN, MAX_DRAFT_LEN, 4, "draft_tokens_external", self_draft
    )
    build_engine(
        work_dir / "checkpoint",
        work_dir / "engine",
        build,
        device,
        replace=True,
        phase=lambda name: None,
        effort=BuildEffort(measure_costs=False),
    )
    # On a GPU small models of several processes fit beside each other.
    return Engine.open(work_dir / "engine", kv_cache=KVCacheConfig(free_gpu_memory_fraction=0.02))


def outputs_in_both_modes(
    engine: Engine, *, ngram: bool, lengths: tuple[int, ...] = PROMPT_LENGTHS
) -> list[list[list[int]]]:
    """Each mode's outputs, and once in all where the engine has but one."""
    drafter = NgramLookup(2) if ngram else None
    return [[one.output_tokens for one in sequences] for sequences in answers(engine, drafter, lengths)]


def answers(
    engine: Engine, drafter: Drafter | None, lengths: tuple[int, ...] = PROMPT_LENGTHS, *, keep_logits: bool = False
) -> Iterator[list[Generated]]:
    """Sequences of the prompts in one batch, in each mode: in the first one nothing is found in the cache, in the
    second one what the first one has left there. That is leader mode with drafts."""
    engine.clear_cache()
    modes = [orchestrator.generate, scheduler.generate][:: -1 if drafter else 1]
    for generate in modes if engine.block_reuse else [scheduler.generate]:
        requests = [
            Request(i, tuple(prompt), NUM_NEW_TOKENS, keep_logits=keep_logits)
            for i, prompt in enumerate(prompts(lengths))
        ]
        done = {s.request.id: s for s, _ in generate(engine, requests, drafter, MAX_DRAFT_LEN)}
        yield [done[i] for i in range(len(requests))]


def refusal(config: PreTrainedConfig, work_dir: Path) -> str | None:
    """Refusal of a config by `convert`, before it looks for weights; None if it takes it."""
    (work_dir / "config").mkdir(exist_ok=True)
    write_json(work_dir / "config" / "config.json", PreTrainedConfig._encode_special_floats(config.to_dict()))
    try:
        convert(work_dir / "config", work_dir / "checkpoint", None, replace=True, progress=lambda done, total: None)
    except SpecDecError as error:
        return None if error.message.startswith("file is missing: ") else error.message
    raise AssertionError("converted without weights")


def try_family(
    family: str,
    work_dir: Path,
    device: torch.device = CPU,
    lengths: tuple[int, ...] = PROMPT_LENGTHS,
    *,
    ways: Sequence[str] = (),
) -> Outcome:
    """`ways`: those of `WAYS` that are tried too, on the CPU, with prompts of `PROMPT_LENGTHS`."""
    config, reason = own_or_small_config(family)
    if config is not None and (why := refusal(config, work_dir)):
        return Outcome(family, "refused", why)
    if config is None or reason:
        return Outcome(family, "not tried", f"there is no small config of it: {reason}")
    try:
        expected = save_telling_model(family, config, work_dir / "model", lengths)
    except Exception as error:  # transformers' alone: nothing of ours has run
        return Outcome(family, "not tried", f"transformers does not generate with it: {last_line(error)}")
    if expected is None:
        return Outcome(family, "not tried", "small ones with random weights repeat one token")
    return compare(family, expected, work_dir, device, lengths, ways)


def save_telling_model(
    family: str, config: PreTrainedConfig, model_dir: Path, lengths: tuple[int, ...] = PROMPT_LENGTHS
) -> list[list[int]] | None:
    """Save the first random model whose outputs tell anything, and return them; None if none's do."""
    for again, stds in product(("", " again"), STDS):
        model = random_model(f"{family}{again}", config, *stds)
        outputs = hugging_face_outputs(model, lengths)
        if telling(outputs):
            model.save_pretrained(model_dir)
            return outputs
    return None


def own_or_small_config(family: str) -> tuple[PreTrainedConfig | None, str]:
    """Its small config; else its own, which is too large to try, or None, and why."""
    try:
        return small_config(family), ""
    except Exception as error:
        reason = last_line(error)
    try:
        return CONFIG_MAPPING[family](), reason
    except Exception:  # what a family's code stumbles over; why its small config fails says more
        return None, reason


def telling(outputs: list[list[int]]) -> bool:
    """They depend on their prompts, and are not a token or two over and over."""
    return len({tuple(output) for output in outputs}) == len(outputs) and sum(len(set(o)) for o in outputs) > 7


def compare(
    family: str,
    expected: list[list[int]],
    work_dir: Path,
    device: torch.device,
    lengths: tuple[int, ...],
    ways: Sequence[str],
) -> Outcome:
    try:
        with make_engine(work_dir / "model", work_dir, device) as engine:
            for ngram in (False, True):
                if any(made != expected for made in outputs_in_both_modes(engine, ngram=ngram, lengths=lengths)):
                    return Outcome(family, "wrong", "other tokens" + (" with drafts" if ngram else ""))
        found = in_other_ways(work_dir / "model", expected, ways)
    except SpecDecError as error:
        return Outcome(
            family, "refused", error.message.replace(f": {work_dir / 'model'}", "").replace(f"{work_dir}/", "")
        )
    except Exception as error:
        return Outcome(family, "wrong", last_line(error))
    return Outcome(family, "equal", ways=found)


def in_other_ways(model_dir: Path, expected: list[list[int]], ways: Sequence[str]) -> dict[str, str]:
    """Run a model that is equal in these of `WAYS`: what becomes of it. Raises AssertionError for other tokens.

    The directories that are made beside `model_dir` are written over.
    """
    tried = {
        "compiled": _compiled,
        "bfloat16": _same_bits,
        "self-draft": _drafting_for_itself,
        "int8": partial(_quantized, "int8"),
        "int4": partial(_quantized, "int4"),
        "split": _split,
    }
    return {way: _said(tried[way], model_dir, expected) for way in WAYS if way in ways}


def _said(way: Callable[[Path, list[list[int]]], str], model_dir: Path, expected: list[list[int]]) -> str:
    try:
        return way(model_dir, expected)
    except SpecDecError as error:
        return error.message.replace(str(model_dir), "the model")


def _compiled(model_dir: Path, expected: list[list[int]]) -> str:
    with make_engine(model_dir, model_dir.parent, CPU, "aot") as engine:
        _check_outputs(engine, expected, "compiled")
    return "yes"


def _check_outputs(engine: Engine, expected: list[list[int]], how: str) -> None:
    for ngram in (False, True):
        assert all(made == expected for made in outputs_in_both_modes(engine, ngram=ngram)), f"other tokens, {how}"


def _same_bits(model_dir: Path, expected: list[list[int]]) -> str:
    """Logits in bfloat16 with drafts, and found in the cache, beside those without.

    Of smaller weights: of these transformers' own logits are often far from float32's, and `build` refuses them.
    """
    try:
        return _same_bits_of(_with_smaller_weights(model_dir, 0.5))
    except SpecDecError:
        return _same_bits_of(_with_smaller_weights(model_dir, 0.1))


def _with_smaller_weights(model_dir: Path, factor: float) -> Path:
    smaller = model_dir.with_name("smaller")
    shutil.copytree(model_dir, smaller, dirs_exist_ok=True)
    tensors = load_file(model_dir / "model.safetensors")
    scaled = {name: tensor * factor if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(scaled, smaller / "model.safetensors", metadata={"format": "pt"})
    return smaller


def _same_bits_of(model_dir: Path) -> str:
    with make_engine(model_dir, model_dir.parent, CPU, "aot", dtype="bfloat16") as engine:
        first, *others = [
            torch.stack([torch.stack(one.logits) for one in sequences])
            for drafter in (None, NgramLookup(2))
            for sequences in answers(engine, drafter, keep_logits=True)
        ]
        same = all(torch.equal(one, first) for one in others)
        assert same or not engine.config.batch_invariant, "other bits in bfloat16 with drafts"
    return "yes" if same else "its logits depend on what is computed beside them"


def _drafting_for_itself(model_dir: Path, expected: list[list[int]]) -> str:
    copy = SelfDraft("int4", None)
    with make_engine(model_dir, model_dir.parent, CPU, self_draft=copy) as engine:
        for sequences in answers(engine, SelfDraftModel(engine, use_logits=False)):
            assert [one.output_tokens for one in sequences] == expected, "other tokens with its copy"
    return "yes"


def _quantized(qformat: QuantFormat, model_dir: Path, expected: list[list[int]]) -> str:
    compilers: tuple[Compiler, ...] = ("none", "aot")
    for compiler in compilers:  # uncompiled, a draft changes last bits, which decide between equal logits
        with make_engine(model_dir, model_dir.parent, CPU, compiler, precision=QuantConfig(qformat)) as engine:
            plain, *others = (one for ngram in (False, True) for one in outputs_in_both_modes(engine, ngram=ngram))
        if all(one == plain for one in others):
            return "yes"
    raise AssertionError(f"other tokens in {qformat} with drafts")


def _split(model_dir: Path, expected: list[list[int]]) -> str:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "runtime" / "parallel")]
    try:
        from ranks_as_threads import split_engine
    finally:
        del sys.path[:2]
    with split_engine(model_dir, model_dir.parent, 2) as engine:
        _check_outputs(engine, expected, "split")
    return "yes"


def last_line(error: Exception) -> str:
    """The last of what an exception says: transformers' validators put before it whom they speak for."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].partition(" but it")[0] if isinstance(error, ImportError) else lines[-1]
    return re.sub(r"^\w+Error: ", "", line.strip())


def try_families(families: list[str], device: torch.device, ways: Sequence[str]) -> Iterator[Outcome]:
    """Outcomes; of ways that are not tried again, what was found before stays."""
    before = recorded()
    for family in families:
        with tempfile.TemporaryDirectory() as directory:
            outcome = try_family(family, Path(directory), device, ways=ways)
        if outcome.verdict == "equal" and family in before:
            found = before[family].ways | outcome.ways
            outcome = replace(outcome, ways={way: found[way] for way in WAYS if way in found})
        print(f"{family}: {outcome.verdict} {outcome.why} {outcome.ways or ''}", file=sys.stderr, flush=True)
        yield outcome


def recorded() -> dict[str, Outcome]:
    """Read what was found, by family, when it was written."""
    return {family: Outcome(family, **record) for family, record in _records()["families"].items()}


def recorded_with() -> str:
    """Version of transformers that the families were last recorded with."""
    return str(_records()["transformers"])


def _records() -> dict[str, Any]:
    if RECORDS.exists():
        records: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
        return records
    return {"transformers": transformers.__version__, "families": {}}


def record(outcomes: Iterable[Outcome]) -> None:
    """Write what was found, beside what was before of other families, and the page of all."""
    found = recorded() | {outcome.family: outcome for outcome in outcomes}
    ordered = [found[family] for family in sorted(found)]  # an older transformers lacks some
    families = {one.family: {key: value for key, value in asdict(one).items() if key != "family"} for one in ordered}
    write_json(RECORDS, {"transformers": transformers.__version__, "families": families})
    page = PAGE.read_text(encoding="utf-8")
    made = table(ordered)
    PAGE.write_text(_MARKED.sub(lambda match: f"{match[1]}\n\n{made}\n\n{match[2]}", page), encoding="utf-8")


def table(outcomes: list[Outcome]) -> str:
    rows = [
        f"| {' | '.join([outcome.family, described(outcome), *_cells(outcome)])} |".replace("  ", " ")
        for outcome in outcomes
    ]
    counts = Counter(outcome.verdict for outcome in outcomes)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return "\n".join(
        [
            f"With transformers {recorded_with()}: {counted}. {_of_the_most_used(outcomes)}",
            "",
            f"| family | result | {' | '.join(WAYS)} | used |",
            f"|---|---|{'---|' * (len(WAYS) + 1)}",
            *rows,
        ]
    )


def _of_the_most_used(outcomes: list[Outcome]) -> str:
    most = [outcome for outcome in outcomes if POPULARITY.get(outcome.family, 3) < 3]
    others = [outcome.family for outcome in most if outcome.verdict != "equal"]
    names = f" (not {', '.join(others)})" if others else ""
    return f"Of the {len(most)} that are used most or much {len(most) - len(others)} are equal{names}."


def _cells(outcome: Outcome) -> list[str]:
    ways = [outcome.ways.get(way, "") for way in WAYS]
    said = [one if one in ("", "yes") else "no" for one in ways]
    return [*said, {1: "most", 2: "much", 3: "some"}.get(POPULARITY.get(outcome.family, 0), "")]


def described(outcome: Outcome) -> str:
    why = outcome.why.replace("|", "/").replace("`", "")  # what stands in backquotes is the project's own
    return f"{outcome.verdict}: {why}" if why else outcome.verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all, if none is named")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the file, and the table into docs/models.md"
    )
    parser.add_argument("--device", type=torch.device, default=CPU, help="of the engines: cpu, cuda")
    parser.add_argument("--ways", default=",".join(WAYS), help="which to try too, on a CPU; `none` for none of them")
    arguments = parser.parse_args()
    ways = [way for way in arguments.ways.split(",") if way != "none"]
    if foreign := set(ways) - set(WAYS):
        parser.error(f"there is no such way: {', '.join(sorted(foreign))}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", SpecDecWarning)
    families, outcomes = arguments.families or list(FAMILIES), []
    for outcome in try_families(families, arguments.device, ways if arguments.device == CPU else ()):
        outcomes.append(outcome)
        if arguments.write:
            record([outcome])
    print(table(outcomes))
    sys.exit(any(outcome.verdict == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    main()
