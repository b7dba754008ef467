"""`convert` and `build`: each option changes what is written or said."""

import getpass
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import PROMPT, Result, Specdec, ids_of, tree
from quantized import Q, save_gguf
from safetensors.torch import load_file
from sentences import Said

Command = Callable[..., Result]


@pytest.fixture
def convert(specdec: Specdec, llama_dir: Path, tmp_path: Path) -> Command:
    """`convert(…)`: `specdec convert` of the tiny Llama into `tmp_path / "ckpt"`."""
    return lambda *arguments: specdec(
        "convert", "--model-dir", llama_dir, "--output-dir", tmp_path / "ckpt", *arguments
    )


@pytest.fixture
def build(specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path) -> Command:
    """`build(…)`: `specdec build` of the tiny Llama into `tmp_path / "engine"`, without compiling."""
    where = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", "--compiler", "none"]
    return lambda *arguments: specdec("build", *where, "--max-input-len", 64, *arguments)


DRAFTS = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_dtype_is_that_of_the_weights(convert: Command, llama_dir: Path, tmp_path: Path, dtype: str) -> None:
    result = convert("--dtype", dtype)
    expected = "float32" if dtype == "auto" else dtype
    assert f"Converted llama to {expected}: " in result.stdout
    assert result.stderr == ""
    tensors = load_file(tmp_path / "ckpt" / "rank0.safetensors")
    source = load_file(llama_dir / "model.safetensors")
    assert tensors.keys() == source.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, source[name].to(getattr(torch, expected)), rtol=0, atol=0)


@pytest.mark.parametrize("command", ["convert", "build"])
def test_force_replaces_what_specdec_wrote(
    command: str, request: pytest.FixtureRequest, tmp_path: Path, said: Said
) -> None:
    call = request.getfixturevalue(command)
    directory = tmp_path / ("ckpt" if command == "convert" else "engine")
    assert call().exit_code == 0
    (directory / "left-over").write_text("x")
    before = tree(tmp_path)
    refused = call()
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    said(refused)
    assert tree(tmp_path) == before
    assert call("--force").exit_code == 0
    assert tree(tmp_path) == [name for name in before if "left-over" not in name]


def built(tmp_path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tmp_path / "engine" / "config.json").read_text())
    return config


def test_max_seq_len_grows_by_the_draft_length(build: Command, tmp_path: Path) -> None:
    assert build("--max-seq-len", 128, *DRAFTS).exit_code == 0
    config = built(tmp_path)["build_config"]
    assert (config["max_seq_len"], config["max_draft_len"]) == (134, 6)
    assert config["speculative_decoding_mode"] == "draft_tokens_external"


def test_lengths_are_by_default_what_the_model_has(
    specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path
) -> None:
    where = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", "--compiler", "none"]
    result = specdec("build", *where)
    assert result.exit_code == 0, result.stderr
    assert "input 255, input + output 256 tokens" in result.stdout and "up to 10 tokens" in result.stdout


@pytest.mark.slow
def test_the_first_commands_work_as_they_are_written_in_an_empty_directory(
    specdec: Specdec, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """The lines of `scripts/first_commands.sh`, and what they wrote is not written over."""
    monkeypatch.chdir(tmp_path)
    lines = (Path(__file__).parents[2] / "scripts" / "first_commands.sh").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("specdec ")]
    results = {command[0]: specdec(*command) for command in commands}
    assert [result.exit_code for result in results.values()] == [0, 0, 0, 0], [r.stderr for r in results.values()]
    assert [*results] == ["convert", "build", "run", "summarize"]
    said(results["run"])
    assert 'Input [Text 0]: "Born in north-east France' in results["run"].stdout
    assert "accuracy check passed" in results["summarize"].stdout
    before = tree(tmp_path)
    for command in commands[:2]:
        assert specdec(*command).exit_code == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("flags", [["--quantization", "int4"], ["--qformat", "int8_wo", "--kv-cache-dtype", "int8"]])
