"""Models in the formats in which others save quantized weights: made by their libraries where these make them, and of
random bits otherwise, of which every pattern is a number. What they mean is told by the libraries' own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

Meant = dict[str, Tensor]
"""The numbers that a weight means, by its name."""

HIDDEN, INTERMEDIATE = 64, 128


def small_model(**overrides: Any) -> PreTrainedModel:
    """Wide enough for groups."""
    settings = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "attention_bias": False, "mlp_bias": False}
    return make_model("llama", **(settings | overrides))


MIXTURE_SIZES = {"hidden_size": HIDDEN, "head_dim": 16, "moe_intermediate_size": HIDDEN}


def layers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the linear layers within blocks, and of each expert, by their names in a file."""
    return {
        name.removesuffix(".weight"): weight
        for name, weight in revert_weight_conversion(model, model.state_dict()).items()
        if weight.dim() == 2 and "layers" in name and name.endswith(".weight") and not name.endswith("gate.weight")
    }


def save_quantized(
    model: PreTrainedModel, directory: Path, tensors: dict[str, Tensor], quantization: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The model's directory with `tensors` in the place of its layers' weights."""
    model.save_pretrained(directory)
    layers = layers_of(model)
    others = {
        name: tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name.removesuffix(".weight") not in layers
    }
    written = others | {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(written, directory / "model.safetensors", metadata)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def plain_model_of(directory: Path, meant: Meant) -> PreTrainedModel:
    """transformers' model with the numbers that the quantized one in the directory means, in their dtype."""
    tensors = load_file(directory / "model.safetensors")
    others = {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in meant or "bias" in name
    }
    plain = directory.with_name(f"{directory.name}-meant")
    plain.mkdir()
    save_file(others | {f"{name}.weight": tensor for name, tensor in meant.items()}, plain / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=next(iter(meant.values())).dtype)
    return model.eval()


def random_words(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def random_scales(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.05 + 0.01).to(dtype)


# compressed-tensors


def save_compressed(
    directory: Path, layout: str, weights: dict[str, Any], dtype: torch.dtype, model: PreTrainedModel | None = None
) -> Meant:
    """Tensors by the library's own compressor, and what its decompressor makes of them."""
    model = (model or small_model()).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors, meant = {}, {}
    for name, weight in layers_of(model).items():
        state = {"weight": weight, **_scales_and_zeros(weight, scheme.weights)}
        compressed = compressor.compress(state, scheme)
        tensors |= {f"{name}.{part}": tensor for part, tensor in compressed.items()}
        meant[name] = compressor.decompress(compressed, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json"), "format": layout}
    said = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    save_quantized(model, directory, tensors, said)
    return meant


def _scales_and_zeros(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales that just hold the weight's numbers."""
    outputs, inputs = weight.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.view(outputs // rows, rows, inputs // columns, columns)
        return {"weight_scale": (blocks.abs().amax((1, 3)) / 448).to(weight.dtype)}
    groups = weight.view(outputs, -1, args.group_size or inputs)
    if args.strategy == "tensor":
        groups = weight.view(1, 1, -1)
    if args.strategy == "tensor_group":  # NVFP4
        whole = 448 * 6 / weight.float().abs().amax()
        scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scales, "weight_global_scale": whole.view(1)}
    if (args.type, args.num_bits) == ("float", 4):  # MXFP4
        return {"weight_scale": (groups.abs().amax(-1) / 6).log2().ceil().exp2()}
    if args.type == "float":
        return {"weight_scale": groups.abs().amax(-1) / 448}
    if args.symmetric:
        return {"weight_scale": groups.abs().amax(-1) / (2 ** (args.num_bits - 1) - 1)}
    scales = (groups.amax(-1) - groups.amin(-1)) / (2**args.num_bits - 1)
    zeros = (-(2 ** (args.num_bits - 1)) - groups.amin(-1) / scales).round()
    low, high = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1
    return {"weight_scale": scales, "weight_zero_point": zeros.clamp(low, high).to(torch.int8)}


# AWQ and GPTQ


def save_awq(directory: Path, group_size: int, model: PreTrainedModel | None = None) -> Meant:
    """Tensors of random bits; their meaning is what compressed-tensors' converter makes of AutoAWQ's files."""
    model, generator = (model or small_model()).half(), torch.Generator().manual_seed(1)
    said = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    tensors: dict[str, Tensor] = {}
    for name, weight in layers_of(model).items():
        outputs, inputs = weight.shape
        groups = inputs // group_size
        tensors[f"{name}.qweight"] = random_words(generator, inputs, outputs // 8)
        tensors[f"{name}.qzeros"] = random_words(generator, groups, outputs // 8)
        tensors[f"{name}.scales"] = random_scales(generator, groups, outputs)
    save_quantized(model, directory, tensors, said)
    converted = AutoAWQConverter.from_autoawq_config(said).process(dict(tensors))
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, symmetric=False, group_size=group_size, strategy="group"),
    )
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return {name: compressor.decompress(_parts(converted, name), scheme)["weight"] for name in layers_of(model)}


def _parts(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items() if name.startswith(f"{layer}.")}


def save_gptq(
    directory: Path,
    bits: int,
    group_size: int,
    *,
    desc_act: bool,
    layout: str = "gptq",
    model: PreTrainedModel | None = None,
) -> Meant:
    """Tensors of random bits; their meaning is computed number by number, as GPTQ's paper and AutoGPTQ define it."""
    model, generator = (model or small_model()).half(), torch.Generator().manual_seed(2)
    said = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": False}
    tensors, meant = {}, {}
    for name, weight in layers_of(model).items():
        outputs, inputs = weight.shape
        groups, per_word = inputs // group_size, 32 // bits
        words = random_words(generator, inputs // per_word, outputs)
        zero_words = random_words(generator, groups, outputs // per_word)
        scales = random_scales(generator, groups, outputs)
        g_idx = torch.arange(inputs, dtype=torch.int32) // group_size
        if desc_act:
            g_idx = g_idx[torch.randperm(inputs, generator=generator)]
        parts = {"qweight": words, "qzeros": zero_words, "scales": scales, "g_idx": g_idx, "bias": torch.zeros(outputs)}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        meant[name] = _by_definition(words, zero_words, scales, g_idx, bits, 1 if layout == "gptq" else 0)
    save_quantized(model, directory, tensors, said | {"checkpoint_format": layout})
    return meant


def _by_definition(words: Tensor, zero_words: Tensor, scales: Tensor, g_idx: Tensor, bits: int, added: int) -> Tensor:
    per_word, outputs, inputs = 32 // bits, words.shape[1], len(g_idx)
    packed, packed_zeros = words.numpy().astype(np.uint32), zero_words.numpy().astype(np.uint32)
    weight, n = torch.empty(outputs, inputs, dtype=torch.float16), np.arange(outputs)
    for k in range(inputs):
        group = int(g_idx[k])
        values = packed[k // per_word] >> (k % per_word * bits) & (2**bits - 1)
        zeros = (packed_zeros[group, n // per_word] >> (n % per_word * bits) & (2**bits - 1)) + added
        weight[:, k] = torch.from_numpy(values.astype(np.int64) - zeros.astype(np.int64)) * scales[group]
    return weight


# FP8


def save_fp8(
    directory: Path,
    block: tuple[int, int] | None,
    model: PreTrainedModel | None = None,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> Meant:
    """Tensors by blocks or with a scale for each weight, read by transformers' own code. Scales in 8 bits are powers of
    2, saved as such or as bytes."""
    model = (model or small_model()).bfloat16()
    tensors, meant = {}, {}
    for name, weight in layers_of(model).items():
        rows, columns = block or tuple(weight.shape)
        blocks = weight.float().view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        scales = blocks.abs().amax((1, 3)) / 448
        if scale_dtype != torch.float32:
            scales = scales.log2().ceil().exp2()
        values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(weight.shape)
        if scale_dtype != torch.float32:
            scales = scales.to(torch.float8_e8m0fnu).view(scale_dtype)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scales if block else scales.view(1)}
        meant[name] = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block) if block else None}
    if scale_dtype != torch.float32:
        said["scale_fmt"] = "ue8m0"
    save_quantized(model, directory, tensors, said)
    return meant


# NVFP4 by ModelOpt, and bitsandbytes: by the definition of each

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def save_nvfp4(directory: Path, model: PreTrainedModel | None = None) -> Meant:
    """Tensors of random bits; computed in float64, then rounded."""
    model, generator = (model or small_model()).bfloat16(), torch.Generator().manual_seed(3)
    tensors, meant = {}, {}
    for name, weight in layers_of(model).items():
        outputs, inputs = weight.shape
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
        scales = random_scales(generator, outputs, inputs // 16, dtype=torch.float32).mul(4000).to(torch.float8_e4m3fn)
        of_all = torch.tensor(2.0**-10 * 1.1)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).byte()
        parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.ones(())}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        scales = (scales.double() * of_all.double()).float().double()
        meant[name] = (_E2M1[codes] * scales.repeat_interleave(16, 1)).float()
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}, "ignore": ["lm_head"]}
    save_quantized(model, directory, tensors, said)
    return meant


def save_bitsandbytes(directory: Path, kind: str, *, is_nested: bool = False) -> Meant:
    """`kind` is nf4, fp4 or int8. Tensors of random bits; computed in float64, then rounded."""
    model, rng = small_model().bfloat16(), np.random.default_rng(4)
    tensors, meant = {}, {}
    for name, weight in layers_of(model).items():
        if kind == "int8":
            values, scales = rng.integers(-127, 128, weight.shape, dtype=np.int8), rng.random(weight.shape[0]) + 0.1
            parts = {"weight": values, "SCB": scales.astype(np.float32), "weight_format": np.zeros((), np.uint8)}
            found = values.astype(np.float64) * parts["SCB"][:, None].astype(np.float64) / 127
        else:
            parts, found = _bitsandbytes_blocks(rng, tuple(weight.shape), kind, is_nested=is_nested)
        meant[name] = torch.from_numpy(found.astype(np.float32)).to(torch.float32 if kind == "int8" else torch.bfloat16)
        tensors |= {f"{name}.{part}": torch.from_numpy(values) for part, values in parts.items()}
    said = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    save_quantized(model, directory, tensors, said)
    return meant


def _bitsandbytes_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str, *, is_nested: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Blocks of 64 numbers, of which the last may be shorter; of scales blocks of 256."""
    count = shape[0] * shape[1]
    num_blocks = -(-count // 64)
    codes, numbers = rng.integers(0, 16, count, dtype=np.uint8), rng.standard_normal(16).astype(np.float32)
    scales = rng.random(num_blocks).astype(np.float32) + np.float32(0.1)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.absmax": scales, "weight.quant_map": numbers}
    if is_nested:
        own, of_own = rng.integers(0, 256, num_blocks, dtype=np.uint8), rng.random(-(-num_blocks // 256))
        table, of_own = rng.standard_normal(256).astype(np.float32), of_own.astype(np.float32)
        scales = table[own] * of_own.repeat(256)[:num_blocks] + np.float32(1.25)
        parts |= {"weight.absmax": own, "weight.nested_absmax": of_own, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.25}
    said = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = said
    found = numbers[codes].astype(np.float64) * scales.repeat(64)[:count].astype(np.float64)
    return parts, found.reshape(shape)


# torchao: by the definition of each class, in the form in which its library flattens it


def save_torchao(directory: Path, kind: str, bits: int = 8, group_size: int = -1) -> Meant:
    """`kind` is the class of its weights. Tensors of random bits; computed in float64, then rounded to bfloat16."""
    model, generator = small_model().bfloat16(), torch.Generator().manual_seed(5)
    tensors, meant, metadata = {}, {}, {}
    for name, weight in layers_of(model).items():
        outputs, inputs = weight.shape
        size = group_size if group_size > 0 else inputs
        half = 2 ** (bits - 1)
        values = torch.randint(-half, half, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale_dtype = torch.float32 if bits == 8 else torch.bfloat16
        scales = random_scales(generator, outputs, inputs // size, dtype=scale_dtype)
        zeros = torch.randint(-half, half, scales.shape, generator=generator, dtype=torch.int8)
        said: dict[str, Any] = {"block_size": [1, size], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
        if kind == "Float8Tensor":
            values, zeros = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn), zeros * 0
        elif kind == "IntxUnpackedToInt8Tensor":
            said["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
        wide, numbers_of_0 = scales.double().repeat_interleave(size, 1), zeros.double().repeat_interleave(size, 1)
        found = (values.double() - numbers_of_0) * wide
        parts = {"qdata": values, "scale": scales, "zero_point": zeros}
        if kind == "Int4Tensor":  # two in a byte; a number is a value times the scale and the number of 0
            offsets = (torch.rand(scales.shape, generator=generator) / 8).bfloat16()
            found = values.double() * wide + offsets.double().repeat_interleave(size, 1)
            packed = (values[:, ::2] & 15 | values[:, 1::2] << 4).to(torch.int8)
            parts = {"qdata": packed, "scale": scales.t(), "zero_point": offsets.t()}
        if kind == "Float8Tensor":
            del parts["zero_point"]
        tensors |= {f"{name}._weight_{part}": tensor for part, tensor in parts.items()}
        metadata[f"{name}.weight"] = json.dumps({"_type": kind, "_data": said, "_tensor_data_names": [*parts]})
        meant[name] = found.float().bfloat16()
    metadata["tensor_names"] = json.dumps([*metadata])
    save_quantized(model, directory, tensors, {"quant_method": "torchao", "quant_type": {"default": {}}}, metadata)
    return meant


# GGUF

Q = gguf.GGMLQuantizationType
_RANDOM_ONLY = {
    **{Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.Q2_K: (80, 82), Q.Q3_K: (108,)},
    **{Q.IQ4_NL: (0,), Q.IQ4_XS: (0,)},
}
"""Types that the package does not make: where in a block its float16 numbers are, which random bits may make NaN."""


GGUF_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


def gguf_model(architecture: str, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """The model whose file `save_gguf` writes."""
    if architecture == "llama":
        return make_model("llama", vocab_size=vocab_size, attention_bias=False, mlp_bias=False, **GGUF_SIZES)
    if architecture == "gemma3":  # layers of both kinds, and positions far apart
        settings = GGUF_SIZES | {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 64}
        layers = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        parameters = {"full_attention": rope, "sliding_attention": rope}
        return make_model("gemma3", vocab_size=vocab_size, layer_types=layers, rope_parameters=parameters, **settings)
    if architecture.startswith("gemma4"):
        return make_model("gemma4-moe", vocab_size=vocab_size, **_gemma_4(architecture == "gemma4-moe", vocab_size))
    if architecture in ("qwen2moe", "qwen3moe"):
        sizes = GGUF_SIZES | {"moe_intermediate_size": 256, "norm_topk_prob": architecture == "qwen3moe"}
        own = {"shared_expert_intermediate_size": 512} if architecture == "qwen2moe" else {}
        return make_model(f"{architecture[:5]}-moe", vocab_size=vocab_size, **sizes, **own)
    if architecture == "phi3-long":  # factors of the short kind up to 64 positions, then of the long one
        short, long = ([1.0 + share * i / 23 for i in range(24)] for share in (0.2, 3.0))
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
        rope |= {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 64}
        own = {"original_max_position_embeddings": 64}
        return make_model("phi3", vocab_size=vocab_size, rope_parameters=rope, **own, **GGUF_SIZES)
    if architecture in ("phi3", "glm4"):  # positions turn a part of each head
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
        own = {"attention_bias": True} if architecture == "glm4" else {}
        return make_model(architecture, vocab_size=vocab_size, rope_parameters=rope, **GGUF_SIZES, **own)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if architecture == "mistral3-plain":  # without yarn
        rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.3}
        rope |= {"original_max_position_embeddings": 64}
        return make_model("mistral3", vocab_size=vocab_size, rope_parameters=rope, **GGUF_SIZES)
    if architecture == "mistral3":
        rope |= {"beta_slow": 1.5, "mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.3}
        return make_model(architecture, vocab_size=vocab_size, rope_parameters=rope, **GGUF_SIZES)
    if architecture == "gpt-oss":
        # The range of positions ends at 9, near enough below it: llama.cpp rounds it up, and transformers does not.
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0001 * 64 / (2 * np.pi * 10000 ** (9 / 32)), "truncate": False}
        # Small numbers, or the 16 bits of llama.cpp's keys and values make large differences.
        sizes = GGUF_SIZES | {"intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.05}
        return make_model(architecture, vocab_size=vocab_size, rope_parameters=rope, **sizes)
    if architecture in ("gemma2", "smollm3"):  # layers of both kinds; every fourth one without positions
        settings = GGUF_SIZES | {"num_hidden_layers": 5}
        layers = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
        own: dict[str, Any] = {"query_pre_attn_scalar": 64, "layer_types": layers}
        own = own if architecture == "gemma2" else {"no_rope_layers": [1, 1, 1, 0, 1]}
        return make_model(architecture, vocab_size=vocab_size, **settings, **own)
    return make_model(architecture, vocab_size=vocab_size, **GGUF_SIZES)


def _gemma_4(is_mixture: bool, vocab_size: int) -> dict[str, Any]:
    """A mixture with values that are keys; or layers of which the last two share keys and values of those before, and
    inputs per layer."""
    rope = {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    settings = GGUF_SIZES | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope | {"rope_type": "default"}},
        "global_head_dim": 128,
        "final_logit_softcapping": 30.0,
    }
    settings["rope_parameters"]["sliding_attention"].pop("partial_rotary_factor")
    if is_mixture:
        own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "moe_intermediate_size": 256}
        return settings | own
    return settings | {
        "enable_moe_block": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": vocab_size,
    }  # fmt: skip


GGUF_FAMILIES = (
    *("gemma2", "gemma3", "gemma4", "gemma4-moe", "granite", "smollm3", "olmo2", "ernie4_5", "phi3", "phi3-long"),
    *("glm4", "hunyuan-dense", "mistral3", "mistral3-plain", "mixtral", "qwen2moe", "qwen3moe", "gpt-oss"),
)
"""Families whose files differ from those of Llama, Qwen2 and Qwen3."""
INTERLEAVED = ("llama", "mixtral", "mistral3", "mistral3-plain", "granite", "smollm3")
"""Families of which llama.cpp's conversion reorders queries and keys."""
_STORED_AS = {"mixtral": "llama", "gemma4-moe": "gemma4", "phi3-long": "phi3", "mistral3-plain": "mistral3"}
_SCALES = {
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
}


def save_gguf(
    path: Path,
    kind: Q,
    *,
    architecture: str = "llama", edit: Callable[[gguf.GGUFWriter], None] | None = None, vocab_size: int = VOCAB_SIZE,
    is_tied: bool = False, up_kind: Q | None = None, max_tensors: int = 0,
) -> Meant:  # fmt: skip
    """A model whose layers are of one type, and its embeddings of Q8_0; what the package makes of them.

    A file of a tied model has no output layer. Experts may have parts of two types. With `max_tensors` in a file there
    are several.
    """
    model, rng = gguf_model(architecture, vocab_size), np.random.default_rng(3)
    is_tied |= architecture == "gemma2" or architecture.startswith("gemma4")  # always
    config, writer = (
        model.config,
        gguf.GGUFWriter(path, _STORED_AS.get(architecture, architecture), split_max_tensors=max_tensors),
    )
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture.startswith("gemma4"):
        _write_gemma_4(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(64)
        writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        is_local = architecture in ("mixtral", "gpt-oss")
        writer.add_expert_count(config.num_local_experts if is_local else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    if architecture.startswith("mistral3"):
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if (
        config.rope_parameters.get("rope_type") in ("longrope", "default")
        and "original_max_position_embeddings" in config.rope_parameters
    ):
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if architecture == "phi3-long":
        for length in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(256 / 64) / np.log(64)))
    if config.rope_parameters.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_slow(config.rope_parameters["beta_slow"])
    if architecture in ("phi3", "phi3-long", "glm4"):
        writer.add_rope_dimension_count(int(64 * config.rope_parameters["partial_rotary_factor"]))
    if architecture == "granite":
        for name, add in _SCALES.items():
            getattr(writer, add)(getattr(config, name))
    meant: Meant = {}
    stored_as = _STORED_AS.get(architecture, architecture).upper().replace("-", "_")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[stored_as], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        weight = tensor.numpy()
        if architecture == "gemma4-moe" and (stored_name := _as_in_gemma_4(name)) is not None:
            data = stored_blocks(weight.reshape(-1, weight.shape[-1]), kind, rng) if weight.ndim == 3 else weight
            writer.add_tensor(
                stored_name, data.reshape(*weight.shape[:-1], -1), raw_dtype=kind if weight.ndim == 3 else Q.F32
            )
            values = gguf.dequantize(data, kind).reshape(weight.shape) if weight.ndim == 3 else weight
            meant[name] = torch.from_numpy(values.copy())
            continue
        if weight.ndim == 3 or name.endswith("proj_bias"):
            meant[name] = _save_experts(writer, name, weight, (kind, up_kind or kind), rng)
            continue
        if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = _as_llama_cpp_orders(weight, heads)
        if is_shifted := architecture in ("gemma2", "gemma3") and "norm" in name:
            weight = weight + 1
        stored = kind if weight.ndim == 2 and "embed" not in name else Q.Q8_0 if weight.ndim == 2 else Q.F32
        data = stored_blocks(weight, stored, rng)
        stored_name = names.get_name(
            f"{name}.weight" if name.endswith(("sinks", "layer_scalar")) else name, (".weight", ".bias")
        )
        writer.add_tensor(stored_name, data, raw_dtype=stored)
        values = gguf.dequantize(data, stored).reshape(weight.shape)
        if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            values = _in_halves(values, heads)
        meant[name] = torch.from_numpy(values - 1 if is_shifted else values.copy())
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _write_gemma_4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write what llama.cpp's conversion does."""
    of_layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    wide = [config.use_double_wide_mlp and mode == "reuse" for mode in config.kv_sharing_modes]
    writer.add_feed_forward_length([config.intermediate_size * (2 if one else 1) for one in wide])
    writer.add_head_count_kv([one.num_key_value_heads for one in of_layers])
    full, local = of_layers[1].head_dim, of_layers[0].head_dim
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    num_turned = int(full // 2 * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    factors = [1.0] * num_turned + [1e30] * (full // 2 - num_turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _as_in_gemma_4(name: str) -> str | None:
    """Stored names of a mixture's experts, gates above the others, and of its scales; None for other tensors."""
    _, _, block, *rest = name.split(".")
    of_block = {
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
    stored = of_block.get(".".join(rest))
    return None if stored is None else f"blk.{block}.{stored}"


def _save_experts(
    writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kinds: tuple[Q, Q], rng: np.random.Generator
) -> torch.Tensor:
    """Gates and the others in a tensor each, of which these may come first; returns both together. gpt-oss's alternate,
    with inputs first, and have biases."""
    block, is_bias = f"blk.{name.split('.')[2]}.ffn_", name.endswith("_bias")
    alternate = writer.arch == "gpt-oss"
    rows = weight.swapaxes(1, 2) if alternate and not is_bias else weight
    parts = {"down": (rows, kinds[0])}
    if "gate_up" in name:
        gate, up = (rows[:, ::2], rows[:, 1::2]) if alternate else np.split(rows, 2, axis=1)
        parts = {"up": (up, kinds[1]), "gate": (gate, kinds[0])}
    values = {}
    for part_name, (part, kind) in parts.items():
        kind = Q.F32 if is_bias else kind
        data = stored_blocks(np.ascontiguousarray(part).reshape(-1, part.shape[-1]), kind, rng)
        values[part_name] = gguf.dequantize(data, kind).reshape(part.shape)
        stored_name = f"{block}{part_name}_exps.{'bias' if is_bias else 'weight'}"
        writer.add_tensor(stored_name, data.reshape(*part.shape[:-1], -1), raw_dtype=kind)
    if "down" in values:
        whole = values["down"]
    elif alternate:
        whole = np.stack([values["gate"], values["up"]], axis=2).reshape(rows.shape)
    else:
        whole = np.concatenate([values["gate"], values["up"]], axis=1)
    return torch.from_numpy(np.ascontiguousarray(whole.swapaxes(1, 2) if alternate and not is_bias else whole))


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, template: str | None = None) -> None:
    """A byte-level tokenizer as llama.cpp's conversion writes it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if template is not None:
        writer.add_chat_template(template)


def stored_blocks(weight: np.ndarray, kind: Q, rng: np.random.Generator) -> np.ndarray:
    if kind not in _RANDOM_ONLY:
        return gguf.quantize(weight, kind)
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (weight.shape[0], weight.shape[1] // numbers, num_bytes), dtype=np.uint8)
    for place in _RANDOM_ONLY[kind]:
        scales = (rng.random(blocks.shape[:2]) * 0.002 + 0.0005).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def _as_llama_cpp_orders(weight: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))


def _in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    shape = (heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)
