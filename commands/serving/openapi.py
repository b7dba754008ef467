"""What openapi.json says that routes do not: bodies that are read by hand, streams, errors as they are, the key."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema

from commands.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REFUSALS = {"401": "no key, or a wrong one", "403": "a page of a foreign origin"}
_OF_BODIES = {
    "400": "what was asked is wrong or too long",
    "404": "another model",
    "408": "the body did not come in time",
    "413": "the body is too long",
}
_OF_ANSWERS = {"500": "a step failed", "503": "the queue is full, or the server shuts down", "504": "it took too long"}
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


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, completed."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies: list[tuple[type[Any], Any]] = [
        (model, "validation") for model in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    ]
    _, described = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(described["$defs"], Error=_ERROR)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of errors, which is never sent
        schemas.pop(name, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            _complete(path, operation)
    return schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    answers = path.endswith("completions")
    errors = _REFUSALS | (_OF_BODIES if "requestBody" in operation else {}) | (_OF_ANSWERS if answers else {})
    if path == "/v1/models/{name}":
        errors = errors | {"404": _OF_BODIES["404"]}
    # A server without a key asks for none.
    operation["security"] = [{}, {"key": []}]
    if path == "/health":
        errors, operation["security"] = {"403": _REFUSALS["403"]}, []
        responses["200"].pop("content", None)
        responses["503"] = {"description": "requests are not taken"}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses.update({status: {"description": why, "content": error} for status, why in errors.items()})
    if answers:
        responses["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    if path == "/metrics":
        responses["200"]["content"] = {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": _TEXT}}
