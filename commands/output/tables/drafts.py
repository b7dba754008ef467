"""Fates of drafts, step by step.

`--stats detailed` shows how drafts fared, by their length and by position, and tokens per step as outputs grow.
`--show-tokens` marks an output's accepted, recovered and bonus tokens: by colour on a terminal that has it, and
otherwise, or with NO_COLOR, by brackets. Neighbouring tokens of the same kind and step are marked together, so that a
draft is seen as a whole.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from commands.output.documents.records import Total
from commands.output.output import Output, number, percent, stdout, visible
from runtime.measure.text_steps import TOKEN_KINDS, Piece, TokenKind, tokens_over_time

_BAR_WIDTH, _LEAST_BAR_WIDTH = 40, 8
_MAX_RANGES = 16


def show_details(total: Total, steps: Seq[Seq[int]], output: Output) -> None:
    """Print three tables with bars, or one if nothing was drafted. `total` is from the document; `steps` has the tokens
    of each step of each request.
    """
    if total.num_spec_steps:
        output.result(_histogram_table(total))
        output.result(_position_table(total))
    else:
        output.result("nothing was drafted: no acceptance to show")
    output.result(_time_table(steps))


def _histogram_table(total: Total) -> Table:
    histogram, num_drafts = total.acceptance_histogram, total.num_spec_steps
    table = _table(f"Accepted tokens of a draft ({num_drafts:,} drafts)", "accepted", "", "drafts", "share")
    for num_accepted, (count, bar) in enumerate(zip(histogram, _bars(histogram, max(histogram)), strict=True)):
        table.add_row(str(num_accepted), bar, f"{count:,}", percent(count / num_drafts))
    return table


def _position_table(total: Total) -> Table:
    table = _table("Acceptance by position in the draft", "position", "", "drafts", "accepted")
    rates = total.acceptance_rate_per_position
    bars = _bars([rate or 0.0 for rate in rates], 1.0)
    for position, row in enumerate(zip(rates, total.num_drafts_per_position, bars, strict=True), 1):
        rate, num_drafts, bar = row
        table.add_row(str(position), bar, f"{num_drafts:,}", percent(rate))
    return table


def _time_table(steps: Seq[Seq[int]]) -> Table:
    ranges = tokens_over_time(steps, _MAX_RANGES)
    rates = [r.num_tokens / r.num_steps for r in ranges]
    table = _table("Tokens per step over time", "steps", "", "tokens / steps", "tokens per step")
    for r, rate, bar in zip(ranges, rates, _bars(rates, max(rates)), strict=True):
        name = str(r.first) if r.first == r.last else f"{r.first}–{r.last}"
        table.add_row(name, bar, f"{r.num_tokens:,} / {r.num_steps:,}", number(rate))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    return table


@dataclass(frozen=True)
class _Bar:
    """A bar drawn in eighths of a character. Any value above 0 is visible. If there is less room all bars shrink
    alike.
    """

    length: float
    longest: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = math.ceil(self.longest)
        return Measurement(min(longest, _LEAST_BAR_WIDTH), longest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scale = min(1.0, options.max_width / self.longest) if self.longest else 0.0
        eighths = max(round(self.length * scale * 8), 1) if self.length else 0
        yield Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip())


def _bars(values: Seq[float], full: float) -> list[_Bar]:
    """A bar for each value; the value `full` has the longest bar."""
    lengths = [value / full * _BAR_WIDTH if full else 0.0 for value in values]
    return [_Bar(length, max(lengths)) for length in lengths]


Mark = Callable[[str, TokenKind], str]

# Each differs from the others without its colour too: plain green, underlined, bold.
_STYLES: dict[TokenKind, Style] = {
    "accepted": Style.parse("green"),
    "recovered": Style.parse("underline yellow"),
    "bonus": Style.parse("bold cyan"),
    "plain": Style.null(),
}
_BRACKETS: dict[TokenKind, str] = {"accepted": "⟦⟧", "recovered": "⟨⟩", "bonus": "⟪⟫", "plain": ""}
_ASCII_BRACKETS: dict[TokenKind, str] = {"accepted": "[]", "recovered": "<>", "bonus": "{}", "plain": ""}


def mark_for_stdout() -> Mark:
    """Marks of tokens that stdout can show: colours or brackets."""
    console = stdout()
    if console.is_terminal and not console.no_color and console.color_system is not None:
        return _by_colour(console)
    return _by_brackets(sys.stdout.encoding)


def _by_colour(console: Console) -> Mark:
    color_system = ColorSystem.STANDARD  # sixteen colours: those of the terminal's own theme, light or dark
    return lambda text, kind: _STYLES[kind].render(text, color_system=color_system)


def _by_brackets(encoding: str | None) -> Mark:
    try:
        "".join(_BRACKETS.values()).encode(encoding or "ascii")
        brackets = _BRACKETS
    except (UnicodeEncodeError, LookupError):
        brackets = _ASCII_BRACKETS
    return lambda text, kind: f"{brackets[kind][:1]}{text}{brackets[kind][1:]}"


def marked_text(pieces: Iterable[Piece], mark: Mark) -> str:
    """The text of the pieces with marks. A token without text, such as an end id, leaves no mark."""
    runs = groupby(pieces, key=lambda piece: (piece.step, piece.kind))
    texts = [("".join(piece.text for piece in run), kind) for (_, kind), run in runs]
    on_terminal = sys.stdout.isatty()
    return "".join(mark(visible(text) if on_terminal else text, kind) if text else "" for text, kind in texts)


def legend(mark: Mark) -> str:
    plain = f"{mark('plain', 'plain')} ({TOKEN_KINDS['plain']})"
    return f"Tokens: {' '.join(mark(kind, kind) for kind in TOKEN_KINDS if kind != 'plain')} {plain}"


def counts_line(pieces: Iterable[Piece]) -> str:
    """`40 tokens: 27 accepted, 9 recovered, 3 bonus, 1 plain`, the end id included."""
    counts = Counter(piece.kind for piece in pieces)
    return f"{counts.total()} tokens: {', '.join(f'{counts[kind]} {kind}' for kind in TOKEN_KINDS)}"
