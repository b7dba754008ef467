"""Engines of quantized checkpoints: logits are those of the same weights in a plain model; drafts change nothing."""

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from quantized import (
    Q,
    save_awq,
    save_compressed,
    save_gguf,
    save_gptq,
    save_nvfp4,
    small_model,
    stored_blocks,
)
from safetensors.torch import load_file
from sentences import Said
from tiny import VOCAB_SIZE, eager_logits, forward, hf_greedy, make_build, make_model, repetitive_prompt
from torch import nn
from transformers import PreTrainedModel

import runtime.model.quantized
from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.builder.quality import measure_quality
from runtime.checkpoint.config import Activations, CheckpointConfig, EngineConfig, QuantConfig, SelfDraft
from runtime.checkpoint.gguf.blocks import read_blocks
from runtime.checkpoint.gguf.reader import TYPES
from runtime.checkpoint.quant.weight import QuantizedWeight, from_integers, take_quantized
from runtime.core.request import Request, Sequence
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.kernels.ops import load_kernels
from runtime.loop.orchestrator import generate
from runtime.model.model import ModelKind, load_model
from runtime.model.pretrained import parse_pretrained_config
from runtime.model.quantized import QuantizedLinear
from runtime.util.errors import SpecDecError

CPU = torch.device("cpu")


def make_checkpoint(
    source: str, work_dir: Path, activations: Activations = "float", tp_size: int = 1
) -> CheckpointConfig:
    model, precision = work_dir / "model", QuantConfig(activations=activations)
    if source in ("int8", "int4", "fp8"):
        small_model().save_pretrained(model)
        precision = QuantConfig(source, 32, quantize_lm_head=source == "int8", activations=activations)  # type: ignore[arg-type]
    elif source == "AWQ":
        save_awq(model, 32)
    elif source == "NVFP4":
        save_nvfp4(model)
    elif source == "GPTQ":
        save_gptq(model, 4, 32, desc_act=True)
    elif source in Q.__members__:
        model = model.with_suffix(".gguf")
        save_gguf(model, Q[source])
    else:
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
        save_compressed(model, "int-quantized", weights, torch.float32)
    return convert(
        *(model, work_dir / "checkpoint", "float32"),
        replace=False,
        progress=lambda *_: None,
        precision=precision,
        tp_size=tp_size,
    )


def plain_model(checkpoint: CheckpointConfig, checkpoint_dir: Path) -> PreTrainedModel:
    """transformers' model with the numbers that the quantized weights mean, in float32."""
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
        effort=BuildEffort(measure_costs=False),
    )


def outputs(engine: Engine, prompts: list[list[int]], *, ngram: bool) -> list[list[int]]:
    requests = [Request(i, tuple(prompt), 30) for i, prompt in enumerate(prompts)]
    drafter = NgramLookup(2) if ngram else None
    finished = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, 10) if s.finish_reason}
    return [finished[i] for i in range(len(prompts))]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize(
    ("source", "activations"),
    [
        *((source, "float") for source in ("int8", "int4", "fp8", "AWQ", "GPTQ", "Q2_K", "compressed-tensors")),
        ("int8", "int16"),
        ("GPTQ", "int16"),
    ],
)
def test_engine_computes_what_the_quantized_weights_mean(source: str, activations: Activations, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(source, tmp_path, activations)
    config = build(tmp_path)
    assert config.quantization == checkpoint.quantization is not None
    model = plain_model(checkpoint, tmp_path / "checkpoint")
    check_engine(tmp_path / "engine", model)


@pytest.mark.parametrize("activations", ["float", "int8", "int16"])
@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4], ids=lambda kind: kind.name)
def test_layers_of_a_gguf_are_multiplied_in_few_bits(kind: Q, activations: Activations, kernels: Path) -> None:
    """Beside the numbers that the package makes of the blocks; codes bit by bit as 8-bit integers of one meaning."""
    load_kernels(kernels)
    rng = np.random.default_rng(0)
    blocks = stored_blocks(rng.standard_normal((72, 512), np.float32), kind, rng)
    weight = read_blocks(TYPES[kind.value], {"blocks": torch.from_numpy(blocks)})
    x = torch.from_numpy(rng.standard_normal((11, 512), np.float32))
    found = QuantizedLinear(weight, None, activations, with_kernels=True)(x)
    exact = x.double() @ torch.from_numpy(gguf.dequantize(blocks, kind)).double().T
    assert (found - exact).norm() < (0.02 if activations == "int8" else 1e-4) * exact.norm()
    if weight.book is not None:
        integers = from_integers(weight.integers(), weight.scales, bits=8)
        assert torch.equal(found, QuantizedLinear(integers, None, activations, with_kernels=True)(x))


