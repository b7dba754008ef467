"""Configs of checkpoints as they were published, small enough to run, with random weights and a tokenizer.

`tests/data/published_configs.json` has each config.json to the letter, and where it stands: repository, path, commit.
Width, depth and experts are shrunk here, and nothing else: ropes, windows, end ids, dtypes and whatever a family's
config has besides stay as people have them.
"""

import copy
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_tokenizers import byte_level
from safetensors.torch import load_file, save_file
from tiny import hf_greedy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from scripts.tools.families import random_model

REAL_DIR = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
DATA = Path(__file__).parent / "data" / "published_configs.json"
_HEADS, _HEAD_DIM, _HIDDEN = 4, 16, 32
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES = {
    "intermediate_size": 48, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "hidden_size_per_layer_input": 8, "num_experts_per_tok": 2,
    "top_k_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "block_dim": 32,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
    "moe_shared_expert_intermediate_size": 16, "conv_dim": 32, "conv_dim_out": 32, "block_ff_dim": 48,
    "dim_model_base": 8, "num_heads": 4, "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "out_hidden_size": _HIDDEN, "image_size": 56, "num_mel_bins": 8,
    "max_source_positions": 8, "fullatt_block_indexes": [0], "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32, "vocab_size": 64,
}  # fmt: skip
STDS = ((0.3, 1.0), (0.6, 0.6), (0.3, 0.3), (1.0, 1.0), (0.1, 0.01), (0.3, 0.01), (0.3, 0.03), (0.15, 0.15))
STDS += ((1.0, 0.03),)
"""Standard deviations of weights and embeddings: the first pair with which answers tell anything is taken."""


@dataclass(frozen=True)
class Published:
    """A checkpoint's config.json, and the sentence by which it is refused, if it is."""

    name: str
    repository: str
    path: str
    commit: str
    tokenizer: str
    """Tokenizer of `specdec-real`, or `bytes`: a small one of bytes."""
    refused: str | None
    config: dict[str, Any]


PUBLISHED = {entry["name"]: Published(**entry) for entry in json.loads(DATA.read_text(encoding="utf-8"))}
RUN = tuple(name for name, one in PUBLISHED.items() if one.refused is None)


