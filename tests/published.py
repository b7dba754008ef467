"""Configs of checkpoints as they were published, small enough to run, with random weights.

`tests/data/published_configs.json` has each config.json to the letter, and where it stands: repository, path, commit.
Where that is not the hub's own file, its `note` says how it differs. Width, depth and experts are shrunk here, and
nothing else: ropes, windows, end ids, dtypes and whatever a family's config has besides stay as people have them.
"""

import copy
import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import hf_greedy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from scripts.tools.families import random_model

DATA = Path(__file__).parent / "data" / "published_configs.json"
_HEADS, _HEAD_DIM, _HIDDEN = 4, 16, 32
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OWN_NAMES = {
    "n_head": "num_attention_heads", "n_heads": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers", "n_embd": "hidden_size", "d_model": "hidden_size",
    "num_attention_groups": "num_key_value_heads", "num_kv_heads": "num_key_value_heads",
}  # fmt: skip
"""Names in the configs of older families, and what later ones have in common for them."""
_SIZES = {
    "intermediate_size": 48, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "hidden_size_per_layer_input": 8, "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "top_k_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "block_dim": 32,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
    "moe_shared_expert_intermediate_size": 16, "conv_dim": 32, "conv_dim_out": 32, "block_ff_dim": 48,
    "dim_model_base": 8, "num_heads": 4, "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
    "qk_head_dim": 24, "global_head_dim": 2 * _HEAD_DIM, "num_global_key_value_heads": 1, "share_expert_dim": 16,
    "moe_top_k": 2,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "out_hidden_size": _HIDDEN, "image_size": 56, "num_mel_bins": 8,
    "max_source_positions": 8, "fullatt_block_indexes": [0], "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32, "vocab_size": 64, "global_head_dim": 16, "d_model": 32, "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 32, "downsample_hidden_size": 8,
    "deepstack_visual_indexes": [0], "mm_embed_dim": 32, "output_proj_dims": 32, "mm_hidden_size": 32,
    "text_hidden_size": _HIDDEN, "embed_dim": 32,
}  # fmt: skip
_OTHER_LAYERS = {
    "kv_n_heads": 2, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": _HEAD_DIM,
    "true_head_dim": _HEAD_DIM, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2,
}  # fmt: skip
"""Sizes of DBRX's two halves, and of Step's layers with a window."""
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
    refused: str | None
    config: dict[str, Any]
    note: str = ""
    """Difference from the hub's own file, or where else that is quoted."""


PUBLISHED = {entry["name"]: Published(**entry) for entry in json.loads(DATA.read_text(encoding="utf-8"))}
RUN = tuple(name for name, one in PUBLISHED.items() if one.refused is None)


