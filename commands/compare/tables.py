"""Tables of `compare`: settings that differ, metrics side by side, and the limits of their meaning."""

import json
from collections.abc import Callable
from typing import Any

from rich.table import Table

from commands.output import Output, number, percent


def show(document: dict[str, Any], output: Output) -> None:
    output.result(f"A {document['a']}\nB {document['b']}")
    output.result(_settings_table(document["settings"]) if document["settings"] else "the settings are the same")
    output.result(_requests_line(document["requests"]))
    output.result(_metrics_table(document))
    for line in _notes(document):
        output.result(line)


def _settings_table(settings: list[dict[str, Any]]) -> Table:
    table = Table(title="Settings that differ", title_justify="left")
    for column in ("", "A", "B"):
        table.add_column(column, overflow="fold")
    for setting in settings:
        table.add_row(setting["name"], _setting(setting["a"]), _setting(setting["b"]))
    return table


def _setting(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _requests_line(requests: dict[str, Any]) -> str:
    if not requests["num_same_prompt"]:
        return f"requests: {requests['num_a']} and {requests['num_b']}, none of the same prompt"
    same = f"{requests['num_identical_outputs']} of {requests['num_same_prompt']} outputs token for token the same"
    if requests["paired"]:
        return f"requests: the same {requests['num_a']}; {same}"
    numbers = f"{requests['num_a']} and {requests['num_b']}, {requests['num_same_prompt']} of the same prompt"
    return f"requests: {numbers}; {same}"


def _metrics_table(document: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("")
    for column in ("A", "B", "B − A", "B ÷ A", f"{document['level']:.0%} interval"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for metric in document["metrics"].values():
        table.add_row(
            metric["title"],
            *_values(metric),
            number(metric["ratio"], 3),
            _interval(metric["interval"]),
            _verdict(metric),
        )
    return table


def _values(metric: dict[str, Any]) -> list[str]:
    """A, B and their difference, all with the same number of digits."""
    a, b, difference = metric["a"], metric["b"], metric["difference"]
    form = _form(metric["unit"], [value for value in (a, b) if value is not None])
    shown = ["-" if value is None else form(value) for value in (a, b, difference)]
    if difference is not None and metric["unit"] == "share":
        shown[2] = f"{difference * 100:.1f} pp"
    if difference is not None and difference > 0:
        shown[2] = f"+{shown[2]}"
    return shown


def _form(unit: str, values: list[float]) -> Callable[[float], str]:
    """Format for values of this unit and size."""
    match unit:
        case "share":
            return percent
        case "s":
            largest_ms = max(values) * 1e3
            digits = 1 if largest_ms >= 10 else 2 if largest_ms >= 1 else 3
            return lambda value: f"{number(value * 1e3, digits)} ms"
        case "x":
            return lambda value: f"{value:.2f}x"
        case _:
            is_whole = all(value == int(value) for value in values)
            return lambda value: number(value, 0 if is_whole else 2)


def _interval(interval: dict[str, float] | None) -> str:
    return "-" if interval is None else f"{interval['low']:.3f}–{interval['high']:.3f}"


def _verdict(metric: dict[str, Any]) -> str:
    words = {
        "same": "the same",
        "different": "different" if metric["method"] != "exact" else "different, exactly",
        "within noise": "within the noise",
        "unknown": "cannot be said",
    }[metric["verdict"]]
    return f"{words} ({metric['reason']})" if metric["reason"] else words


def _notes(document: dict[str, Any]) -> list[str]:
    lines = []
    control = document["control"]
    methods = {metric["method"] for metric in document["metrics"].values()}
    if control is not None:
        lines.append(
            f"control: the engine without a drafter took {control['ratio']:.3f} times as long in B "
            f"({control['low']:.3f}–{control['high']:.3f}), so no time is called different that changed as much"
        )
    elif methods & {"paired", "unpaired"}:
        lines.append("a slowdown of a whole run cannot be seen in its requests: repeat the runs before trusting times")
    if "unpaired" in methods:
        lines.append("the requests are not the same: times and counts are compared as of two groups")
    return lines
