"""Two small charts as inline SVG, in colours of the page's style sheet; every mark has a title with its numbers."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 360, 168
_LEFT, _TOP, _BOTTOM = 24, 16, 34  # room for a scale, for a value above a column, and for names with the axis
_MAX_NAMES = 16  # more would run into each other


@dataclass(frozen=True)
class Column:
    """A value, what is shown above it, its name below, and its title."""

    value: float
    shown: str
    name: str
    title: str


def column_chart(columns: Seq[Column], *, largest: float, axis: str, label: str, backdrop: bool = False) -> Markup:
    """The columns side by side; `backdrop` shows what is missing to `largest`."""
    label = f"{label}: {', '.join(column.shown for column in columns)}"
    base, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    pitch = _WIDTH / max(len(columns), 1)
    width = min(pitch * 0.78, 46)
    every = -(-len(columns) // _MAX_NAMES)
    marks = []
    for i, column in enumerate(columns):
        middle = (i + 0.5) * pitch
        size = height * column.value / largest if largest else 0.0
        size = max(size, 1.0) if column.value else 0.0
        ghost = _bar("ghost", middle - width / 2, _TOP, width, height) if backdrop else ""
        bar = _bar("bar", middle - width / 2, base - size, width, size) if size else ""
        above = _label(middle, base - size - 4, column.shown, "value") if every == 1 else ""
        below = _label(middle, base + 13, column.name) if i % every == 0 else ""
        marks.append(f"<g><title>{escape(column.title)}</title>{ghost}{bar}{above}{below}</g>")
    line = f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{base}" y2="{base}"/>'
    return _svg(label, "\n".join(marks) + line + _label(_WIDTH / 2, _HEIGHT - 4, axis))


def area_chart(*, values: Seq[float], names: Seq[str], titles: Seq[str], axis: str, label: str) -> Markup:
    """Steps of a line with what is below it filled, over a scale of whole numbers from 0."""
    base, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    span = _WIDTH - _LEFT
    largest = max(values, default=0.0)
    tick = next(t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if largest / t <= 5)
    top = max(1, -(-largest // tick)) * tick
    pitch = span / max(len(values), 1)
    grid = ""
    for number in range(0, int(top) + 1, tick):
        y = base - height * number / top
        style = "grid" if number else "axis"
        grid += f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += _label(_LEFT - 7, y + 3.5, str(number), anchor="end")
    marks = []
    for i, (value, title) in enumerate(zip(values, titles, strict=True)):
        size = height * value / top
        gap = min(1.5, pitch * 0.15)
        bar = _bar("bar", _LEFT + i * pitch + gap / 2, base - size, pitch - gap, size)
        marks.append(f"<g><title>{escape(title)}</title>{bar}</g>")
    every = max(1, -(-len(names) // 8))
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
