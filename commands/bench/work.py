"""Work of `bench` once its prompts are read: sends them; the JSON document, tables and the page of what came."""

import math
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from markupsafe import Markup
from pydantic import ConfigDict, Field, model_validator
from rich.table import Table

from commands.bench.flags import BenchPrompts, BenchResults, BenchServer, BenchTraffic, Content, Endpoint
from commands.output.documents.records import MeasuredHead, Positive, Record, absent, measured_head
from commands.output.html.page import Column, area_chart, column_chart, page, positions_chart, write_page
from commands.output.output import Output, number
from runtime.checkpoint.config import Count, Share, Size
from runtime.measure.benchmark.client import Client
from runtime.measure.benchmark.load_generator import Load, LoadResult, arrival_times, run_load
from runtime.measure.benchmark.results import Objective, parse_objectives
from runtime.measure.benchmark.results import results as numbers_of
from runtime.util.errors import SpecDecError

Backend = Literal["openai", "openai-chat"]
_SUMMARY_KEY = r"^(mean|median|std|p[0-9.]+)_(ttft|tpot|itl|e2el)_ms$"


class BenchSettings(Record):
    """Settings of the command."""

    base_url: str
    endpoint: Endpoint
    dataset: str
    output_len: Size
    num_warmups: Count
    seed: Count
    extra_body: dict[str, Any]
    goodput: dict[Objective, float] = Field(description="milliseconds by metric")
    metric_percentiles: list[int | float]


class ServerRecord(Record):
    """Facts that `specdec serve` tells of itself."""

    bits: str = Field(description="of a weight of the linear layers")
    dtype: str
    machine: str = Field(description="the server's; the document's own `machine` sent the requests")
    drafter: str


class BenchDocument(MeasuredHead):
    """Document of `specdec bench --json`. Times in milliseconds have the key of a metric and how it is summed up, such
    as `p99_ttft_ms`; null where nothing was measured.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "patternProperties": {_SUMMARY_KEY: {"anyOf": [{"type": "number"}, {"type": "null"}]}},
            "additionalProperties": False,
        },
    )
    __pydantic_extra__: dict[str, float | None]

    command: Literal["bench"]
    date: str = Field(pattern=r"^\d{8}-\d{6}$", description="UTC, as 20260131-235959")
    endpoint_type: Backend
    backend: Backend
    label: None
    model_id: str
    server: ServerRecord | None = absent("null of other servers, and where `--model` named the model")
    tokenizer_id: None = Field(description="the server counts the tokens")
    num_prompts: Size
    request_rate: Literal["inf"] | Positive
    burstiness: Annotated[float, Field(ge=1, le=1)] = Field(description="arrivals are a Poisson process")
    max_concurrency: Size | None
    settings: BenchSettings
    duration: float = Field(description="seconds from the first request to the last answer")
    completed: Count
    failed: Count
    total_input_tokens: Count
    total_output_tokens: Count
    request_throughput: float
    request_goodput: float | None = Field(
        description="requests per second that met every objective; null where there are none"
    )
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float | None = Field(
        description="of the busiest second; a request's tokens are spread evenly over its chunks"
    )
    output_tokens_by_second: list[float] = Field(description="from when the first request was sent")
    max_concurrent_requests: Count
    spec_decode_source: Literal["responses", "prometheus"] | None = Field(
        description="where the server tells of its speculation; null where it does not, and then the other keys are "
        "missing"
    )
    spec_decode_num_drafts: Count = absent()
    spec_decode_draft_tokens: Count = absent()
    spec_decode_accepted_tokens: Count = absent()
    spec_decode_acceptance_rate: float | None = absent("percent")
    spec_decode_acceptance_length: float | None = absent()
    spec_decode_per_position_acceptance_rates: list[float] = absent("shares of all drafts, as vLLM defines them")
    spec_decode_num_drafts_per_position: list[Count] = absent(
        "entry i: drafts with at least i + 1 tokens; missing where the server does not tell"
    )
    spec_decode_acceptance_rate_per_position: list[Share | None] = absent(
        "entry i: of those drafts, the share whose token i was accepted"
    )
    num_steps: Count = absent()
    tokens_per_step: float | None
    input_lens: list[Count] = Field(description="by request, in the order of arrival; so are those below")
    output_lens: list[Count]
    ttfts: list[float] = Field(description="seconds; 0 for a request that failed")
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float] = Field(description="seconds after the start")
    queue_times: list[float] = Field(description="seconds that a request waited here because of the concurrency")
    generated_texts: list[str]
    errors: list[str] = Field(description="empty where a request was answered")

    @model_validator(mode="after")
    def _check_summary_keys(self) -> "BenchDocument":
        for key in self.model_extra or {}:
            if not re.match(_SUMMARY_KEY, key):
                raise ValueError(f"{key} is no key of a summary")
        return self

    @property
    def percentile_names(self) -> list[str]:
        """`p90` and so on, as they stand in the keys."""
        return [f"p{percentile:g}" for percentile in self.settings.metric_percentiles]


def bench_document(
    result: LoadResult, server: BenchServer, prompts: BenchPrompts, traffic: BenchTraffic, results: BenchResults
) -> BenchDocument:
    backend: Backend = "openai" if server.endpoint == "completions" else "openai-chat"
    objectives = parse_objectives(results.goodput or [])
    return BenchDocument(
        **measured_head("bench") | {"date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S")},
        endpoint_type=backend,
        backend=backend,
        label=None,
        model_id=result.model,
        server=None if result.facts is None else ServerRecord(**result.facts),
        tokenizer_id=None,
        num_prompts=len(result.answers),
        request_rate="inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        burstiness=1.0,
        max_concurrency=traffic.concurrency,
        settings=BenchSettings(
            base_url=server.base_url,
            endpoint=server.endpoint,
            dataset=prompts.source,
            output_len=traffic.output_len,
            num_warmups=traffic.num_warmups,
            seed=traffic.seed,
            extra_body=traffic.extra,
            goodput=objectives,
            metric_percentiles=list(results.percentiles),
        ),
        **numbers_of(result, objectives, results.percentiles),
    )


METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "latency"}
"""Headings of the metrics, by vLLM's names."""


