"""Work of `run` once its flags are checked: generates, and shows outputs and tables."""

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import typer
from rich.table import Table

from commands.inputs.prompts import Prompt, without_padding
from commands.options.sessions import lossless_check, token_progress
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
)
from commands.output.tables.drafts import counts_line, legend, mark_for_stdout, marked_text, show_details
from commands.output.tables.lossless_check import exit_if_too_little_to_tell, fail_unless_lossless, lossless_lines
from commands.run.document import Compared, run_document
from commands.run.flags import RunInputs, RunResults
from runtime.core.generation import Generation, Interrupted, Unanswered
from runtime.core.request import Request, Sequence
from runtime.llm import LLM
from runtime.measure.text_steps import all_pieces, output_pieces, tokens_per_step
from runtime.measure.tuning.search import fixed_lost
from runtime.proof.receipts import write_receipts
from runtime.text.chat import TemplateInputs
from runtime.text.text import TextStream
from runtime.text.traces import write_traces
from runtime.util.errors import SpecDecError
from runtime.util.files import write_file


class StreamPrinter:
    """Prints new text every `interval` steps of a request. With several requests, each has its label in front."""

    def __init__(self, llm: LLM, output: Output, interval: int, labels: list[str]) -> None:
        if llm.tokenizer is None:
            raise SpecDecError(
                "streaming needs a tokenizer, and the engine has none", hint="name a tokenizer", code="no_tokenizer"
            )
        self._tokenizer = llm.tokenizer
        self._streams: dict[int, TextStream] = {}
        self._output, self._interval, self._labels = output, interval, labels

    def __call__(self, sequence: Sequence, new_tokens: list[int]) -> None:
        finished = sequence.finish_reason is not None
        if not finished and sequence.stats.num_steps % self._interval:
            return
        request = sequence.request
        if request.id not in self._streams:
            self._streams[request.id] = TextStream.of_request(self._tokenizer, request)
        piece = self._streams[request.id].next_piece(sequence.output_tokens, finished=finished)
        if len(self._labels) == 1:
            self._output.text(piece, end="\n" if finished else "")
        elif piece:
            self._output.text(f"[{self._labels[request.id]}] {piece}")


def make_labels(num_requests: int, num_return_sequences: int) -> list[str]:
    """Labels of outputs as in TensorRT-LLM's run.py: `Text 0`, or `Text 0 Seq 1` if a prompt has several outputs."""
    if num_return_sequences == 1:
        return [f"Text {i}" for i in range(num_requests)]
    return [f"Text {i // num_return_sequences} Seq {i % num_return_sequences}" for i in range(num_requests)]


def show_outputs(
    llm: LLM,
    prompts: list[Prompt],
    generation: Generation,
    labels: list[str],
    output: Output,
    *,
    show_tokens: bool,
) -> None:
    mark = mark_for_stdout() if show_tokens else None
    if mark is not None:
        output.styled(legend(mark))
    for sequence in generation.sequences:
        prompt, label = prompts[sequence.request.id], labels[sequence.request.id]
        text = llm.text(sequence)
        if text is None:
            text = " ".join(map(str, sequence.output_tokens))
        if output.quiet:
            output.text(text)
        elif output.human:
            if sequence.request.return_index == 0:
                output.text(f'Input [{label.removesuffix(" Seq 0")}]: "{prompt.shown}"')
            if mark is not None:
                pieces = output_pieces(sequence, llm.tokenizer)
                output.styled(f'Output [{label}]: "{marked_text(pieces, mark)}"\n{counts_line(pieces)}')
            else:
                output.text(f'Output [{label}]: "{text}"')


def show_stats(generation: Generation, labels: list[str], max_draft_len: int, stats: str, output: Output) -> None:
    """Show the tables that `--stats` selects."""
    if stats == "none":
        return
    total = Total(**generation.total(max_draft_len))
    output.result(requests_table(generation, labels))
    if stats == "detailed":
        show_details(total, [tokens_per_step(sequence) for sequence in generation.sequences], output)
    output.result(time_line(total))


def requests_table(generation: Generation, labels: list[str]) -> Table:
    columns = ("Request", "Tokens", "Steps", "Tokens/step", "Accepted", "Rate", "TTFT", "TPOT", "End")
    rows = [_request_row(sequence, labels[sequence.request.id]) for sequence in generation.sequences]
    table = Table()
    add_columns_with_values(table, columns, rows, left=("Request", "End"), no_wrap=True)
    return table


