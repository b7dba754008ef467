"""Directories of models as people have them: read as transformers reads them, told of, or refused in a sentence."""

import copy
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import PUBLISHED, RUN, STDS, seed_of, shrunk, write_model, write_random
from safetensors.torch import load_file, save_file
from sentences import Said
from shared import edit_json
from tiny import build_tiny, hf_greedy, make_config, make_model, repetitive_prompt, run_convert
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.builder.artefacts import check_directory
from runtime.builder.engine_cache import _identity, settings_of
from runtime.checkpoint.quant.formats import without_quantization
from runtime.checkpoint.resolve import files_of_model, read_model_config
from runtime.core.request import Request
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.model.model import probe_config
from runtime.model.pretrained import parse_language_model, warn_of_unread_keys
from runtime.text.text import find_end_ids
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import write_json
from scripts.tools.families import small_config
from specdec_cli import LLM, SamplingParams

PROMPT = repetitive_prompt(0, 20)


def saved(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    make_model(family, **overrides).save_pretrained(directory)
    return directory


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def hugging_face(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return hf_greedy(model, PROMPT, 12)


def answer(directory: Path, work_dir: Path) -> list[int]:
    with Engine.open(build_tiny(directory, work_dir, dtype="float32")) as engine:
        (tokens,) = (s.output_tokens for s, _ in generate(engine, [Request(0, tuple(PROMPT), 12)]) if s.finish_reason)
    return tokens


def refusal(directory: Path, work_dir: Path) -> SpecDecError:
    with pytest.raises(SpecDecError) as error:
        run_convert(directory, work_dir)
    assert "\n" not in f"{error.value.message}{error.value.hint}"
    return error.value


def test_one_file_counts_beside_an_index_as_for_transformers(tmp_path: Path, said: Said) -> None:
    model_dir = saved(tmp_path / "model")
    other = make_model("llama", bos_token_id=3, hidden_size=32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1)
    other.save_pretrained(tmp_path / "other", max_shard_size="20KB")
    for path in (tmp_path / "other").glob("model*"):
        shutil.copyfile(path, model_dir / path.name)
    assert (model_dir / "model.safetensors.index.json").is_file()
    with pytest.warns(SpecDecWarning) as warned:
        tokens = answer(model_dir, tmp_path / "built")
    said(warned, "`model.safetensors.index.json`")
    assert tokens == hugging_face(model_dir) != hugging_face(tmp_path / "other")


def saved_in_subdirectories(directory: Path) -> Path:
    """A model with a file for each layer in a directory of its own, of the same name, and `./rest.safetensors`."""
    saved(directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    place = {
        name: f"{'.'.join(name.split('.')[:3])}/layer.safetensors" if ".layers." in name else "./rest.safetensors"
        for name in weights
    }
    for file in set(place.values()):
        (directory / file).parent.mkdir(exist_ok=True)
        save_file({name: weights[name] for name in weights if place[name] == file}, directory / file, {"format": "pt"})
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": place})
    return directory


def test_shards_in_subdirectories_are_read_as_by_transformers(tmp_path: Path) -> None:
    model_dir = saved_in_subdirectories(tmp_path / "model")
    assert answer(model_dir, tmp_path / "built") == hugging_face(model_dir)


def test_shards_in_subdirectories_are_part_of_the_identity_and_of_the_check(tmp_path: Path) -> None:
    model_dir = saved_in_subdirectories(tmp_path / "model")
    settings, device = settings_of({"max_seq_len": 128}), torch.device("cpu")
    found, name = files_of_model(model_dir), _identity(model_dir, settings, device)
    shards = sorted(model_dir.rglob("*.safetensors"))
    assert len(shards) >= 3 and set(shards) <= set(found)
    checks = {check.name: check.status for check in check_directory(model_dir).files}
    assert {str(shard.relative_to(model_dir)) for shard in shards} <= set(checks)
    first, second = shards[:2]
    for shard, other in ((first, second), (second, first)):  # the contents of two shards of one name change places
        shutil.move(shard, shard.with_suffix(".old"))
        shutil.copyfile(other if other.exists() else other.with_suffix(".old"), shard)
    assert _identity(model_dir, settings, device) != name
    second.unlink()
    assert {check.name: check.status for check in check_directory(model_dir).files}[
        str(second.relative_to(model_dir))
    ] == "missing"


@pytest.mark.parametrize("name", ["../other.safetensors", "a/../../other.safetensors", "{outside}/other.safetensors"])
def test_shards_outside_the_directory_are_refused(name: str, tmp_path: Path, said: Said) -> None:
    model_dir, name = saved(tmp_path / "model"), name.format(outside=tmp_path)
    weights = model_dir / "model.safetensors"
    tensors = list(load_file(weights))
    weights.rename(tmp_path / "other.safetensors")
    write_json(model_dir / "model.safetensors.index.json", {"weight_map": dict.fromkeys(tensors, name)})
    said(refusal(model_dir, tmp_path / "out"), name)


def test_an_adapter_beside_a_model_is_told_of_and_one_alone_refused(tmp_path: Path, said: Said) -> None:
    model_dir = saved(tmp_path / "model")
    (model_dir / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')
    with pytest.warns(SpecDecWarning) as warned:
        run_convert(model_dir, tmp_path / "out")
    said(warned)
    (model_dir / "config.json").unlink()
    with pytest.raises(SpecDecError) as raised:
        read_model_config(model_dir)
    said(raised)


def test_a_model_without_its_head_is_refused_unless_it_is_tied(tmp_path: Path, said: Said) -> None:
    """transformers draws the head at random: nothing to be equal to."""
    model_dir = saved(tmp_path / "model")
    change_tensors(model_dir, lambda own: {name: tensor for name, tensor in own.items() if name != "lm_head.weight"})
    loaded, report = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    error = refusal(model_dir, tmp_path / "out")
    said(error, "`lm_head`", "tie_word_embeddings: true")
    edit_json(model_dir / "config.json", tie_word_embeddings=True)
    assert answer(model_dir, tmp_path / "built") == hugging_face(model_dir)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.layers.1.mlp.up_proj.weight"), ("gpt-neox", "gpt_neox.layers.1.attention.dense.weight")],
    ids=["own names", "renamed"],
)
def test_a_model_that_lacks_a_weight_is_refused_by_its_path(family: str, name: str, tmp_path: Path, said: Said) -> None:
    model_dir = saved(tmp_path / "model", family)
    assert name in load_file(model_dir / "model.safetensors")
    change_tensors(model_dir, lambda own: {one: tensor for one, tensor in own.items() if one != name})
    said(refusal(model_dir, tmp_path / "out"), name, f"`{model_dir}`")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("qwen3-moe", {"num_experts": 0, "num_local_experts": None}, "model.layers.0.mlp.down_proj.weight"),
        (
            "qwen3-moe",
            {"num_experts": 4, "num_local_experts": None},
            "`model.layers.0.mlp.gate.weight` is [8, 32]; [4, 32]",
        ),
        ("mixtral", {"num_local_experts": 8}, "[4, 96, 32]; [8, 96, 32]; model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_experts_that_the_config_has_otherwise_are_told(
    family: str, values: dict[str, Any], words: str, tmp_path: Path, said: Said
) -> None:
    model_dir = saved(tmp_path / "model", family)
    edit_json(model_dir / "config.json", **values)
    said(refusal(model_dir, tmp_path / "out"), *words.split("; "))


def test_a_rope_without_a_type_is_told_of_and_as_for_transformers(tmp_path: Path, said: Said) -> None:
    model_dir = saved(tmp_path / "model")
    expected = hugging_face(model_dir)
    edit_json(model_dir / "config.json", rope_scaling={"factor": 8.0}, rope_parameters=None)
    with pytest.warns(SpecDecWarning) as warned:
        assert answer(model_dir, tmp_path / "built") == expected == hugging_face(model_dir)
    said(warned, "`rope_scaling.factor` 8.0", "`default`")


def test_layers_that_predict_further_are_left_out_as_by_transformers(tmp_path: Path, said: Said) -> None:
    """DeepSeek V3 has 61 layers, and its file a further one; transformers knows that by the number 61."""
    config = shrunk(PUBLISHED["DeepSeek-V3"].config, vocab_size=512)
    del config["quantization_config"]
    model_dir = tmp_path / "model"
    expected = write_model(config, model_dir, seed_of("further"), prompt=PROMPT, num_new_tokens=12)
    own = [name for name in load_file(model_dir / "model.safetensors") if name.startswith("model.layers.1.")]
    names = {name: name.replace("model.layers.1.", "model.layers.2.") for name in own} | {
        "eh": "model.layers.2.eh_proj.weight"
    }
    change_tensors(
        model_dir,
        lambda tensors: tensors | {names[name]: tensors.get(name, torch.ones(4, 4)).clone() for name in names},
    )
    with pytest.warns(SpecDecWarning) as warned:
        tokens = answer(model_dir, tmp_path / "built")
    said(warned)
    assert tokens == expected
    ignored = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)))
    assert any("61" in pattern for pattern in ignored._keys_to_ignore_on_load_unexpected)


