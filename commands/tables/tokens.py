"""`--show-tokens`: an output with its accepted, recovered and bonus tokens marked.

By colour on a terminal that has it, and otherwise, or with NO_COLOR, by brackets. Tokens of one kind and step are
marked together, so that a draft is seen as a whole.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from commands.output import stdout, visible
from runtime.evaluation.steps import TOKEN_KINDS, Piece, TokenKind

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
    """Marks of tokens for the kind of stdout."""
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
    """The text of the pieces, marked. What has no text, as an end id, leaves no mark."""
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
