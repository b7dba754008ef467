"""The JSON document of `specdec summarize`, which its tables and files are views of."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from commands.documents.head import document_head
from commands.documents.rouge import rouge_scores
from commands.documents.settings import Setup
from commands.inputs.dataset import Sample
from runtime.evaluation.systems import SystemRun
from runtime.files import write_file, write_json
from runtime.generation import Work, total_record
from runtime.llm import LLM
from runtime.stats import LoopTimes


@dataclass(frozen=True)
class Evaluation:
    """A dataset's samples, the token ids of their prompts, and what each system answered.

    `hf_differences` is what makes Hugging Face's model another one than the engine's, with which it is not compared.
    """

    samples: list[Sample]
    prompts: list[list[int]]
    runs: list[SystemRun]
    hf_differences: list[str]


def summary_document(
    setup: Setup, evaluation: Evaluation, settings: dict[str, Any], *, per_step: bool
) -> dict[str, Any]:
    """Everything that was measured. `requests` and `total` are the engine's, as in `run`; `systems` has each one."""
    samples, runs, max_draft_len = evaluation.samples, evaluation.runs, setup.session.max_draft_len
    by_name = {run.name: run for run in runs}
    systems = {run.name: _system_record(max_draft_len, samples, run) for run in runs}
    engine = by_name.get("engine")
    work = {run.name: run.work for run in runs}
    document: dict[str, Any] = {
        **document_head("summarize"),
        "requests": _request_records(max_draft_len, evaluation, per_step=per_step),
        "total": systems["engine"]["total"] if engine else None,
        "rouge": {run.name: systems[run.name]["rouge"] for run in runs},
        "num_references": sum(sample.reference is not None for sample in samples),
        "hf": systems.get("hf"),
        "systems": systems,
        "categories": _category_records(max_draft_len, samples, runs),
        "speedup": _speedup(work.get("engine_no_drafter"), work.get("engine")),
        "speedup_over_hf": None if evaluation.hf_differences else _speedup(work.get("hf"), work.get("engine")),
        "hf_differences": evaluation.hf_differences,
        "checks": _identity_checks(setup, by_name, is_same_model=not evaluation.hf_differences),
        "settings": {**setup.settings_record(), **settings},
        "workers": dict(sorted(runs[0].workers.items())),
        **setup.engine_records(),
    }
    return document


def _system_record(max_draft_len: int, samples: list[Sample], run: SystemRun) -> dict[str, Any]:
    return {
        "total": run.total(max_draft_len),
        "rouge": _rouge([s.output_text for s in run.samples], [s.reference for s in samples]),
        "median_ttft_s": median([s.ttft_s for s in run.samples if s.ttft_s is not None]),
        "median_tpot_s": _median_or_none([s.tpot_s for s in run.samples if s.tpot_s is not None]),
        "mean_latency_s": mean([s.latency_s for s in run.samples if s.latency_s is not None]),
    }


def _rouge(outputs: list[str], references: list[str | None]) -> dict[str, float] | None:
    """ROUGE of the outputs that have a reference; None where none has."""
    pairs = [(o, reference) for o, reference in zip(outputs, references, strict=True) if reference is not None]
    return rouge_scores([o for o, _ in pairs], [reference for _, reference in pairs]) if pairs else None


def _median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None


def _request_records(max_draft_len: int, evaluation: Evaluation, *, per_step: bool) -> list[dict[str, Any]]:
    samples, prompts, runs = evaluation.samples, evaluation.prompts, evaluation.runs
    main = runs[0]
    records = []
    for i, (sample, prompt, answer) in enumerate(zip(samples, prompts, main.samples, strict=True)):
        record: dict[str, Any] = {
            "id": sample.id,
            "category": sample.category,
            "prompt": sample.text,
            "prompt_ids": prompt,
            "reference": sample.reference,
            "output_ids": answer.output_tokens,
            "output_text": answer.output_text,
            "outputs": {run.name: run.samples[i].output_tokens for run in runs},
            "wall_s": {run.name: run.samples[i].wall_s for run in runs},
        }
        if answer.sequence is not None:
            record["finish_reason"] = answer.sequence.finish_reason
            record["stats"] = answer.sequence.stats.as_dict(max_draft_len, per_step=per_step)
        records.append(record)
    return records