def show(document: BenchDocument, output: Output) -> None:
    settings = document.settings
    output.result(
        f"{document.model_id} at {settings.base_url}: {document.num_prompts:,} prompts of "
        f"{settings.dataset}, {settings.output_len} tokens of output, {_traffic(document)}"
    )
    output.result(_table(document))
    for line in _lines(document):
        output.result(line)
    if output.quiet:
        output.text(_lines(document)[0])


def _traffic(document: BenchDocument) -> str:
    rate, concurrency = document.request_rate, document.max_concurrency
    sent = "all at once" if rate == "inf" else f"{rate:g} requests/s"
    return sent if concurrency is None else f"{sent}, at most {concurrency} under way"


def _table(document: BenchDocument) -> Table:
    columns = ["mean", "median", "std", *document.percentile_names]
    table = Table()
    for name in ("", *(column.upper() if column.startswith("p") else column for column in columns)):
        table.add_column(name, justify="right" if name else "left")
    for metric, title in METRICS.items():
        table.add_row(title, *(_milliseconds(getattr(document, f"{column}_{metric}_ms")) for column in columns))
    return table


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _lines(document: BenchDocument) -> list[str]:
    failed = f", {document.failed:,} failed" if document.failed else ""
    lines = [
        f"{document.completed:,} requests in {document.duration:,.2f} s{failed}: "
        f"{number(document.request_throughput)} requests/s, {number(document.output_throughput, 1)} tokens/s "
        f"({number(document.total_token_throughput, 1)} with the prompts')",
        f"{document.total_input_tokens:,} tokens of prompts, {document.total_output_tokens:,} of output; at most "
        f"{document.max_concurrent_requests:,} requests under way, "
        f"{number(document.max_output_tokens_per_s, 1)} tokens in a second",
    ]
    if document.request_goodput is not None:
        asked = ", ".join(f"{METRICS[name]} {ms:g} ms" for name, ms in document.settings.goodput.items())
        lines.append(f"goodput: {number(document.request_goodput)} requests/s within {asked}")
    if document.tokens_per_step is not None:
        lines.append(_speculation_line(document))
    return lines


def _speculation_line(document: BenchDocument) -> str:
    steps = (
        f"{number(document.tokens_per_step)} tokens per step: {document.total_output_tokens:,} in "
        f"{document.num_steps:,} steps"
    )
    if not document.spec_decode_draft_tokens:
        return f"{steps}; nothing was drafted"
    return (
        f"{steps}; {document.spec_decode_accepted_tokens:,} of {document.spec_decode_draft_tokens:,} draft "
        f"tokens accepted ({number(document.spec_decode_acceptance_rate, 1)} %), mean acceptance length "
        f"{number(document.spec_decode_acceptance_length)}"
    )


_MAX_ROWS, _NUM_BINS = 500, 24
_DEFINITIONS = {
    "TTFT": "request sent to first text",
    "TPOT": "(last text − first text) ÷ (tokens − 1), of one request",
    "ITL": "gap between two pieces of an answer; under speculation a piece is a step, and has several tokens",
    "latency": "request sent to last text",
    "goodput": "requests per second that met every objective",
    "tokens per step": "generated tokens ÷ steps of the target, the one that computes the prompt included",
    "acceptance by position": "share of the drafts that reach a position whose token was accepted there",
}


