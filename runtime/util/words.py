"""Words that stand for a choice, such as `int8` or `torch-compile`: which of them a text means."""

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any, get_args

NEAR = 0.75
"""Least similarity of a misspelt name and the name that is meant: `dmeo` is as near to `demo`, and `done` is not."""

_OF_OTHERS = {
    "half": ("float16", "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "16"), ("float16", "float")),
    "bf16": ("bfloat16", "float"),
    **dict.fromkeys(("fp32", "f32", "32", "float", "full", "single"), ("float32", "float")),
    **dict.fromkeys(("4", "4bit", "awq", "gptq", "nf4", "q4", "w4a16", "w4a8"), ("int4",)),
    **dict.fromkeys(("8", "8bit", "q8", "w8a16", "w8a8"), ("int8",)),
    **dict.fromkeys(("e4m3", "e5m2", "float8"), ("fp8",)),
    "gpu": ("cuda",),
    "eager": ("none",),
    "inductor": ("torch-compile",),
    "v1": ("orchestrator",),
    "v2": ("leader",),
}
"""Other programs' words, each with our words for the same."""


def word_among(text: str, words: Iterable[str]) -> str | None:
    """The word that a text means, whatever its case, and with `-` or `_`: `torch-compile` for `Torch_Compile`."""
    return next((word for word in words if _plain(word) == _plain(text)), None)


def chosen(kind: Any, value: Any) -> Any:
    """The word of `kind`, a Literal, that a value means, such as "leader" for "LEADER"; else the value itself."""
    return (word_among(value, get_args(kind)) or value) if isinstance(value, str) else value


def meant(text: str, words: Collection[str]) -> list[str]:
    """The words that a text may mean although it is none of them: `int4` for `INT4_AWQ`, `float16` and `bfloat16` for
    `half`, `leader` for `leadr`; empty if no word is near.
    """
    plain = _plain(text)
    for part in (plain, *re.split("[-.]", plain)):
        if found := [word for word in (part, *_OF_OTHERS.get(part, ())) if word in words]:
            return found
    near = nearest(plain, words)
    return [] if near is None else [near]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to this name; None if none is near."""
    near = [one for one in known if _is_near(name, one)]
    return next(iter(difflib.get_close_matches(name, near, 1, 0)), None)


def _is_near(name: str, known: str) -> bool:
    """True if the name is most probably the known name with a slip, such as `rnu` for `run`, or if either begins with
    the other, as `batch-size` does with `batch`.
    """
    is_part = known.startswith(f"{name}-") or name.startswith(f"{known}-")
    is_swapped = sorted(known) == sorted(name)
    return is_part or is_swapped or difflib.SequenceMatcher(None, known, name).ratio() >= NEAR


def _plain(word: str) -> str:
    return word.casefold().replace("_", "-")
