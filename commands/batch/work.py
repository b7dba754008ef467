"""Work of `batch` after its flags are checked: opens the engine and the workers, writes results, and prints the JSON
document or a table.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from commands.batch.answering import Counts, Job, Outcome, OwnCrew, check_same_everywhere, failed_outcome
from commands.batch.dispatch import Crew, answer_all
from commands.batch.document import BatchDefaultsRecord, BatchDocument, BatchSettings
from commands.batch.flags import BatchDefaults, BatchFiles
from commands.batch.lines import BatchRequest, Results, look_through, open_results
from commands.options.engine_choice import EngineChoice
from commands.options.sessions import engines_made
from commands.options.shared import ClusterOptions
from commands.output.documents.records import document_head
from commands.output.documents.settings import grammar_record
from commands.output.output import Output, number, percent
from commands.output.progress import Advance
from runtime.core.params import SamplingParams
from runtime.proof.receipts import rows_in
from runtime.proof.records import line_of
from runtime.util.errors import SpecDecError
from runtime.util.files import new_file


@dataclass
class Report:
    """Counts of a whole batch, and of the work of this run."""

    num_requests: int
    num_done_before: int
    num_failed_before: int
    num_failed: int
    """Number of failed requests among all requests (`num_requests`), including those from earlier runs."""
    counts: Counts = field(default_factory=Counts)
    opening_s: float = 0.0
    wall_s: float = 0.0
    workers: Counter[str] = field(default_factory=Counter)
    """Number of results by the machine and process that they come from, if there are several."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.counts.num_generated_tokens / self.wall_s if self.wall_s else None

    @property
    def acceptance_rate(self) -> float | None:
        counts = self.counts
        return counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else None


def _defaults_record(defaults: BatchDefaults) -> BatchDefaultsRecord:
    values = dataclasses.asdict(defaults) | grammar_record(SamplingParams(**defaults.form.params))
    del values["form"]
    return BatchDefaultsRecord(**values)


def batch_document(report: Report, files: BatchFiles, job: Job, cluster: ClusterOptions) -> dict[str, Any]:
    counts = report.counts
    document = BatchDocument(
        **document_head("batch"),
        input_file=str(files.input_file),
        output_file=str(files.output_file),
        settings=BatchSettings(
            engine_dir=str(job.choice.engine_dir),
            model_names=list(job.names),
            drafters=job.choice.speculation.names,
            draft_len_mode=job.draft_len_mode,
            defaults=_defaults_record(job.defaults),
            ray=cluster.ray,
        ),
        num_requests=report.num_requests,
        num_done_before=report.num_done_before,
        num_failed=report.num_failed,
        **dataclasses.asdict(counts),
        acceptance_rate=report.acceptance_rate,
        tokens_per_step=counts.num_generated_tokens / counts.num_steps if counts.num_steps else None,
        opening_s=report.opening_s,
        wall_s=report.wall_s,
        output_tokens_per_second=report.tokens_per_second,
        workers=dict(sorted(report.workers.items())),
    )
    return document.as_json()


def show(document: dict[str, Any], num_failed_before: int, output: Output) -> None:
    """The table of this run; `num_failed_before` requests had failed when it began."""
    if not document["workers"]:
        output.result(f"all {document['num_requests']:,} requests are done: {document['output_file']}")
        return
    table = Table("requests", "failed", "tokens", "tokens/s", "accepted", "tokens per step", "time", title="Batch")
    for column in table.columns:
        column.justify = "right"
    table.add_row(
        f"{sum(document['workers'].values()):,}",
        f"{document['num_failed'] - num_failed_before:,}",
        f"{document['num_generated_tokens']:,}",
        number(document["output_tokens_per_second"], 1),
        percent(document["acceptance_rate"]),
        number(document["tokens_per_step"]),
        f"{document['wall_s']:,.1f} s",
    )
    output.result(table)
    if len(document["workers"]) > 1:
        shares = ", ".join(f"{name} {count:,}" for name, count in document["workers"].items())
        output.result(f"results by worker: {shares}")
    output.result(f"results in the order of the requests: {document['output_file']}")


