"""An opened model served at an address, from the first connection to the last, to clients that have access."""

import gc
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware

from commands.options.sampling_flags import given_params
from commands.output.documents.settings import Setup
from commands.output.output import note, stderr, warn
from commands.serve.flags import ServerOptions
from commands.serve.greeting import greeting
from commands.serve.http.bodies import Clock
from commands.serve.http.clients import with_key
from commands.serve.http.errors import HTTPError
from commands.serve.http.request_log import RequestLog
from commands.serve.http.routes import make_app
from commands.serve.http.server import Address, errors_logged, serve
from commands.serve.http.unread import ReadsBodies
from commands.serve.receipts import OnProgress, logging_receipts
from commands.serve.served import ServedModel, check_can_serve, prepare_chat
from commands.serve.warm import warm
from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.loop.serving import LoopLimits, ServingLoop
from runtime.loop.session import Session
from runtime.util.errors import SpecDecError

_OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no key: the page, which asks for the key, and the path for load balancers."""
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?")
"""A host's name or address, and perhaps a port: RFC 9110, section 7.2."""


class Guard:
    """Checks a request's API key, in constant time, and refuses pages from other origins unless they are allowed.

    A server that only its own machine can reach answers only to that machine's names: otherwise a page whose host name
    leads there (DNS rebinding) would count as the same origin.
    """

    def __init__(
        self, app: Any, api_key: str | None, allowed_origins: Collection[str], *, is_of_this_machine: bool = False
    ) -> None:
        self._app, self._allowed_origins = app, frozenset(allowed_origins)
        self._expected = [] if api_key is None else split_keys(api_key)
        self._is_of_this_machine = is_of_this_machine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = _key_of(headers)
        try:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            self._check_origin(headers)
            if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
                self._check_key(given)
        except HTTPError as error:
            await JSONResponse(error.body_at(scope["path"]), error.status, error.headers)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The routes of GET answer HEAD too. uvicorn still sees HEAD, and sends no body.
            scope = scope | {"method": "GET"}
        await self._app(with_key(scope, given, num_keys=len(self._expected)), receive, send)

    def _check_host(self, host: str) -> None:
        if (
            not (self._is_of_this_machine and host)
            or {f"http://{host}", f"https://{host}", "*"} & self._allowed_origins
        ):
            return
        found = _HOST.fullmatch(host.lower())
        name = found[1] or found[2] if found else ""
        with suppress(ValueError):
            if name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name):
                return
        raise HTTPError(403, "this host name is not allowed", param="Host", code="host_not_allowed")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a request from a page of another origin, which browsers name in a header. Otherwise any page could use
        this machine for its computations.
        """
        origin = headers.get(b"origin")
        if origin is None or {origin.decode("latin-1"), "*"} & self._allowed_origins:
            return
        if origin.partition(b"://")[2] != headers.get(b"host", b""):
            raise HTTPError(403, "pages from this origin may not use this server", code="origin_not_allowed")

    def _check_key(self, given: bytes) -> None:
        is_right = [hmac.compare_digest(given, key) for key in self._expected]  # all keys, also after a match
        if is_right and not any(is_right):
            raise HTTPError(401, "the API key is missing or wrong", code="invalid_api_key")


def split_keys(keys: str) -> list[bytes]:
    """Keys that are separated by commas."""
    return [key.strip().encode() for key in keys.split(",")]


def _key_of(headers: dict[bytes, bytes]) -> bytes:
    """The key that was sent, in either header: Anthropic's clients use another header than OpenAI's."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":  # in any case, RFC 9110, section 11.1
        given = headers.get(b"x-api-key", b"")
    return given.strip()


def serve_setup(
    setup: Setup, bound: socket.socket, address: Address, names: tuple[str, ...], options: ServerOptions
) -> None:
    """Serve until a signal ends the server. SpecDecError if the model cannot be served, or if its engine ends."""
    clock = Clock()
    served = open_served(setup.llm, setup.session, clock, names, options)
    if options.warm is not None:
        note(warm(served, options.warm, [] if options.api_key is None else split_keys(options.api_key)))
    app = guarded_app(served, clock, options, is_of_this_machine=address.is_of_this_machine)

    def say_where() -> None:
        for line in greeting(served, address):
            console = stderr()
            console.print(line, soft_wrap=not console.is_terminal)  # a terminal wraps; a program reads whole lines

    if not address.is_of_this_machine and options.api_key is None:
        warn("anyone who can reach this address may send requests: `--api-key` or SPECDEC_API_KEY restricts access")
    # The 400,000 objects that exist now stay. To look through them for garbage stops every thread for 0.3 s, and Python
    # does it only when there are a quarter as many new objects: until then the garbage of requests would pile up.
    gc.freeze()
    gc.enable()
    try:
        with errors_logged():
            serve(app, served.loop, bound, options, say_where)
    finally:
        served.loop.stop(0)  # before the engine is closed, also if uvicorn did not wait for the loop


def open_served(
    llm: LLM, session: Session, clock: Clock, names: tuple[str, ...], options: ServerOptions
) -> ServedModel:
    """The model with a loop that is not started yet; SpecDecError if it cannot be served."""
    check_can_serve(llm)
    has_chat_template = prepare_chat(llm)
    llm.reasoning_parser = options.reasoning_parser
    sampling = given_params(options)
    llm.request_of(SamplingParams(**sampling))  # or why there can be no such requests
    with suppress(SpecDecError):  # a request with a grammar gets the error
        llm.grammars.prepare()
    llm.fingerprint  # noqa: B018  # it is kept: every answer has it
    limits = LoopLimits(options.max_queue_len, options.max_requests_per_client, options.max_gap_ms / 1000)
    on_progress: OnProgress = clock
    if options.receipts is not None:
        on_progress = logging_receipts(options.receipts, llm.fingerprint, options.receipt_ids or "ids", clock)
    loop = ServingLoop(session, limits, on_progress)
    served = ServedModel(
        llm,
        loop,
        names,
        int(time.time()),
        has_chat_template,
        llm.model_defaults.sampling | sampling,
        options.tool_call_parser,
        options.reasoning_parser,
        options.refuse_special_tokens,
        options.any_model,
        session.speculation.in_words,
    )
    for name, path in options.corpora.items():
        served.corpora.open(name, path, served.tokenizer)
    return served


def guarded_app(served: ServedModel, clock: Clock, options: ServerOptions, *, is_of_this_machine: bool = False) -> Any:
    """The application behind its access control."""
    origins = options.allowed_origins or []
    inner = make_app(served, clock, options.request_timeout, version("specdec-cli"))
    app: Any = Guard(inner, options.api_key, origins, is_of_this_machine=is_of_this_machine)
    if origins:
        app = CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"])
    return ReadsBodies(RequestLog(app) if options.log_requests else app)
