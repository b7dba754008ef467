"""Kills commands at random moments: what they leave is whole or absent, and the same call made again succeeds.

python scripts/campaigns/kill.py                     100 kills of all commands in turn
python scripts/campaigns/kill.py --kills 10 --seed 1
python scripts/campaigns/kill.py --disks             full and read-only disks too (root: they are mounted)

Every command is killed (signal 9) half the time at any moment, and half the time while its output is being written;
what it would replace is there or not. Exit 1 if anything is found half written, or lost, or if the next call fails.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

# What takes seconds to import is imported here: every trial is forked.
from commands.html import report as _report  # noqa: F401
from runtime.bundle import check_step_files, check_tokenizer_files, read_bundle
from runtime.checkpoint_dir import open_checkpoint
from runtime.config import BuildConfig
from runtime.corpus import Corpus
from runtime.engine_cache import EngineSettings
from runtime.tuning.profile import read_profile
from specdec_cli.app import main as specdec

MODEL = "demo-draft"
TEXT = "def area(w, h):\n    return w * h\n\ndef area(w, h):\n    return w * h\n" * 8
LIMIT_S = 300.0


@dataclass(frozen=True)
class Command:
    """What is killed. `arguments` writes `outputs` in the directory that it is called with."""

    name: str
    arguments: Callable[[Path], list[object]]
    outputs: dict[str, Callable[[Path], object]]
    """Names, and what raises unless one of that name is whole."""
    force: bool = True


def main() -> None:
    arguments = _parse_arguments()
    work_dir = Path(tempfile.mkdtemp(prefix="kill-"))  # not removed at a process' end: every trial is a process
    try:
        os.environ["SPECDEC_CACHE_DIR"] = str(work_dir / "cache")
        os.environ["TMPDIR"] = tempfile.tempdir = str(work_dir / "temporary")
        (work_dir / "temporary").mkdir()
        commands = _commands(work_dir)
        problems = kill_commands(commands, work_dir, arguments.kills, arguments.seed)
        if arguments.disks:
            problems += try_disks(commands, work_dir)
    finally:
        shutil.rmtree(work_dir)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    sys.exit(bool(problems))


def kill_commands(commands: list[Command], work_dir: Path, num_kills: int, seed: int) -> list[str]:
    """Kill them in turn, and say what is wrong afterwards."""
    rng, problems = random.Random(seed), []
    moments = {command.name: _moments(command, work_dir) for command in commands}
    found: Counter[str] = Counter()
    for i in range(num_kills):
        command = commands[i % len(commands)]
        problems += _kill(command, moments[command.name], work_dir, rng, found)
        print(f"{i + 1} kills, {len(problems)} problems {problems[-1:]}", file=sys.stderr, flush=True)
    print(f"{num_kills} kills, seed {seed}: {len(problems)} problems; found afterwards: {dict(found)}")
    return problems


def _kill(
    command: Command, moments: tuple[float, float], work_dir: Path, rng: random.Random, found: Counter[str]
) -> list[str]:
    """One trial."""
    place = Path(tempfile.mkdtemp(dir=work_dir))
    replaces = rng.random() < 0.5
    if replaces:
        shutil.copytree(work_dir / "made" / command.name, place, dirs_exist_ok=True)
    was_there = {name for name in command.outputs if (place / name).exists()}
    duration_s, writing_s = moments
    while_writing = rng.random() < 0.5
    process_id = _start(command, place, work_dir / "errors")
    if while_writing:
        _wait_for_writing(process_id, place)
    time.sleep(rng.uniform(0, writing_s if while_writing else duration_s))
    os.kill(process_id, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(process_id, 0)[1])
    what = f"{command.name}, {'replacing' if replaces else 'new'}, killed {'writing' if while_writing else 'anywhere'}"
    problems = [f"{what}: {problem}" for problem in _look(command, place, found)]
    hidden = [path.name for path in place.iterdir() if path.name.startswith(".")]
    found["killed" if killed else "done before it could be killed"] += 1
    found["with hidden leftovers"] += bool(hidden)
    if problem := _run(command, place):
        problems.append(f"{what}: the next call failed: {problem}")
    problems += [f"{what}, next call: {problem}" for problem in _look(command, place, Counter())]
    problems += [f"{what}, next call: absent: {name}" for name in command.outputs if not (place / name).exists()]
    if left := [path.name for path in place.iterdir() if path.name.startswith(".")]:
        problems.append(f"{what}: left behind: {left}")
    left = [path.name for path in (work_dir / "temporary").glob("specdec.work.*")]
    if left and command.name in ("build", "cache"):  # the others make none of their own, and see none of others'
        problems.append(f"{what}: left behind in the temporary directory: {left}")
    if lost := {name for name in was_there if not (place / name).exists()}:
        problems.append(f"{what}: lost: {lost}")
    shutil.rmtree(place)
    return problems


def _look(command: Command, place: Path, found: Counter[str]) -> list[str]:
    """What is wrong with the outputs that are there."""
    problems = []
    for name, check in command.outputs.items():
        found["whole" if (place / name).exists() else "absent"] += 1
        if (place / name).exists():
            try:
                check(place / name)
            except Exception as error:
                problems.append(f"{name} is not whole: {type(error).__name__}: {error}")
    return problems


def _moments(command: Command, work_dir: Path) -> tuple[float, float]:
    """How long the command takes, and how much of it after its output's first byte. What it made is kept to copy."""
    place = work_dir / "made" / command.name
    place.mkdir(parents=True)
    start = time.monotonic()
    process_id = _start(command, place, work_dir / "errors")
    _wait_for_writing(process_id, place)
    writing = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    end = time.monotonic()
    if code:
        raise RuntimeError(f"{command.name} failed: {(work_dir / 'errors').read_text()[-500:]}")
    return end - start, max(end - writing, 0.02)


