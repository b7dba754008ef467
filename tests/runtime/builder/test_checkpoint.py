"""Conversion keeps every value, writes whole directories or nothing, and names what is wrong with an input."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentences import Said
from shared import edit_json
from tiny import VOCAB_SIZE, make_model, run_convert
from torch import Tensor
from transformers import AutoConfig, FalconConfig, PreTrainedConfig, Qwen2MoeConfig, T5Config

from runtime.builder.convert import convert, convert_for_build, plan_conversion
from runtime.builder.engine_cache import engine_of_model, settings_of
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.config import Dtype, QuantConfig
from runtime.util.errors import SpecDecError, SpecDecWarning

INDEX = "model.safetensors.index.json"


def saved_tensors(model_dir: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny Llama in one file."""
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    """A tiny Llama in several files with an index."""
    make_model("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) >= 3
    return tmp_path / "model"


def test_values_are_kept(sharded_dir: Path, tmp_path: Path) -> None:
    checkpoint = run_convert(sharded_dir, tmp_path / "out")
    assert checkpoint.dtype == "float32"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.safetensors",
    ]
    assert_same_bits(load_file(tmp_path / "out" / "rank0.safetensors"), saved_tensors(sharded_dir))
    assert open_checkpoint(tmp_path / "out") == checkpoint
    assert checkpoint.pretrained_config == json.loads((sharded_dir / "config.json").read_text())


