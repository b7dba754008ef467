"""Who may ask: an application around the server's turns away whoever has no key, or comes from a foreign page."""

import hmac
from collections.abc import Collection
from typing import Any

from fastapi.responses import JSONResponse

from commands.serving.errors import HTTPError

_OPEN_PATHS = frozenset({"/", "/health"})
"""What needs no key: the page, which asks for it, and what a load balancer looks at."""


class Guard:
    """Compares the key in constant time, and refuses pages of other origins unless they are allowed."""

    def __init__(self, app: Any, api_key: str | None, allowed_origins: Collection[str]) -> None:
        self._app, self._allowed_origins = app, frozenset(allowed_origins)
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_origin(headers)
            if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
                self._check_key(headers)
        except HTTPError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """A browser tells whose page asks. Without this any page could have this machine compute for it."""
        origin = headers.get(b"origin")
        if origin is None or {origin.decode("latin-1"), "*"} & self._allowed_origins:
            return
        if origin.partition(b"://")[2] != headers.get(b"host", b""):
            raise HTTPError(403, "pages of this origin may not ask here", code="origin_not_allowed")

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise HTTPError(401, "the API key is missing or wrong", code="invalid_api_key")
