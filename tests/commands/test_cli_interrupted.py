"""A command that is stopped half way, by Ctrl-C, a full disk or a missing compiler, leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import PROMPT, Result, Specdec, tree
from forked import Forks
from sentences import Said
from shared import once
from strength import is_full
from tiny import make_model
from waiting import HANG_S

from runtime.builder.convert import convert
from scripts.campaigns.forks import import_all, start

# A file that may not grow beyond so many bytes fails like a full disk. Ignored, the signal becomes an OSError.
# Each command is run in a process of its own, which has the modules that take seconds to import from its parent.
WITH_LIMITS = """
import json, os, resource, signal, sys
import runtime.builder.convert, runtime.builder.build
from specdec_cli.app import main

def run(limit, environment, arguments, errors):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.environ |= environment
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors, 2)
    sys.argv = ["specdec", *arguments]
    code = 0
    try:
        main()
    except SystemExit as exit:
        code = exit.code or 0
    finally:
        sys.stderr.flush()
    os._exit(code)

results = {}
for name, command in json.loads(sys.argv[1]).items():
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        run(*command, writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        errors = file.read()
    results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), errors
json.dump(results, sys.stdout)
"""


def interrupt(arguments: Sequence[object], output_dir: Path, signal_number: int) -> tuple[int, str]:
    """A command stands still where it first opens a file in its temporary directory: it and its children get a signal.

    In a fork, whose exit code and stderr are returned.
    """
    import_all()
    reading, writing = os.pipe()

    def prepare() -> None:
        os.setsid()
        is_new = True

        def stand_still_once(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal is_new
            if event == "open" and is_new and f"/.{output_dir.name}." in f"{arguments[0]}" and is_main_thread():
                is_new = False
                os.write(writing, b"x")
                time.sleep(HANG_S)

        sys.addaudithook(stand_still_once)

    with tempfile.TemporaryFile() as errors:
        process = start(arguments, output_dir.parent, errors.fileno(), prepare=prepare)
        os.close(writing)
        with open(reading, "rb") as reached:
            assert reached.read(1), "it was done, and had opened nothing there"
        os.killpg(process, signal_number)
        _, status = os.waitpid(process, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read().decode()


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def assert_stopped(result: tuple[int, str], exit_code: int) -> None:
    assert result[0] == exit_code, result[1]
    assert "Traceback" not in result[1]
    assert result[1].splitlines().count("interrupted") == (exit_code == 128 + signal.SIGINT)


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_convert_leaves_nothing(
    llama_dir: Path, tmp_path: Path, signal_number: int, exit_code: int
) -> None:
    arguments = ["convert", "--model-dir", llama_dir, "--output-dir", tmp_path / "ckpt"]
    assert_stopped(interrupt(arguments, tmp_path / "ckpt", signal_number), exit_code)
    assert tree(tmp_path) == []


def test_interrupted_build_leaves_nothing(llama_checkpoint_dir: Path, tmp_path: Path) -> None:
    arguments = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine"]
    arguments += ["--max-input-len", 64, "--max-seq-len", 128, "--compiler", "none"]
    assert_stopped(interrupt(arguments, tmp_path / "engine", signal.SIGINT), 130)
    assert tree(tmp_path) == []


def test_interrupted_replacement_keeps_what_was_there(llama_dir: Path, tmp_path: Path, specdec: Specdec) -> None:
    output_dir = tmp_path / "ckpt"
    assert specdec("convert", "--model-dir", llama_dir, "--output-dir", output_dir).exit_code == 0
    before = {path: path.read_bytes() for path in output_dir.iterdir()}
    arguments = ["convert", "--model-dir", llama_dir, "--output-dir", output_dir, "--force"]
    assert_stopped(interrupt(arguments, output_dir, signal.SIGINT), 130)
    assert list(tmp_path.iterdir()) == [output_dir]
    assert {path: path.read_bytes() for path in output_dir.iterdir()} == before


AT_IMPORT = """
import os, signal, sys
wanted, number, is_new = sys.argv[1], int(sys.argv[2]), True
def interrupt(event, arguments):
    global is_new
    if event == "import" and arguments[0] == wanted and is_new:
        is_new = False
        os.kill(os.getpid(), number)
sys.addaudithook(interrupt)
sys.argv = ["specdec", *sys.argv[3:]]
from specdec_cli.app import main
main()
"""


@pytest.mark.parametrize(
    ("module", "signal_number", "exit_code"),
    [("typer", signal.SIGINT, 130), ("commands.integrity.command", signal.SIGTERM, 143)],
)
def test_signal_during_the_imports_leaves_no_traceback(
    module: str, signal_number: int, exit_code: int, process_environment: dict[str, str], llama_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Holds from the first module of ours on: what Python imports before that is out of reach."""
    arguments = [module, signal_number, "convert", "--model-dir", llama_dir, "--output-dir", tmp_path / "ckpt"]
    command = [sys.executable, "-c", AT_IMPORT, *map(str, arguments)]
    ended = subprocess.run(command, env=process_environment, capture_output=True, text=True)
    assert ended.returncode == exit_code, ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    assert ended.stderr.splitlines().count("interrupted") == (signal_number == signal.SIGINT)


FULL_DISKS = [
    "convert", "build", "build --compiler aot", "build of layers", "run --output-csv", "run --output-npy",
    "run --output-logits-npy", "run --report",
]  # fmt: skip
SLOW_FULL_DISKS = ("build of layers", "run --output-npy")
NO_COMPILERS = {"unset": "", "named": "/none/g++", "directory": "/tmp", "quote": "g++ '"}
"""Values of the variable for a compiler on a machine that has none."""
FEW_NO_COMPILERS = ("unset", "quote")


