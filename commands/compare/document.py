"""The JSON document of `specdec compare`, its tables, and the reading of the two documents that it compares."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from rich.table import Table

from commands.output.documents.records import SCHEMA_VERSION, MeasuredHead, Record, measured_head
from commands.output.output import Output, number, percent
from commands.run.document import RunDocument
from commands.summarize.document import SummarizeDocument
from runtime.checkpoint.config import Count, Measure
from runtime.measure.evaluation.comparison import Unit, compare_documents
from runtime.util.errors import SpecDecError
from runtime.util.reading import parse_json, read_utf8, shown


class DifferentSetting(Record):
    """A value that differs between the two documents: a setting, a fact about the engine, or a version."""

    name: str
    a: Any = Field(description="null where this side does not have it")
    b: Any = Field(description="null where this side does not have it")


class ComparedRequests(Record):
    """Numbers of requests in each document, of common prompts, and of identical outputs."""

    num_a: Count
    num_b: Count
    num_same_prompt: Count
    num_identical_outputs: Count = Field(description="of those of the same prompt, outputs with the same ids")
    paired: bool = Field(description="whether every request of each has its prompt in the other")


class IntervalRecord(Record):
    """Confidence interval of a ratio."""

    model_config = ConfigDict(allow_inf_nan=False)

    ratio: Measure = Field(description="typical ratio of B to A of an observation (Hodges-Lehmann)")
    low: Measure
    high: Measure


class ComparedMetric(Record):
    """A metric of both documents."""

    model_config = ConfigDict(allow_inf_nan=False)

    title: str
    unit: Unit
    a: float | None
    b: float | None
    difference: float | None = Field(description="b - a")
    ratio: float | None = Field(description="b / a; null where a is 0 or either is null")
    interval: IntervalRecord | None = Field(
        description="where the ratio of an observation lies; null where nothing can be said, or counts are exact"
    )
    num_observations: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = Field(
        description="of A and of B; requests that ran together are one observation of their time"
    )
    verdict: Literal["same", "different", "within noise", "unknown"]
    method: Literal["exact", "paired", "unpaired", "none"] = Field(
        description="exact: counts that would be the same again; paired: Wilcoxon's signed ranks; "
        "unpaired: Mann and Whitney's ranks"
    )
    reason: str | None


class CompareDocument(MeasuredHead):
    """Document of `specdec compare --json`."""

    command: Literal["compare"]
    compared_command: Literal["run", "summarize"]
    a: str = Field(description="path of A.json")
    b: str = Field(description="path of B.json")
    settings: list[DifferentSetting] = Field(description="settings, engine and versions that differ")
    requests: ComparedRequests
    level: float = Field(gt=0, lt=1, description="of the intervals")
    control: IntervalRecord | None = Field(
        description="time for a token of the engine without a drafter, B / A; null where the documents do not have it "
        "or the engines differ"
    )
    metrics: dict[str, ComparedMetric]


def compare_document(a: Path, b: Path, document_a: dict[str, Any], document_b: dict[str, Any]) -> CompareDocument:
    """SpecDecError for numbers that are so large that their sums or ratios are infinite."""
    head, command = measured_head("compare"), document_a["command"]
    try:
        found = compare_documents(document_a, document_b)
        return CompareDocument(**head, compared_command=command, a=str(a), b=str(b), **found)
    except (ValidationError, OverflowError) as error:
        raise SpecDecError(
            f"the numbers of the documents are too large to compare: {a}, {b}",
            hint="one of them is damaged or was edited; make it again",
        ) from error


_DOCUMENTS: dict[str, type[Record]] = {"run": RunDocument, "summarize": SummarizeDocument}
_DAMAGED = "it is damaged or was edited; make it again"


def read_document(path: Path) -> dict[str, Any]:
    """A document of `run` or `summarize`, as `--json` printed it; SpecDecError for anything else."""
    text = read_utf8(path)
    data = parse_json(text, path)
    command = data.get("command") if isinstance(data, dict) else None
    if not isinstance(data, dict) or "schema_version" not in data or not isinstance(command, str):
        raise SpecDecError(
            f"not a document of specdec: {path}", hint="give what `specdec run --json` or `summarize --json` printed"
        )
    if command not in _DOCUMENTS:
        raise SpecDecError(
            f"not a document of `run` or `summarize` but of `{command}`: {path}",
            hint="give what `specdec run --json` or `summarize --json` printed",
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecDecError(
            f"the schema version is {data['schema_version']}, and this specdec reads {SCHEMA_VERSION}: {path}",
            hint="make it again with this specdec",
        )
    try:
        document = _DOCUMENTS[command].model_validate_json(text).as_json()
        json.dumps(document, allow_nan=False)
    except ValidationError as error:
        found = min(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        raise SpecDecError(
            f"the document does not match its schema, at {_said(found, data)}: {path}", hint=_DAMAGED
        ) from error
    except ValueError as error:
        raise SpecDecError(f"the document has a number that is not finite: {path}", hint=_DAMAGED) from error
    return document


def _said(error: ErrorDetails, data: Any) -> str:
    """A validation error in words: the key and the value there, and what is wrong with it. pydantic's type names, which
    stand among the keys, are left out.
    """
    place, message = "$", error["msg"].removeprefix("Input ").removeprefix("Value ").removeprefix("error, ")
    if not error["loc"]:
        return f"{place}: {message}"
    key = error["loc"][-1]
    is_unknown = error["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    for part in error["loc"][:-1] if is_unknown else error["loc"]:
        if isinstance(part, int) and isinstance(data, list) and part < len(data):
            place, data = f"{place}[{part}]", data[part]
        elif isinstance(data, dict) and part in data:
            place, data = f"{place}.{part}", data[part]
    if is_unknown:
        return f"{place}: {key!r} is an unknown key"
    if error["type"] == "missing":
        return f"{place}: {key!r} is a required key"
    return f"{place}: {shown(data)} {message}"


def show(document: CompareDocument, output: Output) -> None:
    output.result(f"A {document.a}\nB {document.b}")
    output.result(_settings_table(document.settings) if document.settings else "the settings are the same")
    output.result(_requests_line(document.requests))
    output.result(_metrics_table(document))
    for line in notes(document):
        output.result(line)


def _settings_table(settings: list[DifferentSetting]) -> Table:
    table = Table(title="Settings that differ", title_justify="left")
    for column in ("", "A", "B"):
        table.add_column(column, overflow="fold")
    for setting in settings:
        table.add_row(setting.name, shown_setting(setting.a), shown_setting(setting.b))
    return table


def shown_setting(value: object) -> str:
    """A setting's value in words; an object becomes its keys and values: `quant_algo W4A16, group_size 64`."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        told = {key: one for key, one in value.items() if one not in (None, False, [], {})}
        return ", ".join(f"{key} {shown_setting(one)}" for key, one in told.items())
    return value if isinstance(value, str) else json.dumps(value)


