"""Documents about the server itself: openapi.json, and the page to try the model."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic.json_schema import models_json_schema

from commands.serve.errors import ANTHROPIC_PATH
from commands.serve.protocol import response_models
from commands.serve.protocol import schema as body_models

_STATUSES = {
    400: "the request is invalid or too long",
    401: "no key, or a wrong one",
    403: "a page of a foreign origin",
    404: "another model",
    408: "the body did not come in time",
    413: "the body is too long",
    429: "the client has as many requests on their way as it may have",
    500: "a step failed",
    503: "the queue is full, or the server shuts down",
    504: "it took too long",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of the error responses with these statuses."""
    return {status: {"description": _STATUSES[status], "content": _json_of("Error")} for status in statuses}


def answers(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of the response of a route that generates: a document, or a stream of events."""
    content = _json_of(model.__name__) | {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": "the answer, whole or in a stream", "content": content}}


def body_of(model: type[Any]) -> dict[str, Any]:
    """OpenAPI description of a body that the route parses by hand."""
    return {"requestBody": {"required": True, "content": _json_of(model.__name__)}}


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document, with the parts added that FastAPI does not know."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own form of errors, which is never sent
            # A server without a key asks for none.
            operation["security"] = [{}, {"key": []}] if "401" in operation["responses"] else []
            for status, response in operation["responses"].items():
                if path.startswith(ANTHROPIC_PATH) and int(status) >= 400:
                    response["content"] = _json_of("AnthropicError")
    named = sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema["paths"]))))
    found = [getattr(response_models, name, None) or getattr(body_models, name) for name in named]
    models: list[tuple[type[Any], Any]] = [(model, "validation") for model in found]
    described = models_json_schema(models, ref_template="#/components/schemas/{model}")[1]
    key = {"type": "http", "scheme": "bearer"}
    schema["components"] = {"schemas": described["$defs"], "securitySchemes": {"key": key}}
    return schema


_INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def page_response() -> HTMLResponse:
    """The page to try the model. Its own scripts and styles are allowed by their digests."""
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
