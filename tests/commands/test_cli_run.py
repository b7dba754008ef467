"""`run`: each option changes what it says, and the text is what Hugging Face's `generate` makes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import NGRAM, PROMPT, PROMPTS, Result, Specdec, each, texts_of
from sentences import Said
from shared import record_anew, shared_engine
from tiny import make_model
from transformers import PreTrainedTokenizerFast

Run = Callable[..., Result]


def test_max_input_length_keeps_the_last_tokens(run: Run, tokenizer: PreTrainedTokenizerFast, said: Said) -> None:
    result = run("--max-input-length", 5, "--max-output-len", 2, "--json")
    ids = tokenizer(PROMPT)["input_ids"]
    assert result.document["requests"][0]["prompt_ids"] == ids[-5:]
    said(result, "5", "1")
    whole = run("--max-input-length", len(ids), "--max-output-len", 2, "--json")
    assert whole.document["requests"][0]["prompt_ids"] == ids
    assert whole.stderr == ""


def test_stop_words_end_the_output_and_are_not_in_its_text(run: Run) -> None:
    (text,) = texts_of(run("--max-output-len", 40, "--json").document)
    word = text[12:15]
    for ngram in ([], ["--ngram-config", NGRAM]):
        arguments = ["--max-output-len", 40, "--stop-words", "not there", "--stop-words", word, *ngram]
        document = run(*arguments, "--json").document
        assert texts_of(document) == [text[: text.index(word)]]
        assert document["requests"][0]["finish_reason"] == "stop"
        assert document["settings"]["stop_words"] == ["not there", word]
        assert run(*arguments, "--quiet").stdout == text[: text.index(word)] + "\n"


def test_ids_are_written_padded_with_the_end_id(run: Run, tmp_path: Path) -> None:
    csv, npy = tmp_path / "ids.csv", tmp_path / "ids.npy"
    arguments = [*each("--input-text", PROMPTS[:3]), "--max-output-len", 6, "--ngram-config", NGRAM]
    result = run(*arguments, "--output-csv", csv, "--output-npy", npy, "--json")
    rows = [request["prompt_ids"] + request["output_ids"] for request in result.document["requests"]]
    longest = max(map(len, rows))
    assert len({len(row) for row in rows}) > 1
    expected = [row + [2] * (longest - len(row)) for row in rows]
    assert csv.read_text() == "".join(",".join(map(str, row)) + "\n" for row in expected)
    array = np.load(npy, allow_pickle=False)
    assert array.dtype == np.int32
    assert array.tolist() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.csv", "ids.npy"]


def test_streamed_text_is_the_text(run: Run) -> None:
    """Random weights write any bytes: characters of several bytes come apart and have to be put together."""
    arguments = ["--input-text", "é🙂 the ball é🙂", "--max-output-len", 50, "--ngram-config", NGRAM, "--quiet"]
    text = run(*arguments).stdout
    word = text[20:23]
    stopped = run(*arguments, "--stop-words", word).stdout
    assert word not in stopped
    for interval in (1, 5):
        streaming = ["--streaming", "--streaming-interval", interval]
        assert run(*arguments, *streaming).stdout == text, interval
        assert run(*arguments, "--stop-words", word, *streaming).stdout == stopped, interval


def test_engine_without_tokenizer_takes_and_prints_ids(
    specdec: Specdec, llama_uncompiled_dir: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    for name in ("config.json", "rank0.safetensors"):
        shutil.copyfile(llama_uncompiled_dir / name, engine / name)
    record_anew(engine)
    (tmp_path / "ids.csv").write_text("5,6,7\n")
    arguments = ["--engine-dir", engine, "--input-file", tmp_path / "ids.csv", "--max-output-len", 3]
    (request,) = specdec("run", *arguments, "--json").document["requests"]
    assert request["output_text"] is None and request["prompt"] is None
    assert specdec("run", *arguments, "--quiet").stdout == " ".join(map(str, request["output_ids"])) + "\n"
    assert 'Input [Text 0]: "3 token ids"' in specdec("run", *arguments).stdout


def test_results_go_to_stdout_in_a_process_of_its_own(specdec_fork: Specdec, llama_engine_dir: Path) -> None:
    arguments = ["--engine-dir", llama_engine_dir, "--input-text", "é🙂", "--max-output-len", 9, "--json"]
    result = specdec_fork("run", *arguments, "--max-input-length", 3, environment={"COLUMNS": "20"})
    assert result.document["requests"][0]["prompt"] == "é🙂"
    assert result.stderr.startswith("warning: ")


@pytest.fixture
def overflowing_engine_dir(tokenizer: PreTrainedTokenizerFast, shared: Path, tmp_path: Path) -> Path:
    """Engine of a model that has finite weights, and makes NaN where it reads "#"."""
    model = make_model("gpt2", vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("#")["input_ids"]] = torch.finfo(torch.float32).max
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return shared_engine(shared / "engines", tmp_path)


@pytest.mark.parametrize("mode", ["leader", "orchestrator"])
def test_request_that_fails_is_named_and_the_others_are_answered(
    specdec: Specdec, overflowing_engine_dir: Path, mode: str, tmp_path: Path, said: Said
) -> None:
    """One of three: what is written is the others', and the exit code is 1."""
    arguments = ["run", "--engine-dir", overflowing_engine_dir, "--max-output-len", 5, "--mode", mode]
    good = each("--input-text", ["a red ball", "One day"])
    alone = specdec(*arguments, *good, "--json").document
    result = specdec(*arguments, *good, "--input-text", "a # ball", "--output-csv", tmp_path / "ids.csv", "--json")
    document = json.loads(result.stdout)
    assert texts_of(document) == texts_of(alone) and document["num_unfinished_requests"] == 1
    assert len((tmp_path / "ids.csv").read_text().splitlines()) == 2
    assert result.exit_code == 1
    said(result, "request 2")
