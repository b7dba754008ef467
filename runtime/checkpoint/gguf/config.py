"""Translates a GGUF file's metadata into Hugging Face's terms: the config, the names of weights, the order of rows.

Every key about the model is used, or is known to change nothing at its value, or is refused by name.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.ends import end_ids_of, token_id
from runtime.checkpoint.gguf.families import (
    EXPERTS,
    FAMILIES,
    LAYER_SCALE,
    ROUTER_SCALES,
    SINKS,
    family_in,
    family_of,
)
from runtime.checkpoint.gguf.metadata import (
    EXPERT_COUNT,
    EXPERT_WIDTHS,
    HEADS,
    KV_HEADS,
    LOCAL_HEAD_DIM,
    SHARED_WIDTH,
    WIDTHS,
    Metadata,
)
from runtime.checkpoint.gguf.reader import ORIGINAL, GGUFTensor, damaged, read_gguf
from runtime.util.errors import SpecDecError, SpecDecWarning

_USED = frozenset({
    "context_length", "embedding_length", "feed_forward_length", "block_count", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
_NOTES = {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
"""Keys that change nothing, or, like the original context length, are read where they do."""
_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "attention.scale": 0,
    "attention.sliding_window": 0, "attn_logit_softcapping": 0, "embedding_scale": 1, "expert_count": 0,
    "expert_shared_count": 0, "expert_used_count": 0, "final_logit_softcapping": 0, "logit_scale": 1,
    "pooling_type": 0, "residual_scale": 1, "rope.scaling.attn_factor": 1, "use_parallel_residual": False,
    "rope.scaling.yarn_attn_factor": 1, "rope.scaling.yarn_ext_factor": 1,
}  # fmt: skip
"""Further keys, each with the value at which it changes nothing."""


def config_of(path: Path) -> dict[str, Any]:
    """The Hugging Face config. SpecDecError for an unsupported family or key, or values that contradict tensors."""
    header = read_gguf(path)
    if header.architecture not in FAMILIES:
        read = ", ".join(f"`{name}`" for name in FAMILIES)
        raise SpecDecError(
            f"GGUF models of this family are not read, `{header.architecture}`: {path}", hint=f"specdec reads {read}"
        )
    family, tensors = family_in(header), header.tensors
    model = Metadata(header, path, family.is_partial)
    _check_keys(model, _USED | family.used)
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
        "bos_token_id": token_id(header.metadata, "bos_token_id"),
        "pad_token_id": token_id(header.metadata, "padding_token_id"),  # None replaces another vocabulary's default
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
    if end_ids := end_ids_of(header.metadata):
        config["eos_token_id"] = end_ids
    return config


def _check_keys(model: Metadata, used: frozenset[str]) -> None:
    """SpecDecError for a key about the model that is unknown, or has a value that would change the logits."""
    for name, value in model.header.metadata.items():
        space, _, key = name.partition(".")
        if space != model.header.architecture or key in used or key in _NOTES:
            continue
        if key not in _NEUTRAL or value != _NEUTRAL[key]:
            model.refuse(key)


def _check_num_blocks(model: Metadata) -> None:
    """SpecDecError for a number of layers below 1, above the number of tensors, or that a tensor's layer exceeds."""
    if (num_blocks := model.get("block_count")) < 1:
        model.refuse("block_count")
    said = f"`{model.header.architecture}.block_count` is {num_blocks}"
    if num_blocks > (num_tensors := len(model.header.tensors)):
        raise _of_two_models(model, f"{said}, and there are {num_tensors} tensors")
    for name in model.header.tensors:
        space, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if space == "blk" and number.isdigit() and int(number) >= num_blocks:
            raise _of_two_models(model, f"{said}, and there is a tensor `{name}`")


def _of_two_models(model: Metadata, said: str) -> SpecDecError:
    return damaged(f"metadata and tensors belong to two models, {said}: {model.path}")


