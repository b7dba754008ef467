"""What is tried: a grid of drafters, each with drafts of several lengths."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.drafters.settings import (
    ChainDrafter,
    DrafterSettings,
    DraftLenMode,
    DraftTargetDrafter,
    LookupDrafter,
    ModelDrafter,
    NgramDrafter,
    NgramRanking,
    OneDrafter,
    SelfDrafter,
    SuffixDrafter,
    drafter_name,
    each_drafter,
)

DRAFT_LENS = (1, 2, 3, 4, 6, 8, 10)
_NGRAMS: tuple[tuple[int, NgramRanking], ...] = (
    (2, "oldest"),
    (3, "oldest"),
    (4, "oldest"),
    (3, "recent"),
    (2, "frequent"),
    (3, "frequent"),
    (4, "frequent"),
)


@dataclass(frozen=True)
class Candidate:
    """One way to generate; without a drafter for None."""

    drafter: DrafterSettings | None = None
    draft_len_mode: DraftLenMode = "fixed"

    @property
    def max_draft_len(self) -> int:
        return (self.drafter.max_draft_len or 0) if self.drafter else 0

    @property
    def drafter_name(self) -> str:
        return " + ".join(map(_name, each_drafter(self.drafter))) or "none"

    @property
    def draft_name(self) -> str:
        """How long its drafts are, each drafter's in a chain."""
        if self.drafter is None:
            return "-"
        lengths = ", ".join(str(one.max_draft_len) for one in each_drafter(self.drafter))
        return f"auto, to {lengths}" if self.draft_len_mode == "auto" else f"to {lengths}"

    def with_length(self, max_draft_len: int) -> "Candidate":
        """With drafts of at most so many tokens; in a chain those of models, or of all where there is none."""
        drafters = each_drafter(self.drafter)
        has_model = any(isinstance(one, ModelDrafter) for one in drafters)
        shorter = [
            replace(one, max_draft_len=min(max_draft_len, one.max_draft_len or max_draft_len))
            if isinstance(one, ModelDrafter) or not has_model
            else one
            for one in drafters
        ]
        if not shorter:
            return self
        return replace(self, drafter=shorter[0] if len(shorter) == 1 else ChainDrafter(shorter))


def _name(drafter: OneDrafter) -> str:
    match drafter:
        case SuffixDrafter():
            return f"suffix{_public(drafter.pool)}"
        case NgramDrafter():
            smallest = drafter.min_matching_ngram_size
            sizes = f"{smallest}-" if smallest > 1 else ""
            corpus = ", corpus" if drafter.corpus else ""
            return f"n-gram {sizes}{drafter.max_matching_ngram_size}, {drafter.ranking}{_public(drafter.pool)}{corpus}"
        case DraftTargetDrafter():
            return "draft model"
        case SelfDrafter():
            return "own copy"
        case _:
            return drafter_name(drafter)


def _public(pool: str) -> str:
    return ", public" if pool == "public" else ""


def private_grid(max_draft_len: int) -> list[LookupDrafter]:
    """All drafters of the grid with their longest drafts. `leftmost` is left out: a loop makes it `oldest`."""
    ngrams = [NgramDrafter(max_draft_len, n, ranking=ranking) for n, ranking in _NGRAMS]
    return [*ngrams, SuffixDrafter(max_draft_len)]


def public(drafters: Iterable[LookupDrafter]) -> list[LookupDrafter]:
    return [replace(drafter, pool="public") for drafter in drafters]


def shorter_lens(max_draft_len: int) -> list[int]:
    """The draft lengths below the longest."""
    return [n for n in DRAFT_LENS if n < max_draft_len]


def is_replayable(drafter: DrafterSettings | None) -> bool:
    """Whether recorded outputs are all that is needed to know what would be drafted."""
    return drafter is None or isinstance(drafter, LookupDrafter)


def all_lengths(drafter: DrafterSettings, max_draft_len: int) -> list[Candidate]:
    """A drafter that has to be run: with drafts of each length, and as long as pays."""
    drafters = each_drafter(drafter)
    models = [one.max_draft_len or max_draft_len for one in drafters if isinstance(one, ModelDrafter)]
    longest = min(max_draft_len, max(models or [one.max_draft_len or max_draft_len for one in drafters]))
    lengths = [Candidate(drafter).with_length(n) for n in (*shorter_lens(longest), longest)]
    return [*lengths, replace(lengths[-1], draft_len_mode="auto")]


def drafters_of(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.drafter_name for candidate in candidates))
