"""Errors as clients read them: a status and `{"error": {message, type, param, code}}`, or Anthropic's form."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from runtime.core.form_prover import FormsBusy
from runtime.loop.serving import ClientFull, QueueFull, StepFailed, Stopping
from runtime.util.errors import SpecDecError

RETRY_AFTER_S = 1
_MAX_SHOWN = 80
"""Number of characters of a wrong value that a message shows."""
_MAX_MESSAGE = 1000
"""Number of characters of a message: long texts from a client are not sent back in full."""
_CODES = dict.fromkeys(
    ("prompt_too_long", "request_too_long", "prompt_past_positions", "request_past_positions"),
    "context_length_exceeded",
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_BUSY: dict[type[SpecDecError], tuple[int, str]] = {
    QueueFull: (503, "queue_full"),
    FormsBusy: (503, "forms_busy"),
    ClientFull: (429, "too_many_requests"),
    Stopping: (503, "shutting_down"),
}
"""Statuses and codes of errors after which a client may ask again."""

ANTHROPIC_PATH = "/v1/messages"
"""Beginning of the paths on which errors have Anthropic's form."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HTTPError(Exception):
    """Error response to a request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE - 3]}..."
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        is_too_long = self.code == "context_length_exceeded"
        message = f"prompt is too long: {self.message}" if is_too_long else self.message  # what clients look for
        has_details = self.code == "unsupported" and self.param == "thread"
        details = {"details": {"error_code": "thread_unsupported_request"}} if has_details else {}  # so clients go on
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def body_at(self, path: str) -> dict[str, Any]:
        """The body of the error in the form of the protocol that the path belongs to."""
        return self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


@dataclass(frozen=True)
class FieldNames:
    """Names of fields as the client wrote them, for errors: `guided_regex` in place of our `regex`, for example."""

    params: Mapping[str, str] = field(default_factory=dict)
    """The client's names by the request's field names: `regex` may have come as `guided_regex`."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """The client's names by patterns of a chat's field names, if the client speaks another protocol."""

    def told(self, error: HTTPError | SpecDecError) -> HTTPError:
        """The error with the client's field names in its message."""
        found = error if isinstance(error, HTTPError) else self._of_own(error)
        message, param = found.message, found.param
        for pattern, name in self.patterns.items():
            message = re.sub(rf"(?<![\w.]){pattern}(?!\w)", name, message)
            param = re.sub(rf"^{pattern}$", name, param) if param is not None else None
        return HTTPError(found.status, message, param=param, code=found.code)

    def _of_own(self, error: SpecDecError) -> HTTPError:
        name = error.values.get("field")
        return as_http_error(error, self.params.get(name, name) if isinstance(name, str) else None)


@contextmanager
def fields_named(names: FieldNames) -> Iterator[None]:
    """Within the block, turn an error about a field into an HTTPError with the client's name for that field."""
    try:
        yield
    except (HTTPError, SpecDecError) as error:
        raise names.told(error) from None


def as_http_error(error: SpecDecError, param: str | None = None) -> HTTPError:
    """The HTTP error for one of specdec's own errors."""
    if isinstance(error, StepFailed):
        return internal_error()
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    status, code = _BUSY.get(type(error), (400, _CODES.get(error.code or "")))
    return HTTPError(status, message, param=param, code=code)


def internal_error() -> HTTPError:
    """The error for a failure of the server's own, which is told in its log alone."""
    return HTTPError(500, "the server failed to answer; its log says why", code="internal_error")


def of_validation(error: ValidationError, body: dict[str, Any]) -> HTTPError:
    """HTTP error for the first invalid field, with its path and the reason.

    If a field may have several forms, pydantic reports an error for each. The error that is told is of the form that
    the client probably meant: its type is right and its value wrong, or the error is deeper inside.
    """
    errors = error.errors(include_url=False)
    param = str(errors[0]["loc"][0])
    of_field = [one for one in errors if str(one["loc"][0]) == param]
    meant = max(of_field, key=lambda one: (not _is_of_another_kind(one), len(_path(one, body))))
    path = _path(meant, body)
    same = [one for one in of_field if _path(one, body) == path and _is_of_another_kind(one)]
    reasons = dict.fromkeys(map(_reason, same if meant in same else [meant]))
    given = meant["input"]["type"] if meant["type"] == "item_type" else meant["input"]
    value = f": {given!r}" if isinstance(given, str | int | float) and len(repr(given)) <= _MAX_SHOWN else ""
    why = " or ".join(reasons).replace(" or must be ", " or ")
    return HTTPError(400, f"{'.'.join(path)}: {why}{value}", param=param, code="invalid_value")


_REASONS = {
    "none_required": "it is not supported",
    "missing": "it is missing",
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "must be an object"),
    **dict.fromkeys(("string_type", "string_unicode"), "must be a text"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "has characters that are not taken; it must match {pattern}",
    "too_short": "must have at least {min_length} entries, not {actual_length}",
    "too_long": "must have at most {max_length} entries, not {actual_length}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("literal_error", "enum"), "must be {expected}"),  # such as `'low' or 'high'`
}
"""Reasons in plain words, by pydantic's types of errors; values are filled in for names in braces."""


def _reason(error: ErrorDetails) -> str:
    reason = _REASONS.get(error["type"])
    if reason is None:
        return error["msg"].removeprefix("Value error, ")
    told = reason.format(**error.get("ctx", {}))
    return told.replace(" 1 characters", " 1 character").replace(" 1 entries", " 1 entry")


def _is_of_another_kind(error: ErrorDetails) -> bool:
    return error["type"].endswith(("_type", "_parsing"))


def _path(error: ErrorDetails, body: Any) -> list[str]:
    """Path of a field from its keys and list indices in the body. pydantic's own names of a field's forms, which stand
    between them, are left out.
    """
    path = []
    for part in error["loc"]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]  # type: ignore[index]
            path.append(str(part))
    return [*path, str(error["loc"][-1])] if error["type"] == "missing" else path
