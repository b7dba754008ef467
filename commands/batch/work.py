"""Work of `batch` after its flags are checked: the engine, the workers, the results, the report."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from commands.batch.answering import Outcome, OwnCrew, failed_outcome
from commands.batch.command import BatchDefaults, BatchFiles
from commands.batch.dispatch import Crew, answer_all
from commands.batch.job import Job, check_same_everywhere
from commands.batch.lines import BatchRequest, look_through
from commands.batch.report import Report, batch_document, show
from commands.batch.results_file import Results, open_results
from commands.options.engine_choice import EngineChoice
from commands.options.ray_flags import ClusterOptions
from commands.output import Output, number, percent
from commands.progress import Advance
from commands.sessions import engines_made
from runtime.errors import SpecDecError

OpenCrew = Callable[[int], AbstractContextManager[Crew[BatchRequest, Outcome]]]


def start_batch(
    files: BatchFiles,
    choice: EngineChoice,
    names: tuple[str, ...],
    defaults: BatchDefaults,
    cluster: ClusterOptions,
    output: Output,
) -> None:
    """SpecDecError if it cannot be started or resumed; existing results are kept in any case."""
    speculation = choice.speculation
    check_same_everywhere(speculation)
    if speculation.draft_len_mode is None and speculation.may_draw_by_probs:
        speculation = speculation.in_mode("fixed")  # or interrupted batches would not end as others do
    with engines_made(replace(choice, speculation=speculation), output) as made:
        job = Job(made, names, defaults)
        open_crew: OpenCrew = partial(_own_crew, job)
        if cluster.ray is not None:
            from commands.batch.ray_workers import WorkerJob, ray_crew

            open_crew = partial(ray_crew, WorkerJob(job, cluster.checkpoint_dir), cluster)
        report = run_batch(files.input_file, files.output_file, job.digest(), open_crew, output)
    document = batch_document(report, files, job, cluster)
    show(document, output)
    if report.num_failed:
        output.warning(
            f"{report.num_failed:,} of {report.num_requests:,} requests failed: their results have an `error`"
        )
    output.document(document)


@contextmanager
def _own_crew(job: Job, num_requests: int) -> Iterator[Crew[BatchRequest, Outcome]]:
    with job.opened() as model:
        yield OwnCrew(model)


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
                with open_crew(len(missing)) as crew, output.progress("Requests", len(missing)) as advance:
                    report.opening_s = time.perf_counter() - start
                    _answer(crew, requests.read(missing), results, report, advance)
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
    advance: Advance,
) -> None:
    start = time.perf_counter()
    for outcome in answer_all(crew, requests, failed_outcome):
        results.append(outcome.id, outcome.line)
        report.counts += outcome.counts
        report.num_failed += outcome.is_error
        report.workers[outcome.worker] += 1
        report.wall_s = time.perf_counter() - start
        advance(1, _said(report))


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
