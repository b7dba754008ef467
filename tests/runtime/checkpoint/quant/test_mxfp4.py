"""Experts in MXFP4 are read as transformers reads them, number by number, and what is damaged is one error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import quantize_experts_to_mxfp4
from safetensors.torch import load_file, save_file
from sentences import Said
from shared import edit_json
from tiny import hf_greedy, make_model, run_convert
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.checkpoint.config import Activations
from runtime.checkpoint.quant.mxfp4 import codes_of, dequantize
from runtime.checkpoint.quant.weight import from_integers, take_quantized
from runtime.kernels.ops import load_kernels
from runtime.model.quantized import QuantizedLinear
from runtime.util.errors import SpecDecError
from specdec_cli import LLM, SamplingParams

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def test_every_number_is_transformers() -> None:
    """All bytes with all exponents of numbers that bfloat16 has."""
    scales = torch.arange(1, 252, dtype=torch.uint8).view(1, 251, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 251, 1, 1)
    ours, theirs = dequantize(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit())


def save_quantized(directory: Path) -> None:
    make_model("gpt-oss", intermediate_size=64).bfloat16().save_pretrained(directory)
    quantize_experts_to_mxfp4(directory)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    edit_json(directory / "config.json", quantization_config=quantization)


def test_a_checkpoint_has_the_numbers_in_the_bits_of_the_file(tmp_path: Path) -> None:
    save_quantized(tmp_path / "model")
    checkpoint = run_convert(tmp_path / "model", tmp_path / "out")
    assert checkpoint.quantization is not None and checkpoint.quantization.quant_algo == "W4A16_MXFP4"
    written = load_file(tmp_path / "out" / "rank0.safetensors")
    assert written[f"{EXPERTS}.weight_book"].tolist()[:8] == [0, 1, 2, 3, 4, 6, 8, 12]
    kept = take_quantized(written)
    assert len(kept) == 4 and all(weight.values.dtype == torch.uint8 for weight in kept.values())
    numbers = {name: weight.dequantize(torch.bfloat16) for name, weight in kept.items()} | written
    meant = load_file(tmp_path / "model-meant" / "model.safetensors")
    assert numbers.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(numbers[name].view(tensor.mT.shape).mT if name in kept else numbers[name], tensor)


@pytest.mark.parametrize("activations", ["float", "int8", "int16"])
@pytest.mark.parametrize("group_size", [32, 16], ids=["MXFP4", "NVFP4"])
def test_codes_are_multiplied_as_the_numbers_that_they_stand_for(
    group_size: int, activations: Activations, kernels: Path
) -> None:
    """All codes and a scale of 0, of odd numbers of rows, beside 8-bit integers that mean the same: bit by bit."""
    load_kernels(kernels)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 72, 5, 16), generator=generator).byte()
    scales = torch.randint(110, 130, (1, 72, 5), generator=generator).byte()
    scales[0, 3] = 0
    codes = codes_of(blocks, scales)
    if group_size == 16:  # scales of 32 bits
        codes = replace(codes, scales=torch.rand(72, 10, generator=generator) * codes.scales.repeat_interleave(2, 1))
    integers = from_integers(codes.integers(), codes.scales, bits=8)
    sizes = (1, 2, 3, 4, 6, 8, 12)
    assert {*codes.integers().flatten().tolist()} == {0, *sizes, *(-size for size in sizes)}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(37, 160, generator=generator).to(dtype)
        ours, theirs = (
            QuantizedLinear(weight, None, activations, with_kernels=True)(x) for weight in (codes, integers)
        )
        assert torch.equal(ours, theirs) and ours.isfinite().all()
    exact = x.double() @ codes.dequantize().double().T
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_gpt_oss_in_codes_is_hugging_faces(tmp_path: Path) -> None:
    """Transformers' model has the numbers that the codes stand for. Compiled, with tokens that are not quantized."""
    save_quantized(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = [3 + i * i % 29 for i in range(30)]
    with LLM(tmp_path / "model", dtype="float32", activations="float", max_seq_len=64) as llm:
        assert llm.bundle.config.build_config.compiler == "aot" and llm.bundle.config.batch_invariant
        ours = llm.generate([prompt], params)[0].token_ids
    meant = AutoModelForCausalLM.from_pretrained(tmp_path / "model-meant", dtype=torch.float32)
    assert ours == hf_greedy(meant, prompt, 24)


def without_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}


DAMAGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "gate_up_proj_scales": lambda tensors: tensors.pop(f"{EXPERTS}_scales"),
    "gate_up_proj_blocks": lambda tensors: tensors.pop(f"{EXPERTS}_blocks"),
    "gate_up_proj; [4, 96, 1, 16]; [4, 96, 2]": lambda tensors: tensors.update(
        {f"{EXPERTS}_blocks": torch.zeros(4, 96, 1, 16).byte(), f"{EXPERTS}_scales": torch.zeros(4, 96, 2).byte()}
    ),
    "gate_up_proj_blocks; [4, 32, 96]; [4, 32, 128]": lambda tensors: tensors.update(
        {f"{EXPERTS}_blocks": torch.zeros(4, 96, 1, 16).byte(), f"{EXPERTS}_scales": torch.zeros(4, 96, 1).byte()}
    ),
    "NaN": lambda tensors: tensors[f"{EXPERTS}_scales"].fill_(255),
    "MXFP4": lambda tensors: [tensors.pop(name) for name in tensors.keys() - without_blocks(tensors).keys()],
}


@pytest.mark.parametrize("values", DAMAGES)
def test_damaged_blocks_are_one_error(values: str, tmp_path: Path, said: Said) -> None:
    save_quantized(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    DAMAGES[values](tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecDecError) as error:
        run_convert(tmp_path / "model", tmp_path / "out")
    said(error, *values.split("; "))
    assert not (tmp_path / "out").exists()
