"""Counts of tokens against distributions: Pearson's statistic, its p-value, and the size of fault that it would have
found.

After every text `i`, `n_i` tokens are counted in cells of probability `p_ij`. If they come with probabilities `q_ij`
instead, the sum of the statistics has a noncentral chi-squared distribution (Patnaik, "The non-central chi-squared- and
F-distributions and their applications", Biometrika 36, 1949; Cohen, "Statistical Power Analysis", 1988, chapter 7) with
the same degrees of freedom and the noncentrality

lambda = sum_i n_i sum_j (q_ij - p_ij)² / p_ij

With the total variation distance `t_i = sum_j |q_ij - p_ij| / 2` of a text, Cauchy and Schwarz say that

(2 t_i)² = (sum_j |q_ij - p_ij| / sqrt(p_ij) * sqrt(p_ij))² <= sum_j (q_ij - p_ij)² / p_ij

with equality where one half of the probability grows by the factor `1 + 2 t_i` and the other shrinks by `1 - 2 t_i`.
With `t`, the mean of `t_i` over all `N = sum_i n_i` tokens, convexity gives `sum_i n_i t_i² >= N t²`, and so `lambda >=
4 N t²`.

That holds for small `t`. For larger `t` the variance of a cell's count matters too, which follows from `q_ij`: without
the shift a cell adds `q_ij / p_ij` to the statistic on average, and not 1. Hardest to find is the fault in which nearly
all cells are in the half that shrinks. Its statistic is taken to have `1 - 2 t` times the degrees of freedom, and the
noncentrality `4 N t²`; other faults are found more surely. A shift within a cell, from one rare token to another, is
not found.
"""

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

_MIN_EXPECTED_COUNT = 5  # in a cell
_MIN_SHARE = 0.06  # of the counts in a cell: with more cells it takes more counts to find a fault in all of them
_IMPOSSIBLE = 1e-12
MAX_TOTAL_VARIATION = 0.4  # a check that finds only larger distances counts as one that finds nothing


def chi_squared_of(counter: Counter[int], distribution: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts against a distribution [vocab]; rare tokens share cells."""
    num_draws = counter.total()
    if any(float(distribution[token]) < _IMPOSSIBLE for token in counter):
        return math.inf, 1
    cells = _cells(distribution, num_draws)
    num_cells = max(cells) + 1
    counted, expected = [0] * num_cells, [0.0] * num_cells
    for token, (cell, share) in enumerate(zip(cells, distribution.tolist(), strict=True)):
        counted[cell] += counter[token]
        expected[cell] += share * num_draws
    return sum((n - e) ** 2 / e for n, e in zip(counted, expected, strict=True)), num_cells - 1


def degrees_of_freedom_of(distribution: Tensor, num_draws: int) -> int:
    """Degrees of freedom of this number of draws against a distribution [vocab]."""
    return max(_cells(distribution, num_draws))


def _cells(distribution: Tensor, num_draws: int) -> list[int]:
    """The cell of each token. Rare tokens share cells; tokens that do not fill a cell are in the last."""
    min_expected = max(_MIN_EXPECTED_COUNT, _MIN_SHARE * num_draws)
    cell_of, num_cells = [0] * len(distribution), 0
    rare, expected_of_rare = list[int](), 0.0
    for token, expected in enumerate((distribution * num_draws).tolist()):
        rare.append(token)
        if expected < min_expected:
            expected_of_rare += expected
            if expected_of_rare < min_expected:
                continue
            filled, rare, expected_of_rare = rare, [], 0.0
        else:
            filled = [rare.pop()]
        for one in filled:
            cell_of[one] = num_cells
        num_cells += 1
    for one in rare:
        cell_of[one] = max(num_cells - 1, 0)
    return cell_of


def p_value_of(chi_squared: float, degrees_of_freedom: float) -> float:
    """Probability of a statistic at least as large; 1 if there is nothing to compare."""
    if math.isinf(chi_squared):
        return 0.0
    if degrees_of_freedom == 0:
        return 1.0
    return float(_upper_gamma(torch.tensor(degrees_of_freedom / 2, dtype=torch.float64), chi_squared / 2))


def detectable_total_variation(
    num_tokens: int, degrees_of_freedom: int, threshold: float, probability: float
) -> float | None:
    """The mean total variation distance from which on p falls below `threshold` with at least this probability, for the
    fault that is hardest to find. None if it exceeds MAX_TOTAL_VARIATION.
    """
    if not num_tokens or not degrees_of_freedom:
        return None
    critical = _where_increasing(lambda x: -p_value_of(x, degrees_of_freedom), -threshold, high=1e5)

    def power(distance: float) -> float:
        return power_of(4 * num_tokens * distance**2, (1 - 2 * distance) * degrees_of_freedom, critical)

    if power(MAX_TOTAL_VARIATION) < probability:
        return None
    return _where_increasing(power, probability, high=MAX_TOTAL_VARIATION)


def power_of(noncentrality: float, degrees_of_freedom: float, critical: float) -> float:
    """Probability that a noncentral statistic exceeds `critical`: a Poisson mean of central ones (Patnaik, 1949)."""
    if not noncentrality:
        return p_value_of(critical, degrees_of_freedom)
    mean = noncentrality / 2
    k = torch.arange(math.ceil(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = torch.exp(k * math.log(mean) - mean - torch.lgamma(k + 1))
    return float(weights @ _upper_gamma(degrees_of_freedom / 2 + k, critical / 2))


def _upper_gamma(a: Tensor, x: float) -> Tensor:
    """The tail from `2 x` on of chi-squared with `2 a` degrees of freedom: the incomplete gamma function."""
    tail: Tensor = torch.special.gammaincc(a, torch.full_like(a, x))
    return tail


def _where_increasing(function: Callable[[float], float], value: float, high: float) -> float:
    """Find the point between 0 and `high` at which an increasing function has the value."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high
