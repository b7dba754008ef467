"""Replays traces through candidates, and predicts the time of each.

Candidates are the grid of every drafter, each with drafts of several lengths. A prediction adds up times, step by step,
and divides only at the end: a mean of speedups would give short steps the weight of long ones.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from runtime.checkpoint.costs import CostModel
from runtime.core.request import Sequence
from runtime.core.stats import RequestStats, sum_stats
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.engine.engine import Engine
from runtime.loop.session import Session
from runtime.measure.tuning.replay import ReplayedBatches, ReplayedStep, replay_batches
from runtime.text.trace_lines import Trace

DRAFT_LENS = (1, 2, 3, 4, 6, 8, 10)
NUM_SCREENED, NUM_LENGTHS, NUM_LIVE = 2, 2, 3
"""Numbers of best candidates: lookups that are replayed on all traces after a screening, and with a public pool; those
that are tried with shorter drafts; those that are run on the engine.
"""
_MAX_SCREENING_TOKENS = 30_000
"""Output tokens above which the grid is first replayed on a part of them; otherwise it would take minutes."""
_MAX_ADVICE_TOKENS = 10_000
"""Most output tokens that are replayed for advice, so that it takes a fraction of a second. A larger number is sampled.
"""
_LOSS = 0.995

Advance = Callable[[], None]


def fixed(*drafters: DrafterSpec) -> Speculation:
    return Speculation(drafters, "fixed")


def private_grid(max_draft_len: int) -> list[Speculation]:
    """All lookups of the grid, with their longest drafts."""
    return [fixed(one) for spec in DRAFTERS.values() for one in spec.grid(max_draft_len)]


def public(lookups: Iterable[Speculation]) -> list[Speculation]:
    """Variants with a public pool of finished requests' outputs."""
    return [one.with_drafters([replace(one.lookup, pool="public")]) for one in lookups if one.lookup]  # type: ignore[type-var]


def shorter_lens(max_draft_len: int) -> list[int]:
    """The draft lengths below the longest."""
    return [n for n in DRAFT_LENS if n < max_draft_len]


def is_replayable(speculation: Speculation) -> bool:
    """True if recorded outputs suffice to find what would have been drafted."""
    return not speculation or speculation.lookup is not None


def all_lengths(speculation: Speculation, max_draft_len: int) -> list[Speculation]:
    """Candidates made from a drafter that must be run: with drafts of each length, and with automatic lengths."""
    models = [one.max_draft_len or max_draft_len for one in speculation if one.is_model]
    longest = min(max_draft_len, max(models or [one.max_draft_len or max_draft_len for one in speculation]))
    lengths = [speculation.in_mode("fixed").with_length(n) for n in (*shorter_lens(longest), longest)]
    return [*lengths, lengths[-1].in_mode("auto")]


def labels_of(candidates: Seq[Speculation]) -> list[str]:
    return list(dict.fromkeys(candidate.label for candidate in candidates))


@dataclass(frozen=True)
class LoopSeconds:
    """Seconds of a loop: of its first steps, which compute the prompts, and of all other steps. A measured
    loop's parts include their own drafting; a predicted loop has all drafting in `others`.
    """

    prompts: float
    others: float

    @property
    def total(self) -> float:
        return self.prompts + self.others

    def scaled(self, by: "LoopSeconds") -> "LoopSeconds":
        """Each part multiplied by the part of `by`."""
        return LoopSeconds(self.prompts * by.prompts, self.others * by.others)

    def over(self, other: "LoopSeconds") -> "LoopSeconds":
        """Ratio of each part to the other's; 1 if the other has no time to compare with."""
        pairs = ((self.prompts, other.prompts), (self.others, other.others))
        return LoopSeconds(*(own / others if others else 1.0 for own, others in pairs))


def predict(replayed: ReplayedBatches, costs: CostModel, max_num_tokens: int) -> LoopSeconds:
    """Predicted seconds of all steps and of drafting; prompts are computed in chunks of `max_num_tokens` tokens."""
    seconds = {True: 0.0, False: replayed.draft_time_s}
    for step in replayed.steps:
        seconds[step.is_first] += step_s(step, costs, max_num_tokens)
    return LoopSeconds(seconds[True], seconds[False])


def step_s(step: ReplayedStep, costs: CostModel, max_num_tokens: int) -> float:
    """Seconds of a step without its drafting.

    The first step computes each prompt by itself, with its draft in the last chunk. In other steps the rows are folded,
    and each attends to its own context: rows of 100 and 300 tokens cost the same as two rows of 200; drafts of
    different lengths likewise.
    """
    num_rows = len(step.num_tokens)
    if step.is_first:
        rows = zip(step.num_tokens, step.draft_lens, strict=True)
        return sum(costs.context_s(prompt + drafted, max_num_tokens) for prompt, drafted in rows) + costs.host_s
    # The last token of each row is computed in this step, so its context is the tokens before it.
    context_len = round(sum(step.num_tokens) / num_rows) - 1
    return costs.iteration_s(num_rows, context_len, sum(step.draft_lens) / num_rows)


@dataclass(frozen=True)
class Cost:
    """Inputs of predictions: step costs, and the way in which prompts are computed."""

    costs: CostModel
    max_num_tokens: int

    @classmethod
    def of(cls, engine: Engine) -> "Cost":
        return cls(CostModel(engine.config.step_costs, engine.config.host_s), engine.max_num_tokens)