@pytest.fixture(scope="module")
def failures(
    shared: Path, kernels: Path, llama_dir: Path, llama_checkpoint_dir: Path, llama_engine_dir: Path,
    process_environment: dict[str, str], forks: Forks,
) -> Path:  # fmt: skip
    """Directory of each of `FULL_DISKS` and `NO_COMPILERS`; `results.json` has exit codes and what was on stderr.

    On a full disk the kernels are in the cache: it is to be our file that does not fit, and not one of the compiler's.
    Layers are larger than the kernels, and the second of three does not fit.
    """
    wide = make_model("llama", hidden_size=512, intermediate_size=1280, num_hidden_layers=3)

    def make(directory: Path) -> None:
        def on_full_disk(name: str) -> tuple[int, dict[str, str], list[str]]:
            (directory / name).mkdir(parents=True)
            output = directory / name / "output"
            layers = ["build", "--checkpoint-dir", directory / "wide", "--output-dir", output, "--max-input-len", 64]
            build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", output, "--max-input-len", 64]
            prompts = [argument for _ in range(20) for argument in ("--input-text", "The little dog")]
            run = ["run", "--engine-dir", llama_engine_dir, *prompts, "--max-output-len", 20, "--quiet"]
            limit, words = {
                "convert": (100_000, ["convert", "--model-dir", llama_dir, "--output-dir", output]),
                "build": (100_000, [*build, "--compiler", "none"]),
                "build --compiler aot": (1_000, [*build, "--compiler", "aot"]),
                "build of layers": (20_000_000, [*layers, "--compiler", "aot"]),
                "run --output-csv": (1_000, [*run, "--output-csv", output]),
                "run --output-npy": (1_000, [*run, "--output-npy", output]),
                "run --output-logits-npy": (100_000, [*run, "--output-logits-npy", output]),
                "run --report": (1_000, [*run, "--report", output]),
            }[name]
            return limit, {}, [str(word) for word in words]

        def without_compiler(name: str) -> tuple[int, dict[str, str], list[str]]:
            (directory / name).mkdir()
            environment = machine_without_compiler(directory / f"{name} machine") | {"CXX": NO_COMPILERS[name]}
            words = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", directory / name / "engine"]
            return 0, environment, ["build", *map(str, words), "--compiler", "aot", "--max-input-len", "64"]

        wide.save_pretrained(directory / "wide model")
        convert(directory / "wide model", directory / "wide", None, replace=False, progress=lambda done, total: None)
        commands = json.dumps(
            {name: on_full_disk(name) for name in FULL_DISKS if is_full() or name not in SLOW_FULL_DISKS}
            | {name: without_compiler(name) for name in (NO_COMPILERS if is_full() else FEW_NO_COMPILERS)}
        )
        done = forks.run(commands, program=WITH_LIMITS, environment=process_environment)
        assert done.returncode == 0, done.stderr
        (directory / "results.json").write_text(done.stdout)

    return once(shared / "failures", make)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_FULL_DISKS else ()) for name in FULL_DISKS]
)
def test_full_disk_is_one_error_and_leaves_nothing(command: str, failures: Path, said: Said) -> None:
    exit_code, errors = json.loads((failures / "results.json").read_text())[command]
    assert exit_code == 1, errors
    assert "Traceback" not in errors
    assert errors.count("error: ") == 1, errors
    told = errors[errors.index("error: ") :]  # a slow machine tells what it does before
    said(Result(exit_code, "", told, command.split()[0]), "File too large")
    assert tree(failures / command) == []


def machine_without_compiler(directory: Path) -> dict[str, str]:
    """The environment of a machine that has no compiler by any name, nor a cache from when it had one."""
    (directory / "bin").mkdir(parents=True)
    caches = {name: str(directory / "cache") for name in ("TORCHINDUCTOR_CACHE_DIR", "SPECDEC_CACHE_DIR")}
    return {"PATH": str(directory / "bin"), "CXX": "", **caches}


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    return machine_without_compiler(tmp_path)


@pytest.mark.parametrize("named", NO_COMPILERS if is_full() else FEW_NO_COMPILERS)
def test_machine_without_a_compiler_is_one_error(named: str, failures: Path, said: Said) -> None:
    """A model that is compiled already would be found in the compiler's cache."""
    exit_code, errors = json.loads((failures / "results.json").read_text())[named]
    assert exit_code == 1
    assert "Traceback" not in errors
    said(Result(exit_code, "", errors, "build"), NO_COMPILERS[named] or "g++")
    assert tree(failures / named) == []


def test_machine_without_a_compiler_runs_what_was_built_elsewhere(
    without_compiler: dict[str, str], llama_engine_dir: Path, tmp_path: Path, specdec: Specdec, specdec_fork: Specdec
) -> None:
    shutil.copytree(llama_engine_dir, tmp_path / "engine")
    arguments = ["--input-text", PROMPT, "--max-output-len", 8, "--ngram-config", "4,2", "--json"]
    here = specdec("run", "--engine-dir", llama_engine_dir, *arguments)
    there = specdec_fork("run", "--engine-dir", tmp_path / "engine", *arguments, environment=without_compiler)
    assert there.exit_code == 0, there.stderr
    assert there.document["requests"][0]["output_ids"] == here.document["requests"][0]["output_ids"]


def test_machine_without_a_compiler_converts_a_model_once(
    without_compiler: dict[str, str], llama_dir: Path, specdec_fork: Specdec, said: Said
) -> None:
    arguments = ["--input-text", PROMPT, "--max-output-len", 2, "--max-seq-len", 64]
    result = specdec_fork("run", "--model-dir", llama_dir, *arguments, environment=without_compiler)
    assert result.exit_code == 0, result.stderr
    said(next(line for line in result.stderr.splitlines() if line.startswith("warning: ")))
    assert result.stderr.count("converting the model") == 1
