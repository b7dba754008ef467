"""Jinja's sandbox with limits on single operations: a chat template is a program that comes with a model.

The server ends a template's loop between two operations (`ended_after` in its conversations), but cannot end a single
operation: `9 ** (9 ** 9)`, `"a" * 10 ** 10` and `"%9999999999d" % 1` would hold the interpreter, or take all memory.
Joining texts (`~`, `join`, `replace`) is not limited: a template that doubles a text again and again is ended by time.
"""

import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from threading import Lock
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_BITS = 1 << 16
"""Most bits of a whole number."""
_MOST_LENGTH = 1 << 24
"""Most elements or characters in the result of `*` and `+`."""
_MOST_WIDTH = 100_000
"""Largest width or count for filters and methods; it is jinja's own limit of `range`."""
_SIZED = ("batch", "center", "indent", "round", "slice", "tojson", "wordwrap")
_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{6,}|\d*\.(?:\*|\d{6,}))")
"""A conversion of `%` with a width or a precision of six digits or more, or with a width that is an argument."""
_WIDE_FIELD = re.compile(r"\{[^}]*(?:\d{6,}|\{)")
_compiling = Lock()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with every operation limited. An operation that would take too long
    raises SecurityError when it is reached.
    """

    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bound_filters()

    def bound_filters(self) -> None:
        """Limit the filters that take a width or a count."""
        for name in _SIZED:
            if not hasattr(self.filters[name], "__wrapped__"):
                self.filters[name] = _bounded(self.filters[name])
        self.filters["format"] = _format

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > 1:
            raise SecurityError(f"the result of `{operator}` is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # jinja wraps `format`
        if isinstance(owner, str | bytes | int):  # a method of a text or a number
            if not called.__name__.startswith("format"):
                _check_widths(*args, *named.values())
            elif isinstance(owner, str) and _WIDE_FIELD.search(owner):
                raise SecurityError("a field of `format` is too wide")
        return super().call(context, called, *args, **named)


def compile_bounded(text: str) -> None:
    """Have transformers compile a template in this environment and keep it. jinja's error for a broken template."""
    utils: Any = import_module("transformers.utils.chat_template_utils")
    with _compiling:
        before = utils.ImmutableSandboxedEnvironment
        utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        try:
            environment = utils._compile_jinja_template(text).environment  # which is cached, by the text
            if isinstance(environment, BoundedEnvironment):
                environment.bound_filters()  # transformers has put its own in the place of some
        finally:
            utils.ImmutableSandboxedEnvironment = before


def _size(operator: str, left: Any, right: Any) -> Any:
    """Size of an operation's result, divided by the allowed size."""
    is_number = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        return left.bit_length() * right / _MOST_BITS if is_number and abs(left) > 1 else 0
    if operator == "*":
        if is_number:
            return (left.bit_length() + right.bit_length()) / _MOST_BITS
        count, text = (left, right) if isinstance(left, int) else (right, left)
        return count * len(text) / _MOST_LENGTH if isinstance(count, int) and hasattr(text, "__len__") else 0
    if operator == "%":
        return 2 if isinstance(left, str | bytes) and _is_wide(left) else 0
    has_length = hasattr(left, "__len__") and hasattr(right, "__len__")
    return (len(left) + len(right)) / _MOST_LENGTH if has_length else 0


def _is_wide(text: str | bytes) -> bool:
    return _WIDE.search(text if isinstance(text, str) else text.decode("latin-1")) is not None


def _format(value: str, *args: Any, **named: Any) -> str:
    """jinja's filter `format`, with its widths checked."""
    if _is_wide(str(value)):
        raise SecurityError("a field of `format` is too wide")
    return do_format(value, *args, **named)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses widths above `_MOST_WIDTH`; it keeps the attributes that jinja marks filters with."""

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        _check_widths(*args[1:], *named.values())
        return function(*args, **named)

    return bounded


def _check_widths(*values: Any) -> None:
    """SecurityError if a number is too large to be a width."""
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_WIDTH:
            raise SecurityError(f"a number is too large for a width or a count: {value.bit_length()} bits")
