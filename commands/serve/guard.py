"""Access control: an application around the server's that rejects clients without a key, or from a foreign page."""

import hmac
import ipaddress
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse

from commands.serve.http_errors import HTTPError

_OPEN_PATHS = frozenset({"/", "/health"})
"""Paths without a key: the page, which asks for it, and those for load balancers."""
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?")
"""A name or an address, and perhaps a port: RFC 9110, section 7.2."""


class Guard:
    """Compares the key in constant time, and refuses pages of other origins unless they are allowed.

    A server that only its machine reaches is asked by that machine's names: a page whose own name leads there (DNS
    rebinding) would be of the same origin.
    """

    def __init__(
        self, app: Any, api_key: str | None, allowed_origins: Collection[str], *, is_of_this_machine: bool = False
    ) -> None:
        self._app, self._allowed_origins = app, frozenset(allowed_origins)
        self._expected = None if api_key is None else api_key.encode()
        self._is_of_this_machine = is_of_this_machine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            self._check_origin(headers)
            if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
                self._check_key(headers)
        except HTTPError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

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
        """A browser tells whose page asks. Without this any page could have this machine compute for it."""
        origin = headers.get(b"origin")
        if origin is None or {origin.decode("latin-1"), "*"} & self._allowed_origins:
            return
        if origin.partition(b"://")[2] != headers.get(b"host", b""):
            raise HTTPError(403, "pages of this origin may not ask here", code="origin_not_allowed")

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"  # in any case, RFC 9110, section 11.1
        if self._expected is not None and not (hmac.compare_digest(given.strip(), self._expected) and is_bearer):
            raise HTTPError(401, "the API key is missing or wrong", code="invalid_api_key")
