"""The first command as users of other tools type it: a model as the first word, a drafter by `--speculative-config`."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import PROMPT, Specdec, edit_json, ids_of
from quantized import Q, save_gguf
from sentences import Said

CONFIGS = [
    ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}, "NGRAM 5 3"),
    ({"decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 3, "is_keep_all": True}, "NGRAM 5 3"),
    ({"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 3}, "NGRAM 5 3"),
]


def test_engines_models_and_prompts_by_their_place(
    specdec: Specdec, llama_dir: Path, llama_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run WORD PROMPT` is `run --engine-dir WORD --input-text PROMPT`, and so for models and the usual engine."""
    monkeypatch.chdir(tmp_path)
    flags = ["--max-output-len", 8, "--end-id", 299, "--mode", "leader", "--json"]
    by_flag = specdec("run", "--engine-dir", llama_engine_dir, "--input-text", PROMPT, *flags).document
    assert ids_of(specdec("run", llama_engine_dir, PROMPT, *flags).document) == ids_of(by_flag)
    shutil.copytree(llama_engine_dir, "engine_outputs")
    usual = specdec("run", PROMPT, "hello", *flags).document
    assert ids_of(usual)[:1] == ids_of(by_flag) and [one["prompt"] for one in usual["requests"]] == [PROMPT, "hello"]
    run = ["run", llama_dir, "-p", PROMPT, "-n", 8, "-c", 64, "--compiler", "none", *flags[2:]]
    by_model = specdec(*run, "--trust-remote-code").document
    assert by_model["engine"]["build_config"]["max_seq_len"] == 74 and len(ids_of(by_model)[0]) == 8
    assert by_model["requests"][0]["prompt"] == PROMPT


def test_positions_beyond_the_usual_room_are_told(specdec: Specdec, llama_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(llama_dir, tmp_path / "model")
    edit_json(model / "config.json", max_position_embeddings=8192)
    run = ["run", model, PROMPT, "--max-output-len", 2, "--compiler", "none", "--max-batch-size", 1]
    told = specdec(*run).stderr
    assert all(word in told for word in ("4,096", "8,192", "`--max-seq-len`")), told
    assert "8,192" not in specdec(*run, "--max-seq-len", 64).stderr


@pytest.mark.parametrize(("config", "same"), CONFIGS)
def test_a_speculative_config_of_others_is_our_flags(
    config: dict[str, object], same: str, specdec: Specdec, llama_engine_dir: Path
) -> None:
    run = ["run", llama_engine_dir, PROMPT, "--max-output-len", 8, "--json"]
    algorithm, length, *size = same.split()
    flags = ["--spec-decode-algo", algorithm, "--spec-decode-max-draft-len", length]
    flags += ["--max-matching-ngram-size", *size] if size else []
    ours, theirs = (
        specdec(*run, *how).document["settings"] for how in (flags, ["--speculative-config", json.dumps(config)])
    )
    assert ours == theirs and ours["drafters"] == [algorithm.lower()]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["run", "--engine-dir", "model.gguf", "a"], ("GGUF", "`specdec run model.gguf`")),
        (["chat", "--engine-dir", "ckpt"], ("checkpoint", "`specdec build --checkpoint-dir ckpt`")),
        (["run", "ckpt", "a"], ("checkpoint", "`specdec build --checkpoint-dir ckpt`")),
        (["run", "nothing", "a"], ("nothing/config.json",)),
        (["run", "a b"], ("engine_outputs", "`specdec run demo`")),
        (["run", "--model-dir"], ("`specdec run --help-all`",)),
        (["run", "demo:Q4_K_M", "a"], ("demo:Q4_K_M", "`demo --quantization int4`")),
    ],
)
def test_what_a_thing_is_is_said(
    arguments: list[str], values: tuple[str, ...], specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, said: Said,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("ckpt").symlink_to(llama_checkpoint_dir)
    save_gguf(tmp_path / "model.gguf", Q.Q4_0)
    Path("nothing").mkdir()
    result = specdec(*arguments)
    assert result.exit_code in (1, 2) and result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    said(result, *values)


def test_tune_takes_conversations(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    """Conversations become prompts by the tokenizer's chat template; a tokenizer without one is one error."""
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "The dog"}]}) + "\n")
    result = specdec("tune", llama_engine_dir, "--input-file", lines, "--ngram-config", "4,2")
    assert result.exit_code == 1 and "Traceback" not in result.stderr
    said(result, "chat template")
