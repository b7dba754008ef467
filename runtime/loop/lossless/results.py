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
    """First difference between an output with the drafter and the one without."""

    request: Count
    position: Count
    """Position in the output."""
    token: int | None
    """None where the output has ended."""
    token_without_drafter: int | None
    logit_margin: Measure | None
    """Between the two tokens, after penalties and cuts, with the noise of sampling; None where one cannot be chosen."""
    rounding: Measure
    """Rounding error of a logit of this size."""
    is_near_tie: bool


@dataclass(frozen=True, kw_only=True)
class TokenCheck:
    """Outputs with a drafter beside those without, token by token: greedy, or sampling by the target's own draws."""

    rule: Literal["tokens"]
    num_samples: Size
    num_identical: Count
    num_near_ties: Count
    num_different: Count
    """Neither identical nor a near tie."""
    dtype: Dtype
    batch_invariant: bool
    """True if the engine's logits are bitwise independent of the step: near ties fail then in every dtype."""
    differences: tuple[Difference, ...]
    passed: bool


@dataclass(frozen=True, kw_only=True)
class DistributionCheck:
    """Rejection sampling: speculated tokens counted against the target's distribution, by chi-squared."""

    rule: Literal["distribution"]
    num_prefixes: Size
    num_draws: Size
    num_distributions: Count
    """Texts with enough tokens after them, and more than one to choose."""
    num_tokens: Count
    """After those texts."""
    chi_squared: Measure | None
    """None: infinite, for a token that the target would never choose."""
    degrees_of_freedom: Count
    p_value: Share
    threshold: float
    power: Share
    """Probability of detecting a fault of detectable_total_variation."""
    detectable_total_variation: Share | None
    """The smallest fault that would have been found with probability `power`, a mean over num_tokens; None: none."""
    required_total_variation: Share
    """A larger detectable_total_variation is too little to tell."""
    passed: bool | None
    """None: there was too little to tell."""


LosslessCheck = TokenCheck | DistributionCheck
"""Lossless check by the rule that fits; `rule` names it."""