@pytest.mark.parametrize(("saved", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_dtype_is_the_saved_one_or_the_one_asked_for(saved: Any, dtype: Any, tmp_path: Path) -> None:
    make_model("llama").to(getattr(torch, saved)).save_pretrained(tmp_path / "model")
    source = saved_tensors(tmp_path / "model")
    assert run_convert(tmp_path / "model", tmp_path / "auto").dtype == saved
    assert_same_bits(load_file(tmp_path / "auto" / "rank0.safetensors"), source)
    assert run_convert(tmp_path / "model", tmp_path / "out", dtype).dtype == dtype
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in source.items()}
    assert_same_bits(load_file(tmp_path / "out" / "rank0.safetensors"), expected)


def test_mixed_and_unusual_tensors_survive(model_dir: Path, tmp_path: Path) -> None:
    """Integers keep their dtype; scalars, empty tensors and float64 are written; auto follows the majority."""
    tensors = saved_tensors(model_dir)
    tensors |= {
        "counts": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "double": torch.rand(3, dtype=torch.float64),
        "half": torch.rand(3).half(),
    }
    save_file(tensors, model_dir / "model.safetensors")
    assert run_convert(model_dir, tmp_path / "out").dtype == "float32"
    expected = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    assert_same_bits(load_file(tmp_path / "out" / "rank0.safetensors"), expected)


def truncate(path: Path, num_bytes: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def shard(model_dir: Path) -> Path:
    return sorted(model_dir.glob("model-*.safetensors"))[1]


def edit_index(model_dir: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = model_dir / INDEX
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def only_pickled(model_dir: Path) -> None:
    for path in model_dir.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, model_dir / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (shutil.rmtree, "model directory does not exist: {dir}"),
    "no config": (lambda d: (d / "config.json").unlink(), "file is missing: {dir}/config.json"),
    "empty config": (lambda d: (d / "config.json").write_text("{}"), "`{dir}/config.json` names no `model_type`"),
    "wrong type": (
        lambda d: edit_json(d / "config.json", hidden_size="wide"),
        "`{dir}/config.json` is not a valid llama config",
    ),
    "unknown": (
        lambda d: edit_json(d / "config.json", model_type="alien"),
        "transformers does not know this model type: alien",
    ),
    "no shard": (lambda d: shard(d).unlink(), "file is missing: {shard}"),
    "truncated shard": (lambda d: truncate(shard(d)), "`{shard}` is damaged"),
    "shard of one byte": (lambda d: shard(d).write_bytes(b"\x05"), "`{shard}` is damaged"),
    "shard is a web page": (lambda d: shard(d).write_bytes(b"<html>" * 50), "`{shard}` is damaged"),
    "truncated index": (lambda d: truncate(d / INDEX), "`{dir}/" + INDEX + "` is not valid JSON"),
    "index without weight_map": (
        lambda d: edit_index(d, lambda index: index.pop("weight_map")),
        "`{dir}/" + INDEX + "` has no `weight_map`",
    ),
    "index names a tensor that is not there": (
        lambda d: edit_index(d, lambda index: index["weight_map"].update(ghost=shard(d).name)),
        "`{dir}/" + INDEX + "` names a tensor that no shard holds: ghost",
    ),
    "no weights at all": (
        lambda d: [path.unlink() for path in d.glob("*.safetensors*")],
        "file is missing: {dir}/model.safetensors",
    ),
    "pickle": (only_pickled, "weights are pickled, which can run code when opened: {dir}/pytorch_model.bin"),
    "quantized": (
        lambda d: edit_json(d / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "config.json says that weights are quantized (GPTQ), and none are: {dir}",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_model_is_named_and_nothing_is_written(kind: str, sharded_dir: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[kind]
    wanted = message.format(dir=sharded_dir, shard=shard(sharded_dir))
    damage(sharded_dir)
    with pytest.raises(SpecDecError) as error:
        run_convert(sharded_dir, tmp_path / "out")
    assert error.value.message.startswith(wanted)
    assert [path.name for path in tmp_path.iterdir() if path.name != "model"] == []


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)


@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda path: path.write_bytes(path.read_bytes())])
def test_shard_that_changes_while_it_is_read_is_named(
    damage: Callable[[Path], Any], sharded_dir: Path, tmp_path: Path, said: Said
) -> None:
    last = sorted(sharded_dir.glob("model-*.safetensors"))[-1]
    changed = []

    def change(done: int, total: int) -> None:
        if not changed:
            changed.append(damage(last))

    with pytest.raises(SpecDecError) as error:
        convert(sharded_dir, tmp_path / "out", None, replace=False, progress=change)
    said(error, last)
    assert not (tmp_path / "out").exists()


SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSUPPORTED = [
    pytest.param(T5Config(vocab_size=32), "t5", id="encoder-decoder"),
    pytest.param(FalconConfig(**SMALL, alibi=True), "falcon", id="Falcon"),
    pytest.param(
        Qwen2MoeConfig(**SMALL, use_sliding_window=True, sliding_window=5000, max_window_layers=1),
        "5000",
        id="Qwen2-MoE with windows",
    ),
    pytest.param(AutoConfig.for_model("bert"), "BertSelfAttention", id="BERT"),
]


@pytest.mark.parametrize(("config", "quoted"), UNSUPPORTED)
def test_unsupported_model_is_refused_by_its_config_alone(
    config: PreTrainedConfig, quoted: str, tmp_path: Path, said: Said
) -> None:
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(SpecDecError) as raised:
        run_convert(tmp_path / "model", tmp_path / "out")
    said(raised, quoted)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_of_integers_are_refused_by_name(model_dir: Path, tmp_path: Path, said: Said) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecDecError) as error:
        run_convert(model_dir, tmp_path / "out")
    said(error, f"`{name}`", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name_and_number(
    value: float, model_dir: Path, tmp_path: Path, said: Said
) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"][:8] = value  # of 32
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecDecError) as raised:
        run_convert(model_dir, tmp_path / "out")
    said(raised, 8, 32, "`model.norm.weight`", model_dir / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with (
        pytest.raises(SpecDecError) as of_first_start,
        engine_of_model(str(model_dir), settings_of({"compiler": "none"})),
    ):
        pass
    assert str(of_first_start.value) == str(raised.value)


def test_weights_that_become_infinite_are_counted(model_dir: Path, tmp_path: Path, said: Said) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"][:3] = 1e5
    tensors["lm_head.weight"][0, :2] = -7e4
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(SpecDecWarning) as warned:
        run_convert(model_dir, tmp_path / "out", "float16")
    said(warned, "float16", "5", "`lm_head.weight`")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_convert(model_dir, tmp_path / "bf16", "bfloat16")


def test_weights_that_become_zero_are_counted_where_they_are_many(model_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    num_weights = sum(tensor.numel() for tensor in tensors.values())
    for num_tiny, is_told in ((num_weights // 10_000, False), (num_weights // 10_000 + 1, True)):
        embeddings = tensors["model.embed_tokens.weight"].flatten()
        embeddings[:num_tiny] = 1e-9  # float16's smallest number is 6e-8
        embeddings[num_tiny:][embeddings[num_tiny:].abs() < 1e-6] = 1e-6
        save_file(
            tensors | {"model.embed_tokens.weight": embeddings.view_as(tensors["model.embed_tokens.weight"])},
            model_dir / "model.safetensors",
            metadata={"format": "pt"},
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_convert(model_dir, tmp_path / f"out{num_tiny}", "float16")
        told = [str(one.message) for one in caught if "too small for float16 became zero" in str(one.message)]
        assert len(told) == is_told
        assert all(f"zero: {num_tiny:,} (" in one and "`model.embed_tokens.weight`" in one for one in told)


def for_build(
    model_dir: Path, output_dir: Path, dtype: Dtype | None = None, tp_size: int = 1, *, may_link: bool = True
) -> Path:
    """The weights that a build reads."""
    output_dir.mkdir()
    convert_for_build(plan_conversion(model_dir, dtype, QuantConfig(), tp_size), output_dir, may_link=may_link)
    return output_dir / "rank0.safetensors"


def test_a_build_reads_the_file_whose_weights_it_would_copy(model_dir: Path, tmp_path: Path) -> None:
    weights = for_build(model_dir, tmp_path / "out")
    assert weights.readlink() == model_dir / "model.safetensors"
    assert_same_bits(load_file(weights), load_file(model_dir / "model.safetensors"))
    assert not for_build(model_dir, tmp_path / "may not", may_link=False).is_symlink()
