"""What `bench` prints: latencies, throughput, and what the server tells of its speculation."""

from typing import Any

from rich.table import Table

from commands.output import Output, number

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "latency"}
"""What vLLM's names of the metrics are called."""


def show(document: dict[str, Any], output: Output) -> None:
    settings = document["settings"]
    output.result(
        f"{document['model_id']} at {settings['base_url']}: {document['num_prompts']:,} prompts of "
        f"{settings['dataset']}, {settings['output_len']} tokens of output, {_traffic(document)}"
    )
    output.result(_table(document))
    for line in _lines(document):
        output.result(line)
    if output.quiet:
        output.text(_lines(document)[0])


def _traffic(document: dict[str, Any]) -> str:
    rate, concurrency = document["request_rate"], document["max_concurrency"]
    sent = "all at once" if rate == "inf" else f"{rate:g} requests/s"
    return sent if concurrency is None else f"{sent}, at most {concurrency} under way"


def percentile_names(document: dict[str, Any]) -> list[str]:
    """`p90` and so on, as they stand in the keys."""
    return [f"p{percentile:g}" for percentile in document["settings"]["metric_percentiles"]]


def _table(document: dict[str, Any]) -> Table:
    columns = ["mean", "median", "std", *percentile_names(document)]
    table = Table()
    for name in ("", *(column.upper() if column.startswith("p") else column for column in columns)):
        table.add_column(name, justify="right" if name else "left")
    for metric, title in METRICS.items():
        table.add_row(title, *(_milliseconds(document[f"{column}_{metric}_ms"]) for column in columns))
    return table


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _lines(document: dict[str, Any]) -> list[str]:
    failed = f", {document['failed']:,} failed" if document["failed"] else ""
    lines = [
        f"{document['completed']:,} requests in {document['duration']:,.2f} s{failed}: "
        f"{number(document['request_throughput'])} requests/s, {number(document['output_throughput'], 1)} tokens/s "
        f"({number(document['total_token_throughput'], 1)} with the prompts')",
        f"{document['total_input_tokens']:,} tokens of prompts, {document['total_output_tokens']:,} of output; at most "
        f"{document['max_concurrent_requests']:,} requests under way, "
        f"{number(document['max_output_tokens_per_s'], 1)} tokens in a second",
    ]
    if document["request_goodput"] is not None:
        asked = ", ".join(f"{METRICS[name]} {ms:g} ms" for name, ms in document["settings"]["goodput"].items())
        lines.append(f"goodput: {number(document['request_goodput'])} requests/s within {asked}")
    if document["tokens_per_step"] is not None:
        lines.append(_speculation_line(document))
    return lines


def _speculation_line(document: dict[str, Any]) -> str:
    steps = (
        f"{number(document['tokens_per_step'])} tokens per step: {document['total_output_tokens']:,} in "
        f"{document['num_steps']:,} steps"
    )
    if not document["spec_decode_draft_tokens"]:
        return f"{steps}; nothing was drafted"
    return (
        f"{steps}; {document['spec_decode_accepted_tokens']:,} of {document['spec_decode_draft_tokens']:,} draft "
        f"tokens accepted ({number(document['spec_decode_acceptance_rate'], 1)} %), mean acceptance length "
        f"{number(document['spec_decode_acceptance_length'])}"
    )
