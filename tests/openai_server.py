"""A small HTTP server on 127.0.0.1 that streams what a test tells it to, when it tells it to, and notes when it did.

It stands in for servers with OpenAI's interface, of which any may send anything: what it sends is the test's script.
Its clock is the clients' (`time.perf_counter` of the same process).
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from waiting import HANG_S

Piece = tuple[float, bytes]
"""Seconds to wait, and what is sent then."""
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """A request, and when each piece of its answer was sent. `is_broken_off`: by the client, before the end."""

    method: str
    path: str
    headers: dict[str, str]
    text: str
    sent_s: list[float] = field(default_factory=list)
    is_broken_off: bool = False

    @property
    def body(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.text)
        return data


@dataclass(frozen=True)
class Reply:
    """An answer, in pieces."""

    pieces: Sequence[Piece]
    status: int = 200
    content_type: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = ()


Script = Callable[[Asked], Reply]


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def as_json(data: object, status: int = 200) -> Reply:
    return Reply([(0.0, json.dumps(data).encode())], status, "application/json")


def failure(status: int, message: str) -> Reply:
    """Error in OpenAI's form."""
    return as_json(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}, status
    )


class Server:
    """Answers by `script`; `asked` has every request in the order of arrival."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []
        self.port = 0
        self.stop: Callable[[], object]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generations(self) -> list[Asked]:
        """The requests that were for text."""
        return [one for one in self.asked if one.method == "POST"]

    async def serve(self, is_ready: threading.Event) -> None:
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        self.stop = lambda: loop.call_soon_threadsafe(is_over.set)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        is_ready.set()
        await is_over.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                asked = await _read(reader)
                self.asked.append(asked)
                await self._answer(asked, self._script(asked), writer)
        writer.close()

    async def _answer(self, asked: Asked, reply: Reply, writer: asyncio.StreamWriter) -> None:
        headers = {"content-type": reply.content_type, "transfer-encoding": "chunked", **dict(reply.headers)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} Said\r\n{head}\r\n".encode())
        try:
            for wait_s, data in reply.pieces:
                if wait_s:
                    await asyncio.sleep(wait_s)
                asked.sent_s.append(time.perf_counter())
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
                asked.is_broken_off = writer.is_closing()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            asked.is_broken_off = True
            raise


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    text = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, text.decode())


@contextmanager
def running(script: Script) -> Iterator[Server]:
    """A server on a thread of its own, until the end of the block."""
    server, is_ready = Server(script), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(is_ready)))
    thread.start()
    assert is_ready.wait(HANG_S)
    try:
        yield server
    finally:
        server.stop()
        thread.join(HANG_S)
        assert not thread.is_alive()
