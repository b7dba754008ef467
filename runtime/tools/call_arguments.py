"""Arguments of calls as JSON, of the notations that formats write them in: JSON in a text, Python's, bare values."""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from runtime.tools.call_formats import Tool

SPACE = " \t\r\n"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Malformed(Exception):
    """Text after an opening tag that is no call."""


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def unquoted(text: str) -> str:
    """The object that a JSON text holds the JSON of; the text itself where it holds none."""
    inner = str(loaded(text))
    try:
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


def loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that is written as text, as JSON of one of `types`; a text where it is none of them."""
    text = text.strip()
    if text in ("True", "False", "None"):
        text = json.dumps(ast.literal_eval(text))
    with_text = json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return with_text
    if types and _type_of(value) not in types and not (_type_of(value) == "integer" and "number" in types):
        return with_text
    return json.dumps(value, ensure_ascii=False) if _is_finite(value) else with_text


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or value - value == 0


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def python_calls(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments in `[name(key=value), …]`; arguments without a key are those of the schema, in order."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        found = []
        for call in calls:
            if not isinstance(call, ast.Call):
                raise Malformed
            with suppress(ValueError, TypeError, Malformed):  # the others may be calls
                found.append(_python_call(call, tools))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
    if not found:
        raise Malformed
    return found


def _python_call(call: ast.Call, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    name = ast.unparse(call.func)
    keys = list(tools[name].properties()) if name in tools else []
    if name not in tools or len(call.args) > len(keys) or any(one.arg is None for one in call.keywords):
        raise Malformed
    arguments = {key: _python_value(one) for key, one in zip(keys, call.args, strict=False)}
    arguments |= {str(one.arg): _python_value(one.value) for one in call.keywords}
    json.dumps(arguments, allow_nan=False)
    return name, arguments


def _python_value(node: ast.AST) -> Any:
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_python_value(one) for one in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_python_value(key)): _python_value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    return ast.literal_eval(node)


class BareValues:
    """Reads `{key:value,…}` with texts between marks of their own."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def value(self) -> dict[str, Any]:
        try:
            found = self._value()
        except (IndexError, RecursionError):
            raise Malformed from None
        if not isinstance(found, dict):
            raise Malformed
        return found

    def _value(self) -> Any:
        self._skip()
        if self._takes("{"):
            found: dict[str, Any] = {}
            while not self._takes("}"):
                key = str(self._value()) if self._is_next(self._quote) else self._until(":")
                if not self._takes(":"):
                    raise Malformed
                found[key.strip()] = self._value()
                self._skip()
                self._takes(",")
                self._skip()
            return found
        if self._takes("["):
            elements = []
            while not self._takes("]"):
                elements.append(self._value())
                self._skip()
                self._takes(",")
                self._skip()
            return elements
        if self._takes(self._quote):
            text = self._until(self._quote)
            self._takes(self._quote)
            return text
        word = self._until(",}]").strip()
        if not word:
            raise Malformed
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return word

    def _skip(self) -> None:
        while self._text[self._at] in SPACE:
            self._at += 1

    def _is_next(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _takes(self, text: str) -> bool:
        is_next = self._is_next(text)
        self._at += len(text) * is_next
        return is_next

    def _until(self, marks: str) -> str:
        """Text before a mark, or before any of several characters."""
        ends = [marks] if marks == self._quote else list(marks)
        found = [i for one in ends if (i := self._text.find(one, self._at)) >= 0]
        if not found:
            raise Malformed
        start, self._at = self._at, min(found)
        return self._text[start : self._at]
