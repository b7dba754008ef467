"""A step's weights are read as safetensors' own reader reads them, into aligned memory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sentences import Said
from tiny import FAMILIES, MIXTURES, eager_logits, make_model, run_convert
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.model import weights as module
from runtime.model.model import ModelKind, load_absent
from runtime.model.weights import (
    Layout,
    absent_weights,
    is_absent,
    layer_by_layer,
    layout_of,
    open_weights,
    present,
    read_weights,
    save_weights,
    write_weights,
)
from runtime.util.errors import SpecDecError


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 5, generator=generator)
    return {
        "one number": torch.tensor([3.5]),
        "scalar": torch.tensor(2),
        "bfloat16": table.bfloat16(),
        "float16": table.half(),
        "table": table,
        "its first rows": table[:3],  # shares its memory
        "flags": table > 0,
    }


@pytest.fixture
def layout(weights: dict[str, Tensor]) -> Layout:
    return layout_of(weights)


@pytest.fixture
def path(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    save_weights(tmp_path / "weights.safetensors", weights)
    return tmp_path / "weights.safetensors"


def test_weights_are_those_of_the_file(path: Path, layout: Layout) -> None:
    ours, theirs = open_weights(path, layout), load_file(path)
    assert set(ours) == set(theirs) and len(ours) == 7
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and ours[name].shape == weight.shape
        assert torch.equal(ours[name], weight)


@pytest.mark.parametrize("metadata", [None, {"shared": '{"more": "known"}'}], ids=["all its own", "some shared"])
def test_file_is_the_one_that_safetensors_writes(
    weights: dict[str, Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    of_8_bits = {"int8": torch.arange(5, dtype=torch.int8), "e4m3": torch.ones(3).to(torch.float8_e4m3fn)}
    weights |= of_8_bits | {"no numbers": torch.zeros(0, 3), "int32 \u00e9": torch.arange(4, dtype=torch.int32)}
    theirs = {name: weight.clone().contiguous() for name, weight in weights.items()}
    save_file(theirs, tmp_path / "theirs", metadata=metadata)
    known = {"known": torch.full((3,), 0.5)} if metadata else {}
    all_of_them = weights | ({"more": known["known"].clone()} if metadata else {})
    parts = [{name: weight} for name, weight in reversed(all_of_them.items())]
    write_weights(tmp_path / "ours", layout_of(all_of_them), lambda: parts, known)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def change_it(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), change_it], ids=["cut", "written over"])
def test_absent_weights_of_a_file_that_is_another_one_are_refused(
    change: Callable[[Path], None], path: Path, said: Said
) -> None:
    ours = absent_weights(path)
    change(path)
    with pytest.raises(SpecDecError) as raised, present(ours["table"]):
        pass
    said(raised, path)


def absent_copy(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    save_weights(path, {name: weight.contiguous() for name, weight in model.state_dict().items()})
    copied = load_absent(ModelKind(model.config, torch.float32, "eager"), path)
    assert all(is_absent(parameter) for parameter in copied.parameters())
    return copied


def test_layers_are_there_while_they_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    model = absent_copy(make_model("llama"), tmp_path / "weights")
    there: list[set[str]] = []

    def see(layer: nn.Module, inputs: object, outputs: object) -> None:
        there.append({name for name, parameter in model.named_parameters() if parameter.any()})

    embeddings, *layers, head = model.model.embed_tokens, *model.model.layers, model.lm_head
    for layer in (embeddings, *layers, head):
        layer.register_forward_hook(see)
    with layer_by_layer(model):
        eager_logits(model, [5, 6, 7])
    always = {"model.norm.weight"}
    of_layers = [{name for name, _ in model.named_parameters() if f".layers.{i}." in name} for i in range(len(layers))]
    assert there == [
        {"model.embed_tokens.weight"} | always,
        *(names | always for names in of_layers),
        {"lm_head.weight"} | always,
    ]
    assert all(of_layers) and not any(parameter.any() for parameter in model.parameters())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_model_computes_the_same_with_layers_that_are_there_while_they_are_called(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    original = make_model(family)
    model = absent_copy(original, tmp_path / "weights")
    with layer_by_layer(model):
        logits = eager_logits(model, [5, 6, 7])
    torch.testing.assert_close(logits, eager_logits(original, [5, 6, 7]), rtol=0, atol=0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt-neox", "mixtral", "qwen2-moe", *MIXTURES])
def test_a_converted_model_has_no_weight_that_is_made_of_others(family: str, tmp_path: Path) -> None:
    """Else it would have all of them in memory, and some twice."""
    original = make_model(family)
    original.save_pretrained(tmp_path / "model")
    run_convert(tmp_path / "model", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "rank0.safetensors"
    model = load_absent(ModelKind(original.config, torch.float32, "eager"), path)
    assert all(is_absent(parameter) for parameter in model.parameters())
    with present(model):
        for name, parameter in original.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_weights_stay_when_the_file_is_cut(path: Path) -> None:
    """A mapped file would end the process with a signal."""
    ours, theirs = read_weights(path), {name: weight.clone() for name, weight in load_file(path).items()}
    os.truncate(path, 0)
    assert set(ours) == set(theirs) and len(ours) == 7
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and torch.equal(ours[name], weight)


def test_weights_of_a_dtype_that_torch_may_not_have_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dtype":"I64"', b'"dtype":"U64"'))
    with pytest.raises(SafetensorError, match="has a dtype that no checkpoint has: U64"):
        read_weights(path)


def test_every_weight_begins_at_a_cache_line(path: Path, layout: Layout) -> None:
    assert {weight.data_ptr() % 64 for weight in open_weights(path, layout).values()} == {0}


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_file_that_is_cut_off_is_found_out(path: Path, layout: Layout, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(SafetensorError):
        open_weights(path, layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("scalar"), "1; scalar"),
        (lambda w: w.update(more=w["flags"]), "1; more"),
        (lambda w: w.update(table=w["table"][:6]), "[6, 5]; [7, 5]; table"),
        (lambda w: w.update(table=w["table"].T), "[5, 7]; [7, 5]; table"),
        (lambda w: w.update(float16=w["bfloat16"]), "bfloat16; float16"),
        (lambda w: w.update(table=w["table"].double()), "float64; float32; table"),
    ],
    ids=["lacking", "more", "smaller", "transposed", "of another dtype", "of a foreign dtype"],
)
def test_weights_that_a_step_does_not_want_are_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    weights: dict[str, Tensor],
    layout: Layout,
    tmp_path: Path,
    said: Said,
) -> None:
    change(weights)
    save_weights(tmp_path / "weights.safetensors", {name: weight.contiguous() for name, weight in weights.items()})
    with pytest.raises(SpecDecError) as raised:
        open_weights(tmp_path / "weights.safetensors", layout)
    said(raised, "weights.safetensors", *message.split("; "))
