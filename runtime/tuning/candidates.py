"""What `tune` tries: a grid of drafters, each with drafts of several lengths, or the one drafter the flags name."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commands.options.drafter_settings import (
    DraftLenMode,
    NgramRanking,
    NgramSettings,
    SuffixSettings,
)

LookupSettings = NgramSettings | SuffixSettings
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

    drafter: LookupSettings | None = None
    draft_len_mode: DraftLenMode = "fixed"

    @property
    def max_draft_len(self) -> int:
        return self.drafter.max_draft_len if self.drafter else 0

    @property
    def drafter_name(self) -> str:
        match self.drafter:
            case None:
                return "none"
            case SuffixSettings(pool=pool):
                return f"suffix{_public(pool)}"
            case NgramSettings() as ngram:
                smallest = ngram.min_matching_ngram_size
                sizes = f"{smallest}-" if smallest > 1 else ""
                corpus = ", corpus" if ngram.corpus else ""
                return f"n-gram {sizes}{ngram.max_matching_ngram_size}, {ngram.ranking}{_public(ngram.pool)}{corpus}"

    @property
    def draft_name(self) -> str:
        """How long its drafts are."""
        if self.drafter is None:
            return "-"
        return f"auto, to {self.max_draft_len}" if self.draft_len_mode == "auto" else f"to {self.max_draft_len}"

    @property
    def flags(self) -> str:
        """What `run` is told to generate in this way."""
        match self.drafter:
            case None:
                return ""
            case SuffixSettings() as settings:
                flags = [f"--suffix-config '[{settings.max_draft_len},[{settings.device_id}]]'"]
            case NgramSettings() as settings:
                sizes = f"{settings.max_draft_len},{settings.max_matching_ngram_size}"
                flags = [f"--ngram-config '[{sizes},[{settings.device_id}]]'"]
                if settings.ranking != "oldest":
                    flags.append(f"--ngram-ranking {settings.ranking}")
                if settings.min_matching_ngram_size > 1:
                    flags.append(f"--min-matching-ngram-size {settings.min_matching_ngram_size}")
                if settings.corpus is not None:
                    flags.append(f"--ngram-corpus {shlex.quote(str(settings.corpus))}")
        if settings.pool == "public":
            flags.append("--ngram-pool public")
        return " ".join([*flags, *(["--draft-len-mode auto"] if self.draft_len_mode == "auto" else [])])

    def with_length(self, max_draft_len: int) -> "Candidate":
        return (
            self if self.drafter is None else replace(self, drafter=replace(self.drafter, max_draft_len=max_draft_len))
        )


def _public(pool: str) -> str:
    return ", public" if pool == "public" else ""


def private_grid(max_draft_len: int) -> list[LookupSettings]:
    """All drafters of the grid with their longest drafts. `leftmost` is left out: a loop makes it `oldest`."""
    ngrams = [NgramSettings(max_draft_len, n, 0, ranking=ranking) for n, ranking in _NGRAMS]
    return [*ngrams, SuffixSettings(max_draft_len, 0)]


def public(drafters: Iterable[LookupSettings]) -> list[LookupSettings]:
    return [replace(drafter, pool="public") for drafter in drafters]


def shorter_lens(max_draft_len: int) -> list[int]:
    """The draft lengths below the longest."""
    return [n for n in DRAFT_LENS if n < max_draft_len]


def drafters_of(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.drafter_name for candidate in candidates))
