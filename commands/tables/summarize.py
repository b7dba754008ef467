"""The summary of a dataset run: one JSON document, and tables and files that are views of it."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from commands.documents.head import document_head
from commands.documents.rouge import ROUGE_TYPES, rouge_scores
from commands.inputs.dataset import Sample
from commands.output import Output, milliseconds, number, percent, speedup_line
from commands.tables.details import show_details
from runtime.evaluation.lossless import lossless_lines
from runtime.evaluation.steps import tokens_per_step
from runtime.evaluation.systems import SampleRun, SystemRun
from runtime.files import write_file, write_json
from runtime.session import Session, Work, total_record
from runtime.stats import LoopTimes

_TITLES = {"hf": "Hugging Face", "engine": "engine", "engine_no_drafter": "engine, no drafter"}


def summary_document(
    session: Session,
    samples: list[Sample],
    prompts: list[list[int]],
    runs: list[SystemRun],
    settings: dict[str, Any],
    *,
    per_step: bool,
) -> dict[str, Any]:
    """Everything that was measured. `requests` and `total` are the engine's, as in `run`; `systems` has each one."""
    by_name = {run.name: run for run in runs}
    systems = {run.name: _system_record(session, samples, run) for run in runs}
    engine = by_name.get("engine")
    work = {run.name: run.work for run in runs}
    document: dict[str, Any] = {
        **document_head("summarize"),
        "requests": _request_records(session, samples, prompts, runs, per_step=per_step),
        "total": systems["engine"]["total"] if engine else None,
        "rouge": {run.name: systems[run.name]["rouge"] for run in runs},
        "num_references": sum(sample.reference is not None for sample in samples),
        "hf": systems.get("hf"),
        "systems": systems,
        "categories": _category_records(session, samples, runs),
        "speedup": _speedup(work.get("engine_no_drafter"), work.get("engine")),
        "speedup_over_hf": _speedup(work.get("hf"), work.get("engine")),
        "checks": _identity_checks(session, by_name),
        "settings": settings,
        **session.engine_records(),
    }
    return document


def _system_record(session: Session, samples: list[Sample], run: SystemRun) -> dict[str, Any]:
    return {
        "total": run.total(session.max_draft_len),
        "rouge": _rouge([s.output_text for s in run.samples], [s.reference for s in samples]),
        "median_ttft_s": median([s.ttft_s for s in run.samples if s.ttft_s is not None]),
        "median_tpot_s": _median_or_none([s.tpot_s for s in run.samples if s.tpot_s is not None]),
        "mean_latency_s": mean([s.latency_s for s in run.samples if s.latency_s is not None]),
    }


def _rouge(outputs: list[str], references: list[str | None]) -> dict[str, float] | None:
    """Of the outputs that have a reference; None where none has."""
    pairs = [(o, reference) for o, reference in zip(outputs, references, strict=True) if reference is not None]
    return rouge_scores([o for o, _ in pairs], [reference for _, reference in pairs]) if pairs else None


def _median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None


def _request_records(
    session: Session, samples: list[Sample], prompts: list[list[int]], runs: list[SystemRun], *, per_step: bool
) -> list[dict[str, Any]]:
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
            record["stats"] = answer.sequence.stats.as_dict(session.max_draft_len, per_step=per_step)
        records.append(record)
    return records


def _category_records(session: Session, samples: list[Sample], runs: list[SystemRun]) -> dict[str, Any]:
    """ROUGE, acceptance, TPOT and speedup per category; empty where the data names none."""
    categories = sorted({sample.category for sample in samples if sample.category is not None})
    return {category: _category_record(session, samples, runs, category) for category in categories}


def _category_record(session: Session, samples: list[Sample], runs: list[SystemRun], category: str) -> dict[str, Any]:
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
            total = total_record(sequences, LoopTimes(wall_s=walls["engine"]), session.max_draft_len)
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


def _identity_checks(session: Session, runs: dict[Any, SystemRun]) -> dict[str, Any]:
    """How many outputs are token for token those of the other systems; left out where draws differ by nature."""
    comparable = {"hf": session.sampling.is_greedy, "engine_no_drafter": not session.draws_by_probs}
    checks: dict[str, Any] = {}
    engine = runs.get("engine")
    for other, key in (("hf", "identical_to_hf"), ("engine_no_drafter", "identical_to_no_drafter")):
        if engine and other in runs and comparable[other]:
            checks[key] = {"num_identical": _num_identical(engine, runs[other]), "num_samples": len(engine.samples)}
    return checks


def accuracy_check(document: dict[str, Any], rouge1_threshold: float) -> dict[str, Any]:
    rouge1 = document["rouge"]["engine"]["rouge1"]
    return {"rouge1": rouge1, "threshold": rouge1_threshold, "passed": rouge1 >= rouge1_threshold}


def _num_identical(a: SystemRun, b: SystemRun) -> int:
    return sum(x.output_tokens == y.output_tokens for x, y in zip(a.samples, b.samples, strict=True))


