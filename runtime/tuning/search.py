"""Replay traces through candidates, and predict what each would take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runtime.costs import CostModel
from runtime.drafters.opening import open_lookup
from runtime.drafters.settings import DrafterSettings, LookupDrafter
from runtime.stats import RequestStats, sum_stats
from runtime.tuning.candidates import Candidate, is_replayable, private_grid, public, shorter_lens
from runtime.tuning.prediction import LoopSeconds, predict
from runtime.tuning.replay import ReplayedBatches, Trace, replay_batches

NUM_SCREENED, NUM_LENGTHS, NUM_LIVE = 2, 2, 3
"""How many of the best drafters are tried with a public pool, with shorter drafts, and on the engine."""
_MAX_SCREENING_TOKENS = 30_000
"""Output tokens; with more of them the grid is first replayed on some, or it would take minutes."""

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
        drafter = None
        if isinstance(candidate.drafter, LookupDrafter):
            costs = self.cost.costs if self.cost and candidate.draft_len_mode == "auto" else None
            drafter = open_lookup(candidate.drafter, costs).drafter
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

    Where the named drafter has to be run, no drafter is all that is replayed. `screened` is the grid on some of the
    traces, where replaying it on all would take long; it is empty otherwise.
    """

    replayer: Replayer
    max_draft_len: int
    named: DrafterSettings | None
    tries_public: bool
    screened: list[Replayed] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)

    @property
    def most(self) -> int:
        """As many replays as there can be, for a progress bar."""
        lengths = len(shorter_lens(self.max_draft_len)) + (self.replayer.cost is not None)
        if not is_replayable(self.named):
            return 1
        if self.named is not None:
            return 2 + lengths
        num_grid = len(private_grid(1)) + NUM_SCREENED * (1 + self.tries_public)
        return 1 + num_grid + NUM_LENGTHS * lengths

    def run(self, advance: Advance) -> None:
        """Fill `replayed`, *no drafter* first."""
        self._try([Candidate()], advance)
        self._try([Candidate(drafter) for drafter in self._drafters(advance)], advance)
        if self.tries_public and self.named is None:
            self._try([Candidate(drafter) for drafter in public(_best_lookups(self.replayed))], advance)
        for best_one in _best(self.replayed, NUM_LENGTHS):
            lengths = [best_one.candidate.with_length(n) for n in shorter_lens(self.max_draft_len)]
            auto = [replace(best_one.candidate, draft_len_mode="auto")] if self.replayer.cost else []
            self._try([*lengths, *auto], advance)

    def _drafters(self, advance: Advance) -> list[LookupDrafter]:
        """Those to replay on all traces."""
        if isinstance(self.named, LookupDrafter):
            return [replace(self.named, max_draft_len=self.max_draft_len)]
        if self.named is not None:
            return []
        grid, some = private_grid(self.max_draft_len), self.replayer.thinned(_MAX_SCREENING_TOKENS)
        if some is self.replayer:
            return grid
        for drafter in grid:
            self.screened.append(some.replay(Candidate(drafter)))
            advance()
        return _best_lookups(self.screened)

    def _try(self, candidates: Sequence[Candidate], advance: Advance) -> None:
        for candidate in candidates:
            self.replayed.append(self.replayer.replay(candidate))
            advance()


def _best(replayed: Sequence[Replayed], number: int) -> list[Replayed]:
    """The best of those with a drafter."""
    return sorted((r for r in replayed if r.candidate.drafter), key=lambda r: r.rank)[:number]


def _best_lookups(replayed: Sequence[Replayed]) -> list[LookupDrafter]:
    drafters = [one.candidate.drafter for one in _best(replayed, NUM_SCREENED)]
    return [drafter for drafter in drafters if isinstance(drafter, LookupDrafter)]


def best_candidates(replayed: Sequence[Replayed]) -> list[Candidate]:
    """The best that have a drafter, by what was predicted."""
    return [r.candidate for r in _best(replayed, NUM_LIVE)]
