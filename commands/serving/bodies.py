"""Request bodies: read as far as they may be long, and as fast as they have to come."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from commands.serving.errors import HTTPError
from commands.serving.group import ClientGone

MAX_BODY_BYTES = 4 << 20
_READ_TIMEOUT_S = 30


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


def _too_long() -> HTTPError:
    return HTTPError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_long")
