"""Candidates of a search: the grid of every drafter, each with drafts of several lengths."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import Speculation

DRAFT_LENS = (1, 2, 3, 4, 6, 8, 10)


def fixed(*drafters: DrafterSpec) -> Speculation:
    return Speculation(drafters, "fixed")


def private_grid(max_draft_len: int) -> list[Speculation]:
    """All lookups of the grid with their longest drafts."""
    return [fixed(one) for spec in DRAFTERS.values() for one in spec.grid(max_draft_len)]


def public(lookups: Iterable[Speculation]) -> list[Speculation]:
    """Variants with a public pool of finished requests' outputs."""
    return [one.with_drafters([replace(one.lookup, pool="public")]) for one in lookups if one.lookup]  # type: ignore[type-var]


def shorter_lens(max_draft_len: int) -> list[int]:
    """The draft lengths below the longest."""
    return [n for n in DRAFT_LENS if n < max_draft_len]


def is_replayable(speculation: Speculation) -> bool:
    """True if recorded outputs suffice to know what would be drafted."""
    return not speculation or speculation.lookup is not None


def all_lengths(speculation: Speculation, max_draft_len: int) -> list[Speculation]:
    """A drafter that has to be run: with drafts of each length, and as long as pays."""
    models = [one.max_draft_len or max_draft_len for one in speculation if one.is_model]
    longest = min(max_draft_len, max(models or [one.max_draft_len or max_draft_len for one in speculation]))
    lengths = [speculation.in_mode("fixed").with_length(n) for n in (*shorter_lens(longest), longest)]
    return [*lengths, lengths[-1].in_mode("auto")]


def labels_of(candidates: Sequence[Speculation]) -> list[str]:
    return list(dict.fromkeys(candidate.label for candidate in candidates))