OpenCrew = Callable[[int], AbstractContextManager[Crew[BatchRequest, Outcome]]]


def start_batch(
    files: BatchFiles,
    choice: EngineChoice,
    names: tuple[str, ...],
    defaults: BatchDefaults,
    cluster: ClusterOptions,
    output: Output,
) -> None:
    """Start or resume a batch, and report it. SpecDecError if that is not possible; existing results are kept then."""
    speculation = choice.speculation
    check_same_everywhere(speculation)
    if speculation.draft_len_mode is None and speculation.may_draw_by_probs:
        speculation = speculation.in_mode("fixed")  # automatic lengths would give other tokens after an interruption
    with engines_made(replace(choice, speculation=speculation), output) as made:
        job = Job(made, names, defaults, with_receipts=files.receipts is not None)
        open_crew: OpenCrew = partial(_own_crew, job)
        if cluster.ray is not None:
            from commands.batch.ray_workers import WorkerJob, ray_crew

            open_crew = partial(ray_crew, WorkerJob(job, cluster.checkpoint_dir), cluster)
        report = run_batch(files.input_file, files.output_file, job.digest(), open_crew, output)
    if files.receipts is not None:
        _write_receipts(files.output_file, files.receipts)
        output.result(f"receipts written: {files.receipts}")
    document = batch_document(report, files, job, cluster)
    show(document, report.num_failed_before, output)
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
    open_crew: OpenCrew,
    output: Output,
) -> Report:
    """Answer the requests that have no result yet. `open_crew` is called with their number, unless there are none.
    SpecDecError for results of another job.
    """
    requests = look_through(input_file, job)
    with open_results(output_file, requests.places) as results:
        missing = results.missing
        report = Report(len(requests.places), results.num_done, results.num_failed, results.num_failed)
        if report.num_done_before and missing:
            output.result(f"{report.num_done_before:,} of {report.num_requests:,} requests are done: the rest follows")
        try:
            if missing:
                start = time.perf_counter()
                with open_crew(len(missing)) as crew, output.progress("Requests", len(missing)) as advance:
                    report.opening_s = time.perf_counter() - start
                    _answer(crew, requests.read(missing), results, report, advance)
        except (KeyboardInterrupt, SystemExit) as stopped:
            num_done = f"{results.num_done:,} of {report.num_requests:,}"
            output.warning(f"interrupted: {num_done} requests are done, and the same command goes on")
            if isinstance(stopped, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
        if results.missing:  # a mistake in this program, which must not become a file that looks whole
            raise SpecDecError(
                f"requests have no result: {len(results.missing)}",
                hint="run the command again: it answers the requests that have no result",
            )
        results.finish()
    return report


def _write_receipts(results: Path, receipts: Path) -> None:
    """Copy the receipts from the lines of the results to a file of their own. The file is replaced as a whole, so a
    kill leaves the old file as it was.
    """
    with new_file(receipts, replace=True) as written, written.open("wb") as file, results.open("rb") as lines:
        for line in lines:
            for row in rows_in(json.loads(line)):
                file.write(line_of(row).encode())


def _answer(
    crew: Crew[BatchRequest, Outcome],
    requests: Iterator[BatchRequest],
    results: Results,
    report: Report,
    advance: Advance,
) -> None:
    start = time.perf_counter()
    for outcome in answer_all(crew, requests, failed_outcome):
        results.append(outcome.id, outcome.line, is_error=outcome.is_error)
        report.counts += outcome.counts
        report.num_failed = results.num_failed
        report.workers[outcome.worker] += 1
        report.wall_s = time.perf_counter() - start
        rate = report.acceptance_rate
        accepted = "" if rate is None else f", {percent(rate)} accepted"
        advance(1, f"{number(report.tokens_per_second, 0)} tokens/s{accepted}")
