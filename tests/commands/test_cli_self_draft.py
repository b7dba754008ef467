"""A model that drafts for itself, on the command line: built, run in both modes, and refused where it cannot be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPT, PROMPTS, Specdec, assert_valid, each, ids_of
from sentences import Said
from shared import record_anew
from tiny import hf_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

DRAFTS = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6]
SIZES = ["--max-input-len", 64, "--max-seq-len", 128, "--compiler", "none"]


def test_it_goes_the_whole_way(
    specdec: Specdec, llama_checkpoint_dir: Path, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:  # fmt: skip
    engine = tmp_path / "engine"
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", engine, *DRAFTS, *SIZES]
    build += ["--self-draft", "int4"]
    shown = specdec(*build)
    assert "copy that drafts" in shown.stdout and "linear weights in int4, in groups of 64" in shown.stdout
    document = specdec(*build, "--self-draft-group-size", 16, "--force", "--json").document
    assert_valid("build", document)
    assert document["engine"]["build_config"]["self_draft"] == {"qformat": "int4", "group_size": 16}
    assert document["engine"]["self_draft_check"]["relative_difference"] < 1e-4
    assert document["engine"]["self_draft_costs"]
    assert specdec("verify", engine).exit_code == 0
    expected = [hf_greedy(llama, tokenizer(prompt)["input_ids"], 8, 299) for prompt in PROMPTS[:2]]
    run = ["run", "--engine-dir", engine, *each("--input-text", PROMPTS[:2]), "--max-output-len", 8, "--end-id", 299]
    for mode in ("fixed", "auto"):
        found = specdec(*run, "--self-draft-config", "6", "--draft-len-mode", mode, "--json").document
        assert_valid("run", found)
        assert ids_of(found) == expected
        assert found["settings"]["drafters"] == ["self"]
        assert mode == "auto" or found["total"]["num_accepted_draft_tokens"] > 0
        assert mode == "auto" or found["total"]["draft_model_time_s"] > 0
        assert found["draft_engine"] is None


@pytest.mark.parametrize(("flags", "values"), [(["--qformat", "int4"], "4"), (["--tp-size", 2], "tp_size; 2")])
def test_model_in_as_few_bits_and_split_model_are_refused(
    flags: list[Any], values: str, specdec: Specdec, llama_dir: Path, tmp_path: Path, said: Said
) -> None:
    ckpt, engine = tmp_path / "ckpt", tmp_path / "engine"
    assert specdec("convert", "--model-dir", llama_dir, "--output-dir", ckpt, *flags).exit_code == 0
    build = ["build", "--checkpoint-dir", ckpt, "--output-dir", engine, *DRAFTS, *SIZES, "--self-draft", "int4"]
    refused = specdec(*build)
    assert refused.exit_code == 1
    said(refused, *values.split("; "), "`--self-draft`")
    assert "Traceback" not in refused.stderr
    assert not engine.exists()


@pytest.mark.parametrize(
    ("flags", "wrong", "hint"),
    [
        (["--self-draft", "int3", *DRAFTS], "`--self-draft`; int8; int4; int3", ""),
        ([*DRAFTS, "--self-draft-group-size", 32], "32", "`--self-draft int4`"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[Any], wrong: str, hint: str, specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path, said: Said
) -> None:
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", *SIZES]
    refused = specdec(*build, *flags)
    assert refused.exit_code == 2
    said(refused, *wrong.split("; "), *hint.split("; "))
    assert not (tmp_path / "engine").exists()


def test_engine_without_a_copy_is_refused(specdec: Specdec, llama_engine_dir: Path, said: Said) -> None:
    refused = specdec("run", "--engine-dir", llama_engine_dir, "--input-text", PROMPT, *["--spec-decode-algo", "SELF"])
    assert refused.exit_code == 1
    said(refused, "`specdec build --self-draft int4`")


def test_damaged_copy_is_noticed(specdec: Specdec, self_draft_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    engine = tmp_path / "engine"
    run = ["run", "--engine-dir", engine, "--input-text", PROMPT, "--self-draft-config", "4"]
    shutil.copytree(self_draft_engine_dir, engine)
    weights = engine / "self-draft" / "rank0.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = specdec(*run)
    assert refused.exit_code == 1 and "self-draft/rank0.safetensors" in refused.stderr
    assert specdec("verify", engine).exit_code == 1
    weights.write_bytes(content[:1000])
    record_anew(engine)
    refused = specdec(*run)
    assert refused.exit_code == 1 and "Traceback" not in refused.stderr
    said(refused)
    weights.unlink()
    record_anew(engine)
    refused = specdec(*run)
    assert refused.exit_code == 1
    said(refused, "self-draft/rank0.safetensors")


def test_engine_without_its_copys_costs_drafts_with_fixed_lengths_only(
    specdec: Specdec, self_draft_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(self_draft_engine_dir, engine)
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps(config | {"self_draft_costs": []}))
    record_anew(engine)
    run = ["run", "--engine-dir", engine, "--input-text", PROMPT, "--self-draft-config", "4"]
    assert specdec(*run).exit_code == 0
    refused = specdec(*run, "--draft-len-mode", "auto")
    assert refused.exit_code == 1
    said(refused)
