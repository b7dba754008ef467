"""What to draft with: one frozen dataclass for each way to draft, as users of Python and the command line ask for it.

Nothing is opened here, and no torch imported: `runtime.drafters.opening` makes drafters of these.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runtime.errors import SpecDecError, UsageError

if TYPE_CHECKING:
    from runtime.drafters.protocol import Drafter

NgramRanking = Literal["oldest", "leftmost", "recent", "frequent"]
PoolKind = Literal["private", "public"]
DraftLenMode = Literal["fixed", "auto"]
"""`auto` sends of each draft what pays, by what steps cost and by how often drafts were right so far; `fixed` all."""
DraftFunction = Callable[[list[int], int], list[int]]
"""(a sequence's tokens, the longest draft) -> draft tokens; the simplest drafter."""
DrafterName = Literal["ngram", "suffix", "draft-target", "self", "custom"]


def _check_draft_len(max_draft_len: int) -> None:
    if max_draft_len < 1:
        raise UsageError(
            f"max_draft_len must be at least 1: {max_draft_len}", hint="without a drafter nothing is drafted"
        )


@dataclass(frozen=True)
class NgramDrafter:
    """N-gram lookup: what followed the last tokens when they occurred before (`runtime.drafters.ngram`).

    `pool` "public" looks in the outputs of finished requests too; `corpus` is a file in which is looked up what is
    found nowhere else.
    """

    max_draft_len: int = 10
    max_matching_ngram_size: int = 2
    min_matching_ngram_size: int = 1
    ranking: NgramRanking = "oldest"
    pool: PoolKind = "private"
    corpus: Path | None = None

    def __post_init__(self) -> None:
        _check_draft_len(self.max_draft_len)
        if not 1 <= self.min_matching_ngram_size <= self.max_matching_ngram_size:
            raise UsageError(
                f"min_matching_ngram_size is not from 1 to the longest, {self.max_matching_ngram_size}: "
                f"{self.min_matching_ngram_size}",
                hint="lower it, or look up longer n-grams (max_matching_ngram_size)",
            )


@dataclass(frozen=True)
class SuffixDrafter:
    """Suffix matching: what most often followed the longest match of any length (`runtime.drafters.suffix`)."""

    max_draft_len: int = 10
    pool: PoolKind = "private"

    def __post_init__(self) -> None:
        _check_draft_len(self.max_draft_len)


@dataclass(frozen=True)
class DraftTargetDrafter:
    """A draft model with the target's tokenizer (`runtime.drafters.draft_target`).

    `model` is a model's directory, hub id or shipped name, or an engine's directory. `use_logits` chooses rejection
    sampling over comparing tokens, where requests sample.
    """

    model: str | Path
    max_draft_len: int = 4
    use_logits: bool = False
    device_ids: tuple[int, ...] | None = None
    """One for each rank of its engine; None: the first ones."""

    def __post_init__(self) -> None:
        _check_draft_len(self.max_draft_len)


@dataclass(frozen=True)
class SelfDrafter:
    """The target's own copy with rounded weights (`runtime.drafters.self_draft`), which the engine must have.

    `use_logits` as for a draft model.
    """

    max_draft_len: int = 8
    use_logits: bool = False

    def __post_init__(self) -> None:
        _check_draft_len(self.max_draft_len)


@dataclass(frozen=True)
class CustomDrafter:
    """Somebody's own drafter: what the function `factory` of a module returns. None: drafts as long as may be."""

    module: str
    factory: str
    max_draft_len: int | None = None


@dataclass(frozen=True, eq=False)
class OwnDrafter:
    """A drafter that exists already: an object with `propose` and `forget`, or a function of tokens and a length."""

    drafter: "Drafter | DraftFunction"
    max_draft_len: int | None = None


OneDrafter = NgramDrafter | SuffixDrafter | DraftTargetDrafter | SelfDrafter | CustomDrafter | OwnDrafter
LookupDrafter = NgramDrafter | SuffixDrafter
ModelDrafter = DraftTargetDrafter | SelfDrafter
_NAMES: dict[type[OneDrafter], DrafterName] = {
    NgramDrafter: "ngram",
    SuffixDrafter: "suffix",
    DraftTargetDrafter: "draft-target",
    SelfDrafter: "self",
    CustomDrafter: "custom",
    OwnDrafter: "custom",
}


@dataclass(frozen=True, init=False)
class ChainDrafter:
    """Several drafters: each sequence gets the draft that is worth most. Each keeps its own draft length."""

    drafters: tuple[OneDrafter, ...]

    def __init__(self, drafters: "Iterable[OneDrafter | Drafter | DraftFunction]") -> None:
        object.__setattr__(self, "drafters", tuple(map(_as_one, drafters)))
        if not self.drafters:
            raise UsageError("a chain has no drafters: []", hint="name at least one")

    @property
    def max_draft_len(self) -> int | None:
        """That of the drafter with the longest drafts; None where one has no bound."""
        known = [drafter.max_draft_len for drafter in self.drafters if drafter.max_draft_len is not None]
        return max(known) if len(known) == len(self.drafters) else None


DrafterSettings = OneDrafter | ChainDrafter


def _as_one(drafter: "OneDrafter | Drafter | DraftFunction") -> OneDrafter:
    if isinstance(drafter, OneDrafter):
        return drafter
    if not callable(getattr(drafter, "propose", None)) and not callable(drafter):
        raise UsageError(
            f"this is no drafter: {drafter!r}", hint="a drafter has `propose` and `forget`, or is a function of tokens"
        )
    return OwnDrafter(drafter)


def as_settings(drafter: "DrafterSettings | Drafter | DraftFunction") -> DrafterSettings:
    """The settings themselves, or those of a drafter of one's own. UsageError for what is none."""
    return drafter if isinstance(drafter, ChainDrafter) else _as_one(drafter)


def each_drafter(settings: DrafterSettings | None) -> tuple[OneDrafter, ...]:
    """The settings of every drafter."""
    if settings is None:
        return ()
    return settings.drafters if isinstance(settings, ChainDrafter) else (settings,)


def drafter_name(drafter: OneDrafter) -> DrafterName:
    return _NAMES[type(drafter)]


def drafter_names(settings: DrafterSettings | None) -> list[DrafterName]:
    return [drafter_name(drafter) for drafter in each_drafter(settings)]


def draws_by_probs(settings: DrafterSettings | None) -> bool:
    """Whether its drafts choose what is sampled, by rejection sampling. Nobody knows of users' own."""
    return any(isinstance(one, ModelDrafter) and one.use_logits for one in each_drafter(settings))


def default_draft_len_mode(settings: DrafterSettings | None, *, is_leader: bool) -> DraftLenMode:
    """What pays in leader mode; all that is drafted in orchestrator mode, as TensorRT-LLM has it.

    And where drafts choose what is sampled: a seed gives the same text then, whatever else was drafted before.
    """
    is_auto = settings is not None and is_leader and not draws_by_probs(settings)
    return "auto" if is_auto else "fixed"


def corpora_of(settings: DrafterSettings | None) -> list[Path]:
    """The corpora that are looked in."""
    return [Path(s.corpus) for s in each_drafter(settings) if isinstance(s, NgramDrafter) and s.corpus is not None]


def check_draft_len_fits(settings: DrafterSettings, engine_max_draft_len: int) -> None:
    """SpecDecError if the engine was built for shorter drafts, or for none."""
    wanted = settings.max_draft_len
    if engine_max_draft_len == 0 or (wanted or 0) > engine_max_draft_len:
        takes = f"takes drafts of at most {engine_max_draft_len} tokens"
        built = takes if engine_max_draft_len else "was built without drafts"
        raise SpecDecError(
            f"the engine {built}, and the drafter's are of up to: {wanted or 'any number'}",
            hint=f"lower it, or build with a max_draft_len of {wanted or 10}",
            fact="draft_len",
            max_draft_len=wanted or 10,
        )


def check_has_copy(settings: DrafterSettings | None, *, has_copy: bool) -> None:
    """SpecDecError for a model that is to draft for itself, and whose engine has no copy of it that could."""
    if not has_copy and any(isinstance(one, SelfDrafter) for one in each_drafter(settings)):
        raise SpecDecError(
            "the engine has no copy of its model that could draft for it",
            hint="build it with a copy that drafts",
            fact="no_self_draft",
        )
