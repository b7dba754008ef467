"""Engines of rounded checkpoints: logits are those of the same weights in a plain model, and drafts change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import Q, save_awq, save_compressed, save_gguf, save_gptq, small_model
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, eager_logits, hf_greedy, make_build, repetitive_prompt
from torch import nn
from transformers import PreTrainedModel

from runtime.checkpoint import convert
from runtime.compiler.build import build_engine
from runtime.compiler.kernels import load_kernels
from runtime.compiler.quality import measure_quality, quality_text
from runtime.config import CheckpointConfig, EngineConfig, Precision
from runtime.drafters.ngram import NgramLookup
from runtime.engine import Engine
from runtime.errors import SpecDecError
from runtime.orchestrator import generate
from runtime.quantization.weight import QuantizedWeight, from_integers, take_quantized
from runtime.request import Draft, Request, Sequence

CPU = torch.device("cpu")


def make_checkpoint(source: str, work_dir: Path) -> CheckpointConfig:
    model, precision = work_dir / "model", Precision()
    if source in ("int8", "int4", "fp8"):
        small_model().save_pretrained(model)
        precision = Precision(source, 32, quantize_lm_head=source == "int8")  # type: ignore[arg-type]
    elif source == "AWQ":
        save_awq(model, 32)
    elif source == "GPTQ":
        save_gptq(model, 4, 32, desc_act=True)
    elif source == "GGUF":
        model = model.with_suffix(".gguf")
        save_gguf(model, Q.Q4_1)
    else:
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
        save_compressed(model, "int-quantized", weights, torch.float32)
    return convert(
        model, work_dir / "checkpoint", "float32", replace=False, progress=lambda *_: None, precision=precision
    )


def plain_model(checkpoint: CheckpointConfig, checkpoint_dir: Path) -> PreTrainedModel:
    """transformers' model with the numbers that the rounded weights mean, in float32."""
    sizes = {
        key: checkpoint.pretrained_config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    }
    model = small_model(**sizes, head_dim=checkpoint.pretrained_config["head_dim"])
    tensors = load_file(checkpoint_dir / "rank0.safetensors")
    weights = take_quantized(tensors)
    tensors |= {f"{name}.weight": weight.dequantize() for name, weight in weights.items()}
    model.load_state_dict(tensors)
    return model


def build(work_dir: Path, **settings: Any) -> EngineConfig:
    return build_engine(
        work_dir / "checkpoint",
        work_dir / "engine",
        make_build(**settings),
        CPU,
        replace=False,
        phase=lambda name: None,
        measure_costs=False,
    )


def outputs(engine: Engine, prompts: list[list[int]], *, ngram: bool) -> list[list[int]]:
    requests = [Request(i, tuple(prompt), 30) for i, prompt in enumerate(prompts)]
    drafter = NgramLookup(2) if ngram else None
    finished = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, 10) if s.finish_reason}
    return [finished[i] for i in range(len(prompts))]


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize("source", ["int8", "int4", "fp8", "AWQ", "GPTQ", "GGUF", "compressed-tensors"])
def test_engine_computes_what_the_rounded_weights_mean(source: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(source, tmp_path)
    config = build(tmp_path)
    assert config.quantization == checkpoint.quantization is not None
    model = plain_model(checkpoint, tmp_path / "checkpoint")
    check_engine(tmp_path / "engine", model)


def check_engine(engine_dir: Path, model: PreTrainedModel) -> None:
    prompts = [repetitive_prompt(seed, length, VOCAB_SIZE) for seed, length in ((0, 21), (1, 34))]
    with Engine.open(engine_dir) as engine:
        sequence = Sequence.start(Request(0, tuple(prompts[0]), 60))
        assert engine.admit(sequence)
        (logits,) = engine.forward([sequence], [Draft([5, 6, 7])])
        engine.release(sequence)
        expected = eager_logits(model, [*prompts[0], 5, 6, 7])[len(prompts[0]) - 1 :]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        plain = outputs(engine, prompts, ngram=False)
        assert plain == [hf_greedy(model, prompt, 30) for prompt in prompts]
        assert outputs(engine, prompts, ngram=True) == plain


def test_compiled_engine_holds_few_bits_and_is_batch_invariant(tmp_path: Path, kernels: Path) -> None:
    checkpoint = make_checkpoint("int4", tmp_path)
    config = build(tmp_path, compiler="aot")
    assert config.compiler_note is None and config.batch_invariant
    check_engine(tmp_path / "engine", plain_model(checkpoint, tmp_path / "checkpoint"))
    stored = load_file(tmp_path / "engine" / "rank0.safetensors")
    linears = [module for module in small_model().modules() if isinstance(module, nn.Linear)]
    num_floats = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.float32)
    assert num_floats < sum(linear.weight.numel() for linear in linears) / 4  # the rest is embeddings and norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", ["", "zeros", "offsets", "fp8", "bias"])
