"""The answers to an HTTP request: its handler waits for them on the event loop. They are sent as one JSON document, or
as server-sent events while they grow.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi.responses import Response

from commands.serve.errors import FieldNames, HTTPError, fields_named
from commands.serve.protocol.replies import Chunks, PieceStream
from runtime.loop.serving import RequestHandle, ServeRequest, ServingLoop

Receive = Callable[[], Any]


@dataclass(eq=False)
class Group:
    """Answers that are being generated for an HTTP request. The loop's thread sets `changed` when an answer has ended
    and, if the group is streamed, after each step. Without that difference, 64 clients that wait for whole answers
    would wake the event loop 64 times a step.
    """

    answers: list[RequestHandle] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_streamed: bool = False
    is_client_gone: bool = False
    ended_by: HTTPError | None = None
    """Reason to stop waiting for the group before its answers have finished."""
    names: FieldNames = field(default_factory=FieldNames)

    @property
    def is_over(self) -> bool:
        return all(answer.progress.is_over for answer in self.answers)

    def raise_error(self) -> None:
        """HTTPError of the first answer that failed."""
        for answer in self.answers:
            if answer.progress.error is not None:
                raise self.names.told(answer.progress.error)

    async def step(self) -> None:
        """Wait until an answer has grown or ended. ClientGone if the client has disconnected; the HTTPError of
        `end`, if the group was ended.
        """
        await self.changed.wait()
        self.changed.clear()
        if self.is_client_gone:
            raise ClientGone
        if self.ended_by is not None:
            raise self.ended_by

    def end(self, error: HTTPError) -> None:
        """Have the handler answer with the error at once, without waiting for the running step."""
        self.ended_by = error
        self.changed.set()


class ClientGone(Exception):
    """The client has disconnected."""


class Clock:
    """Wakes the handlers that wait for a step: called in the loop's thread, once for each step."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_progress: list[Callable[[RequestHandle], None]] = []

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, answers: list[RequestHandle]) -> None:
        for answer in answers:
            for listener in self.on_progress:
                listener(answer)
        groups: set[Group] = set()
        for answer in answers:
            owner = answer.owner
            if isinstance(owner, Group) and (owner.is_streamed or answer.progress.is_over):
                groups.add(owner)
        if groups and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, groups)


def _wake(groups: Iterable[Group]) -> None:
    for group in groups:
        group.changed.set()


def submit(loop: ServingLoop, asked: Seq[ServeRequest], client: bytes, names: FieldNames) -> Group:
    """Submit a client's requests as one group; HTTPError if the loop rejects them."""
    group = Group(names=names)
    with fields_named(names):
        group.answers = loop.submit(asked, group, client)
    return group


def unfinished_groups(loop: ServingLoop) -> set[Group]:
    return {answer.owner for answer in loop.unfinished() if isinstance(answer.owner, Group)}


