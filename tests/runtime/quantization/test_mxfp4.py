"""Experts in MXFP4 are read as transformers reads them, number by number, and what is damaged is one error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import quantize_experts_to_mxfp4
from safetensors.torch import load_file, save_file
from sentences import Said
from tiny import make_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.checkpoint import convert
from runtime.errors import SpecDecError
from runtime.quantization.mxfp4 import dequantize

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
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_has_the_numbers(tmp_path: Path) -> None:
    save_quantized(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", None, replace=False, progress=lambda done, total: None)
    written = load_file(tmp_path / "out" / "rank0.safetensors")
    meant = load_file(tmp_path / "model-meant" / "model.safetensors")
    assert written.keys() == meant.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in meant.items())


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
        convert(tmp_path / "model", tmp_path / "out", None, replace=False, progress=lambda done, total: None)
    said(error, *values.split("; "))
    assert not (tmp_path / "out").exists()
