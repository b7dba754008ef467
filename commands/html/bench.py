"""The page of `bench`: made of its document alone, in the same frame as the other pages."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands.html.frame import (
    chart_card,
    definitions_section,
    facts_section,
    page_footer,
    page_header,
    tile,
    whole_page,
)
from commands.html.svg import Column, area_chart, column_chart
from commands.html.values import Page, escaped, integer, listed, table, tenths
from commands.output import milliseconds, number
from commands.tables.bench import METRICS, percentile_names
from runtime.files import write_file

_MAX_ROWS, _NUM_BINS = 500, 24
_TOLD_NOTHING = "the server tells nothing of it"
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
    page = Page(document)
    settings = document["settings"]
    title = f"{document['model_id']} at {settings['base_url']}: {document['num_prompts']:,} requests"
    alert = (
        f'\n<p class="alert" role="note"><strong>Failed:</strong> {document["failed"]:,} of '
        f"{document['num_prompts']:,} requests, and only the others are counted.</p>"
        if document["failed"]
        else ""
    )
    traffic = {key: document[key] for key in ("date", "backend", "request_rate", "max_concurrency", "num_prompts")}
    body = [
        page_header("bench", title, alert),
        _tiles(page),
        _latencies(page),
        _charts(page),
        _requests(page),
        facts_section(
            [("Settings", settings), ("Traffic", traffic), ("Versions", {"specdec": document["specdec_version"]})]
        ),
        definitions_section(_DEFINITIONS),
        page_footer(document),
    ]
    return whole_page(title, body)


def _tiles(page: Page) -> str:
    def shown(form: Callable[[Any], str], key: str, reason: str = "nothing was answered") -> str:
        return page.show(form, key, reason=reason)

    tiles = [
        tile(
            "Tokens/s", shown(tenths, "output_throughput"), f"{shown(number, 'request_throughput')} requests a second"
        ),
        tile("TTFT", shown(_ms, "median_ttft_ms"), f"median; mean {shown(_ms, 'mean_ttft_ms')}"),
        tile("TPOT", shown(_ms, "median_tpot_ms", "outputs of one token"), "median, of a request"),
        tile(
            "Tokens per step",
            shown(number, "tokens_per_step", _TOLD_NOTHING),
            f"told by the server: {escaped(page.at('spec_decode_source') or 'nothing')}",
        ),
    ]
    if page.at("spec_decode_draft_tokens"):
        accepted, drafted = shown(integer, "spec_decode_accepted_tokens"), shown(integer, "spec_decode_draft_tokens")
        rate = shown(_of_hundred, "spec_decode_acceptance_rate")
        tiles.append(tile("Acceptance rate", rate, f"{accepted} of {drafted} draft tokens"))
    if page.at("request_goodput") is not None:
        asked = ", ".join(f"{METRICS[name]} {ms:g} ms" for name, ms in page.at("settings", "goodput").items())
        tiles.append(tile("Goodput", shown(number, "request_goodput"), f"requests a second within {asked}"))
    return f'<dl class="tiles">\n{"".join(tiles)}</dl>'


def _ms(value: float) -> str:
    return milliseconds(value / 1e3)


def _of_hundred(value: float) -> str:
    return f"{value:.1f} %"


def _latencies(page: Page) -> str:
    columns = ["mean", "median", "std", *percentile_names(page.document)]
    rows = [
        [title, *(page.show(_ms, f"{column}_{metric}_ms", reason="nothing to measure") for column in columns)]
        for metric, title in METRICS.items()
    ]
    return f"<h2>Latencies</h2>\n{table(['', *columns], rows)}"


def _charts(page: Page) -> str:
    good = [not error for error in page.at("errors")]
    ttfts = [value * 1e3 for value, is_good in zip(page.at("ttfts"), good, strict=True) if is_good]
    latencies = [value * 1e3 for value, is_good in zip(page.at("latencies"), good, strict=True) if is_good]
    cards = [_distribution("Time to first token", ttfts), _distribution("Latency", latencies), _over_time(page)]
    if page.at("spec_decode_per_position_acceptance_rates"):
        cards.append(_positions(page))
    return f'<h2>How it went</h2>\n<div class="charts">\n{"".join(cards)}</div>'


def _distribution(title: str, values: list[float]) -> str:
    """How many requests were answered in which time."""
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
    label = f"{title}: requests by milliseconds: {listed(counts)}"
    chart = column_chart(columns, largest=max(counts), axis="ms", label=label)
    return chart_card(title, f"{len(values):,} requests by their time", chart)


def _round_width(least: float) -> float:
    """1, 2 or 5 times a power of ten, and no less than this."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((step * power for step in (1, 2, 5) if step * power >= least), 10 * power)


def _over_time(page: Page) -> str:
    seconds = page.at("output_tokens_by_second")
    width = -(-len(seconds) // 60) or 1
    groups = [seconds[i : i + width] for i in range(0, len(seconds), width)]
    values = [sum(group) / len(group) for group in groups]
    names = [str(i * width) for i in range(len(groups))]
    titles = [f"from second {name}: {number(value, 1)} tokens/s" for name, value in zip(names, values, strict=True)]
    label = f"Tokens per second over time: {listed(number(value, 1) for value in values)}"
    chart = area_chart(values=values, names=names, titles=titles, axis="second", label=label)
    return chart_card("Tokens per second over time", "all requests together, from when the first was sent", chart)


def _positions(page: Page) -> str:
    rates = page.at("spec_decode_per_position_acceptance_rates")
    shown = [f"{rate * 100:.0f}" for rate in rates]
    columns = [
        Column(rate, text, str(i), f"position {i}: {rate * 100:.1f} %")
        for i, (rate, text) in enumerate(zip(rates, shown, strict=True), 1)
    ]
    label = f"Share of drafts whose token was accepted, by position, in percent: {listed(shown)}"
    chart = column_chart(columns, largest=1.0, axis="position in the draft", label=label, backdrop=True)
    return chart_card("Acceptance by position", "% of all drafts whose token there was accepted", chart)


def _requests(page: Page) -> str:
    num_requests = len(page.at("errors"))
    rows = []
    for i in range(min(num_requests, _MAX_ROWS)):
        error = page.at("errors", i)
        ending = f'<span class="bad">{escaped(error)}</span>' if error else "answered"
        times = [page.show(lambda s: milliseconds(s), name, i) for name in ("ttfts", "latencies")]
        counts = [page.show(integer, name, i) for name in ("input_lens", "output_lens")]
        cells = ["–"] * 4 if error else [*counts, *times]
        rows.append([str(i + 1), page.show(lambda s: f"{s:,.2f} s", "start_times", i), *cells, ending])
    more = f'<p class="note">The first {_MAX_ROWS} of {num_requests:,}.</p>' if num_requests > _MAX_ROWS else ""
    heads = ["request", "sent at", "prompt tokens", "output tokens", "TTFT", "latency", "end"]
    return f"<h2>Requests</h2>\n{more}{table(heads, rows)}"
