"""Destinations of output: results on stdout, everything else on stderr.

With `--json` stdout gets one document and nothing more; with `--quiet` only the bare result. With either flag there is
no progress bar.

Tables are shown on terminals of any width: no number, name, header or verdict is ever cut. A table that fits is shown
as it is. Otherwise its border lines are left out, and words are wrapped at spaces. If it still does not fit, its
columns are split into several tables, each with the first column. A table that does not fit even so, or that has only a
row or two, becomes a block of lines for each row.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from commands.output.help import OUTPUT, option
from commands.output.progress import Advance, bytes_done, counting, phases
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.files import check_regular, try_new_file

if TYPE_CHECKING:
    from runtime.measure.tuning.search import FixedLost

_GAP = 2  # between columns of a table
_INDENT = 2
_FEW_ROWS = 2
_UNBOUNDED = 10_000


@dataclass(frozen=True)
class Output:
    """Output of a command. It is a group of options that most commands have."""

    json: Annotated[bool, option(OUTPUT, "Print one JSON document on stdout.", "--json")] = False
    quiet: Annotated[bool, option(OUTPUT, "Print the result only.", "--quiet")] = False

    @property
    def human(self) -> bool:
        return not (self.json or self.quiet)

    def result(self, renderable: object) -> None:
        """Print a result on stdout, for people; nothing with `--json` or `--quiet`."""
        if not self.human:
            return
        console = stdout()
        if isinstance(renderable, Table):
            console.print(fitted(renderable, console))
        else:
            console.print(visible(renderable) if isinstance(renderable, str) else renderable, soft_wrap=True)

    def text(self, text: str, end: str = "\n") -> None:
        """Print generated text on stdout, unchanged but for control characters that a terminal would obey."""
        self.styled(visible(text) if sys.stdout.isatty() else text, end)

    def styled(self, text: str, end: str = "\n") -> None:
        """Print text like `text`, if its control characters are replaced already and it has colours."""
        if not self.json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def dimmed(self, text: str, end: str = "\n") -> None:
        """Generated text that matters less, such as reasoning, in a dim style."""
        if not self.json:
            stdout().print(Text(visible(text), style="dim"), end=end, soft_wrap=True)

    def document(self, data: dict[str, Any]) -> None:
        if self.json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def warning(self, message: str) -> None:
        warn(message)

    def phases(self) -> AbstractContextManager[Callable[[str], None]]:
        """Progress through phases: returns a function to call with the name of each phase as it begins."""
        return phases(stderr()) if self.human else nullcontext(lambda name: None)

    def byte_progress(self, description: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Progress in bytes: returns a function to call with the bytes done and the bytes in all."""
        return bytes_done(stderr(), description) if self.human else nullcontext(lambda done, total: None)

    def progress(self, description: str, total: int, num_done: int = 0) -> AbstractContextManager[Advance]:
        """Progress through a known number of items: returns a function to call with the number of items done, and
        perhaps a remark on the whole. `num_done` items were done before.
        """
        return (
            counting(stderr(), description, total, num_done)
            if self.human
            else nullcontext(lambda count=1, said="": None)
        )


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # of direction


_MOST_OF_WORD, _MOST_OF_LINE = 200, 1000
"""Most characters of a value without spaces, and of a line, that an error shows whole."""


def visible(text: str) -> str:
    r"""The text with control characters written as `\x1b`, so that no prompt, output or name moves the cursor or
    colours the terminal.
    """
    return text.translate(_CONTROLS)


def stdout() -> Console:
    # A pipe has no width; wide enough for every table of ours.
    return _console(stderr=False, width=None if sys.stdout.isatty() else 120)


def stderr() -> Console:
    return _console(stderr=True, width=None)


def _console(*, stderr: bool, width: int | None) -> Console:
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know; rich would print nothing at all
        del os.environ["COLUMNS"]
    # Without markup: users' paths and values hold brackets, which are to be printed and not read.
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def note(message: str) -> None:
    """Print a note on an action that the user did not ask for."""
    _say("note:", "cyan", message)


def warn(message: str) -> None:
    _say("warning:", "yellow", message)


def fail(message: str, hint: str | None) -> None:
    """Print an error with its hint. Long values are cut: a text in an error may have thousands of characters."""
    _say("error:", "red", _shortened(message))
    if hint:
        _say("hint:", "cyan", _shortened(hint))


def _shortened(message: str) -> str:
    words = re.sub(r"\S+", lambda word: _cut(word[0], _MOST_OF_WORD), message)
    return "\n".join(_cut(line, _MOST_OF_LINE) for line in words.splitlines())


def _cut(text: str, most: int) -> str:
    """The text, or its beginning and its end if it is too long. The end says where a value comes from."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}… ({len(text):,} characters) …{text[-half:]}"


def say_interrupted() -> None:
    """Print that a command was ended by Ctrl-C, if it has no results to show."""
    stderr().print("interrupted", style="yellow")


def _say(label: str, style: str, message: str) -> None:
    stderr().print(Text.assemble((label, style), " ", visible(message)), soft_wrap=True)


def check_output_files(outputs: list[Path], inputs: list[Path], new_dir: Path | None = None) -> None:
    """SpecDecError unless each output file can be written, and none overwrites another output or an input. Files in
    `new_dir`, a directory that does not exist yet, cannot be tried.
    """
    resolved = [path.resolve() for path in outputs]
    for path, place in zip(outputs, resolved, strict=True):
        if resolved.count(place) > 1:
            raise UsageError(f"two outputs have the same file: {path}", hint="give each a name of its own")
        for taken in inputs:
            if taken.resolve() in place.parents or (taken.is_file() and taken.resolve() == place):
                raise UsageError(f"the output would overwrite an input: {path}", hint="choose another path")
        if new_dir is None or place.parent != new_dir.resolve():
            check_output_file(path)


def check_report(path: Path | None) -> None:
    """UsageError for a report whose suffix is another kind of file's, such as `.json`."""
    if path is not None and path.suffix.lower() not in ("", ".html", ".htm"):
        raise UsageError(f"`--report` writes HTML: {path}", hint=f"`--report {path.with_suffix('.html')}`")


