"""Quantization: values and scales mean what the format says, errors are as small as the nearest allows."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import layers_of, small_model
from safetensors.torch import load_file
from sentences import Said
from tiny import run_convert
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.checkpoint.config import QuantConfig, QuantFormat
from runtime.checkpoint.quant.planning import _are_finite
from runtime.checkpoint.quant.quantize import _quantize_rows, group_size_for, quantize_weight
from runtime.checkpoint.quant.weight import QuantizedWeight, from_integers, take_quantized
from runtime.kernels.ops import load_kernels
from runtime.util.errors import SpecDecError


def meant_number_by_number(weight: QuantizedWeight) -> Tensor:
    """The docstring's formula, one number after the other."""
    (outputs, inputs), meant = weight.shape, torch.zeros(weight.shape)
    for n, j in itertools.product(range(outputs), range(inputs)):
        if weight.kind == "int4":
            byte = int(weight.values[n, j // 2])
            value = (byte >> 4 if j % 2 else byte & 15) - 8
        else:
            value = float(weight.values[n, j])
        group = j // (inputs // weight.scales.shape[1])
        scale = float(weight.scales[n, group])
        if weight.offsets is not None:
            number = scale * (value + (8 if weight.kind == "int4" else 128)) + float(weight.offsets[n, group])
        else:
            number = scale * (value - (0 if weight.zeros is None else int(weight.zeros[n, group])))
        meant[n, j if weight.order is None else int(weight.order[j])] = number
    return meant


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extra", ["", "zeros", "offsets", "order"])
def test_weight_means_the_formula(bits: int, extra: str) -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = torch.randint(low, high, (6, 16), generator=generator, dtype=torch.int8)
    weight = from_integers(integers, torch.randn(6, 4, generator=generator).half(), bits=bits)
    parts = {
        "zeros": torch.randint(low, high, (6, 4), generator=generator, dtype=torch.int16),
        "offsets": torch.randn(6, 4, generator=generator),
        "order": torch.randperm(16, generator=generator).int(),
    }
    weight = QuantizedWeight(weight.values, weight.scales, **({extra: parts[extra]} if extra else {}))
    weight.check("layer")
    torch.testing.assert_close(weight.dequantize(), meant_number_by_number(weight))
    again = take_quantized({f"layer.{name}": tensor for name, tensor in weight.tensors().items()})["layer"]
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("qformat", "group_size"), [("int8", 64), ("int8", 32), ("int4", 32), ("int4", 64), ("fp8", 64)]
)
def test_scales_are_as_near_as_the_simplest_and_as_clipped_ones(qformat: QuantFormat, group_size: int) -> None:
    """`test_file_promises.py` has the integers, which are the nearest for these scales."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 64, generator=generator)
    weight[3, :32] = 0  # a group of nothing
    weight[5] *= 1e-5
    weight[7, 9] = 40.0  # an outlier
    quantized = quantize_weight(weight, QuantConfig(qformat, group_size), group_size)
    meant = quantized.dequantize()
    assert torch.equal(meant[3, :32], torch.zeros(32))
    plain = weight.view(24, -1, group_size)
    top = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[qformat]
    scales = (plain.abs().amax(-1, keepdim=True) / top).clamp(min=1e-30)
    integers = (plain / scales).to(torch.float8_e4m3fn).float() if qformat == "fp8" else (plain / scales).round()
    simple = (integers * scales).view(24, 64)
    assert float((meant - weight).square().sum()) <= float((simple - weight).square().sum()) * 1.001
    if qformat == "int8":  # clipped no group would be nearer
        ours = (meant - weight).view(24, -1, group_size).square().sum(-1)
        for clip in (1.0, 0.95, 0.9, 0.85, 0.8):
            clipped = (scales * clip).half().float().clamp(min=1e-30)
            error = ((plain / clipped).round().clamp(-127, 127) * clipped - plain).square().sum(-1)
            assert bool((ours <= error * 1.001 + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("qformat", "inputs", "group_size"), [("int8", 192, 64), ("int8", 400, 400), ("int4", 192, 64), ("int4", 108, 27)]
)
def test_the_kernel_quantizes_as_torch_does(
    qformat: QuantFormat, inputs: int, group_size: int, dtype: torch.dtype, kernels: Path
) -> None:
    """Bit for bit: a checkpoint does not depend on whether kernels were there."""
    load_kernels(kernels)
    weight = torch.randn(600, inputs, generator=torch.Generator().manual_seed(1))
    weight[3], weight[7, 9], weight[8] = 0, 40.0, weight[8] * 1e-6  # scales of 0, of an outlier, of few bits
    weight[5] = torch.tensor([0.5, -0.5]).repeat(inputs // 2)  # two numbers are the largest
    weight = weight.to(dtype)
    made = quantize_weight(weight, QuantConfig(qformat, group_size), group_size)
    values, scales = _quantize_rows(weight.float(), QuantConfig(qformat, group_size), group_size)
    assert torch.equal(made.values, values) and torch.equal(made.scales, scales)


class Counted(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("qformat", "group_size"), [("int4", 32), ("int4", 64), ("int8", 64), ("fp8", 64)])
def test_the_form_of_a_quantized_weight_is_found_without_quantizing(qformat: QuantFormat, group_size: int) -> None:
    """A plan of a Llama of 1.1 B took 8.6 s of operations on tensors without values."""
    weight = torch.randn(300, 64, dtype=torch.bfloat16)
    with Counted() as counted:
        form = quantize_weight(weight.to("meta"), QuantConfig(qformat), group_size)
    assert counted.number < 20
    made = quantize_weight(weight, QuantConfig(qformat), group_size)
    for one, other in ((form.values, made.values), (form.scales, made.scales)):
        assert one.is_meta and (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("qformat", ["int8", "int4", "fp8"])
def test_checkpoint_holds_quantized_layers_and_the_rest_as_it_was(qformat: QuantFormat, tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    config = run_convert(tmp_path / "model", tmp_path / "out", precision=QuantConfig(qformat, 32))
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    weights = take_quantized(tensors)
    assert set(weights) == set(layers_of(model))
    for name, weight in layers_of(model).items():
        assert torch.equal(
            weights[name].dequantize(), quantize_weight(weight, QuantConfig(qformat, 32), 32).dequantize()
        )
    others = {
        name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in weights
    }
    assert set(tensors) == set(others)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in others.items())
    assert config.quantization is not None
    assert config.quantization.exclude_modules == ("lm_head",)
    assert config.quantization.unrounded == str((tmp_path / "model").resolve())


@pytest.mark.parametrize("is_tied", [False, True])
def test_output_layer_is_quantized_when_asked_for(is_tied: bool, tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path / "model")
    precision = QuantConfig("int8", None, quantize_lm_head=True)
    config = run_convert(tmp_path / "model", tmp_path / "out", precision=precision)
    tensors = load_file(tmp_path / "out" / "rank0.safetensors")
    weights = take_quantized(tensors)
    expected = quantize_weight(model.lm_head.weight.data, precision, 64)
    assert torch.equal(weights["lm_head"].dequantize(), expected.dequantize())
    assert torch.equal(tensors["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert config.quantization is not None and config.quantization.exclude_modules == ()


def test_groups_are_halved_where_they_do_not_divide(said: Said) -> None:
    assert [group_size_for("layer", inputs, 64) for inputs in (256, 672, 48)] == [64, 32, 16]
    assert group_size_for("layer", 1000, None) == 1000
    with pytest.raises(SpecDecError) as error:
        group_size_for("layer", 1000, 64)
    said(error, "64", "1000", "`layer`")


@pytest.mark.skipif("exaone" not in CONFIG_MAPPING, reason="transformers has no EXAONE 3.5 before 5.24")
def test_linear_layers_that_transformers_renames_are_quantized(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32}
    config = CONFIG_MAPPING["exaone"](num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    precision = QuantConfig("int8", 32)
    run_convert(tmp_path / "model", tmp_path / "out", precision=precision)
    assert "transformer.h.1.attn.attention.q_proj.weight" in load_file(tmp_path / "model" / "model.safetensors")
    weights = take_quantized(load_file(tmp_path / "out" / "rank0.safetensors"))
    linears = {name: one for name, one in model.model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert weights.keys() == {f"model.{name}" for name in linears}
    for name, linear in linears.items():
        expected = quantize_weight(linear.weight.data, precision, 32)
        assert torch.equal(weights[f"model.{name}"].dequantize(), expected.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0, 7, 4097, 300_001])
def test_a_number_that_is_none_is_found_wherever_it_is(dtype: torch.dtype, size: int) -> None:
    weights = torch.linspace(-1, 1, size).to(dtype)
    assert _are_finite(weights)
    for position, bad in itertools.product({0, size // 2, size - 1}, (math.nan, math.inf, -math.inf)):
        if size:
            spoilt = weights.clone()
            spoilt[position] = bad
            assert not spoilt.isfinite().all() and not _are_finite(spoilt)
