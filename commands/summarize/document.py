"""The JSON document of `specdec summarize`, from which its tables and files are made."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from commands.inputs.dataset import EvalTask, Sample
from commands.output.documents.records import (
    Lossless,
    MeasuredHead,
    OthersTotal,
    Positive,
    Record,
    RequestCounts,
    Tokens,
    Total,
    absent,
    measured_head,
)
from commands.output.documents.settings import EngineRecord, SessionSettings, Setup
from commands.summarize.rouge import rouge_scores
from runtime.checkpoint.config import Between, Count, Measure, Share, Size
from runtime.core.stats import FinishReason, LoopTimes
from runtime.loop.lossless.results import LosslessCheck, SystemName
from runtime.util.files import write_file, write_json

if TYPE_CHECKING:  # `compare` needs no torch
    from runtime.core.generation import Work
    from runtime.llm import LLM
    from runtime.measure.evaluation.systems import SystemRun

Score = Annotated[float, Between(0, 100)]


class Rouge(Record):
    """ROUGE's F-measures, times 100."""

    rouge1: Score
    rouge2: Score
    rougeL: Score
    rougeLsum: Score


class SummarizeRequest(Record):
    """A sample and its answer. If the engine was not run, the answer is transformers', without a `finish_reason` and
    `stats`.
    """

    id: str
    category: str | None
    prompt: str = Field(description="the sample's own text")
    prompt_ids: Tokens
    reference: str | None = Field(description="null for a question without one")
    output_ids: Tokens
    output_text: str
    outputs: dict[SystemName, Tokens] = Field(description="output ids of each system")
    wall_s: dict[SystemName, Measure] = Field(description="of the request's batch, divided by its requests")
    finish_reason: FinishReason = absent()
    stats: RequestCounts = absent()


class _Times(Record):
    rouge: Rouge | None = Field(description="null where no sample has a reference")
    median_ttft_s: Measure
    median_tpot_s: Measure | None = Field(description="null where every output has one token")
    mean_latency_s: Measure = Field(description="wall time / samples")


class _OfEngine(Record):
    total: Total


class _OfOthers(Record):
    total: OthersTotal


class EngineSystem(_Times, _OfEngine):
    """The engine's figures."""


class OtherSystem(_Times, _OfOthers):
    """Transformers' figures."""


class Systems(Record):
    """Values for each system that was run."""

    engine: EngineSystem = absent()
    engine_no_drafter: EngineSystem = absent()
    hf: OtherSystem = absent()


class Category(Record):
    """The samples of a category, with counts if the engine was run."""

    num_samples: Size
    num_references: Count = Field(description="samples with a reference, over which ROUGE is")
    rouge: dict[SystemName, Rouge | None] = Field(description="null where no sample has a reference")
    median_tpot_s: dict[SystemName, Measure | None] = Field(description="null where every output has one token")
    wall_s: dict[SystemName, Measure] = Field(description="of batches, shared evenly among their samples")
    num_generated_tokens: Count = absent()
    num_steps: Count = absent()
    num_draft_tokens: Count = absent()
    num_accepted_draft_tokens: Count = absent()
    draft_acceptance_rate: Share | None = absent()
    tokens_per_step: Measure | None = absent()
    speedup: Positive | None = Field(description="wall time without a drafter / with one")


class Identical(Record):
    """Number of outputs that are identical, token for token."""

    num_identical: Count
    num_samples: Size


class Accuracy(Record):
    """Result of `--check-accuracy`."""

    rouge1: float
    threshold: float
    passed: bool
    hf_rouge1: float = absent("where a largest loss is given")
    max_loss: float = absent()


class SummarizeChecks(Record):
    """Results of comparisons and checks."""

    identical_to_hf: Identical = absent()
    identical_to_no_drafter: Identical = absent()
    accuracy: Accuracy = absent()
    lossless: Lossless = absent("--check-lossless")


class SummarizeSettings(SessionSettings):
    """Settings of the command."""

    dataset: str
    eval_task: EvalTask
    batch_size: Size
    output_len: Size
    max_input_length: Size
    num_samples: Size
    random_seed: int
    hf_model_dir: str | None