@pytest.mark.parametrize("bits", [4, 8])
def test_kernel_computes_the_product(bits: int, extra: str, dtype: torch.dtype, kernels: Path) -> None:
    """Each row by itself the same bits as among others; as near float64's product as its own rounding lets it."""
    load_kernels(kernels)
    generator = torch.Generator().manual_seed(bits)
    outputs, inputs, group_size = 70, 672, 32
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = torch.randint(low, high, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, inputs // group_size, generator=generator).half() * 0.01
    weight = from_integers(integers, scales, bits=bits)
    parts = {
        "zeros": torch.randint(low, high, scales.shape, generator=generator, dtype=torch.int16),
        "offsets": torch.randn(scales.shape, generator=generator),
    }
    if extra in parts:
        weight = QuantizedWeight(weight.values, weight.scales, **{extra: parts[extra]})
    if extra == "fp8":
        weight = QuantizedWeight(torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn), scales)
    bias = torch.randn(outputs, generator=generator).to(dtype) if extra == "bias" else None
    x = torch.randn(37, inputs, generator=generator).to(dtype)

    def product(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.specdec.quantized_linear(
            rows, weight.values, weight.scales, weight.zeros, weight.offsets, bias
        )
        return found

    found = product(x)
    expected = x.double() @ weight.dequantize(torch.float64).T + (0 if bias is None else bias.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance
    assert torch.equal(torch.cat([product(x[i : i + 1]) for i in range(len(x))]), found)
    assert torch.equal(product(x[:5]), found[:5])


def test_what_engines_cannot_do_yet_is_one_error(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "model")
    precision = Precision("int8", None, activations="int8")
    convert(
        tmp_path / "model", tmp_path / "checkpoint", None, replace=False, progress=lambda *_: None, precision=precision
    )
    with pytest.raises(SpecDecError, match="multiply integers of 8 bits cannot be built yet"):
        build(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


# How good it is


@pytest.fixture(scope="module")
def rounded_dirs(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model with a tokenizer; those of float32 are exact."""
    directory = tmp_path_factory.mktemp("rounded")
    for name, precision in (("int8", Precision("int8", 16)), ("int4", Precision("int4", 16))):
        convert(llama_dir, directory / name, None, replace=False, progress=lambda *_: None, precision=precision)
    return {name: directory / name for name in ("int8", "int4")}


TEXT = "The little dog had a red ball. One day the dog lost the ball. " * 20


def test_quality_is_what_the_probabilities_say(rounded_dirs: dict[str, Path], llama: PreTrainedModel) -> None:
    from transformers import AutoTokenizer

    found = {name: measure_quality(directory, TEXT, "text") for name, directory in rounded_dirs.items()}
    assert 0 < found["int8"].mean_kl < found["int4"].mean_kl
    assert found["int8"].top1_agreement > found["int4"].top1_agreement
    directory = rounded_dirs["int4"]
    tokens = AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False)["input_ids"][:2000]
    assert found["int4"].num_tokens == len(tokens)
    tensors = load_file(directory / "rank0.safetensors")
    weights = take_quantized(tensors)
    rounded = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    rounded |= {f"{name}.weight": weight.dequantize() for name, weight in weights.items()}
    window = 256  # the model's positions
    kl, same = 0.0, 0
    unrounded = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        p = eager_logits(llama, part).softmax(-1)
        llama.load_state_dict(rounded)
        q = eager_logits(llama, part).softmax(-1)
        llama.load_state_dict(unrounded)
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert found["int4"].mean_kl == pytest.approx(kl / len(tokens), rel=1e-2)
    assert found["int4"].top1_agreement == pytest.approx(same / len(tokens), abs=0.01)


def test_text_to_compare_on_needs_an_unrounded_model(llama_checkpoint_dir: Path, tmp_path: Path) -> None:
    from runtime.checkpoint_dir import open_checkpoint

    (tmp_path / "text").write_text(TEXT)
    checkpoint = open_checkpoint(llama_checkpoint_dir)
    assert quality_text(checkpoint, None) is None
    with pytest.raises(SpecDecError, match="does not know the model that it was rounded from"):
        quality_text(checkpoint, tmp_path / "text")
    make_checkpoint("int4", tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(SpecDecError, match="file is missing"):
        measure_quality(tmp_path / "checkpoint", TEXT, "text")
