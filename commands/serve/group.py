"""The answers to one HTTP request, as its handler waits for them on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from commands.serve.http_errors import HTTPError, as_http_error
from runtime.serving.loop import RequestHandle, ServeRequest, ServingLoop

Receive = Callable[[], Any]


@dataclass(eq=False)
class Group:
    """Answers on their way. `changed` is set from the loop's thread when one of them got on."""

    answers: list[RequestHandle] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_client_gone: bool = False
    ended_by: HTTPError | None = None
    """Reason to stop waiting for it, though it is not finished."""

    @property
    def is_over(self) -> bool:
        return all(answer.progress.is_over for answer in self.answers)

    def raise_error(self) -> None:
        """HTTPError of the first answer that could not go on."""
        for answer in self.answers:
            if answer.progress.error is not None:
                raise as_http_error(answer.progress.error)

    async def step(self) -> None:
        """Wait for progress of the answers. ClientGone if the client has disconnected, HTTPError if one has failed."""
        await self.changed.wait()
        self.changed.clear()
        if self.is_client_gone:
            raise ClientGone
        if self.ended_by is not None:
            raise self.ended_by

    def end(self, error: HTTPError) -> None:
        """Have the handler answer with the error now, whatever the step that runs takes."""
        self.ended_by = error
        self.changed.set()


class ClientGone(Exception):
    """Client disconnected."""


class Clock:
    """Wakes the handlers whose answers got on: called in the loop's thread, once for each step."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_progress: list[Callable[[RequestHandle], None]] = []

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, answers: list[RequestHandle]) -> None:
        for answer in answers:
            for listener in self.on_progress:
                listener(answer)
        groups = {answer.owner for answer in answers}
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, groups)


def _wake(groups: Iterable[object]) -> None:
    for group in groups:
        if isinstance(group, Group):
            group.changed.set()


def submit(loop: ServingLoop, asked: Seq[ServeRequest]) -> Group:
    """Submit requests as one group; raises SpecDecError if the loop rejects them."""
    group = Group()
    group.answers = loop.submit(asked, group)
    return group


def unfinished_groups(loop: ServingLoop) -> set[Group]:
    return {answer.owner for answer in loop.unfinished() if isinstance(answer.owner, Group)}


@asynccontextmanager
async def watched(group: Group, loop: ServingLoop, receive: Receive) -> AsyncIterator[None]:
    """Watch for the client's disconnection in the block, and cancel unfinished answers afterwards."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.is_client_gone = True
        group.changed.set()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        loop.cancel(group.answers)
