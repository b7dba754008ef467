"""What `run` does with a session: generate, show, write and check."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import typer

from commands.documents.arrays import write_ids, write_logits
from commands.html.report import write_report
from commands.inputs.prompts import Prompt, read_prompts
from commands.inputs.traces import write_traces
from commands.options.run import RunGeneration, RunInputs, RunResults
from commands.output import Output, speedup_line
from commands.sessions import lossless_check
from commands.tables.run import StreamPrinter, make_document, make_labels, show_outputs, show_stats
from runtime.evaluation.lossless import fail_unless_lossless, lossless_lines
from runtime.evaluation.steps import session_pieces
from runtime.request import Request
from runtime.session import Generation, Interrupted, Session
from runtime.text import encode


def answer(
    session: Session,
    prompts: list[Prompt],
    inputs: RunInputs,
    options: RunGeneration,
    results: RunResults,
    output: Output,
) -> None:
    """Generate, show and write; exit 1 if a check fails, 130 after Ctrl-C, with what had finished."""
    prompts, requests = _make_requests(session, prompts, inputs, options, output)
    if results.logits_file is not None:
        requests = [replace(request, keep_logits=True) for request in requests]
    labels = make_labels(len(requests), options.num_return_sequences)
    generation = _generate(session, requests, labels, results, output)
    num_unfinished = len(requests) - len(generation.sequences)
    if not results.streaming:
        show_outputs(session, prompts, generation, labels, output, show_tokens=results.show_tokens)
    if generation.sequences:
        show_stats(generation, labels, session.max_draft_len, results.stats, output)
        _write_files(session, prompts, generation, results, output)
    comparison = _compare(session, requests, generation, results, output) if results.check_lossless else {}
    per_step = results.stats == "detailed"
    document = make_document(
        session, prompts, generation, inputs.max_input_length, options.max_output_len, per_step=per_step
    )
    document |= {"num_unfinished_requests": num_unfinished, "speedup": None, "checks": {}} | comparison
    output.document(document)
    if results.report is not None:
        write_report(results.report, document, session_pieces(session, generation.sequences))
        output.result(f"report written: {results.report}")
    if num_unfinished or (results.check_lossless and not comparison):
        raise typer.Exit(130)
    fail_unless_lossless(document["checks"])


def _make_requests(
    session: Session, prompts: list[Prompt], inputs: RunInputs, options: RunGeneration, output: Output
) -> tuple[list[Prompt], list[Request]]:
    """The requests, num_return_sequences of each prompt, and the prompt of each."""
    if inputs.input_file is not None and inputs.input_file.suffix.lower() == ".npy" and session.end_ids:
        # Again, now that it is known what the rows of an array are padded with.
        prompts = read_prompts([], inputs.input_file, pad_id=min(session.end_ids))
    prompts = [prompt for prompt in prompts for _ in range(options.num_return_sequences)]
    requests, num_truncated = [], 0
    for i, prompt in enumerate(prompts):
        tokens, truncated = encode(prompt, session.tokenizer, inputs.max_input_length)
        return_index = i % options.num_return_sequences
        requests.append(replace(session.request(i, tokens, options.max_output_len), return_index=return_index))
        num_truncated += truncated and return_index == 0
    if num_truncated:
        output.warning(f"prompts cut to their last {inputs.max_input_length} tokens: {num_truncated}")
    return prompts, requests


def _generate(
    session: Session, requests: list[Request], labels: list[str], results: RunResults, output: Output
) -> Generation:
    """Answer the requests, printing text as it comes if asked to; after Ctrl-C what had finished, with a warning."""
    if results.check_lossless:
        session.warm_up(requests)  # or the first of the two runs would pay for the first step
    printer = StreamPrinter(session, output, results.streaming_interval, labels) if results.streaming else None
    try:
        return session.run(requests, speculate=True, on_tokens=printer)
    except Interrupted as interrupted:
        num_finished = len(interrupted.finished.sequences)
        output.warning(f"interrupted: {num_finished} of {len(requests)} requests had finished")
        return interrupted.finished


def _write_files(
    session: Session, prompts: list[Prompt], generation: Generation, results: RunResults, output: Output
) -> None:
    write_ids(generation.sequences, min(session.end_ids, default=0), results.output_csv, results.output_npy)
    if results.logits_file is not None:
        write_logits(generation.sequences, results.logits_file)
        output.result(f"logits written: {results.logits_file}")
    if results.output_traces is not None:
        write_traces(results.output_traces, [(s, prompts[s.request.id].category) for s in generation.sequences])


def _compare(
    session: Session, requests: list[Request], generation: Generation, results: RunResults, output: Output
) -> dict[str, Any]:
    """`_compare_with_no_drafter`; empty, with a warning, after Ctrl-C before it or in it."""
    if len(generation.sequences) == len(requests):
        with suppress(KeyboardInterrupt):
            return _compare_with_no_drafter(session, requests, generation, results, output)
    output.warning("lossless check left out: the run was interrupted")
    return {}


def _compare_with_no_drafter(
    session: Session, requests: list[Request], generation: Generation, results: RunResults, output: Output
) -> dict[str, Any]:
    """Generate again without a drafter; the `speedup` and `checks` of the document, shown too."""
    baseline = session.run_without_drafter(requests)
    speedup = generation.work.speedup_over(baseline.work)
    check = lossless_check(session, generation.sequences, baseline.sequences, output)
    if results.stats != "none":
        output.result(speedup_line(speedup))
    for line in lossless_lines(check):
        output.result(line)
    return {"speedup": speedup, "checks": {"lossless": check}}
