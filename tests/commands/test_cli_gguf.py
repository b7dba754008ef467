"""GGUF files, or directories that hold one, go wherever a model goes."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from command_line import Specdec, ids_of
from quantized import Q, gguf_model, save_gguf, write_tokenizer
from sentences import Said
from tiny import hf_greedy
from transformers import PreTrainedTokenizerFast

from commands.serve.greeting import greeting
from commands.serve.http.server import Address
from runtime.builder.engine_cache import EngineSettings
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import BuildConfig

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


def test_run_takes_a_file_its_directory_and_a_blob(
    specdec: Specdec, made: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """A blob has a name of its own, as in a hub's cache."""
    path, expected = made
    blob = tmp_path / "sha256-5e8a"
    blob.symlink_to(path)
    run = ["run", "--input-text", PROMPT, "--max-output-len", NUM_TOKENS, "--end-id", END_ID, *SIZES, "--json"]
    assert ids_of(specdec(*run, "--model-dir", path.parent).document) == [expected]
    drafted = ["--draft-model-dir", path, "--spec-decode-algo", "DRAFT_TARGET", "--spec-decode-max-draft-len", 3]
    document = specdec(*run, "--model-dir", blob, *drafted, "--draft-len-mode", "fixed").document
    assert ids_of(document) == [expected]
    assert document["requests"][0]["stats"]["draft_acceptance_rate"] == 1


def test_list_and_serve_say_how_many_bits_a_quantized_file_has(specdec: Specdec, tmp_path: Path) -> None:
    path = tmp_path / "four.gguf"
    save_gguf(path, Q.Q4_0)
    (tmp_path / "ids.csv").write_text("5,6")
    page = tmp_path / "page.html"
    run = ["--input-file", tmp_path / "ids.csv", "--max-output-len", 1, "--report", page, "--json"]
    engine = specdec("run", path, *run).document["engine"]
    assert [one["format"] for one in specdec("list", "--json").document["models"] if one["model"] == "four.gguf"] == [
        "bfloat16, weights of 4 bits in groups of 32 from GGUF, activations int8"
    ]
    llm = SimpleNamespace(bundle=read_bundle(Path(engine["engine_dir"])), engine=SimpleNamespace(max_batch_size=4))
    served: Any = SimpleNamespace(name="four", llm=llm, max_model_len=64, drafter="no drafter")
    assert "four: weights of 4 bits, bfloat16, 64 tokens" in next(greeting(served, Address("localhost", 80)))
    assert "four.gguf (4 bits)" in page.read_text() and "MIXED_PRECISION weights" not in page.read_text()


def test_chat_finds_the_template_in_the_file(
    specdec: Specdec, made: tuple[Path, list[int]], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = made
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT.removesuffix(" The") + "\n"))
    result = specdec("chat", "--model-dir", path, "--max-output-len", NUM_TOKENS, "--temperature", 0, *SIZES)
    assert result.exit_code == 0, result.stderr
    assert tokenizer.decode(expected, skip_special_tokens=True) in result.stdout


def test_a_file_is_verified_as_far_as_its_headers_tell(
    specdec: Specdec, made: tuple[Path, list[int]], tmp_path: Path
) -> None:
    (file,) = specdec("verify", made[0], "--json").document["files"]
    assert (file["status"], file["num_bytes"]) == ("no_checksum", made[0].stat().st_size)
    (tmp_path / "cut.gguf").write_bytes(made[0].read_bytes()[:-100])
    cut = specdec("verify", tmp_path / "cut.gguf", "--json")
    document = json.loads(cut.stdout)
    assert (cut.exit_code, document["kind"], document["files"][0]["status"]) == (1, "model", "damaged")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The same model, without a tokenizer."""
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    save_gguf(path, Q.F32, vocab_size=len(tokenizer))
    return path


@pytest.mark.parametrize("kind", ["pre-tokenizer", "none"])
def test_text_for_a_file_whose_tokens_are_not_known_is_refused_before_it_is_built(
    kind: str, specdec: Specdec, bare: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path,
    said: Said, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Token ids need none of it."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))

    def write(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, tokenizer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "smollm9"

    path = bare
    if kind == "pre-tokenizer":
        path = tmp_path / "new.gguf"
        save_gguf(path, Q.F32, vocab_size=len(tokenizer), edit=write)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for command, *flags in (
        ("run", "--input-text", PROMPT, *SIZES),
        ("batch", "-i", tmp_path / "rows.jsonl", "-o", tmp_path / "results.jsonl", *SIZES),
        ("summarize", "--test-engine", *SIZES),
    ):
        refused = specdec(command, "--model-dir", path, *flags)
        assert refused.exit_code == 1 and not (tmp_path / "cache" / "engines").exists(), refused.stderr
        said(refused, path.name)


def batch(specdec: Specdec, directory: Path, *arguments: object) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (directory / "requests.jsonl").write_text(json.dumps(row) + "\n")
    files = ["-i", directory / "requests.jsonl", "-o", directory / "results.jsonl"]
    result = specdec("batch", *files, *arguments)
    assert result.exit_code == 0, result.stderr
    answer: str = json.loads((directory / "results.jsonl").read_text())["response"]["body"]["choices"][0]["text"]
    return answer


def chat(specdec: Specdec, directory: Path, *arguments: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(PROMPT.removesuffix(" The") + "\n"))
        result = specdec("chat", *arguments, "--max-output-len", NUM_TOKENS, "--temperature", 0)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("ask", [chat, batch], ids=lambda ask: ask.__name__)
def test_tokenizer_is_taken_of_a_file(
    ask: Callable[..., str], specdec: Specdec, made: tuple[Path, list[int]], bare: Path, tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    """An engine that has none would take no text."""
    path, expected = made
    models = ["--model-dir", bare, "--tokenizer-dir", path, *SIZES]
    assert tokenizer.decode(expected, skip_special_tokens=True) in ask(specdec, tmp_path, *models)


@pytest.mark.parametrize("command", ["run", "serve", "corpus create"])
def test_what_is_no_tokenizer_is_one_error(command: str, specdec: Specdec, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_text("GGUF")
    (tmp_path / "a.txt").write_text("a")
    flags: dict[str, list[object]] = {
        "run": ["--model-dir", bare, "--input-text", "a"],
        "serve": ["--model-dir", bare],
        "corpus create": ["--output", tmp_path / "c", "--text", tmp_path / "a.txt"],
    }
    for path, message in (
        (bare, f"the file has no tokenizer: {bare}"),
        (bare.parent, f"the file has no tokenizer: {bare}"),
        (tmp_path / "cut.gguf", "cut.gguf` is damaged: it ends within its header"),
        (tmp_path / "none.gguf", f"GGUF file does not exist: {tmp_path / 'none.gguf'}"),
    ):
        result = specdec(*command.split(), *flags[command], "--tokenizer-dir", path)
        assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr
