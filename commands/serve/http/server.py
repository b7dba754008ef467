"""Connections of the server: at most as many as the process has room for, and none that stays open while its client
sends nothing.
"""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from commands.output.output import stderr
from commands.serve.errors import HTTPError, as_http_error
from commands.serve.flags import ServerOptions
from commands.serve.http.bodies import Group, unfinished_groups
from commands.serve.http.framing import StrictConnection
from runtime.loop.serving import ServingLoop, Stopping
from runtime.util.errors import SpecDecError, UsageError

MAX_CONNECTIONS = 1000
REQUEST_S = 35
"""Seconds for sending a request, from the first byte to the last; for the first request of a connection, from when it
is made. A client whose body is too slow gets an error before that (`routes`).
"""
READING_S = 30
"""Seconds in which a client must read some 50 KB of an answer, so that more can be sent."""
BACKLOG = 512
"""Connections that are accepted in one go, before their number is checked."""
_REFUSED_S = 1
_MAX_REFUSED = 1000
_NUM_FILES = 4096


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits on connections, on the time for sending a request, and on the time for reading an
    answer. Requests that a proxy may understand differently are refused (`commands.serve.http.framing`).
    """

    num_refused = 0
    """Connections that were refused and are not closed yet, of all servers of the process."""
    _is_refused = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: StrictConnection = StrictConnection()
        self._request_due, self._reading_due = _Deadline(self), _Deadline(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._request_due.start(REQUEST_S)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._is_refused = True
        self.transport = transport
        BoundedProtocol.num_refused += 1
        message = f"more than {MAX_CONNECTIONS} connections are open"
        transport.write(_response(HTTPError(503, message, code="too_many_connections")))
        if BoundedProtocol.num_refused > _MAX_REFUSED:  # or the process would have no files left
            transport.close()
        else:
            # Not closed yet: if the client sends more after that, the system resets the connection, and the client may
            # lose the answer.
            self.loop.call_later(_REFUSED_S, transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP, and close the connection, since the beginning of a next request is
        not known. In the middle of an answer no error can be sent, and the connection is only closed.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response(HTTPError(400, self.conn.refused_because, code="invalid_http")))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self.transport.close()
            return
        super().data_received(data)
        if self._is_awaiting_request():
            self._request_due.start(REQUEST_S)
        else:
            self._request_due.stop()

    def _is_awaiting_request(self) -> bool:
        """True between the first byte of a request and its last, even if it was answered before its end."""
        if self.transport.is_closing():
            return False
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due.start(READING_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading_due.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_due.stop()
        self._reading_due.stop()
        if self._is_refused:
            BoundedProtocol.num_refused -= 1
        else:
            super().connection_lost(exc)


class _Deadline:
    """A timer of a connection: aborts the connection after a time, unless it is stopped before."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Start, unless it is running."""
        if self._timer is None:
            self._timer = self._protocol.loop.call_later(seconds, self._abort)

    def stop(self) -> None:
        # A timer that is not cancelled keeps the connection's objects in memory until it fires.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self) -> None:
        # Reset, not closed: the kernel would keep the unread bytes of a closed connection until the client reads them.
        transport = self._protocol.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _response(error: HTTPError) -> bytes:
    """The error as a complete response, after which the connection is closed."""
    body = json.dumps(error.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [first, *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def allow_files() -> None:
    """Raise the process's limit on open files for the connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_LOG = logging.getLogger(__name__)
_KEEP_ALIVE_S = 15
_SWITCH_S = 1e-3
"""Seconds after which Python switches threads. A thread that computes in Python, such as one that writes a long answer,
makes each call of the event loop and of the engine's loop wait that long, perhaps several times.
"""
_SENDING_S = 2
"""Seconds for slow clients to read the ends of their answers, after the last answer was computed or aborted."""


@dataclass(frozen=True)
class Address:
    """Listening address of the server."""

    host: str
    port: int
    has_tls: bool = False

    @property
    def url(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{shown}:{self.port}"

    @property
    def is_of_this_machine(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


def listen(address: Address) -> socket.socket:
    """A socket that is bound and takes no connections yet; SpecDecError if the address is not available."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"no such host ({error}): {address.host}", hint="127.0.0.1 is this machine alone") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise SpecDecError(
            f"cannot listen ({error.strerror}): {address.host}:{address.port}", hint="choose another host or port"
        ) from None
    return bound


class _Server(uvicorn.Server):
    """A server that stops in two steps: new requests are refused at once, and connections are closed when the running
    requests are done.
    """

    def __init__(
        self, config: uvicorn.Config, loop: ServingLoop, shutdown_timeout_s: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._serving, self._shutdown_timeout_s = loop, shutdown_timeout_s
        self._deadline_s: float | None = None
        """Time at which unfinished requests are ended, once a signal has come."""
        self._is_hurried = self._has_said_so = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests after the first signal, end unfinished requests after the second.

        Later signals change nothing, unless the end takes longer than it should: then the process ends at once.
        """
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + self._shutdown_timeout_s
            self._serving.refuse_new()
        elif not self._is_hurried:
            self._is_hurried, self._deadline_s = True, now_s
        elif now_s > self._deadline_s + 2 * _SENDING_S:
            os._exit(128 + sig)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit |= self._serving.failure is not None
        if self._deadline_s is not None and not self.should_exit:
            groups, is_late = unfinished_groups(self._serving), time.monotonic() >= self._deadline_s
            self.should_exit = is_late or not groups
            if groups and not self._has_said_so:
                self._has_said_so = True
                stderr().print(
                    f"shutting down: waiting for {_requests(len(groups))}, at most {self._shutdown_timeout_s:g} s; "
                    "Ctrl-C again to stop now",
                    soft_wrap=True,
                )
            if is_late:
                self._end_unfinished(groups)
        return await super().on_tick(counter)

    def _end_unfinished(self, groups: Collection[Group]) -> None:
        """Send an error to waiting clients: uvicorn would only close their connections."""
        for group in groups:
            group.end(as_http_error(_stopping()))
        if groups:
            why = "when the second signal came" if self._is_hurried else f"within {self._shutdown_timeout_s:g} s"
            _LOG.warning("shutting down: %s not finished %s", _requests(len(groups), " was", " were"), why)


def _requests(count: int, verb: str = "", verb_of_many: str = "") -> str:
    return f"1 request{verb}" if count == 1 else f"{count} requests{verb_of_many}"


def _stopping() -> Stopping:
    return Stopping("the server is shutting down, and the answer is not finished", hint="ask again later")


class _EndTold:
    """An application whose cancelled requests get a 503 instead of uvicorn's 500. At its end the server cancels
    requests that are left, such as a request whose body has not come.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False

        async def note_and_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not has_begun:
                error = as_http_error(_stopping())
                await JSONResponse(error.body_at(scope["path"]), error.status, error.headers)(scope, receive, send)
            raise


def serve(
    app: Any, loop: ServingLoop, bound: socket.socket, options: ServerOptions, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; after a second signal, running requests are ended. `on_ready` is called when
    connections are accepted. SpecDecError when the engine has ended.
    """
    allow_files()
    sys.setswitchinterval(_SWITCH_S)
    config = uvicorn.Config(
        _EndTold(app),
        http=BoundedProtocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SENDING_S,
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = _Server(config, loop, options.shutdown_timeout, on_ready)
    server.run(sockets=[bound])
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # the server has ended, and further signals change nothing
        signal.signal(signal_number, signal.SIG_IGN)
    if loop.failure is not None:
        raise loop.failure


@contextmanager
def errors_logged() -> Iterator[None]:
    """Within the block, log the errors of routes, of the loop and of uvicorn on stderr, with their tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(_is_no_cancelling)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "runtime.loop", "commands.serve")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _is_no_cancelling(record: logging.LogRecord) -> bool:
    """False for a record about a cancelled task: at the end uvicorn logs each task that it cancels as a failure, after
    a line with their number.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
