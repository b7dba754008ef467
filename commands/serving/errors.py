"""Errors as OpenAI's clients read them: a status, and `{"error": {message, type, param, code}}`."""

from typing import Any

from pydantic import ValidationError

from runtime.errors import SpecDecError
from runtime.serving.loop import QueueFull, StepFailed, Stopping

RETRY_AFTER_S = 1
_CODES = {"prompt_too_long": "context_length_exceeded", "request_too_long": "context_length_exceeded"}
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


_LONGEST = 1000
"""Characters of a message: what a client sent is not sent back to it at any length."""


class HTTPError(Exception):
    """What a request is answered with in the place of an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}..."
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def as_http_error(error: SpecDecError, param: str | None = None) -> HTTPError:
    """What the server's own errors are to a client."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, QueueFull):
        return HTTPError(503, message, code="queue_full")
    if isinstance(error, Stopping):
        return HTTPError(503, message, code="shutting_down")
    if isinstance(error, StepFailed):
        return HTTPError(500, "the server failed to answer; its log says why", code="internal_error")
    return HTTPError(400, message, param=param, code=_CODES.get(error.fact or ""))


def of_validation(error: ValidationError) -> HTTPError:
    """The first thing that is wrong with a body, by the field's name."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    names = [str(part) for part in first["loc"] if not (isinstance(part, str) and part[:1].isupper())]
    where = ".".join(name for name in names if not name.startswith(("list[", "str", "function-")))
    param = str(first["loc"][0]) if first["loc"] else None
    return HTTPError(400, f"{where or 'body'}: {first['msg']}", param=param, code="invalid_value")
