"""A file of requests answered, from what is there already to the last result."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from commands.batching.answering import Counts, Outcome, failed_outcome
from commands.batching.dispatch import Crew, answer_all
from commands.batching.lines import BatchRequest, look_through
from commands.batching.results import Results, open_results
from commands.output import Output, number, percent
from commands.progress import Pace
from runtime.errors import SpecDecError


@dataclass
class Report:
    """What was done in this run."""

    num_requests: int
    num_done_before: int
    num_failed: int = 0
    counts: Counts = field(default_factory=Counts)
    opening_s: float = 0.0
    wall_s: float = 0.0
    workers: Counter[str] = field(default_factory=Counter)
    """Results by the machine and the process that they come from, where there are several."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.counts.num_generated_tokens / self.wall_s if self.wall_s else None

    @property
    def acceptance_rate(self) -> float | None:
        counts = self.counts
        return counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else None


def run_batch(
    input_file: Path,
    output_file: Path,
    job: str,
    open_crew: Callable[[int], AbstractContextManager[Crew[BatchRequest, Outcome]]],
    output: Output,
) -> Report:
    """Answer what has no result yet; nothing is opened if there is nothing. SpecDecError for results of another job.

    `open_crew` is called with the number of requests.
    """
    requests = look_through(input_file, job)
    with open_results(output_file, requests.places) as results:
        missing = results.missing
        report = Report(len(requests.places), results.num_done)
        if report.num_done_before and missing:
            output.result(f"{report.num_done_before:,} of {report.num_requests:,} requests are done: the rest follows")
        try:
            if missing:
                start = time.perf_counter()
                with open_crew(len(missing)) as crew, output.paced("Requests", len(missing)) as pace:
                    report.opening_s = time.perf_counter() - start
                    _answer(crew, requests.read(missing), results, report, pace)
        except (KeyboardInterrupt, SystemExit):
            num_done = f"{results.num_done:,} of {report.num_requests:,}"
            output.warning(f"interrupted: {num_done} requests are done, and the same command goes on")
            raise
        _finish(results)
    return report


def _answer(
    crew: Crew[BatchRequest, Outcome],
    requests: Iterator[BatchRequest],
    results: Results,
    report: Report,
    pace: Pace,
) -> None:
    start = time.perf_counter()
    for outcome in answer_all(crew, requests, failed_outcome):
        results.append(outcome.id, outcome.line)
        report.counts += outcome.counts
        report.num_failed += outcome.is_error
        report.workers[outcome.worker] += 1
        report.wall_s = time.perf_counter() - start
        pace(1, _said(report))


def _finish(results: Results) -> None:
    if results.missing:  # our own mistake, which must not become a file that looks whole
        raise SpecDecError(
            f"requests have no result: {len(results.missing)}", hint="start the command again: it goes on"
        )
    results.finish()


def _said(report: Report) -> str:
    said = f"{number(report.tokens_per_second, 0)} tokens/s"
    rate = report.acceptance_rate
    return said if rate is None else f"{said}, {percent(rate)} accepted"
