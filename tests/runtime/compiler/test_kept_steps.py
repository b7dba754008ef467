"""A step is exported once for all models of one form, and never for one of another form."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, MIXTURES, WITHOUT_ATTENTION, make_build, make_model
from transformers import PreTrainedModel

from runtime.cache import cache_dir, sealed
from runtime.compiler import kept_steps
from runtime.compiler.attention import KERNEL
from runtime.compiler.compilation import Made, compile_aot
from runtime.compiler.kernels import describe_kernels, load_kernels
from runtime.compiler.model import Step, probe_config
from runtime.compiler.quantized_copy import copy_of, quantize_layers
from runtime.config import BuildConfig, SelfDraft, StepShape
from runtime.errors import SpecDecError


@pytest.fixture(autouse=True)
def cache(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_kernels(kernels)
    describe_kernels()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The modules that were exported."""
    asked: list[torch.nn.Module] = []
    export: Callable[..., Any] = torch.export.export

    def watched(module: torch.nn.Module, *others: Any, **named: Any) -> Any:
        asked.append(module)
        return export(module, *others, **named)

    monkeypatch.setattr(torch.export, "export", watched)
    return asked


def model_of(family: str, factor: float = 1.0, **settings: Any) -> PreTrainedModel:
    """A model whose weights depend on the factor."""
    model = make_model(family, **settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    model.set_attn_implementation(KERNEL)
    return model


def shape_of(model: PreTrainedModel, build: BuildConfig | None = None) -> StepShape:
    shapes = probe_config(model.config)
    dtype: Any = str(model.dtype).removeprefix("torch.")
    vocab_size = model.config.vocab_size
    return StepShape(dtype, vocab_size, shapes.layers, build or make_build(compiler="aot"), None, shapes.states)


# No more layers than it takes to have one of each kind: they are exported one by one.
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
}


def compiled(model: PreTrainedModel, directory: Path) -> tuple[dict[str, bytes], bytes]:
    """The package's files, and the weights."""
    directory.mkdir()
    assert compile_aot(Step(model), shape_of(model), directory, "float32") == Made(uses_kernels=True)
    with zipfile.ZipFile(directory / "rank0.pt2") as archive:
        package = {name: archive.read(name) for name in archive.namelist()}
    return package, (directory / "rank0.safetensors").read_bytes()


# One of those that have states.
@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*FAMILIES, *MIXTURES, *WITHOUT_ATTENTION)
            if name != "lfm2"
        ),
    ],
)
def test_a_second_model_of_a_form_is_made_as_if_it_were_the_first(
    family: str, tmp_path: Path, exported: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = FEW_LAYERS.get(family, {})
    first = compiled(model_of(family, **few), tmp_path / "first")
    num_exported = len(exported)
    again = compiled(model_of(family, 0.9, **few), tmp_path / "again")
    assert len(exported) == num_exported > 0
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "other cache"))
    alone = compiled(model_of(family, 0.9, **few), tmp_path / "alone")
    assert len(exported) == 2 * num_exported
    assert again == alone
    assert again[0] == first[0] and again[1] != first[1]


@pytest.mark.slow
def test_a_copy_that_drafts_is_exported_once(tmp_path: Path, exported: list[torch.nn.Module]) -> None:
    made = []
    for factor in (1.0, 0.9):
        model = model_of("llama", factor)
        quantized = quantize_layers(model, model.config, make_build(self_draft=SelfDraft("int4", 16)))
        compiled(model, tmp_path / f"model {factor}")
        made.append(compiled(copy_of(model, quantized), tmp_path / f"copy {factor}"))
    assert made[0][0] == made[1][0] and made[0][1] != made[1][1]
    assert len(exported) == 4, "of both a step and the first of two layers"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"intermediate_size": 80}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"mlp_bias": False}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("llama", {"vocab_size": 40}),
        ("mistral", {}),
        ("qwen2", {}),
    ],
)
def test_a_model_of_another_form_is_not_found(family: str, settings: dict[str, Any]) -> None:
    models = [model_of("llama"), model_of(family, **settings), model_of("llama", 0.9)]
    entry, other, same = (kept_steps.step_entry(Step(model), shape_of(model), 0) for model in models)
    assert entry == same and other != entry


def test_a_model_in_other_bits_is_not_found() -> None:
    models = [model_of("llama"), model_of("llama").bfloat16()]
    assert len({kept_steps.step_entry(Step(model), shape_of(model), 0) for model in models}) == 2


@pytest.mark.parametrize("other", [{"tokens_per_block": 32}, {"max_batch_size": 3}])
def test_of_a_build_only_the_blocks_belong_to_the_form(other: dict[str, int]) -> None:
    model = model_of("llama")
    step = Step(model)
    builds = [make_build(compiler="aot", **settings) for settings in ({}, other)]
    entries = {kept_steps.step_entry(step, shape_of(model, build), 0) for build in builds}
    assert len(entries) == (2 if "tokens_per_block" in other else 1)


@pytest.mark.parametrize("version", ["torch", "transformers", "our code", "the model's code"])
def test_what_other_code_exported_is_not_taken(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = model_of("llama")
    step, shape = Step(model), shape_of(model)
    before = kept_steps.step_entry(step, shape, 0)
    if version == "the model's code":
        (tmp_path / "modeling.py").write_text("another")
        monkeypatch.setattr("transformers.models.llama.modeling_llama.__file__", str(tmp_path / "modeling.py"))
    elif version == "our code":
        monkeypatch.setattr(kept_steps, "digests_of_build_code", lambda: ["other"])
    elif version == "torch":
        monkeypatch.setattr("torch.__version__", "9.9")
    else:
        monkeypatch.setattr("runtime.compiler.load.metadata.version", lambda name: "9.9")
    assert kept_steps.step_entry(step, shape, 0) != before


@pytest.mark.slow
def test_what_is_damaged_is_exported_again(cache: Path, tmp_path: Path, exported: list[torch.nn.Module]) -> None:
    first = compiled(model_of("llama"), tmp_path / "first")
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for i, damaged in enumerate((b"A" + whole[1:], b"", sealed(b"no pickle"))):
        entry.write_bytes(damaged)
        exported.clear()
        assert compiled(model_of("llama"), tmp_path / str(i)) == first and exported
        assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compiled(model_of("llama"), tmp_path / "engine")


def test_a_cache_that_others_can_write_into_is_refused(cache: Path, tmp_path: Path) -> None:
    compiled(model_of("llama"), tmp_path / "first")
    cache_dir().chmod(0o777)
    with pytest.raises(SpecDecError, match="cache"):
        compiled(model_of("llama"), tmp_path / "again")
