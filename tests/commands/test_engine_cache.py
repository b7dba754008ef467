"""`--model-dir`: an engine is built once for what went into it, by one process, and found again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Result, Specdec, ids_of, tree
from safetensors.torch import load_file, save_file
from tiny import hf_greedy, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PROMPT = "The little dog had a red ball. The"
RUN = ["--input-text", PROMPT, "--max-output-len", 12, "--end-id", 299, "--max-seq-len", 128]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the tests that may find what another has built."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def run(specdec: Specdec, llama_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    return lambda *arguments, model_dir=llama_dir: specdec("run", "--model-dir", model_dir, *RUN, *arguments)


def engines(cache: Path) -> list[Path]:
    """The directories in the cache, hidden ones included."""
    return sorted(path for path in (cache / "engines").iterdir() if path.is_dir())


def test_engine_is_built_once_and_serves_all_draft_lengths(
    run: Run, cache: Path, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = hf_greedy(llama, tokenizer(PROMPT)["input_ids"], 12, 299)
    first = run("--spec-decode-algo", "NGRAM", "--json")
    assert ids_of(first.document) == [expected]
    (engine,) = engines(cache)
    built = engine.stat().st_ino
    for flags in ([], ["--spec-decode-algo", "NGRAM", "--spec-decode-max-draft-len", 10], ["--max-num-tokens", 4]):
        again = run(*flags)
        assert again.exit_code == 0
        assert "compiling" not in again.stderr
    assert engines(cache) == [engine] and engine.stat().st_ino == built
    assert first.document["engine"]["engine_dir"] == str(engine)


def test_draft_model_is_built_too(run: Run, cache: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    draft_dir = tmp_path / "draft"
    make_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(draft_dir)
    tokenizer.save_pretrained(draft_dir)
    flags = ["--spec-decode-algo", "DRAFT_TARGET", "--draft-model-dir", draft_dir, "--check-lossless", "--json"]
    document = run(*flags).document
    assert document["checks"]["lossless"]["passed"] and document["total"]["num_draft_tokens"] > 0
    assert Path(document["draft_engine"]["engine_dir"]).name.startswith("draft-")
    assert document["draft_engine"]["build_config"]["max_draft_len"] == 0


def test_other_weights_and_other_settings_are_other_engines(run: Run, llama_dir: Path, tmp_path: Path) -> None:
    """Settings that only `build` reads; building is stopped by a model that cannot be built."""
    from runtime.engine import resolve_device
    from runtime.engine_cache import EngineSettings, _identity

    device, settings = resolve_device("cpu", 0), EngineSettings(None, 4, 128, 10)
    copy = tmp_path / "model"
    shutil.copytree(llama_dir, copy)
    name = _identity(llama_dir, settings, device)
    assert _identity(copy, settings, device) == name
    others = {
        _identity(llama_dir, EngineSettings("bfloat16", 4, 128, 10), device),
        _identity(llama_dir, EngineSettings(None, 2, 128, 10), device),
        _identity(llama_dir, EngineSettings(None, 4, 64, 10), device),
        _identity(llama_dir, EngineSettings(None, 4, 128, 11), device),
    }
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    others.add(_identity(copy, settings, device))
    (copy / "generation_config.json").write_text('{"eos_token_id": 5}')
    others.add(_identity(copy, settings, device))
    assert len(others | {name}) == 7


@pytest.mark.parametrize(
    "damage", ["config.json is missing", "rank0.pt2 is cut short", "rank0.safetensors is cut short"]
)
def test_damaged_entry_is_built_again(damage: str, run: Run, cache: Path) -> None:
    assert run().exit_code == 0
    (engine,) = [path for path in engines(cache) if path.name.startswith("model-")]
    name, _, how = damage.partition(" ")
    whole = (engine / name).stat().st_size
    if how == "is missing":
        (engine / name).unlink()
    else:
        os.truncate(engine / name, whole // 2)
    result = run("--quiet")
    assert result.exit_code == 0, result.stderr
    assert (engine / name).stat().st_size > whole * 0.9


def test_without_the_cache_nothing_is_kept(
    specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    result = specdec("run", "--model-dir", llama_dir, *RUN, "--no-cache", "--json")
    assert Path(result.document["engine"]["engine_dir"]).is_relative_to(tmp_path / "temporary")
    assert not list((tmp_path / "temporary").glob("specdec-*"))
    assert not (tmp_path / "cache" / "engines").exists()


def test_cache_that_cannot_be_written_is_one_error(
    specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = specdec("run", "--model-dir", llama_dir, *RUN)
    assert result.exit_code == 1 and result.stdout == ""
    assert "error: the cache directory cannot be written (Not a directory)" in result.stderr
    assert "`--no-cache`" in result.stderr


def start(llama_dir: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", "run", "--model-dir", str(llama_dir), *map(str, RUN)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def test_killed_build_leaves_a_cache_that_two_processes_can_use(
    llama_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    """The first is killed while it compiles; then two start together, and one of them builds the entry."""
    environment = process_environment | {"SPECDEC_CACHE_DIR": str(tmp_path)}
    killed = start(llama_dir, environment)
    deadline = time.monotonic() + 100
    while not list((tmp_path / "engines").glob(".model-*.tmp/kernels.so")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [path for path in engines(tmp_path) if path.name.startswith(".")], "it was killed too late"
    both = [start(llama_dir, environment) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    (engine,) = engines(tmp_path)
    assert not [name for name in tree(engine) if name.endswith(".tmp")]
    assert sorted("compiling the step" in errors for _, errors in results) == [False, True]
    assert sorted("waiting for it" in errors for _, errors in results) == [False, True]
    outputs = [out.partition("┏")[0] for out, _ in results]
    assert outputs[0] == outputs[1]
