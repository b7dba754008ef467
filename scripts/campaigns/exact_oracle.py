"""Random requests through both loops with every drafter, against a model that is an exact function of its K/V cache.

python -m scripts.campaigns.exact_oracle                     10,000 random cases
python -m scripts.campaigns.exact_oracle --every-failure 40  of 40 cases every call fails, before, in and after its work

What a case is: cases.py; the model: oracle.py. Exit 1 if an output is wrong, or if a fault is not found.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from runtime.text.corpus import Corpus
from scripts.campaigns import cases
from scripts.campaigns.oracle import Failure, Interrupted


def count_cases(first: int, number: int, corpus: Corpus) -> tuple[Counter[str], list[int]]:
    """Run them; what they were, and those that failed."""
    counts: Counter[str] = Counter()
    failed = []
    for case in range(first, first + number):
        try:
            outcome = cases.run(case, corpus)
        except (Exception, Interrupted):  # whatever it is: a case that does not end as it should
            failed.append(case)
            print(f"case {case}:\n{traceback.format_exc(limit=-3)}", file=sys.stderr, flush=True)
            continue
        _add(counts, outcome)
    return counts, failed


def _add(counts: Counter[str], outcome: cases.Outcome) -> None:
    counts.update(
        {
            "cases": 1,
            "outputs": outcome.num_outputs,
            "accepted draft tokens": outcome.num_accepted,
            "preempted": outcome.num_preempted,
            f"loop: {outcome.loop}": 1,
            f"drafter: {outcome.drafter}": 1,
            f"ending: {outcome.ending}": 1,
            "with states": outcome.has_states,
        }
    )
    if outcome.failed_in is not None:
        counts[f"failed: {outcome.failed_in}"] += 1


def fail_everywhere(first: int, number: int, corpus: Corpus) -> tuple[Counter[str], list[int]]:
    """Fail every call of each case, before its work, halfway through it and after it, by an error and by Ctrl-C."""
    counts: Counter[str] = Counter()
    failed = []
    for case in range(first, first + number):
        calls = cases.run(case, corpus, ending="finished").calls
        for operation, times in calls.items():
            moments = [(number, when) for number in range(times) for when in cases.TIMES_OF_FAILURE]
            for i, (number, when) in enumerate(moments):
                failure = Failure(operation, number, when, is_interrupt=bool(i % 2))
                counts[f"failures of {operation}"] += 1
                try:
                    cases.run(case, corpus, ending="failure", failure=failure)
                except (Exception, Interrupted):
                    failed.append(case)
                    print(f"case {case}, {failure}:\n{traceback.format_exc(limit=-3)}", file=sys.stderr, flush=True)
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, default=10_000, help="how many")
    parser.add_argument("--every-failure", type=int, metavar="CASES", help="have every call of so many cases fail")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exact-oracle-") as directory:
        corpus = cases.make_corpus(Path(directory))
        if options.every_failure:
            counts, failed = fail_everywhere(options.first, options.every_failure, corpus)
        else:
            counts, failed = count_cases(options.first, options.cases, corpus)
    for name in sorted(counts):
        print(f"{counts[name]:10,}  {name}")
    print(f"{len(failed)} failed in {time.monotonic() - start:.0f} s: {failed[:20]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
