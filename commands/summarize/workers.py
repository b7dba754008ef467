"""The batches of `summarize`, answered by Ray's workers.

A batch is a request to a worker, which answers it like a single process. A worker has the same engine, drafter and
settings, and begins each batch with an empty cache. So tokens and counts are those of one process, whichever worker
answers. Only the things that drafters learn from one batch for the next are each worker's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from commands.batch.dispatch import answer_all
from commands.batch.ray_workers import WorkerJob, ray_crew
from commands.options.engine_choice import EngineChoice
from commands.options.sessions import open_setup
from commands.options.shared import ClusterOptions
from commands.output.documents.settings import Setup
from runtime.loop.session import Session
from runtime.measure.evaluation.systems import (
    Batches,
    EvaluationInterrupted,
    Question,
    SystemRun,
    answer_batch,
    joined,
    places_of,
    warm_up,
)
from runtime.proof.records import Fingerprint
from runtime.util.errors import SpecDecError

_WINDOW = 2  # the next batch is there when one is done


@dataclass(frozen=True)
class BatchAsked:
    """Prompts to answer together, and their indices among all prompts."""

    id: str
    prompts: list[list[int]]
    place: range


@dataclass(frozen=True)
class BatchAnswered:
    """Answers of each system to a batch, or the error."""

    id: str
    runs: list[SystemRun]
    error: SpecDecError | None = None
    worker: str = ""


@dataclass(frozen=True)
class EvaluationJob:
    """Settings with which a worker opens an engine, and its warm-up prompt."""

    choice: EngineChoice
    first_prompt: list[int]

    def with_choice(self, choice: EngineChoice) -> "EvaluationJob":
        return replace(self, choice=choice)

    @contextmanager
    def opened(self) -> Iterator["EvaluationModel"]:
        with open_setup(self.choice) as setup:
            model = EvaluationModel(setup)
            warm_up(model.question, setup.session, self.first_prompt)
            yield model


class EvaluationModel:
    """A model that answers one batch after the other."""

    window = _WINDOW

    def __init__(self, setup: Setup) -> None:
        self.question = Question(setup.llm, setup.llm.request_of(setup.params))
        self._session = setup.session

    @property
    def fingerprint(self) -> Fingerprint:
        return self.question.llm.fingerprint

    @property
    def failure(self) -> SpecDecError | None:
        """The reason why the engine no longer answers; None while it does."""
        draft_engine = self._session.draft_engine
        return self.question.llm.engine.failure or (draft_engine.failure if draft_engine else None)

    async def answer(self, batch: BatchAsked) -> BatchAnswered:
        try:
            runs = answer_batch(self.question, self._session, batch.prompts, batch.place)
        except SpecDecError as error:
            plain = SpecDecError(error.message, hint=error.hint, code=error.code, **error.values)
            return BatchAnswered(batch.id, [], plain)
        return BatchAnswered(batch.id, [_portable(run) for run in runs])


def evaluate_by_workers(
    choice: EngineChoice, cluster: ClusterOptions
) -> Callable[[Question, Session, Batches, Callable[[], None]], list[SystemRun]]:
    """A function with the arguments of `evaluate_engine` that lets workers answer."""

    def evaluate(
        question: Question, session: Session, batches: Batches, advance: Callable[[], None]
    ) -> list[SystemRun]:
        work = WorkerJob(EvaluationJob(choice, batches[0][0]), cluster.checkpoint_dir)
        numbered = enumerate(zip(batches, places_of(batches), strict=True))
        asked = [BatchAsked(str(i), prompts, place) for i, (prompts, place) in numbered]
        answers: dict[int, list[SystemRun]] = {}
        try:
            with ray_crew(work, cluster, len(asked)) as crew:
                for answered in answer_all(crew, iter(asked), _give_up):
                    answers[int(answered.id)] = _own(question, answered)
                    advance()
        except KeyboardInterrupt:
            raise EvaluationInterrupted(answers) from None
        return joined(answers)

    return evaluate


def _portable(run: SystemRun) -> SystemRun:
    """The run without objects that cannot be sent to another process: tokenizers' stop words, grammars, thinking, and
    samplers of sequences.
    """
    for sequence in run.sequences:
        sequence.request = replace(sequence.request, stop_check=None, grammar=None, thinking=None)
        vars(sequence).pop("sampler", None)
    return run


def _own(question: Question, answered: BatchAnswered) -> list[SystemRun]:
    """The answers joined to the requests of this process; SpecDecError if a worker sent an error."""
    if answered.error is not None:
        raise answered.error
    for run in answered.runs:
        run.workers[answered.worker] = len(run.samples)
        for sequence in run.sequences:
            request = sequence.request
            sequence.request = question.template.with_prompt(request.id, request.prompt_tokens)
    return answered.runs


def _give_up(batch: BatchAsked, failure: str) -> BatchAnswered:
    last = batch.place[-1] + 1
    samples = f"sample {last}" if len(batch.place) == 1 else f"samples {batch.place[0] + 1} to {last}"
    raise SpecDecError(f"{failure}: {samples}", hint="Ray's logs say why; run it without `--ray` to see it here")
