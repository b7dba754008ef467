"""`--stats detailed`: how drafts fared, by their length and by position, and tokens per step as outputs grow."""

from collections.abc import Sequence as Seq
from typing import Any

from rich.table import Table

from commands.output import Output, number, percent
from runtime.evaluation.steps import tokens_over_time

_BAR_WIDTH = 40
_MAX_RANGES = 16


def show_details(total: dict[str, Any], steps: Seq[Seq[int]], output: Output) -> None:
    """Three tables with bars. `total` is the document's; `steps` has the tokens of each step of each request."""
    if total["num_spec_steps"]:
        output.result(_histogram_table(total))
        output.result(_position_table(total))
    else:
        output.result("nothing was drafted: no acceptance to show")
    output.result(_time_table(steps))


def _histogram_table(total: dict[str, Any]) -> Table:
    histogram, num_drafts = total["acceptance_histogram"], total["num_spec_steps"]
    table = _table(f"Accepted tokens of a draft ({num_drafts:,} drafts)", "accepted", "", "drafts", "share")
    for num_accepted, count in enumerate(histogram):
        table.add_row(str(num_accepted), _bar(count, max(histogram)), f"{count:,}", percent(count / num_drafts))
    return table


def _position_table(total: dict[str, Any]) -> Table:
    table = _table("Acceptance by position in the draft", "position", "", "drafts", "accepted")
    rates = zip(total["acceptance_rate_per_position"], total["num_drafts_per_position"], strict=True)
    for position, (rate, num_drafts) in enumerate(rates, 1):
        table.add_row(str(position), _bar(rate or 0.0, 1.0), f"{num_drafts:,}", percent(rate))
    return table


def _time_table(steps: Seq[Seq[int]]) -> Table:
    ranges = tokens_over_time(steps, _MAX_RANGES)
    rates = [r.num_tokens / r.num_steps for r in ranges]
    table = _table("Tokens per step over time", "steps", "", "tokens / steps", "tokens per step")
    for r, rate in zip(ranges, rates, strict=True):
        name = str(r.first) if r.first == r.last else f"{r.first}–{r.last}"
        table.add_row(name, _bar(rate, max(rates)), f"{r.num_tokens:,} / {r.num_steps:,}", number(rate))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _bar(value: float, largest: float) -> str:
    """A bar of eighths of a character; what is not nothing is seen."""
    eighths = round(value / largest * _BAR_WIDTH * 8) if largest else 0
    eighths = max(eighths, 1) if value else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