def test_end_ids_of_the_config_count_where_no_other_file_names_them(tmp_path: Path) -> None:
    config = shrunk(PUBLISHED["Llama-3.1-8B-Instruct"].config, vocab_size=512)
    assert len(config["eos_token_id"]) == 3
    write_random(config | {"eos_token_id": [401, 408, 409]}, tmp_path / "model", 0, STDS[0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    engine_dir = build_tiny(tmp_path / "model", tmp_path / "built")
    with Engine.open(engine_dir) as engine:
        found = find_end_ids(engine_dir, engine.config.pretrained_config, None)
    assert found == set(model.generation_config.eos_token_id) == {401, 408, 409}


@pytest.mark.parametrize("kind", ["quanto", "MLX"])
def test_formats_that_are_not_read_are_refused_by_their_names(kind: str, tmp_path: Path, said: Said) -> None:
    model_dir = saved(tmp_path / "model")
    if kind == "quanto":
        (model_dir / "quanto_qmap.json").write_text('{"model.layers.0.mlp.up_proj": {"weights": "qint8"}}')
    else:
        config = {"group_size": 64, "bits": 4}
        edit_json(model_dir / "config.json", quantization=config, quantization_config=config)
    said(refusal(model_dir, tmp_path / "out"), kind)


def test_an_engine_whose_tokenizer_cannot_be_read_takes_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr("runtime.checkpoint.resolve.find_spec", lambda name: None)
    model_dir = saved(tmp_path / "model")
    (model_dir / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.warns(SpecDecWarning) as warned:
        engine_dir = build_tiny(model_dir, tmp_path / "built", dtype="float32")
    said(warned, engine_dir / "tokenizer.model")  # not where it was built
    with pytest.warns(SpecDecWarning) as warned:
        llm = LLM(engine_dir)
    said(warned, engine_dir / "tokenizer.model")
    with llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        assert output.token_ids == hugging_face(model_dir) and output.text is None
        with pytest.raises(SpecDecError) as raised:
            llm.generate("the dog")
        said(raised)


LLAMA3 = PUBLISHED["Llama-3.1-8B"].config["rope_scaling"]
TWO_ROPES: dict[str, dict[str, Any]] = {
    "`rope_theta` is 500000.0, and `rope_parameters.rope_theta` 10000.0": {
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "`rope_scaling.factor` is 8.0, and `rope_parameters.factor` 4.0": {
        "rope_scaling": LLAMA3,
        "rope_parameters": LLAMA3 | {"factor": 4.0, "rope_theta": 500000.0},
    },
    "`original_max_position_embeddings` is 64, and `rope_scaling.original_max_position_embeddings` 8192": {
        "original_max_position_embeddings": 64,
        "rope_scaling": LLAMA3,
    },
}


@pytest.mark.parametrize("message", TWO_ROPES)
def test_a_rope_that_is_said_twice_and_differently_is_refused(message: str, tmp_path: Path, said: Said) -> None:
    data = shrunk(PUBLISHED["ALLaM-7B-Instruct"].config)
    data = {name: value for name, value in data.items() if not name.startswith("rope")} | TWO_ROPES[message]
    with pytest.raises(SpecDecError) as error:
        parse_language_model(data, "config.json")
    said(error)
    assert error.value.message.endswith(message)


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "`factor`; 0": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "`low_freq_factor`; nan": {"rope_scaling": LLAMA3 | {"low_freq_factor": math.nan}},
    "`short_factor`; -1": {
        "rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1, -1], "long_factor": [1, 1]},
        "original_max_position_embeddings": 64,
    },
    "spiral; llama3": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
    "`rope_scaling`; 'linear'": {"rope_scaling": "linear"},
    "`torch_dtype`; fp32": {"torch_dtype": "fp32"},
    "attention heads; 0": {"num_attention_heads": 0},
    "`rms_norm_eps`; -1.0": {"rms_norm_eps": -1.0},
    "`use_sliding_window` is true; None": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
    "`floor_scale`; 0": {"model_type": "llama4_text", "floor_scale": 0},
    "no sliding_attention": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        "layer_types": ["full_attention"] * 2,
    },
    "`layer_types`; -3": {
        **{"model_type": "gemma3_text", "sliding_window": -3},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "`num_local_experts` 8; `num_experts` 16": {
        **{"model_type": "mixtral", "num_local_experts": 8, "num_experts": 16, "num_experts_per_tok": 2}
    },
    "`n_group` 3; `n_routed_experts` 8": {"model_type": "deepseek_v3", "n_group": 3, "n_routed_experts": 8},
    "`num_experts_per_tok` 4; `experts_per_token` 2": {
        **{"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 2}
    },
    "`sliding_window_pattern` 1; layer 0 of `layer_types` is sliding_attention": {
        **{"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 1},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "`sliding_window_pattern` 'LLLG'; layer 0 of `layer_types` is full_attention": {
        **{"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLLG"},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    **{
        f"`{name}`; {value}": {name: value}
        for name, value in {
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 1.0, "clip_qkv": 1.0, "alibi": True},
            **{"residual_multiplier": 0.5, "logit_scale": 2},
        }.items()
    },
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
def test_a_config_that_nothing_can_be_computed_of_is_refused(
    words: str, said: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    data = shrunk(PUBLISHED["ALLaM-7B-Instruct"].config)
    if any(name.startswith("rope") for name in IMPOSSIBLE[words]):
        data = {name: value for name, value in data.items() if not name.startswith("rope")}
    with pytest.raises(SpecDecError) as error:
        parse_language_model(data | IMPOSSIBLE[words], "config.json")
    said(error, *words.split("; ")[:2], "`config.json`")
    assert len(error.value.message) < 200
    assert capfd.readouterr() == ("", "")  # no line of transformers'


# By published config: what it says to nobody, as transformers' code of the family shows.
UNREAD = {
    "phi-1": {"rotary_dim"},  # `partial_rotary_factor` is read
    "LFM2.5-VL-1.6B": {  # `hidden_size`, `norm_eps`
        f"text_config.{name}" for name in ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out")
    },
    "Nemotron-3-Nano-30B-A3B": {"norm_eps"},  # `layer_norm_epsilon`
    "gemma-2-9b": {"sliding_window_size"},  # `sliding_window`
}


@pytest.mark.parametrize("name", [*UNREAD, "Qwen3.5-9B", "DeepSeek-V3", "Llama-4-Scout-17B-16E", "falcon-mamba-7b"])
def test_values_that_no_code_reads_are_told(name: str, said: Said) -> None:
    data = {key: value for key, value in PUBLISHED[name].config.items() if key != "quantization_config"}
    whole = copy.deepcopy(data)
    whole.get("text_config", whole)["slidng_window"] = 77
    misspelled = "text_config.slidng_window" if "text_config" in whole else "slidng_window"
    for config, more in ((data, set()), (whole, {misspelled})):
        wanted = UNREAD.get(name, set()) | more
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_unread_keys(parse_language_model(config, "config.json")[0], config, "config.json")
        found = [set(re.findall(r"`([\w.]+)` ", str(one.message))) - {"config.json"} for one in caught]
        assert found == ([wanted] if wanted else [])
    if name == "Qwen3.5-9B":
        said(str(caught[0].message), "`text_config.slidng_window` 77")


def misspelled(name: str, value: Any, *inside: str) -> Callable[[dict[str, Any]], None]:
    def write(data: dict[str, Any]) -> None:
        for part in inside:
            data = data.setdefault(part, {})
        data[name] = value

    return write


UNREAD_WITHIN: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "`rope_scaling.fcator` 3.0": ("Llama-3.1-8B", misspelled("fcator", 3.0, "rope_scaling")),
    "`rope_parameters.factor` 8.0; `default`": (
        "Mistral-7B-Instruct-v0.3",
        misspelled("rope_parameters", {"rope_type": "default", "rope_theta": 1000000.0, "factor": 8.0}),
    ),
    "`rope_parameters.full_attention.beta_fast` 32; `linear`": (
        "gemma-3-1b-it",
        misspelled(
            "rope_parameters",
            {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000, "beta_fast": 32}},
        ),
    ),
    "`quantization_config.wieght_block_size` [64, 64]": (
        "Qwen3-8B-FP8",
        misspelled("wieght_block_size", [64, 64], "quantization_config"),
    ),
}


@pytest.mark.parametrize("words", UNREAD_WITHIN)
def test_values_within_others_that_no_code_reads_are_told(words: str, said: Said) -> None:
    name, write = UNREAD_WITHIN[words]
    said(unread_of(PUBLISHED[name].config, write), *words.split("; "))


@pytest.mark.parametrize(
    ("model_type", "words", "values"),
    [
        ("gptj", "`rotary_dim` 5", {"rotary_dim": 5}),
        ("glm4v_text", "`mrope_section` [1, 2, 3]; 6; 4", {"mrope_section": [1, 2, 3]}),
    ],
)
def test_positions_that_turn_no_heads_are_told(model_type: str, words: str, values: dict[str, Any], said: Said) -> None:
    data = small_config(model_type).to_dict()
    place = data["rope_parameters"] if "mrope_section" in values else data
    place |= values
    config, _ = parse_language_model(data, "config.json")
    with pytest.raises(SpecDecError) as error:
        probe_config(config)
    said(error, *words.split("; "))
    assert "dimension" not in error.value.message  # torch's words


def unread_of(config: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> str:
    """The one warning of a config that `write` changed."""
    data = copy.deepcopy(config)
    write(data)
    plain = without_quantization(data)
    with pytest.warns(SpecDecWarning) as warned:
        warn_of_unread_keys(parse_language_model(plain, "config.json")[0], data, "config.json")
    (warning,) = warned
    assert str(warning.message).count("`") == 4 + 2 * (" in a rope " in str(warning.message))
    return str(warning.message)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", RUN)
def test_values_of_published_configs_are_read(name: str) -> None:
    data = PUBLISHED[name].config
    config, _ = parse_language_model(without_quantization(data), "config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in UNREAD else "error")
        warn_of_unread_keys(config, data, "config.json")


@pytest.mark.parametrize(
    ("family", "where", "name", "value"),
    [("dbrx", "ffn_config", "moe_num_experts", 0), ("jetmoe", None, "kv_channels", -8), ("llama", None, "head_dim", 0)],
)
def test_a_size_below_one_is_told(
    family: str, where: str | None, name: str, value: int, tmp_path: Path, said: Said
) -> None:
    data = make_config(family).to_dict()
    (data if where is None else data[where])[name] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    error = refusal(tmp_path, tmp_path / "out")
    said(error, family, f"`{name}` {value}")
    assert "token_id" not in error.message
