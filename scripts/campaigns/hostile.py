"""Files that are not what was written: each file of each artefact damaged in many ways, and then verified and opened.

python -m scripts.campaigns.hostile                          2,000 random cases
python -m scripts.campaigns.hostile --num-cases 100 --first 700
python -m scripts.campaigns.hostile --compiler aot           of an engine that has kernels and a compiled step

With AddressSanitizer in what is native: CXX names a script that does `exec g++ -fsanitize=address "$@"`, LD_PRELOAD
g++'s libasan.so and libstdc++.so.6 (`g++ -print-file-name=`), SPECDEC_CACHE_DIR a new directory, and ASAN_OPTIONS says
detect_leaks=0. What it finds ends a command without the two lines, which is wrong in any case.

A case is a file of an artefact, what is done to it, and a command. The command runs in a process of its own (a fork, so
that a signal is seen). It must end with one error of two lines, or in success where that is promised: `verify` finds
every change of a file that has a checksum, and so does whatever opens the artefact. Files that people may change must
not crash anything. Of files that are replaced while they are read either the old or the new is opened, or an error.
Exit 1 if a case ends otherwise.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.campaigns import forks
from scripts.campaigns.forks import use_directories

MAY_BE_CHANGED = ("generation_config.json", "chat_template.jinja")
_PATIENCE = 60_000  # a command that has not ended after so many looks hangs: at least two minutes
RUN = ("run", "--engine-dir", "engine", "--input-text", "The dog", "--max-output-len", "3")
OPENED_BY: dict[str, tuple[str, ...]] = {
    "engine": RUN,
    "tokenizer": ("corpus", "create", "--output", "new", "--force", "--tokenizer-dir", "engine", "--text", "text.txt"),
    "checkpoint": ("build", "--checkpoint-dir", "checkpoint", "--output-dir", "out", "--compiler", "none"),
    "corpus": (*RUN, "--ngram-config", "4,2", "--ngram-corpus", "corpus"),
    "profile": (*RUN, "--profile", "profile"),
    "traces": ("tune", "--traces", "traces.jsonl", "--ngram-config", "4,2"),
    "cache": RUN,  # with the cache that keeps the digests of the engine's files
}
"""Commands that open each artefact, in a directory with one of each; the engine's tokenizer also alone."""

Damage = Callable[[bytes, bytes, random.Random], bytes]
DAMAGES: dict[str, Damage] = {
    "one bit": lambda data, _, rng: _with_bit(data, rng.randrange(8 * len(data))),
    "a byte": lambda data, _, rng: _with_range(data, rng, 1, os.urandom),
    "zeros": lambda data, _, rng: _with_range(data, rng, 64, bytes),
    "cut": lambda data, _, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, _, rng: b"",
    "longer": lambda data, _, rng: data + os.urandom(rng.choice((1, 8, 5000))),
    "another's": lambda data, other, rng: other,
    "noise": lambda data, _, rng: os.urandom(len(data)),
    "deep": lambda data, _, rng: b"[" * 100_000,
    "digits": lambda data, _, rng: b'{"format_version": ' + b"9" * 5000 + b"}",
}
IN_TURN = "replaced while read"


@dataclass(frozen=True)
class Case:
    """`artefact` names what is opened; `file` lies below the directory that holds one of each."""

    number: int
    artefact: str
    file: str
    damage: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"case {self.number}: {self.file}, {self.damage}, specdec {' '.join(self.command)}"


@dataclass(frozen=True)
class Outcome:
    """End of a command: `signal` is 0 for none."""

    exit_code: int
    signal: int
    stderr: str


def files_of(home: Path, artefact: str) -> list[str]:
    """Every file of an artefact, below the directory that holds one of each."""
    name = {"tokenizer": "engine", "traces": "traces.jsonl"}.get(artefact, artefact)
    if (home / name).is_file():
        return [name]
    found = [str(path.relative_to(home)) for path in sorted((home / name).rglob("*")) if path.is_file()]
    found = [path for path in found if not path.endswith(".lock")]
    return [path for path in found if "tokenizer" in path] if artefact == "tokenizer" else found


def make_case(home: Path, number: int) -> Case:
    """The same for the same number. Every third case replaces a file in turn, and every second verifies."""
    rng = random.Random(number)
    artefact = rng.choice(list(OPENED_BY))
    damage = IN_TURN if number % 5 == 4 else rng.choice(list(DAMAGES))
    file = rng.choice(files_of(home, artefact))
    verifies = ("verify", Path(file).parts[0])
    return Case(number, artefact, file, damage, verifies if rng.random() < 0.5 else OPENED_BY[artefact])


