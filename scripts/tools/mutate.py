"""Plants faults, one at a time, and sees which test catches each: one that survives is a test that is missing.

python -m scripts.tools.mutate runtime/core/verify.py                                   all faults of a file
python -m scripts.tools.mutate "runtime/core/verify.py:verify_tokens compare"           of a function, by one operator
python -m scripts.tools.mutate --sample 50                                         some of all
python -m scripts.tools.mutate --list                                              their names; nothing is run
python -m scripts.tools.mutate --markdown                                          the table in Markdown

Faults are made by the operators of mutations.py. One is planted in a copy of the tree, and the tests nearest to it are
run there. Exit 1 if one survives (it may be one that changes nothing: read it), or if the tests fail without any.
"""

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.tools.mutations import cpp_mutations, mutations

ROOT = Path(__file__).parents[2]
COPIED = ("specdec_cli", "commands", "runtime", "tests", "scripts", "pyproject.toml")


class Fault(NamedTuple):
    """The text of a file with a fault in it."""

    name: str
    """The file, a colon, and the address in it."""
    what: str
    text: str

    @property
    def file(self) -> str:
        return self.name.partition(":")[0]


class Run(NamedTuple):
    """Outcome of the tests: the first that failed, None if all passed."""

    failed: str | None
    seconds: float


T = "tests/runtime/"
KERNELS = f"{T}compiler/test_kernels.py"
ATTENTION = f"{KERNELS} -k 'attention or scores or finite or nan'"
CHOICES = f"{T}test_sampling_kernels.py"
TESTS = {
    "runtime/core/batch.py": f"{T}test_batch.py -k 'not compute_what_each'",
    "runtime/util/cache.py": f"{KERNELS} -k corrupt",
    "runtime/model/attention.py": f"{T}test_families.py -k 'test_greedy and (llama or sliding)'",
    "runtime/kernels/csrc/attention_products.h": ATTENTION,
    "runtime/kernels/csrc/cuts.h": CHOICES,
    "runtime/kernels/csrc/kv_pool.h": ATTENTION,
    "runtime/kernels/csrc/linear.cpp": f"{KERNELS} -k linear",
    "runtime/kernels/csrc/paged_attention.cpp": ATTENTION,
    "runtime/kernels/csrc/products.h": f"{KERNELS} -k 'linear or company'",
    "runtime/kernels/csrc/sampling.cpp": f"{CHOICES} {KERNELS} -k 'sampling_kernels or argmax'",
    "runtime/kernels/csrc/softmax.h": ATTENTION,
    "runtime/kernels/memory.py": f"{T}test_poison.py -k 'none and fork'",
    "runtime/model/weights.py": f"{T}compiler/test_weights.py",
    "runtime/drafters/adaptive.py": f"{T}drafters/test_adaptive.py {T}drafters/test_allocation.py",
    "runtime/drafters/chain.py": f"{T}drafters/test_chain.py {T}drafters/test_best_of.py",
    "runtime/drafters/draft_target.py": f"{T}drafters/test_draft_target.py {T}drafters/test_self_draft.py "
    f"{T}drafters/test_best_of.py -k 'not compiled'",
    "runtime/drafters/lookup.py": f"{T}drafters/test_ngram.py {T}drafters/test_suffix.py",
    "runtime/drafters/ngram.py": f"{T}drafters/test_ngram.py {T}test_corpus.py -k 'draft or ngram'",
    "runtime/drafters/acceptance_stats.py": f"{T}drafters/test_adaptive.py",
    "runtime/drafters/pool.py": f"{T}drafters/test_pool.py -k 'not ten_thousand'",
    "runtime/drafters/draft_state.py": f"{T}test_rejection.py {T}drafters/test_best_of.py "
    "-k 'whether or texts and similar or sure'",
    "runtime/drafters/suffix.py": f"{T}drafters/test_suffix.py",
    "runtime/loop/drafting.py": f"{T}drafters/test_drafter_protocol.py",
    "runtime/engine/engine.py": f"{T}test_engine.py -k 'not aot'",
    "runtime/core/kv_cache.py": f"{T}test_kv_cache.py",
    "runtime/loop/scheduler.py": f"{T}test_scheduler.py",
    "runtime/core/occurrences.py": CHOICES,
    "runtime/loop/orchestrator.py": f"{T}test_orchestrator.py {T}test_scheduler.py -k 'orchestrator or times'",
    "runtime/core/request.py": f"{T}test_request.py",
    "runtime/core/sampling.py": f"{T}test_sampling.py {T}test_rejection.py -k 'not texts'",
    "runtime/core/states.py": f"{T}test_states.py tests/campaigns/test_exact_oracle.py -k 'states or random_cases'",
    "runtime/core/stats.py": f"{T}test_stats.py",
    "runtime/core/verify.py": f"{T}test_verify.py {T}test_rejection.py -k 'not texts'",
}
"""The tests nearest to a file, as pytest's arguments."""


