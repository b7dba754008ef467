"""Whatever takes a model takes a GGUF file, or a directory that holds one."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import Specdec, ids_of
from quantized import Q, gguf_model, save_gguf, write_tokenizer
from tiny import hf_greedy
from transformers import PreTrainedTokenizerFast

from runtime.config import BuildConfig
from runtime.engine_cache import EngineSettings
from specdec_cli import LLM, DraftTargetDrafter, SamplingParams, SpecDecWarning

PROMPT = "The little dog had a red ball. The"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} The"
NUM_TOKENS, END_ID = 8, 299  # which it does not come to
SIZES = ["--max-seq-len", 96, "--dtype", "float32"]


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes a quarter of a minute, and does not matter here."""
    compiled = EngineSettings.build_config

    def build_config(settings: EngineSettings, num_positions: int) -> BuildConfig:
        return replace(compiled(settings, num_positions), compiler="none")

    monkeypatch.setattr(EngineSettings, "build_config", build_config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, list[int]]:
    """A file alone in its directory, and what Hugging Face's model of its numbers generates."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write = partial(write_tokenizer, tokenizer=tokenizer, template=TEMPLATE)
    meant = save_gguf(path, Q.F32, vocab_size=len(tokenizer), edit=write)
    model = gguf_model("llama", len(tokenizer))
    model.load_state_dict(meant, strict=False)
    with torch.no_grad():
        return path, hf_greedy(model, tokenizer(PROMPT)["input_ids"], NUM_TOKENS, END_ID)


@pytest.mark.parametrize("place", ["file", "directory"])
def test_run_takes_a_file_and_its_directory(place: str, specdec: Specdec, made: tuple[Path, list[int]]) -> None:
    path, expected = made
    model = path if place == "file" else path.parent
    flags = ["--max-output-len", NUM_TOKENS, "--end-id", END_ID, *SIZES, "--json"]
    assert ids_of(specdec("run", "--model-dir", model, "--input-text", PROMPT, *flags).document) == [expected]
    drafted = ["--draft-model-dir", model, "--spec-decode-algo", "DRAFT_TARGET", "--spec-decode-max-draft-len", 3]
    drafted += ["--draft-len-mode", "fixed"]
    document = specdec("run", "--model-dir", model, "--input-text", PROMPT, *flags, *drafted).document
    assert ids_of(document) == [expected]
    assert document["requests"][0]["stats"]["draft_acceptance_rate"] == 1


def test_chat_finds_the_template_in_the_file(
    specdec: Specdec, made: tuple[Path, list[int]], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = made
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT.removesuffix(" The") + "\n"))
    result = specdec("chat", "--model-dir", path, "--max-output-len", NUM_TOKENS, "--temperature", 0, *SIZES)
    assert result.exit_code == 0, result.stderr
    assert tokenizer.decode(expected, skip_special_tokens=True) in result.stdout


@pytest.mark.parametrize("as_path", [False, True])
def test_python_takes_a_file(as_path: bool, made: tuple[Path, list[int]]) -> None:
    path, expected = made
    model = path if as_path else str(path)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model, max_seq_len=96, dtype="float32") as llm:
        drafter = DraftTargetDrafter(model, max_draft_len=3)
        assert llm.generate(PROMPT, params)[0].token_ids == expected
        assert llm.generate(PROMPT, params, drafter=drafter)[0].token_ids == expected
        assert llm.chat_template.source == TEMPLATE


def test_gemma_3_is_hugging_faces(tmp_path: Path) -> None:
    """Past its window several times, in layers of both kinds; norms without the 1 that the file has in them."""
    model = gguf_model("gemma3")
    model.load_state_dict(save_gguf(tmp_path / "model.gguf", Q.F32, architecture="gemma3"), strict=False)
    prompt = [1 + i * 7 % 30 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with pytest.warns(SpecDecWarning, match="the file has no tokenizer"):
        llm = LLM(tmp_path / "model.gguf", max_seq_len=96, dtype="float32")
    with llm:
        assert llm.generate(prompt, params)[0].token_ids == hf_greedy(model, prompt, 24, model.config.vocab_size - 1)


def test_tune_and_doctor_make_the_engine_of_a_model(specdec: Specdec, made: tuple[Path, list[int]]) -> None:
    path, _ = made
    inputs = ["--model-dir", path, "--input-text", PROMPT, "--max-output-len", NUM_TOKENS, *SIZES, "--json"]
    tuned = specdec("tune", *inputs).document
    assert tuned["recommended"] is not None and "/engines/model.gguf-" in tuned["settings"]["engine_dir"]
    doctored = specdec("doctor", *inputs, "--ngram-config", "4,2")
    assert doctored.exit_code in (0, 1)  # what it finds is this machine's
    assert json.loads(doctored.stdout)["engine_dir"] == tuned["settings"]["engine_dir"]


@pytest.mark.parametrize("command", ["tune", "doctor"])
def test_model_and_engine_together_are_one_error(command: str, specdec: Specdec, made: tuple[Path, list[int]]) -> None:
    both = specdec(command, "--model-dir", made[0], "--engine-dir", "engine", "--input-text", PROMPT)
    assert both.exit_code == 2 and "`--model-dir` and `--engine-dir` cannot be given together" in both.stderr
    alone = specdec(command, "--max-seq-len", 96, "--engine-dir", "engine", "--input-text", PROMPT)
    assert alone.exit_code == 2 and "`--max-seq-len` is for engines made of `--model-dir`: 96" in alone.stderr
