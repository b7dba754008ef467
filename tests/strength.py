"""Strength of property tests and statistics: 60 examples at most by default, and as many as they ask for, or as many
draws, with `--slow`."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

NUM_EXAMPLES = 60
CHARACTERS = st.characters(exclude_categories=["Cs"])
"""All characters that a text may have, which are those of `st.text()`: it encodes a million to find that out."""


def register_profiles() -> None:
    """Register hypothesis' profiles: `default` repeats the same 60 examples in every run; `slow` draws 100 new ones."""
    for name in ("default", "slow"):
        settings.register_profile(
            name, max_examples=NUM_EXAMPLES if name == "default" else 100, deadline=None, derandomize=name == "default",
            suppress_health_check=[HealthCheck.too_slow],
        )  # fmt: skip


def examples(num_examples: int) -> int:
    """The number to try of a test whose full strength is `num_examples`."""
    return num_examples if is_full() else min(num_examples, NUM_EXAMPLES)


def draws(full: int, by_default: int) -> int:
    """The number of draws or texts of a statistic, or of examples that take a tenth of a second each."""
    return full if is_full() else by_default


def is_full() -> bool:
    return settings.get_current_profile_name() == "slow"
