"""Weights that others have quantized are read to the last bit: compared with their own libraries' tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import (
    GGUF_FAMILIES,
    MIXTURE_SIZES,
    Meant,
    Q,
    gguf_model,
    plain_model_of,
    save_awq,
    save_bitsandbytes,
    save_compressed,
    save_fp8,
    save_gguf,
    save_gptq,
    save_nvfp4,
    save_torchao,
    small_model,
    write_tokenizer,
)
from safetensors.torch import load_file
from sentences import Said
from tiny import VOCAB_SIZE, hf_greedy, make_model, run_convert
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.gguf.config import config_of
from runtime.checkpoint.quant.weight import take_quantized
from runtime.checkpoint.resolve import resolve_model
from runtime.model.causal_heads import has_causal_class
from runtime.text.text import load_tokenizer
from runtime.util.errors import SpecDecError
from scripts.tools import families
from specdec_cli import LLM, NgramDrafter, SamplingParams


def assert_same_numbers(checkpoint_dir: Path, meant: Meant) -> None:
    """Rounded to the dtype that the library gives; integers times scales are exact in float32."""
    weights = take_quantized(load_file(checkpoint_dir / "rank0.safetensors"))
    assert set(weights) == set(meant)
    for name, weight in weights.items():
        assert torch.equal(weight.dequantize(meant[name].dtype), meant[name]), name


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
COMPRESSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("int4 in groups", "pack-quantized", INT4, "W4A16"),
    ("int4 with zero points", "pack-quantized", INT4 | {"symmetric": False}, "W4A16"),
    ("int4 by channel", "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, "W4A16"),
    (
        "int4 by channel with zero points",
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
        "W4A16",
    ),
    ("int8 in groups, packed", "pack-quantized", INT4 | {"num_bits": 8}, "W8A16"),
    ("int8 with zero points, packed", "pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}, "W8A16"),
    ("int8 by channel", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "W8A16"),
    (
        "int8 by channel with zero points",
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        "W8A16",
    ),
    ("int8 of the whole weight", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}, "W8A16"),
    ("FP8 by channel", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "FP8"),
    ("FP8 of the whole weight", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "FP8"),
    (
        "NVFP4",
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "NVFP4",
    ),
    ("MXFP4", "mxfp4-pack-quantized", INT4 | {"type": "float"}, "W4A16_MXFP4"),
    (
        "FP8 in blocks",
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        "FP8_BLOCK_SCALES",
    ),
]


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("layout", "weights", "algorithm", "dtype"),
    [
        pytest.param(*case, dtype, id=f"{name} {dtype}", marks=() if i % 3 == j else pytest.mark.slow)
        for i, (name, *case) in enumerate(COMPRESSED)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_compressed_tensors_mean_what_the_library_says(
    layout: str, weights: dict[str, Any], algorithm: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    meant = save_compressed(tmp_path / "model", layout, weights, dtype)
    config = run_convert(tmp_path / "model", tmp_path / "out")
    assert_same_numbers(tmp_path / "out", meant)
    assert config.quantization is not None
    assert (config.quantization.quant_algo, config.quantization.source) == (algorithm, "compressed-tensors")
    assert config.quantization.has_zero_point == (not weights.get("symmetric", True))
    assert config.quantization.group_size == weights.get("group_size", 32 if weights["strategy"] == "block" else None)
    assert config.quantization.exclude_modules == ("lm_head",)
    assert "quantization_config" not in config.pretrained_config


OTHERS: list[tuple[str, Callable[[Path], Meant], str]] = [
    ("AWQ", partial(save_awq, group_size=32), "W4A16_AWQ"),
    ("AWQ of whole rows", partial(save_awq, group_size=64), "W4A16_AWQ"),
    ("GPTQ", partial(save_gptq, bits=4, group_size=32, desc_act=False), "W4A16_GPTQ"),
    ("GPTQ, inputs reordered", partial(save_gptq, bits=4, group_size=32, desc_act=True), "W4A16_GPTQ"),
    ("GPTQ of 8 bits", partial(save_gptq, bits=8, group_size=64, desc_act=True), "W8A16_GPTQ"),
    ("GPTQ v2", partial(save_gptq, bits=4, group_size=32, desc_act=False, layout="gptq_v2"), "W4A16_GPTQ"),
    ("FP8 in blocks", partial(save_fp8, block=(32, 32)), "FP8_BLOCK_SCALES"),
    ("FP8", partial(save_fp8, block=None), "FP8"),
    ("FP8 by powers of 2", partial(save_fp8, block=(32, 32), scale_dtype=torch.float8_e8m0fnu), "FP8_BLOCK_SCALES"),
    ("FP8 by exponents", partial(save_fp8, block=(1, 32), scale_dtype=torch.uint8), "FP8_BLOCK_SCALES"),
    ("NVFP4", save_nvfp4, "NVFP4"),
    ("torchao int8", partial(save_torchao, kind="Int8Tensor"), "W8A16"),
    ("torchao float8", partial(save_torchao, kind="Float8Tensor"), "FP8"),
    ("torchao int4", partial(save_torchao, kind="Int4Tensor", bits=4, group_size=32), "W4A16"),
    ("torchao intx", partial(save_torchao, kind="IntxUnpackedToInt8Tensor", bits=4, group_size=32), "W4A16"),
]


@pytest.mark.parametrize(("save", "algorithm"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_other_formats_mean_what_their_libraries_say(
    save: Callable[[Path], Meant], algorithm: str, tmp_path: Path
) -> None:
    meant = save(tmp_path / "model")
    config = run_convert(tmp_path / "model", tmp_path / "out")
    assert_same_numbers(tmp_path / "out", meant)
    assert config.quantization is not None and config.quantization.quant_algo == algorithm


EXPERTS: dict[str, tuple[str, dict[str, Any], Callable[..., Meant]]] = {
    "FP8 in blocks": ("qwen3-moe", {}, partial(save_fp8, block=(32, 32))),
    "FP8": ("mixtral", {"intermediate_size": 64}, partial(save_fp8, block=None)),
    "AWQ": ("mixtral", {"intermediate_size": 64}, partial(save_awq, group_size=32)),
    "GPTQ": ("qwen3-moe", {}, partial(save_gptq, bits=4, group_size=32, desc_act=False)),
    "int4": (
        "deepseek-v3",
        {"kv_lora_rank": 32, "q_lora_rank": 32, "intermediate_size": 64, "head_dim": 32},
        partial(save_compressed, layout="pack-quantized", weights=INT4 | {"symmetric": False}, dtype=torch.float32),
    ),
    "NVFP4": ("qwen3-moe", {}, save_nvfp4),
    "GPTQ, inputs reordered": ("qwen3-moe", {}, partial(save_gptq, bits=4, group_size=32, desc_act=True)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_stay_in_the_bits_of_the_file(kind: str, tmp_path: Path) -> None:
    """A file has each expert's layers, and the model one weight of all experts, put together as by transformers."""
    family, sizes, save = EXPERTS[kind]
    meant = save(tmp_path / "model", model=make_model(family, **(MIXTURE_SIZES | sizes)))
    config = run_convert(tmp_path / "model", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    weights = take_quantized(tensors)
    model = plain_model_of(tmp_path / "model", meant)
    experts = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 3}
    are_kept = kind != "GPTQ, inputs reordered"  # each in an order of its own
    assert experts and {name for name in experts if name in weights} == (set(experts) if are_kept else set())
    for name, parameter in experts.items():
        found = weights[name].dequantize(parameter.dtype).view(parameter.shape) if are_kept else tensors[name]
        assert torch.equal(found, parameter), name
    assert config.quantization is not None and config.quantization.quant_algo != "MIXED_PRECISION"
    if kind != "FP8 in blocks":
        return
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(tmp_path / "model", max_seq_len=96, dtype="float32", activations="float") as llm:
        assert llm.bundle.config.build_config.compiler == "aot"
        prompts = [[1 + i * step % 30 for i in range(40)] for step in (3, 7, 11)]
        outputs = [output.token_ids for output in llm.generate(prompts, params, drafter=NgramDrafter(4, 2))]
    assert outputs == [hf_greedy(model.float(), prompt, 24) for prompt in prompts]


