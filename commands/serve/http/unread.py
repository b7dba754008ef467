"""Refusals that reach a client which is still sending.

If a connection is closed while bytes of the client are unread, the system resets it, and the client may lose the answer
that it was sent.
"""

import asyncio
from contextlib import suppress
from typing import Any

_MOST_BYTES, _MOST_S = 64 << 20, 2.0
"""Limits on a body that is read and dropped before the answer: bytes and seconds."""


class ReadsBodies:
    """An application that answers once the client has sent the whole body, which is read and dropped if the inner
    application did not read it. It waits for at most 64 MB and 2 seconds of a body.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        # A client that sends `Expect: 100-continue` waits to be asked for its body.
        is_sent = scope["type"] != "http" or not _has_body(headers) or b"expect" in headers

        async def note_and_receive() -> Any:
            nonlocal is_sent
            message = await receive()
            is_sent = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def read_and_send(message: Any) -> None:
            if not is_sent and message["type"] == "http.response.start" and message["status"] != 408:
                num_bytes = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(_MOST_S):
                        while not is_sent and num_bytes < _MOST_BYTES:
                            num_bytes += len((await note_and_receive()).get("body", b""))
            await send(message)

        await self._app(scope, note_and_receive, read_and_send)


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
