"""HTML pages, made by Jinja from the templates beside this file. All text in them is escaped. Small charts are inline
SVG, in colours of the style sheet; every mark has a title with its numbers. A page begins with what was measured, when
and where: the model, the bits of its weights, the date and the machine.

A page refers to nothing outside itself and has no script. Each number names its key in the document (`data-path`) and
carries its full value (`value`) beside the rounded number, so the page cannot differ from the JSON.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from commands.output.output import Output, number, percent
from runtime.util.files import write_file

_WIDTH, _HEIGHT = 360, 168
_LEFT, _TOP, _BOTTOM = 24, 16, 34  # room for a scale, for a value above a column, and for names with the axis
_LETTER, _LINE = 6.2, 13  # width of a letter, and height of a line
FEW_DRAFTS = 20
"""Least number of drafts for a rate in full colour; rates of fewer drafts are faded. With 19 drafts, one more accepted
changes the rate by 5 %.
"""


def write_page(path: Path, html: str, output: Output) -> None:
    """Write the page, and say so. A kill leaves no half-written file."""
    write_file(path, html.encode(errors="replace"))
    output.result(f"report written: {path}")


def model_name(engine: Mapping[str, Any]) -> str:
    """Name of an `EngineRecord`'s model without its directory, or of the engine where only that was named."""
    return Path(engine.get("model") or engine["engine_dir"]).absolute().name


def with_bits(engine: Mapping[str, Any]) -> str:
    """A model's name with the bits of its weights, such as `smollm2.gguf (4 and 8 bits)`. For a document older than
    2026-11-29, which does not have them, the name alone.
    """
    return f"{model_name(engine)} ({bits} bits)" if (bits := engine.get("bits")) else model_name(engine)


def made(document: Mapping[str, Any]) -> list[str]:
    """The model and its formats, the date and the machine of a document, as far as it has them."""
    found = []
    if engine := document.get("engine"):
        algo = (engine.get("quantization") or {}).get("quant_algo")
        weights = f"{algo} weights" if algo not in (None, "MIXED_PRECISION") else ""  # the bits say how they are mixed
        found = [with_bits(engine), engine["model_type"], weights, engine["dtype"]]
        device = engine["environment"]
        found += [f"CUDA {device['capability']}"] if device["device"] == "cuda" else []
    if date := document.get("date"):  # 2026-01-31T23:59:59+00:00
        found.append(f"{date[:10]} {date[11:16]} UTC")
    return [one for one in (*found, document.get("machine")) if one]


def page(template: str, document: dict[str, Any], title: str, **values: object) -> str:
    """The HTML page of a document. The template gets the document, functions for its values by their keys (`at`,
    `show`), and `values`.
    """

    def at(*keys: str | int) -> Any:
        value: Any = document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else value[key]
            if value is None:
                return None
        return value

    def show(form: Callable[[Any], str], *keys: str | int, reason: str = "not measured") -> Markup:
        """The value at `keys` in this form; a dash with the reason if it is null or missing."""
        value = at(*keys)
        if value is None:
            return Markup('<span class="none" title="{}">–</span>').format(reason)
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        marked = Markup('<data value="{}" data-path="{}">{}</data>')
        return marked.format(json.dumps(value), pointer, _visible(form(value)))

    common = {"document": document, "title": title, "made": made(document), "at": at, "show": show}
    return _ENVIRONMENT.get_template(template).render(**common | values)


def _visible(text: Any) -> Any:
    """Replaces control characters, which HTML cannot hold, by their symbols, such as ␀."""
    if not isinstance(text, str) or isinstance(text, Markup):
        return text
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text)


def _dashes_note(html: str) -> Markup:
    """The reason for dashes in this part of the page; empty if it has no dashes."""
    reasons = dict.fromkeys(re.findall(r'<span class="none" title="([^"]*)">–</span>', html))
    return Markup(f'\n<p class="note dashes">– {"; ".join(reasons)}</p>' if reasons else "")  # escaped already


def _with_code(text: str) -> Markup:
    """The text with backticks turned into HTML `<code>`."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _labelled(rows: str, heads: Seq[str]) -> Markup:
    """The rows of a table. Each cell carries its column's head, which narrow screens show beside the cell."""

    def labelled(row: re.Match[str]) -> str:
        cells = iter(heads[1:])  # the first is the row's own
        return re.sub(r"<td(?=[ >])", lambda _: f'<td data-label="{escape(next(cells))}"', row[0])

    return Markup(re.sub(r"<tr>.*?</tr>", labelled, rows, flags=re.DOTALL))  # escaped already


