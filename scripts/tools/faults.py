"""Plants the faults listed in `tests/faults.toml`, one at a time, and says which of them the nearest tests catch.

python -m scripts.tools.faults                        all of them, in half an hour
python -m scripts.tools.faults --only 3 17 20-29      by their numbers
python -m scripts.tools.faults --only kv_cache        by their room
python -m scripts.tools.faults --list                 names them and runs nothing

They were written by hand, as an engineer would make them when tired: of state, counts, order, ownership and units. A
fault is found by the text that it replaces, which stands in the tree once, wherever its file is now. It is planted in a
copy of the tree, where its nearest tests have a minute of a processor. A test that hangs counts as caught only if its
own wait ends it and says what it waited for. Exit 1 unless 90 % are caught.
"""

import argparse
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "faults.toml"
PACKAGES = ("specdec_cli", "commands", "runtime")
_COPIED = (*PACKAGES, "tests", "scripts", "docs", "README.md", "pyproject.toml")
_SOURCES = {".py", ".h", ".cpp", ".html"}
_WANTED = 0.9
_HANG_S, _WALL = 120.0, 5.0
"""Seconds after which a test's own wait ends (`tests/waiting.py`), and the wall time of tests by that of a processor:
the machine may have other work.
"""


@dataclass(frozen=True)
class Fault:
    """A fault: in `function`, of `file` when it was written, the text `before` becomes `after`."""

    room: str
    stands_for: str
    file: str
    function: str
    before: str
    after: str
    tests: str
    """Names of test modules, wherever they are, and options of pytest's: `test_batch -k pack`."""


def read_faults(path: Path = LIST) -> list[Fault]:
    return [Fault(**fields) for fields in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


def read_sources(root: Path) -> dict[Path, str]:
    """The text of each source file of the packages."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*") if path.suffix in _SOURCES)
    return {path: path.read_text(encoding="utf-8") for path in paths}


def place_of(fault: Fault, sources: dict[Path, str]) -> Path:
    """The file with the fault's text; ValueError unless it stands in one file, once."""
    places = [path for path, text in sources.items() for _ in range(text.count(fault.before))]
    if len(places) != 1:
        raise ValueError(f"the text of a fault stands in {len(places)} places, not in one ({fault.stands_for})")
    return places[0]


def arguments_of(tests: str, root: Path) -> list[str]:
    """Arguments of pytest, with the path of each test module that is named; ValueError for one that there is not."""
    modules = {path.stem: path for path in (root / "tests").rglob("test_*.py")}
    words = shlex.split(tests)
    if missing := [word for word in words if re.fullmatch(r"test_\w+", word) and word not in modules]:
        raise ValueError(f"no such module of tests: {missing[0]}")
    return [str(modules[word]) if word in modules else word for word in words]


@dataclass(frozen=True)
class Run:
    """Outcome of tests: the first that failed, None if all passed; `has_ended` False where time ran out.

    `seconds` are a processor's.
    """

    failed: str | None
    seconds: float
    has_ended: bool = True

    @property
    def said(self) -> str:
        return self.failed or ("SURVIVED" if self.has_ended else "HANGS")


def run_tests(tree: Path, tests: str, limit_s: float) -> Run:
    """Run tests of this tree in a child, which has imported what is large: an import takes longer than most tests."""
    start, log = time.monotonic(), tree / "log.txt"
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(limit_s), ceil(limit_s) + 5))
        _run_in_child(tree, arguments_of(tests, tree), log)
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        seconds = used.ru_utime + used.ru_stime
        if found:
            has_ended = os.waitstatus_to_exitcode(status) != -signal.SIGXCPU
            failed = _first_failure(status, log.read_text(errors="replace")) if has_ended else None
            return Run(failed, seconds, has_ended)
        if time.monotonic() - start > _WALL * limit_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Run(None, _WALL * limit_s, has_ended=False)
        time.sleep(0.05)


def _run_in_child(tree: Path, arguments: list[str], log: Path) -> None:
    os.setsid()  # compilers and commands that a test starts end with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, tree))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]  # tests import those of their tree
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={tree / 'tmp'}"]
    code = 3
    try:
        code = int(pytest.main([*options, *arguments]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _first_failure(status: int, output: str) -> str | None:
    """The test that failed; SystemExit if none was run, because then the fault or its tests are wrong."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return signal.Signals(-code).name
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::\w+)?)", output, re.MULTILINE)
    if code == 0:
        return None
    if code == 2 and found:  # an error while tests are collected
        return found[1]
    if code != 1 or not found:
        raise SystemExit(f"these tests cannot be run, pytest returned {code}:\n{output[-3000:]}")
    return found[1]


def scratch_copy(tree: Path) -> None:
    for name in _COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name)


def judge(fault: Fault, tree: Path, sources: dict[Path, str], limit_s: float) -> Run:
    """Plant a fault, run its tests, and take it out again."""
    path = place_of(fault, sources)
    times = path.stat()
    path.write_text(sources[path].replace(fault.before, fault.after), encoding="utf-8")
    try:
        return run_tests(tree, fault.tests, limit_s)
    finally:
        path.write_text(sources[path], encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the compiled module is of this text again


def chosen(faults: list[Fault], only: Iterable[str]) -> Iterator[tuple[int, Fault]]:
    """The faults, counted from 1, of these numbers, ranges of numbers, and rooms; all if none are named."""
    words = set(only)
    numbers = {int(word) for word in words if word.isdigit()}
    for word in words:
        if found := re.fullmatch(r"(\d+)-(\d+)", word):
            numbers |= set(range(int(found[1]), int(found[2]) + 1))
    for number, fault in enumerate(faults, 1):
        if not words or number in numbers or fault.room in words:
            yield number, fault


def _import_what_is_large() -> None:
    """Import the packages of others that tests need; ours is imported from the copy of the tree."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # or a fault's would stay
    os.environ["SPECDEC_TEST_HANG_S"] = str(_HANG_S)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="numbers, ranges of numbers, or rooms")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="of a processor for the tests of each"
    )
    parser.add_argument("--check-tests", action="store_true", help="run the tests without a fault first: all must pass")
    options = parser.parse_args()
    faults = list(chosen(read_faults(), options.only))
    if not faults:
        parser.error(f"no such fault: {' '.join(options.only)}")
    if options.list:
        print("\n".join(f"{number:3}  {fault.room:12}  {fault.stands_for}" for number, fault in faults))
        return 0
    _import_what_is_large()
    num_caught = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        tree = Path(directory)
        scratch_copy(tree)
        sources = read_sources(tree)
        for tests in dict.fromkeys(fault.tests for _, fault in faults) if options.check_tests else ():
            run = run_tests(tree, tests, 10 * options.limit)
            if run.failed or not run.has_ended:
                raise SystemExit(f"tests fail without a fault: {run.said}, of `{tests}`")
        for number, fault in faults:
            run = judge(fault, tree, sources, options.limit)
            num_caught += run.failed is not None
            print(f"{number:3}  {fault.room:12}  {run.said:60}  {run.seconds:3.0f} s  {fault.stands_for}", flush=True)
    print(f"{num_caught} of {len(faults)} caught", file=sys.stderr)
    return 0 if num_caught >= _WANTED * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
