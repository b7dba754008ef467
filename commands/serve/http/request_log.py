"""A line on stderr for each request: its route, model, token counts, seconds and status, and never its text.

12:03:41 POST /v1/chat/completions 200 in 0.83 s: demo, 281 prompt tokens (192 cached), 24 output, 1.92 a step
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commands.output.output import stderr, visible
from runtime.loop.serving import RequestHandle

_MAX_SHOWN = 200
"""Number of characters that are shown of a path or a model's name, which come from clients."""
_SCOPE_KEY = "specdec.noted"
"""Key of a request's ASGI scope for its `_Noted`, if requests are logged."""


@dataclass
class _Noted:
    """Facts of a request that its route knows. `num_alternatives` is the number of outputs for each prompt, which stand
    one after the other in `answers`.
    """

    model: str = ""
    answers: list[RequestHandle] = field(default_factory=list)
    num_alternatives: int = 1
    error: str = ""


def note_model(scope: Mapping[str, Any], model: str) -> None:
    """Note the model that a request names, whether it exists or not."""
    if (noted := scope.get(_SCOPE_KEY)) is not None:
        noted.model = model


def note_answers(scope: Mapping[str, Any], answers: list[RequestHandle], num_alternatives: int) -> None:
    """Note the answers that are being generated."""
    if (noted := scope.get(_SCOPE_KEY)) is not None:
        noted.answers, noted.num_alternatives = answers, num_alternatives


def note_error(scope: Mapping[str, Any], code: str | None) -> None:
    """Note the code of the request's error, such as `context_length_exceeded`. The message is not noted, since it may
    quote the request's text.
    """
    if (noted := scope.get(_SCOPE_KEY)) is not None:
        noted.error = code or ""


class RequestLog:
    """An application that calls another application, and logs each request when it is over."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        noted, start_s, status = _Noted(), time.perf_counter(), 0

        async def note_and_send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app({**scope, _SCOPE_KEY: noted}, receive, note_and_send)
        finally:
            told = ", ".join(_told(noted))
            path = visible(scope["path"][:_MAX_SHOWN])
            line = f"{scope['method']} {path} {status or 'unanswered'} in {time.perf_counter() - start_s:.2f} s"
            stderr().print(f"{time.strftime('%X')} {line}{': ' if told else ''}{told}", soft_wrap=True)


def _told(noted: _Noted) -> list[str]:
    told = [visible(noted.model[:_MAX_SHOWN])] if noted.model else []
    if noted.error:
        told.append(noted.error)
    if noted.answers:
        prompts = noted.answers[:: noted.num_alternatives]
        num_prompt = sum(len(one.request.prompt_tokens) for one in prompts)
        num_cached = sum(one.progress.num_cached_tokens for one in prompts)
        num_output = sum(one.progress.num_tokens for one in noted.answers)
        num_steps = sum(one.progress.num_steps for one in noted.answers)
        told += [f"{num_prompt} prompt tokens ({num_cached} cached)", f"{num_output} output"]
        told += [f"{num_output / num_steps:.2f} a step"] if num_steps else []
        told += ["not finished"] if not all(one.progress.is_over for one in noted.answers) else []
    return told
