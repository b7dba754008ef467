"""Costs of drafts are learned from the times of steps, and looking costs little where it does not pay."""

import random
from math import ceil

import numpy as np
import pytest

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.meter import Meter
from runtime.measure.tuning.replay import replay_batches
from runtime.text.trace_lines import Trace


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(*ids: int) -> list[Sequence]:
    return [Sequence.start(Request(i, (1,), 10)) for i in ids]


def test_factor_is_what_least_squares_find() -> None:
    """Beside numpy, of weights that fade, with the prior as twelve steps more."""
    watch, rng, sequences = Watch(), random.Random(0), rows(1, 2)
    meter = Meter(watch)
    added, times = [], []
    for _ in range(200):
        added.append(rng.choice([0.0, 0.1, 0.2, 0.4]))
        times.append(0.9 + 2 * added[-1] + rng.gauss(0, 0.02))
        meter.sent(sequences, 2.0, 2.0 * (1 + added[-1]))
        watch.now += 2.0 * times[-1]
        meter.see(sequences)
    weights = 0.98 ** np.arange(200)[::-1]
    mean = np.average(added, weights=weights)
    squares = weights @ (np.array(added) - mean) ** 2
    slope, alone = np.polyfit(added, times, 1, w=np.sqrt(weights))
    assert (slope, alone) == (pytest.approx(2, abs=0.05), pytest.approx(0.9, abs=0.02))
    prior = 12 * (squares / weights.sum() + 0.2**2)
    assert meter.factor == pytest.approx((squares * slope + 1.3 * prior) / (squares + prior), rel=1e-6)


@pytest.mark.parametrize("num_looks", [1, 3, 200])
def test_time_of_looking_is_a_mean_from_the_first_look_on(num_looks: int) -> None:
    """Beside numpy, of weights that fade: nothing stands for looks that never were."""
    meter, seconds = Meter(Watch()), np.random.default_rng(0).uniform(1e-5, 9e-5, num_looks)
    for one in seconds:
        meter.looked(rows(1, 2), 2 * one)
    expected = np.average(seconds, weights=0.98 ** np.arange(num_looks)[::-1])
    assert meter.look_with_new_s == pytest.approx(expected)
    of_known = seconds[1:]
    if num_looks > 1:
        assert meter.look_s == pytest.approx(np.average(of_known, weights=0.9 ** np.arange(num_looks - 1)[::-1]))


class Right:
    """Drafts the recorded output, one token more each time, so that steps differ."""

    def __init__(self, output: list[int]) -> None:
        self.output, self.asked = output, list[list[int]]()

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.asked.append([s.request.id for s in sequences])
        most = 1 + len(self.asked) % max_draft_len
        return [Draft(self.output[s.num_generated :][:most]) for s in sequences]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


class Loop:
    """A drafter in a loop whose steps take a second, and for each draft token so much of one more."""

    def __init__(self, drafter: AdaptiveDrafter, watch: Watch, per_token: float) -> None:
        self.drafter, self.watch, self.per_token = drafter, watch, per_token

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.drafter.propose(sequences, max_draft_len)
        self.watch.now += 1 + self.per_token * sum(len(draft.tokens) for draft in drafts)
        return drafts

    def forget(self, request_id: int) -> None:
        self.drafter.forget(request_id)


@pytest.mark.parametrize(("per_token", "is_sent"), [(0.3, True), (1.1, False)])
def test_tokens_that_cost_more_than_they_yield_are_no_longer_sent(per_token: float, is_sent: bool) -> None:
    """All are right, and their price is a third of a step: what they take decides."""
    watch, output = Watch(), [random.Random(1).randrange(1000) for _ in range(600)]
    adaptive = AdaptiveDrafter(Right(output), lambda batch_size, context_len, n: 1 + 0.3 * n, clock=watch)
    (stats,) = replay_batches([Trace((1,), tuple(output))], Loop(adaptive, watch, per_token), 10).stats
    late = stats.per_step_drafted[len(stats.per_step_drafted) // 2 :]
    assert (sum(late) / len(late) > 2) == is_sent, late


def test_a_large_batch_is_looked_at_in_every_step_only_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is right a lookup is asked in one step of four, for all rows, and in all once drafts are right."""
    watch, output = Watch(), list(range(100, 400))
    monkeypatch.setattr("runtime.drafters.adaptive.thread_time", watch)
    lookup = Right([0] * 300)
    adaptive = AdaptiveDrafter(lookup, lambda batch_size, context_len, n: (8 + 0.2 * n * batch_size) / 1e3, clock=watch)
    sequences, num_wrong = rows(*range(16)), 30
    for i in range(150):
        drafts = adaptive.propose(sequences, 10)
        watch.now += (8 + 0.2 * sum(len(draft.tokens) for draft in drafts)) / 1e3
        if i == num_wrong - 1:
            assert lookup.asked == [list(range(16))] * ceil(num_wrong / 4)
            lookup.asked.clear()
            lookup.output = output
        for sequence in sequences:
            sequence.tokens.append(output[sequence.num_generated])
    assert len(lookup.asked) > (150 - num_wrong) / 2