class SummarizeDocument(MeasuredHead):
    """Document of `specdec summarize --json`."""

    command: Literal["summarize"]
    requests: list[SummarizeRequest]
    total: Total | None = Field(description="the engine's; null where it was not run")
    rouge: dict[SystemName, Rouge | None] = Field(description="null where no sample has a reference")
    num_references: Count = Field(description="samples with a reference, over which ROUGE is")
    hf: OtherSystem | None = Field(description="null where transformers was not run")
    systems: Systems
    categories: dict[str, Category] = Field(description="empty where the dataset names none")
    speedup: Positive | None = Field(
        description="wall time without a drafter / with one, same engine and requests; null without a drafter"
    )
    speedup_over_hf: Positive | None = Field(
        description="wall time of transformers / of the engine; null unless both were run, of the same model"
    )
    hf_differences: list[str] = absent("differences between Hugging Face's model and the engine's; empty if none")
    checks: SummarizeChecks
    settings: SummarizeSettings
    workers: dict[str, Size] = absent(
        "samples by worker of Ray, its machine and process; empty without Ray. Times are theirs added up"
    )
    engine: EngineRecord
    draft_engine: EngineRecord | None = Field(description="the draft model's")

    @model_validator(mode="after")
    def _check_systems(self) -> "SummarizeDocument":
        systems = {name for name, system in self.systems if system is not None}
        by_system = [self.rouge, *(one for request in self.requests for one in (request.outputs, request.wall_s))]
        if not systems or any(found.keys() != systems for found in by_system):
            raise ValueError("each system that was run needs its `rouge`, and `outputs` and `wall_s` of each request")
        return self


@dataclass(frozen=True)
class Evaluation:
    """A dataset's samples, the token ids of their prompts, and the answers of each system. `hf_differences` lists the
    differences between Hugging Face's model and the engine's; if there are any, outputs are not compared.
    """

    samples: list[Sample]
    prompts: list[list[int]]
    runs: list["SystemRun"]
    hf_differences: list[str]


@dataclass(frozen=True)
class Asked:
    """The checks that are asked for: the least ROUGE-1, its largest loss, and the result of the lossless check."""

    rouge1_threshold: float | None = None
    rouge1_max_loss: float | None = None
    lossless: LosslessCheck | None = None


def summary_document(
    setup: Setup, evaluation: Evaluation, settings: dict[str, Any], asked: Asked, *, per_step: bool
) -> SummarizeDocument:
    """The document with all measurements. `requests` and `total` are the engine's, as in `run`; `systems` has every
    system.
    """
    samples, runs, max_draft_len = evaluation.samples, evaluation.runs, setup.session.max_draft_len
    found: dict[str, Any] = {run.name: _system(max_draft_len, samples, run) for run in runs}
    systems, work = Systems(**found), {run.name: run.work for run in runs}
    rouge = {run.name: found[run.name].rouge for run in runs}
    return SummarizeDocument(
        **measured_head("summarize"),
        requests=_requests(max_draft_len, evaluation, per_step=per_step),
        total=systems.engine.total if "engine" in work else None,
        rouge=rouge,
        num_references=sum(sample.reference is not None for sample in samples),
        hf=systems.hf,
        systems=systems,
        categories=_categories(max_draft_len, samples, runs),
        speedup=_speedup(work.get("engine_no_drafter"), work.get("engine")),
        speedup_over_hf=None if evaluation.hf_differences else _speedup(work.get("hf"), work.get("engine")),
        hf_differences=evaluation.hf_differences,
        checks=_checks(setup, evaluation, rouge, asked),
        settings=SummarizeSettings(**setup.settings(), **settings),
        workers=dict(sorted(runs[0].workers.items())),
        engine=setup.engine,
        draft_engine=setup.draft_engine,
    )


def _system(max_draft_len: int, samples: list[Sample], run: "SystemRun") -> EngineSystem | OtherSystem:
    figures: dict[str, Any] = {
        "total": run.total(max_draft_len),
        "rouge": _rouge([s.output_text for s in run.samples], [s.reference for s in samples]),
        "median_ttft_s": median([s.ttft_s for s in run.samples if s.ttft_s is not None]),
        "median_tpot_s": _median_or_none([s.tpot_s for s in run.samples if s.tpot_s is not None]),
        "mean_latency_s": mean([s.latency_s for s in run.samples if s.latency_s is not None]),
    }
    return OtherSystem(**figures) if run.name == "hf" else EngineSystem(**figures)


def _rouge(outputs: list[str], references: list[str | None]) -> Rouge | None:
    """ROUGE of the outputs that have a reference; None if none has."""
    pairs = [(o, reference) for o, reference in zip(outputs, references, strict=True) if reference is not None]
    return Rouge(**rouge_scores([o for o, _ in pairs], [reference for _, reference in pairs])) if pairs else None


def _median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None


def _requests(max_draft_len: int, evaluation: Evaluation, *, per_step: bool) -> list[SummarizeRequest]:
    samples, prompts, runs = evaluation.samples, evaluation.prompts, evaluation.runs
    requests = []
    for i, (sample, prompt, answer) in enumerate(zip(samples, prompts, runs[0].samples, strict=True)):
        of_engine: dict[str, Any] = {}
        if answer.sequence is not None:
            of_engine["finish_reason"] = answer.sequence.finish_reason
            of_engine["stats"] = answer.sequence.stats.as_dict(max_draft_len, per_step=per_step)
        requests.append(
            SummarizeRequest(
                id=sample.id,
                category=sample.category,
                prompt=sample.text,
                prompt_ids=prompt,
                reference=sample.reference,
                output_ids=answer.output_tokens,
                output_text=answer.output_text,
                outputs={run.name: run.samples[i].output_tokens for run in runs},
                wall_s={run.name: run.samples[i].wall_s for run in runs},
                **of_engine,
            )
        )
    return requests


