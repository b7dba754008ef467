"""Answers batches of prompts with the engine; Hugging Face is timed alike (`runtime.measure.evaluation.hugging_face`).

Each system answers the first prompt once beforehand as a warm-up. Wall time is the time of the batches, without
tokenization.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core.generation import Work, total_record
from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.llm import LLM
from runtime.loop.lossless.results import SystemName
from runtime.loop.session import Session
from runtime.text.text import sequence_text

Batches = list[list[list[int]]]
"""Token ids of prompts, in batches."""


@dataclass
class SampleRun:
    """The answer of a system to a prompt, and its times."""

    output_tokens: list[int]
    output_text: str
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    wall_s: float  # of its batch, divided by the batch's prompts
    sequence: Sequence | None = None


@dataclass
class SystemRun:
    """Answers of one system."""

    name: SystemName
    samples: list[SampleRun] = field(default_factory=list)
    times: LoopTimes = field(default_factory=LoopTimes)
    workers: Counter[str] = field(default_factory=Counter)
    """Number of samples by the machine and process that answered them, if that was another than this one."""

    def add(self, other: "SystemRun") -> None:
        """Add another worker's results."""
        self.samples += other.samples
        self.times.add(other.times)
        self.workers += other.workers

    @property
    def sequences(self) -> list[Sequence]:
        """The engine's sequences; Hugging Face has none."""
        return [sample.sequence for sample in self.samples if sample.sequence]

    @property
    def work(self) -> Work:
        return Work(self.times.wall_s, sum(len(sample.output_tokens) for sample in self.samples))

    def work_on(self, chosen: list[int]) -> Work:
        """Time and tokens of some of the samples only."""
        samples = [self.samples[i] for i in chosen]
        return Work(sum(s.wall_s for s in samples), sum(len(s.output_tokens) for s in samples))

    def total(self, max_draft_len: int) -> dict[str, Any]:
        if self.name == "hf":
            work = self.work
            return {
                "num_requests": len(self.samples),
                "num_generated_tokens": work.num_tokens,
                "wall_s": work.wall_s,
                "output_tokens_per_second": work.num_tokens / work.wall_s,
            }
        return total_record(self.sequences, self.times, max_draft_len)


@dataclass(frozen=True)
class Question:
    """The model, and a template for the request of every prompt."""

    llm: LLM
    template: Request


class EvaluationInterrupted(KeyboardInterrupt):
    """Exception for Ctrl-C, with the answers, by batch number, that were complete with and without the drafter."""

    def __init__(self, answers: dict[int, list[SystemRun]]) -> None:
        super().__init__()
        self.answers = answers


EvaluateEngine = Callable[[Question, Session, Batches, Callable[[], None]], list[SystemRun]]
"""Signature of `evaluate_engine`, and of a function that lets workers do the same."""


def evaluate_engine(
    question: Question, session: Session, batches: Batches, advance: Callable[[], None]
) -> list[SystemRun]:
    """Answers of the engine with its drafter and without (or, if it has none, only without), batch by batch in turn.
    The prompts must have been checked. Raises EvaluationInterrupted at Ctrl-C.
    """
    warm_up(question, session, batches[0][0])
    answers: dict[int, list[SystemRun]] = {}
    try:
        for i, (place, batch) in enumerate(zip(places_of(batches), batches, strict=True)):
            answers[i] = answer_batch(question, session, batch, place)
            advance()
    except KeyboardInterrupt:
        raise EvaluationInterrupted(answers) from None
    return joined(answers)


def warm_up(question: Question, session: Session, prompt: list[int]) -> None:
    """Answer the prompt both ways, for the costs of first calls, and forget what a drafter learned from it."""
    answer_batch(question, session, [prompt], range(1))
    session.clear_pools()


def places_of(batches: Batches) -> list[range]:
    """Indices of each batch's prompts among all prompts."""
    ends = itertools.accumulate(map(len, batches))
    return [range(end - len(batch), end) for batch, end in zip(batches, ends, strict=True)]


def answer_batch(question: Question, session: Session, batch: list[list[int]], place: range) -> list[SystemRun]:
    """Answers to a batch, with the drafter and without, each from an empty cache."""
    names: list[SystemName] = ["engine", "engine_no_drafter"] if session.opened else ["engine"]
    return [_run_engine_batch(question, session, batch, place, name) for name in names]


def joined(answers: Mapping[int, list[SystemRun]]) -> list[SystemRun]:
    """The answers to batches, at least one, joined in the batches' order."""
    runs = [SystemRun(run.name) for run in next(iter(answers.values()))]
    for i in sorted(answers):
        for run, part in zip(runs, answers[i], strict=True):
            run.add(part)
    return runs


def _run_engine_batch(
    question: Question, session: Session, batch: list[list[int]], place: range, name: SystemName
) -> SystemRun:
    session.clear_cache()
    requests = [question.template.with_prompt(i, prompt) for i, prompt in zip(place, batch, strict=True)]
    generation = session.run(requests, speculate=name == "engine")
    run = SystemRun(name, times=generation.times)
    for sequence in generation.sequences:
        run.samples.append(
            SampleRun(
                sequence.output_tokens,
                sequence_text(question.llm.tokenizer, sequence) or "",
                sequence.stats.ttft_s,
                sequence.stats.tpot_s,
                sequence.stats.latency_s,
                generation.times.wall_s / len(batch),
                sequence,
            )
        )
    return run
