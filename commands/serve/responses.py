"""Answers as HTTP responses: one JSON document, or server-sent events as the answers grow."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response

from commands.serve.group import ClientGone, Group, Receive, watched
from commands.serve.http_errors import HTTPError
from commands.serve.replies import Chunks, PieceStream
from runtime.serving.loop import ServingLoop

Send = Callable[[dict[str, Any]], Any]
_DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERROR_TIMEOUT_S = 5


@dataclass(frozen=True)
class Waiting:
    """Context of waiting for an answer: its loop, the time limit, and the client's disconnection."""

    loop: ServingLoop
    receive: Receive
    timeout_s: float

    def too_long(self) -> HTTPError:
        return HTTPError(504, f"the answer took longer than {self.timeout_s:g} s", code="timeout")


async def whole(group: Group, waiting: Waiting) -> None:
    """Until all answers are there; HTTPError if one cannot be, ClientGone if the client has disconnected."""
    async with watched(group, waiting.loop, waiting.receive):
        try:
            async with asyncio.timeout(waiting.timeout_s):
                while not group.is_over:
                    await group.step()
                group.raise_error()
        except TimeoutError:
            raise waiting.too_long() from None


class EventStream(Response):
    """Server-sent events: each step's text as soon as it is there."""

    media_type = "text/event-stream"

    def __init__(self, group: Group, streams: list[PieceStream], chunks: Chunks, waiting: Waiting) -> None:
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._group, self._streams, self._chunks, self._waiting = group, streams, chunks, waiting

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with watched(self._group, self._waiting.loop, receive):
            # There is no response to a client that has disconnected, however that was noticed.
            with suppress(ClientGone, OSError):
                try:
                    async with asyncio.timeout(self._waiting.timeout_s):
                        await self._send_pieces(send)
                except TimeoutError:
                    async with asyncio.timeout(_ERROR_TIMEOUT_S):
                        await _send(send, _event(self._waiting.too_long().body))
                except HTTPError as error:
                    await _send(send, _event(error.body))
                await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_pieces(self, send: Send) -> None:
        for index in range(len(self._streams)):
            await _send(send, b"".join(map(_event, self._chunks.first(index))))
        while not self._group.is_over:
            await self._group.step()
            await _send(send, b"".join(self._new_events()))
            self._group.raise_error()
        await _send(send, b"".join([*self._new_events(), *map(_event, self._chunks.last())]))

    def _new_events(self) -> Iterator[bytes]:
        for index, stream in enumerate(self._streams):
            piece = stream.next()
            if piece is not None and (piece.text or piece.logprobs or piece.tokens or piece.is_last):
                yield from map(_event, self._chunks.of_piece(index, piece))


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
