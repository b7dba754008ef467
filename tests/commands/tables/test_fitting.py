"""Tables at every width: nothing is cut, no line is too long, and what fits is shown as it is."""

import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import NGRAM, PROMPTS, Specdec, each
from rich.console import Console
from rich.table import Table

from commands.output.output import Output, fitted

WIDTHS = [40, 50, 60, 72, 80, 100, 120, 200]
LINES_AND_BARS = re.compile(r"[\u2500-\u259f]+")  # of boxes, and blocks


def rendered(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    console.print(fitted(table, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def words(lines: list[str]) -> Counter[str]:
    return Counter(LINES_AND_BARS.sub(" ", "\n".join(lines)).split())


def assert_nothing_is_cut(table: Table) -> None:
    wide = rendered(table, 400)
    for width in WIDTHS:
        lines = rendered(table, width)
        assert max(map(len, lines)) <= width
        # A word longer than a line must go on in the next one: it is there without the spaces.
        long = {word for word in words(wide) if len(word) > width - 4}
        missing = words(wide) - words(lines)
        assert set(missing) <= long, (width, missing)
        squeezed = "".join(line.strip() for line in lines)
        assert all(word in squeezed for word in long)
        for column in table.columns:
            if column.justify == "right":  # numbers with their units
                assert all(any(cell in line for line in lines) for cell in column.cells)


Tables = Callable[..., list[Table]]


@pytest.fixture
def tables_of(specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """`tables_of("run", …)`: the tables that the command shows."""

    def call(*arguments: object) -> list[Table]:
        tables: list[Table] = []
        monkeypatch.setattr(Output, "result", lambda self, shown: tables.append(shown))
        result = specdec(*arguments)
        monkeypatch.undo()
        assert result.exit_code == 0, result.stderr
        return [table for table in tables if isinstance(table, Table)]

    return call


def test_tables_of_run(tables_of: Tables, llama_engine_dir: Path) -> None:
    arguments = ["--engine-dir", llama_engine_dir, "--ngram-config", NGRAM, "--num-return-sequences", 2]
    tables = tables_of("run", *arguments, *each("--input-text", PROMPTS), "--max-output-len", 40, "--stats", "detailed")
    assert len(tables) == 4
    for table in tables:
        assert_nothing_is_cut(table)


def small_table(num_rows: int) -> Table:
    table = Table(title="Latencies")
    table.add_column("request")
    for column in ("first token, median", "tokens per second", "verdict of the comparison"):
        table.add_column(column, justify="right")
    for i in range(num_rows):
        table.add_row(f"Text {i}", "1,234.5 ms", f"{i}.25", "within the noise")
    return table


SHOWN = {
    (1, 85): """
Latencies
┏━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ request ┃ first token, median ┃ tokens per second ┃ verdict of the comparison ┃
┡━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ Text 0  │          1,234.5 ms │              0.25 │          within the noise │
└─────────┴─────────────────────┴───────────────────┴───────────────────────────┘
""",
    (1, 80): """
Latencies
request  first token, median  tokens per second  verdict of the comparison
──────────────────────────────────────────────────────────────────────────
Text 0            1,234.5 ms               0.25           within the noise
""",
    (3, 60): """
Latencies
            first token,   tokens per         verdict of the
request           median       second             comparison
────────────────────────────────────────────────────────────
Text 0        1,234.5 ms         0.25       within the noise
Text 1        1,234.5 ms         1.25       within the noise
Text 2        1,234.5 ms         2.25       within the noise
""",
    (3, 40): """
Latencies
             first token,     tokens per
request            median         second
────────────────────────────────────────
Text 0         1,234.5 ms           0.25
Text 1         1,234.5 ms           1.25
Text 2         1,234.5 ms           2.25

request  verdict of the comparison
──────────────────────────────────
Text 0            within the noise
Text 1            within the noise
Text 2            within the noise
""",
    (1, 40): """
Latencies
request Text 0
  first token, median        1,234.5 ms
  tokens per second          0.25
  verdict of the comparison
    within the noise
""",
}


@pytest.mark.parametrize(("num_rows", "width"), SHOWN)
def test_lines_go_then_headers_are_wrapped_then_columns_part_and_few_rows_become_lines(
    num_rows: int, width: int
) -> None:
    lines = [line.rstrip() for line in rendered(small_table(num_rows), width)]
    assert "\n".join(["", *lines, ""]) == SHOWN[num_rows, width]