def _wait_for_writing(process_id: int, place: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    before = set(os.listdir(place))
    while set(os.listdir(place)) == before and time.monotonic() < deadline:
        if os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.0005)


def _run(command: Command, place: Path) -> str | None:
    """Call it to its end; what it said if it failed."""
    with tempfile.NamedTemporaryFile(dir=place.parent) as errors:
        code = os.waitstatus_to_exitcode(os.waitpid(_start(command, place, Path(errors.name)), 0)[1])
        return None if code == 0 else f"{command.name}, exit code {code}: {Path(errors.name).read_text()[-500:]}"


def _start(command: Command, place: Path, errors: Path, file_limit: int | None = None) -> int:
    """The process id of the command, which is run in a fork of this process: it has imported all that it needs."""
    sys.stdout.flush()
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        force = ["--force"] if command.force else []
        sys.argv = ["specdec", *map(str, command.arguments(place)), *force]
        try:
            specdec()
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    finally:
        sys.stderr.flush()
        _leave(code)
    raise AssertionError("it has left")


def _leave(code: int) -> None:
    """As a process ends, but not the parent's way: what was registered for its end is done, and no more."""
    import atexit

    atexit._run_exitfuncs()
    os._exit(code)


def _commands(work_dir: Path) -> list[Command]:
    """All that write something, on a small model without a compiler."""
    _build_uncompiled()
    checkpoint, engine = work_dir / "checkpoint", work_dir / "engine"
    (work_dir / "text.txt").write_text(TEXT)
    convert = Command(
        "convert",
        lambda place: ["convert", "--model-dir", MODEL, "--output-dir", place / "output", "--dtype", "float32"],
        {"output": lambda path: _check_checkpoint(path, checkpoint)},
    )
    drafts = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 5]
    build = Command(
        "build",
        lambda place: ["build", "--checkpoint-dir", checkpoint, "--output-dir", place / "output", "--compiler", "none",
                       "--max-batch-size", 1, "--max-input-len", 64, "--max-seq-len", 128, *drafts],
        {"output": _check_engine},
    )  # fmt: skip
    for command, made in ((convert, checkpoint), (build, engine)):
        if problem := _run(command, work_dir):
            raise RuntimeError(problem)
        (work_dir / "output").rename(made)
    corpus = Command(
        "corpus",
        lambda place: ["corpus", "create", "--output", place / "output", "--tokenizer-dir", engine, "--text",
                       work_dir / "text.txt"],
        {"output": lambda path: Corpus.open(path).check_content()},
    )  # fmt: skip
    asked = ["--engine-dir", engine, "--input-text", TEXT[:60], "--max-output-len", 16]
    tune = Command(
        "tune",
        lambda place: ["tune", *asked, "--num-live-prompts", 1, "--ngram-config", "[3,2,[0]]", "--output",
                       place / "output"],
        {"output": read_profile},
        force=False,
    )  # fmt: skip
    run = Command(
        "run",
        lambda place: ["run", *asked, "--ngram-config", "[3,2,[0]]", "--output-csv", place / "csv", "--output-npy",
                       place / "npy.npy", "--output-traces", place / "traces", "--report", place / "report"],
        {"csv": lambda path: _assert(len(path.read_text().split(",")) > 1),
         "npy.npy": lambda path: _assert(np.load(path).size > 1),
         "traces": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
         "report": lambda path: _assert(path.read_text().rstrip().endswith("</html>"))},
        force=False,
    )  # fmt: skip
    return [convert, build, corpus, tune, run, _cached_run()]


