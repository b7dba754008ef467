"""Weights that a class of transformers keeps in float32 in a model of 16 bits are float32 in a checkpoint and an
engine, to the last bit those that transformers loads from the same files."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentences import Said
from shared import record_anew
from tiny import run_build, run_convert
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from runtime.builder.convert import convert_for_build, plan_conversion
from runtime.checkpoint.config import Dtype, QuantConfig, QuantFormat
from runtime.checkpoint.quant.planning import Losses, _copied
from runtime.checkpoint.source import SourceTensor
from runtime.checkpoint.tensor_writer import Piece
from runtime.model.attention import PAGED
from runtime.model.model import ModelKind, load_model, load_whole_model, split_config
from runtime.model.pretrained import parse_pretrained_config
from runtime.util.errors import SpecDecError, SpecDecWarning
from scripts.tools import families

SOURCES = Path(transformers.__file__).parent / "models"
LISTS = re.compile(r'_keep_in_fp32_modules(_strict)? = \[\s*"')
MADE_IN_FLOAT32 = ("hunyuan_v1_moe", "lfm2_moe", "olmo_hybrid", "zamba")
"""Families without such a list whose code makes a weight in float32: a router, biases of experts, decays."""


def has_lists(family: str) -> bool:
    sources = (SOURCES / model_type_to_module_name(family)).glob("modeling_*.py")
    return any(LISTS.search(path.read_text()) for path in sources)


SERVED = [family for family, outcome in families.recorded().items() if outcome.verdict == "equal"]
KEEPING = [family for family in SERVED if has_lists(family) or family in MADE_IN_FLOAT32]
KEEPING.remove("voxtral")  # of its audio encoder alone


def save_model(family: str, directory: Path) -> None:
    """Small, random, in float32; biases of 8 and a little, of which bfloat16 keeps nothing but the 8."""
    model = families.random_model(family, families.small_config(family), 0.1, 0.1)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "correction_bias" in name or "expert_bias" in name:
            tensors[name] = 8 + 0.02 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_by_transformers(family: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    several_inputs = family in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    auto_class = AutoModelForMultimodalLM if several_inputs else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def in_float32(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of its language model that transformers has in float32, by the names that it has by itself."""
    return {
        name.replace(".language_model.", "."): tensor
        for name, tensor in model.state_dict().items()
        if tensor.dtype == torch.float32 and "audio" not in name and "vision_tower" not in name
    }


def loaded_of(model_dir: Path, work_dir: Path, dtype: Dtype, qformat: QuantFormat | None) -> dict[str, Tensor]:
    """The weights in an engine of the model, as it loads them from a checkpoint."""
    precision = QuantConfig(qformat)
    checkpoint = run_convert(model_dir, work_dir / "checkpoint", dtype, replace=True, precision=precision)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, "config.json")
    kind = ModelKind(pretrained, getattr(torch, dtype), PAGED, checkpoint.quantization)
    return load_model(kind, work_dir / "checkpoint" / "rank0.safetensors").state_dict()


def loaded_of_ranks(model_dir: Path, work_dir: Path, tp_size: int) -> dict[str, Tensor]:
    """The weights of an engine's ranks in bfloat16, put together."""
    checkpoint = run_convert(model_dir, work_dir / "split", "bfloat16", tp_size=tp_size)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, "config.json")
    kind = ModelKind(pretrained, torch.bfloat16, PAGED, splitting=split_config(pretrained, tp_size))
    ranks = [work_dir / "split" / f"rank{rank}.safetensors" for rank in range(tp_size)]
    for path in ranks:
        load_model(kind, path)  # each by itself, as its process does
    return load_whole_model(kind, ranks).state_dict()