def test_experts_of_texts_and_of_images_stay_in_the_bits_of_the_file(tmp_path: Path) -> None:
    """Ernie 4.5 VL's files have both as one list."""
    assert has_causal_class("ernie4_5_vl_moe_text")
    config = families.small_config("ernie4_5_vl_moe").text_config
    meant = save_fp8(tmp_path / "model", None, AutoModelForCausalLM.from_config(config))
    run_convert(tmp_path / "model", tmp_path / "out")
    weights = take_quantized(load_file(tmp_path / "out" / "rank0.safetensors"))
    experts = {
        name: parameter
        for name, parameter in plain_model_of(tmp_path / "model", meant).named_parameters()
        if parameter.dim() == 3
    }
    assert {name.split(".")[4] for name in experts} == {"text_moe", "vision_moe"}
    for name, parameter in experts.items():
        assert torch.equal(weights[name].dequantize(parameter.dtype).view(parameter.shape), parameter), name


def test_every_rank_has_the_whole_code_book(tmp_path: Path) -> None:
    meant = save_nvfp4(tmp_path / "model")
    run_convert(tmp_path / "model", tmp_path / "out", tp_size=2)
    ranks = [take_quantized(load_file(tmp_path / "out" / f"rank{rank}.safetensors")) for rank in range(2)]
    for part, dimension in (("self_attn.q_proj", 0), ("mlp.down_proj", 1)):
        name = f"model.layers.0.{part}"
        assert torch.equal(torch.cat([rank[name].dequantize() for rank in ranks], dimension), meant[name])


