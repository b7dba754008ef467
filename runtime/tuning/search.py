"""Find settings: replay traces through candidates, predict what each would take, and time the best on the engine."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from runtime.costs import CostModel
from runtime.drafters.opening import TargetBundle, open_drafter
from runtime.engine import KVCacheConfig
from runtime.errors import SpecDecError
from runtime.evaluation.noise import MIN_PAIRS, paired_shift
from runtime.request import Request
from runtime.session import Generation, Session
from runtime.stats import LoopTimes, RequestStats, sum_stats
from runtime.tuning.candidates import Candidate, LookupSettings, private_grid, public, shorter_lens
from runtime.tuning.prediction import LoopSeconds, predict
from runtime.tuning.replay import ReplayedBatches, Trace, replay_batches

NUM_SCREENED, NUM_LENGTHS, NUM_LIVE = 2, 2, 3
"""How many of the best drafters are tried with a public pool, with shorter drafts, and on the engine."""
_MAX_SCREENING_TOKENS = 30_000
"""Of outputs: with more of them the grid is first replayed on some, or it would take minutes."""
_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 3, 7, 10.0
_WARM_UP_TOKENS = 8

Advance = Callable[[], None]


@dataclass(frozen=True)
class Cost:
    """What predictions need: what steps cost, and how prompts are computed."""

    costs: CostModel
    max_num_tokens: int


@dataclass(frozen=True)
class Replayed:
    """A candidate, what a loop would have counted with it, and, where costs are known, how long it would take."""

    candidate: Candidate
    batches: ReplayedBatches
    predicted: LoopSeconds | None

    @property
    def total(self) -> RequestStats:
        return sum_stats(self.batches.stats)

    @property
    def rank(self) -> float:
        """Less is better: seconds, or without an engine steps."""
        return self.predicted.total if self.predicted is not None else float(self.total.num_steps)


@dataclass(frozen=True)
class Replayer:
    """Replays the same requests with one candidate after the other."""

    traces: Sequence[Trace]
    batch_size: int = 1
    cost: Cost | None = None
    end_ids: frozenset[int] = frozenset()
    max_new_tokens: int | None = None

    def thinned(self, max_tokens: int) -> "Replayer":
        """Itself, or with every second, third, ... of the traces, so that outputs have about `max_tokens`."""
        every = -(-sum(len(trace.output_tokens) for trace in self.traces) // max_tokens)
        return self if every < 2 else replace(self, traces=self.traces[::every])

    def replay(self, candidate: Candidate) -> Replayed:
        with ExitStack() as stack:
            drafter = None
            if candidate.drafter is not None:
                costs = self.cost.costs if self.cost and candidate.draft_len_mode == "auto" else None
                # Lookups look at nothing of the target but what its steps cost.
                target = TargetBundle(Path(), Path(), 0, costs)
                drafter = stack.enter_context(open_drafter(candidate.drafter, target, KVCacheConfig()))
            batches = replay_batches(
                self.traces,
                drafter,
                candidate.max_draft_len,
                self.batch_size,
                max_new_tokens=self.max_new_tokens,
                end_ids=self.end_ids,
            )
        predicted = predict(batches, self.cost.costs, self.cost.max_num_tokens) if self.cost else None
        return Replayed(candidate, batches, predicted)


@dataclass
class Search:
    """All drafters with their longest drafts; then the best of them with a public pool, shorter drafts and `auto`.

    `screened` is the grid on some of the traces, where replaying it on all would take long; it is empty otherwise.
    """

    replayer: Replayer
    max_draft_len: int
    named: LookupSettings | None
    tries_public: bool
    screened: list[Replayed] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)

    @property
    def most(self) -> int:
        """As many replays as there can be, for a progress bar."""
        lengths = len(shorter_lens(self.max_draft_len)) + (self.replayer.cost is not None)
        if self.named is not None:
            return 2 + lengths
        num_grid = len(private_grid(1)) + NUM_SCREENED * (1 + self.tries_public)
        return 1 + num_grid + NUM_LENGTHS * lengths

    def run(self, advance: Advance) -> None:
        """Fill `replayed`, *no drafter* first."""
        self._try([Candidate()], advance)
        self._try([Candidate(drafter) for drafter in self._drafters(advance)], advance)
        if self.tries_public and self.named is None:
            best = [r.candidate.drafter for r in _best(self.replayed, NUM_SCREENED) if r.candidate.drafter]
            self._try([Candidate(drafter) for drafter in public(best)], advance)
        for best_one in _best(self.replayed, NUM_LENGTHS):
            lengths = [best_one.candidate.with_length(n) for n in shorter_lens(self.max_draft_len)]
            auto = [replace(best_one.candidate, draft_len_mode="auto")] if self.replayer.cost else []
            self._try([*lengths, *auto], advance)

    def _drafters(self, advance: Advance) -> list[LookupSettings]:
        """Those to replay on all traces."""
        if self.named is not None:
            return [replace(self.named, max_draft_len=self.max_draft_len)]
        grid, some = private_grid(self.max_draft_len), self.replayer.thinned(_MAX_SCREENING_TOKENS)
        if some is self.replayer:
            return grid
        for drafter in grid:
            self.screened.append(some.replay(Candidate(drafter)))
            advance()
        return [r.candidate.drafter for r in _best(self.screened, NUM_SCREENED) if r.candidate.drafter]

    def _try(self, candidates: Sequence[Candidate], advance: Advance) -> None:
        for candidate in candidates:
            self.replayed.append(self.replayer.replay(candidate))
            advance()


def _best(replayed: Sequence[Replayed], number: int) -> list[Replayed]:
    """Of those with a drafter."""
    return sorted((r for r in replayed if r.candidate.drafter), key=lambda r: r.rank)[:number]


@dataclass(frozen=True)
class Measured:
    """A candidate on the engine: seconds of each batch in each round, and what the first round generated."""

    candidate: Candidate
    batches: list[list[LoopSeconds]]
    generation: Generation

    @property
    def seconds(self) -> float:
        """Of all batches, each by its median over the rounds: what disturbs one batch once does not count."""
        return sum(float(median(s.total for s in rounds)) for rounds in zip(*self.batches, strict=True))

    @property
    def parts(self) -> LoopSeconds:
        """Their first steps, and all others."""
        prompts = sum(float(median(s.prompts for s in rounds)) for rounds in zip(*self.batches, strict=True))
        return LoopSeconds(prompts, self.seconds - prompts)

    @property
    def counts(self) -> dict[str, Any]:
        return sum_stats(s.stats for s in self.generation.sequences).counts(self.candidate.max_draft_len)

    def is_faster_than(self, other: "Measured") -> bool:
        """By more than noise, which is told batch by batch."""
        own, others = ([math.log(s.total) for batches in m.batches for s in batches] for m in (self, other))
        shift = paired_shift(others, own)
        return shift is not None and shift.high < 0 and self.seconds < other.seconds


@dataclass(frozen=True)
class LiveRun:
    """Candidates in turn on the same prompts, batch by batch; each starts cold and with nothing learned."""

    session: Session
    prompts: Sequence[tuple[int, ...]]
    max_new_tokens: Sequence[int]
    batch_size: int

    @property
    def num_batches(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    @property
    def num_rounds(self) -> int:
        """At least."""
        return max(_MIN_ROUNDS, -(-MIN_PAIRS // self.num_batches))

    def measure(self, candidates: Sequence[Candidate], advance: Advance) -> list[Measured]:
        """Rounds through all of them, as many as noise asks for, and more while they are short."""
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

    def _round(
        self, candidates: Sequence[Candidate], num_batches: int, max_tokens: int | None
    ) -> list[list[Generation]]:
        """Of each candidate the generation of each batch."""
        with ExitStack() as stack:
            sessions = [stack.enter_context(_session_of(self.session, candidate)) for candidate in candidates]
            parts: list[list[Generation]] = [[] for _ in candidates]
            for batch in range(num_batches):
                for session, done in zip(sessions, parts, strict=True):
                    done.append(self._answer(session, batch, max_tokens))
        return parts

    def _answer(self, session: Session, batch: int, max_tokens: int | None) -> Generation:
        session.clear_cache()
        chosen = range(len(self.prompts))[batch * self.batch_size : (batch + 1) * self.batch_size]
        requests = [
            session.request(i, self.prompts[i], min(self.max_new_tokens[i], max_tokens or self.max_new_tokens[i]))
            for i in chosen
        ]
        return session.run(requests, speculate=True)


@contextmanager
def _session_of(session: Session, candidate: Candidate) -> Iterator[Session]:
    """The session's engine with the candidate's drafter, newly made."""
    settings = replace(session.settings, drafter=candidate.drafter, draft_len_mode=candidate.draft_len_mode)
    if candidate.drafter is None:
        yield replace(session, settings=settings, drafter=None)
        return
    config = session.engine.config
    costs = CostModel(config.step_costs, config.host_s) if candidate.draft_len_mode == "auto" else None
    target = TargetBundle(settings.engine_dir, session.tokenizer_dir, config.vocab_size, costs)
    with open_drafter(candidate.drafter, target, settings.kv_cache) as drafter:
        yield replace(session, settings=settings, drafter=drafter)


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
    """A candidate on the prompts that were also run: its prediction for them, scaled, beside its measurement."""

    replayed: Replayed
    measured: Measured
    predicted_s: float
    predicted_speedup: float
    measured_speedup: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured.seconds


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
    """Predictions and measurements of the same candidates on the same prompts, no drafter first.

    The machine may be busier than when its steps were measured, or quieter, which prompts feel more than steps of one
    token: one factor for the first and one for the second, what no drafter takes over what was predicted for it.
    """
    predictions = [one.predicted or LoopSeconds(0.0, 0.0) for one in replayed]
    factors = measured[0].parts.over(predictions[0])
    scaled = [seconds.scaled(factors).total for seconds in predictions]
    return Confirmation(
        [
            Confirmed(r, m, seconds, scaled[0] / seconds, measured[0].seconds / m.seconds)
            for r, m, seconds in zip(replayed, measured, scaled, strict=True)
        ],
        factors,
    )


def best_candidates(replayed: Sequence[Replayed]) -> list[Candidate]:
    """No drafter, and the best that have one by what was predicted."""
    return [Candidate(), *(r.candidate for r in _best(replayed, NUM_LIVE))]


def spread(number: int, wanted: int) -> list[int]:
    """Indices of `wanted` of `number` things, as even as can be: of 10 the 3 at 0, 3 and 6."""
    wanted = min(number, wanted)
    return [i * number // wanted for i in range(wanted)]


def fitting(session: Session, requests: Sequence[Request]) -> list[int]:
    """Indices of the requests that the engine takes; SpecDecError, and why, if it takes none."""
    kept, first_error = [], None
    for i, request in enumerate(requests):
        try:
            session.engine.check_lengths(request)
            kept.append(i)
        except SpecDecError as error:
            first_error = first_error or error
    if first_error and not kept:
        raise SpecDecError(
            f"none of the {len(requests)} requests fits the engine; the first: {first_error.message}",
            hint="give shorter ones, or build with larger `--max-input-len` and `--max-seq-len`",
        )
    return kept