def _categories(max_draft_len: int, samples: list[Sample], runs: list["SystemRun"]) -> dict[str, Category]:
    """ROUGE, acceptance, TPOT and speedup for each category; empty if the data has no categories."""
    categories = sorted({sample.category for sample in samples if sample.category is not None})
    return {category: _category(max_draft_len, samples, runs, category) for category in categories}


def _category(max_draft_len: int, samples: list[Sample], runs: list["SystemRun"], category: str) -> Category:
    chosen = [i for i, sample in enumerate(samples) if sample.category == category]
    references = [samples[i].reference for i in chosen]
    work = {run.name: run.work_on(chosen) for run in runs}
    answers = {run.name: [run.samples[i] for i in chosen] for run in runs}
    return Category(
        num_samples=len(chosen),
        num_references=sum(reference is not None for reference in references),
        rouge={name: _rouge([one.output_text for one in found], references) for name, found in answers.items()},
        median_tpot_s={
            name: _median_or_none([one.tpot_s for one in found if one.tpot_s is not None])
            for name, found in answers.items()
        },
        wall_s={name: done.wall_s for name, done in work.items()},
        speedup=_speedup(work.get("engine_no_drafter"), work.get("engine")),
        **_counts(max_draft_len, answers.get("engine", []), work.get("engine")),
    )


def _counts(max_draft_len: int, answers: list[Any], work: "Work | None") -> dict[str, Any]:
    """Counts of the engine for a category; empty if the engine was not run."""
    from runtime.core.generation import total_record

    if work is None:
        return {}
    sequences = [answer.sequence for answer in answers if answer.sequence]
    total = total_record(sequences, LoopTimes(wall_s=work.wall_s), max_draft_len)
    return {key: total[key] for key, field in Category.model_fields.items() if not field.is_required()}


def _speedup(base: "Work | None", engine: "Work | None") -> float | None:
    return engine.speedup_over(base) if base and engine else None


def _checks(
    setup: Setup, evaluation: Evaluation, rouge: dict[SystemName, Rouge | None], asked: Asked
) -> SummarizeChecks:
    """The requested checks, and the numbers of outputs that are equal to the other systems'. These numbers are left out
    if outputs are sampled in ways that differ by nature.
    """
    checks: dict[str, Any] = {}
    runs = {run.name: run for run in evaluation.runs}
    engine, is_same_model = runs.get("engine"), not evaluation.hf_differences
    draws_by_probs = engine is not None and setup.session.draws_by_probs(engine.sequences)
    comparable = {"hf": is_same_model and setup.params.config().is_greedy, "engine_no_drafter": not draws_by_probs}
    others: tuple[tuple[SystemName, str], ...] = (("hf", "hf"), ("engine_no_drafter", "no_drafter"))
    for other, name in others:
        if engine and other in runs and comparable[other]:
            pairs = zip(engine.samples, runs[other].samples, strict=True)
            same = sum(ours.output_tokens == theirs.output_tokens for ours, theirs in pairs)
            checks[f"identical_to_{name}"] = Identical(num_identical=same, num_samples=len(engine.samples))
    if asked.rouge1_threshold is not None:
        checks["accuracy"] = _accuracy(rouge, asked.rouge1_threshold, asked.rouge1_max_loss)
    if asked.lossless is not None:
        checks["lossless"] = asked.lossless
    return SummarizeChecks(**checks)


def _accuracy(rouge: dict[SystemName, Rouge | None], threshold: float, max_loss: float | None) -> Accuracy:
    """ROUGE-1 compared with the threshold, and with Hugging Face's score if a largest loss is given."""
    found = rouge["engine"]
    assert found is not None  # there are references, or nothing would have been answered
    rouge1, passed = found.rouge1, found.rouge1 >= threshold
    if max_loss is None:
        return Accuracy(rouge1=rouge1, threshold=threshold, passed=passed)
    hf = rouge["hf"]
    assert hf is not None
    passed = passed and hf.rouge1 - rouge1 <= max_loss
    return Accuracy(rouge1=rouge1, threshold=threshold, passed=passed, hf_rouge1=hf.rouge1, max_loss=max_loss)


def write_outputs(output_dir: Path, llm: "LLM", runs: list["SystemRun"], document: SummarizeDocument) -> None:
    """Write `engine.out` and `hf.out`, with an output for each sample as in TensorRT-LLM's summarize.py, and
    `summary.json`.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run.name == "engine_no_drafter":
            continue
        lines = [f"Engine path: {llm.bundle.directory}", f"Tokenizer path: {llm.tokenizer_dir}"]
        lines += [f"[{i}] {sample.output_text}" for i, sample in enumerate(run.samples)]
        write_file(output_dir / f"{run.name}.out", ("\n".join(lines) + "\n").encode())
    write_json(output_dir / "summary.json", document.as_json())