def test_a_model_is_quantized_as_convert_and_build_do_it(
    flags: list[str], specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """The same engine, by one command or by three."""
    monkeypatch.chdir(tmp_path)
    run = [PROMPT, "--max-output-len", 12, "--end-id", 299, "--ngram-config", "4,2", "--mode", "leader", "--json"]
    at_once = specdec("run", llama_dir, *run, "--compiler", "none", *flags).document
    assert specdec("convert", llama_dir, *flags).exit_code == 0
    assert specdec("build", "--compiler", "none").exit_code == 0
    built_before = specdec("run", "engine_outputs", *run).document
    assert ids_of(at_once) == ids_of(built_before)
    for key in ("build_config", "quantization", "dtype"):
        assert at_once["engine"][key] == built_before["engine"][key], key
    assert at_once["engine"]["quantization"]["quant_algo"] == ("W8A16" if "int8_wo" in flags else "W4A16")
    save_gguf(tmp_path / "model.gguf", Q.Q4_0)
    (tmp_path / "ids.csv").write_text("5,6")
    again = specdec("run", "model.gguf", "--input-file", "ids.csv", "--compiler", "none", *flags[:2])
    assert again.exit_code == 1
    said(again, "GGUF", "`--quantization`")


def test_tokens_per_block_does_not_change_the_output(build: Command, specdec: Specdec, tmp_path: Path) -> None:
    texts = set()
    for tokens_per_block in (1, 64):
        assert build("--tokens-per-block", tokens_per_block, *DRAFTS, "--force").exit_code == 0
        arguments = ["--engine-dir", tmp_path / "engine", "--input-text", PROMPT, "--max-output-len", 30]
        texts.add(specdec("run", *arguments, "--ngram-config", "[6,2,[0]]", "--quiet").stdout)
    assert len(texts) == 1


@pytest.mark.parametrize(("max_batch_size", "num_groups"), [(2, 2)])
def test_prompts_beyond_max_batch_size_run_in_groups(
    build: Command, specdec: Specdec, tmp_path: Path, max_batch_size: int, num_groups: int
) -> None:
    assert build("--max-batch-size", max_batch_size).exit_code == 0
    prompts = [argument for text in (PROMPT, "One day", "The dog") for argument in ("--input-text", text)]
    arguments = ["--engine-dir", tmp_path / "engine", *prompts, "--max-output-len", 4, "--end-id", 0]
    document = specdec("run", *arguments, "--json").document
    assert document["total"]["num_steps"] == 12
    assert document["total"]["num_iterations"] == 4 * num_groups


def test_engine_names_what_it_was_built_for(build: Command, tmp_path: Path) -> None:
    result = build("--device", "cpu")
    environment = built(tmp_path)["environment"]
    assert environment["device"] == "cpu"
    assert environment["torch"] == torch.__version__
    assert f"cpu ({environment['capability']}), torch {torch.__version__}" in result.stdout


def test_phases_are_named_on_stderr_and_timed_on_stdout(build: Command) -> None:
    result = build()
    phases = [
        "loading the checkpoint", "compiling the step", "checking the logits", "measuring steps", "writing the engine",
    ]  # fmt: skip
    assert [line.split(" s  ")[1] for line in result.stderr.splitlines()] == phases
    assert all(phase in " ".join(result.stdout.split()) for phase in phases[:3])
    assert "logits check" in result.stdout


@pytest.mark.slow
def test_nothing_of_a_name_that_is_known_before_is_made_for_temporary_files(
    specdec_process: Specdec, llama_dir: Path, tmp_path: Path
) -> None:
    """torch makes such a directory when it is imported. Somebody else may have put a file there."""
    (tmp_path / "temporary").mkdir()
    taken = tmp_path / "temporary" / f"torchinductor_{getpass.getuser()}"
    taken.write_text("x")
    arguments = ["--model-dir", llama_dir, "--output-dir", tmp_path / "ckpt"]
    result = specdec_process("convert", *arguments, environment={"TMPDIR": str(taken.parent)})
    assert result.exit_code == 0, result.stderr
    assert tree(taken.parent) == [taken.name]