def check_engine(engine_dir: Path, model: PreTrainedModel) -> None:
    prompts = [repetitive_prompt(seed, length, VOCAB_SIZE) for seed, length in ((0, 21), (1, 34))]
    with Engine.open(engine_dir) as engine:
        sequence = Sequence.start(Request(0, tuple(prompts[0]), 60))
        assert engine.admit(sequence)
        (logits,) = forward(engine, [sequence], [[5, 6, 7]])
        engine.release(sequence)
        expected = eager_logits(model, [*prompts[0], 5, 6, 7])[len(prompts[0]) - 1 :]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        plain = outputs(engine, prompts, ngram=False)
        assert plain == [hf_greedy(model, prompt, 30) for prompt in prompts]
        assert outputs(engine, prompts, ngram=True) == plain


@pytest.mark.parametrize(("qformat", "compiler"), [("int8", "none"), ("int4", "aot")])
def test_weights_stored_the_other_way_round_are_quantized_too(qformat: Any, compiler: str, tmp_path: Path) -> None:
    """GPT-2's, (inputs, outputs): by rows of outputs, as all others. It is published without its head."""
    model = make_model("gpt2")
    model.base_model.save_pretrained(tmp_path / "model")
    directories = (tmp_path / "model", tmp_path / "checkpoint")
    precision = QuantConfig(qformat, 16, activations="float")
    convert(*directories, "float32", replace=False, progress=lambda *_: None, precision=precision)
    weights = take_quantized(load_file(tmp_path / "checkpoint" / "rank0.safetensors"))
    assert len(weights) == 4 * len(model.transformer.h)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        torch.testing.assert_close(weight.dequantize().t(), layer.weight, rtol=0.1, atol=0.15)
        layer.weight.data = weight.dequantize().t().contiguous()
    assert build(tmp_path, compiler=compiler).build_config.compiler == compiler
    check_engine(tmp_path / "engine", model)


def quantized_by_definition(x: torch.Tensor, columns: int, bits: int = 8) -> torch.Tensor:
    """Token by token and group by group, as docs/precision.md says."""
    quantized = x.float().numpy().copy()
    for row in quantized.reshape(-1, columns):
        step = np.abs(row).max() / np.float32({8: 127, 16: 32639}[bits])
        row[:] = np.rint(row / step) * step if step > 0 else 0
    return torch.from_numpy(quantized)


