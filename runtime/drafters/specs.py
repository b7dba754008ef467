"""Every drafter, described once: its settings, with bounds and help, its names, and how it is opened.

To add one, add a class here and its algorithm. `Speculation` is how a command or a program drafts: with which of them,
and how long drafts are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from runtime.drafters.spec import DRAFTERS as DRAFTERS
from runtime.drafters.spec import Description, Devices, DrafterSpec, Entry, ListForm, Setting, TextForm
from runtime.errors import SpecDecError, UsageError, draft_engine_errors

if TYPE_CHECKING:
    from runtime.config import BuildConfig
    from runtime.costs import CostModel
    from runtime.drafters.factory import OpenDrafter, Opening
    from runtime.drafters.meter import Clock
    from runtime.drafters.pool import NgramPool
    from runtime.drafters.protocol import Drafter

__all__ = ["ChainDrafter", "DraftTargetDrafter", "NgramDrafter", "SelfDrafter", "SuffixDrafter"]
"""Names that users of Python import, by way of `specdec_cli`."""

NgramRanking = Literal["oldest", "leftmost", "recent", "frequent"]
PoolKind = Literal["private", "public"]
DraftLenMode = Literal["fixed", "auto"]
"""`auto` shortens each draft to the length that is expected to save time, which may be 0; `fixed` sends all of it."""
DraftFunction = Callable[[list[int], int], list[int]]
"""(a sequence's tokens, the longest draft) -> draft tokens; the simplest drafter."""

_LONGEST_LOOKUP, _LONGEST_OF_MODELS = 10, 4
"""Drafts of leader mode where no length is given; TensorRT-LLM's is 4."""


_LENGTH = Setting(at_least=1, leader_flag="spec_decode_max_draft_len")
LookupLen = Annotated[int, replace(_LENGTH, leader_default=_LONGEST_LOOKUP)]
ModelLen = Annotated[int, replace(_LENGTH, leader_default=_LONGEST_OF_MODELS)]
SharedPool = Annotated[
    PoolKind,
    Setting(
        "`public` also searches the outputs of the run's finished requests, `private` does not; for suffix matching "
        "too.",
        flag="ngram_pool",
    ),
]


class LookupDrafter(DrafterSpec):
    """A drafter that finds drafts in tokens that there were."""

    is_lookup = True

    @property
    def pool(self) -> PoolKind:
        """ "public" looks in the outputs of finished requests too."""
        raise NotImplementedError

    def make_pool(self) -> "NgramPool":
        from runtime.drafters.pool import NgramPool

        return NgramPool()

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        raise NotImplementedError

    def open_lookup(self, costs: "CostModel | None", clock: "Clock | None" = None) -> "OpenDrafter":
        """The drafter, without an engine; its drafts are cut to what pays where `costs` are known.

        `clock` as for `AdaptiveDrafter`.
        """
        from runtime.drafters.factory import OpenDrafter, adapted

        pools = [self.make_pool()] if self.pool == "public" else []
        lookup = self.lookup(pools[0] if pools else None)
        return OpenDrafter(adapted(lookup, costs, clock=clock), self.max_draft_len, pools)

    def open(self, opening: "Opening") -> "OpenDrafter":
        return self.open_lookup(opening.costs, opening.clock)


@dataclass(frozen=True)
class NgramDrafter(LookupDrafter):
    """N-gram lookup: what followed the last tokens when they occurred before (`runtime.drafters.ngram`).

    `corpus` is a file in which is looked up what is found nowhere else.
    """

    description = Description(
        "ngram",
        "n-gram lookup",
        help="Draft by n-gram lookup",
        flag="ngram_config",
        form=ListForm(
            (
                Entry("max_draft_len", "max_draft_len", "count"),
                Entry("max_matching_ngram_size", "max_matching_ngram_size", "count"),
                Entry("device_list"),
            ),
            ("[10,2,[0]]", "10,2"),
        ),
        algorithm="NGRAM",
    )

    max_draft_len: LookupLen = 10
    max_matching_ngram_size: Annotated[int, Setting(leader_flag="max_matching_ngram_size", at_least=1)] = 2
    min_matching_ngram_size: Annotated[
        int, Setting("Shortest n-gram to look up.", flag="min_matching_ngram_size", at_least=1)
    ] = 1
    ranking: Annotated[
        NgramRanking,
        Setting(
            "Earlier occurrence that n-gram lookup continues: oldest, leftmost, recent or frequent.",
            flag="ngram_ranking",
        ),
    ] = "oldest"
    pool: SharedPool = "private"
    corpus: Annotated[
        Path | None,
        Setting(
            "Corpus of `specdec corpus create`, searched by n-gram lookup if there is no other match.",
            flag="ngram_corpus",
            is_path=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise UsageError(
                f"min_matching_ngram_size exceeds the longest, {self.max_matching_ngram_size}: "
                f"{self.min_matching_ngram_size}",
                hint="lower it, or look up longer n-grams (max_matching_ngram_size)",
                code="ngram_sizes",
                longest=self.max_matching_ngram_size,
                shortest=self.min_matching_ngram_size,
            )

    @property
    def label(self) -> str:
        sizes = f"{self.min_matching_ngram_size}-" if self.min_matching_ngram_size > 1 else ""
        parts = [f"n-gram {sizes}{self.max_matching_ngram_size}", self.ranking]
        parts += ["public"] * (self.pool == "public") + ["corpus"] * (self.corpus is not None)
        return ", ".join(parts)

    @property
    def corpora(self) -> tuple[Path, ...]:
        return () if self.corpus is None else (Path(self.corpus),)

    @classmethod
    def grid(cls, max_draft_len: int) -> list[DrafterSpec]:
        """Without `leftmost`: a loop makes it `oldest`."""
        tried: tuple[tuple[int, NgramRanking], ...] = (
            *((2, "oldest"), (3, "oldest"), (4, "oldest"), (3, "recent")),
            *((2, "frequent"), (3, "frequent"), (4, "frequent")),
        )
        return [cls(max_draft_len, size, ranking=ranking) for size, ranking in tried]

    def make_pool(self) -> "NgramPool":
        from runtime.drafters.pool import NgramPool

        return NgramPool(max_matching_ngram_size=self.max_matching_ngram_size)

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        from runtime.corpus import Corpus
        from runtime.drafters.corpus import CorpusLookup
        from runtime.drafters.first_of import FirstOf
        from runtime.drafters.ngram import NgramLookup

        max_size, min_size = self.max_matching_ngram_size, self.min_matching_ngram_size
        ngram = NgramLookup(max_size, min_matching_ngram_size=min_size, ranking=self.ranking, pool=pool)
        if self.corpus is None:
            return ngram
        corpus = Corpus.open(Path(self.corpus))
        return FirstOf([ngram, CorpusLookup(corpus, max_size, min_matching_ngram_size=min_size)])


@dataclass(frozen=True)
class SuffixDrafter(LookupDrafter):
    """Suffix matching: what most often followed the longest match of any length (`runtime.drafters.suffix`)."""

    description = Description(
        "suffix",
        "suffix matching",
        help="Draft by suffix matching, with the most frequent continuation of the longest match of any length",
        flag="suffix_config",
        form=ListForm((Entry("max_draft_len", "max_draft_len", "count"), Entry("device_list")), ("[10,[0]]", "10")),
        algorithm="SUFFIX",
    )

    max_draft_len: LookupLen = 10
    pool: SharedPool = "private"

    @property
    def label(self) -> str:
        return "suffix, public" if self.pool == "public" else "suffix"

    @classmethod
    def grid(cls, max_draft_len: int) -> list[DrafterSpec]:
        return [cls(max_draft_len)]

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        from runtime.drafters.suffix import SuffixLookup

        return SuffixLookup(pool=pool)


@dataclass(frozen=True)
class DraftTargetDrafter(DrafterSpec):
    """A draft model with the target's tokenizer (`runtime.drafters.draft_target`).

    `model` is a model's directory, hub id or shipped name, or an engine's directory. `use_logits` chooses rejection
    sampling over comparing tokens, where requests sample. `device_ids`: one for each rank of its engine; None: the
    first ones.
    """

    description = Description(
        "draft-target",
        "draft model",
        help="Draft by a draft model",
        flag="draft_target_model_config",
        form=ListForm(
            (
                Entry("draft_len", "max_draft_len", "count"),
                Entry("draft_device_list", "device_ids"),
                Entry("target_device_list"),
                Entry("use_logits", "use_logits", "bool"),
            ),
            ("[4,[0],[0],False]", "4"),
        ),
        algorithm="DRAFT_TARGET",
        note=" use_logits chooses rejection sampling over comparing tokens.",
    )
    is_model = True

    model: Annotated[
        str | Path,
        Setting(
            "Engine directory of the draft model.",
            flag="draft_engine_dir",
            leader_flag="draft_model_dir",
            is_path=True,
            key="draft_engine_dir",
        ),
    ]
    max_draft_len: ModelLen = 4
    use_logits: bool = False
    device_ids: Annotated[Devices, Setting(key="draft_device_ids")] = None

    @property
    def draws_by_probs(self) -> bool:
        return self.use_logits

    @property
    def draft_model(self) -> str | Path:
        return self.model

    def with_draft_model(self, engine_dir: Path) -> "DraftTargetDrafter":
        return replace(self, model=engine_dir)

    def open(self, opening: "Opening") -> "OpenDrafter":
        from runtime.drafters.factory import open_draft_model

        return open_draft_model(self, opening)


@dataclass(frozen=True)
class SelfDrafter(DrafterSpec):
    """The target's own copy with rounded weights (`runtime.drafters.self_draft`), which the engine must have.

    `use_logits` as for a draft model.
    """

    description = Description(
        "self",
        "the target's own quantized copy",
        help="Self-draft with the target's quantized copy, made by `build --self-draft`",
        flag="self_draft_config",
        form=ListForm(
            (
                Entry("draft_len", "max_draft_len", "count"),
                Entry("device_list"),
                Entry("use_logits", "use_logits", "bool"),
            ),
            ("[8,[0]]", "8"),
        ),
        algorithm="SELF",
    )
    is_model, needs_copy = True, True

    max_draft_len: ModelLen = 8
    use_logits: bool = False

    @property
    def label(self) -> str:
        return "own copy"

    @property
    def draws_by_probs(self) -> bool:
        return self.use_logits

    def open(self, opening: "Opening") -> "OpenDrafter":
        from runtime.drafters.factory import open_self_draft

        return open_self_draft(self, opening)


@dataclass(frozen=True)
class CustomDrafter(DrafterSpec):
    """A drafter of the user's own: what the function `factory` of a module returns. None: as long as may be."""

    description = Description(
        "custom",
        "drafter of your own",
        help="Use a drafter from your own code",
        flag="drafter",
        form=TextForm(("module", "factory"), "my_drafters:make"),
        is_tuned=False,
    )

    module: str
    factory: str
    max_draft_len: Annotated[int | None, _LENGTH] = None

    @property
    def may_draw_by_probs(self) -> bool:
        return True

    def open(self, opening: "Opening") -> "OpenDrafter":
        from runtime.drafters.custom import load_custom_drafter

        return opening.guarded(load_custom_drafter(self.module, self.factory), self.max_draft_len)


@dataclass(frozen=True, eq=False)
class OwnDrafter(DrafterSpec):
    """A drafter that exists already: an object with `propose` and `forget`, or a function of tokens and a length."""

    drafter: "Drafter | DraftFunction"
    max_draft_len: int | None = None

    def __post_init__(self) -> None:
        """Nothing is asked of it."""

    @property
    def name(self) -> str:
        return CustomDrafter.description.name

    @property
    def label(self) -> str:
        return self.name

    @property
    def may_draw_by_probs(self) -> bool:
        return True

    def open(self, opening: "Opening") -> "OpenDrafter":
        from runtime.drafters.custom import guarded_drafter

        return opening.guarded(guarded_drafter(type(self.drafter).__name__, self.drafter), self.max_draft_len)


LOOKUPS = [spec for spec in DRAFTERS.values() if issubclass(spec, LookupDrafter)]


@dataclass(frozen=True, init=False)
class ChainDrafter:
    """Several drafters: each sequence gets the draft that is worth most. Each keeps its own draft length."""

    drafters: tuple[DrafterSpec, ...]

    def __init__(self, drafters: "Iterable[DrafterSpec | Drafter | DraftFunction]") -> None:
        object.__setattr__(self, "drafters", tuple(map(_as_spec, drafters)))
        if not self.drafters:
            raise UsageError("a chain has no drafters: []", hint="name at least one")


AnySpec = DrafterSpec | ChainDrafter


def _as_spec(drafter: "DrafterSpec | Drafter | DraftFunction") -> DrafterSpec:
    if isinstance(drafter, DrafterSpec):
        return drafter
    if not callable(getattr(drafter, "propose", None)) and not callable(drafter):
        raise UsageError(
            f"this is no drafter: {drafter!r}", hint="a drafter has `propose` and `forget`, or is a function of tokens"
        )
    return OwnDrafter(drafter)


@dataclass(frozen=True)
class Speculation:
    """Speculation settings: the drafters, the most profitable of whose drafts each sequence gets, and their lengths.

    None without drafters. `draft_len_mode` None: `default_mode`.
    """

    drafters: tuple[DrafterSpec, ...] = ()
    draft_len_mode: DraftLenMode | None = None

    @staticmethod
    def of(
        drafter: "DrafterSpec | ChainDrafter | Drafter | DraftFunction | None",
        draft_len_mode: DraftLenMode | None = None,
    ) -> "Speculation":
        """Speculation from a drafter as users of Python give it. UsageError for what is no drafter."""
        if drafter is None:
            return Speculation((), draft_len_mode)
        drafters = drafter.drafters if isinstance(drafter, ChainDrafter) else (_as_spec(drafter),)
        return Speculation(drafters, draft_len_mode)

    def __bool__(self) -> bool:
        return bool(self.drafters)

    def __iter__(self) -> Iterator[DrafterSpec]:
        return iter(self.drafters)

    @property
    def drafter(self) -> "AnySpec | None":
        """Drafter for Python's `LLM`."""
        if len(self.drafters) > 1:
            return ChainDrafter(self.drafters)
        return self.drafters[0] if self.drafters else None

    @property
    def lookup(self) -> LookupDrafter | None:
        """The drafter, where it is one lookup: records tell then what it would draft."""
        return self.drafters[0] if len(self.drafters) == 1 and isinstance(self.drafters[0], LookupDrafter) else None

    @property
    def names(self) -> list[str]:
        return [drafter.name for drafter in self.drafters]

    @property
    def has_model(self) -> bool:
        return any(drafter.is_model for drafter in self.drafters)

    @property
    def needs_copy(self) -> bool:
        """True if the engine must have a self-draft copy."""
        return any(drafter.needs_copy for drafter in self.drafters)

    @property
    def draws_by_probs(self) -> bool:
        """True if drafts affect sampled tokens, by rejection sampling. False for users' own, where it is unknown."""
        return any(drafter.draws_by_probs for drafter in self.drafters)

    @property
    def may_draw_by_probs(self) -> bool:
        """The same, or unknown."""
        return any(drafter.may_draw_by_probs for drafter in self.drafters)

    @property
    def shares_pool(self) -> bool:
        """True if requests find continuations that others left."""
        return any(isinstance(drafter, LookupDrafter) and drafter.pool == "public" for drafter in self.drafters)

    @property
    def max_draft_len(self) -> int | None:
        """Length of the longest drafts, 0 without a drafter; None where one has no bound."""
        known = [drafter.max_draft_len for drafter in self.drafters if drafter.max_draft_len is not None]
        return max(known, default=0) if len(known) == len(self.drafters) else None

    @property
    def corpora(self) -> list[Path]:
        """Corpora that are looked in."""
        return [corpus for drafter in self.drafters for corpus in drafter.corpora]

    @property
    def label(self) -> str:
        return " + ".join(drafter.label for drafter in self.drafters) or "none"

    @property
    def lengths_label(self) -> str:
        """Draft lengths of the drafters, as text."""
        lengths = ", ".join(str(drafter.max_draft_len) for drafter in self.drafters)
        if not lengths:
            return "-"
        return f"auto, to {lengths}" if self.draft_len_mode == "auto" else f"to {lengths}"

    def with_drafters(self, drafters: Iterable[DrafterSpec]) -> "Speculation":
        return replace(self, drafters=tuple(drafters))

    def in_mode(self, draft_len_mode: DraftLenMode | None) -> "Speculation":
        return replace(self, draft_len_mode=draft_len_mode)

    def with_length(self, max_draft_len: int) -> "Speculation":
        """Copy with drafts of at most `length` tokens: of models, or of all drafters if there is none."""
        return self.with_drafters(
            replace(drafter, max_draft_len=min(max_draft_len, drafter.max_draft_len or max_draft_len))  # type: ignore[type-var]
            if drafter.is_model or not self.has_model
            else drafter
            for drafter in self.drafters
        )

    def default_mode(self, *, is_leader: bool) -> DraftLenMode:
        """`auto` in leader mode; `fixed` in orchestrator mode, as TensorRT-LLM has it.

        And where drafts choose what is sampled: a seed gives the same text then, whatever else was drafted before.
        """
        return "auto" if self and is_leader and not self.draws_by_probs else "fixed"

    def check_has_copy(self, *, has_copy: bool) -> None:
        """SpecDecError for a model that is to draft for itself, and whose engine has no copy of it that could."""
        if not has_copy and self.needs_copy:
            raise SpecDecError(
                "the engine has no copy of its model that could draft for it",
                hint="build it with a copy that drafts",
                code="no_self_draft",
            )

    def check_files(self) -> None:
        """SpecDecError for a model or a corpus that is not there, as far as that is found without torch."""
        from runtime.corpus import Corpus

        for drafter in self.drafters:
            if drafter.draft_model is not None:
                _check_draft_model(drafter.draft_model)
            for corpus in drafter.corpora:
                Corpus.open(corpus)

    def check_fits(self, build: "BuildConfig | None") -> None:
        """SpecDecError if the engine was built for shorter drafts, for none, or without the copy that is to draft.

        `build` None: it is built for these drafts yet.
        """
        wanted = self.max_draft_len
        if build is None:
            from runtime.config import MAX_DRAFT_LEN

            if (wanted or 0) > MAX_DRAFT_LEN:
                raise UsageError(f"engines take drafts of at most {MAX_DRAFT_LEN} tokens: {wanted}", hint="lower it")
            return
        engine_max_draft_len = build.max_draft_len
        self.check_has_copy(has_copy=build.self_draft is not None)
        if self and (engine_max_draft_len == 0 or (wanted or 0) > engine_max_draft_len):
            takes = f"takes drafts of at most {engine_max_draft_len} tokens"
            built = takes if engine_max_draft_len else "was built without drafts"
            raise SpecDecError(
                f"the engine {built}, and the drafter's are of up to: {wanted or 'any number'}",
                hint=f"lower it, or build with a max_draft_len of {wanted or 10}",
                code="draft_len",
                max_draft_len=wanted or 10,
            )


def _check_draft_model(model: str | Path) -> None:
    """A path is an engine's directory, a name a model."""
    from runtime.bundle import is_engine_dir, read_bundle
    from runtime.models import read_model_config, resolve_model

    with draft_engine_errors():
        if isinstance(model, Path):
            read_bundle(model)
        elif not is_engine_dir(Path(model)):
            read_model_config(resolve_model(model))


NO_SPECULATION = Speculation((), "fixed")
