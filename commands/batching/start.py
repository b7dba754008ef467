"""What `batch` does once its flags have been looked at: the engine, the workers, the results, and what is told."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from commands.batching.answering import Outcome, OwnCrew
from commands.batching.dispatch import Crew
from commands.batching.lines import BatchRequest
from commands.batching.model import Job, check_same_everywhere
from commands.batching.running import run_batch
from commands.documents.batch import batch_document
from commands.options.batch import BatchDefaults, BatchFiles
from commands.options.cluster import ClusterOptions
from commands.options.engine import EngineChoice
from commands.output import Output
from commands.sessions import engines_made
from commands.tables.batch import show

OpenCrew = Callable[[int], AbstractContextManager[Crew[BatchRequest, Outcome]]]


def start_batch(
    files: BatchFiles,
    choice: EngineChoice,
    names: tuple[str, ...],
    defaults: BatchDefaults,
    cluster: ClusterOptions,
    output: Output,
) -> None:
    """SpecDecError if it cannot be begun, or not be gone on with; what has been answered is kept in any case."""
    speculation = choice.speculation
    check_same_everywhere(speculation)
    if speculation.draft_len_mode is None and speculation.may_draw_by_probs:
        speculation = speculation.in_mode("fixed")  # or interrupted batches would not end as others do
    with engines_made(replace(choice, speculation=speculation), output) as made:
        job = Job(made, names, defaults)
        open_crew: OpenCrew = partial(_own_crew, job)
        if cluster.ray is not None:
            from commands.batching.cluster import WorkerJob, ray_crew

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