def check_quantization_engine(work_dir: Path, checkpoint: CheckpointConfig, checkpoint_dir: Path | None = None) -> None:
    """Logits beside those of a plain model whose layers' inputs are quantized by the definition."""
    checkpoint_dir = checkpoint_dir or work_dir / "checkpoint"
    weights = take_quantized(load_file(checkpoint_dir / "rank0.safetensors"))
    model = plain_model(checkpoint, checkpoint_dir)

    def quantize_input(layer: nn.Module, inputs: tuple[torch.Tensor], *, weight: QuantizedWeight) -> torch.Tensor:
        order = torch.arange(weight.shape[1]) if weight.order is None else weight.order.long()
        return quantized_by_definition(inputs[0][..., order], weight.group_size)[..., order.argsort()]

    for name, weight in weights.items():
        model.get_submodule(name).register_forward_pre_hook(partial(quantize_input, weight=weight))
    prompt = repetitive_prompt(0, 21, VOCAB_SIZE)
    with Engine.open(work_dir / "engine") as engine:
        sequence = Sequence.start(Request(0, tuple(prompt), 60))
        assert engine.admit(sequence)
        (logits,) = forward(engine, [sequence], [[5, 6, 7]])
        engine.release(sequence)
    with torch.no_grad():
        expected = eager_logits(model, [*prompt, 5, 6, 7])[len(prompt) - 1 :]
    assert float((logits - expected).norm() / expected.norm()) < 0.02


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
@pytest.mark.parametrize("source", ["int8", "AWQ", "GPTQ"])
def test_engine_quantizes_what_layers_read(source: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(source, tmp_path, "int8")
    config = build(tmp_path)
    assert config.quantization == checkpoint.quantization
    check_quantization_engine(tmp_path, checkpoint)


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_each_layer_reads_as_many_bits_as_its_own_weight_asks_for(tmp_path: Path) -> None:
    """Layers in 4 bits read 8, whatever the output layer has: with 16 a step of 11 tokens took a third longer."""
    save_gguf(tmp_path / "model.gguf", Q.Q4_1, is_tied=True)
    checkpoint = convert(tmp_path / "model.gguf", tmp_path / "out", "float32", replace=False, progress=lambda *_: None)
    weights = take_quantized(load_file(tmp_path / "out" / "rank0.safetensors"))
    assert [name for name, weight in weights.items() if weight.kind == "int8"] == ["lm_head"]
    config = parse_pretrained_config(checkpoint.pretrained_config, "")
    kind = ModelKind(config, torch.float32, "sdpa", checkpoint.quantization)
    model = load_model(kind, tmp_path / "out" / "rank0.safetensors")
    for name, weight in weights.items():
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        tokens = quantized_by_definition(x, weight.group_size, 16 if name == "lm_head" else 8)
        torch.testing.assert_close(model.get_submodule(name)(x), tokens @ weight.dequantize().T, rtol=1e-5, atol=1e-5)
    assert checkpoint.quantization is not None and checkpoint.quantization.activations == "mixed"


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_a_copy_needs_a_layer_of_more_bits_than_its_own(tmp_path: Path, said: Said) -> None:
    """A file with 8 bits in the output layer alone: the copy takes the layer as it is."""
    save_gguf(tmp_path / "model.gguf", Q.Q4_1, is_tied=True)
    convert(tmp_path / "model.gguf", tmp_path / "checkpoint", "float32", replace=False, progress=lambda *_: None)
    with pytest.raises(SpecDecError) as refused:
        build(tmp_path, self_draft=SelfDraft("int4"))
    said(refused, "int4")
    assert not (tmp_path / "engine").exists()


def test_compiled_engine_holds_few_bits_and_is_batch_invariant(tmp_path: Path, kernels: Path) -> None:
    checkpoint = make_checkpoint("int4", tmp_path, "int8")
    config = build(tmp_path, compiler="aot")
    assert config.compiler_note is None and config.batch_invariant
    check_quantization_engine(tmp_path, checkpoint)
    prompts = [repetitive_prompt(seed, length, VOCAB_SIZE) for seed, length in ((0, 21), (1, 34))]
    with Engine.open(tmp_path / "engine") as engine:
        assert outputs(engine, prompts, ngram=True) == outputs(engine, prompts, ngram=False)
    stored = load_file(tmp_path / "engine" / "rank0.safetensors")
    linears = [module for module in small_model().modules() if isinstance(module, nn.Linear)]
    num_floats = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.float32)
    assert num_floats < sum(linear.weight.numel() for linear in linears) / 4  # the rest is embeddings and norms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_a_tied_engine_has_its_embeddings_once(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made from the output layer's integers. Gemma 3 270M had 335 MB more in bfloat16."""
    save_gguf(tmp_path / "model.gguf", Q.Q4_1, architecture="gemma3", is_tied=True)
    convert(tmp_path / "model.gguf", tmp_path / "checkpoint", "bfloat16", replace=False, progress=lambda *_: None)
    stored, found = list[int](), list[torch.Tensor]()
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(runtime.model.quantized, "tied_output", lambda model: None)
        build(tmp_path, compiler="aot")
        tensors = load_file(tmp_path / "engine" / "rank0.safetensors")
        stored.append(
            sum(1 for one in tensors.values() if one.dtype == torch.bfloat16 and one.shape[:1] == (VOCAB_SIZE,))
        )
        with Engine.open(tmp_path / "engine") as engine:
            sequence = Sequence.start(Request(0, tuple(repetitive_prompt(0, 21, VOCAB_SIZE)), 60))
            assert engine.admit(sequence)
            found.append(forward(engine, [sequence], [[5, 6, 7]])[0])
            engine.release(sequence)
        shutil.rmtree(tmp_path / "engine")
    assert stored == [0, 1] and torch.equal(*found)


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "group_size"),
    [
        ("int8", 70, 672, 32),
        ("int8", 40, 288, 96),
        ("int8", 33, 1000, 1000),
        ("int4", 70, 768, 128),
        ("int4", 5, 60, 6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_packed_weight_are_its_numbers(
    kind: str, outputs: int, inputs: int, group_size: int, dtype: torch.dtype, kernels: Path
) -> None:
    load_kernels(kernels)
    weight = random_weight(kind, "", outputs, inputs, group_size)
    weight = replace(weight, scales=weight.scales * torch.tensor([1, -1]).repeat(outputs)[:outputs, None].half())
    packed = torch.ops.specdec.pack_quantized(weight.values, weight.scales, None, None)
    ids = torch.tensor([[outputs - 1, 0, 3], [3, outputs // 2, 4]])
    rows = torch.ops.specdec.quantized_rows(ids, packed, outputs, inputs, dtype)
    assert torch.equal(rows, weight.dequantize(dtype)[ids])
    with pytest.raises(RuntimeError, match=f"no row {outputs} of {outputs}"):
        torch.ops.specdec.quantized_rows(ids + 1, packed, outputs, inputs, dtype)


# The kernels

KINDS = {"int8": 8, "int4": 4}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def random_weight(kind: str, extra: str, outputs: int, inputs: int, group_size: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    scales = torch.rand(outputs, inputs // group_size, generator=generator) * 0.01
    if kind == "fp8":
        numbers = torch.randn(outputs, inputs, generator=generator) / 8  # some of them less than normal
        low, high, weight = -8, 8, QuantizedWeight(numbers.to(torch.float8_e4m3fn), scales)
    else:
        bits = KINDS[kind]
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        integers = torch.randint(low, high, (outputs, inputs), generator=generator, dtype=torch.int8)
        weight = from_integers(integers, scales if extra == "zeros" else scales.half(), bits=bits)
    parts = {
        "zeros": torch.randint(low, high, scales.shape, generator=generator, dtype=torch.int16),
        "offsets": torch.randn(scales.shape, generator=generator),
    }
    return replace(weight, **{extra: parts[extra]}) if extra in parts else weight


def product(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, arithmetic: int, *, bits: int
) -> torch.Tensor:
    packed = torch.ops.specdec.pack_quantized(weight.values, weight.scales, weight.zeros, weight.offsets)
    outputs: torch.Tensor = torch.ops.specdec.quantized_linear(x, packed, bias, weight.shape[0], arithmetic, bits)
    return outputs


WEIGHTS = [
    *((kind, extra, 70, 672, 32) for kind in KINDS for extra in ("", "zeros", "offsets")),
    *((kind, "", 70, 768, size) for kind in KINDS for size in (64, 128, 768)),
    *((kind, "zeros", 32, 1000, 1000) for kind in KINDS),  # in groups of 125 columns
    ("int4", "", 5, 60, 6), ("int4", "offsets", 33, 192, 48), ("int8", "", 40, 288, 96),
    ("fp8", "", 70, 768, 768), ("fp8", "", 70, 672, 32), ("fp8", "", 40, 288, 96), ("fp8", "zeros", 33, 256, 128),
    ("fp8", "", 33, 375, 375), ("fp8", "", 5, 60, 6), ("fp8", "", 7, 35, 7), ("fp8", "", 5, 64, 1),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("kind", "extra", "outputs", "inputs", "group_size", "bits"),
    [(*weight, bits) for weight in WEIGHTS for bits in (0, 8, 16) if bits == 0 or weight[0] != "fp8"],
)
def test_kernel_computes_the_product(
    kind: str, extra: str, outputs: int, inputs: int, group_size: int, bits: int, dtype: torch.dtype, kernels: Path
) -> None:
    """Error at most its own dtype's beside float64's product; each token the same bits, whatever others there are."""
    load_kernels(kernels)
    weight = random_weight(kind, extra, outputs, inputs, group_size)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(outputs, generator=generator).to(dtype) if extra != "zeros" else None
    x = torch.randn(150, inputs, generator=generator).to(dtype)
    x[3, :group_size] = 0
    columns = max(size for size in range(1, 129) if group_size % size == 0)
    tokens = quantized_by_definition(x, columns, bits) if bits else x
    expected = tokens.double() @ weight.dequantize(torch.float64).T + (0 if bias is None else bias.double())
    for arithmetic in torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]:
        found = product(x, weight, bias, arithmetic, bits=bits)
        assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
        for i, num_rows in enumerate((1, 2, 5, 11, 12, 16, 17, 33, 40)):
            torch.set_num_threads(1 + i % 3)
            rows = product(x[i : i + num_rows], weight, bias, arithmetic, bits=bits)
            torch.set_num_threads(1)
            assert torch.equal(rows, found[i : i + num_rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inputs", [128, 125])
def test_every_number_of_e4m3_is_multiplied_as_it_is(inputs: int, dtype: torch.dtype, kernels: Path) -> None:
    """Tokens of a single 1 have a column of the weight for their result, exactly; zeros of either sign are the same."""
    load_kernels(kernels)
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    numbers = codes[(torch.arange(254)[:, None] + torch.arange(inputs)) % 254].view(torch.float8_e4m3fn)
    weight = QuantizedWeight(numbers, torch.full((254, 1), -0.5))
    expected = (numbers.to(dtype) * -0.5).T
    for arithmetic in torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]:
        for num_rows in (inputs, 1):
            rows = torch.eye(inputs, dtype=dtype).split(num_rows)
            found = torch.cat([product(row, weight, None, arithmetic, bits=0) for row in rows])
            assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("weight_sign", [-1, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_sums_fit_their_integers(kind: str, weight_sign: int, bits: int, kernels: Path) -> None:
    """Sums of numbers of either sign, and of a second digit that is the least, -128: 128 is 256 - 128 in steps of 1."""
    load_kernels(kernels)
    number = -(2 ** (KINDS[kind] - 1)) if weight_sign < 0 else 2 ** (KINDS[kind] - 1) - 1
    weight = from_integers(torch.full((40, 256), number, dtype=torch.int8), torch.ones(40, 2), bits=KINDS[kind])
    x = torch.full((20, 256), 32639.0)
    x[::3] = -32639.0
    x[1::3, 1:128], x[1::3, 129:] = 128.0, 128.0
    for rows in (x, x[:1], x[1:2]):
        expected = quantized_by_definition(rows, 128, bits).double() @ weight.dequantize(torch.float64).T
        found = product(rows, weight, None, 0, bits=bits)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("poison", "num_rows"), [(torch.nan, 3), (torch.inf, 40)])
@pytest.mark.parametrize(("kind", "bits"), [(kind, bits) for kind in KINDS for bits in (0, 8, 16)] + [("fp8", 0)])
def test_what_is_no_number_stays_with_its_token(
    kind: str, bits: int, num_rows: int, poison: float, kernels: Path
) -> None:
    load_kernels(kernels)
    weight = random_weight(kind, "", 70, 128, 64)
    for arithmetic in torch.ops.specdec.arithmetics():
        x = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
        clean = product(x, weight, None, arithmetic, bits=bits)
        x[1, 77] = poison
        found = product(x, weight, None, arithmetic, bits=bits)
        assert not found[1].isfinite().any()
        others = [i for i in range(num_rows) if i != 1]
        assert torch.equal(found[others], clean[others])


# How good it is


@pytest.fixture(scope="module")
def quantized_dirs(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model with a tokenizer; those of float32 are exact."""
    directory = tmp_path_factory.mktemp("quantized")
    for name, precision in (("int8", QuantConfig("int8", 16)), ("int4", QuantConfig("int4", 16))):
        convert(llama_dir, directory / name, None, replace=False, progress=lambda *_: None, precision=precision)
    return {name: directory / name for name in ("int8", "int4")}


TEXT = "The little dog had a red ball. One day the dog lost the ball. " * 20


def test_quality_is_what_the_probabilities_say(quantized_dirs: dict[str, Path], llama: PreTrainedModel) -> None:
    from transformers import AutoTokenizer

    found = {name: measure_quality(directory, TEXT, "text") for name, directory in quantized_dirs.items()}
    assert 0 < found["int8"].mean_kl < found["int4"].mean_kl
    assert found["int8"].top1_agreement > found["int4"].top1_agreement
    directory = quantized_dirs["int4"]
    tokens = AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False)["input_ids"][:2000]
    assert found["int4"].num_tokens == len(tokens)
    weights, quantized = take_quantized(load_file(directory / "rank0.safetensors")), copy.deepcopy(llama)
    quantized.load_state_dict({f"{name}.weight": one.dequantize() for name, one in weights.items()}, strict=False)
    window = 256  # the model's positions
    kl, same = 0.0, 0
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        p, q = (eager_logits(model, part).softmax(-1) for model in (llama, quantized))
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert found["int4"].mean_kl == pytest.approx(kl / len(tokens), rel=1e-2)
    assert found["int4"].top1_agreement == pytest.approx(same / len(tokens), abs=0.01)
