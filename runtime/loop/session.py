"""A session: an opened engine that answers requests with a drafter, or without, and measures the time."""

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from runtime.core.generation import Generation, Interrupted, Unanswered
from runtime.core.params import Mode
from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.opened import OpenDrafter
from runtime.drafters.protocol import CompositeDrafter, Drafter
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.engine.engine import Engine
from runtime.loop import orchestrator, scheduler
from runtime.loop.step import check_requests
from runtime.util.at_exit import closed_at_exit
from runtime.util.errors import RequestError

OnTokens = Callable[[Sequence, list[int]], None]
_fresh_ids = count(1 << 62)
_LOOPS = {"orchestrator": orchestrator.generate, "leader": scheduler.generate}


@dataclass(frozen=True)
class Session:
    """An engine, a loop, and perhaps a drafter. `speculation` is the description from which the drafter was opened."""

    engine: Engine
    mode: Mode
    speculation: Speculation = NO_SPECULATION
    opened: OpenDrafter | None = None
    _ids_in_use: dict[int, object] = field(default_factory=dict, repr=False, compare=False)
    """Ids of the unfinished requests, by which the drafter knows them."""

    @property
    def max_draft_len(self) -> int:
        if self.opened is None:
            return 0
        return self.engine.max_draft_len if self.opened.max_draft_len is None else self.opened.max_draft_len

    @property
    def draft_engine(self) -> Engine | None:
        draft_model = None if self.opened is None else self.opened.draft_model
        return None if draft_model is None else draft_model.engine

    @property
    def draft_model_time_s(self) -> float:
        """Seconds that a draft model, a head, or the self-draft copy has computed since its engine was opened."""
        head_draft = None if self.opened is None else self.opened.head_draft
        own = (self.draft_engine.step_time_s if self.draft_engine else 0.0) + (head_draft.time_s if head_draft else 0.0)
        return self.engine.copy_time_s + own

    def draws_by_probs(self, sequences: Seq[Sequence]) -> bool:
        """True if outputs follow the target's distribution, but are not the tokens that the target would draw alone."""
        samples = any(not sequence.request.sampling.is_greedy for sequence in sequences)
        return samples and self.opened is not None and self.opened.gives_probs

    def run(self, requests: Seq[Request], *, speculate: bool = True, on_tokens: OnTokens | None = None) -> Generation:
        """Answer the requests. Raises Interrupted at Ctrl-C, and Unanswered if a request fails."""
        times, finished = LoopTimes(), dict[int, Sequence]()
        is_interrupted, failed = False, None
        with self.unique(requests) as unique:
            try:
                with closing(self.loop(unique, times, speculate=speculate)) as steps:
                    for sequence, new_tokens in steps:
                        if sequence.finish_reason is not None:
                            finished[sequence.request.id] = sequence
                        if on_tokens:
                            on_tokens(sequence, new_tokens)
            except KeyboardInterrupt:
                is_interrupted = True
            except RequestError as error:
                failed = error
        for request, renamed in zip(requests, unique, strict=True):
            if renamed.id in finished:
                finished[renamed.id].request = request
        generation = Generation([finished[one.id] for one in unique if one.id in finished], times)
        if is_interrupted:
            raise Interrupted(generation)
        if failed is not None:
            raise Unanswered(failed, generation)
        return generation

    def steps(
        self, requests: Seq[Request], times: LoopTimes | None = None, *, speculate: bool = True
    ) -> Generator[tuple[Sequence, list[int]]]:
        """Yield (sequence, new tokens) after every step of every request. To stop early, close the generator. A request
        gets another id if an unfinished request in another thread has the same.
        """
        return closed_at_exit(self._steps(requests, times, speculate=speculate))

    def _steps(
        self, requests: Seq[Request], times: LoopTimes | None, *, speculate: bool
    ) -> Generator[tuple[Sequence, list[int]]]:
        with self.unique(requests) as unique:
            yield from self.loop(unique, times, speculate=speculate)

    def loop(
        self, requests: Seq[Request], times: LoopTimes | None = None, *, speculate: bool = True
    ) -> Generator[tuple[Sequence, list[int]]]:
        """`steps`, for requests that `unique` gave."""
        times = LoopTimes() if times is None else times
        drafter: Drafter | None = None
        if self.opened is not None and speculate:
            drafter = self.opened.drafter
            drafter = _TimedDrafter(drafter, times, self) if self.opened.is_model else drafter
        return _LOOPS[self.mode](self.engine, requests, drafter, self.max_draft_len, times)

    @contextmanager
    def unique(self, requests: Seq[Request]) -> Iterator[list[Request]]:
        """The requests within the block, with ids that no other unfinished request has; their names stay."""
        claim, unique = object(), list[Request]()
        try:
            for request in requests:  # without a lock, for a generator may be closed in the middle of anything
                is_free = self._ids_in_use.setdefault(request.id, claim) is claim
                unique.append(request if is_free else replace(request, id=next(_fresh_ids), label=request.name))
            yield unique
        finally:
            for request in requests:
                if self._ids_in_use.get(request.id) is claim:
                    self._ids_in_use.pop(request.id)

    def check_requests(self, requests: Seq[Request]) -> None:
        """SpecDecError if a request cannot be answered; for requests of several runs, since `run` checks its own."""
        check_requests(self.engine, self.opened.drafter if self.opened else None, requests)

    def warm_up(self, requests: Seq[Request]) -> None:
        """Run a few tokens of the first request with the drafter and without, and forget them."""
        first = [replace(requests[0], max_new_tokens=min(requests[0].max_new_tokens, 8))]
        with self._without_disk():
            for speculate in (True, False):
                self.run(first, speculate=speculate)
        self.clear_cache()
        self.clear_pools()

    def run_without_drafter(self, requests: Seq[Request], on_tokens: OnTokens | None = None) -> Generation:
        """Answer the same requests again, from an empty cache and without drafts."""
        self.clear_cache()
        again = [replace(r, keep_logits=False) for r in requests]
        with self._without_disk():
            return self.run(again, speculate=False, on_tokens=on_tokens)

    @contextmanager
    def _without_disk(self) -> Iterator[None]:
        """Context in which everything is computed, and nothing is read from disk (`Engine.without_disk`)."""
        with ExitStack() as stack:
            for engine in filter(None, (self.engine, self.draft_engine)):
                stack.enter_context(engine.without_disk())
            yield

    def clear_cache(self) -> None:
        """Forget the K/V of finished requests, the draft model's too, so that the next request starts cold."""
        self.engine.clear_cache()
        if self.draft_engine is not None:
            self.draft_engine.clear_cache()

    def clear_pools(self) -> None:
        """Forget the outputs of finished requests, so that a measurement does not find the output of its warm-up."""
        if self.opened is not None:
            self.opened.clear_pools()


class _TimedDrafter(CompositeDrafter):
    """The session's drafter. It counts the time of models that draft in this thread."""

    def __init__(self, drafter: Drafter, times: LoopTimes, session: Session) -> None:
        super().__init__([drafter])
        self._times, self._session = times, session

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        start_s = self._session.draft_model_time_s
        drafts = self.members[0].propose(sequences, max_draft_len)
        self._times.draft_model_time_s += self._session.draft_model_time_s - start_s
        return drafts