@pytest.mark.parametrize(
    "save",
    [partial(save_bitsandbytes, kind="nf4", is_nested=True), partial(save_bitsandbytes, kind="fp4")],
    ids=["nf4, its scales in 8 bits", "fp4"],
)
def test_bitsandbytes_in_4_bits_is_read_as_numbers(save: Callable[[Path], Meant], tmp_path: Path) -> None:
    meant = save(tmp_path / "model")
    config = run_convert(tmp_path / "model", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    assert set(tensors) == {*small_model().state_dict()} and config.quantization is None
    for name, values in meant.items():
        assert torch.equal(tensors[f"{name}.weight"], values), name
    precision = QuantConfig("int4", 64)
    again = run_convert(tmp_path / "model", tmp_path / "again", precision=precision)
    assert again.quantization is not None and again.quantization.quant_algo == "W4A16"


def test_bitsandbytes_in_8_bits_means_what_its_definition_says(tmp_path: Path) -> None:
    """But for the last bit: the library multiplies by the scale and by the rounded 1 / 127, one after the other."""
    meant = save_bitsandbytes(tmp_path / "model", "int8")
    run_convert(tmp_path / "model", tmp_path / "out")
    weights = take_quantized(load_file(tmp_path / "out" / "rank0.safetensors"))
    assert set(weights) == set(meant) and {weight.kind for weight in weights.values()} == {"int8"}
    for name, weight in weights.items():
        torch.testing.assert_close(weight.dequantize(), meant[name], rtol=2e-7, atol=0)


KINDS = [
    *(Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4),
    *(Q.F16, Q.BF16, Q.F32),
]
# Blocks are read alike, whatever the family.
GGUF_CASES = [("llama", kind) for kind in KINDS] + [
    (family, kind) for family in ("qwen2", "qwen3", "gemma3") for kind in (Q.Q4_K, Q.F16)
]
GGUF_CASES += [(family, Q.F16) for family in GGUF_FAMILIES if family != "gemma3"]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize(("architecture", "kind"), GGUF_CASES, ids=[f"{name} {kind.name}" for name, kind in GGUF_CASES])
def test_gguf_means_what_its_package_says(kind: Q, architecture: str, tmp_path: Path) -> None:
    meant = save_gguf(tmp_path / "model.gguf", kind, architecture=architecture)
    config = run_convert(tmp_path / "model.gguf", tmp_path / "out", "float32")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    weights = take_quantized(tensors)
    found = tensors | {f"{name}.weight": weight.dequantize() for name, weight in weights.items()}
    is_tied = config.pretrained_config["tie_word_embeddings"]
    if is_tied:  # then the output layer is the embeddings, in their few bits
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
        del weights["lm_head"]
    assert set(found) == set(meant)
    for name, values in meant.items():
        assert torch.equal(found[name], values), name
    is_quantized = kind not in (Q.F16, Q.BF16, Q.F32)
    assert len(weights) == (7 * config.pretrained_config["num_hidden_layers"] + 1 if is_quantized else 0)
    assert (config.quantization is not None) == (is_quantized or is_tied)


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_gguf_in_several_files_is_one_model(tmp_path: Path) -> None:
    """Files as the package splits them, given by the first or by the directory."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_gguf(tmp_path / "whole.gguf", Q.Q8_0)
    save_gguf(directory / "tiny.gguf", Q.Q8_0, max_tensors=5)
    paths = sorted(directory.iterdir())
    assert len(paths) == 3 and resolve_model(str(directory)) == resolve_model(str(paths[0])) == paths[0]
    for path in (paths[0], tmp_path / "whole.gguf"):
        run_convert(path, tmp_path / path.stem)
    weights, meant = (load_file(tmp_path / name / "rank0.safetensors") for name in (paths[0].stem, "whole"))
    assert weights.keys() == meant.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in meant.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", GGUF_FAMILIES)
def test_model_of_a_gguf_is_the_one_it_was_made_of(architecture: str, tmp_path: Path) -> None:
    """Past the windows, by the config that its metadata stand for."""
    save_gguf(tmp_path / "model.gguf", Q.F32, architecture=architecture)
    made = gguf_model(architecture)
    config = AutoConfig.for_model(**config_of(tmp_path / "model.gguf"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(made.state_dict())
    tokens = torch.arange(300)[None] * 7 % VOCAB_SIZE
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, made(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize("kind", [Q.Q4_K, Q.F16], ids=lambda kind: kind.name)
def test_output_layer_of_a_tied_gguf_keeps_the_embeddings_bits(kind: Q, tmp_path: Path) -> None:
    """A token reads all of the output layer: in bfloat16 it was two thirds of Gemma 3 270M's bytes."""
    meant = save_gguf(tmp_path / "model.gguf", kind, architecture="gemma3", is_tied=True)
    config = run_convert(tmp_path / "model.gguf", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    head = take_quantized(tensors)["lm_head"]
    embeddings = meant["model.embed_tokens.weight"]
    assert (head.kind, head.group_size) == ("int8", 32)  # Q8_0
    assert torch.equal(head.dequantize(), embeddings)
    assert torch.equal(tensors["model.embed_tokens.weight"], embeddings.to(tensors["model.embed_tokens.weight"].dtype))
    assert config.quantization is not None and "lm_head" not in config.quantization.exclude_modules


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_rotary_factors_of_gguf_are_those_of_llama_3(tmp_path: Path, said: Said) -> None:
    """Computed as transformers does, which llama.cpp writes as what frequencies are divided by."""
    factor, theta = 8.0, 10000.0
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters=rope)
    plain = 1 / theta ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()
    assert 1 == factors.min() < factors.max() == pytest.approx(factor)
    path = tmp_path / "model.gguf"
    save_gguf(path, Q.F32, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert config_of(path)["rope_parameters"] == rope | {"factor": pytest.approx(factor)}
    run_convert(path, tmp_path / "out")
    other = tmp_path / "other.gguf"
    save_gguf(other, Q.F32, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors**2))
    with pytest.raises(SpecDecError) as raised:
        run_convert(other, tmp_path / "again")
    said(raised)


def test_gguf_brings_its_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Byte-level BPE, as Llama 3's and Qwen's: texts become the same tokens as by the tokenizer that was written."""
    write = partial(write_tokenizer, tokenizer=tokenizer, template="{{ messages[0].content }}")
    save_gguf(tmp_path / "model.gguf", Q.Q8_0, vocab_size=len(tokenizer), edit=write)
    config = run_convert(tmp_path / "model.gguf", tmp_path / "out")
    found = load_tokenizer(tmp_path / "out", config.pretrained_config)
    for text in ("Once upon a time there was a red ball", " The dog, 12 häuser 🙂\n", "</s> a"):
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert [found.eos_token_id] == [tokenizer.eos_token_id] == config.pretrained_config["eos_token_id"]
    assert "messages[0]" in (tmp_path / "out" / "chat_template.jinja").read_text()


def test_quantization_is_not_repeated(tmp_path: Path, said: Said) -> None:
    save_awq(tmp_path / "model", 32)
    with pytest.raises(SpecDecError) as raised:
        run_convert(tmp_path / "model", tmp_path / "out", precision=QuantConfig("int4", 32))
    said(raised)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize(("kind", "up_kind"), [(Q.Q4_K, None), (Q.Q4_K, Q.Q8_0), (Q.MXFP4, None), (Q.F16, None)])
def test_experts_of_a_gguf_stay_in_few_bits(kind: Q, up_kind: Q | None, tmp_path: Path) -> None:
    """Gates and the others lie in tensors of their own; the model has them as one, expert by expert. Of two types they
    are numbers."""
    meant = save_gguf(tmp_path / "model.gguf", kind, architecture="qwen3moe", up_kind=up_kind)
    config = run_convert(tmp_path / "model.gguf", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    weights = take_quantized(tensors)
    experts = {name: values for name, values in meant.items() if ".experts." in name}
    assert len(experts) == 2
    kept = {name for name in experts if kind != Q.F16 and not (up_kind and "gate_up" in name)}
    for name, values in experts.items():
        if name in kept:
            assert torch.equal(weights[name].dequantize().view(values.shape), values), name
        else:  # beside embeddings in 8 bits
            assert torch.equal(tensors[name], values.bfloat16())
    assert experts.keys() & weights.keys() == kept
    assert (config.quantization is not None) == (kind != Q.F16)
    if kind != Q.Q4_K or up_kind:
        return
    model = gguf_model("qwen3moe")
    model.load_state_dict(meant, strict=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(tmp_path / "model.gguf", max_seq_len=96, dtype="float32", activations="float") as llm:
        prompts = [[1 + i * step % 30 for i in range(40)] for step in (3, 7, 11)]
        outputs = [output.token_ids for output in llm.generate(prompts, params, drafter=NgramDrafter(4, 2))]
    assert outputs == [hf_greedy(model, prompt, 24) for prompt in prompts]
    assert len({tuple(output) for output in outputs}) > 1
