"""Kills commands at random moments: what they leave is whole or absent, and the same call made again succeeds.

python -m scripts.campaigns.kill                     100 kills of all commands in turn
python -m scripts.campaigns.kill --kills 10 --first 700
python -m scripts.campaigns.kill --kills 10 --only batch     whose results are an undisturbed call's, byte for byte
python -m scripts.campaigns.kill --slow              the same with a disk that is slow (a C++ compiler makes it so)
python -m scripts.campaigns.kill --disks             full and read-only disks (root: they are mounted), and no kills
python -m scripts.campaigns.kill --kv --kills 200    three processes that share keys and values on disk

A command is killed (signal 9) half the time at any moment, and half the time while it writes; what it would replace is
there or not. After the kill, what was there must still be read, old or new, and what was not is whole or absent. After
the next call everything is there, and nothing hidden is left behind. Exit 1 if that is not so.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from runtime.builder.engine_cache import EngineSettings
from runtime.builder.profile import read_profile
from runtime.checkpoint.bundle import check_step_files, check_tokenizer_files, read_bundle
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.config import BuildConfig
from runtime.core.request import Request
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import scheduler
from runtime.text.corpus import Corpus
from runtime.util.digests import read_kept_digest
from scripts.campaigns import forks
from scripts.campaigns.forks import use_directories

MODEL = "demo-draft"
TEXT = "def area(w, h):\n    return w * h\n\ndef area(w, h):\n    return w * h\n" * 8
LIMIT_S = 120.0


@dataclass(frozen=True)
class Command:
    """Command to kill. `arguments` are those that write `outputs` in the directory that it is called in."""

    name: str
    arguments: list[object]
    outputs: dict[str, Callable[[Path], object]]
    """Names, and what raises unless one of that name can be read, and is whole."""
    prepare: Callable[[], object] = lambda: None
    """Called in the process before."""


@dataclass(frozen=True)
class Moments:
    """Time that a command takes, and after how much of it something is written."""

    duration_s: float
    writing_s: float


class Campaign:
    """Commands, what they need, and what came of them, in a directory."""

    def __init__(self, work_dir: Path, only: str | None = None, without: Sequence[str] = ()) -> None:
        """All commands but those of these names, or the one of a name."""
        self.work_dir = work_dir
        self.temporary = work_dir / "temporary"
        self.temporary.mkdir()
        self.found: Counter[str] = Counter()
        self.commands = [
            command for command in make_commands(self) if command.name not in without and only in (None, command.name)
        ]
        self.moments = {command.name: self._time(command) for command in self.commands}

    def kill(self, number: int) -> list[str]:
        """Kill one command, chosen and killed by `number`; what is wrong then, and after the next call."""
        rng = random.Random(number)
        command = self.commands[number % len(self.commands)]
        place = Path(tempfile.mkdtemp(dir=self.work_dir))
        replaces, while_writing = rng.random() < 0.5, rng.random() < 0.5
        if replaces:
            shutil.copytree(self._made(command), place, dirs_exist_ok=True)
        was_killed = self._start_and_kill(command, place, rng, while_writing=while_writing)
        self.found["killed" if was_killed else "done before it could be killed"] += 1
        what = f"{number}: {command.name}, {'replacing' if replaces else 'new'}, killed "
        what += "while it wrote" if while_writing else "at any moment"
        problems = [f"then {problem}" for problem in self._look(command, place, must_be_there=replaces)]
        if problem := self.run(command, place):
            problems.append(f"the next call failed: {problem}")
        problems += [f"after the next call {problem}" for problem in self._look(command, place, must_be_there=True)]
        problems += [f"left behind: {path}" for path in (*_hidden(place), *place.glob("*.partial"))]
        # Removed by the next process that makes one of its own, as `build` does.
        if left := list(self.temporary.glob("specdec.work.*")):
            self.found["temporary directories left to the next build"] += 1
            problems += [f"left behind: {path}" for path in left if command.name == "build"]
        self.found["left to the next kept digest"] += len(list(place.glob("cache/digests/.*")))
        shutil.rmtree(place)
        return [f"{what}: {problem}" for problem in problems]

    def _start_and_kill(self, command: Command, place: Path, rng: random.Random, *, while_writing: bool) -> bool:
        moments = self.moments[command.name]
        with self._started(command, place) as (process_id, _):
            if while_writing:
                _wait_for_writing(process_id, place)
                time.sleep(rng.uniform(0, moments.writing_s))
            else:
                time.sleep(rng.uniform(0, moments.duration_s))
            os.kill(process_id, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(process_id, 0)[1])

    def _look(self, command: Command, place: Path, *, must_be_there: bool) -> list[str]:
        """Find what is wrong with the outputs; reading finds those that a killed process was about to replace."""
        problems = []
        for name, check in command.outputs.items():
            try:
                if must_be_there or (place / name).exists():
                    check(place / name)
                    self.found["whole"] += 1
                else:
                    self.found["absent"] += 1
            except Exception as error:
                problems.append(f"{name} is not whole: {type(error).__name__}: {error}")
        return problems

    def run(self, command: Command, place: Path) -> str | None:
        """Call it to its end; what it said if it failed."""
        with self._started(command, place) as (process_id, errors):
            code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
            return None if code == 0 else f"exit code {code}: {errors.read_text()[-1000:]}"

    @contextmanager
    def _started(self, command: Command, place: Path) -> Iterator[tuple[int, Path]]:
        """The process id, and the file that its errors go to."""

        def prepare() -> None:
            use_directories(self.work_dir / "cache", self.temporary)
            command.prepare()

        with tempfile.NamedTemporaryFile(dir=self.work_dir) as errors:
            yield forks.start(command.arguments, place, errors.fileno(), prepare=prepare), Path(errors.name)

    def _time(self, command: Command) -> Moments:
        """Time a call, which makes what others are to replace."""
        place = self._made(command)
        place.mkdir(parents=True)
        start = time.monotonic()
        with self._started(command, place) as (process_id, errors):
            _wait_for_writing(process_id, place)
            writing = time.monotonic()
            if os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]):
                raise RuntimeError(f"{command.name} failed: {errors.read_text()}")
        end = time.monotonic()
        if problems := self._look(command, place, must_be_there=True):
            raise RuntimeError(f"{command.name}: {problems}")
        return Moments(end - start, max(end - writing, 0.02))

    def _made(self, command: Command) -> Path:
        return self.work_dir / "made" / command.name

    def try_disk(self, command: Command, kind: str) -> list[str]:
        """Find what is wrong after a call on a disk of this kind (an option of mount)."""
        with mounted(self.work_dir / "disk", kind) as disk, self._started(command, disk) as (process_id, errors):
            code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
            said = errors.read_text()
            problems = self._look(command, disk, must_be_there=code == 0)
            problems += [f"left behind: {path}" for path in _hidden(disk)]
        kinds = [line.partition(":")[0] for line in said.splitlines() if line.startswith(("error: ", "hint: "))]
        if "Traceback" in said or (code, kinds) not in ((0, []), (1, ["error", "hint"])):
            problems.append(f"exit code {code}: {said[-1000:]}")
        self.found[f"{command.name} on {kind}: exit code {code}"] += 1
        return [f"{command.name} on {kind}: {problem}" for problem in problems]


@contextmanager
def slow_disk() -> Iterator[dict[str, str]]:
    """The environment of a process whose writes take long; CalledProcessError where there is no compiler."""
    with tempfile.TemporaryDirectory() as directory:
        library, source = Path(directory) / "slow_disk.so", Path(__file__).with_name("slow_disk.cpp")
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-o", library]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, source], check=True)
        yield os.environ | {"LD_PRELOAD": str(library)}


DISKS = ("size=16k", "size=200k", "size=1500k", "ro")


@contextmanager
def mounted(disk: Path, kind: str) -> Iterator[Path]:
    """CalledProcessError where nothing can be mounted."""
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", kind, "tmpfs", disk], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@dataclass(frozen=True)
class SharedStore:
    """Processes that answer the same prompts and share their keys and values on disk; one after the other is killed.

    No answer may be wrong, nothing damaged, and what a process said to be on disk must be found.
    """

    engine_dir: Path
    directory: Path
    num_processes: int = 3

    def kill(self, num_kills: int, seed: int = 0) -> list[str]:
        """Kill so many of them, each replaced by another that answers later prompts too; what is wrong."""
        rng = random.Random(seed)
        prompts = _prompts(rng, num_kills + _NUM_AT_ONCE)
        with self._opened() as engine, engine.without_disk():  # which reads sources, once for all forks
            expected = dict(_answers(engine, prompts, range(len(prompts))))
        said = self.directory.with_name("said")
        with said.open("ab", buffering=0) as file:  # not a pipe, which is full after 64 kB
            running = [self._start(prompts, expected, 0, file.fileno()) for _ in range(self.num_processes)]
            _wait_for_line(said, "kept ")
            for number in range(num_kills):
                time.sleep(rng.uniform(0, 1))
                process_id = running.pop(rng.randrange(len(running)))
                os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
                running.append(self._start(prompts, expected, number, file.fileno()))
            for process_id in running:
                os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
        counts = Counter(said.read_text().splitlines())
        kept = {int(line.removeprefix("kept ")) for line in counts if line.startswith("kept ")}
        problems = [line for line in counts if not line.startswith(("kept ", "answered"))]
        problems += [] if kept else ["nothing was kept before the kills"]
        print(f"{num_kills} kills: {counts['answered']} answers, {len(kept)} prompts kept", file=sys.stderr)
        with self._opened() as engine:
            for number in sorted(kept):
                before = engine.prompt_tokens.num_on_disk
                ((_, output),) = _answers(engine, prompts, [number])
                if output != expected[number]:
                    problems.append(f"prompt {number} is answered wrong after the kills")
                if engine.prompt_tokens.num_on_disk - before < len(prompts[number]) - 1:
                    problems.append(f"prompt {number} was kept, and is not found")
                engine.flush_disk()  # a reader waits a second for a writer, and then computes
                engine.clear_cache()
        return problems

    def _opened(self) -> Engine:
        return Engine.open(self.engine_dir, kv_cache=KVCacheConfig(disk_dir=self.directory))

    def _start(self, prompts: list[list[int]], expected: dict[int, list[int]], first: int, said: int) -> int:
        if process_id := os.fork():
            return process_id
        try:
            self._answer_forever(prompts, expected, first, said)
        except BaseException as error:
            os.write(said, f"a process failed: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)

    def _answer_forever(self, prompts: list[list[int]], expected: dict[int, list[int]], first: int, said: int) -> None:
        """Answer prompts `first` to `first` + 23, eight at a time, and say which are on disk then."""

        def tell(message: Warning | str, *_: object, **__: object) -> None:
            os.write(said, f"told: {message}\n".encode())

        warnings.showwarning = tell
        rng = random.Random(os.getpid())
        with self._opened() as engine:
            while True:
                numbers = rng.sample(range(first, first + _NUM_AT_ONCE), 8)
                for number, output in _answers(engine, prompts, numbers):
                    what = "answered" if output == expected[number] else f"prompt {number} is answered wrong"
                    os.write(said, f"{what}\n".encode())
                if engine.flush_disk():
                    os.write(said, "".join(f"kept {number}\n" for number in numbers).encode())
                engine.clear_cache()


_NUM_AT_ONCE = 24
"""Prompts that a process chooses from."""


def _prompts(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Prompts of which some begin alike."""
    beginnings = [[rng.randrange(3, 30) for _ in range(20)] for _ in range(4)]
    return [beginnings[i % 4] + [rng.randrange(3, 30) for _ in range(24 + i % 16)] for i in range(num_prompts)]


