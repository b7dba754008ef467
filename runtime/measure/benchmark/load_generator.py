"""Load generator: sends requests to a server at their times, with bounded concurrency, and collects the responses."""

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runtime.measure.benchmark.client import (
    Answer,
    Client,
    Content,
    Endpoint,
    ServerError,
    SpeculationCounts,
    counts_of_prometheus,
    refused,
    request_body,
    total_counts,
)
from runtime.util.errors import SpecDecError


def arrival_times(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the first request to each, in order: gaps are exponential with mean 1 / `request_rate`.

    An infinite rate sends all at once. Unlike `vllm bench serve`, which stretches the whole to num_requests /
    request_rate seconds, the gaps are left as they were drawn, so that arrivals are Poisson.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, num_requests - 1)
    times: list[float] = [0.0, *np.cumsum(gaps).tolist()]
    return times


_WARM_UP = "One, two, three, four,"


@dataclass(frozen=True)
class Load:
    """Workload of a benchmark. `arrivals` are seconds from the start, one for each prompt."""

    endpoint: Endpoint
    model: str | None
    prompts: Seq[Content]
    max_tokens: int
    arrivals: Seq[float]
    concurrency: int | None
    extra_body: dict[str, Any]
    num_warmups: int = 1


@dataclass(frozen=True)
class LoadResult:
    """`speculation` is what the server told, and `speculation_source` where."""

    model: str
    answers: list[Answer]
    start_s: float
    duration_s: float
    speculation: SpeculationCounts | None
    speculation_source: str | None
    facts: dict[str, str] | None = None
    """Bits, dtype, machine and drafter, as `specdec serve` tells them."""


@dataclass
class _SoFar:
    """Results so far. `answers` by their prompts' places."""

    model: str = ""
    facts: dict[str, str] | None = None
    start_s: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)

    def result(self) -> LoadResult:
        """Until now, with what the responses tell of speculation."""
        duration_s = time.perf_counter() - self.start_s
        answers = [self.answers[i] for i in sorted(self.answers)]
        told = [answer.speculation for answer in answers if answer.speculation is not None]
        counts, source = (total_counts(told), "responses") if told else (None, None)
        return LoadResult(self.model, answers, self.start_s, duration_s, counts, source, self.facts)


def run_load(client: Callable[[], Client], load: Load, on_answer: Callable[[], None]) -> LoadResult:
    """Send it all and wait for every answer; after Ctrl-C only those that have come, if there are any.

    SpecDecError if the server does not answer a first request.
    """
    so_far = _SoFar()

    async def run() -> LoadResult:
        async with client() as opened:
            return await _run(opened, load, so_far, on_answer)

    try:
        return _run_until_a_signal(run)
    except KeyboardInterrupt:
        if not so_far.answers:
            raise
        return so_far.result()


def _run_until_a_signal(work: Callable[[], Coroutine[Any, Any, LoadResult]]) -> LoadResult:
    """Result of a coroutine. SIGINT and SIGTERM cancel it, and then go to the process's own handlers.

    A handler that raised in the midst of a task would have asyncio print the exception, which nobody awaits.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one has signals
        return asyncio.run(work())
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    came: list[int] = []

    async def run() -> LoadResult:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in handlers:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work()

    try:
        return asyncio.run(run())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[-1])


async def _run(client: Client, load: Load, so_far: _SoFar, on_answer: Callable[[], None]) -> LoadResult:
    names = await client.models() if load.model is None else []
    so_far.model = model = load.model or names[0]
    so_far.facts = client.facts
    await _warm_up(client, load, model)
    before = await _counters(client)
    limit: AbstractAsyncContextManager[object] = (
        nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    )
    so_far.start_s = time.perf_counter()

    async def one(i: int, content: Content, arrival: float) -> None:
        answer = Answer(so_far.start_s + arrival)
        await asyncio.sleep(answer.arrival_s - time.perf_counter())
        async with limit:
            await _ask(client, load, model, content, answer)
        so_far.answers[i] = answer
        on_answer()

    asked = [one(i, *each) for i, each in enumerate(zip(load.prompts, load.arrivals, strict=True))]
    await asyncio.gather(*asked)
    result = so_far.result()
    if result.speculation is not None:
        return result
    after = await _counters(client)
    since = after.since(before) if after is not None and before is not None else None
    return replace(result, speculation=since, speculation_source=None if since is None else "prometheus")


async def _counters(client: Client) -> SpeculationCounts | None:
    text = await client.metrics_text()
    return None if text is None else counts_of_prometheus(text)


async def _ask(client: Client, load: Load, model: str, content: Content, answer: Answer) -> None:
    body = request_body(load.endpoint, model, content, load.max_tokens) | load.extra_body
    try:
        await client.ask(load.endpoint, body, answer)
    except ServerError as error:
        answer.error = str(error)


async def _warm_up(client: Client, load: Load, model: str) -> None:
    """Answers before the clock starts, to a prompt of its own: one of the load's would be found in a prefix cache.

    What is wrong with the server is found here.
    """
    body = request_body(load.endpoint, model, _WARM_UP, load.max_tokens) | load.extra_body
    for _ in range(load.num_warmups):
        try:
            await client.ask(load.endpoint, body, Answer(0.0))
        except ServerError as error:
            raise await _why(client, load, model, error) from None


async def _why(client: Client, load: Load, model: str, error: ServerError) -> SpecDecError:
    """The error of a first request: a server that cannot be reached, or that has other models, or what it said."""
    if error.status not in (None, 404):
        return refused(error, client.base_url)
    names = await client.models()  # raises what is wrong with the server as a whole
    if error.status == 404 and model not in names:
        return SpecDecError(
            f"the server has no such model: {model}", hint=f"it has {', '.join(names)}", code="server_model",
            names=", ".join(names),
        )  # fmt: skip
    return refused(error, client.base_url)
