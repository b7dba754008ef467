"""Significance of the difference of two measurements, from one value per observation.

These are rank methods, because times have outliers: Wilcoxon's signed ranks if the observations are paired, Mann and
Whitney's ranks if they are not. They assume no distribution, and give an interval only if there are enough
observations. The estimates are Hodges and Lehmann's.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
MIN_PAIRS = 6  # fewer never exclude anything at this level
_MAX_EXACT_PAIRS, _MAX_EXACT_PRODUCT = 300, 10_000  # beyond them the distributions are normal to all digits that matter

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimated difference, and the interval that contains the true one with probability `LEVEL`."""

    estimate: float
    low: float
    high: float

    def exp(self) -> "Interval":
        """The ratio, if this is a difference of logarithms."""
        return Interval(math.exp(self.estimate), math.exp(self.low), math.exp(self.high))

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def paired_shift(a: Seq[float], b: Seq[float]) -> Interval | None:
    """Increase from `a` to `b` for paired values; None for too few values.

    The estimate is the median of the averages of every two differences; the interval contains the averages that
    Wilcoxon's test does not reject.
    """
    differences = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    n = len(differences)
    i, j = np.triu_indices(n)
    exact = n <= _MAX_EXACT_PAIRS
    mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
    num_cut = _num_cut(_signed_rank_distribution(n)) if exact else _normal_num_cut(mean, variance)
    return _interval(np.sort((differences[i] + differences[j]) / 2), num_cut)


def unpaired_shift(a: Seq[float], b: Seq[float]) -> Interval | None:
    """Increase from `a` to `b` for unpaired values; None for too few values.

    The estimate is the median of all differences; the interval contains the differences that Mann and Whitney's test
    does not reject.
    """
    values_a, values_b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    m, n = len(a), len(b)
    exact = m * n <= _MAX_EXACT_PRODUCT
    num_cut = _num_cut(_rank_sum_distribution(m, n)) if exact else _normal_num_cut(m * n / 2, m * n * (m + n + 1) / 12)
    return _interval(np.sort((values_b[:, None] - values_a[None, :]).ravel()), num_cut)


def _interval(values: _Floats, num_cut: int) -> Interval | None:
    """Median of the sorted `values`, and their range without the `num_cut - 1` lowest and highest; None if `num_cut` is
    0.
    """
    if num_cut < 1:
        return None
    return Interval(float(np.median(values)), float(values[num_cut - 1]), float(values[len(values) - num_cut]))


def _num_cut(distribution: _Floats) -> int:
    """The largest k for which fewer than k values are below the truth with a probability of at most 2.5 %."""
    return int(np.searchsorted(np.cumsum(distribution), (1 - LEVEL) / 2, side="right"))


def _normal_num_cut(mean: float, variance: float) -> int:
    return math.floor(mean - 1.959964 * math.sqrt(variance))


def _signed_rank_distribution(n: int) -> _Floats:
    """Probability of each sum of positive ranks, 0 to n (n + 1) / 2, for n values that are symmetric around 0."""
    distribution = np.zeros(n * (n + 1) // 2 + 1)
    distribution[0] = 1.0
    for rank in range(1, n + 1):
        shifted = np.zeros_like(distribution)
        shifted[rank:] = distribution[: len(distribution) - rank]
        distribution = (distribution + shifted) / 2
    return distribution


def _rank_sum_distribution(m: int, n: int) -> _Floats:
    """Probability of each number, 0 to m n, of pairs (x, y) with x > y, for m values x and n values y of the same
    distribution.

    Recursion on the largest of all values: if it is an x, it exceeds all n values y; if it is a y, it exceeds none.
    """
    distributions = [np.ones(1) for _ in range(n + 1)]  # of 0 values against 0..n
    for i in range(1, m + 1):
        row = [np.ones(1)]
        for j in range(1, n + 1):
            distribution = np.zeros(i * j + 1)
            distribution[j:] += distributions[j] * (i / (i + j))
            distribution[: i * (j - 1) + 1] += row[j - 1] * (j / (i + j))
            row.append(distribution)
        distributions = row
    return distributions[n]