def write_bench_report(path: Path, document: BenchDocument) -> None:
    """The page, whole or not at all."""
    write_page(path, bench_page(document))


def bench_page(document: BenchDocument) -> str:
    data = document.as_json()
    traffic = {key: data[key] for key in ("date", "backend", "request_rate", "max_concurrency", "num_prompts")}
    return page(
        "bench.html",
        data,
        f"{document.model_id} at {document.settings.base_url}: {document.num_prompts:,} requests",
        cards={"Settings": data["settings"], "Traffic": traffic, "Versions": {"specdec": document.specdec_version}},
        definitions=_DEFINITIONS,
        metrics=METRICS,
        columns=["mean", "median", "std", *document.percentile_names],
        max_rows=_MAX_ROWS,
        distribution=_distribution,
        over_time=_over_time,
        positions=_positions(data),
    )


def _distribution(title: str, key: str, document: dict[str, Any]) -> Markup:
    """Histogram of requests by latency: in seconds where one takes a second, else in milliseconds."""
    values = [value for value, error in zip(document[key], document["errors"], strict=True) if not error]
    longest = max(values, default=0.0)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    width = _round_width(longest * scale / _NUM_BINS)
    counts = [0] * (int(longest * scale / width) + 1)
    for value in values:
        counts[int(value * scale / width)] += 1
    columns = [
        Column(
            count,
            str(count),
            f"{i * width:.4g} {unit}",
            f"{i * width:.4g} to {(i + 1) * width:.4g} {unit}: {count:,} requests",
        )
        for i, count in enumerate(counts)
    ]
    return column_chart(columns, largest=max(counts), axis="", label=f"{title}: requests by {unit}")


def _round_width(least: float) -> float:
    """1, 2 or 5 times a power of ten, and no less than this."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((step * power for step in (1, 2, 5) if step * power >= least), 10 * power)


def _over_time(seconds: list[int]) -> Markup:
    width = -(-len(seconds) // 60) or 1
    groups = [seconds[i : i + width] for i in range(0, len(seconds), width)]
    values = [sum(group) / len(group) for group in groups]
    names = [str(i * width) for i in range(len(groups))]
    titles = [f"from second {name}: {number(value, 1)} tokens/s" for name, value in zip(names, values, strict=True)]
    label = f"Tokens per second over time: {', '.join(number(value, 1) for value in values)}"
    return area_chart(values=values, names=names, titles=titles, axis="second", label=label)


def _positions(data: dict[str, Any]) -> Markup | None:
    """None where the server does not tell how many drafts reach each position."""
    if "spec_decode_acceptance_rate_per_position" not in data:
        return None
    return positions_chart(
        data["spec_decode_acceptance_rate_per_position"], data["spec_decode_num_drafts_per_position"]
    )


def benchmark(
    server: BenchServer,
    prompts: BenchPrompts,
    contents: list[Content],
    traffic: BenchTraffic,
    results: BenchResults,
    output: Output,
) -> None:
    """SpecDecError if the server answers nothing at all; requests that fail among others are counted and named.

    After Ctrl-C exit 130, with what had been answered.
    """
    load = Load(
        server.endpoint,
        server.model_name,
        contents,
        traffic.output_len,
        arrival_times(len(contents), traffic.request_rate, traffic.seed),
        traffic.concurrency,
        traffic.extra,
        traffic.num_warmups,
    )
    client = partial(Client, server.base_url, server.api_key, server.timeout)
    with output.progress("Requests", len(contents)) as advance:
        result = run_load(client, load, advance)
    is_interrupted = len(result.answers) < len(contents)
    if is_interrupted:
        output.warning(f"interrupted: {len(result.answers)} of {len(contents)} requests had been answered")
    _check(result, output)
    document = bench_document(result, server, prompts, traffic, results)
    show(document, output)
    if results.report is not None:
        write_bench_report(results.report, document)
    output.document(document.as_json())
    if is_interrupted:
        raise typer.Exit(130)


def _check(result: LoadResult, output: Output) -> None:
    """Warn of requests that failed, and of tokens not counted by the server."""
    errors = [answer.error for answer in result.answers if answer.error is not None]
    if len(errors) == len(result.answers):
        raise SpecDecError(f"every request failed, the first with: {errors[0]}", hint="see what the server prints")
    if errors:
        output.warning(f"{len(errors)} of {len(result.answers)} requests failed, the first with: {errors[0]}")
    good = [answer for answer in result.answers if answer.error is None]
    if any(answer.num_output_tokens is None for answer in good):
        output.warning("the server sends no usage: chunks are counted as tokens, and prompts as none")
    elif any(answer.num_prompt_tokens is None for answer in good):
        output.warning("the server does not count the tokens of prompts: they are counted as none")