def _check_sizes(model: Metadata) -> None:
    """SpecDecError if a tensor's shape contradicts the metadata."""
    _check_size(model, "token_embd", 1, int(model.get("embedding_length")), "embedding_length")
    heads, kv_heads = int(model.get(HEADS)), model.by_layer(KV_HEADS, model.get(HEADS))
    of_kv_heads, of_experts = (
        key if model.find(key) is not None else other for key, other in ((KV_HEADS, HEADS), (EXPERT_WIDTHS, WIDTHS))
    )
    local = model.find("attention.sliding_window_pattern") if model.find(LOCAL_HEAD_DIM) is not None else None
    expert_widths = model.by_layer(of_experts)
    for i, width in enumerate(model.by_layer(WIDTHS, model.find(EXPERT_WIDTHS))):
        of_size = model.of_head_dim
        if isinstance(local, list) and local[i : i + 1] == [True]:
            of_size = (LOCAL_HEAD_DIM,)
        size = model.size_of_heads(of_size)
        sizes: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
            ("attn_q", 0, heads * size, (HEADS, *of_size)),
            ("attn_output", 1, heads * size, (HEADS, *of_size)),
            ("attn_k", 0, kv_heads[i] * size, (of_kv_heads, *of_size)),
            ("attn_v", 0, kv_heads[i] * size, (of_kv_heads, *of_size)),
            ("attn_qkv", 0, (heads + 2 * kv_heads[i]) * size, (HEADS, of_kv_heads, *of_size)),
            ("ffn_down", 1, width, (WIDTHS,)),
            ("ffn_down_exps", 2, expert_widths[i], (of_experts,)),
            ("ffn_down_shexp", 1, int(model.get(SHARED_WIDTH, 0)), (SHARED_WIDTH,)),
            ("ffn_down_exps", 0, int(model.get(EXPERT_COUNT, 0)), (EXPERT_COUNT,)),
            ("ffn_gate_inp", 0, int(model.get(EXPERT_COUNT, 0)), (EXPERT_COUNT,)),
        )
        for name, axis, wanted, keys in sizes:
            _check_size(model, f"blk.{i}.{name}", axis, wanted, *keys)


def _check_size(model: Metadata, name: str, axis: int, size: int, *keys: str) -> None:
    tensor = model.header.tensors.get(f"{name}.weight")
    if tensor is None or axis >= len(tensor.shape) or tensor.shape[axis] == size:
        return
    wanted = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
    said = f"`{tensor.name}` is {list(tensor.shape)}, and should be {wanted} by {model.said(*keys)}"
    raise _of_two_models(model, said)


_WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip


def name_of(tensor: GGUFTensor, config: Mapping[str, Any], path: Path) -> str:
    """Name of the tensor in Hugging Face's model; SpecDecError for a tensor that the model does not have."""
    layer, _, part = tensor.name.rpartition(".")
    if layer in _WHOLE:
        return f"{_WHOLE[layer]}.{part}"
    of_block = family_of(config).of_block
    block, _, inner = layer.removeprefix("blk.").partition(".")
    in_block = f"model.layers.{block}." if layer.startswith("blk.") and block.isdigit() else None
    has_experts = bool(config.get("num_experts_per_tok") or config.get("top_k_experts"))
    if in_block and has_experts and f"{inner}.{part}" in ROUTER_SCALES:
        return f"{in_block}{ROUTER_SCALES[f'{inner}.{part}']}"
    if in_block and has_experts and inner in EXPERTS:
        return f"{in_block}{family_of(config).experts}.{EXPERTS[inner]}{'_bias' if part == 'bias' else ''}"
    if in_block and inner in of_block:
        return f"{in_block}{of_block[inner]}{'' if of_block[inner] in (SINKS, LAYER_SCALE) else f'.{part}'}"
    raise SpecDecError(f"`{path}` has a tensor that its model does not have: {tensor.name}", hint=ORIGINAL)


def experts_alternate(config: Mapping[str, Any]) -> bool:
    """True if an expert's gates and up-projections alternate and its matrix is [inputs, outputs] (gpt-oss)."""
    return family_of(config).alternates


def rows_of(tensor: GGUFTensor, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Rows in the file of a query's or key's matrix that llama.cpp reorders, one for each row in the model; None if the
    order is the same.

    With two heads of 4 rows: (0, 2, 1, 3, 4, 6, 5, 7), so row 1 is row 2 in the file.
    """
    kind = tensor.name.split(".")[-2]
    if not family_of(config).is_interleaved or kind not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    half = tensor.shape[0] // heads // 2
    return tuple((head * half + i) * 2 + side for head in range(heads) for side in range(2) for i in range(half))


def shift_of(tensor: GGUFTensor, config: Mapping[str, Any]) -> float:
    """Number to add to each number of the tensor: the family's `shift` for norms, else 0."""
    return family_of(config).shift if tensor.name.endswith("norm.weight") else 0.0


_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip


def generation_config_of(path: Path) -> dict[str, Any]:
    """The model's generation_config.json, as llama.cpp's converter stores it under `general.sampling.*`."""
    metadata = read_gguf(path).metadata
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    # The file has 32-bit numbers: 0.6 was written, and 0.6000000238 is read.
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items() if v is not None}
