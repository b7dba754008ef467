"""Quantized models on the command line: what is written and said of them, and how much they may lose."""

from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPT, Specdec, assert_valid, texts_of
from quantized import save_awq

DRAFTS = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6, "--compiler", "none"]
SIZES = ["--max-input-len", 64, "--max-seq-len", 128]


@pytest.mark.parametrize(
    ("flags", "algorithm", "said"),
    [
        (["--qformat", "int8_wo", "--awq_block_size", 32], "W8A16", "W8A16 weights in groups of 32"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (["--use-weight-only", "--group-size", -1], "W8A16", "W8A16 weights"),
                (
                    ["--use-weight-only", "--weight-only-precision", "int4", "--group-size", 32],
                    "W4A16",
                    "in groups of 32",
                ),
                (["--qformat", "fp8"], "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN weights"),
            )
        ),
    ],
)
def test_quantized_model_goes_the_whole_way(
    flags: list[Any], algorithm: str, said: str, specdec: Specdec, llama_dir: Path, tmp_path: Path
) -> None:
    ckpt, engine = tmp_path / "ckpt", tmp_path / "engine"
    shown = specdec("convert", "--model-dir", llama_dir, "--output-dir", ckpt, *flags)
    assert (shown.exit_code, shown.stderr) == (0, ""), shown.stderr
    assert f"Converted llama to float32 with {algorithm} weights" in shown.stdout and said in shown.stdout
    again = specdec("convert", "--model-dir", llama_dir, "--output-dir", ckpt, "--force", "--json", *flags).document
    assert_valid("convert", again)
    assert again["checkpoint"]["quantization"]["quant_algo"] == algorithm
    assert again["checkpoint"]["quantization"]["activations"] == {"W4A16": "int8", "W8A16": "int16"}.get(
        algorithm, "float"
    )
    text = tmp_path / "text"
    text.write_text("The little dog had a red ball. One day the dog lost the ball. " * 9)
    build = ["build", "--checkpoint-dir", ckpt, "--output-dir", engine, *DRAFTS, *SIZES, "--quality-text", text]
    document = specdec(*build, "--json").document
    assert_valid("build", document)
    assert document["engine"]["quantization"]["quant_algo"] == algorithm
    assert document["engine"]["quality"]["text"] == "text"
    assert document["engine"]["quality"]["mean_kl"] >= 0
    assert specdec("verify", engine).exit_code == 0
    run = ["run", "--engine-dir", engine, "--input-text", PROMPT, "--max-output-len", 12]
    plain, drafted = specdec(*run, "--json").document, specdec(*run, "--ngram-config", "4,2", "--json").document
    assert_valid("run", plain)
    assert texts_of(plain) == texts_of(drafted)


@pytest.mark.parametrize("activations", ["int16"])
def test_activations_of_a_model_that_was_quantized_before(activations: str, specdec: Specdec, tmp_path: Path) -> None:
    save_awq(tmp_path / "model", 32)
    flags = ["--model-dir", tmp_path / "model", "--output-dir", tmp_path / "ckpt", "--activations", activations]
    shown = specdec("convert", *flags)
    assert shown.exit_code == 0, shown.stderr
    assert f"activations {activations}" in shown.stdout


@pytest.mark.slow
def test_loss_of_rouge_is_bounded(specdec: Specdec, llama_dir: Path, tmp_path: Path) -> None:
    ckpt, engine = tmp_path / "ckpt", tmp_path / "engine"
    specdec("convert", "--model-dir", llama_dir, "--output-dir", ckpt, "--qformat", "int8")
    text = tmp_path / "text"
    text.write_text("The little dog had a red ball. " * 9)
    shown = specdec("build", "--checkpoint-dir", ckpt, "--output-dir", engine, *DRAFTS, *SIZES, "--quality-text", text)
    assert "KL divergence" in shown.stdout and "W8A16 weights" in shown.stdout
    dataset = tmp_path / "data.jsonl"
    dataset.write_text('{"article": "The dog had a", "highlights": "red ball park bed dog girl"}\n')
    summarize = ["summarize", "--engine-dir", engine, "--dataset", dataset, "--test-engine", "--test-hf"]
    summarize += ["--hf-model-dir", llama_dir, "--output-len", 12, "--check-accuracy", "--rouge1-threshold", 0]
    passed = specdec(*summarize, "--rouge1-max-loss", 100, "--json").document
    assert_valid("summarize", passed)
    check = passed["checks"]["accuracy"]
    assert check["passed"] and check["max_loss"] == 100
    assert check["hf_rouge1"] == passed["rouge"]["hf"]["rouge1"]
    assert passed["hf_differences"] == []  # the same model, quantized
    assert passed["engine"]["quality"]["num_tokens"] > 10
    table = specdec(*summarize, "--rouge1-max-loss", 100)
    assert "quantization: KL divergence" in table.stdout and "and 100 less is allowed" in table.stdout


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "algorithm"), [("int8", "INT8"), ("fp8", "FP8")])
def test_kv_cache_in_8_bits(name: str, algorithm: str, specdec: Specdec, llama_dir: Path, tmp_path: Path) -> None:
    """Weights are as they are; `build` says what quantization K/V changed."""
    ckpt, engine, text = tmp_path / "ckpt", tmp_path / "engine", tmp_path / "text"
    flags = ["--kv-cache-dtype", name, "--json"]
    found = specdec("convert", "--model-dir", llama_dir, "--output-dir", ckpt, *flags).document
    assert_valid("convert", found)
    assert found["checkpoint"]["quantization"]["kv_cache_quant_algo"] == algorithm
    text.write_text("The little dog had a red ball. " * 9)
    build = ["build", "--checkpoint-dir", ckpt, "--output-dir", engine, *DRAFTS, *SIZES, "--quality-text", text]
    document = specdec(*build, "--json").document
    assert_valid("build", document)
    assert document["engine"]["quantization"]["kv_cache_quant_algo"] == algorithm
    assert document["engine"]["quality"]["mean_kl"] > 0
    shown = specdec(*build, "--force")
    # 2 layers of 2 heads, keys and values of 8 bytes and a scale of 4
    assert "blocks of 32 tokens" in shown.stdout and f"{algorithm}, 96 bytes a token" in shown.stdout
    assert specdec("verify", engine).exit_code == 0
    run = ["run", "--engine-dir", engine, "--input-text", PROMPT, "--max-output-len", 12]
    plain, drafted = specdec(*run, "--json").document, specdec(*run, "--ngram-config", "4,2", "--json").document
    assert_valid("run", plain)
    assert texts_of(plain) == texts_of(drafted)