def _request_row(sequence: Sequence, label: str) -> list[str]:
    stats, record = sequence.stats, sequence.stats.as_dict(0)
    return [
        label,
        str(stats.num_generated_tokens),
        str(stats.num_steps),
        number(record["tokens_per_step"]),
        f"{stats.num_accepted_draft_tokens}/{stats.num_draft_tokens}",
        percent(record["draft_acceptance_rate"]),
        milliseconds(stats.ttft_s),
        milliseconds(stats.tpot_s),
        str(sequence.finish_reason),
    ]


def time_line(total: Total) -> str:
    def part(name: str, key: str) -> str:
        share = percent(getattr(total, f"{key}_time_s") / total.wall_s)
        return f"{name} {milliseconds(getattr(total, f'{key}_time_per_step_s'))} ({share})"

    drafting = [part("drafting", "draft")] if total.draft_time_s else []
    return (
        f"{total.num_generated_tokens} tokens in {total.wall_s:.2f} s: "
        f"{number(total.output_tokens_per_second, 1)} tokens/s; a step: "
        + ", ".join([part("target", "target"), *drafting, part("host", "host")])
    )


_STREAMING_INTERVAL = 5  # TensorRT-LLM's


def answer(setup: Setup, prompts: list[Prompt], inputs: RunInputs, results: RunResults, output: Output) -> None:
    """Generate, show and write. Exits with 1 if a request or a check fails, and with 130 after Ctrl-C, with the outputs
    that had finished.
    """
    prompts, requests = _make_requests(setup, prompts, inputs, results, output)
    labels = make_labels(len(requests), setup.params.n)
    generation, failed = _generate(setup, requests, labels, results, output)
    num_unfinished = len(requests) - len(generation.sequences)
    if not results.streaming:
        show_outputs(setup.llm, prompts, generation, labels, output, show_tokens=results.show_tokens)
    if generation.sequences:
        show_stats(generation, labels, setup.session.max_draft_len, results.stats, output)
        if results.stats != "none" and output.human:
            batch_size = setup.llm.bundle.config.build_config.max_batch_size
            show_fixed_lost(fixed_lost(setup.session, generation.sequences, batch_size), output)
        _write_files(setup, prompts, generation, results, output)
    compared = _compare(setup, requests, generation, results, output) if results.check_lossless else None
    settings = {"max_input_length": inputs.max_input_length, "max_output_len": setup.params.max_tokens}
    document = run_document(
        setup,
        prompts,
        generation,
        settings,
        compared,
        num_unfinished=num_unfinished,
        per_step=results.stats == "detailed",
    )
    output.document(document.as_json())
    if results.report is not None:
        pieces = all_pieces(setup.llm.tokenizer, generation.sequences)
        write_page(results.report, html_report(document.as_json(), pieces), output)
    if failed is not None:
        raise failed
    if num_unfinished or (results.check_lossless and compared is None):
        raise typer.Exit(130)
    fail_unless_lossless(document.checks.lossless)
    exit_if_too_little_to_tell(document.checks.lossless)


def _make_requests(
    setup: Setup, prompts: list[Prompt], inputs: RunInputs, results: RunResults, output: Output
) -> tuple[list[Prompt], list[Request]]:
    """The requests, as many for each prompt as outputs are asked for, and the prompt of each request."""
    template = replace(setup.llm.request_of(setup.params), keep_logits=results.logits_file is not None)
    prompts = without_padding(prompts, inputs.input_file, template.end_ids)
    requests, num_truncated = list[Request](), 0
    how = TemplateInputs(params=inputs.conversation.params)
    for prompt in prompts:
        messages = prompt.conversation(apply_chat_template=inputs.apply_chat_template)
        content = prompt.content if messages is None else setup.llm.chat_template.encode(messages, how)
        tokens, truncated = setup.llm.encode(content, inputs.max_input_length)
        asked = [template.with_prompt(len(requests) + i, tokens, i) for i in range(setup.params.n)]
        requests += map(setup.llm.after_thinking, asked)
        num_truncated += truncated
    if num_truncated:
        output.warning(f"prompts cut to their last {inputs.max_input_length} tokens: {num_truncated}")
    return [prompt for prompt in prompts for _ in range(setup.params.n)], requests


