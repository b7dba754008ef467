"""What all pages have: the document around them, header and footer, tiles, facts, and what the words mean."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.resources import files
from typing import Any

from commands.html.values import escaped


def whole_page(title: str, body: Seq[str]) -> str:
    """The HTML of a page that refers to nothing outside itself."""
    style = files("commands").joinpath("html/report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)} – specdec</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def page_header(command: str, title: str, alert: str = "") -> str:
    return f"<header>\n<p>specdec {escaped(command)}</p>\n<h1>{escaped(title)}</h1>{alert}\n</header>"


def tile(name: str, figure: str, caption: str, style: str = "") -> str:
    return (
        f'<div class="tile card"><dt>{name}</dt><dd class="figure{style}">{figure}</dd>'
        f'<dd class="caption">{caption}</dd></div>\n'
    )


def chart_card(title: str, note: str, content: str) -> str:
    return (
        f'<figure class="card"><figcaption><h3>{title}</h3><p class="note">{note}</p></figcaption>\n'
        f"{content}</figure>\n"
    )


def facts_section(cards: Seq[tuple[str, Mapping[str, Any]]]) -> str:
    """A card for each title with its facts."""
    shown = "".join(
        f'<section class="card"><h3>{name}</h3><dl>{_facts(facts)}</dl></section>\n' for name, facts in cards
    )
    return f'<h2>Settings and versions</h2>\n<div class="facts">\n{shown}</div>'


def _facts(facts: Mapping[str, Any], prefix: str = "") -> str:
    """Keys as in the JSON, an object's with its own in front; nulls are left out."""
    rows = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows.append(_facts(value, f"{prefix}{key}."))
        elif value is not None and value != []:
            shown = (
                value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
            )
            rows.append(f"<dt>{escaped(prefix + key)}</dt><dd>{escaped(shown)}</dd>")
    return "".join(rows)


def definitions_section(definitions: Mapping[str, str]) -> str:
    words = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in definitions.items())
    return (
        '<details class="fold"><summary><h2>What the words mean</h2></summary>\n'
        f'<dl class="words">{words}</dl></details>'
    )


def page_footer(document: Mapping[str, Any]) -> str:
    version = document["specdec_version"] or "(not installed)"
    return (
        f"<footer>Made by specdec {escaped(version)} from the document that "
        f"<code>specdec {escaped(document['command'])} --json</code> prints (schema {document['schema_version']}). "
        "A dash stands where there was nothing to measure.</footer>"
    )
