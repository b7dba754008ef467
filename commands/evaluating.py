"""What `summarize` does with a session: answer the samples, check, write and show."""

from pathlib import Path
from typing import Any

from commands.html.report import write_report
from commands.inputs.batches import by_category, encode_samples, make_batches
from commands.inputs.dataset import Sample
from commands.inputs.traces import write_traces
from commands.options.summarize import EvaluationOptions, SummarizeInputs, SummarizeResults
from commands.output import Output
from commands.sessions import lossless_check
from commands.tables.summarize import accuracy_check, show_summary, summary_document, write_outputs
from runtime.errors import SpecDecError
from runtime.evaluation.lossless import fail_unless_lossless
from runtime.evaluation.steps import session_pieces
from runtime.evaluation.systems import HuggingFace, SystemRun, evaluate_engine, evaluate_hf
from runtime.session import Session


def evaluate(
    session: Session,
    hf_dir: Path | None,
    samples: list[Sample],
    inputs: SummarizeInputs,
    evaluation: EvaluationOptions,
    results: SummarizeResults,
    output: Output,
) -> None:
    """Answer, with `hf_dir`'s model too if it is given, check, write and show; SpecDecError if a check fails."""
    _check_batch_size(session, evaluation.batch_size)
    if evaluation.batch_size > 1:
        samples = by_category(samples)
    prompts = encode_samples(samples, inputs.eval_task, session.tokenizer, inputs.max_input_length)
    runs = _run_systems(session, make_batches(samples, prompts, evaluation.batch_size), hf_dir, evaluation, output)
    settings = session.settings_record() | evaluation.record(inputs, len(samples))
    document = summary_document(session, samples, prompts, runs, settings, per_step=results.stats == "detailed")
    document["checks"] |= _checks(session, document, runs, results, output)
    if results.output_dir is not None:
        write_outputs(results.output_dir, session, runs, document)
    if results.output_traces is not None:
        categories = [sample.category for sample in samples]
        write_traces(results.output_traces, zip(runs[0].sequences, categories, strict=True))
    show_summary(document, samples, runs, results.stats, output)
    output.document(document)
    if results.report is not None:
        write_report(results.report, document, session_pieces(session, runs[0].sequences) or [None] * len(samples))
        output.result(f"report written: {results.report}")
    fail_unless_lossless(document["checks"])
    _fail_unless_accurate(document["checks"], results.rouge1_threshold)


def _check_batch_size(session: Session, batch_size: int) -> None:
    max_batch_size = session.engine.max_batch_size
    if batch_size > max_batch_size:
        raise SpecDecError(
            f"`--batch-size` exceeds the engine's max_batch_size {max_batch_size}: {batch_size}",
            hint="lower it, or build with a larger `--max-batch-size`",
        )


def _run_systems(
    session: Session, batches: list[list[list[int]]], hf_dir: Path | None, evaluation: EvaluationOptions, output: Output
) -> list[SystemRun]:
    """The engine with its drafter and without, and Hugging Face, where they are asked for."""
    runs: list[SystemRun] = []
    if evaluation.test_engine:
        with output.progress("engine", len(batches)) as advance:
            runs += evaluate_engine(session, batches, evaluation.output_len, advance)
    if hf_dir is not None:
        hugging_face = HuggingFace.load(hf_dir, session)
        with output.progress("Hugging Face", len(batches)) as advance:
            runs.append(evaluate_hf(hugging_face, batches, evaluation.output_len, advance))
    return runs


def _checks(
    session: Session, document: dict[str, Any], runs: list[SystemRun], results: SummarizeResults, output: Output
) -> dict[str, Any]:
    """Those that are asked for, for the document's `checks`."""
    checks = {}
    if results.check_accuracy:
        checks["accuracy"] = accuracy_check(document, results.rouge1_threshold)
    if results.check_lossless:
        checks["lossless"] = lossless_check(session, runs[0].sequences, runs[1].sequences, output)
    return checks


def _fail_unless_accurate(checks: dict[str, Any], threshold: float) -> None:
    """SpecDecError (exit code 1) if the check was made and failed."""
    check = checks.get("accuracy")
    if check is not None and not check["passed"]:
        raise SpecDecError(
            f"ROUGE-1 is below the threshold {threshold:g}: {check['rouge1']:.2f}",
            hint="look at the outputs, or set `--rouge1-threshold`",
        )
