"""Intervals against brute force over all signs and orders, and how often they hold the truth."""

import itertools

import numpy as np
import pytest

from runtime.measure.evaluation.significance import (
    Interval,
    _rank_sum_distribution,
    _signed_rank_distribution,
    paired_shift,
    unpaired_shift,
)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_distribution_of_signed_ranks_is_that_of_all_signs(n: int) -> None:
    sums = [
        sum(r for r, up in zip(range(1, n + 1), signs, strict=True) if up)
        for signs in itertools.product([0, 1], repeat=n)
    ]
    assert _signed_rank_distribution(n) == pytest.approx(np.bincount(sums, minlength=n * (n + 1) // 2 + 1) / 2**n)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (4, 4), (3, 6)])
def test_distribution_of_rank_sums_is_that_of_all_orders(m: int, n: int) -> None:
    numbers = []
    for of_the_m in itertools.combinations(range(m + n), m):
        of_the_n = set(range(m + n)) - set(of_the_m)
        numbers.append(sum(x > y for x in of_the_m for y in of_the_n))
    assert _rank_sum_distribution(m, n) == pytest.approx(np.bincount(numbers, minlength=m * n + 1) / len(numbers))


def signed_rank_p_value(differences: list[float]) -> float:
    """Two-sided, over all signs."""
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    centre = ranks.sum() / 2
    observed = abs(sum(r for r, d in zip(ranks, differences, strict=True) if d > 0) - centre)
    signs = itertools.product([0, 1], repeat=len(differences))
    return float(np.mean([abs(np.dot(s, ranks) - centre) >= observed - 1e-9 for s in signs]))


@pytest.mark.parametrize("seed", range(20))
def test_paired_interval_excludes_zero_exactly_where_wilcoxons_test_refuses_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(6, 11))
    a = rng.normal(size=n)
    differences = rng.normal(0.7, 1.0, size=n)
    interval = paired_shift(a, a + differences)
    assert interval is not None
    assert (not interval.contains(0.0)) == (signed_rank_p_value(list(differences)) <= 0.05)
    assert interval.low <= interval.estimate <= interval.high


@pytest.mark.parametrize("seed", range(20))
def test_unpaired_interval_excludes_zero_exactly_where_mann_and_whitneys_test_refuses_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=int(rng.integers(4, 7))), rng.normal(1.2, 1.0, size=int(rng.integers(4, 7)))
    interval = unpaired_shift(a, b)
    assert interval is not None
    everything = np.concatenate([a, b])
    number = int((b[:, None] > a[None, :]).sum())
    centre = len(a) * len(b) / 2
    extremes = []
    for chosen in itertools.combinations(range(len(everything)), len(b)):
        others = [i for i in range(len(everything)) if i not in chosen]
        above = sum(everything[i] > everything[j] for i in chosen for j in others)
        extremes.append(abs(above - centre) >= abs(number - centre))
    assert (not interval.contains(0.0)) == (np.mean(extremes) <= 0.05)


def test_too_few_values_have_no_interval() -> None:
    assert paired_shift([1.0] * 5, [9.0] * 5) is None
    assert paired_shift([1.0] * 6, [9.0] * 6) == Interval(8.0, 8.0, 8.0)
    assert paired_shift([], []) is None
    assert unpaired_shift([1.0, 2.0, 3.0], [7.0, 8.0, 9.0]) is None
    assert unpaired_shift([], [1.0]) is None


def test_large_samples_have_the_exact_interval_nearly(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=60), rng.normal(0.3, 1.0, size=60)
    exact = [paired_shift(a, b), unpaired_shift(a, b)]
    monkeypatch.setattr("runtime.measure.evaluation.significance._MAX_EXACT_PAIRS", 0)
    monkeypatch.setattr("runtime.measure.evaluation.significance._MAX_EXACT_PRODUCT", 0)
    for one, other in zip(exact, [paired_shift(a, b), unpaired_shift(a, b)], strict=True):
        assert one is not None and other is not None
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.02)