def shrunk(config: dict[str, Any], *, limit: int | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """The config with fewer and narrower layers. `limit` moves the thresholds that a prompt should pass, windows and
    the positions of before a rope was scaled, where a prompt past the published ones would be too slow;
    `vocab_size` has the words that a small test has."""
    small = copy.deepcopy(config)
    text = small.get("text_config", small)
    for part in ("vision_config", "audio_config"):
        if isinstance(small.get(part), dict):
            small[part] |= {name: size for name, size in _TOWER.items() if name in small[part]}
    _shrink_text(text)
    if vocab_size is not None:
        _set(small, text, "vocab_size", vocab_size)
    if limit is not None:
        positions = text.get("max_position_embeddings", 0)
        for place in (text, *_ropes(text)):
            for name in ("sliding_window", "attention_chunk_size", "floor_scale", "original_max_position_embeddings"):
                if isinstance(place.get(name), int) and place[name] < positions:
                    place[name] = limit
    return small


def _set(config: dict[str, Any], text: dict[str, Any], name: str, value: int) -> None:
    for place in (config, text):
        if name in place or place is text:
            place[name] = value


def _ropes(text: dict[str, Any]) -> list[dict[str, Any]]:
    found = [text[name] for name in ("rope_scaling", "rope_parameters") if isinstance(text.get(name), dict)]
    return [*found, *(inner for one in found for inner in one.values() if isinstance(inner, dict))]


def _shrink_text(text: dict[str, Any]) -> None:
    heads, kv_heads = text.get("num_attention_heads", 1), text.get("num_key_value_heads", 1)
    low_rank = "kv_lora_rank" in text
    text |= {name: size for name, size in _SIZES.items() if isinstance(text.get(name), int) and text[name]}
    text |= {name: 8 for name in _EXPERTS if isinstance(text.get(name), int)}
    text["num_attention_heads"] = _HEADS
    text["num_key_value_heads"] = _HEADS if kv_heads == heads or low_rank else min(kv_heads, 2)
    text["hidden_size"] = _HIDDEN if "head_dim" in text or low_rank else _HEADS * _HEAD_DIM
    if "head_dim" in text:
        text["head_dim"] = _HEAD_DIM
    if "rotary_dim" in text:
        text["rotary_dim"] = _HEAD_DIM // 2
    num_layers = text.get("num_hidden_layers", 1)
    of_kinds = {"layer_types", "full_attention_interval"} & text.keys()
    of_kinds |= {"no_rope_layers"} & text.keys()
    text["num_hidden_layers"] = 7 if text["model_type"].startswith("gemma") else 4 if of_kinds else 2
    if text["model_type"] == "gpt_oss":
        text["intermediate_size"] = 64  # blocks of 32
    if "attn_layer_period" in text:
        text["num_hidden_layers"] = text["attn_layer_offset"] + 2
    if "hybrid_override_pattern" in text:  # Mamba-2, experts and, sixth, attention
        text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:7]
        text["num_hidden_layers"] = 7
    if text.get("num_kv_shared_layers"):
        text["num_hidden_layers"], text["num_kv_shared_layers"] = 10, 4
    for name, value in text.items():
        if isinstance(value, list) and len(value) == num_layers:
            text[name] = value[: text["num_hidden_layers"]]
    rotary = text.get("qk_rope_head_dim", _HEAD_DIM) // 2
    for rope in _ropes(text):
        for name in ("long_factor", "short_factor"):
            if name in rope:  # a number for each pair of a head's
                rope[name] = rope[name][:: len(rope[name]) // rotary][:rotary]
        if "mrope_section" in rope:
            rope["mrope_section"] = [2, 3, 3]


def write_model(
    config: dict[str, Any], directory: Path, seed: int, *, prompt: list[int], num_new_tokens: int
) -> list[int]:
    """Write a model of the config, saved as it says, and return Hugging Face's greedy answer to the prompt."""
    for stds in STDS:
        write_random(config, directory, seed, stds)
        answer = hf_greedy(load_hugging_face(directory), prompt, num_new_tokens)
        if len(set(answer)) > num_new_tokens // 6:
            return answer
    raise AssertionError("random weights of this config repeat one token")


def write_random(config: dict[str, Any], directory: Path, seed: int, stds: tuple[float, float]) -> None:
    """Write a model of the config whose weights and embeddings have such deviations."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if str(plain.get("torch_dtype")).startswith("float8"):
        del plain["torch_dtype"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(plain))
    model = random_model(f"{seed}", AutoConfig.from_pretrained(directory), *stds)
    model.to(_dtype(config)).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(plain))
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        quantize_experts_to_mxfp4(directory)
    elif "quantization_config" in config:
        _quantize_to_fp8(directory, config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


def load_hugging_face(directory: Path) -> PreTrainedModel:
    """transformers' own model of a directory, float32. Of weights in FP8 it is that of the numbers that they mean:
    transformers computes with them on GPUs only."""
    directory = meant if (meant := directory.with_name(f"{directory.name}-meant")).is_dir() else directory
    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForMultimodalLM
    model: PreTrainedModel = kind.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def _dtype(config: dict[str, Any]) -> torch.dtype:
    said = str(config.get("torch_dtype") or config.get("dtype") or config["text_config"]["dtype"])
    return torch.bfloat16 if said.startswith("float8") else getattr(torch, said)


def _quantize_to_fp8(directory: Path, said: dict[str, Any]) -> None:
    """Write the model's linear layers in FP8, and the model that they mean beside it."""
    meant = directory.with_name(f"{directory.name}-meant")
    shutil.copytree(directory, meant, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_linear = tensor.dim() == 2 and not any(word in name for word in ("embed", "norm", "lm_head", "gate.weight"))
        if not is_linear or any(name.startswith(one) for one in said.get("modules_to_not_convert") or ()):
            quantized[name] = tensor
            continue
        scale = tensor.float().abs().max() / 448
        quantized[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        quantized[f"{name}_scale_inv"] = scale.reshape(1, 1) if said["weight_block_size"] else scale
        tensors[name] = quantized[name].float() * scale
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})


def quantize_experts_to_mxfp4(directory: Path) -> None:
    """Write the model's experts as random MXFP4, and the model that they mean to transformers beside it."""
    meant = directory.with_name(f"{directory.name}-meant")
    shutil.copytree(directory, meant, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, num_inputs, num_outputs = tensors[name].shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 127, shape, generator=generator, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(plain, meant / "model.safetensors", metadata={"format": "pt"})
    packed = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in tensors}
    save_file(packed, directory / "model.safetensors", metadata={"format": "pt"})


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def thresholds(config: dict[str, Any]) -> list[int]:
    """Positions behind which a config computes otherwise than before, that outputs are served past: windows, and
    where a rope was scaled from. `longrope` is served up to it, but Phi-MoE's, whose scales stand in its config."""
    text = config.get("text_config", config)
    positions = text.get("max_position_embeddings", 0)
    found = [text.get("sliding_window") if text.get("use_sliding_window", True) else None]
    found += [text.get("attention_chunk_size")]
    for rope in _ropes(text):
        if rope.get("rope_type", rope.get("type")) != "longrope" or "short_mscale" in rope:
            found.append(rope.get("original_max_position_embeddings"))
    return [one for one in found if isinstance(one, int) and one < positions]


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def write_tokenizer(published: Published, directory: Path) -> None:
    """The family's own tokenizer where it is there, else one of bytes; with a chat template in one of the places where
    the hub's directories have it: a file, or tokenizer_config.json, by itself or in a list."""
    real = REAL_DIR / f"tokenizer-{published.tokenizer}"
    if real.is_dir():
        shutil.copytree(real, directory, dirs_exist_ok=True)
    else:
        byte_level().save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said.pop("chat_template", None)
    place = seed_of(published.name) % 3
    if place == 0:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    elif place == 1:
        said["chat_template"] = TEMPLATE
    else:
        said["chat_template"] = [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "{{ tools }}"},
        ]
    path.write_text(json.dumps(said))
