"""The page of `bench`: made of its document alone, in the same frame as the other pages."""

import math
from pathlib import Path
from typing import Any

from markupsafe import Markup

from commands.bench.report import METRICS, percentile_names
from commands.html.page import page
from commands.html.svg import Column, area_chart, column_chart
from commands.output import number
from runtime.files import write_file

_MAX_ROWS, _NUM_BINS = 500, 24
_DEFINITIONS = {
    "TTFT": "request sent to first text",
    "TPOT": "(last text − first text) ÷ (tokens − 1), of one request",
    "ITL": "gap between two pieces of an answer; under speculation a piece is a step, and has several tokens",
    "latency": "request sent to last text",
    "goodput": "requests a second that met every objective",
    "tokens per step": "generated tokens ÷ steps of the target, the one that computes the prompt included",
    "acceptance by position": "share of all drafts whose token there was accepted, as vLLM counts",
}


def write_bench_report(path: Path, document: dict[str, Any]) -> None:
    """The page, whole or not at all."""
    write_file(path, bench_page(document).encode(errors="replace"))


def bench_page(document: dict[str, Any]) -> str:
    traffic = {key: document[key] for key in ("date", "backend", "request_rate", "max_concurrency", "num_prompts")}
    versions = {"specdec": document["specdec_version"]}
    return page(
        "bench.html",
        document,
        f"{document['model_id']} at {document['settings']['base_url']}: {document['num_prompts']:,} requests",
        cards={"Settings": document["settings"], "Traffic": traffic, "Versions": versions},
        definitions=_DEFINITIONS,
        metrics=METRICS,
        columns=["mean", "median", "std", *percentile_names(document)],
        max_rows=_MAX_ROWS,
        distribution=_distribution,
        over_time=_over_time,
        positions=_positions,
    )


def _distribution(title: str, key: str, document: dict[str, Any]) -> Markup:
    """Histogram of requests by latency."""
    seconds = zip(document[key], document["errors"], strict=True)
    values = [value * 1e3 for value, error in seconds if not error]
    width = _round_width(max(values, default=0.0) / _NUM_BINS)
    counts = [0] * (int(max(values, default=0.0) / width) + 1)
    for value in values:
        counts[int(value / width)] += 1
    columns = [
        Column(
            count, str(count), f"{i * width:.3g}", f"{i * width:.4g} to {(i + 1) * width:.4g} ms: {count:,} requests"
        )
        for i, count in enumerate(counts)
    ]
    return column_chart(columns, largest=max(counts), axis="ms", label=f"{title}: requests by milliseconds")


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


def _positions(rates: list[float]) -> Markup:
    columns = [
        Column(rate, f"{rate * 100:.0f}", str(i), f"position {i}: {rate * 100:.1f} %")
        for i, rate in enumerate(rates, 1)
    ]
    label = "Share of drafts whose token was accepted, by position, in percent"
    return column_chart(columns, largest=1.0, axis="position in the draft", label=label, backdrop=True)
