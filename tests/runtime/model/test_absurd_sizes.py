"""Configs that speak of sizes that no file has: refused at once, before anything of that size is made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sentences import Said
from shared import edit_json
from tiny import make_model
from waiting import ends

from runtime.builder.convert import plan_conversion
from runtime.checkpoint.config import QuantConfig
from runtime.drafters.heads.head_config import read_head
from runtime.model.pretrained import read_any_config
from runtime.util.errors import SpecDecError


def copy_with(model_dir: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a model whose config.json says something else; `a__b` is the key `b` of the object `a`."""
    shutil.copytree(model_dir, directory)
    edit_json(directory / "config.json", **changes)
    return directory


def refusal(model_dir: Path) -> SpecDecError:
    with ends(), pytest.raises(SpecDecError) as error:
        plan_conversion(model_dir, None, QuantConfig())
    return error.value


@pytest.mark.parametrize("count", [5000, 10**30])
@pytest.mark.parametrize(("family", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_layers_that_the_files_have_no_tensors_for_are_refused(
    family: str, key: str, count: int, tmp_path: Path, said: Said
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    said(refusal(copy_with(tmp_path / "model", tmp_path / "absurd", **{key: count})), key, count)


def test_layers_inside_a_model_of_several_kinds_of_input_are_counted_too(tmp_path: Path, said: Said) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    text = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    absurd = copy_with(tmp_path / "model", tmp_path / "absurd", model_type="llava", text_config=text)
    said(refusal(absurd), "num_hidden_layers", 10**9)


@pytest.mark.parametrize("size", [2**40 + 1, 10**30])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "vocab_size"),
        ("llama", "hidden_size"),
        ("llama", "num_key_value_heads"),
        ("mixtral", "num_local_experts"),
        ("qwen3-moe", "moe_intermediate_size"),
        ("dbrx", "ffn_config__ffn_hidden_size"),
    ],
)
def test_sizes_beyond_any_memory_are_told_by_name_and_value(
    family: str, key: str, size: int, tmp_path: Path, said: Said
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    said(refusal(copy_with(tmp_path / "model", tmp_path / "absurd", **{key: size})), key.rpartition("__")[2], size)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_are_compared_with_the_tensors_before_memory_is_taken(key: str, tmp_path: Path, said: Said) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    error = refusal(copy_with(tmp_path / "model", tmp_path / "absurd", **{key: 10**12}))
    said(error, "two models", "config.json", 10**12)


@pytest.mark.parametrize(
    "values", [{"max_position_embeddings": 10**19}, {"sliding_window": 10**15}, {"bos_token_id": 10**15}]
)
def test_what_is_no_size_may_be_large(values: dict[str, int], tmp_path: Path) -> None:
    """Positions cost nothing where they are computed; Llama 4 has 10 million."""
    make_model("llama").save_pretrained(tmp_path / "model")
    plan_conversion(copy_with(tmp_path / "model", tmp_path / "large", **values), None, QuantConfig())


def test_layers_are_counted_where_there_are_no_files_to_compare_with(said: Said) -> None:
    """A head's config, or an engine's."""
    with ends(), pytest.raises(SpecDecError) as error:
        read_any_config({"model_type": "llama", "num_hidden_layers": 10**9}, "config.json")
    said(error, 10**9)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_heads_of_absurdly_many_layers_are_refused(key: str, tmp_path: Path, said: Said) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    with ends(), pytest.raises(SpecDecError) as error:
        read_head(copy_with(tmp_path / "model", tmp_path / "absurd", **{key: 10**9}))
    said(error, key, 10**9)


def test_eagle_head_of_absurdly_many_layers_is_refused(tmp_path: Path, said: Said) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 32, "num_hidden_layers": 10**9}))
    with ends(), pytest.raises(SpecDecError) as error:
        read_head(tmp_path)
    said(error, "num_hidden_layers", 10**9)