def show_summary(
    document: dict[str, Any], samples: list[Sample], runs: list[SystemRun], stats: str, output: Output
) -> None:
    """The first sample as TensorRT-LLM prints it, a column per system, the categories, and the checks."""
    first: SampleRun = runs[0].samples[0]
    output.result(f"Sample {samples[0].id}")
    if output.human:
        reference = f'Reference: "{samples[0].reference}"\n' if samples[0].reference is not None else ""
        output.text(f'Input: "{samples[0].text}"\n{reference}Output: "{first.output_text}"\n')
    if stats != "none":
        output.result(_system_table(document, runs))
        if document["categories"]:
            output.result(_category_table(document["categories"]))
    if stats == "detailed" and document["total"]:
        show_details(document["total"], [tokens_per_step(sequence) for sequence in runs[0].sequences], output)
    for line in (*(_speedup_lines(document) if stats != "none" else ()), *_check_lines(document)):
        output.result(line)


def _system_table(document: dict[str, Any], runs: list[SystemRun]) -> Table:
    settings = document["settings"]
    table = Table(
        title=f"{Path(settings['dataset']).name}: {settings['num_samples']} samples, batch {settings['batch_size']}, "
        f"{settings['output_len']} tokens of output, {document['engine']['dtype']}",
        title_justify="left",
    )
    table.add_column("")
    for run in runs:
        table.add_column(_TITLES[run.name], justify="right")
    systems = [document["systems"][run.name] for run in runs]

    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(cell(system) for system in systems))

    for name in ROUGE_TYPES:
        row(name.replace("rouge", "ROUGE-"), lambda s, name=name: _score(s["rouge"], name))  # type: ignore[misc]
    row("latency, mean", lambda s: milliseconds(s["mean_latency_s"]))
    row("tokens", lambda s: f"{s['total']['num_generated_tokens']:,}")
    row("tokens/s", lambda s: number(s["total"]["output_tokens_per_second"], 1))
    row("TTFT, median", lambda s: milliseconds(s["median_ttft_s"]))
    row("TPOT, median", lambda s: milliseconds(s["median_tpot_s"]))
    for part, label in (
        ("target", "target, per step"),
        ("draft", "drafting, per step"),
        ("draft_model", "  of it the draft model"),
        ("host", "host, per step"),
    ):
        row(label, lambda s, part=part: milliseconds(s["total"].get(f"{part}_time_per_step_s")))  # type: ignore[misc]
    row("steps", lambda s: f"{s['total']['num_steps']:,}" if "num_steps" in s["total"] else "-")
    row("tokens per step", lambda s: number(s["total"].get("tokens_per_step")))
    row("accepted / drafted", _accepted)
    row("acceptance rate", lambda s: percent(s["total"].get("draft_acceptance_rate")))
    row("mean acceptance length", lambda s: number(s["total"].get("mean_acceptance_length")))
    return table


def _accepted(system: dict[str, Any]) -> str:
    total = system["total"]
    if not total.get("num_draft_tokens"):
        return "-"
    return f"{total['num_accepted_draft_tokens']:,} / {total['num_draft_tokens']:,}"


def _score(rouge: dict[str, float] | None, name: str) -> str:
    return "-" if rouge is None else number(rouge[name])


def _category_table(categories: dict[str, Any]) -> Table:
    table = Table(title="By category", title_justify="left")
    columns = ("category", "samples", "ROUGE-1", "ROUGE-2", "tokens per step", "acceptance rate", "TPOT", "speedup")
    for column in columns:
        table.add_column(column, justify="left" if column == "category" else "right")
    for name, record in categories.items():
        rouge, tpot_s = (next(iter(record[key].values())) for key in ("rouge", "median_tpot_s"))
        table.add_row(
            name,
            str(record["num_samples"]),
            _score(rouge, "rouge1"),
            _score(rouge, "rouge2"),
            number(record.get("tokens_per_step")),
            percent(record.get("draft_acceptance_rate")),
            milliseconds(tpot_s),
            _times(record["speedup"]),
        )
    return table


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _speedup_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    if document["speedup"] is not None:
        lines.append(speedup_line(document["speedup"]))
    if document["speedup_over_hf"] is not None:
        lines.append(f"speedup over Hugging Face: {_times(document['speedup_over_hf'])}")
    return lines


def _check_lines(document: dict[str, Any]) -> list[str]:
    lines = []
    checks = document["checks"]
    for key, title in (("identical_to_no_drafter", "the engine without drafter"), ("identical_to_hf", "Hugging Face")):
        if key in checks:
            lines.append(
                f"token for token the same as {title}: {checks[key]['num_identical']} of {checks[key]['num_samples']}"
            )
    if "lossless" in checks:
        lines += lossless_lines(checks["lossless"])
    if "accuracy" in checks:
        check = checks["accuracy"]
        result = "passed" if check["passed"] else "FAILED"
        lines.append(f"accuracy check {result}: ROUGE-1 {check['rouge1']:.2f}, threshold {check['threshold']:g}")
    return lines


def write_outputs(output_dir: Path, session: Session, runs: list[SystemRun], document: dict[str, Any]) -> None:
    """`engine.out` and `hf.out` with one output per sample, as TensorRT-LLM's summarize.py, and `summary.json`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run.name == "engine_no_drafter":
            continue
        lines = [f"Engine path: {session.settings.engine_dir}", f"Tokenizer path: {session.tokenizer_dir}"]
        lines += [f"[{i}] {sample.output_text}" for i, sample in enumerate(run.samples)]
        write_file(output_dir / f"{run.name}.out", ("\n".join(lines) + "\n").encode())
    write_json(output_dir / "summary.json", document)
