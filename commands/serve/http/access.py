"""Access to the server: API keys, hosts, and the origins of pages."""

import hmac
import ipaddress
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse

from commands.serve.errors import HTTPError
from commands.serve.http.clients import with_key

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