PRECISIONS: list[tuple[Dtype, QuantFormat | None]] = [
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("float16", None),
]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("family", KEEPING)
def test_what_transformers_keeps_in_float32_is_so_in_an_engine_to_the_last_bit(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    num_kept = 0
    for dtype, qformat in PRECISIONS:
        ours = loaded_of(tmp_path / "model", tmp_path, dtype, qformat)
        theirs = in_float32(load_by_transformers(family, tmp_path / "model", getattr(torch, dtype)))
        for name, tensor in theirs.items():
            assert ours[name].dtype == torch.float32, (dtype, qformat, name)
            assert torch.equal(ours[name], tensor), (dtype, qformat, name)
        more = {name for name, tensor in ours.items() if tensor.dtype == torch.float32} - theirs.keys()
        assert qformat or not more, more
        num_kept += len(theirs)
    assert num_kept


SPLIT = [family for family in KEEPING if families.recorded()[family].ways["split"] == "yes"]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("family", SPLIT)
def test_what_transformers_keeps_in_float32_is_so_in_ranks(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    ours = loaded_of_ranks(tmp_path / "model", tmp_path, 2)
    for name, tensor in in_float32(load_by_transformers(family, tmp_path / "model", torch.bfloat16)).items():
        assert ours[name].dtype == torch.float32 and torch.equal(ours[name], tensor), name


def test_checkpoint_with_a_rounded_bias_is_refused(tmp_path: Path, said: Said) -> None:
    """Checkpoints of older versions have it so."""
    save_model("glm4_moe", tmp_path / "model")
    loaded_of(tmp_path / "model", tmp_path, "bfloat16", None)
    weights = tmp_path / "checkpoint" / "rank0.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, weights)
    record_anew(tmp_path / "checkpoint")
    with pytest.raises(SpecDecError) as error:
        run_build(tmp_path / "checkpoint", tmp_path / "engine")
    said(error, name, "bfloat16", "float32")


def bfloat16_for_all(config: PreTrainedConfig, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    return lambda name: torch.bfloat16


def copied_rounded(tensor: SourceTensor, dtype: torch.dtype, losses: Losses) -> Piece:
    """Copy a weight as it is planned, with the numbers of bfloat16."""
    piece = _copied(tensor, dtype, losses)
    return replace(
        piece, make=lambda values: {name: one.bfloat16().to(one.dtype) for name, one in piece.make(values).items()}
    )


def copied_of_neighbour(tensor: SourceTensor, dtype: torch.dtype, losses: Losses) -> Piece:
    piece = _copied(tensor, dtype, losses)
    return replace(piece, make=lambda values: {name: one.roll(1) for name, one in piece.make(values).items()})


@pytest.mark.parametrize(
    ("place", "fault", "way"),
    [
        ("runtime.builder.convert.dtypes_of_weights", bfloat16_for_all, "convert"),
        ("runtime.checkpoint.quant.planning._copied", copied_rounded, "build"),
        ("runtime.checkpoint.quant.planning._copied", copied_of_neighbour, "split"),
    ],
    ids=["dtypes", "numbers", "order"],
)
def test_conversion_that_is_not_what_transformers_loads_is_refused(
    place: str, fault: Callable[..., Any], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    save_model("glm4_moe", tmp_path / "model")
    monkeypatch.setattr(place, fault)
    with pytest.raises(SpecDecError) as error:
        if way == "build":
            (tmp_path / "checkpoint").mkdir()
            conversion = plan_conversion(tmp_path / "model", "bfloat16", QuantConfig())
            convert_for_build(conversion, tmp_path / "checkpoint", may_link=True)
        else:
            tp_size = 2 if way == "split" else 1
            run_convert(tmp_path / "model", tmp_path / "checkpoint", "bfloat16", tp_size=tp_size)
    said(error)


def test_layer_that_transformers_keeps_in_float32_is_not_quantized(tmp_path: Path) -> None:
    """Hunyuan 4's output layer, although it is asked for."""
    save_model("hy_v4", tmp_path / "model")
    precision = QuantConfig("int8", quantize_lm_head=True)
    with pytest.warns(SpecDecWarning, match="lm_head"):
        run_convert(tmp_path / "model", tmp_path / "checkpoint", "bfloat16", precision=precision)
    tensors = load_file(tmp_path / "checkpoint" / "rank0.safetensors")
    saved = load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"]
    assert tensors["lm_head.weight"].dtype == torch.float32 and torch.equal(tensors["lm_head.weight"], saved)
