"""Connections: as many as the process has room for, and none for a client that says nothing."""

import asyncio
import json
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

from commands.serving.errors import HTTPError

MAX_CONNECTIONS = 1000
FIRST_REQUEST_S = 30
BACKLOG = 512
"""Connections that are accepted in one go, before it is looked how many there are."""
_REFUSED_S = 1
_MAX_REFUSED = 1000
_NUM_FILES = 4096


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which refuses connections beyond a number, and ends those on which no request comes."""

    num_refused = 0
    """Connections that were refused and are not closed yet, of all servers of the process."""
    _is_refused = False
    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._silence = self.loop.call_later(FIRST_REQUEST_S, self._end_if_silent)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._is_refused = True
        self.transport = transport
        BoundedProtocol.num_refused += 1
        transport.write(_refusal())
        if BoundedProtocol.num_refused > _MAX_REFUSED:  # or the process would have no files left
            transport.close()
        else:
            # Not closed yet: if what the client sends came after that, it would lose what was said.
            self.loop.call_later(_REFUSED_S, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self.transport.close()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._silence is not None:  # it would keep all that belongs to the connection until its time has come
            self._silence.cancel()
        if self._is_refused:
            BoundedProtocol.num_refused -= 1
        else:
            super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        # It has a cycle from its first request on; then uvicorn's own bounds hold.
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def _refusal() -> bytes:
    error = HTTPError(503, f"more than {MAX_CONNECTIONS} connections are open", code="too_many_connections")
    body = json.dumps(error.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def allow_files() -> None:
    """Room for the connections among the process's open files, as far as it may be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
