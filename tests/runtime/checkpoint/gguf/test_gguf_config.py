"""Every key of a GGUF file's model is used, changes nothing at its value, or is refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llamacpp_tokens import write_file
from quantized import Q, save_gguf
from sentences import Said

from runtime.checkpoint.gguf.config import config_of
from runtime.model.pretrained import parse_language_model
from runtime.util.errors import SpecDecError

Edit = Callable[[gguf.GGUFWriter], None]


def with_values(**values: Any) -> Edit:
    """Keys of the model, `__` for a dot."""

    def write(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            key = f"llama.{name.replace('__', '.')}"
            kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kind[type(value)](key, value)

    return write


def with_value(key: str, value: Any) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    return edit


REFUSED: list[tuple[str, Edit]] = [
    ("llama.attention.scale` 0.125", with_values(attention__scale=0.125)),
    ("llama.final_logit_softcapping` 30.0", with_values(final_logit_softcapping=30.0)),
    ("llama.attention.clamp_kqv` 8.0", with_values(attention__clamp_kqv=8.0)),
    ("llama.attention.causal` False", with_values(attention__causal=False)),
    ("llama.attention.sliding_window` 4096", with_values(attention__sliding_window=4096)),
    ("llama.attention.value_length` 16", with_values(attention__value_length=16)),
    ("llama.rope.dimension_count` 16", with_value("llama.rope.dimension_count", 16)),
    ("llama.expert_shared_count` 1", with_values(expert_shared_count=1)),
    ("llama.rope.scaling.type` ntk", with_values(rope__scaling__type="ntk", rope__scaling__factor=4.0)),
    ("llama.rope.scaling.attn_factor` 1.1875", with_values(rope__scaling__attn_factor=1.1875)),
    (
        "llama.rope.scaling.original_context_length` 0",
        with_values(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=0),
    ),
    ("llama.what_is_to_come` 1", with_values(what_is_to_come=1)),
]


@pytest.mark.parametrize(("message", "edit"), REFUSED, ids=[message for message, _ in REFUSED])
def test_key_that_would_change_the_model_is_refused_by_name(
    message: str, edit: Edit, tmp_path: Path, said: Said
) -> None:
    with pytest.raises(SpecDecError) as error:
        config_of(write_file(tmp_path / "model.gguf", 4, edit))
    said(error, *message.split("` "))
    assert "safetensors" in str(error.value.hint)


@pytest.mark.parametrize(
    ("words", "edit"),
    [
        (
            "not a number; llama.attention.layer_norm_rms_epsilon",
            with_values(attention__layer_norm_rms_epsilon=math.nan),
        ),
        ("`rope_theta`; 0.0", with_values(rope__freq_base=0.0)),
        (
            "`llama.attention.head_count` 0; `blk.0.attn_q.weight` is [32, 32]",
            with_values(attention__head_count=0, attention__key_length=32),
        ),
    ],
)
def test_value_that_nothing_can_be_computed_of_is_refused(words: str, edit: Edit, tmp_path: Path, said: Said) -> None:
    path = write_file(tmp_path / "model.gguf", 4, edit)
    with pytest.raises(SpecDecError) as error:
        parse_language_model(config_of(path), path.name)
    said(error, *words.split("; "))


def without(name: str) -> Edit:
    return lambda writer: writer.tensors[0].pop(name)


def with_factors(make: Callable[[int], Any]) -> Edit:
    """Rotary factors, made for the number of pairs in a head."""

    def edit(writer: gguf.GGUFWriter) -> None:
        num_pairs = writer.kv_data[0]["llama.attention.key_length"].value // 2
        writer.add_tensor("rope_freqs.weight", make(num_pairs).astype(np.float32))

    return edit


def with_alignment(alignment: int) -> Edit:
    """Write an alignment into a file whose tensors lie at multiples of 32."""
    return lambda writer: writer.add_uint32("general.alignment", alignment)


CONTRADICTIONS = {
    "longrope of another size": ("phi3-long", with_value("phi3.rope.dimension_count", 32), "24; 16"),
    "K/V heads of two numbers in layers of a kind": (
        *("gemma4", with_value("gemma4.attention.head_count_kv", [2, 2, 1, 2])),
        "`gemma4.attention.head_count_kv`; [2, 2, 1, 2]",
    ),
    "no factors": ("gemma4", without("rope_freqs.weight"), "rope_freqs.weight"),
    "no layers": ("llama", with_value("llama.block_count", 0), "`llama.block_count`; 0"),
    "a layer that is not counted": (
        "gemma4",
        with_value("gemma4.block_count", 1),
        "`gemma4.block_count`; 1; `blk.1.layer_output_scale.weight`",
    ),
    "factors of zero": ("llama", with_factors(np.zeros), "`rope_freqs.weight`; 32; 0"),
    "more experts used than there are": (
        *("gemma4-moe", with_value("gemma4.expert_used_count", 9)),
        "`gemma4.expert_used_count`; 9; `gemma4.expert_count` 8",
    ),
    "another width": (
        *("llama", with_value("llama.embedding_length", 128)),
        "`llama.embedding_length` 128; `token_embd.weight` is [32, 256]; [32, 128]",
    ),
    "heads of the queries": (
        *("llama", with_value("llama.attention.head_count", 8)),
        "`llama.attention.head_count` 8; `llama.attention.key_length` 64; `blk.0.attn_q.weight` is [256, 256]",
    ),
    "heads of queries, keys and values together": (
        *("phi3", with_value("phi3.attention.head_count_kv", 4)),
        "`phi3.attention.head_count` 4; `phi3.attention.head_count_kv` 4; `blk.0.attn_qkv.weight` is [512, 256]",
    ),
    "another number of experts": (
        *("qwen3moe", with_value("qwen3moe.expert_count", 16)),
        "`qwen3moe.expert_count` 16; `blk.0.ffn_down_exps.weight` is [8, 256, 256]; [16, 256, 256]",
    ),
    "an alignment of no power of 2": ("llama", with_alignment(33), "`general.alignment`; 33"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(name: str, tmp_path: Path, said: Said) -> None:
    architecture, edit, words = CONTRADICTIONS[name]
    path = tmp_path / "model.gguf"
    save_gguf(path, Q.F32, architecture=architecture, edit=edit)
    with pytest.raises(SpecDecError) as error:
        config_of(path)
    said(error, *words.split("; "))


def test_keys_that_change_nothing_are_passed(tmp_path: Path) -> None:
    plain = config_of(write_file(tmp_path / "plain.gguf", 4, lambda writer: None))
    edit = with_values(
        attention__causal=True, expert_count=0, attention__scale=0.0, logit_scale=1.0, rope__scaling__finetuned=False,
        rope__scaling__type="none", rope__scaling__factor=4.0, rope__scaling__original_context_length=2048,
        tensor_data_layout="Meta AI original pth", attention__key_length=32, attention__value_length=32,
    )  # fmt: skip
    assert config_of(write_file(tmp_path / "model.gguf", 4, edit)) == plain
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    other = write_file(tmp_path / "other.gguf", 4, lambda writer: writer.add_string("qwen2.what", "of another family"))
    assert config_of(other) == plain


@pytest.mark.parametrize(
    "edit",
    [
        with_values(rope__scale_linear=4.0),
        with_values(rope__scaling__factor=4.0),
        with_values(rope__scaling__type="linear", rope__scaling__factor=4.0),
    ],
    ids=["the older key", "a factor without a type", "linear"],
)
def test_linear_scaling_is_read_however_it_is_said(edit: Edit, tmp_path: Path) -> None:
    """Scaling as llama.cpp reads it (`load_hparams`): linear is the default, and `rope.scale_linear` an older name."""
    found = config_of(write_file(tmp_path / "model.gguf", 4, edit))["rope_parameters"]
    assert found == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
