"""Pages made by Jinja, of the templates beside this file: how a value of a document is shown, and all text escaped.

A page refers to nothing outside itself and has no script. A number of the document is shown by its place there
(`data-path`) and stands beside what is shown in full (`value`), so the page cannot say anything else than the JSON.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from commands.output import milliseconds, number, percent


def page(template: str, document: dict[str, Any], title: str, **values: object) -> str:
    """The HTML of a document; the template sees it, its values by their place (`at`, `show`), and `values`."""

    def at(*keys: str | int) -> Any:
        value: Any = document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else value[key]
            if value is None:
                return None
        return value

    def show(form: Callable[[Any], str], *keys: str | int, reason: str = "not measured") -> Markup:
        """The value at `keys` in this form; a dash with the reason where it is null or missing."""
        value = at(*keys)
        if value is None:
            return Markup('<span class="none" title="{}">–</span>').format(reason)
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        marked = Markup('<data value="{}" data-path="{}">{}</data>')
        return marked.format(json.dumps(value), pointer, _visible(form(value)))

    return _ENVIRONMENT.get_template(template).render(document=document, title=title, at=at, show=show, **values)


def _visible(text: Any) -> Any:
    """Control characters, which HTML cannot hold, as their pictures."""
    if not isinstance(text, str) or isinstance(text, Markup):
        return text
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text)


def _dashes_note(html: str) -> Markup:
    """Why there are dashes in this part of the page; nothing where there are none."""
    reasons = dict.fromkeys(re.findall(r'<span class="none" title="([^"]*)">–</span>', html))
    return Markup(f'\n<p class="note dashes">– {"; ".join(reasons)}</p>' if reasons else "")  # escaped already


def _facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys as in the JSON, an object's with its own in front; nulls are left out."""
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
_ENVIRONMENT.filters |= {"dashes_note": _dashes_note, "facts": _facts, "visible": _visible}
_ENVIRONMENT.globals |= {
    "number": number,
    "percent": percent,
    "milliseconds": milliseconds,
    "integer": "{:,}".format,
    "tenths": "{:,.1f}".format,
    "times": "{:.2f}×".format,
    "sent_at": "{:,.2f} s".format,
    "of_hundred": "{:.1f} %".format,
    "seconds": lambda value: f"{value:,.3f} s" if value < 10 else f"{value:,.2f} s",
    "request_time": lambda seconds: f"{seconds * 1e3:,.2f} ms",
    "step_time": lambda seconds: f"{seconds * 1e3:,.3f} ms",  # lookups take no longer
    "ms": lambda value: milliseconds(value / 1e3),
}
