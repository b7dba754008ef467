"""Quantized models on the command line: what is written and said of them, and how much they may lose."""

from pathlib import Path

import pytest
from command_line import PROMPT, Specdec, assert_valid, texts_of
from quantized import save_awq

DRAFTS = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6, "--compiler", "none"]
SIZES = ["--max-input-len", 64, "--max-seq-len", 128]


def test_activations_of_a_model_that_was_quantized_before(specdec: Specdec, tmp_path: Path) -> None:
    save_awq(tmp_path / "model", 32)
    flags = ["--model-dir", tmp_path / "model", "--output-dir", tmp_path / "ckpt", "--activations", "int16"]
    shown = specdec("convert", *flags)
    assert shown.exit_code == 0, shown.stderr
    assert "activations int16" in shown.stdout


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
