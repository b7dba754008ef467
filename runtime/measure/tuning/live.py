"""Times candidates on the engine, and compares the times with the predictions."""

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
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM
from runtime.loop.session import Session
from runtime.measure.evaluation.significance import MIN_PAIRS, paired_shift
from runtime.measure.tuning.search import Advance, LoopSeconds, Replayed

_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 3, 7, 10.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """A candidate on the engine: seconds of each batch in each round, and the output of the first round."""

    candidate: Speculation
    batches: list[list[LoopSeconds]]
    generation: Generation

    @property
    def seconds(self) -> float:
        """Seconds of all batches: the sum of each batch's median over the rounds."""
        return sum(float(median(s.total for s in rounds)) for rounds in zip(*self.batches, strict=True))

    @property
    def parts(self) -> LoopSeconds:
        """Seconds of the first steps, and of all other steps."""
        prompts = sum(float(median(s.prompts for s in rounds)) for rounds in zip(*self.batches, strict=True))
        return LoopSeconds(prompts, self.seconds - prompts)

    @property
    def counts(self) -> dict[str, Any]:
        return sum_stats(s.stats for s in self.generation.sequences).counts(self.candidate.max_draft_len or 0)

    def is_faster_than(self, other: "Measured") -> bool:
        """True if it is faster than the other by more than noise, judged batch by batch."""
        own, others = ([math.log(s.total) for batches in m.batches for s in batches] for m in (self, other))
        shift = paired_shift(others, own)
        return shift is not None and shift.high < 0 and self.seconds < other.seconds


@dataclass(frozen=True)
class LiveRun:
    """Candidates in turn on the same requests, batch by batch, each from an empty cache and with nothing learned."""

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
        """Time the candidates in turn: in the least number of rounds, and in up to 7 rounds within 10 seconds."""
        return self._timed(candidates, self.num_rounds, _MAX_ROUNDS, advance)

    def try_once(self, candidates: Sequence[Speculation], advance: Advance) -> list[Measured]:
        """Run each candidate once, one after the other, to find the candidates that are worth timing in turn."""
        return [self.try_in_turn([candidate], advance)[0] for candidate in candidates]

    def try_in_turn(self, candidates: Sequence[Speculation], advance: Advance) -> list[Measured]:
        """Run each candidate once, batch by batch in turn, so that a busy machine slows all alike."""
        return self._timed(candidates, 1, 1, advance)

    def _timed(
        self, candidates: Sequence[Speculation], least_rounds: int, most_rounds: int, advance: Advance
    ) -> list[Measured]:
        for candidate in candidates:
            self._round([candidate], 1, _WARM_UP_TOKENS)
        rounds: list[list[list[Generation]]] = []
        start = time.perf_counter()
        while len(rounds) < least_rounds or (len(rounds) < most_rounds and time.perf_counter() - start < _ENOUGH_S):
            rounds.append(self._round(candidates, self.num_batches, None))
            advance()
        return [
            Measured(candidate, [[_seconds(g) for g in one[i]] for one in rounds], _together(rounds[0][i]))
            for i, candidate in enumerate(candidates)
        ]

    def _round(
        self, candidates: Sequence[Speculation], num_batches: int, max_tokens: int | None
    ) -> list[list[Generation]]:
        """Results of each batch, by candidate."""
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
    """Seconds of a batch, split at the end of its first step, when all its sequences have their first token."""
    prompts = max(sequence.stats.ttft_s or 0.0 for sequence in batch.sequences)
    return LoopSeconds(prompts, batch.times.wall_s - prompts)


def _together(parts: Sequence[Generation]) -> Generation:
    times = LoopTimes()
    for part in parts:
        times.add(part.times)
    return Generation([sequence for part in parts for sequence in part.sequences], times)


@dataclass(frozen=True)
class Confirmed:
    """A candidate that was run. If it was also replayed on the same prompts, `predicted` is its predicted time, scaled
    by the factors between measured and predicted times without a drafter.
    """

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
    """The best candidates, beginning with *no drafter*. Predictions were multiplied by `factors`."""

    confirmed: list[Confirmed]
    factors: LoopSeconds

    @property
    def recommended(self) -> Confirmed:
        """The fastest candidate that is faster than no drafter by more than noise; otherwise no drafter."""
        none, *others = self.confirmed
        faster = [other for other in others if other.measured.is_faster_than(none.measured)]
        return min([none, *faster], key=lambda one: one.measured.seconds)


def confirm(replayed: Sequence[Replayed], measured: Sequence[Measured]) -> Confirmation:
    """Measurements, beginning with no drafter, and the predictions of replayed candidates for the same prompts.

    The machine may be busier or quieter than when its steps were measured, which affects prompts more than steps of one
    token. So the first steps have a factor, and the later steps have a second factor: the time without a drafter,
    measured over predicted.
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
    """`wanted` of the indices of `number` things, spread as evenly as possible: 0, 3 and 6 for 3 of 10."""
    wanted = min(number, wanted)
    return [i * number // wanted for i in range(wanted)]