def shrunk(config: dict[str, Any], *, limit: int | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """The config with fewer and narrower layers. `limit` moves the thresholds that a prompt should pass, windows and
    the positions of before a rope was scaled, where a prompt past the published ones would be too slow;
    `vocab_size` has the words that a small test has."""
    small = copy.deepcopy(config)
    whole = _language_model(small)
    text = whole.get("text_config", whole)
    for part in ("vision_config", "audio_config"):
        if isinstance(whole.get(part), dict):
            # of Kimi K2.5 transformers has the published sizes by itself, and reads other names
            names = {*whole[part], *(name.removeprefix("vt_") for name in whole[part] if name.startswith("vt_"))}
            whole[part] |= {name: size for name, size in _TOWER.items() if name in names}
    _shrink_text(text)
    if vocab_size is not None:
        _set(whole, text, "vocab_size", vocab_size)
    if limit is not None:
        positions = text.get("max_position_embeddings", 0)
        for place in (text, *_ropes(text)):
            for name in ("sliding_window", "attention_chunk_size", "floor_scale", "original_max_position_embeddings"):
                if isinstance(place.get(name), int) and place[name] < positions:
                    place[name] = limit
    return small


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The part that writes text: the thinker of Qwen-Omni, beside what speaks."""
    part: dict[str, Any] = config.get("thinker_config", config)
    return part


def _set(config: dict[str, Any], text: dict[str, Any], name: str, value: int) -> None:
    for place in (config, text):
        if name in place or place is text:
            place[name] = value


def _ropes(text: dict[str, Any]) -> list[dict[str, Any]]:
    found = [text[name] for name in ("rope_scaling", "rope_parameters") if isinstance(text.get(name), dict)]
    return [*found, *(inner for one in found for inner in one.values() if isinstance(inner, dict))]


def _shrink_text(text: dict[str, Any]) -> None:
    own = {common: name for name, common in _OWN_NAMES.items() if name in text}
    text |= {common: text.pop(name) for common, name in own.items()}
    names = set(text)
    _shrink_widths(text)
    _shrink_depth(text)
    if own and "num_key_value_heads" not in names:
        del text["num_key_value_heads"]
    text |= {name: text.pop(common) for common, name in own.items()}


def _shrink_widths(text: dict[str, Any]) -> None:
    heads, kv_heads = text.get("num_attention_heads", 1), text.get("num_key_value_heads", 1)
    low_rank = "kv_lora_rank" in text
    text |= {name: size for name, size in _SIZES.items() if isinstance(text.get(name), int) and text[name]}
    text |= {name: 8 for name in _EXPERTS if isinstance(text.get(name), int)}
    for part in ("attn_config", "ffn_config", "attention_other_setting"):
        if part in text:
            text[part] |= {name: size for name, size in _OTHER_LAYERS.items() if name in text[part]}
    text["num_attention_heads"] = _HEADS
    text["num_key_value_heads"] = _HEADS if kv_heads == heads or low_rank else min(kv_heads, 2)
    text["hidden_size"] = _HIDDEN if "head_dim" in text or low_rank else _HEADS * _HEAD_DIM
    if "head_dim" in text:
        text["head_dim"] = _HEAD_DIM
    if "rotary_dim" in text:
        text["rotary_dim"] = _HEAD_DIM // 2
    if text["model_type"] == "gpt_oss":
        text["intermediate_size"] = 64  # blocks of 32
    if "quantization_config" in text:  # groups of 32
        text["moe_intermediate_size"] = 32
    rotary = text.get("qk_rope_head_dim", _HEAD_DIM) // 2
    for rope in _ropes(text):
        for name in ("long_factor", "short_factor"):
            if name in rope:  # a number for each pair of a head's
                rope[name] = rope[name][:: len(rope[name]) // rotary][:rotary]
        if "mrope_section" in rope:
            half = text.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)) == 0.5
            rope["mrope_section"] = [1, 1, 2] if half else [2, 3, 3]


def _shrink_depth(text: dict[str, Any]) -> None:
    num_layers = text.get("num_hidden_layers", 1)
    of_kinds = {"layer_types", "full_attention_interval"} & text.keys()
    of_kinds |= {"no_rope_layers"} & text.keys()
    kept = range(7 if text["model_type"].startswith("gemma") else 4 if of_kinds else 2)
    if "attn_layer_period" in text:
        kept = range(text["attn_layer_offset"] + 2)
    if "hybrid_override_pattern" in text:  # Mamba-2, experts and, sixth, attention
        text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:7]
        kept = range(7)
    if text.get("num_kv_shared_layers"):
        period = text["layer_types"].index("full_attention") + 1
        kept, text["num_kv_shared_layers"] = range(2 * period), period - 1
    if isinstance(text.get("moe_layers_enum"), str):  # Step's last layers limit their experts
        kept = [0, 1, num_layers - 2, num_layers - 1]
        experts = text["moe_layers_enum"].split(",")
        text["moe_layers_enum"] = ",".join(str(i) for i, layer in enumerate(kept) if str(layer) in experts)
    text["num_hidden_layers"] = len(kept)
    more = text.get("num_nextn_predict_layers") or 0  # behind them
    for name, value in text.items():
        if isinstance(value, list) and num_layers > 1 and len(value) in (num_layers, num_layers + more):
            text[name] = [value[i] for i in kept] + value[num_layers:]


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
    generating = _generating(config)
    plain = copy.deepcopy({key: value for key, value in generating.items() if key != "quantization_config"})
    plain.get("text_config", {}).pop("quantization_config", None)
    if str(plain.get("torch_dtype")).startswith("float8"):
        del plain["torch_dtype"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(plain))
    model = random_model(f"{seed}", AutoConfig.from_pretrained(directory), *stds)
    model.to(_dtype(config)).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(plain))
    if generating is not config:
        _keep_beside(directory, "thinker." if "thinker_config" in config else "")
    method = config.get("quantization_config", {}).get("quant_method")
    if method == "mxfp4":
        quantize_experts_to_mxfp4(directory)
    elif method == "compressed-tensors":
        _quantize_experts_to_int4(directory)
    elif "quantization_config" in config:
        _quantize_to_fp8(directory, config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


def _generating(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of transformers that generates what this one's does, where its own does not."""
    if config.get("model_type") == "step3p5":  # has its class inside of Step 3.7 alone, whose files name it alike
        tower = {"width": 32, "layers": 1, "heads": 2, "mlp_ratio": 1.5}
        return {"model_type": "step3p7", "text_config": config, "vision_config": tower, "dtype": config["torch_dtype"]}
    if config.get("model_type") == "dbrx":  # takes no whole number there, and looks for the rope elsewhere
        norm = float(config["ffn_config"]["moe_normalize_expert_weights"])
        experts = config["ffn_config"] | {"moe_normalize_expert_weights": norm}
        return config | {"ffn_config": experts, "rope_theta": config["attn_config"]["rope_theta"]}
    return _language_model(config)


def _keep_beside(directory: Path, prefix: str) -> None:
    """Keep the model that transformers generates with beside it, and name the weights as its own files do."""
    shutil.copytree(directory, directory.with_name(f"{directory.name}-meant"), dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items() if not name.startswith("vi")}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})