def run_case(home: Path, case: Case) -> tuple[Outcome, str | None]:
    """Return how it ended, and what is wrong with that. `home` is as it was afterwards."""
    path = home / case.file
    data, stat = path.read_bytes(), path.stat()
    rng = random.Random(case.number)
    if case.damage == IN_TURN:
        damages = [name for name in DAMAGES if name not in ("deep", "digits")]
        other = _damaged(home, case.file, data, rng.choice(damages), rng)
        outcome = run_in_process(case.command, home, lambda: _replace_in_turn(path, data, other, rng))
        is_changed = None
    else:
        other = _damaged(home, case.file, data, case.damage, rng)
        path.write_bytes(other)
        outcome = run_in_process(case.command, home)
        is_changed = None if says_the_same(data, other) else other != data
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for made in ("new", "out"):
        shutil.rmtree(home / made, ignore_errors=True) if (home / made).is_dir() else (home / made).unlink(True)
    return outcome, what_is_wrong(case, outcome, is_changed)


def what_is_wrong(case: Case, outcome: Outcome, is_changed: bool | None) -> str | None:
    """None for an outcome as promised. `is_changed` None: it was both during the command, or says the same."""
    if outcome.signal:
        return f"ended by signal {outcome.signal} ({signal.strsignal(outcome.signal)})"
    if "Traceback" in outcome.stderr:
        return "a traceback"
    lines = [line for line in outcome.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    if outcome.exit_code:
        is_clear = outcome.exit_code == 1 and [line.partition(":")[0] for line in lines] == ["error", "hint"]
        if not is_clear:
            return f"no error of two lines, exit code {outcome.exit_code}"
        if is_changed is False:
            return "an error although nothing has changed"
        return "an error although it can be made again" if is_made_again(case) else None
    if is_changed and not (is_made_again(case) or Path(case.file).name in MAY_BE_CHANGED):
        return "success although the file has changed"
    return None


def says_the_same(data: bytes, other: bytes) -> bool:
    """True if JSON has another layout only, such as other white space or `\\u00E9` for `\\u00e9`."""
    try:
        return data != other and _json_of(data) == _json_of(other)
    except (ValueError, RecursionError):
        return False


def _json_of(data: bytes) -> object:
    """A document, or one in each line."""
    try:
        return json.loads(data)
    except ValueError:
        return [json.loads(line) for line in data.splitlines()]


def is_made_again(case: Case) -> bool:
    """True if engines keep it and make it again where it is damaged: the digests in the cache."""
    return case.artefact == "cache" and case.command[0] != "verify"


def run_in_process(
    command: tuple[str, ...],
    home: Path,
    meanwhile: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
) -> Outcome:
    """The command in a fork of this process, which has imported what commands import."""
    with tempfile.TemporaryFile() as stderr, meanwhile() if meanwhile else contextlib.nullcontext():
        child = forks.start(command, home, stderr.fileno(), prepare=lambda: use_directories(home / "cache", home))
        status = _wait(child)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if os.WIFSIGNALED(status):
        return Outcome(0, os.WTERMSIG(status), said)
    return Outcome(os.WEXITSTATUS(status), 0, said)


def _wait(child: int) -> int:
    """The status it ends with; one that hangs is ended by SIGALRM's number."""
    for _ in range(_PATIENCE):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGALRM)
    return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def _replace_in_turn(path: Path, data: bytes, other: bytes, rng: random.Random) -> Iterator[None]:
    """While the block runs the file is now one, now the other: by a new file in its place, or written over."""
    in_place = rng.random() < 0.5
    replacer = os.fork()
    if not replacer:
        try:
            while os.getppid() != 1:
                for content in (other, data):
                    if in_place:
                        path.write_bytes(content)
                    else:
                        beside = path.with_name(f".{path.name}.new")
                        beside.write_bytes(content)
                        beside.replace(path)
                    time.sleep(rng.random() * 0.02)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(replacer, signal.SIGKILL)
        os.waitpid(replacer, 0)
        path.with_name(f".{path.name}.new").unlink(missing_ok=True)


def _damaged(home: Path, file: str, data: bytes, damage: str, rng: random.Random) -> bytes:
    every = [one for artefact in OPENED_BY for one in files_of(home, artefact) if one != file]
    if not data:
        return os.urandom(9)
    return DAMAGES[damage](data, (home / rng.choice(every)).read_bytes(), rng)


