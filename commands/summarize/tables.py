"""Tables of `summarize`: views of its document."""

from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from commands.build.report import described_quality
from commands.documents.records import Total
from commands.inputs.dataset import Sample
from commands.output import Output, columns_with_values, milliseconds, number, percent, speedup_line, visible
from commands.summarize.document import Category, EngineSystem, OtherSystem, Rouge, SummarizeDocument
from commands.summarize.rouge import ROUGE_TYPES
from commands.tables.drafts import show_details
from commands.tables.lossless_check import lossless_lines
from runtime.evaluation.checks import SYSTEM_TITLES
from runtime.evaluation.steps import tokens_per_step
from runtime.evaluation.systems import SampleRun, SystemRun


def _bare_summary(document: SummarizeDocument) -> list[str]:
    """A line for each system, then what they are compared and checked by."""
    lines = []
    for name, system in document.systems:
        if system is not None:
            rouge = "" if system.rouge is None else f", ROUGE-1 {number(system.rouge.rouge1)}"
            lines.append(f"{SYSTEM_TITLES[name]}: {number(system.total.output_tokens_per_second, 1)} tokens/s{rouge}")
    return [*lines, *_speedup_lines(document), *_check_lines(document)]


def show_summary(
    document: SummarizeDocument, samples: list[Sample], runs: list[SystemRun], stats: str, output: Output
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
        if document.categories:
            output.result(_category_table(document.categories))
    if stats == "detailed" and document.total:
        show_details(document.total, [tokens_per_step(sequence) for sequence in runs[0].sequences], output)
    for line in (*(_speedup_lines(document) if stats != "none" else ()), *_check_lines(document)):
        output.result(line)
    if document.workers:
        shares = ", ".join(f"{name} {count:,}" for name, count in document.workers.items())
        output.result(f"samples by worker: {shares}; their times are added up")


def _system_table(document: SummarizeDocument, runs: list[SystemRun]) -> Table:
    settings = document.settings
    table = Table(
        title=f"{Path(settings.dataset).name}: {settings.num_samples} samples, batch {settings.batch_size}, "
        f"{settings.output_len} tokens of output, {document.engine.dtype}",
        title_justify="left",
    )
    table.add_column("")
    for run in runs:
        table.add_column(SYSTEM_TITLES[run.name], justify="right")
    systems: list[EngineSystem | OtherSystem] = [getattr(document.systems, run.name) for run in runs]

    def row(label: str, cell: Callable[[EngineSystem | OtherSystem], str]) -> None:
        cells = [cell(system) for system in systems]
        if any(shown != "-" for shown in cells):
            table.add_row(label, *cells)

    for name in ROUGE_TYPES:
        row(name.replace("rouge", "ROUGE-"), lambda s, name=name: _score(s.rouge, name))  # type: ignore[misc]
    row("latency, mean", lambda s: milliseconds(s.mean_latency_s))
    row("tokens", lambda s: f"{s.total.num_generated_tokens:,}")
    row("tokens/s", lambda s: number(s.total.output_tokens_per_second, 1))
    row("TTFT, median", lambda s: milliseconds(s.median_ttft_s))
    row("TPOT, median", lambda s: milliseconds(s.median_tpot_s))

    def row_of_steps(label: str, cell: Callable[[Total], str]) -> None:
        row(label, lambda s: cell(s.total) if isinstance(s.total, Total) else "-")

    for part, label in (
        ("target", "target, per step"),
        ("draft", "drafting, per step"),
        ("draft_model", "  of it the draft model"),
        ("host", "host, per step"),
    ):
        row_of_steps(label, lambda total, part=part: _part_of_step(total, part))  # type: ignore[misc]
    row_of_steps("steps", lambda total: f"{total.num_steps:,}")
    row_of_steps("tokens per step", lambda total: number(total.tokens_per_step))
    row_of_steps("accepted / drafted", _accepted)
    row_of_steps("acceptance rate", lambda total: percent(total.draft_acceptance_rate))
    row_of_steps("mean acceptance length", lambda total: number(total.mean_acceptance_length))
    return table


def _part_of_step(total: Total, part: str) -> str:
    """Mean time of a step's part; drafting that took no time at all was not done."""
    seconds: float | None = getattr(total, f"{part}_time_per_step_s")
    return "-" if part.startswith("draft") and not seconds else milliseconds(seconds)


def _accepted(total: Total) -> str:
    if not total.num_draft_tokens:
        return "-"
    return f"{total.num_accepted_draft_tokens:,} / {total.num_draft_tokens:,}"


def _score(rouge: Rouge | None, name: str) -> str:
    return "-" if rouge is None else number(getattr(rouge, name))


def _category_table(categories: dict[str, Category]) -> Table:
    table = Table(title="By category", title_justify="left")
    columns = ("category", "samples", "ROUGE-1", "ROUGE-2", "tokens per step", "acceptance rate", "TPOT", "speedup")
    rows = [_category_row(name, record) for name, record in categories.items()]
    shown = columns_with_values(rows)
    for column in (columns[i] for i in shown):
        table.add_column(column, justify="left" if column == "category" else "right")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _category_row(name: str, record: Category) -> list[str]:
    rouge, tpot_s = next(iter(record.rouge.values())), next(iter(record.median_tpot_s.values()))
    return [
        visible(name),
        str(record.num_samples),
        _score(rouge, "rouge1"),
        _score(rouge, "rouge2"),
        number(record.tokens_per_step),
        percent(record.draft_acceptance_rate),
        milliseconds(tpot_s),
        _times(record.speedup),
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _speedup_lines(document: SummarizeDocument) -> list[str]:
    lines = []
    if document.speedup is not None:
        lines.append(speedup_line(document.speedup))
    if document.speedup_over_hf is not None:
        lines.append(f"speedup over Hugging Face: {_times(document.speedup_over_hf)}")
    return lines


def _check_lines(document: SummarizeDocument) -> list[str]:
    lines = []
    checks, quality = document.checks, document.engine.quality
    if quality is not None:
        lines.append(f"quantization: {described_quality(quality)}")
    for same, title in (
        (checks.identical_to_no_drafter, "the engine without drafter"),
        (checks.identical_to_hf, "Hugging Face"),
    ):
        if same is not None:
            lines.append(f"token for token the same as {title}: {same.num_identical} of {same.num_samples}")
    if document.hf_differences:
        lines.append("not compared with Hugging Face: it ran another model than the engine's")
    if checks.lossless is not None:
        lines += lossless_lines(checks.lossless)
    if (check := checks.accuracy) is not None:
        result = "passed" if check.passed else "FAILED"
        lost = ""
        if check.hf_rouge1 is not None:
            lost = f"; Hugging Face's {check.hf_rouge1:.2f}, and {check.max_loss:g} less is allowed"
        lines.append(f"accuracy check {result}: ROUGE-1 {check.rouge1:.2f}, threshold {check.threshold:g}{lost}")
    return lines