def _answers(engine: Engine, prompts: list[list[int]], numbers: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    requests = [Request(number, tuple(prompts[number]), 8) for number in numbers]
    for sequence, _ in scheduler.generate(engine, requests):
        if sequence.finish_reason is not None:
            yield sequence.request.id, sequence.output_tokens


def _wait_for_line(written: Path, beginning: str) -> None:
    """Wait until a line begins so, however slow the disk, or until a process says that it failed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if any(line.startswith((beginning, "a process failed")) for line in written.read_text().splitlines()):
            return
        time.sleep(0.02)


def _wait_for_writing(process_id: int, place: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    before = _tree(place)
    while _tree(place) == before and time.monotonic() < deadline:
        if os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.0005)


def _hidden(place: Path) -> list[str]:
    """Directories that are written in, and what they were to replace; not of digests, which the next one removes."""
    return [str(path.relative_to(place)) for path in place.rglob(".*") if path.parent.name != "digests"]


def _tree(place: Path) -> set[str]:
    """All names below, some of which come and go meanwhile."""
    return {os.path.join(parent, name) for parent, *names in os.walk(place) for name in (*names[0], *names[1])}


def make_commands(campaign: Campaign) -> list[Command]:
    """All that write something, on a small model without a compiler."""
    checkpoint, engine = campaign.work_dir / "checkpoint", campaign.work_dir / "engine"
    text = campaign.work_dir / "text.txt"
    text.write_text(TEXT)
    output = ["--output-dir", "output", "--force"]
    convert = Command(
        "convert",
        ["convert", "--model-dir", MODEL, "--dtype", "float32", *output],
        {"output": lambda path: _check_checkpoint(path, checkpoint)},
    )
    sizes = ["--max-batch-size", 8, "--max-input-len", 64, "--max-seq-len", 128, "--max-draft-len", 5]
    mode = ["--speculative-decoding-mode", "draft_tokens_external"]
    build = Command(
        "build",
        ["build", "--checkpoint-dir", checkpoint, "--compiler", "none", *sizes, *mode, *output],
        {"output": _check_engine},
    )
    for command, made in ((convert, checkpoint), (build, engine)):
        if problem := campaign.run(command, campaign.work_dir):
            raise RuntimeError(f"{command.name}: {problem}")
        (campaign.work_dir / "output").rename(made)
    corpus = Command(
        "corpus",
        ["corpus", "create", "--output", "output", "--force", "--tokenizer-dir", engine, "--text", text],
        {"output": lambda path: Corpus.open(path).check_content()},
    )
    asked = ["--engine-dir", engine, "--input-text", TEXT[:60], "--max-output-len", 16, "--ngram-config", "[3,2,[0]]"]
    tune = Command("tune", ["tune", *asked, "--num-live-prompts", 1, "--output", "output"], {"output": read_profile})
    files = ["--output-csv", "csv", "--output-npy", "npy.npy", "--output-traces", "traces", "--report", "report"]
    run = Command(
        "run",
        ["run", *asked, *files],
        {
            "csv": lambda path: _assert(len(path.read_text().split(",")) > 1),
            "npy.npy": lambda path: _assert(np.load(path).size > 1),
            "traces": lambda path: _assert([json.loads(line) for line in path.read_text().splitlines()]),
            "report": lambda path: _assert(path.read_text().rstrip().endswith("</html>")),
        },
    )
    return [convert, build, corpus, tune, run, _run_with_a_cache(), _batch(campaign.work_dir, engine)]


def _batch(work_dir: Path, engine: Path) -> Command:
    """Results are those of the undisturbed call, whose moments were taken, byte for byte."""
    requests, undisturbed = work_dir / "requests.jsonl", work_dir / "made" / "batch" / "results.jsonl"
    rows = [{"prompt": TEXT[i : i + 60], "max_tokens": 4 + i, "temperature": i % 2, "seed": i} for i in range(12)]
    requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["batch", "-i", requests, "-o", "results.jsonl", "--engine-dir", engine, "--ngram-config", "3,2"]
    return Command(
        "batch", arguments, {"results.jsonl": lambda path: _assert(path.read_bytes() == undisturbed.read_bytes())}
    )


def _run_with_a_cache() -> Command:
    """`run` of a model, whose engine is in a cache of the place's own."""

    def prepare() -> None:
        build_config = EngineSettings.build_config

        def uncompiled(self: EngineSettings, num_positions: int) -> BuildConfig:
            return replace(build_config(self, num_positions), compiler="none")

        EngineSettings.build_config = uncompiled  # type: ignore[method-assign]
        os.environ["SPECDEC_CACHE_DIR"] = str(Path("cache").absolute())

    def check(cache: Path) -> None:
        for engine in (cache / "engines").glob("[!.]*"):
            if engine.is_dir():
                _check_engine(engine)
        for kept in (cache / "digests").glob("[!.]*"):
            _assert(read_kept_digest(kept))

    sizes = ["--max-output-len", 4, "--max-seq-len", 128, "--max-batch-size", 1]
    arguments = ["run", "--model-dir", MODEL, "--input-text", TEXT[:60], *sizes]
    return Command("run with a cache", arguments, {"cache": check}, prepare)


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


def _assert(is_whole: object) -> None:
    if not is_whole:
        raise ValueError("half written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first kill")
    parser.add_argument("--only", metavar="COMMAND", help="kill none but this one")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--disks", action="store_true")
    parser.add_argument("--kv", action="store_true")
    given = parser.parse_args()
    if given.slow:
        with slow_disk() as environment:
            arguments = [argument for argument in sys.argv[1:] if argument != "--slow"]
            again = [sys.executable, "-m", "scripts.campaigns.kill", *arguments]
            sys.exit(subprocess.run(again, env=environment).returncode)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    forks.import_all()
    problems = []
    with tempfile.TemporaryDirectory(prefix="kill-") as directory:
        campaign = Campaign(Path(directory), "corpus" if given.kv else given.only)
        if given.kv:
            store = SharedStore(campaign.work_dir / "engine", campaign.work_dir / "kv")
            trials = [lambda: store.kill(given.kills, given.first)]
        elif given.disks:
            trials = [lambda c=c, d=d: campaign.try_disk(c, d) for c in campaign.commands for d in DISKS]
        else:
            trials = [lambda n=n: campaign.kill(n) for n in range(given.first, given.first + given.kills)]
        for i, trial in enumerate(trials):
            found = trial()
            problems += found
            print(*found, f"{i + 1} of {len(trials)}, {len(problems)} problems", sep="\n", file=sys.stderr, flush=True)
    print(json.dumps(dict(sorted(campaign.found.items())), indent=2))
    print(f"{len(trials)} tried, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