def _facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values of a JSON object, as rows. Keys of an inner object have its key in front; nulls are left out."""
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _facts(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            in_digits = f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
            yield prefix + key, value if isinstance(value, str) else in_digits


_ENVIRONMENT = Environment(
    loader=PackageLoader(__name__.rpartition(".")[0], ""),
    autoescape=True,
    finalize=_visible,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "dashes_note": _dashes_note,
    "facts": _facts,
    "labelled": _labelled,
    "visible": _visible,
    "with_code": _with_code,
}
_ENVIRONMENT.globals |= {
    "number": number,
    "few_drafts": FEW_DRAFTS,
    "percent": percent,
    "integer": "{:,}".format,
    "string": str,
    "significant": "{:.3g}".format,
    "tenths": "{:,.1f}".format,
    "times": "{:.2f}×".format,
    "ratio": "{:.3f}".format,
    "seconds": lambda value: f"{value:,.3f} s" if value < 10 else f"{value:,.2f} s",
    "request_time": lambda seconds: f"{seconds * 1e3:,.2f} ms",
    "step_time": lambda seconds: f"{seconds * 1e3:,.3f} ms",  # lookups take no longer
}


@dataclass(frozen=True)
class Bars:
    """Values of one quantity side by side, such as predicted and measured. Each has a style, a name, the value, and the
    text to show.
    """

    name: str
    parts: Seq[tuple[str, str, float, str]]
    note: str = ""

    @property
    def longest(self) -> float:
        return max((value for _, _, value, _ in self.parts), default=0.0)


@dataclass(frozen=True)
class Column:
    """A column of a chart: its value, the text above it, the name and the number of drafts below it, and its title."""

    value: float
    shown: str
    name: str
    title: str
    num: str = ""
    is_faint: bool = False
    """True for a rate of so few drafts that it says little."""


def column_chart(columns: Seq[Column], *, largest: float, axis: str, label: str, backdrop: bool = False) -> Markup:
    """A chart of the columns side by side, with as many names as there is room for. `backdrop` shows the part that is
    missing to `largest`.
    """
    label = f"{label}: {', '.join(column.shown for column in columns)}"
    nums = [column.num for column in columns]
    bottom = _BOTTOM + (_LINE if any(nums) else 0)
    base, height = _HEIGHT - bottom, _HEIGHT - bottom - _TOP
    pitch = _WIDTH / max(len(columns), 1)
    width = min(pitch * 0.78, 46)
    every = max(_every([column.name for column in columns], pitch), _every(nums, pitch))
    has_values = every == 1 and _every([column.shown for column in columns], pitch) == 1
    marks = []
    for i, column in enumerate(columns):
        middle = (i + 0.5) * pitch
        size = height * column.value / largest if largest else 0.0
        size = max(size, 1.0) if column.value else 0.0
        ghost = _bar("ghost", middle - width / 2, _TOP, width, height) if backdrop else ""
        bar = _bar("bar", middle - width / 2, base - size, width, size) if size else ""
        above = _label(middle, base - size - 4, column.shown, "value") if has_values else ""
        below = _label(middle, base + _LINE, column.name) if i % every == 0 else ""
        num = _label(middle, base + 2 * _LINE, column.num) if column.num and i % every == 0 else ""
        faint = ' class="faint"' if column.is_faint else ""
        marks.append(f"<g{faint}><title>{escape(column.title)}</title>{ghost}{bar}{above}{below}{num}</g>")
    line = f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{base}" y2="{base}"/>'
    return _svg(label, "\n".join(marks) + line + _label(_WIDTH / 2, _HEIGHT - 4, axis))


def _every(texts: Seq[str], pitch: float) -> int:
    """1 if all texts have room side by side, 2 if only every second text has, and so on."""
    widest = max(map(len, texts), default=0) * _LETTER + _LETTER / 2
    return max(1, math.ceil(widest / pitch))


def positions_chart(rates: Seq[float | None], nums: Seq[int]) -> Markup:
    """Acceptance by position: of the drafts that reach a position, the share whose token was accepted there."""
    columns = [
        Column(
            rate or 0.0,
            "–" if rate is None else f"{rate * 100:.0f}",
            str(i),
            f"position {i}: {percent(rate)} of {num:,} drafts that reach it",
            f"{num:,}",
            num < FEW_DRAFTS,
        )
        for i, (rate, num) in enumerate(zip(rates, nums, strict=True), 1)
    ]
    label = "Share of the drafts that reach a position whose token was accepted there, in percent"
    return column_chart(columns, largest=1.0, axis="position, and drafts that reach it", label=label, backdrop=True)


def area_chart(*, values: Seq[float], names: Seq[str], titles: Seq[str], axis: str, label: str) -> Markup:
    """A chart of values as a stepped line with the area below it filled. The scale has whole numbers from 0."""
    base, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    span = _WIDTH - _LEFT
    largest = max(values, default=0.0)
    tick = next(t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if largest / t <= 5)
    top = max(1, -(-largest // tick)) * tick
    pitch = span / max(len(values), 1)
    grid = ""
    for mark in range(0, int(top) + 1, tick):
        y = base - height * mark / top
        style = "grid" if mark else "axis"
        grid += f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += _label(_LEFT - 7, y + 3.5, str(mark), anchor="end")
    marks = []
    for i, (value, title) in enumerate(zip(values, titles, strict=True)):
        size = height * value / top
        gap = min(1.5, pitch * 0.15)
        bar = _bar("bar", _LEFT + i * pitch + gap / 2, base - size, pitch - gap, size)
        marks.append(f"<g><title>{escape(title)}</title>{bar}</g>")
    every = max(_every(names, pitch), -(-len(names) // 8))
    below = "".join(
        _label(_LEFT + (i + 0.5) * pitch, base + 13, name) for i, name in enumerate(names) if i % every == 0
    )
    text = below + _label(_LEFT + span / 2, _HEIGHT - 4, axis)
    return _svg(label, grid + "\n" + "\n".join(marks) + text)


def _svg(label: str, content: str) -> Markup:
    size = f"{_WIDTH} {_HEIGHT}"
    return Markup(f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(label)}">\n{content}\n</svg>\n')


def _bar(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="1.5"/>'


def _label(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
