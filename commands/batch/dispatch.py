"""Dispatch of requests to workers of any kind: each worker gets enough requests to stay busy, and no request suffers
from another request's fault.

A request that was in a failed step is retried alone. A request whose worker died is retried twice among others, and
then alone. If a request fails alone, that failure is its result.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from commands.output.output import warn
from runtime.proof.records import Fingerprint, differences
from runtime.util.errors import SpecDecError

_MAX_LOST = 2
"""Deaths of workers after which a request is still retried among others."""


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Request = TypeVar("Request", bound=Identified)
Outcome = TypeVar("Outcome", bound=Identified)
_Asked = TypeVar("_Asked", bound=Identified, contravariant=True)
_Answered = TypeVar("_Answered", bound=Identified, covariant=True)


@dataclass(frozen=True)
class NotAnswered:
    """A request without an answer, perhaps through no fault of its own."""

    id: str
    failure: str
    is_lost: bool = False
    """True if its worker died."""


class Crew(Protocol[_Asked, _Answered]):
    """All workers."""

    @property
    def num_free(self) -> int:
        """Number of requests that the workers would take now."""
        ...

    def send(self, request: _Asked) -> None: ...

    def receive(self) -> Iterable[_Answered | NotAnswered]:
        """Wait for an event; returns the outcomes that have come, perhaps none. SpecDecError if no worker is left."""
        ...


def answer_all(
    crew: Crew[Request, Outcome], requests: Iterator[Request], give_up: Callable[[Request, str], Outcome]
) -> Iterator[Outcome]:
    """Yield an outcome for each request, in the order in which they arrive; `give_up` makes the outcome of a request
    that fails alone.
    """
    waiting = _Waiting(requests)
    sent: dict[str, Request] = {}
    while sent or waiting.has_more:
        while crew.num_free > 0 and (request := waiting.next(is_idle=not sent)) is not None:
            sent[request.id] = request
            crew.send(request)
        for outcome in crew.receive():
            request = sent.pop(outcome.id)
            if not isinstance(outcome, NotAnswered):
                yield outcome
            elif waiting.was_alone(request):
                yield give_up(request, outcome.failure)
            else:
                waiting.ask_again(request, is_lost=outcome.is_lost)


class _Waiting(Generic[Request]):
    """Requests that have not been sent, and requests to be sent again."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next = next(requests, None)
        self._again: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        self._num_lost: Counter[str] = Counter()
        self._alone: Request | None = None

    @property
    def has_more(self) -> bool:
        return bool(self._next or self._again or self._suspects)

    def next(self, *, is_idle: bool) -> Request | None:
        """The next request to send. While there are suspects (requests whose step failed, or whose workers died three
        times), None until no worker is busy, and then a single suspect.
        """
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

    def was_alone(self, request: Request) -> bool:
        return self._alone is request

    def ask_again(self, request: Request, *, is_lost: bool) -> None:
        self._num_lost[request.id] += 1
        is_bad_luck = is_lost and self._num_lost[request.id] <= _MAX_LOST
        (self._again if is_bad_luck else self._suspects).append(request)


def check_same_bits(worker: str, theirs: Fingerprint, ours: Fingerprint, *, allow_mixed: bool) -> None:
    """SpecDecError for a worker whose engine gives other bits than the first worker's, so that a result would depend on
    the worker that made it; with `allow_mixed`, a warning.
    """
    if theirs.logits == ours.logits:
        return
    what = f"workers give different bits, {worker}: {'; '.join(differences(theirs, ours))}"
    if not allow_mixed:
        raise SpecDecError(what, hint="use machines of one kind; or `--allow-mixed`")
    warn(what)