def all_faults() -> Iterator[Fault]:
    """Python's as their operators make them, C++'s of the text."""
    for file in TESTS:
        source = (ROOT / file).read_text(encoding="utf-8")
        if not file.endswith(".py"):
            yield from (Fault(f"{file}:{address}", what, text) for address, what, text in cpp_mutations(source))
            continue
        for mutation in mutations(source):
            with mutation.planted():
                yield Fault(f"{file}:{mutation.address}", mutation.what, ast.unparse(mutation.tree))


def run_tests(tests: str, fault: Fault | None = None, limit_s: float | None = None) -> Run:
    """Run them in a copy of the tree, with the fault in it. No end within `limit_s` is a failure too."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        tree = Path(directory)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, tree / name)
        if fault is not None:
            (tree / fault.file).write_text(fault.text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        start = time.perf_counter()
        with subprocess.Popen(
            [*command, f"--basetemp={tree / 'tmp'}", *shlex.split(tests)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": directory, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # compilers and commands that a test started end with it
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return Run(f"no end in {limit_s:.0f} s", time.perf_counter() - start)
        return Run(first_failure(process.returncode, output), time.perf_counter() - start)


def first_failure(code: int, output: str) -> str | None:
    """The test that failed; SystemExit if none was run, because then the fault or its tests are wrong."""
    if code < 0:
        return signal.Signals(-code).name
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\w+)", output, re.MULTILINE)
    if code not in (0, 1) or (code == 1) != bool(failed) or "cannot compile the kernels" in output:
        raise SystemExit(f"these tests cannot be run, pytest returned {code}:\n{output[-3000:]}")
    return failed[1] if failed else None


def judge(fault: Fault, limits_s: dict[str, float]) -> tuple[Fault, Run]:
    run = run_tests(TESTS[fault.file], fault, limits_s[TESTS[fault.file]])
    print(f"{fault.name}: {run.failed or 'SURVIVED'}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
    return fault, run


def table(results: list[tuple[Fault, Run]], *, markdown: bool) -> str:
    """A row for each fault; in columns of one width unless in Markdown."""
    rows = [("fault", "what", "caught by", "seconds")]
    for fault, run in results:
        what = "`{}`".format(fault.what.replace("|", r"\|")) if markdown else fault.what
        rows.append((fault.name, what, run.failed or "SURVIVED", f"{run.seconds:.0f}"))
    if markdown:
        rows.insert(1, ("---",) * 4)
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="how the names of the faults begin; without one all")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, the same each time")
    parser.add_argument("--jobs", type=int, default=1, help="test runs at a time")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args()
    faults = [fault for fault in all_faults() if fault.name.startswith(tuple(options.names or [""]))]
    if not faults:
        parser.error(f"no such fault: {', '.join(options.names)}")
    if options.sample is not None:
        faults = random.Random(0).sample(faults, min(options.sample, len(faults)))
    if options.list:
        print("\n".join(f"{fault.name:72}{fault.what}" for fault in faults))
        return 0
    tests = list(dict.fromkeys(TESTS[fault.file] for fault in faults))
    with ThreadPoolExecutor(options.jobs) as executor:
        whole = dict(zip(tests, executor.map(run_tests, tests), strict=True))
        if failing := [run.failed for run in whole.values() if run.failed]:
            raise SystemExit(f"tests fail without a fault: {', '.join(failing)}")
        limits_s = {name: 60 + 3 * run.seconds for name, run in whole.items()}
        results = list(executor.map(partial(judge, limits_s=limits_s), faults))
    print(table(results, markdown=options.markdown))
    survivors = [fault.name for fault, run in results if run.failed is None]
    print(f"{len(faults) - len(survivors)} of {len(faults)} caught", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