def load_hugging_face(directory: Path) -> PreTrainedModel:
    """transformers' own model of a directory, float32. Of weights in FP8 it is that of the numbers that they mean:
    transformers computes with them on GPUs only. Of Qwen-Omni it is what writes text."""
    directory = meant if (meant := directory.with_name(f"{directory.name}-meant")).is_dir() else directory
    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForMultimodalLM
    model: PreTrainedModel = kind.from_pretrained(directory, dtype=torch.float32)
    if config.model_type == "llama4":  # transformers 5.24 wants outputs of images of its language model
        model = model.language_model
    return model.eval()


def _dtype(config: dict[str, Any]) -> torch.dtype:
    said = str(
        config.get("torch_dtype") or config.get("dtype") or config.get("text_config", {}).get("dtype", "float32")
    )
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


def _quantize_experts_to_int4(directory: Path) -> None:
    """Write the model's experts as compressed-tensors packs them, in groups of 32, and the model that they mean."""
    meant = directory.with_name(f"{directory.name}-meant")
    shutil.copytree(directory, meant, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        num_outputs, num_inputs = tensors[name].shape
        groups = tensors.pop(name).float().reshape(num_outputs, num_inputs // 32, 32)
        scales = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
        numbers = (groups / scales).round().clamp(-8, 7)
        nibbles = (numbers.long() + 8).reshape(num_outputs, num_inputs // 8, 8) << torch.arange(0, 32, 4)
        packed[f"{name}_packed"] = nibbles.sum(-1).to(torch.uint32).view(torch.int32)
        packed[f"{name}_scale"] = scales.squeeze(-1)
        packed[f"{name}_shape"] = torch.tensor([num_outputs, num_inputs], dtype=torch.int32)
        packed[name] = (numbers * scales).reshape(num_outputs, num_inputs)
    numbers_of = {name: packed.pop(name) for name in list(packed) if name.endswith(".weight")}
    save_file(tensors | numbers_of, meant / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors | packed, directory / "model.safetensors", metadata={"format": "pt"})


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