def _generate(
    setup: Setup, requests: list[Request], labels: list[str], results: RunResults, output: Output
) -> tuple[Generation, Unanswered | None]:
    """Answer the requests, and print text as it comes if a flag asks for that. Returns the finished outputs: all, or
    those before Ctrl-C (with a warning) or before a request failed, and then the error too.
    """
    if results.check_lossless:
        setup.session.warm_up(requests)  # or the first of the two runs would pay for the first step
    begun: dict[int, Sequence] = {}
    try:
        if results.streaming:
            interval = results.streaming_interval or _STREAMING_INTERVAL
            printer = StreamPrinter(setup.llm, output, interval, labels)
            return setup.session.run(requests, on_tokens=printer), None
        with token_progress("generating", requests, output) as advance:

            def on_tokens(sequence: Sequence, new_tokens: list[int]) -> None:
                begun[sequence.request.id] = sequence
                advance(sequence, new_tokens)

            return setup.session.run(requests, on_tokens=on_tokens), None
    except Interrupted as interrupted:
        for sequence in begun.values():
            if sequence.finish_reason is None:
                text = setup.llm.text(sequence)
                output.result(f'Output [{labels[sequence.request.id]}], so far: "{text}"')
        num_finished = len(interrupted.finished.sequences)
        output.warning(f"interrupted: {num_finished} of {len(requests)} requests had finished")
        return interrupted.finished, None
    except Unanswered as unanswered:
        return unanswered.finished, unanswered


def _write_files(
    setup: Setup, prompts: list[Prompt], generation: Generation, results: RunResults, output: Output
) -> None:
    end_ids = generation.sequences[0].request.end_ids
    write_ids(generation.sequences, min(end_ids, default=0), results.output_csv, results.output_npy)
    if results.logits_file is not None:
        write_logits(generation.sequences, results.logits_file)
        output.result(f"logits written: {results.logits_file}")
    if results.output_traces is not None:
        write_traces(results.output_traces, [(s, prompts[s.request.id].category) for s in generation.sequences])
    if results.receipts is not None:
        write_receipts(results.receipts, generation.sequences, setup.llm.fingerprint, results.receipt_ids or "ids")


def _compare(
    setup: Setup, requests: list[Request], generation: Generation, results: RunResults, output: Output
) -> Compared | None:
    """The figures of `_compare_with_no_drafter`; None, with a warning, if Ctrl-C came before or during the
    comparison.
    """
    if len(generation.sequences) == len(requests):
        with suppress(KeyboardInterrupt):
            return _compare_with_no_drafter(setup, requests, generation, results, output)
    output.warning("lossless check left out: not every request was answered")
    return None


def _compare_with_no_drafter(
    setup: Setup, requests: list[Request], generation: Generation, results: RunResults, output: Output
) -> Compared:
    """Generate again without a drafter; shows and returns the comparison."""
    with token_progress("without a drafter", requests, output) as on_tokens:
        baseline = setup.session.run_without_drafter(requests, on_tokens)
    speedup = generation.work.speedup_over(baseline.work)
    check = lossless_check(setup.session, generation.sequences, baseline.sequences, output)
    if results.stats != "none":
        output.result(speedup_line(speedup))
    for line in lossless_lines(check):
        output.result(line)
    return Compared(speedup, check)


def write_ids(sequences: list[Sequence], pad_id: int, csv: Path | None, npy: Path | None) -> None:
    """Rows of prompt and output ids, padded to the longest, as TensorRT-LLM's run.py writes them."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    rows = np.array([s.tokens + [pad_id] * (longest - len(s.tokens)) for s in sequences], dtype=np.int32)
    if csv is not None:
        _write(csv, lambda file: np.savetxt(file, rows, fmt="%d", delimiter=","))
    if npy is not None:
        _write(npy, lambda file: np.save(file, rows))


def write_logits(sequences: list[Sequence], path: Path) -> None:
    """Write the logits, [outputs, longest output, vocab_size] float32; NaN after the end of an output."""
    logits = torch.nn.utils.rnn.pad_sequence(
        [torch.stack(sequence.logits) for sequence in sequences], batch_first=True, padding_value=float("nan")
    )
    _write(path, lambda file: np.save(file, logits.numpy()))


def _write(path: Path, save: Callable[[io.BytesIO], None]) -> None:
    """Write the file as a whole: if that fails the old file stays. numpy itself does not notice that a disk is full."""
    file = io.BytesIO()
    save(file)
    write_file(path, file.getvalue())