@asynccontextmanager
async def watched(group: Group, loop: ServingLoop, receive: Receive) -> AsyncIterator[None]:
    """Watch for the client's disconnection in the block, and cancel unfinished answers afterwards."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.is_client_gone = True
        group.changed.set()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        loop.cancel(group.answers)


Send = Callable[[dict[str, Any]], Any]
T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERROR_TIMEOUT_S = 5
_PIECE = 1 << 16
"""Bytes that are sent in one piece; between two pieces other connections are served."""
_MAX_HELD = 256 << 20
"""Bytes of answers, of all clients together, that may wait to be read."""
_LONG_OUTPUT = 1024
"""Tokens of an answer from which on it is written in a thread: written on the event loop it would delay other clients.
"""
_FEW, _OWN_DEPTH = 64, 4
"""Number of elements of a long list that are written in one call, and the depth down to which elements are written one
by one: document, choices, choice, log-probabilities.
"""


@dataclass(frozen=True)
class Waiting:
    """Context of waiting for an answer: the loop, the time limit, and a signal that the client has disconnected."""

    loop: ServingLoop
    receive: Receive
    timeout_s: float
    writer: Executor
    """A pool of one thread: long answers are written beside the event loop, one after the other."""

    async def aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.writer, work)

    def too_long(self) -> HTTPError:
        return HTTPError(504, f"the answer took longer than {self.timeout_s:g} s", code="timeout")


async def whole(group: Group, waiting: Waiting) -> None:
    """Wait until all answers are there. HTTPError if one fails, ClientGone if the client has disconnected."""
    async with watched(group, waiting.loop, waiting.receive):
        try:
            async with asyncio.timeout(waiting.timeout_s):
                while not group.is_over:
                    await group.step()
                group.raise_error()
        except TimeoutError:
            raise waiting.too_long() from None


class Document(Response):
    """A JSON document that is sent in pieces, as fast as the client reads."""

    media_type = "application/json"
    _num_held = 0
    """Bytes of all documents that are being sent."""

    def __init__(self, body: bytes) -> None:
        """HTTPError if clients have too many unread bytes already."""
        if Document._num_held + len(body) > _MAX_HELD:
            raise HTTPError(503, "clients have not read their answers: too many bytes wait", code="answers_unread")
        super().__init__(body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        Document._num_held += len(self.body)
        try:
            for start in range(0, len(self.body), _PIECE):
                await _send(send, bytes(self.body[start : start + _PIECE]))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            Document._num_held -= len(self.body)


async def document(group: Group, reply: Callable[[], dict[str, Any]], waiting: Waiting, *, is_long: bool) -> Document:
    """The response with finished answers. A long document is written in a thread."""

    def write() -> bytes:
        return encode(reply())

    is_long |= sum(answer.progress.num_tokens for answer in group.answers) > _LONG_OUTPUT
    return Document(await waiting.aside(write) if is_long else write())


class EventStream(Response):
    """Server-sent events: each step's text as soon as it is there."""

    media_type = "text/event-stream"

    def __init__(
        self, group: Group, streams: list[PieceStream], chunks: Chunks, waiting: Waiting, *, is_long: bool
    ) -> None:
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._group, self._streams, self._chunks, self._waiting = group, streams, chunks, waiting
        group.is_streamed = True
        group.changed.set()  # earlier steps did not: the group was not streamed yet
        self._is_long = is_long

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
                        await _send(send, self._error(self._waiting.too_long()))
                except HTTPError as error:
                    await _send(send, self._error(error))
                done = b"" if self._chunks.has_names else _DONE
                await send({"type": "http.response.body", "body": done, "more_body": False})

    def _error(self, error: HTTPError) -> bytes:
        return b"".join(map(self._event, self._chunks.error(error)))

    def _event(self, data: dict[str, Any]) -> bytes:
        name = f"event: {data['type']}\n".encode() if self._chunks.has_names else b""
        return name + b"data: " + encode(data) + b"\n\n"

    async def _send_pieces(self, send: Send) -> None:
        for index in range(len(self._streams)):
            await self._send_events(send, map(self._event, self._chunks.first(index)))
        while not self._group.is_over:
            await self._group.step()
            await self._send_events(send, self._new_events())
            self._group.raise_error()
        await self._send_events(send, self._new_events())
        self._group.raise_error()  # of answers that were over before their stream began
        await self._send_events(send, map(self._event, self._chunks.last()))

    async def _send_events(self, send: Send, events: Iterator[bytes]) -> None:
        take = partial(_piece_of, events)
        while piece := (await self._waiting.aside(take) if self._is_long else take()):
            await _send(send, piece)

    def _new_events(self) -> Iterator[bytes]:
        for index, stream in enumerate(self._streams):
            piece = stream.next()
            if piece is not None and piece.tells_something:
                yield from map(self._event, self._chunks.of_piece(index, piece))


def _piece_of(events: Iterator[bytes]) -> bytes:
    """The next events, joined to 64 KB or more; at the end the rest, and then an empty text."""
    taken, size = [], 0
    for event in events:
        taken.append(event)
        size += len(event)
        if size >= _PIECE:
            break
    return b"".join(taken)


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if len(body) >= _PIECE:
            await asyncio.sleep(0)  # a body that fits the buffer would give others no turn


def encode(document: dict[str, Any]) -> bytes:
    """JSON in UTF-8, written answer by answer, and long lists in parts: a single call of `json.dumps` would block all
    other threads.
    """
    return b"".join(part.encode() for part in _parts(document, 0))


def _parts(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and depth < _OWN_DEPTH:
        opening = "{"
        for key, one in value.items():
            yield f"{opening}{_dumps(key)}:"
            yield from _parts(one, depth + 1)
            opening = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and (depth < _OWN_DEPTH or len(value) > _FEW):
        parts = (_parts(one, depth + 1) for one in value) if depth < _OWN_DEPTH else _slices(value)
        opening = "["
        for part in parts:
            yield opening
            yield from part
            opening = ","
        yield "]" if value else "[]"
    else:
        yield _dumps(value)


def _slices(values: list[Any]) -> Iterator[list[str]]:
    for start in range(0, len(values), _FEW):
        yield [_dumps(values[start : start + _FEW])[1:-1]]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
