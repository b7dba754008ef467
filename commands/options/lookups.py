"""The flags of lookups, n-gram and suffix matching."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from commands.options.expand import given_flags
from commands.options.panels import SPECULATION
from runtime.drafters.settings import DrafterName, NgramDrafter, NgramRanking, PoolKind, SuffixDrafter
from runtime.errors import UsageError


@dataclass(frozen=True)
class LookupOptions:
    """Two lookups, and what else they can be told, in leader mode too; None where nothing was given."""

    ngram_config: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Draft by n-gram lookup: [max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]].",
            rich_help_panel=SPECULATION,
            show_default="no drafter",
        ),
    ] = None
    ngram_ranking: Annotated[
        NgramRanking | None,
        typer.Option(
            metavar="NAME",
            help="Which earlier occurrence n-gram lookup continues: oldest, leftmost, recent or frequent.",
            rich_help_panel=SPECULATION,
            show_default="oldest",
        ),
    ] = None
    min_matching_ngram_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Shortest tail n-gram lookup looks up.", rich_help_panel=SPECULATION, show_default="1"
        ),
    ] = None
    ngram_pool: Annotated[
        PoolKind | None,
        typer.Option(
            metavar="NAME",
            help="`public` looks in the outputs of the run's finished requests too, `private` does not; for suffix "
            "matching too.",
            rich_help_panel=SPECULATION,
            show_default="private",
        ),
    ] = None
    ngram_corpus: Annotated[
        Path | None,
        typer.Option(
            help="Corpus, made by `specdec corpus create`, in which n-gram lookup looks up what it finds nowhere else.",
            rich_help_panel=SPECULATION,
            show_default=False,
        ),
    ] = None
    suffix_config: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Draft by suffix matching, what most often followed the longest match of any length: [max_draft_len, "
            "device_list], such as [10,[0]].",
            rich_help_panel=SPECULATION,
            show_default="no drafter",
        ),
    ] = None

    def check_used(self, names: Sequence[DrafterName], hint: str) -> None:
        """UsageError for an option that none of the drafters has."""
        for flag, value in given_flags(replace(self, ngram_config=None, suffix_config=None)).items():
            users = ("ngram", "suffix") if flag == "--ngram-pool" else ("ngram",)
            if not set(users) & set(names):
                what = " or suffix matching" if "suffix" in users else ""
                raise UsageError(f"`{flag}` is for n-gram lookup{what}: {value}", hint=hint)

    def ngram_drafter(self, max_draft_len: int, max_matching_ngram_size: int) -> NgramDrafter:
        """With what else was given; UsageError if the smallest pattern is longer than the longest."""
        min_size = self.min_matching_ngram_size or 1
        if min_size > max_matching_ngram_size:
            raise UsageError(
                f"`--min-matching-ngram-size` exceeds the longest, {max_matching_ngram_size}: {min_size}",
                hint="lower it, or look up longer n-grams (max_matching_ngram_size)",
            )
        return NgramDrafter(
            max_draft_len,
            max_matching_ngram_size,
            min_size,
            self.ngram_ranking or "oldest",
            self.ngram_pool or "private",
            self.ngram_corpus,
        )

    def suffix_drafter(self, max_draft_len: int) -> SuffixDrafter:
        return SuffixDrafter(max_draft_len, self.ngram_pool or "private")
