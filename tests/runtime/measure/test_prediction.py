"""Predicted times against sums made by hand, and replayed batches against replays one by one."""

import pytest
from tiny import repetitive_prompt

from runtime.checkpoint.config import StepCost
from runtime.checkpoint.costs import CostModel
from runtime.core.request import Draft, Sequence
from runtime.core.stats import sum_stats
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.measure.tuning.replay import replay_batches
from runtime.measure.tuning.search import LoopSeconds, predict
from runtime.text.trace_lines import Trace

MS = 1e-3
# Batches of 1 and 2: 10 and 16 ms, 1 ms more for each further token of a row, 2 ms more after 100 tokens of context.
COSTS = CostModel(
    [
        StepCost(batch, context, tokens, (base + tokens - 1 + context / 50) * MS)
        for batch, base in ((1, 10), (2, 16))
        for context in (0, 100)
        for tokens in (1, 5)
    ],
    host_s=0.5 * MS,
)
TRACES = [
    Trace(tuple(repetitive_prompt(i, 20 + i)), tuple(repetitive_prompt(i, 30 + 5 * i)), "ab"[i % 2]) for i in range(7)
]


class Fixed:
    """Drafts of full length, whatever the budget: the next tokens of a text of 5 and 6."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([5, 6, 5, 6, 5, 6][:max_draft_len]) for _ in sequences]

    def forget(self, request_id: int) -> None:
        pass


def test_prediction_is_the_sum_by_hand() -> None:
    """A prompt of 2 tokens and the output 5 6 5 9 8, drafts of 2: 5 6 accepted, then 5 rejected, then none."""
    trace = Trace((1, 2), (5, 6, 5, 9, 8))
    replayed = replay_batches([trace], Fixed(), 2)
    assert [(s.num_tokens, s.draft_lens) for s in replayed.steps] == [((2,), (2,)), ((5,), (1,)), ((6,), (0,))]
    others = (10 + 1 + 4 / 50 + 0.5) + (10 + 5 / 50 + 0.5)
    replayed.draft_time_s = 7 * MS
    predicted = predict(replayed, COSTS, 512)
    assert predicted.prompts == pytest.approx((10 + 3 + 0.5) * MS)
    assert predicted.others == pytest.approx((others + 7) * MS)


def test_parts_are_scaled_each_by_its_own() -> None:
    """Prompts took twice as long as predicted and steps as long: so will the prompts of others."""
    factors = LoopSeconds(4.0, 3.0).over(LoopSeconds(2.0, 3.0))
    assert LoopSeconds(2.0, 1.0).scaled(factors).total == 5.0
    assert LoopSeconds(1.0, 0.0).over(LoopSeconds(2.0, 0.0)) == LoopSeconds(0.5, 1.0)


@pytest.mark.parametrize("batch_size", [2, 3, 7, 9])
def test_batches_count_as_one_by_one(batch_size: int) -> None:
    batches = replay_batches(TRACES, NgramLookup(3), 4, batch_size)
    one_by_one = replay_batches(TRACES, NgramLookup(3), 4).stats
    for stats, expected in zip(batches.stats, one_by_one, strict=True):
        assert stats.counts(4) == expected.counts(4)
        assert stats.per_step_accepted == expected.per_step_accepted
    assert sum(len(step.num_tokens) for step in batches.steps) == sum_stats(one_by_one).num_steps
    groups = [one_by_one[i : i + batch_size] for i in range(0, len(TRACES), batch_size)]
    assert len(batches.steps) == sum(max(stats.num_steps for stats in group) for group in groups)


def test_public_text_comes_from_groups_before() -> None:
    """All of one group are asked before anybody has finished."""
    together = replay_batches(TRACES, NgramLookup(3, pool=NgramPool()), 4, len(TRACES))
    private = replay_batches(TRACES, NgramLookup(3), 4)
    assert sum_stats(together.stats).counts(4) == sum_stats(private.stats).counts(4)
    one_by_one = replay_batches(TRACES, NgramLookup(3, pool=NgramPool()), 4)
    assert sum_stats(one_by_one.stats).num_draft_tokens > sum_stats(private.stats).num_draft_tokens
