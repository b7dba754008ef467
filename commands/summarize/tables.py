"""Tables of `summarize`: views of its document."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from commands.build.report import described_quality
from commands.inputs.dataset import Sample
from commands.output import Output, columns_with_values, milliseconds, number, percent, speedup_line, visible
from commands.summarize.rouge import ROUGE_TYPES
from commands.tables.drafts import show_details
from commands.tables.lossless_check import lossless_lines
from runtime.evaluation.steps import tokens_per_step
from runtime.evaluation.systems import SampleRun, SystemRun

_TITLES = {"hf": "Hugging Face", "engine": "engine", "engine_no_drafter": "engine, no drafter"}


def _bare_summary(document: dict[str, Any]) -> list[str]:
    """A line for each system, then what they are compared and checked by."""
    lines = []
    for name, system in document["systems"].items():
        rouge = "" if system["rouge"] is None else f", ROUGE-1 {number(system['rouge']['rouge1'])}"
        lines.append(f"{_TITLES[name]}: {number(system['total']['output_tokens_per_second'], 1)} tokens/s{rouge}")
    return [*lines, *_speedup_lines(document), *_check_lines(document)]


def show_summary(
    document: dict[str, Any], samples: list[Sample], runs: list[SystemRun], stats: str, output: Output
) -> None:
    """The first sample as TensorRT-LLM prints it, a column per system, the categories, and the checks."""
    if output.quiet:
        output.text("\n".join(_bare_summary(document)))
        return
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
    if document["workers"]:
        shares = ", ".join(f"{name} {count:,}" for name, count in document["workers"].items())
        output.result(f"samples by worker: {shares}; their times are added up")


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
        cells = [cell(system) for system in systems]
        if any(shown != "-" for shown in cells):
            table.add_row(label, *cells)

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
        row(label, lambda s, part=part: _part_of_step(s["total"], part))  # type: ignore[misc]
    row("steps", lambda s: f"{s['total']['num_steps']:,}" if "num_steps" in s["total"] else "-")
    row("tokens per step", lambda s: number(s["total"].get("tokens_per_step")))
    row("accepted / drafted", _accepted)
    row("acceptance rate", lambda s: percent(s["total"].get("draft_acceptance_rate")))
    row("mean acceptance length", lambda s: number(s["total"].get("mean_acceptance_length")))
    return table


def _part_of_step(total: dict[str, Any], part: str) -> str:
    """Mean time of a step's part; drafting that took no time at all was not done."""
    seconds = total.get(f"{part}_time_per_step_s")
    return "-" if part.startswith("draft") and not seconds else milliseconds(seconds)


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
    rows = [_category_row(name, record) for name, record in categories.items()]
    shown = columns_with_values(rows)
    for column in (columns[i] for i in shown):
        table.add_column(column, justify="left" if column == "category" else "right")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _category_row(name: str, record: dict[str, Any]) -> list[str]:
    rouge, tpot_s = (next(iter(record[key].values())) for key in ("rouge", "median_tpot_s"))
    return [
        visible(name),
        str(record["num_samples"]),
        _score(rouge, "rouge1"),
        _score(rouge, "rouge2"),
        number(record.get("tokens_per_step")),
        percent(record.get("draft_acceptance_rate")),
        milliseconds(tpot_s),
        _times(record["speedup"]),
    ]


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
    checks, quality = document["checks"], document["engine"]["quality"]
    if quality is not None:
        lines.append(f"quantization: {described_quality(quality)}")
    for key, title in (("identical_to_no_drafter", "the engine without drafter"), ("identical_to_hf", "Hugging Face")):
        if key in checks:
            lines.append(
                f"token for token the same as {title}: {checks[key]['num_identical']} of {checks[key]['num_samples']}"
            )
    if document["hf_differences"]:
        lines.append("not compared with Hugging Face: it ran another model than the engine's")
    if "lossless" in checks:
        lines += lossless_lines(checks["lossless"])
    if "accuracy" in checks:
        check = checks["accuracy"]
        result = "passed" if check["passed"] else "FAILED"
        lost = ""
        if "hf_rouge1" in check:
            lost = f"; Hugging Face's {check['hf_rouge1']:.2f}, and {check['max_loss']:g} less is allowed"
        lines.append(f"accuracy check {result}: ROUGE-1 {check['rouge1']:.2f}, threshold {check['threshold']:g}{lost}")
    return lines
