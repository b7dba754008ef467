"""Who answers which request when, whoever the workers are: enough for each to be busy, and nobody's fault for others.

A request that was in a step that failed, or in a worker that died, is asked again. If that happens again and again it
is asked alone, and if it fails alone, that is its result.
"""

from collections import Counter, deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

from commands.batching.answering import BatchModel, Outcome, Pending, failed_outcome
from commands.batching.lines import BatchRequest

_MAX_LOST = 2


class Crew(Protocol):
    """Workers, as many as there are."""

    @property
    def num_free(self) -> int:
        """Requests that they would take now."""
        ...

    def send(self, request: BatchRequest) -> None: ...

    def receive(self) -> list[Outcome]:
        """Wait until something has happened; what came, if anything. SpecDecError if nobody is left."""
        ...


class OwnCrew:
    """The model in this process."""

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._done: SimpleQueue[Pending | Outcome] = SimpleQueue()
        self._num_sent = 0

    @property
    def num_free(self) -> int:
        return self._model.window - self._num_sent

    def send(self, request: BatchRequest) -> None:
        outcome = self._model.submit(request, self._done.put)
        self._num_sent += 1
        if outcome is not None:
            self._done.put(outcome)

    def receive(self) -> list[Outcome]:
        done = [self._done.get()]
        while not self._done.empty():
            done.append(self._done.get())
        self._num_sent -= len(done)
        return [one if isinstance(one, Outcome) else self._model.outcome(one) for one in done]


def answer_all(crew: Crew, requests: Iterator[BatchRequest]) -> Iterator[Outcome]:
    """An outcome with a line for each request, in the order in which they come."""
    waiting = _Waiting(requests)
    sent: dict[str, BatchRequest] = {}
    while sent or waiting.has_more:
        while crew.num_free > 0 and (request := waiting.next(is_idle=not sent)) is not None:
            sent[request.id] = request
            crew.send(request)
        for outcome in crew.receive():
            request = sent.pop(outcome.id)
            if outcome.line is not None:
                yield outcome
            elif waiting.was_alone(request):
                yield failed_outcome(request, outcome.failure or "")
            else:
                waiting.ask_again(request, is_lost=outcome.is_lost)


class _Waiting:
    """Requests that have not been sent, and those to be sent again."""

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self._next = next(requests, None)
        self._again: deque[BatchRequest] = deque()
        self._suspects: deque[BatchRequest] = deque()
        self._num_lost: Counter[str] = Counter()
        self._alone: BatchRequest | None = None

    @property
    def has_more(self) -> bool:
        return bool(self._next or self._again or self._suspects)

    def next(self, *, is_idle: bool) -> BatchRequest | None:
        """What to send now: while there are suspects nothing, until nobody works, and then one of them."""
        if (self._suspects or self._alone is not None) and not is_idle:
            return None
        self._alone = self._suspects.popleft() if self._suspects else None
        if self._alone is not None:
            return self._alone
        if self._again:
            return self._again.popleft()
        request = self._next
        self._next = next(self._requests, None) if request is not None else None
        return request

    def was_alone(self, request: BatchRequest) -> bool:
        return self._alone is request

    def ask_again(self, request: BatchRequest, *, is_lost: bool) -> None:
        self._num_lost[request.id] += 1
        is_bad_luck = is_lost and self._num_lost[request.id] <= _MAX_LOST
        (self._again if is_bad_luck else self._suspects).append(request)
