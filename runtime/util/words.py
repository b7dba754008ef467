"""Words that stand for a choice, such as `int8` or `torch-compile`: which of them a text means."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args


def word_among(text: str, words: Iterable[str]) -> str | None:
    """The word that a text means, whatever its case, and with `-` or `_`: `torch-compile` for `Torch_Compile`."""
    return next((word for word in words if _plain(word) == _plain(text)), None)


def chosen(kind: Any, value: Any) -> Any:
    """The word of `kind`, a Literal, that a value means, such as "leader" for "LEADER"; else the value itself."""
    return (word_among(value, get_args(kind)) or value) if isinstance(value, str) else value


def nearest(name: str, known: Iterable[str], share: float = 0.6) -> str | None:
    """The known name that is most similar to this name; None if no name has this share of letters in common with it."""
    return next(iter(difflib.get_close_matches(name, [*known], 1, share)), None)


def _plain(word: str) -> str:
    return word.casefold().replace("_", "-")
