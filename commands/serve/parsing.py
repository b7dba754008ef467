"""Request bodies as they are parsed, as deep as they may be, and validated, wherever they come from. Knows no HTTP."""

from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from commands.serve.http_errors import HTTPError, of_validation
from commands.serve.schema import Lenient, refused_field

Body = TypeVar("Body", bound=Lenient)


def parse_body(body: bytes, model: type[Body]) -> Body:
    """The body, whatever its Content-Type says; HTTPError for what is no JSON, or not what the model says."""
    try:
        # It knows a depth at which it stops, and neither NaN nor half of a surrogate pair.
        value: Any = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    return validate_body(value, model)


def validate_body(value: Any, model: type[Body]) -> Body:
    """The same of a body that has been parsed."""
    if not isinstance(value, dict):
        raise HTTPError(400, f"the body is no JSON object: {type(value).__name__}", code="invalid_json")
    refused = refused_field(value, model)
    if refused is not None:
        raise HTTPError(400, f"this server does not support `{refused}`", param=refused, code="unsupported")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error, value) from None
