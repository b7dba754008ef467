"""Choice of the drafter that fits a model: the speed of each, predicted from sampled answers and the costs of steps.

Lookups are replayed. Drafters with a model are run on the sample, with drafts of one token and of their usual length.
The accepted tokens and the time of the drafts also give the speed for the lengths between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from runtime.core.request import Request
from runtime.core.stats import sum_stats
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.llm import LLM
from runtime.measure.tuning.live import LiveRun, Measured
from runtime.measure.tuning.search import Cost, Replayer, Search, fixed
from runtime.measure.tuning.tune import Answered, Progress


@dataclass(frozen=True)
class Rival:
    """A drafter and its promises: tokens of a step, seconds of a draft and of all steps after the context phase."""

    candidate: Speculation
    tokens_per_step: float
    draft_s: float
    seconds: float

    def speedup_over(self, without: "Rival") -> float:
        return without.seconds / self.seconds


@dataclass(frozen=True)
class Sample:
    """The target's answers, and the seconds of their steps after the context phase, without a drafter: measured, and
    predicted from step costs.
    """

    llm: LLM
    answered: Answered
    measured_s: float
    predicted_s: float

    @property
    def factor(self) -> float:
        """Measured ÷ predicted seconds of steps: 2 if they took twice as long as their costs predict."""
        return self.measured_s / self.predicted_s

    @property
    def cost(self) -> Cost:
        return Cost.of(self.llm.engine)

    @property
    def replayer(self) -> Replayer:
        answered = self.answered
        return Replayer(answered.traces, 1, self.cost, answered.requests[0].end_ids, answered.max_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the first of each answer, which comes from the context phase."""
        return sum(len(trace.output_tokens) - 1 for trace in self.answered.traces)

    @property
    def context_len(self) -> int:
        """Number of tokens before the middle of an output, on average."""
        traces = self.answered.traces
        return sum(len(t.prompt_tokens) + len(t.output_tokens) // 2 for t in traces) // len(traces)


def open_sample(llm: LLM, answered: Answered, progress: Progress) -> Sample:
    """Run the sample without a drafter."""
    llm.measure_costs()
    live = LiveRun(llm, _renumbered(answered.requests), 1)
    with progress("without a drafter", 1) as advance:
        (without,) = live.try_once([NO_SPECULATION], advance)
    sample = Sample(llm, answered, without.parts.others, 1.0)
    predicted = sample.replayer.replay(NO_SPECULATION).predicted
    assert predicted is not None
    return replace(sample, predicted_s=predicted.others)


def rivals_of_lookups(sample: Sample, progress: Progress) -> list[Rival]:
    """Rivals by replay: *no drafter*, then the best lookup."""
    search = Search(sample.replayer, min(10, sample.llm.engine.max_draft_len))
    with progress("replaying lookups", search.most) as advance:
        search.run(advance)
    none, *others = search.replayed
    best = min(others, key=lambda one: one.rank)
    found = []
    for one in (none, best):
        assert one.predicted is not None
        draft_s = one.batches.draft_time_s / max(len(one.batches.steps), 1)
        counts = one.total.counts(one.candidate.max_draft_len or 0)
        seconds = one.predicted.others * sample.factor
        found.append(Rival(one.candidate, counts["tokens_per_step"], draft_s, seconds))
    return found


def rival_of_model(sample: Sample, llm: LLM, drafter: DrafterSpec, progress: Progress) -> Rival:
    """A drafter with a model, on the engine that was built for it, with drafts of the length that promises most.

    It runs in turn with no drafter: a draft that took 3 ms while the machine was half as fast counts as 1.5 ms.
    """
    longest = min(drafter.max_draft_len or llm.engine.max_draft_len, llm.engine.max_draft_len)
    whole = fixed(drafter).with_length(longest)
    with progress(f"trying {drafter.description.title}", 1) as advance:
        live = LiveRun(llm, _renumbered(sample.answered.requests), 1)
        without, short, run = live.try_in_turn([NO_SPECULATION, whole.with_length(1), whole], advance)
    survivals = survivals_of(run, longest)
    slower = without.parts.others / sample.measured_s
    short_s, long_s = _drafting_s(short) / slower, _drafting_s(run) / slower
    costs, rivals = sample.cost.costs, list[Rival]()
    for length, tokens in enumerate(accumulate(survivals[1:], initial=1.0 + survivals[0]), 1):
        draft_s = short_s + (long_s - short_s) * (length - 1) / max(longest - 1, 1)
        step_s = costs.iteration_s(1, sample.context_len, length) * sample.factor
        seconds = sample.num_tokens / tokens * (step_s + draft_s)
        rivals.append(Rival(whole.with_length(length), tokens, draft_s, seconds))
    return min(rivals, key=lambda one: one.seconds)


def survivals_of(run: Measured, longest: int) -> list[float]:
    """The shares of drafts whose first token was accepted, whose first two tokens were, and so on."""
    total = sum_stats(sequence.stats for sequence in run.generation.sequences)
    histogram = [*total.acceptance_histogram, *[0] * (longest + 1)][: longest + 1]
    num_drafts = max(sum(histogram), 1)
    return [sum(histogram[k:]) / num_drafts for k in range(1, longest + 1)]


def _drafting_s(run: Measured) -> float:
    """Seconds of drafting for each step, without counting each request's first step."""
    times = run.generation.times
    return times.draft_time_s / max(times.num_iterations - len(run.generation.sequences), 1)


def _renumbered(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, id=i) for i, request in enumerate(requests)]
