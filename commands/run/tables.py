"""Output of `run` for a generation: streamed text, outputs, the table of requests."""

from rich.table import Table

from commands.documents.records import Total
from commands.inputs.prompts import Prompt
from commands.output import Output, columns_with_values, milliseconds, number, percent
from commands.tables.drafts import counts_line, legend, mark_for_stdout, marked_text, show_details
from runtime.errors import SpecDecError
from runtime.evaluation.steps import output_pieces, tokens_per_step
from runtime.generation import Generation
from runtime.llm import LLM
from runtime.request import Sequence
from runtime.text import StopWords, TextStream


class StreamPrinter:
    """Prints new text every `interval` steps of a request; several requests each with their label in front."""

    def __init__(
        self, llm: LLM, stop_words: StopWords | None, output: Output, interval: int, labels: list[str]
    ) -> None:
        if llm.tokenizer is None:
            raise SpecDecError(
                "streaming needs a tokenizer, and the engine has none", hint="name one", code="no_tokenizer"
            )
        tokenizer = llm.tokenizer
        self._streams: dict[int, TextStream] = {}
        self._tokenizer, self._stop_words = tokenizer, stop_words
        self._output, self._interval, self._labels = output, interval, labels

    def __call__(self, sequence: Sequence, new_tokens: list[int]) -> None:
        finished = sequence.finish_reason is not None
        if not finished and sequence.stats.num_steps % self._interval:
            return
        request = sequence.request
        if request.id not in self._streams:
            self._streams[request.id] = TextStream(self._tokenizer, self._stop_words, request.prompt_tokens)
        piece = self._streams[request.id].next_piece(sequence.output_tokens, finished=finished)
        if len(self._labels) == 1:
            self._output.text(piece, end="\n" if finished else "")
        elif piece:
            self._output.text(f"[{self._labels[request.id]}] {piece}")


def make_labels(num_requests: int, num_return_sequences: int) -> list[str]:
    """Labels of outputs like those of TensorRT-LLM's run.py: `Text 0`, or `Text 0 Seq 1` where a prompt has several."""
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
    shown = columns_with_values(rows)
    for column in (columns[i] for i in shown):
        table.add_column(column, justify="left" if column in ("Request", "End") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
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