def _requests_line(requests: ComparedRequests) -> str:
    if not requests.num_same_prompt:
        return f"requests: {requests.num_a} and {requests.num_b}, none of the same prompt"
    same = f"{requests.num_identical_outputs} of {requests.num_same_prompt} outputs token for token the same"
    if requests.paired:
        return f"requests: the same {requests.num_a}; {same}"
    numbers = f"{requests.num_a} and {requests.num_b}, {requests.num_same_prompt} of the same prompt"
    return f"requests: {numbers}; {same}"


def _metrics_table(document: CompareDocument) -> Table:
    table = Table()
    table.add_column("")
    for column in ("A", "B", "B − A", "B ÷ A", f"{document.level:.0%} interval"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for metric in document.metrics.values():
        table.add_row(
            metric.title,
            *shown_values(metric),
            number(metric.ratio, 3),
            _interval(metric.interval),
            shown_verdict(metric),
        )
    return table


def shown_values(metric: ComparedMetric) -> list[str]:
    """A, B and their difference, all with the same number of digits."""
    a, b, difference = metric.a, metric.b, metric.difference
    form = _form(metric.unit, [value for value in (a, b) if value is not None])
    shown = ["-" if value is None else form(value) for value in (a, b, difference)]
    if difference is not None and metric.unit == "share":
        shown[2] = f"{difference * 100:.1f} pp"
    if difference is not None and difference > 0:
        shown[2] = f"+{shown[2]}"
    return shown


def _form(unit: str, values: list[float]) -> Callable[[float], str]:
    """Number format for values of this unit and size."""
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


def _interval(interval: IntervalRecord | None) -> str:
    return "-" if interval is None else f"{interval.low:.3f}–{interval.high:.3f}"


def shown_verdict(metric: ComparedMetric) -> str:
    words = {
        "same": "the same",
        "different": "different" if metric.method != "exact" else "different, exactly",
        "within noise": "within the noise",
        "unknown": "cannot be said",
    }[metric.verdict]
    return f"{words} ({metric.reason})" if metric.reason else words


def notes(document: CompareDocument) -> list[str]:
    lines = []
    control = document.control
    methods = {metric.method for metric in document.metrics.values()}
    if control is not None:
        lines.append(
            f"control: the engine without a drafter took {control.ratio:.3f} times as long in B "
            f"({control.low:.3f}–{control.high:.3f}), so no time is called different that changed as much"
        )
    elif methods & {"paired", "unpaired"}:
        lines.append("a slowdown of a whole run cannot be seen in its requests: repeat the runs before trusting times")
    if "unpaired" in methods:
        lines.append("the requests are not the same: times and counts are compared as of two groups")
    return lines
