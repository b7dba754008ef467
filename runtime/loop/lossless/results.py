"""Results of the lossless check (`runtime.loop.lossless.check`). Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from runtime.checkpoint.config import Count, Dtype, Measure, Share, Size

SystemName = Literal["hf", "engine", "engine_no_drafter"]
SYSTEM_TITLES: dict[str, str] = {
    "engine": "engine",
    "engine_no_drafter": "engine, no drafter",
    "hf": "Hugging Face",
}


@dataclass(frozen=True)
class Difference:
    """First difference between an output with the drafter and the same output without it."""

    request: Count
    position: Count
    """Position in the output."""
    token: int | None
    """The token at that position; None if the output has ended."""
    token_without_drafter: int | None
    logit_margin: Measure | None
    """Difference of the logits of the two tokens, after penalties and cuts, with the noise of sampling; None if one
    token cannot be chosen.
    """
    rounding: Measure
    """Rounding error of a logit of this size."""
    is_near_tie: bool


@dataclass(frozen=True, kw_only=True)
class TokenCheck:
    """Comparison of outputs with a drafter and without, token by token: greedy, or samples by a seed."""

    rule: Literal["tokens"]
    num_samples: Size
    num_identical: Count
    num_near_ties: Count
    num_different: Count
    """Number of outputs that are neither identical nor differ by a near tie."""
    dtype: Dtype
    batch_invariant: bool
    """True if the engine's logits are bitwise independent of the step: a near tie is then a failure in every dtype."""
    differences: tuple[Difference, ...]
    passed: bool


@dataclass(frozen=True, kw_only=True)
class DistributionCheck:
    """Check for rejection sampling: speculated tokens are counted against the target's distribution, by chi-squared."""

    rule: Literal["distribution"]
    num_prefixes: Size
    num_draws: Size
    num_distributions: Count
    """Number of texts with enough tokens after them, and more than one token to choose from."""
    num_tokens: Count
    """Number of tokens drawn after these texts."""
    chi_squared: Measure | None
    """The statistic; None if it is infinite, for a token that the target would never choose."""
    degrees_of_freedom: Count
    p_value: Share
    threshold: float
    power: Share
    """Probability of detecting a fault of size `detectable_total_variation`."""
    detectable_total_variation: Share | None
    """The smallest total variation that would have been found with probability `power`, as a mean over num_tokens; None
    if none up to 0.4 would have been found.
    """
    required_total_variation: Share
    """Largest detectable_total_variation with which the check can pass; above it there is too little to tell."""
    passed: bool | None
    """True or False; None if there was too little to tell."""


LosslessCheck = TokenCheck | DistributionCheck
"""Lossless check by the rule that fits; its field `rule` names it."""
