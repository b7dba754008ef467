"""What drafters are told: settings of each kind, and of several asked in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from runtime.errors import UsageError

NgramRanking = Literal["oldest", "leftmost", "recent", "frequent"]
NgramPoolKind = Literal["private", "public"]
DraftLenMode = Literal["fixed", "auto"]
DrafterName = Literal["ngram", "suffix", "draft-target", "custom"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)


@dataclass(frozen=True)
class NgramSettings:
    """`--ngram-config`, parsed, with the options of n-gram lookup."""

    max_draft_len: int
    max_matching_ngram_size: int
    device_id: int
    min_matching_ngram_size: int = 1
    ranking: NgramRanking = "oldest"
    pool: NgramPoolKind = "private"
    corpus: Path | None = None


@dataclass(frozen=True)
class SuffixSettings:
    """`--suffix-config`, parsed, with `--ngram-pool`."""

    max_draft_len: int
    device_id: int
    pool: NgramPoolKind = "private"


@dataclass(frozen=True)
class DraftTargetSettings:
    """`--draft-target-model-config`, parsed, with `--draft-engine-dir`. `device_id` is the target's."""

    max_draft_len: int
    draft_device_id: int
    device_id: int
    use_logits: bool
    draft_engine_dir: Path


@dataclass(frozen=True)
class CustomSettings:
    """`--drafter module:factory`. Without a length drafts may be as long as the engine takes; device 0 runs it."""

    module: str
    factory: str
    max_draft_len: int | None = None
    device_id: int = 0


OneDrafterSettings = NgramSettings | SuffixSettings | DraftTargetSettings | CustomSettings
_NAMES: dict[type[OneDrafterSettings], DrafterName] = {
    NgramSettings: "ngram",
    SuffixSettings: "suffix",
    DraftTargetSettings: "draft-target",
    CustomSettings: "custom",
}


@dataclass(frozen=True)
class ChainSettings:
    """`--drafters`: each is asked where those before it have no proposal."""

    drafters: tuple[OneDrafterSettings, ...]

    @property
    def max_draft_len(self) -> int | None:
        """Of the drafter with the longest drafts."""
        lengths = [settings.max_draft_len for settings in self.drafters]
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    @property
    def device_id(self) -> int:
        return self.drafters[0].device_id


DrafterSettings = OneDrafterSettings | ChainSettings


def each_drafter(settings: DrafterSettings | None) -> tuple[OneDrafterSettings, ...]:
    """The settings of every drafter, in the order they are asked."""
    if settings is None:
        return ()
    return settings.drafters if isinstance(settings, ChainSettings) else (settings,)


def drafter_names(settings: DrafterSettings | None) -> list[DrafterName]:
    return [_NAMES[type(drafter)] for drafter in each_drafter(settings)]


def chain(drafters: Sequence[OneDrafterSettings]) -> DrafterSettings | None:
    """Several in one; UsageError if they do not agree where the target runs."""
    if len(drafters) < 2:
        return drafters[0] if drafters else None
    device_ids = list(dict.fromkeys(drafter.device_id for drafter in drafters))
    if len(device_ids) > 1:
        raise UsageError(
            f"the drafters name different devices for the target: {device_ids}", hint="name the same device in each"
        )
    return ChainSettings(tuple(drafters))