def _cached_run() -> Command:
    """`run` of a model, whose engine is in a cache of the place's own."""

    def arguments(place: Path) -> list[object]:
        os.environ["SPECDEC_CACHE_DIR"] = str(place / "cache")  # in the fork
        asked = ["--input-text", TEXT[:60], "--max-output-len", 4, "--max-seq-len", 128, "--max-batch-size", 1]
        return ["run", "--model-dir", MODEL, *asked]

    def check(cache: Path) -> None:
        for engine in (cache / "engines").glob("[!.]*"):
            if engine.is_dir():
                _check_engine(engine)
        for kept in (cache / "digests").glob("[!.]*"):
            _assert(kept.is_dir() or len(kept.read_bytes()) == 64)

    return Command("cache", arguments, {"cache": check}, force=False)


def _build_uncompiled() -> None:
    build_config = EngineSettings.build_config

    def uncompiled(self: EngineSettings, num_positions: int) -> BuildConfig:
        return replace(build_config(self, num_positions), compiler="none")

    EngineSettings.build_config = uncompiled  # type: ignore[method-assign]


def _check_checkpoint(path: Path, reference: Path) -> None:
    open_checkpoint(path)
    names = sorted(file.name for file in reference.iterdir())
    _assert(sorted(file.name for file in path.iterdir()) == names)
    for name in names:
        _assert((path / name).read_bytes() == (reference / name).read_bytes())


def _check_engine(path: Path) -> None:
    bundle = read_bundle(path)
    check_step_files(bundle)
    check_tokenizer_files(bundle)


def _assert(is_whole: bool) -> None:
    if not is_whole:
        raise ValueError("half written")


def try_disks(commands: list[Command], work_dir: Path) -> list[str]:
    """Each command on a disk that is full after so many bytes, and on one that cannot be written at all."""
    problems, num_tried = [], 0
    for command in commands:
        for kind in ("size=16k", "size=200k", "size=1500k", "ro"):
            disk = work_dir / "disk"
            disk.mkdir(exist_ok=True)
            if subprocess.run(["mount", "-t", "tmpfs", "-o", kind, "tmpfs", disk], capture_output=True).returncode:
                return [*problems, "no disk can be mounted here"]
            try:
                errors = work_dir / "errors"
                code = os.waitstatus_to_exitcode(os.waitpid(_start(command, disk, errors), 0)[1])
                said = errors.read_text()
                num_tried += 1
                print(f"{command.name} on {kind}: exit code {code} {said.strip().splitlines()[-2:] if code else ''}")
                if "Traceback" in said or code not in (0, 1):
                    problems.append(f"{command.name} on a disk of {kind}: exit code {code}: {said[-500:]}")
                problems += [f"{command.name} on {kind}: {problem}" for problem in _look(command, disk, Counter())]
                if left := [path.name for path in disk.iterdir() if path.name.startswith(".")]:
                    problems.append(f"{command.name} on {kind}: left behind: {left}")
            finally:
                subprocess.run(["umount", disk], check=True)
    print(f"{num_tried} commands on full and read-only disks")
    return problems


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disks", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