def _with_bit(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _with_range(data: bytes, rng: random.Random, length: int, make: Callable[[int], bytes]) -> bytes:
    start = rng.randrange(len(data))
    kept = data[start : start + length]
    return data[:start] + make(len(kept)) + data[start + length :]


def make_home(home: Path, engine_dir: Path, checkpoint_dir: Path) -> None:
    """One of each artefact, in a new directory; the engine is of the checkpoint."""
    home.mkdir()
    shutil.copytree(engine_dir, home / "engine")
    shutil.copytree(checkpoint_dir, home / "checkpoint")
    (home / "text.txt").write_text("The little dog had a red ball. The little dog had a red ball.\n" * 5)
    (home / "cache").mkdir()
    time.sleep(0.2)  # files of this very moment are not kept digests of
    commands = (
        OPENED_BY["tokenizer"],
        (*RUN, "--output-traces", "traces.jsonl", "--ngram-config", "4,2"),
        (*RUN, "--input-text", "The little dog"),
    )
    for command in commands:
        _expect_success(home, command)
    (home / "new").rename(home / "corpus")
    _write_profile(home)
    shutil.copytree(home / "engine", home / "cache" / "engines" / "model-0123456789abcdef")
    for artefact, command in OPENED_BY.items():
        if artefact != "checkpoint":
            _expect_success(home, command)
        _expect_success(home, ("verify", Path(files_of(home, artefact)[0]).parts[0]))
    (home / "new").unlink()


def _expect_success(home: Path, command: tuple[str, ...]) -> None:
    outcome = run_in_process(command, home)
    if (outcome.exit_code, outcome.signal) != (0, 0):
        raise RuntimeError(f"specdec {' '.join(command)}: {outcome}")


def _write_profile(home: Path) -> None:
    from runtime.builder.profile import Figures, Profile, ProfileEngine, engine_digest, write_profile
    from runtime.checkpoint.bundle import read_engine_config
    from runtime.drafters.specs import NgramDrafter
    from runtime.drafters.speculation import Speculation

    digest = engine_digest(read_engine_config(home / "engine"))
    figures = Figures(8, 1, 1.5, 0.25, 0.9, 1.4, 1.0, 1.25)
    write_profile(
        home / "profile", Profile(ProfileEngine("engine", digest), Speculation((NgramDrafter(4, 2),), "fixed"), figures)
    )


def count_cases(home: Path, first: int, number: int) -> tuple[Counter[str], list[str]]:
    """Run them; how they ended, and what was wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for i in range(first, first + number):
        case = make_case(home, i)
        outcome, what = run_case(home, case)
        counts[f"{case.artefact}: {'error' if outcome.exit_code else 'signal' if outcome.signal else 'success'}"] += 1
        counts[case.damage] += 1
        if (i + 1 - first) % 100 == 0:
            print(f"{i + 1 - first:,} cases, {len(wrong)} of them wrong", file=sys.stderr, flush=True)
        if what:
            wrong.append(f"{case}: {what}\n{outcome.stderr[-2000:]}")
            print(wrong[-1], file=sys.stderr, flush=True)
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged files, verified and opened.")
    parser.add_argument("--num-cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--compiler", choices=["none", "aot"], default="none", help="the engine's")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # forks of several threads
    forks.import_all()
    import torch

    from runtime.builder.build import BuildEffort, build_engine
    from runtime.builder.convert import convert
    from runtime.checkpoint.config import BuildConfig
    from runtime.checkpoint.resolve import resolve_model

    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        checkpoint_dir, engine_dir = Path(directory) / "checkpoint", Path(directory) / "engine"
        model_dir = resolve_model("demo-draft")
        convert(model_dir, checkpoint_dir, "float32", replace=False, progress=lambda done, total: None)
        build = BuildConfig(given.compiler, 2, 48, 96, 8, 16, "draft_tokens_external")
        device = torch.device("cpu")
        build_engine(
            checkpoint_dir,
            engine_dir,
            build,
            device,
            replace=False,
            phase=lambda _: None,
            effort=BuildEffort(measure_costs=False),
        )
        make_home(home, engine_dir, checkpoint_dir)
        counts, wrong = count_cases(home, given.first, given.num_cases)
    print(json.dumps(dict(sorted(counts.items())), indent=2))
    print(f"{given.num_cases:,} cases, {len(wrong)} of them wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
