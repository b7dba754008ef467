"""Statistics of an answer: counts of each step, and clock readings at its start, first token and end.

Every rate is derived from them. The keys are those of vLLM's record of speculative decoding for each request, so tools
that read vLLM's record read ours.
"""

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

FinishReason = Literal["end_id", "stop", "length"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities at a position: the token's own, and the most probable tokens'."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most probable tokens, the best first."""


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _add_at(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


def _sum_lists(lists: Iterable[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


@dataclass
class RequestStats:
    """Counts of a request, or sums over many requests; times in seconds."""

    num_steps: int = 0
    num_spec_steps: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_reused_tokens: int = 0
    num_predicted_tokens: int = 0
    """Draft tokens from the output that the request predicts."""
    num_accepted_predicted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    histogram_by_draft_len: dict[int, list[int]] = field(default_factory=dict)
    """Histogram of accepted tokens for drafts of each length: `k + 1` numbers for drafts of `k` tokens."""
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    start_s: float = 0.0
    first_token_s: float | None = None
    end_s: float | None = None

    def start(self) -> None:
        self.start_s = time.perf_counter()

    def record_step(self, num_drafted: int, num_accepted: int, num_new_tokens: int) -> None:
        """Count a step of this request, with its tokens after the cut at the output's end."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        self.num_steps += 1
        self.num_generated_tokens += num_new_tokens
        self.per_step_drafted.append(num_drafted)
        self.per_step_accepted.append(num_accepted)
        if num_drafted == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted
        _add_at(self.acceptance_histogram, num_accepted)
        self.histogram_by_draft_len.setdefault(num_drafted, [0] * (num_drafted + 1))[num_accepted] += 1
        for i in range(num_drafted):
            _add_at(self.drafted_per_position, i)
        for i in range(num_accepted):
            _add_at(self.accepted_per_position, i)

    def copy(self) -> "RequestStats":
        """Snapshot of the current values."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(copied, name, list(value))
        copied.histogram_by_draft_len = {k: list(counts) for k, counts in self.histogram_by_draft_len.items()}
        return copied

    def finish(self) -> None:
        self.end_s = time.perf_counter()

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.start_s

    @property
    def latency_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        if self.end_s is None or self.first_token_s is None:
            return None
        return ratio(self.end_s - self.first_token_s, self.num_generated_tokens - 1)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted tokens divided by drafted tokens; None if nothing was drafted."""
        return ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens per draft; None if nothing was drafted."""
        per_spec_step = ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return None if per_spec_step is None else 1 + per_spec_step

    @property
    def tokens_per_step(self) -> float | None:
        return ratio(self.num_generated_tokens, self.num_steps)

    def speculation_record(self, max_draft_len: int) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding` of a request; a rate with nothing to divide by is None."""
        histogram = self.acceptance_histogram + [0] * (max_draft_len + 1 - len(self.acceptance_histogram))
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(k): list(counts) for k, counts in sorted(self.histogram_by_draft_len.items())
            },
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": max_draft_len,
        }

    def counts(self, max_draft_len: int) -> dict[str, Any]:
        """Counts and the rates derived from them; a rate with nothing to divide by is None.

        `acceptance_histogram` has max_draft_len + 1 entries, `acceptance_rate_per_position` max_draft_len.
        """
        drafted = self.drafted_per_position + [0] * (max_draft_len - len(self.drafted_per_position))
        accepted = self.accepted_per_position + [0] * (len(drafted) - len(self.accepted_per_position))
        return {
            "num_generated_tokens": self.num_generated_tokens,
            "num_steps": self.num_steps,
            **self.speculation_record(max_draft_len),
            "tokens_per_step": self.tokens_per_step,
            "num_drafts_per_position": drafted,
            "acceptance_rate_per_position": [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)],
            "num_reused_tokens": self.num_reused_tokens,
        }

    def as_dict(self, max_draft_len: int, *, per_step: bool = False) -> dict[str, Any]:
        """A request's record: counts, rates and times; with `per_step` also the numbers of each step."""
        record = self.counts(max_draft_len)
        record |= {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "latency_s": self.latency_s}
        if per_step:
            record |= {"per_step_drafted": self.per_step_drafted, "per_step_accepted": self.per_step_accepted}
        return record


def _sum_by_draft_len(stats: list[RequestStats]) -> dict[int, list[int]]:
    lengths = {k for s in stats for k in s.histogram_by_draft_len}
    return {k: _sum_lists(s.histogram_by_draft_len.get(k, []) for s in stats) for k in lengths}


def sum_stats(all_stats: Iterable[RequestStats]) -> RequestStats:
    """Counts added up over requests. Times are left out, because they overlap, and so are the series of steps."""
    stats = list(all_stats)
    total = RequestStats(histogram_by_draft_len=_sum_by_draft_len(stats))
    for name in ("acceptance_histogram", "drafted_per_position", "accepted_per_position"):
        setattr(total, name, _sum_lists(getattr(s, name) for s in stats))
    for name in vars(total):
        if name.startswith("num_"):
            setattr(total, name, sum(getattr(s, name) for s in stats))
    return total


@dataclass(frozen=True)
class StateStats:
    """Counts of an engine's slots of states, since it was opened. All are 0 for models without states."""

    num_waits: int = 0
    """Admissions refused for lack of a slot."""
    num_evictions: int = 0
    """Kept states that gave their slot to another sequence."""
    num_hits: int = 0
    """Prompts that continued from a kept state after all, or almost all, tokens whose K/V were found."""
    num_misses: int = 0
    """Prompts of which a block of tokens or more was computed again for lack of a state, though their K/V were found.
    """

    def plus(self, **counts: int) -> "StateStats":
        return StateStats(**{name: value + counts.get(name, 0) for name, value in vars(self).items()})

    def since(self, before: "StateStats") -> "StateStats":
        return self.plus(**{name: -value for name, value in vars(before).items()})


@dataclass(frozen=True)
class PromptTokens:
    """Counts of an engine's prompt tokens: those whose K/V were found in memory or on disk, and those computed."""

    num_in_memory: int = 0
    num_on_disk: int = 0
    num_computed: int = 0

    def plus(self, num_tokens: int, num_found: int, num_on_disk: int) -> "PromptTokens":
        """Add a prompt of `num_tokens` tokens, of which `num_found` were found, `num_on_disk` of these on disk. With
        `num_tokens` 0, more tokens of an earlier prompt were found.
        """
        return PromptTokens(
            self.num_in_memory + num_found - num_on_disk,
            self.num_on_disk + num_on_disk,
            self.num_computed + num_tokens - num_found,
        )


@dataclass
class LoopTimes:
    """Parts of a loop's wall time: drafting, the compiled step, and everything else."""

    wall_s: float = 0.0
    draft_time_s: float = 0.0
    draft_model_time_s: float = 0.0
    """The part of draft_time_s in which a draft model, a head or the self-draft copy computed."""
    target_time_s: float = 0.0
    num_iterations: int = 0
    num_preemptions: int = 0
    """Number of times that a sequence gave its K/V blocks back, or stayed out of a step, because blocks were short."""

    @property
    def host_time_s(self) -> float:
        return self.wall_s - self.draft_time_s - self.target_time_s

    def add(self, other: "LoopTimes") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
