"""Pages that commands write, parsed again: what they show, and that they say what the document says."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

Document = dict[str, Any]
VOID = {"meta", "br", "line", "rect"}


class Page(HTMLParser):
    """Tags with their attributes, the text inside each kind of tag, and `<data>` by its path."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.data = html, list[tuple[str, dict[str, str]]](), dict[str, tuple[str, str]]()
        self.open, self.text, self.marked = list[tuple[str, dict[str, str]]](), "", list[tuple[str, str]]()
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if not self.open:
            return
        tag, attributes = self.open[-1]
        if tag == "data":
            self.data[attributes["data-path"]] = (attributes["value"], data)
        kinds = set(attributes.get("class", "").split())
        if tag == "span" and "t" in kinds and "title" in attributes and "end" not in kinds:
            self.marked.append((attributes["class"].split()[1], data))


def at(document: Document, pointer: str) -> Any:
    value: Any = document
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def assert_says_what_the_document_says(page: Page, document: Document) -> None:
    """Every number by its place; what is shown is that number, rounded."""
    assert page.data
    for pointer, (value, shown) in page.data.items():
        expected = at(document, pointer)
        assert json.loads(value) == expected, pointer
        number = float(re.sub(r"[^\d.e-]", "", shown))
        scale = 100 if "%" in shown else 1000 if shown.endswith(" ms") else 1
        digits = len(shown.split()[0].rstrip("×").partition(".")[2])
        assert number == pytest.approx(expected * scale, abs=0.5001 * 10**-digits, rel=1e-2), (pointer, shown)


def visible(text: str) -> str:
    """Control characters as their pictures."""
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), text)


def assert_cells_are_labelled(html: str) -> None:
    """Narrow screens show the head of its column beside each cell."""
    for table in re.findall(r'<table class="rows">.*?</table>', html, re.DOTALL):
        heads = re.findall(r'<th scope="col">(.*?)</th>', table)
        for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)[1:]:
            assert re.findall(r'<td data-label="(.*?)"', row) == heads[1:] and row.count("<td") == len(heads) - 1, row


def assert_no_labels_overlap(html: str) -> None:
    """Texts of one line in a chart stand apart: a letter is 6.2 wide at this size, as DejaVu Sans's digits are."""
    for chart in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        lines: dict[str, list[tuple[float, float]]] = {}
        for x, y, anchor, text in re.findall(
            r'<text[^>]* x="([-\d.]+)" y="([-\d.]+)" text-anchor="(\w+)">([^<]*)</text>', chart
        ):
            if anchor == "middle":
                lines.setdefault(y, []).append((float(x), 3.1 * len(text)))
        for texts in lines.values():
            for (x, half), (next_x, next_half) in pairwise(sorted(texts)):
                assert x + half <= next_x - next_half, chart


def assert_needs_nothing_else(html: str) -> None:
    assert_no_labels_overlap(html)
    assert_cells_are_labelled(html)
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base", "use", "image"}
        assert not {"href", "src", "srcset", "xlink:href", "action", "background"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in attributes.get("style", "")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
