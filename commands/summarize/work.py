"""Work of `summarize` with a session: answer the samples, check, write and show."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.table import Table

from commands.build.document import described_quality
from commands.inputs.dataset import EvalTask, Sample, summarization_prompt
from commands.options.sessions import lossless_check
from commands.output.documents.records import Total
from commands.output.documents.settings import Setup
from commands.output.html.page import write_page
from commands.output.html.report import html_report
from commands.output.output import (
    Output,
    add_columns_with_values,
    milliseconds,
    number,
    percent,
    show_fixed_lost,
    speedup_line,
    visible,
    warn,
)
from commands.output.tables.drafts import show_details
from commands.output.tables.lossless_check import exit_if_too_little_to_tell, fail_unless_lossless, lossless_lines
from commands.summarize.document import (
    Accuracy,
    Asked,
    Category,
    EngineSystem,
    Evaluation,
    OtherSystem,
    Rouge,
    SummarizeDocument,
    summary_document,
    write_outputs,
)
from commands.summarize.flags import EvaluationOptions, SummarizeInputs, SummarizeResults
from commands.summarize.rouge import ROUGE_TYPES, num_without_letters
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.loop.lossless.results import SYSTEM_TITLES
from runtime.loop.session import Session
from runtime.measure.evaluation.systems import (
    Batches,
    EvaluateEngine,
    EvaluationInterrupted,
    Question,
    SampleRun,
    SystemRun,
    joined,
    places_of,
)
from runtime.measure.text_steps import all_pieces, tokens_per_step
from runtime.measure.tuning.search import fixed_lost
from runtime.text.text import encode
from runtime.text.traces import write_traces
from runtime.util.errors import SpecDecError

_NUM_SHOWN = 3  # of the differences between two models


@dataclass(frozen=True)
class Systems:
    """Systems that answer: the engine, in this process or by workers, and optionally Hugging Face's model."""

    evaluate_engine: EvaluateEngine
    hf_dir: Path | None


def evaluate(
    setup: Setup,
    systems: Systems,
    samples: list[Sample],
    inputs: SummarizeInputs,
    options: EvaluationOptions,
    results: SummarizeResults,
    output: Output,
) -> None:
    """Answer the samples, check, write and show; SpecDecError if a check fails. After Ctrl-C, exits with 130 and writes
    the answers so far, without checks.
    """
    if options.batch_size > 1:
        samples = by_category(samples)
    build = setup.llm.engine.config.build_config
    fitting = max(1, min(inputs.max_input_length, build.max_input_len, build.max_request_len - options.output_len))
    prompts = encode_samples(samples, inputs.eval_task, setup.llm.tokenizer, fitting)
    if options.test_engine:
        _check_samples(setup, samples, prompts)
    _warn_of_other_letters(samples, output)
    answers = _run_systems(setup, make_batches(samples, prompts, options.batch_size), systems, options, output)
    runs = answers.runs
    if answers.is_interrupted:
        chosen = answers.answered
        output.warning(f"interrupted: {len(chosen)} of {len(samples)} samples were answered, and only they are counted")
        samples, prompts = [samples[i] for i in chosen], [prompts[i] for i in chosen]
        results = replace(results, check_accuracy=False, check_lossless=False)
    evaluation = Evaluation(samples, prompts, runs, answers.hf_differences)
    settings = options.record(inputs, len(samples))
    asked = _asked(setup.session, runs, results, output)
    document = summary_document(setup, evaluation, settings, asked, per_step=results.stats == "detailed")
    if results.output_dir is not None:
        write_outputs(results.output_dir, setup.llm, runs, document)
    if results.output_traces is not None:
        categories = [sample.category for sample in samples]
        write_traces(results.output_traces, zip(runs[0].sequences, categories, strict=True))
    show_summary(document, samples, runs, results.stats, output)
    if results.stats != "none" and options.test_engine and output.human:
        show_fixed_lost(fixed_lost(setup.session, runs[0].sequences, options.batch_size), output)
    output.document(document.as_json())
    if results.report is not None:
        pieces = all_pieces(setup.llm.tokenizer, runs[0].sequences)
        html = html_report(document.as_json(), pieces or [None] * len(samples))
        write_page(results.report, html, output)
    if answers.is_interrupted:
        raise typer.Exit(130)
    fail_unless_lossless(document.checks.lossless)
    _fail_unless_accurate(document.checks.accuracy)
    exit_if_too_little_to_tell(document.checks.lossless)


def _warn_of_other_letters(samples: list[Sample], output: Output) -> None:
    references = [sample.reference for sample in samples if sample.reference is not None]
    if number := num_without_letters(references):
        output.warning(
            f"ROUGE handles only the letters a to z: its scores are meaningless for {number} of {len(references)} "
            "references"
        )


@dataclass(frozen=True)
class _Answers:
    """Answers of each system; differences between Hugging Face's model and the engine's; whether Ctrl-C came; and the
    indices of the samples that were answered.
    """

    runs: list[SystemRun]
    hf_differences: list[str]
    is_interrupted: bool
    answered: list[int]


def _check_samples(setup: Setup, samples: list[Sample], prompts: list[list[int]]) -> None:
    """SpecDecError, with its place in the dataset, for a sample that cannot be answered. All samples are checked before
    the first is answered.
    """
    template = setup.llm.request_of(setup.params)
    zipped = enumerate(zip(samples, prompts, strict=True))
    setup.session.check_requests([replace(template.with_prompt(i, p), label=sample.where) for i, (sample, p) in zipped])


