"""Time candidates on the engine, and hold what was predicted against it."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from runtime.core.generation import Generation
from runtime.core.request import Request
from runtime.core.stats import LoopTimes, sum_stats
from runtime.drafters.protocol import check_request
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM
from runtime.loop.session import Session
from runtime.measure.evaluation.significance import MIN_PAIRS, paired_shift
from runtime.measure.tuning.search import Advance, LoopSeconds, Replayed
from runtime.util.errors import SpecDecError

_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 3, 7, 10.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """A candidate on the engine: seconds of each batch in each round, and what the first round generated."""

    candidate: Speculation
    batches: list[list[LoopSeconds]]
    generation: Generation

    @property
    def seconds(self) -> float:
        """All batches, each by its median over the rounds: what disturbs one batch once does not count."""
        return sum(float(median(s.total for s in rounds)) for rounds in zip(*self.batches, strict=True))

    @property
    def parts(self) -> LoopSeconds:
        """Their first steps, and all others."""
        prompts = sum(float(median(s.prompts for s in rounds)) for rounds in zip(*self.batches, strict=True))
        return LoopSeconds(prompts, self.seconds - prompts)

    @property
    def counts(self) -> dict[str, Any]:
        return sum_stats(s.stats for s in self.generation.sequences).counts(self.candidate.max_draft_len or 0)

    def is_faster_than(self, other: "Measured") -> bool:
        """True if it is faster by more than noise, judged batch by batch."""
        own, others = ([math.log(s.total) for batches in m.batches for s in batches] for m in (self, other))
        shift = paired_shift(others, own)
        return shift is not None and shift.high < 0 and self.seconds < other.seconds


@dataclass(frozen=True)
class LiveRun:
    """Candidates in turn on the same requests, batch by batch; each starts cold and with nothing learned."""

    llm: LLM
    requests: Sequence[Request]
    batch_size: int

    @property
    def num_batches(self) -> int:
        return -(-len(self.requests) // self.batch_size)

    @property
    def num_rounds(self) -> int:
        """Minimum number of rounds."""
        return max(_MIN_ROUNDS, -(-MIN_PAIRS // self.num_batches))

    def measure(self, candidates: Sequence[Speculation], advance: Advance) -> list[Measured]:
        """Time the candidates in turn, in as many rounds as noise asks for, and more rounds while these are short."""
        for candidate in candidates:
            self._round([candidate], 1, _WARM_UP_TOKENS)
        rounds: list[list[list[Generation]]] = []
        start = time.perf_counter()
        while len(rounds) < self.num_rounds or (len(rounds) < _MAX_ROUNDS and time.perf_counter() - start < _ENOUGH_S):
            rounds.append(self._round(candidates, self.num_batches, None))
            advance()
        return [
            Measured(candidate, [[_seconds(g) for g in one[i]] for one in rounds], _together(rounds[0][i]))
            for i, candidate in enumerate(candidates)
        ]

    def try_once(self, candidates: Sequence[Speculation], advance: Advance) -> list[Measured]:
        """Run each candidate once, one after the other, which tells which candidates to time in turn."""
        return [self.try_in_turn([candidate], advance)[0] for candidate in candidates]

    def try_in_turn(self, candidates: Sequence[Speculation], advance: Advance) -> list[Measured]:
        """Run each candidate once, batch by batch in turn: other work of the machine slows all candidates alike."""
        for candidate in candidates:
            self._round([candidate], 1, _WARM_UP_TOKENS)
        found = self._round(candidates, self.num_batches, None)
        advance()
        return [
            Measured(candidate, [[_seconds(g) for g in batches]], _together(batches))
            for candidate, batches in zip(candidates, found, strict=True)
        ]

    def _round(
        self, candidates: Sequence[Speculation], num_batches: int, max_tokens: int | None
    ) -> list[list[Generation]]:
        """Generations of each batch, by candidate."""
        with ExitStack() as stack:
            sessions = [self.llm.open_session(c, stack) for c in candidates]
            parts: list[list[Generation]] = [[] for _ in candidates]
            for batch in range(num_batches):
                for session, done in zip(sessions, parts, strict=True):
                    done.append(self._answer(session, batch, max_tokens))
        return parts

    def _answer(self, session: Session, batch: int, max_tokens: int | None) -> Generation:
        session.clear_cache()
        requests = self.requests[batch * self.batch_size : (batch + 1) * self.batch_size]
        if max_tokens is not None:
            requests = [replace(r, max_new_tokens=min(r.max_new_tokens, max_tokens)) for r in requests]
        return session.run(requests)


def _seconds(batch: Generation) -> LoopSeconds:
    """All sequences of a batch have their first token after the first step."""
    prompts = max(sequence.stats.ttft_s or 0.0 for sequence in batch.sequences)
    return LoopSeconds(prompts, batch.times.wall_s - prompts)


def _together(parts: Sequence[Generation]) -> Generation:
    times = LoopTimes()
    for part in parts:
        times.add(part.times)
    return Generation([sequence for part in parts for sequence in part.sequences], times)


@dataclass(frozen=True)
class Confirmed:
    """A candidate that was run, and where it was replayed on the same prompts its prediction, scaled."""

    measured: Measured
    measured_speedup: float
    replayed: Replayed | None = None
    predicted_s: float | None = None
    predicted_speedup: float | None = None

    @property
    def candidate(self) -> Speculation:
        return self.measured.candidate

    @property
    def ratio(self) -> float | None:
        return None if self.predicted_s is None else self.predicted_s / self.measured.seconds


@dataclass(frozen=True)
class Confirmation:
    """The best candidates and *no drafter*, which is first. `factors` is what predictions were multiplied with."""

    confirmed: list[Confirmed]
    factors: LoopSeconds

    @property
    def recommended(self) -> Confirmed:
        """The fastest of those that are faster than no drafter by more than noise, or no drafter."""
        none, *others = self.confirmed
        faster = [other for other in others if other.measured.is_faster_than(none.measured)]
        return min([*faster, none], key=lambda one: one.measured.seconds) if faster else none


def confirm(replayed: Sequence[Replayed], measured: Sequence[Measured]) -> Confirmation:
    """Measurements, no drafter first, with the predictions of replayed candidates, on the same prompts.

    The machine may be busier than when its steps were measured, or quieter, which prompts feel more than steps of one
    token: one factor for the first and one for the second, what no drafter takes over what was predicted for it.
    """
    predictions = {one.candidate: one for one in replayed}
    none = measured[0]
    factors = none.parts.over(predictions[none.candidate].predicted or LoopSeconds(0.0, 0.0))
    confirmed = []
    for one in measured:
        speedup, prediction = none.seconds / one.seconds, predictions.get(one.candidate)
        if prediction is None or prediction.predicted is None:
            confirmed.append(Confirmed(one, speedup))
        else:
            predicted_s = prediction.predicted.scaled(factors).total
            confirmed.append(Confirmed(one, speedup, prediction, predicted_s, none.seconds / predicted_s))
    return Confirmation(confirmed, factors)


def spread(number: int, wanted: int) -> list[int]:
    """Indices of `wanted` of `number` things, as even as can be: of 10 the 3 at 0, 3 and 6."""
    wanted = min(number, wanted)
    return [i * number // wanted for i in range(wanted)]


def fitting(session: Session, requests: Sequence[Request]) -> list[int]:
    """Indices of the requests that engine and drafter take; SpecDecError, and why, if they take none."""
    drafter = session.opened.drafter if session.opened is not None else None
    kept, first_error = [], None
    for i, request in enumerate(requests):
        try:
            session.engine.check_lengths(request)
            check_request(drafter, request)
            kept.append(i)
        except SpecDecError as error:
            first_error = first_error or error
    if first_error and not kept:
        raise SpecDecError(
            f"none of the {len(requests)} requests fits the engine; the first: {first_error.message}",
            hint="give shorter prompts, or raise `max_seq_len`",
            code="none_fits",
        )
    return kept
