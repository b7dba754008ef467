"""Arrivals are a Poisson process: exponential gaps, independent, Poisson counts; the same for the same seed."""

import math

import numpy as np
import pytest

from runtime.measure.benchmark.load_generator import arrival_times

RATE = 7.0


@pytest.fixture(scope="module")
def times() -> np.ndarray:
    return np.array(arrival_times(20_001, RATE, seed=3))


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert arrival_times(50, RATE, seed=5) == arrival_times(50, RATE, seed=5)
    assert arrival_times(50, RATE, seed=5) != arrival_times(50, RATE, seed=6)


def test_gaps_are_exponential(times: np.ndarray) -> None:
    """Kolmogorov and Smirnov's distance from 1 − exp(−rate · gap); 1.95 / √n is exceeded once in a thousand."""
    gaps = np.sort(np.diff(times))
    expected = 1 - np.exp(-RATE * gaps)
    n = len(gaps)
    distance = max(np.abs(np.arange(1, n + 1) / n - expected).max(), np.abs(np.arange(n) / n - expected).max())
    assert distance < 1.95 / math.sqrt(n)


def test_gaps_do_not_depend_on_the_one_before(times: np.ndarray) -> None:
    gaps = np.diff(times)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 3.3 / math.sqrt(len(gaps))


def test_counts_of_a_second_are_poisson(times: np.ndarray) -> None:
    """Pearson's chi-squared over the counts 2 to 13 and both tails, against e^−λ λ^k / k!."""
    counts = np.bincount(times[times < int(times[-1])].astype(int), minlength=int(times[-1]))
    share = [math.exp(-RATE) * RATE**k / math.factorial(k) for k in range(2, 14)]
    tails = [math.exp(-RATE) * (1 + RATE), 0.0]
    tails[1] = 1 - sum(share) - tails[0]
    expected = np.array([tails[0], *share, tails[1]]) * len(counts)
    seen = np.array([(counts < 2).sum(), *((counts == k).sum() for k in range(2, 14)), (counts > 13).sum()])
    assert ((seen - expected) ** 2 / expected).sum() < 34.5  # the 0.999 quantile for 13 degrees of freedom