def _category_records(max_draft_len: int, samples: list[Sample], runs: list[SystemRun]) -> dict[str, Any]:
    """ROUGE, acceptance, TPOT and speedup per category; empty where the data names none."""
    categories = sorted({sample.category for sample in samples if sample.category is not None})
    return {category: _category_record(max_draft_len, samples, runs, category) for category in categories}


def _category_record(max_draft_len: int, samples: list[Sample], runs: list[SystemRun], category: str) -> dict[str, Any]:
    chosen = [i for i, sample in enumerate(samples) if sample.category == category]
    references = [samples[i].reference for i in chosen]
    work = {run.name: run.work_on(chosen) for run in runs}
    walls = {name: done.wall_s for name, done in work.items()}
    record: dict[str, Any] = {
        "num_samples": len(chosen),
        "num_references": sum(reference is not None for reference in references),
        "rouge": {},
        "median_tpot_s": {},
        "wall_s": walls,
    }
    for run in runs:
        answers = [run.samples[i] for i in chosen]
        record["rouge"][run.name] = _rouge([answer.output_text for answer in answers], references)
        record["median_tpot_s"][run.name] = _median_or_none([a.tpot_s for a in answers if a.tpot_s is not None])
        if run.name == "engine":
            sequences = [answer.sequence for answer in answers if answer.sequence]
            total = total_record(sequences, LoopTimes(wall_s=walls["engine"]), max_draft_len)
            record |= {key: total[key] for key in _CATEGORY_COUNTS}
    record["speedup"] = _speedup(work.get("engine_no_drafter"), work.get("engine"))
    return record


_CATEGORY_COUNTS = (
    "num_generated_tokens",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "draft_acceptance_rate",
    "tokens_per_step",
)


def _speedup(base: Work | None, engine: Work | None) -> float | None:
    return engine.speedup_over(base) if base and engine else None


def _identity_checks(setup: Setup, runs: dict[Any, SystemRun], *, is_same_model: bool) -> dict[str, Any]:
    """How many outputs are token for token those of the other systems; left out where draws differ by nature."""
    checks: dict[str, Any] = {}
    engine = runs.get("engine")
    draws_by_probs = engine is not None and setup.session.draws_by_probs(engine.sequences)
    comparable = {"hf": is_same_model and setup.params.config().is_greedy, "engine_no_drafter": not draws_by_probs}
    for other, key in (("hf", "identical_to_hf"), ("engine_no_drafter", "identical_to_no_drafter")):
        if engine and other in runs and comparable[other]:
            checks[key] = {"num_identical": _num_identical(engine, runs[other]), "num_samples": len(engine.samples)}
    return checks


def accuracy_check(document: dict[str, Any], rouge1_threshold: float, max_loss: float | None) -> dict[str, Any]:
    """Against the threshold, and against Hugging Face's score if a largest loss is given."""
    rouge1 = document["rouge"]["engine"]["rouge1"]
    check = {"rouge1": rouge1, "threshold": rouge1_threshold, "passed": rouge1 >= rouge1_threshold}
    if max_loss is None:
        return check
    hf_rouge1 = document["rouge"]["hf"]["rouge1"]
    is_near = hf_rouge1 - rouge1 <= max_loss
    return check | {"hf_rouge1": hf_rouge1, "max_loss": max_loss, "passed": check["passed"] and is_near}


def _num_identical(a: SystemRun, b: SystemRun) -> int:
    return sum(x.output_tokens == y.output_tokens for x, y in zip(a.samples, b.samples, strict=True))


def write_outputs(output_dir: Path, llm: LLM, runs: list[SystemRun], document: dict[str, Any]) -> None:
    """`engine.out` and `hf.out` with one output per sample, as TensorRT-LLM's summarize.py, and `summary.json`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run.name == "engine_no_drafter":
            continue
        lines = [f"Engine path: {llm.bundle.directory}", f"Tokenizer path: {llm.tokenizer_dir}"]
        lines += [f"[{i}] {sample.output_text}" for i, sample in enumerate(run.samples)]
        write_file(output_dir / f"{run.name}.out", ("\n".join(lines) + "\n").encode())
    write_json(output_dir / "summary.json", document)
