"""Request bodies: read as far as they may be long, parsed as deep as they may be, and validated."""

import asyncio
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from commands.serving.errors import HTTPError, of_validation
from commands.serving.group import ClientGone
from commands.serving.schema import ChatRequest, Lenient, refused_field

MAX_BODY_BYTES = 4 << 20
_READ_TIMEOUT_S = 30
Body = TypeVar("Body", bound=Lenient)


async def read_body(request: Request) -> bytes:
    """The whole body; HTTPError if it is too long or too slow, ClientGone if its sender went away."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_long()
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise HTTPError(408, f"the body did not come within {_READ_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def parse_body(body: bytes, model: type[Body]) -> Body:
    """The body, whatever its Content-Type says; HTTPError for what is no JSON, or not what the model says."""
    try:
        # It knows a depth at which it stops, and neither NaN nor half of a surrogate pair.
        value: Any = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HTTPError(400, f"the body is no JSON object: {type(value).__name__}", code="invalid_json")
    refused = refused_field(value, is_chat=model is ChatRequest)
    if refused is not None:
        raise HTTPError(400, f"this server does not support `{refused}`", param=refused, code="unsupported")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None


def _too_long() -> HTTPError:
    return HTTPError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_long")