def _run_systems(
    setup: Setup, batches: Batches, systems: Systems, options: EvaluationOptions, output: Output
) -> _Answers:
    """Answers of the systems that are asked for: the engine with its drafter, the engine without, and Hugging Face."""
    question = Question(setup.llm, setup.llm.request_of(setup.params))
    runs: list[SystemRun] = []
    places, hf_dir = places_of(batches), systems.hf_dir
    everyone = [i for place in places for i in place]
    if options.test_engine:
        try:
            with output.progress("engine", len(batches)) as advance:
                runs += systems.evaluate_engine(question, setup.session, batches, advance)
        except EvaluationInterrupted as interrupted:
            if not interrupted.answers:
                raise
            answered = [i for batch in sorted(interrupted.answers) for i in places[batch]]
            return _Answers(joined(interrupted.answers), [], True, answered)
    differences: list[str] = []
    if hf_dir is not None:
        from runtime.measure.evaluation.hugging_face import (  # seconds, which the engine alone saves
            HuggingFace,
            evaluate_hf,
        )

        try:
            hugging_face = HuggingFace.load(hf_dir, question)
            differences = hugging_face.differences
            if differences:
                _warn_of_another_model(hf_dir, differences, output)
            with output.progress("Hugging Face", len(batches)) as advance:
                runs.append(evaluate_hf(hugging_face, batches, advance))
        except KeyboardInterrupt:
            if not runs:
                raise
            output.warning("Hugging Face left out: interrupted")
            return _Answers(runs, [], True, everyone)
    return _Answers(runs, differences, False, everyone)


def _warn_of_another_model(hf_dir: Path, differences: list[str], output: Output) -> None:
    shown = "; ".join(differences[:_NUM_SHOWN])
    more = f"; {len(differences) - _NUM_SHOWN} more" if len(differences) > _NUM_SHOWN else ""
    output.warning(
        f"`--hf-model-dir {hf_dir}` is another model than the engine's, and there is no speedup over it ({shown}{more})"
    )


def _asked(session: Session, runs: list[SystemRun], results: SummarizeResults, output: Output) -> Asked:
    """Make the lossless check, if it is asked for; returns all checks that are asked for."""
    lossless = None
    if results.check_lossless:
        lossless = lossless_check(session, runs[0].sequences, runs[1].sequences, output)
    if not results.check_accuracy:
        return Asked(lossless=lossless)
    return Asked(results.threshold, results.rouge1_max_loss, lossless)


def _fail_unless_accurate(check: Accuracy | None) -> None:
    """SpecDecError (exit code 1) if the check was made and failed."""
    if check is None or check.passed:
        return
    if check.rouge1 < check.threshold:
        raise SpecDecError(
            f"ROUGE-1 is below the threshold {check.threshold:g}: {check.rouge1:.2f}",
            hint="look at the outputs, or set `--rouge1-threshold`",
        )
    raise SpecDecError(
        f"ROUGE-1 is more than {check.max_loss:g} below Hugging Face's {check.hf_rouge1:.2f}: {check.rouge1:.2f}",
        hint="quantize to more bits or in smaller groups: `specdec convert --quantization FORMAT --group-size N`",
    )


def by_category(samples: list[Sample]) -> list[Sample]:
    """The samples in order of categories: all samples of the first sample's category, then those of the
    next category.
    """
    order = {category: i for i, category in enumerate(dict.fromkeys(sample.category for sample in samples))}
    return sorted(samples, key=lambda sample: order[sample.category])


def make_batches(samples: list[Sample], prompts: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Groups of prompts that are answered together. The prompts of a group are of the same category, since a batch's
    time cannot be divided between two.
    """
    batches: list[list[list[int]]] = []
    previous = None
    for sample, prompt in zip(samples, prompts, strict=True):
        if not batches or len(batches[-1]) == batch_size or sample.category != previous:
            batches.append([])
        batches[-1].append(prompt)
        previous = sample.category
    return batches


def encode_samples(
    samples: list[Sample], eval_task: EvalTask, tokenizer: Tokenizer | None, max_input_length: int
) -> list[list[int]]:
    """Token ids of each sample's prompt. A prompt that is too long is cut to its last tokens, with a warning."""
    prompts, num_truncated = [], 0
    for sample in samples:
        text = summarization_prompt(sample.text) if eval_task == "summarize" else sample.text
        tokens, truncated = encode(text, tokenizer, max_input_length)
        prompts.append(tokens)
        num_truncated += truncated
    if num_truncated:
        warn(f"prompts cut to their last {max_input_length} tokens: {num_truncated} of {len(prompts)}")
    return prompts


def _bare_summary(document: SummarizeDocument) -> list[str]:
    """The summary for `--quiet`: a line for each system, then the comparisons and checks."""
    lines = []
    for name, system in document.systems:
        if system is not None:
            rouge = "" if system.rouge is None else f", ROUGE-1 {number(system.rouge.rouge1)}"
            lines.append(f"{SYSTEM_TITLES[name]}: {number(system.total.output_tokens_per_second, 1)} tokens/s{rouge}")
    return [*lines, *_speedup_lines(document), *_check_lines(document)]


def show_summary(
    document: SummarizeDocument, samples: list[Sample], runs: list[SystemRun], stats: str, output: Output
) -> None:
    """Show the first sample as TensorRT-LLM prints it, a table with a column for each system, the categories, and the
    checks.
    """
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
    """Mean time of a part of a step; a dash for drafting without a drafter, which takes no time."""
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
    add_columns_with_values(table, columns, rows, left=("category",))
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
        "-" if record.speedup is None else f"{record.speedup:.2f}x",
    ]


def _speedup_lines(document: SummarizeDocument) -> list[str]:
    lines = []
    if document.speedup is not None:
        lines.append(speedup_line(document.speedup))
    if document.speedup_over_hf is not None:
        lines.append(f"speedup over Hugging Face: {document.speedup_over_hf:.2f}x")
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
