"""The user's own functions that a model may call in a conversation, from a Python file. The user is asked before each
call.
"""

import asyncio
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.text.call_formats import Tool
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular

_MOST_RESULT = 1 << 16
"""Most characters of a function's result that the model gets."""


@dataclass(frozen=True)
class Toolbox:
    """Functions by name, and their descriptions for the chat template."""

    functions: Mapping[str, Callable[..., Any]]
    documents: tuple[dict[str, Any], ...]

    @property
    def tools(self) -> tuple[Tool, ...]:
        described = [document["function"] for document in self.documents]
        return tuple(Tool(one["name"], one["parameters"]) for one in described)

    def call(self, name: str, arguments: str) -> str:
        """Call a function; returns its result as text, or the text of its error. The model gets either."""
        function = self.functions.get(name)
        if function is None:
            return f"error: there is no function {name}"
        try:
            values = json.loads(arguments)
            given = function(**values)
            if inspect.iscoroutine(given):
                given = asyncio.run(given)
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:  # the function is the user's, and its arguments are the model's
            text = f"error: {type(error).__name__}: {error}"
        return text[:_MOST_RESULT].encode(errors="replace").decode()  # half a character is no text for a template


def open_toolbox(path: Path) -> Toolbox:
    """Run a Python file and take its functions; SpecDecError if the file fails or a function lacks a description."""
    from transformers.utils.chat_template_utils import get_json_schema

    check_regular(path)
    try:
        spec = importlib.util.spec_from_file_location("specdec_tools", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise SpecDecError(f"no Python file with tools: {path}", hint="name a file that ends in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except SpecDecError:
        raise
    except (Exception, SystemExit) as error:  # it is a program
        raise SpecDecError(
            f"the file with tools fails, {type(error).__name__}: {error}: {path}", hint="correct it"
        ) from error
    functions = {
        name: one
        for name, one in vars(module).items()
        if inspect.isfunction(one) and one.__module__ == module.__name__ and not name.startswith("_")
    }
    if not functions:
        raise SpecDecError(
            f"the file has no functions: {path}", hint="a model calls those without a leading underscore"
        )
    documents = []
    for name, function in functions.items():
        try:
            documents.append(get_json_schema(function))
        except Exception as error:  # transformers' own kinds
            raise SpecDecError(
                f"`{name}` in {path} cannot be described to a model: {' '.join(str(error).split())}",
                hint="give it type hints, and a docstring with a line for each argument under `Args:`",
            ) from None
    return Toolbox(functions, tuple(documents))