@dataclass(frozen=True)
class Replayed:
    """A candidate, the counts that a loop would have had with it, and, if costs are known, its predicted time."""

    candidate: Speculation
    batches: ReplayedBatches
    predicted: LoopSeconds | None

    @property
    def total(self) -> RequestStats:
        return sum_stats(self.batches.stats)

    @property
    def rank(self) -> float:
        """Rank of the candidate; lower is better. It is in seconds, or, without an engine, in steps."""
        return self.predicted.total if self.predicted is not None else float(self.total.num_steps)


@dataclass(frozen=True)
class Replayer:
    """Replays the same requests with one candidate after the other."""

    traces: Seq[Trace]
    batch_size: int = 1
    cost: Cost | None = None
    end_ids: frozenset[int] = frozenset()
    max_new_tokens: int | None = None

    def thinned(self, max_tokens: int) -> "Replayer":
        """This replayer, or one with every second, third, ... trace: about `max_tokens` output tokens in all."""
        every = -(-sum(len(trace.output_tokens) for trace in self.traces) // max_tokens)
        return self if every < 2 else replace(self, traces=self.traces[::every])

    def replay(self, candidate: Speculation) -> Replayed:
        drafter = None
        if candidate.lookup is not None:
            costs = self.cost.costs if self.cost and candidate.draft_len_mode == "auto" else None
            drafter = candidate.lookup.open_lookup(costs).drafter
        batches = replay_batches(
            self.traces,
            drafter,
            candidate.max_draft_len or 0,
            self.batch_size,
            max_new_tokens=self.max_new_tokens,
            end_ids=self.end_ids,
        )
        predicted = predict(batches, self.cost.costs, self.cost.max_num_tokens) if self.cost else None
        return Replayed(candidate, batches, predicted)


@dataclass
class Search:
    """Search over all drafters with their longest drafts; then over the best with a public pool, shorter drafts and
    `auto`.

    If the named drafter must be run, only *no drafter* is replayed. `screened` has the results of the grid on some of
    the traces, if replaying it on all would take long; otherwise it is empty.
    """

    replayer: Replayer
    max_draft_len: int
    named: Speculation = NO_SPECULATION
    tries_public: bool = False
    screened: list[Replayed] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Maximum number of replays, for a progress bar."""
        lengths = len(shorter_lens(self.max_draft_len)) + (self.replayer.cost is not None)
        if not is_replayable(self.named):
            return 1
        if self.named:
            return 2 + lengths
        num_grid = len(private_grid(1)) + NUM_SCREENED * (1 + self.tries_public)
        return 1 + num_grid + NUM_LENGTHS * lengths

    def run(self, advance: Advance) -> None:
        """Fill `replayed`, beginning with *no drafter*."""
        self._try([NO_SPECULATION], advance)
        self._try(self._drafters(advance), advance)
        if self.tries_public and not self.named:
            self._try(public(best_candidates(self.replayed, NUM_SCREENED)), advance)
        for best in best_candidates(self.replayed, NUM_LENGTHS):
            lengths = [best.with_length(n) for n in shorter_lens(self.max_draft_len)]
            auto = [best.in_mode("auto")] if self.replayer.cost else []
            self._try([*lengths, *auto], advance)

    def _drafters(self, advance: Advance) -> list[Speculation]:
        """Drafters to replay on all traces."""
        if self.named:
            is_lookup = self.named.lookup is not None
            return [self.named.in_mode("fixed").with_length(self.max_draft_len)] if is_lookup else []
        grid, some = private_grid(self.max_draft_len), self.replayer.thinned(_MAX_SCREENING_TOKENS)
        if some is self.replayer:
            return grid
        for drafter in grid:
            self.screened.append(some.replay(drafter))
            advance()
        return best_candidates(self.screened, NUM_SCREENED)

    def _try(self, candidates: Seq[Speculation], advance: Advance) -> None:
        for candidate in candidates:
            self.replayed.append(self.replayer.replay(candidate))
            advance()


def best_candidates(replayed: Seq[Replayed], number: int) -> list[Speculation]:
    """The best `number` of the candidates that have a drafter, by predicted time, or without an engine by steps."""
    return [one.candidate for one in sorted(replayed, key=lambda one: one.rank) if one.candidate][:number]


@dataclass(frozen=True)
class FixedLost:
    """Speedups over no drafter, by replay: of drafts of a fixed length, which lost time, and of automatic lengths."""

    fixed: float
    automatic: float


def fixed_lost(session: Session, sequences: Seq[Sequence], batch_size: int) -> FixedLost | None:
    """Advice on finished requests for which a lookup drafted with a fixed length, `batch_size` requests at once. None
    if that lost no time, if automatic lengths would have lost as much, or if it is unknown.
    """
    speculation, engine = session.speculation, session.engine
    is_known = speculation.lookup and speculation.draft_len_mode == "fixed" and engine.config.step_costs
    if not is_known or not sequences:
        return None
    traces = [Trace(s.request.prompt_tokens, tuple(s.output_tokens)) for s in sequences]
    request = sequences[0].request
    replayer = Replayer(traces, batch_size, Cost.of(engine), request.end_ids, request.max_new_tokens)
    replayer = replayer.thinned(_MAX_ADVICE_TOKENS)
    candidates = NO_SPECULATION, speculation, speculation.in_mode("auto")
    none, fixed, automatic = (_step_seconds(replayer, candidate) for candidate in candidates)
    return FixedLost(none / fixed, none / automatic) if none / fixed < _LOSS and automatic < fixed else None


def _step_seconds(replayer: Replayer, candidate: Speculation) -> float:
    """Seconds of the steps alone: a lookup takes only microseconds, and not always the same."""
    replayed, cost = replayer.replay(candidate).batches, replayer.cost
    assert cost is not None
    return sum(step_s(step, cost.costs, cost.max_num_tokens) for step in replayed.steps)
