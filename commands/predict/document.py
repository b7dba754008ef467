"""Output of `predict`, and its JSON document."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.table import Table

from commands.options.drafter_flags import written_flags
from commands.output.documents.records import Head, Record, document_head
from commands.output.output import Output, number, percent
from commands.predict.flags import PredictOptions
from runtime.checkpoint.config import Count, MachineSpeed, Measure, Share, Size

_MOST_SHOWN = 8
_MAX_NUM_TOKENS = 512


class Predicted(Record):
    """A drafter with its settings, and its time on the other machine."""

    flags: str = Field(description="of `run`; empty without a drafter")
    seconds: Measure = Field(description="for all outputs")
    tokens_per_second: Measure
    speedup: Measure = Field(description="over no drafter")
    tokens_per_step: Measure | None
    draft_acceptance_rate: Share | None


class PredictDocument(Head):
    """Document of `specdec predict --json`."""

    command: Literal["predict"]
    traces: str
    costs: str
    num_traces: Size
    num_output_tokens: Count
    batch_size: Size
    machine: MachineSpeed | None = Field(description="as measured there; null where the costs do not say")
    pays: bool = Field(description="whether any drafter is faster than none")
    predicted: list[Predicted] = Field(description="the fastest first")


def predict_speeds(options: PredictOptions, output: Output) -> None:
    """Replay the outputs, and show the time of each candidate on the other machine."""
    from runtime.measure.tuning.elsewhere import read_costs
    from runtime.measure.tuning.search import Cost, Replayer, Search
    from runtime.text.text import open_tokenizer
    from runtime.text.traces import read_traces

    costs, machine = read_costs(options.costs)
    tokenizer = None if options.tokenizer_dir is None else open_tokenizer(options.tokenizer_dir)
    traces = read_traces(options.traces, tokenizer)
    replayer = Replayer(traces, options.batch_size, Cost(costs, _MAX_NUM_TOKENS))
    search = Search(replayer, options.max_draft_len)
    with output.progress("replaying", search.most) as advance:
        search.run(advance)
    num_tokens = sum(len(trace.output_tokens) for trace in traces)
    seconds_without = search.replayed[0].rank
    predicted = []
    for one in sorted(search.replayed, key=lambda one: one.rank):
        counts = one.total.counts(one.candidate.max_draft_len or 0)
        predicted.append(
            Predicted(
                flags=written_flags(one.candidate, (0,)),
                seconds=one.rank,
                tokens_per_second=num_tokens / one.rank,
                speedup=seconds_without / one.rank,
                tokens_per_step=counts["tokens_per_step"],
                draft_acceptance_rate=counts["draft_acceptance_rate"],
            )
        )
    document = PredictDocument(
        **document_head("predict"),
        traces=str(options.traces),
        costs=str(options.costs),
        num_traces=len(traces),
        num_output_tokens=num_tokens,
        batch_size=options.batch_size,
        machine=machine,
        pays=predicted[0].speedup > 1,
        predicted=predicted,
    )
    _show(document, options.costs, output)
    output.document(document.as_json())


def _show(document: PredictDocument, costs: Path, output: Output) -> None:
    table = Table("drafter", "tokens/s", "speedup", "tokens/step", "accepted", title=f"Predicted by {costs}")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in document.predicted[:_MOST_SHOWN]:
        table.add_row(
            one.flags or "none",
            number(one.tokens_per_second, 1),
            f"{one.speedup:.2f}x",
            number(one.tokens_per_step),
            percent(one.draft_acceptance_rate),
        )
    output.result(table)
    best = document.predicted[0]
    verdict = f"it pays there: {best.speedup:.2f}x with {best.flags}" if document.pays else "no drafter pays there"
    output.result(f"{verdict} ({document.num_output_tokens:,} tokens of {document.num_traces:,} outputs replayed)")
