"""The lossless check in words, and as exit code."""

import typer

from commands.output.output import warn
from runtime.loop.lossless.results import Difference, DistributionCheck, LosslessCheck
from runtime.util.errors import SpecDecError

TOO_LITTLE_TO_TELL = 3
"""The exit code of a check that had too few samples to pass or fail."""


def fail_unless_lossless(check: LosslessCheck | None) -> None:
    """SpecDecError (exit code 1) if the check was made and failed."""
    if check is None or check.passed is not False:
        return
    if isinstance(check, DistributionCheck):
        raise SpecDecError(
            f"speculated tokens do not follow the target's distribution: p = {check.p_value:.3g}",
            hint="a drafter's `Draft.probs` must be the distribution that its tokens are drawn from",
        )
    num_differing = check.num_samples - check.num_identical
    raise SpecDecError(
        f"speculation changed outputs: {num_differing} of {check.num_samples}",
        hint=f"the first: {_difference_line(check.differences[0], check.dtype)}",
    )


def exit_if_too_little_to_tell(check: LosslessCheck | None) -> None:
    """Exit with a warning if the check had too few samples to decide. It is called at the end, when no other check has
    failed.
    """
    if check is not None and check.passed is None:
        warn(
            "the lossless check had too little to tell; longer outputs, other prompts or a higher temperature leave "
            "more tokens to choose"
        )
        raise typer.Exit(TOO_LITTLE_TO_TELL)


def lossless_lines(check: LosslessCheck) -> list[str]:
    """The check in words, for the terminal."""
    if isinstance(check, DistributionCheck):
        return _distribution_lines(check)
    result = "passed" if check.passed else "FAILED"
    lines = [_difference_line(difference, check.dtype) for difference in check.differences]
    near_ties = f" (near ties: {check.num_near_ties})" if check.num_near_ties else ""
    return [
        *lines,
        f"lossless check {result}: {check.num_identical} of {check.num_samples} outputs token for token the same "
        f"as without a drafter{near_ties}",
    ]


def _distribution_lines(check: DistributionCheck) -> list[str]:
    result = {True: " passed", False: " FAILED", None: ": too little to tell"}[check.passed]
    statistic = "infinite" if check.chi_squared is None else f"{check.chi_squared:.1f}"
    lines = [
        "rejection sampling draws other tokens than the target alone: its distribution is checked instead",
        f"lossless check{result}: chi-squared {statistic} with {check.degrees_of_freedom} degrees of freedom, "
        f"p = {check.p_value:.3g} (threshold {check.threshold:g}), {check.num_tokens:,} tokens after "
        f"{check.num_distributions} texts, {check.num_draws:,} draws",
    ]
    if check.passed is not False:
        lines.append(power_line(check))
    return lines


def power_line(check: DistributionCheck) -> str:
    """A line with the smallest fault that the check could have detected."""
    detectable, required = check.detectable_total_variation, check.required_total_variation
    found = "no fault" if detectable is None else f"a total variation distance of {detectable:.2g}"
    wanted = f", and {required:g} is asked for" if check.passed is None else ""
    return f"it would have found {found} with a probability of {check.power:.0%}{wanted}"


def _difference_line(difference: Difference, dtype: str) -> str:
    margin = difference.logit_margin
    return (
        f"request {difference.request} differs at position {difference.position} of its output: "
        f"token {difference.token}, without a drafter {difference.token_without_drafter}; logit margin "
        f"{'none' if margin is None else f'{margin:.3g}'}, rounding of {dtype} {difference.rounding:.3g}"
        f"{', a near tie' if difference.is_near_tie else ''}"
    )
