"""openapi.json beyond what FastAPI makes of the routes: bodies that are read by hand, errors in their form, the key."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from commands.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_STATUSES = {
    400: "what was asked is wrong or too long",
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
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _TEXT}}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with these."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, completed."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies: list[tuple[type[Any], Any]] = [
        (model, "validation") for model in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    ]
    _, described = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    key = {"type": "http", "scheme": "bearer"}
    schema["components"] = {"schemas": described["$defs"] | {"Error": _ERROR}, "securitySchemes": {"key": key}}
    for operation in (operation for methods in schema["paths"].values() for operation in methods.values()):
        operation["responses"].pop("422", None)  # FastAPI's own form of errors, which is never sent
        # A server without a key asks for none.
        operation["security"] = [{}, {"key": []}] if "401" in operation["responses"] else []
    return schema
