"""Grammars in llguidance's notation, and the start of a text in a grammar. Imports neither torch nor numpy.

The process that proves a grammar (`runtime.core.form_prover`) and the process that then uses it construct the same
start, within the same limits.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a request without a grammar does not wait for it
    from llguidance import LLMatcher, LLTokenizer

_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Style of JSON, that of Python's `json.dumps`, so that keys and punctuation are known in advance. A schema's
`x-guidance` changes it.
"""
MOST_FORCED_BYTES = 1 << 14
"""Most bytes of text with only one continuation; grammars that never end, or are slow at every step, have more."""
_MOST_LEXER_FUEL = 100_000
"""Limit on llguidance's measure of a grammar's size, enough for 130 KB of a schema's names. With llguidance's own limit
of a million, a step can take a second, for which all other requests wait.
"""
_MOST_ITEMS_IN_ROW, _MOST_ITEMS = 5_000, 250_000
"""Limits on the items of Earley's parser: after one byte, and in a step, which then takes 12 ms. An object of 1,000
optional values has 4,000 items after its brace.
"""
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("const", "enum", "default", "examples")
"""Keywords of a JSON schema that hold schemas by name, and keywords that hold plain values."""
TOO_DEEP = "it is nested too deeply"
ENDLESS = "it never ends, or only after a very long text"
_MOST_REASON = 200


def written(kind: str, text: str) -> str:
    """The text of a `Grammar` in llguidance's own syntax; `kind` is the grammar's, such as `json_schema` or `regex`.
    Raises whatever the parsers raise for a text that is no such grammar.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match kind:
        case "json_schema":
            check_schema(json.loads(text))
            return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
            # A terminal: a rule would have an item for each choice.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(_with_characters(text)))
        case "lark":
            return LLMatcher.grammar_from_lark(text)
    raise ValueError(f"no kind of a form: {kind}")


def start_of(vocabulary: "LLTokenizer", form: str) -> "LLMatcher":
    """The start of a text in a grammar that `written` gives, with its first mask; ValueError for an invalid grammar.
    Its time and memory have no bound: multiples of 99999989 take 14 GB.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_MOST_LEXER_FUEL,
        max_items_in_row=_MOST_ITEMS_IN_ROW,
        step_max_items=_MOST_ITEMS,
        verbose_errors=False,
    )
    start = LLMatcher(vocabulary, form, log_level=0, limits=limits)
    if start.is_error():
        raise ValueError(start.get_error())
    start.compute_bitmask()  # before forced bytes, which would be computed while other threads wait
    if start.is_error():
        raise ValueError("no text matches it")
    return start


def check_forced_text(start: "LLMatcher") -> None:
    """ValueError if a text in the grammar begins with more forced bytes than any answer has."""
    if len(start.compute_ff_bytes()) > MOST_FORCED_BYTES:
        raise ValueError(ENDLESS)
    if start.is_error():
        raise ValueError(start.get_error())


def reason(text: str) -> str:
    """A parser's error as a reason in one line: the last line of an error of `regex`, the first line of others."""
    if "recursion" in text and "exceeded" in text:  # as Python's and Rust's parsers of JSON say it
        return TOO_DEEP
    found = re.search("^error: (.+)$", text, re.MULTILINE)
    line = found[1] if found else text.replace("<non-verbose/>", "").strip().partition("\n")[0]
    return line if len(line) <= _MOST_REASON else f"{line[:_MOST_REASON]}..."


def _with_characters(text: str) -> str:
    r"""A grammar in GBNF in which characters written by number, such as `\x41`, are replaced by the characters.
    llguidance's converter reads the numbers wrongly.
    """
    if "::=" not in text:
        return text

    def character(found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3] or "0", 16)
        return chr(code) if 0x7F < code < 0x110000 and not 0xD800 <= code < 0xE000 else found[0]

    return re.sub(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|.)", character, text)


def check_schema(schema: Any) -> None:
    """ValueError for a JSON schema that llguidance accepts and should not. One fault is a `multipleOf` of 0 or less.
    The other is an `$id` beside a `$ref` below the root: from draft 2019-09 on, which llguidance assumes, the `$ref` is
    relative to that `$id`, and in older drafts the `$id` means nothing.
    """
    is_new = isinstance(schema, dict) and "json-schema.org/draft/20" in str(schema.get("$schema"))
    for part in parts_of(schema):
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple <= 0:
            raise ValueError(f"multipleOf must be more than 0: {multiple}")
        has_both = isinstance(part.get("$ref"), str) and isinstance(part.get("$id"), str)
        if has_both and part is not schema and not is_new:
            raise ValueError(
                f"an $id beside a $ref ({part['$ref']}), which JSON Schema's drafts read differently; name a draft of "
                "2019-09 or later in $schema"
            )


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas inside it, without values and without objects whose keys are names."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            for key, part in value.items():
                if key in _OF_NAMES and isinstance(part, dict):
                    left += part.values()
                elif key not in _OF_VALUES:
                    left.append(part)
        elif isinstance(value, list):
            left += value
