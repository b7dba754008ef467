"""`convert` and `build`: each option changes what is written or said."""

from collections.abc import Callable
from pathlib import Path

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


def test_weights_are_rounded_to_the_dtype(convert: Command, llama_dir: Path, tmp_path: Path) -> None:
    result = convert("--dtype", "bfloat16")
    assert "Converted llama to bfloat16: " in result.stdout
    assert result.stderr == ""
    tensors = load_file(tmp_path / "ckpt" / "rank0.safetensors")
    source = load_file(llama_dir / "model.safetensors")
    assert tensors.keys() == source.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, source[name].to(torch.bfloat16), rtol=0, atol=0)


def test_force_replaces_what_specdec_wrote(convert: Command, tmp_path: Path, said: Said) -> None:
    assert convert().exit_code == 0
    (tmp_path / "ckpt" / "left-over").write_text("x")
    before = tree(tmp_path)
    refused = convert()
    assert refused.exit_code == 1
    said(refused, "--force")
    assert tree(tmp_path) == before
    assert convert("--force").exit_code == 0
    assert tree(tmp_path) == [name for name in before if "left-over" not in name]


def test_a_model_is_quantized_as_convert_and_build_do_it(
    specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """The same engine, by one command or by three."""
    monkeypatch.chdir(tmp_path)
    flags = ["--qformat", "INT8_WO", "--kv_cache_dtype", "Int8"]
    run = [PROMPT, "--max-output-len", 6, "--end-id", 299, "--ngram-config", "4,2", "--mode", "leader", "--json"]
    at_once = specdec("run", llama_dir, *run, "--compiler", "none", *flags).document
    Path("both.yaml").write_text("quantization: INT8_WO\nkv_cache_dtype: Int8\nself_draft: none\ncompiler: none\n")
    assert specdec("convert", llama_dir, "--config", "both.yaml").exit_code == 0
    assert specdec("build", "--config", "both.yaml").exit_code == 0
    built_before = specdec("run", "engine_outputs", *run).document
    assert ids_of(at_once) == ids_of(built_before)
    for key in ("build_config", "quantization", "dtype"):
        assert at_once["engine"][key] == built_before["engine"][key], key
    assert at_once["engine"]["quantization"]["quant_algo"] == "W8A16"
    save_gguf(tmp_path / "model.gguf", Q.Q4_0)
    (tmp_path / "ids.csv").write_text("5,6")
    again = specdec("run", "model.gguf", "--input-file", "ids.csv", "--compiler", "none", *flags[:2])
    assert again.exit_code == 1
    said(again, "GGUF", "`--qformat`")  # as it was typed


def test_activations_of_8_bits_are_compared_with_those_of_more(
    convert: Command, specdec: Specdec, tmp_path: Path, said: Said
) -> None:
    """A text of the user's gives a number for each. Weights that are no integers have none."""
    text = tmp_path / "text.txt"
    text.write_text("The little dog lost the red ball. One day a girl found the ball under the bed.")
    asked = ["build", "--checkpoint-dir", tmp_path / "ckpt", "--output-dir", tmp_path / "engine", "--compiler", "none"]
    asked += ["--compare-activations", "--quality-text", text, "--json"]
    assert convert("--qformat", "int8").exit_code == 0
    found = specdec(*asked).document["in_eight_bits"]
    assert found["instead_of"] == "int16" and found["num_tokens"] > 10 and 0 < found["mean_kl"] < 1
    assert [time["num_tokens"] for time in found["times"]][:2] == [1, 11]
    for quantization in (["--qformat", "int4"], []):
        assert convert("--force", *quantization).exit_code == 0
        refused = specdec(*asked, "--force")
        assert refused.exit_code == 2
        said(refused, "`--compare-activations`")


def test_phases_are_named_and_lengths_are_by_default_what_the_model_has(
    specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path
) -> None:
    """Phases are named on stderr, and timed on stdout."""
    where = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", "--compiler", "none"]
    result = specdec("build", *where)
    assert "input 255, input + output 256 tokens" in result.stdout and "up to 10 tokens" in result.stdout
    phases = [
        "loading the checkpoint", "compiling the step", "checking the logits", "measuring steps", "writing the engine",
    ]  # fmt: skip
    assert [line.split(" s  ")[1] for line in result.stderr.splitlines()] == phases
    assert all(phase in " ".join(result.stdout.split()) for phase in phases[:3])
    assert "logits check" in result.stdout
