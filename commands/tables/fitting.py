"""Tables on terminals of any width: no number, name, header or verdict is ever cut.

A table that fits is shown as it is. Otherwise its lines go, and its words are wrapped at spaces; then its columns come
in parts, each beside the first column; and what does not fit even so, or has only a row or two, becomes a block of
lines for each row.
"""

from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

_GAP = 2  # between columns
_INDENT = 2
_FEW_ROWS = 2
_UNBOUNDED = 10_000


class _Widths(NamedTuple):
    least: int
    most: int


def fitted(table: Table, console: Console) -> RenderableType:
    """The table, or what says the same in `console.width` columns. The title has lines of its own."""
    if not table.title:
        return Group(*_with_blank_lines(_fitted(table, console)))
    untitled = copy(table)
    untitled.title = None
    title = Text(str(table.title), style="table.title", overflow="fold")
    return Group(title, *_with_blank_lines(_fitted(untitled, console)))


def _fitted(table: Table, console: Console) -> list[RenderableType]:
    if _measure(table, console).maximum <= console.width:
        return [table]
    widths = [_widths_of(column, console) for column in table.columns]
    name = widths[0]  # is not to stand one word below the other
    widths[0] = _Widths(max(name.least, min(name.most, console.width // 5)), name.most)
    parts = _parts([width.least for width in widths], console.width)
    if not parts or (len(parts) > 1 and table.row_count <= _FEW_ROWS):
        return _blocks(table, console)
    return [_part(table, part, [widths[i] for i in part], console.width) for part in parts]


def _measure(renderable: RenderableType, console: Console) -> Measurement:
    return Measurement.get(console, console.options.update_width(_UNBOUNDED), renderable)


def _widths_of(column: Column, console: Console) -> _Widths:
    """Minimum and natural width of a column: headers and texts wrap at spaces, right-aligned numbers do not."""
    header, cells = _measure(column.header, console), [_measure(cell, console) for cell in column.cells]
    is_whole = column.no_wrap or column.justify == "right"
    least = max(header.minimum, *(cell.maximum if is_whole else cell.minimum for cell in cells))
    return _Widths(least, max(header.maximum, *(cell.maximum for cell in cells)))


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """Indices of the columns of each part, the first column in all of them; none if a column has no room beside it."""
    parts, room = [[0]], width - least[0]
    for i in range(1, len(least)):
        if least[i] + _GAP > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - least[0]
        if least[i] + _GAP > room:
            return []
        parts[-1].append(i)
        room -= least[i] + _GAP
    return parts


def _part(table: Table, indices: list[int], widths: list[_Widths], width: int) -> Table:
    """These columns, without lines between them."""
    columns = [table.columns[i] for i in indices]
    part = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=table.show_header)
    part.padding = (0, _GAP - 1, 0, 0)  # the box has one blank between columns
    room = width - _GAP * (len(columns) - 1)
    for column, chosen in zip(columns, _share(widths, room), strict=True):
        part.add_column(column.header, justify=column.justify, width=chosen, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*row)
    return part


def _share(widths: list[_Widths], room: int) -> list[int]:
    """Each column's least width, and what is left of the room for those that want more: the modest first."""
    chosen = [width.least for width in widths]
    spare = room - sum(chosen)
    wanting = sorted(range(len(widths)), key=lambda i: widths[i].most - widths[i].least)
    for num_before, i in enumerate(wanting):
        more = min(widths[i].most - widths[i].least, spare // (len(wanting) - num_before))
        chosen[i] += more
        spare -= more
    return chosen


def _blocks(table: Table, console: Console) -> list[RenderableType]:
    """Rows as blocks: the first cell, and below it a line per other cell; bars, which are no text, are left out."""
    labels = [str(column.header) for column in table.columns]
    label_width = max(len(label) for label in labels[1:])
    blocks: list[RenderableType] = []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        lines: list[RenderableType] = [Text(f"{labels[0]} {row[0]}".strip(), style="bold")]
        for label, cell in zip(labels[1:], row[1:], strict=True):
            if isinstance(cell, str):
                lines += _labelled(label, cell, label_width, console)
        blocks.append(Group(*lines))
    return blocks


def _labelled(label: str, cell: str, label_width: int, console: Console) -> list[RenderableType]:
    """The label and the cell on one line; below it if it is longer; a word longer than a line goes on in the next."""
    line = f"{label:{label_width}}{' ' * _GAP if label_width else ''}{cell}"
    if _INDENT + _measure(line, console).maximum <= console.width:
        return [Padding(Text(line), (0, 0, 0, _INDENT))]
    label_lines = [Padding(Text(label), (0, 0, 0, _INDENT))] if label else []
    return [*label_lines, Padding(Text(cell, overflow="fold"), (0, 0, 0, 2 * _INDENT))]


def _with_blank_lines(shown: Sequence[RenderableType]) -> list[RenderableType]:
    """Blocks or parts, with a line between each two."""
    spaced = [line for before, _ in pairwise(shown) for line in (before, "")]
    return [*spaced, *shown[-1:]]
