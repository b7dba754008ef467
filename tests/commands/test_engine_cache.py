"""`--model-dir`: an engine is built once for what went into it, by one process, and found again."""

import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_line import Result, Specdec, ids_of, tree
from forked import Forks
from safetensors.torch import load_file, save_file
from sentences import Said
from tiny import hf_greedy, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from waiting import wait_until

from runtime.builder.engine_cache import EngineSettings
from runtime.builder.engine_options import words_of
from runtime.checkpoint.config import BuildConfig
from runtime.checkpoint.resolve import resolve_model
from runtime.util.cache import cache_dir

PROMPT = "The little dog had a red ball. The"
RUN = ["--input-text", PROMPT, "--max-output-len", 12, "--end-id", 299, "--max-seq-len", 128]
Run = Callable[..., Result]


def save_small_model(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> Path:
    """One layer, because the compiler takes a quarter of a minute as it is."""
    model = make_model(
        "llama", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    directory = save_small_model(tmp_path_factory.mktemp("small") / "model", tokenizer, 0)
    (directory / "chat_template.jinja").write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
    return directory


def engines(cache: Path) -> list[Path]:
    """The directories in the cache, hidden ones included."""
    return sorted(path for path in (cache / "engines").iterdir() if path.is_dir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it but the kernels, which is the one in use."""
    in_use = tmp_path / "cache"
    in_use.mkdir(mode=0o700)
    for kernels in cache_dir().glob("kernels-*.so"):
        shutil.copy(kernels, in_use)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(in_use))
    return in_use


@pytest.fixture
def run(specdec: Specdec, model_dir: Path) -> Run:
    return lambda *arguments: specdec("run", "--model-dir", model_dir, *RUN, *arguments)


@pytest.fixture
def built_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build in earnest from now on, but for the compiler, which is `none`."""
    build_config = EngineSettings.build_config

    def uncompiled(self: EngineSettings, num_positions: int) -> BuildConfig:
        return replace(build_config(self, num_positions), compiler="none")

    monkeypatch.setattr(EngineSettings, "build_config", uncompiled)


def compiler_at_a_gate(directory: Path, kernels: Path) -> dict[str, str]:
    """The environment of a process whose compiler makes `reached` when it is called for the kernels, and then waits for
    `opened`, both in the directory. What it makes are kernels that were compiled before.
    """
    compiler = directory / "bin" / "g++"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(
        f"""#!/bin/sh
[ "$1" = -v ] && exit
for word; do [ "$last" = -o ] && output=$word; last=$word; done
case "$*" in
*" -c "*) touch {directory}/reached; until [ -e {directory}/opened ]; do sleep 0.01; done; : > "$output" ;;
*) cp {kernels} "$output" ;;
esac
"""
    )
    compiler.chmod(0o755)
    return {"PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}", "CXX": "g++"}


AFTERWARDS = "the CPU kernels are being compiled"


def compiling(cache: Path) -> list[psutil.Process]:
    """Processes that have the cache's file of errors for their own."""
    errors, found = str(cache / "kernels.errors"), []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found += [process] * (os.readlink(f"/proc/{process.pid}/fd/2") == errors)
    return found


def test_a_first_answer_does_not_wait_for_kernels(
    specdec_fork: Specdec, kernels: Path, model_dir: Path, tmp_path: Path
) -> None:
    """A process that outlives the command compiles them, for the next one."""
    cache = tmp_path / "cache"
    environment = compiler_at_a_gate(tmp_path, kernels) | {"SPECDEC_CACHE_DIR": str(cache)}

    def answer(*flags: str) -> Result:
        result = specdec_fork("run", "--model-dir", model_dir, *RUN, "--json", *flags, environment=environment)
        assert result.exit_code == 0, result.stderr
        return result

    first = answer()
    assert first.stderr.count(AFTERWARDS) == 1
    assert first.document["engine"]["build_config"]["compiler"] == "none"
    wait_until(lambda: (tmp_path / "reached").exists())
    again = answer()
    assert again.stderr.count(AFTERWARDS) == 1 and "converting" not in again.stderr
    assert len(compiling(cache)) == 1
    (tmp_path / "opened").touch()
    wait_until(lambda: list(cache.glob("kernels-*.so")))
    later = answer()
    assert AFTERWARDS not in later.stderr
    assert later.document["engine"]["build_config"]["compiler"] == "aot"
    assert ids_of(later.document) == ids_of(first.document)
    engines = [Path(one.document["engine"]["engine_dir"]) for one in (first, later)]
    assert [engine.exists() for engine in engines] == [False, True]


def test_engine_is_built_once_and_serves_all_draft_lengths(specdec: Specdec, kernels: Path) -> None:
    """Compiled ahead of time: the one of the documentation's walk, of which whoever comes first makes it."""
    model_dir = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    expected = hf_greedy(model, AutoTokenizer.from_pretrained(model_dir)(PROMPT)["input_ids"], 12, 299)
    arguments = [
        "run", "--model-dir", "demo", "--input-text", PROMPT, "--max-output-len", 12, "--end-id", 299, "--json",
    ]  # fmt: skip
    first = specdec(*arguments, "--spec-decode-algo", "NGRAM").document
    assert ids_of(first) == [expected]
    assert first["engine"]["build_config"]["compiler"] == "aot"
    engine = Path(first["engine"]["engine_dir"])
    built = engine.stat().st_ino
    for flags in ([], ["--spec-decode-algo", "NGRAM", "--spec-decode-max-draft-len", 10], ["--max-num-tokens", 4]):
        again = specdec(*arguments, *flags)
        assert again.document["engine"]["engine_dir"] == str(engine)
        assert "compiling" not in again.stderr
    assert engine.stat().st_ino == built


def test_a_dtype_that_the_model_has_anyway_is_the_same_engine(specdec: Specdec, llama_dir: Path) -> None:
    run = ["run", llama_dir, PROMPT, "--max-output-len", 4, "--max-seq-len", 72, "--compiler", "none", "--json"]
    flags: list[list[str]] = [["--dtype", "float32"], [], ["--dtype", "bfloat16"]]
    made = [specdec(*run, *one).document["engine"]["engine_dir"] for one in flags]
    assert made[0] == made[1] != made[2]


def another_value(option: str, value: Any) -> Any:
    words = [word for word in words_of(option).values() if word != value]
    return words[0] if words else (value or 0) + 3


def test_other_weights_and_other_settings_are_other_engines(llama_dir: Path, tmp_path: Path) -> None:
    from runtime.builder.engine_cache import _identity, settings_of
    from runtime.engine.engine import resolve_device

    device, settings = resolve_device("cpu", 0), settings_of({"max_seq_len": 128})
    copy = tmp_path / "model"
    shutil.copytree(llama_dir, copy)
    name = _identity(llama_dir, settings, device)
    assert _identity(copy, settings, device) == name
    others = {
        _identity(llama_dir, settings.changed(**{option: another_value(option, value)}), device)
        for option, value in settings.options.items()
    }
    assert len(others) == len(settings.options) > 9
    weights, stat = load_file(copy / "model.safetensors"), (copy / "model.safetensors").stat()
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    os.utime(copy / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    others.add(_identity(copy, settings, device))
    (copy / "generation_config.json").write_text('{"eos_token_id": 5}')
    others.add(_identity(copy, settings, device))
    assert len(others | {name}) == len(settings.options) + 3


@pytest.mark.parametrize(
    "damage", ["config.json is missing", "rank0.safetensors is cut short", "chat_template.jinja is cut short"]
)
@pytest.mark.usefixtures("built_uncompiled")
def test_damaged_entry_is_built_again(damage: str, run: Run, cache: Path) -> None:
    """A damaged file is replaced; nothing of what was there is taken."""
    before = ids_of(run("--json").document)
    (engine,) = engines(cache)
    whole = tree(engine)
    name, _, how = damage.partition(" ")
    if how == "is missing":
        (engine / name).unlink()
    else:
        os.truncate(engine / name, (engine / name).stat().st_size // 2)
    result = run("--json")
    assert name in result.stderr
    assert result.document["engine"]["engine_dir"] == str(engine) and ids_of(result.document) == before
    assert engines(cache) == [engine] and tree(engine) == whole
    again = run()
    assert again.exit_code == 0 and "compiling" not in again.stderr


@pytest.mark.usefixtures("built_uncompiled")
def test_without_the_cache_nothing_is_kept(
    specdec: Specdec, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    result = specdec("run", "--model-dir", model_dir, *RUN, "--no-cache", "--json")
    assert Path(result.document["engine"]["engine_dir"]).is_relative_to(tmp_path / "temporary")
    assert not list((tmp_path / "temporary").glob("*/*"))
    assert not (tmp_path / "cache" / "engines").exists()


def test_cache_that_cannot_be_written_is_one_error(
    specdec: Specdec, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    result = specdec("run", "--model-dir", llama_dir, *RUN)
    assert result.exit_code == 1 and result.stdout == ""
    said(result, "`--no-cache`", varying=("Not a directory", "File exists"))


@pytest.mark.usefixtures("built_uncompiled")
def test_a_disk_that_is_full_is_told_as_the_caches(run: Run, cache: Path, said: Said) -> None:
    """A file that may not grow beyond so many bytes fails like a full disk; the weights are more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        result = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1 and result.stdout == "" and engines(cache) == []
    said(result, "File too large", "SPECDEC_CACHE_DIR", "`--no-cache`")


def test_an_interpreter_ends_quietly_with_a_model_that_nobody_closed(
    forks: Forks, llama_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    answer = "llm = LLM(sys.argv[1], compiler='none'); print(len(llm.generate('a')))"
    code = f"import sys; from specdec_cli import LLM; {answer}"
    environment = process_environment | {"SPECDEC_CACHE_DIR": str(tmp_path / "cache")}
    done = forks.run(llama_dir, program=code, environment=environment)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Exception ignored" not in done.stderr