def check_output_file(path: Path) -> None:
    """SpecDecError unless a file can be written at `path`. It runs before the work, and leaves no file behind."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            try_new_file(path)
    except OSError as error:
        raise SpecDecError(f"cannot write the file ({error.strerror}): {path}", hint="choose another path") from None


def check_new_directory(path: Path) -> None:
    """SpecDecError unless `path` is a directory in which files can be written, or such a directory can be made. Leaves
    nothing behind.
    """
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise SpecDecError(
            f"cannot write into the directory ({error.strerror}): {path}", hint="choose another"
        ) from None


def number(value: float | None, digits: int = 2) -> str:
    """A number as text for tables; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def add_columns_with_values(
    table: Table, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str], no_wrap: bool = False
) -> None:
    """Add the columns that hold more than dashes and `0/0`, as some do without a drafter, and the rows. All columns but
    those of `left` are aligned right.
    """
    shown = [i for i, _ in enumerate(columns) if any(row[i] not in ("-", "0/0") for row in rows)]
    for i in shown:
        table.add_column(columns[i], justify="left" if columns[i] in left else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(row[i] for i in shown))


def speedup_line(speedup: float) -> str:
    """The ratio of wall times in a line, with a sentence if speculation does not pay."""
    verdict = "" if speedup >= 0.995 else " — slower than no drafter"
    return f"speedup over no drafter: {speedup:.2f}x{verdict}"


def show_fixed_lost(lost: "FixedLost | None", output: Output) -> None:
    """Show a line if a fixed draft length lost time, with the estimate for automatic lengths."""
    if lost is not None:
        output.result(
            "drafts of a fixed length lost: at the measured step costs they were "
            f"{lost.fixed:.2f}x as fast as no drafter; `--draft-len-mode auto` would have been {lost.automatic:.2f}x"
        )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def check_readable(paths: list[Path]) -> None:
    """SpecDecError for a path that is not a file or cannot be read. The files are not read: a pipe gives its content
    only once.
    """
    for path in paths:
        check_regular(path)
        reason = None
        if not path.exists():
            reason = "No such file or directory"
        elif path.is_dir():
            reason = "Is a directory"
        elif not os.access(path, os.R_OK):
            reason = "Permission denied"
        if reason is not None:
            raise SpecDecError(f"cannot read the file ({reason}): {path}", hint="check the path")


class _Widths(NamedTuple):
    least: int
    most: int


def fitted(table: Table, console: Console) -> RenderableType:
    """The table, or the same content arranged for `console.width` columns. The title has lines of its own."""
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
    """Minimum and natural width of a column. Headers and texts wrap at spaces; right-aligned numbers do not wrap."""
    header, cells = _measure(column.header, console), [_measure(cell, console) for cell in column.cells]
    is_whole = column.no_wrap or column.justify == "right"
    least = max(header.minimum, *(cell.maximum if is_whole else cell.minimum for cell in cells))
    return _Widths(least, max(header.maximum, *(cell.maximum for cell in cells)))


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """Indices of the columns of each part; every part has the first column. Empty if a column has no room beside the
    first.
    """
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
    """A table of these columns, without border lines."""
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
    """Widths of columns: each has its least width, and the rest of the room goes to columns that want more, those that
    want least first.
    """
    chosen = [width.least for width in widths]
    spare = room - sum(chosen)
    wanting = sorted(range(len(widths)), key=lambda i: widths[i].most - widths[i].least)
    for num_before, i in enumerate(wanting):
        more = min(widths[i].most - widths[i].least, spare // (len(wanting) - num_before))
        chosen[i] += more
        spare -= more
    return chosen


def _blocks(table: Table, console: Console) -> list[RenderableType]:
    """A block for each row: the first cell, and below it a line for each other cell. Bars are left out, since they are
    no text.
    """
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
    """The label and the cell on one line, or the cell below the label if it is longer. A word longer than a line is
    continued on the next.
    """
    line = f"{label:{label_width}}{' ' * _GAP if label_width else ''}{cell}"
    if _INDENT + _measure(line, console).maximum <= console.width:
        return [Padding(Text(line), (0, 0, 0, _INDENT))]
    label_lines = [Padding(Text(label), (0, 0, 0, _INDENT))] if label else []
    return [*label_lines, Padding(Text(cell, overflow="fold"), (0, 0, 0, 2 * _INDENT))]


def _with_blank_lines(shown: Sequence[RenderableType]) -> list[RenderableType]:
    """The blocks or parts with an empty line between each two."""
    spaced = [line for before, _ in pairwise(shown) for line in (before, "")]
    return [*spaced, *shown[-1:]]
