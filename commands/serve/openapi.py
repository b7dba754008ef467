"""Documents that the server sends of itself: openapi.json, and the page to try it."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic.json_schema import models_json_schema

from commands.serve.answers import (
    ChatAnswer,
    CompletionAnswer,
    MessageAnswer,
    ModelAnswer,
    ModelsAnswer,
    ResponseAnswer,
)
from commands.serve.http_errors import ANTHROPIC_PATH
from commands.serve.schema import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

_BODIES = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest, TokenizeRequest, DetokenizeRequest,
)  # fmt: skip
_ANSWERS = (CompletionAnswer, ChatAnswer, ResponseAnswer, MessageAnswer, ModelsAnswer, ModelAnswer)
_MODELS: list[tuple[type[Any], Any]] = [(model, "validation") for model in (*_BODIES, *_ANSWERS)]
_STATUSES = {
    400: "the request is invalid or too long",
    401: "no key, or a wrong one",
    403: "a page of a foreign origin",
    404: "another model",
    408: "the body did not come in time",
    413: "the body is too long",
    500: "a step failed",
    503: "the queue is full, or the server shuts down",
    504: "it took too long",
}
_TEXT = {"type": "string"}
_NULLABLE = {"anyOf": [_TEXT, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"message": _TEXT, "type": _TEXT},
        },
    },
}


def _anthropic_content() -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": "#/components/schemas/AnthropicError"}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with these."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def answers(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """The answer of a route that generates: a document, or a stream of events."""
    whole = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    content = {"application/json": whole, "text/event-stream": {"schema": _TEXT}}
    return {200: {"description": "the answer, whole or in a stream", "content": content}}


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, completed."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    described = models_json_schema(_MODELS, ref_template="#/components/schemas/{model}")[1]
    key = {"type": "http", "scheme": "bearer"}
    own = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    schema["components"] = {"schemas": described["$defs"] | own, "securitySchemes": {"key": key}}
    for path, methods in schema["paths"].items():
        for operation in methods.values() if path.startswith(ANTHROPIC_PATH) else ():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    response["content"] = _anthropic_content()
    for operation in (operation for methods in schema["paths"].values() for operation in methods.values()):
        operation["responses"].pop("422", None)  # FastAPI's own form of errors, which is never sent
        # A server without a key asks for none.
        operation["security"] = [{}, {"key": []}] if "401" in operation["responses"] else []
    return schema


_INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def page_response() -> HTMLResponse:
    """The page, its own scripts and styles allowed by their digests."""
    html = (files("commands.serve") / "page.html").read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        digests[kind.lower()].append(f"'sha256-{digest}'")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            f"style-src {' '.join(digests['style'])}",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return HTMLResponse(html, headers=headers | {"X-Content-Type-Options": "nosniff"})
