"""How values of a document are shown on a page: by their place in it, in a form, or as a dash with a reason."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from commands.output import number

NO_DRAFTS = "nothing was drafted"


@dataclass(frozen=True)
class Page:
    """Shows values of the document."""

    document: dict[str, Any]

    def at(self, *keys: str | int) -> Any:
        value: Any = self.document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else value[key]
            if value is None:
                return None
        return value

    def show(self, form: Callable[[Any], str], *keys: str | int, reason: str = "not measured") -> str:
        """The value at `keys`, shown in this form; a dash with the reason where it is null or missing."""
        value = self.at(*keys)
        if value is None:
            return f'<span class="none" title="{escape(reason)}">–</span>'
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        return f'<data value="{escape(json.dumps(value))}" data-path="{escape(pointer)}">{escaped(form(value))}</data>'


def integer(value: int) -> str:
    return f"{value:,}"


def tenths(value: float) -> str:
    return number(value, 1)


def seconds(value: float) -> str:
    return f"{value:,.3f} s" if value < 10 else f"{value:,.2f} s"


def request_time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def step_time(seconds: float) -> str:
    """With a thousandth of a millisecond: lookups take no longer."""
    return f"{seconds * 1e3:,.3f} ms"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def escaped(text: str) -> str:
    """Escaped; control characters, which HTML cannot hold, as their pictures."""
    return escape("".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text))


def listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def dashes_note(html: str) -> str:
    """Why there are dashes in this part of the page; nothing where there are none."""
    reasons = dict.fromkeys(re.findall(r'<span class="none" title="([^"]*)">–</span>', html))
    return f'\n<p class="note dashes">– {"; ".join(reasons)}</p>' if reasons else ""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{c}</td>" if i else f'<th scope="row">{c}</th>' for i, c in enumerate(row)) + "</tr>\n"
        for row in rows
    )
    shown = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    return f'<div class="card scroll">{shown}{dashes_note(shown)}</div>'
