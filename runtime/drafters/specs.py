"""Every drafter, described once: its settings, with bounds and help, its names, and how it is opened.

To add one, add a class here and its algorithm.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from runtime.checkpoint.config import MAX_DRAFT_LEN
from runtime.drafters.lists import Devices, Entry, ListForm, TextForm
from runtime.drafters.plugins import load_plugins
from runtime.drafters.spec import DRAFTERS as DRAFTERS
from runtime.drafters.spec import Description, DrafterSpec, LeaderFlag, NgramRanking, PoolKind, Setting
from runtime.util.errors import SpecDecError, UsageError, draft_engine_errors

if TYPE_CHECKING:
    from runtime.checkpoint.costs import CostModel
    from runtime.drafters.heads.head_config import HeadConfig
    from runtime.drafters.meter import Clock
    from runtime.drafters.ngram_pool import NgramPool
    from runtime.drafters.opened import OpenDrafter, Opener
    from runtime.drafters.owner_pools import OwnerPools
    from runtime.drafters.protocol import Drafter, DraftFunction

__all__ = [
    "AnswerDrafter",
    "AssistantDrafter",
    "ChainDrafter",
    "DFlashDrafter",
    "DraftTargetDrafter",
    "EagleDrafter",
    "GrammarDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "PardDrafter",
    "SelfDrafter",
    "SuffixDrafter",
]
"""Names that Python users import, through `specdec_cli`."""


DRAFT_LEN = 4
"""TensorRT-LLM's default."""
_LONGEST_LOOKUP = 10
_LONGEST_OF_BLOCKS = 7
"""Draft length of DSpark's published heads, and of DFlash heads with a block of 8."""
_LONGEST_OF_PARD = 8
"""Draft length that parallel draft models are trained for (arXiv 2504.18583)."""
# Flags of leader mode are spelled as in TensorRT-LLM's quickstart_advanced.py.
_DRAFT_MODEL_FLAG = LeaderFlag("draft_model_dir", "The draft model, as for `--model-dir`, or a trained head.")
_LENGTH = Setting(
    at_least=1,
    leader=LeaderFlag(
        "spec_decode_max_draft_len",
        "Most tokens in a draft.",
        shown=f"{DRAFT_LEN}; {_LONGEST_OF_BLOCKS} for blocks; {_LONGEST_OF_PARD} for parallel draft models; "
        f"{_LONGEST_LOOKUP} for lookups, unless lengths are fixed",
        at_most=MAX_DRAFT_LEN,
    ),
)
LookupLen = Annotated[int, replace(_LENGTH, leader_default=_LONGEST_LOOKUP)]
ModelLen = Annotated[int, replace(_LENGTH, leader_default=DRAFT_LEN)]
SharedPool = Annotated[
    PoolKind,
    Setting(
        "Outputs of finished requests that lookups search too. `private`: no outputs. `owner`: outputs of the same API "
        "key or `cache_salt`, by tool, JSON schema and system prompt; `serve` and `batch` do this without the flag. "
        "`public`: the outputs of all requests.",
        flag="ngram_pool",
    ),
]


_FORM_OF_LENGTH = ListForm((Entry("max_draft_len", "max_draft_len", "count"), Entry("device_list")), ("[10,[0]]", "10"))


class LookupDrafter(DrafterSpec):
    """A drafter that finds its drafts in earlier tokens."""

    is_lookup = True

    @property
    @abstractmethod
    def pool(self) -> PoolKind:
        """Finished outputs that it searches too: none, those of the request's owner, or all ("public")."""

    def make_pool(self) -> "NgramPool":
        from runtime.drafters.ngram_pool import NgramPool

        return NgramPool()

    @abstractmethod
    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        """The bare lookup, without automatic lengths. It also searches all requests' outputs if a `pool` is given."""

    def open_lookup(
        self, costs: "CostModel | None", clock: "Clock | None" = None, owner_pools: "OwnerPools | None" = None
    ) -> "OpenDrafter":
        """Open the lookup without an engine. If `costs` are known, its drafts are cut to the length that pays, by a
        `clock` as in `AdaptiveDrafter`. `owner_pools` are shared with other lookups; None to have pools of its own.
        """
        from runtime.drafters.opened import OpenDrafter, adapted
        from runtime.drafters.owner_pools import OwnerPools, PooledLookup

        pools = [self.make_pool()] if self.pool == "public" else []
        lookup = self.lookup(pools[0] if pools else None)
        if self.pool == "owner":
            owner_pools = OwnerPools() if owner_pools is None else owner_pools
            pooled = PooledLookup(lookup, owner_pools)
            return OpenDrafter(adapted(pooled, costs, clock=clock), self.max_draft_len, owner_pools=owner_pools)
        return OpenDrafter(adapted(lookup, costs, clock=clock), self.max_draft_len, pools)

    def open(self, opening: "Opener") -> "OpenDrafter":
        return self.open_lookup(opening.costs, opening.clock, opening.owner_pools)


@dataclass(frozen=True)
class NgramDrafter(LookupDrafter):
    """N-gram lookup: drafts the tokens that followed the last tokens at an earlier occurrence
    (`runtime.drafters.ngram`). `corpus` is a file that is searched if the lookup drafts nothing.
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
    max_matching_ngram_size: Annotated[
        int,
        Setting(
            leader=LeaderFlag("max_matching_ngram_size", "Longest n-gram to look up."),
            at_least=1,
            hint="2 looks up the last two tokens",
        ),
    ] = 2
    min_matching_ngram_size: Annotated[
        int,
        Setting(
            "Shortest n-gram to look up.",
            flag="min_matching_ngram_size",
            at_least=1,
            hint="1 looks up the last token alone",
        ),
    ] = 1
    ranking: Annotated[
        NgramRanking,
        Setting(
            "If the n-gram occurred several times, draft the continuation of the oldest, leftmost, recent or "
            "(most) frequent occurrence.",
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
                f"min_matching_ngram_size exceeds the longest n-gram to look up, {self.max_matching_ngram_size}: "
                f"{self.min_matching_ngram_size}",
                hint="lower it, or look up longer n-grams (max_matching_ngram_size)",
                name="min_matching_ngram_size",
            )

    @property
    def label(self) -> str:
        sizes = f"{self.min_matching_ngram_size}-" if self.min_matching_ngram_size > 1 else ""
        parts = [f"n-gram {sizes}{self.max_matching_ngram_size}", self.ranking]
        parts += [self.pool] * (self.pool != "private") + ["corpus"] * (self.corpus is not None)
        return ", ".join(parts)

    @property
    def corpora(self) -> tuple[Path, ...]:
        return () if self.corpus is None else (Path(self.corpus),)

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,) if self.corpus is None else (self.name, "corpus")

    @classmethod
    def grid(cls, max_draft_len: int) -> list[DrafterSpec]:
        """Candidates without `leftmost`: in a loop it drafts the same as `oldest`."""
        tried: tuple[tuple[int, NgramRanking], ...] = (
            *((2, "oldest"), (3, "oldest"), (4, "oldest"), (3, "recent")),
            *((2, "frequent"), (3, "frequent"), (4, "frequent")),
        )
        return [cls(max_draft_len, size, ranking=ranking) for size, ranking in tried]

    def make_pool(self) -> "NgramPool":
        from runtime.drafters.ngram_pool import NgramPool

        return NgramPool(max_matching_ngram_size=self.max_matching_ngram_size)

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        from runtime.drafters.chain import FirstOf
        from runtime.drafters.ngram import CorpusLookup, NgramLookup
        from runtime.text.corpus import Corpus

        max_size, min_size = self.max_matching_ngram_size, self.min_matching_ngram_size
        ngram = NgramLookup(max_size, min_matching_ngram_size=min_size, ranking=self.ranking, pool=pool)
        if self.corpus is None:
            return ngram
        corpus = Corpus.open(Path(self.corpus))
        return FirstOf([ngram, CorpusLookup(corpus, max_size, min_matching_ngram_size=min_size)])


@dataclass(frozen=True)
class SuffixDrafter(LookupDrafter):
    """Suffix matching (`runtime.drafters.suffix`): drafts what most often followed the longest match of any length."""

    description = Description(
        "suffix",
        "suffix matching",
        help="Draft by suffix matching, with the most frequent continuation of the longest match of any length",
        flag="suffix_config",
        form=_FORM_OF_LENGTH,
        algorithm="SUFFIX",
    )

    is_in_auto = True

    max_draft_len: LookupLen = 10
    pool: SharedPool = "private"

    @property
    def label(self) -> str:
        return "suffix" if self.pool == "private" else f"suffix, {self.pool}"

    @classmethod
    def grid(cls, max_draft_len: int) -> list[DrafterSpec]:
        return [cls(max_draft_len)]

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        from runtime.drafters.suffix import SuffixLookup

        return SuffixLookup(pool=pool)


_OF_DRAFT_MODEL = (
    Entry("draft_len", "max_draft_len", "count"),
    Entry("draft_device_list", "device_ids"),
    Entry("target_device_list"),
    Entry("use_logits", "use_logits", "bool"),
)
"""Entries of a draft model's list, as in TensorRT-LLM's `--draft_target_model_config`."""


@dataclass(frozen=True)
class DraftTargetDrafter(DrafterSpec):
    """A draft model (`runtime.drafters.draft_target`); its tokenizer may differ from the target's.

    `model` is a model's directory, hub id or shipped name, or an engine's directory. `use_logits` chooses rejection
    sampling instead of comparing tokens, for requests that sample. `device_ids` has a device for each rank of its
    engine; None for the first devices.
    """

    description = Description(
        "draft-target",
        "draft model",
        help="Draft with a draft model",
        flag="draft_target_model_config",
        form=ListForm(_OF_DRAFT_MODEL, ("[4,[0],[0],False]", "4")),
        algorithm="DRAFT_TARGET",
        note=" use_logits True accepts tokens by rejection sampling, False by comparing them.",
    )
    is_model = True

    model: Annotated[
        str | Path,
        Setting(
            "Engine of a draft model, or a trained head.",
            flag="draft_engine_dir",
            leader=_DRAFT_MODEL_FLAG,
            is_path=True,
            key="draft_engine_dir",
        ),
    ]
    max_draft_len: ModelLen = 4
    use_logits: bool = False
    device_ids: Annotated[Devices, Setting(key="draft_device_ids")] = None

    @property
    def draft_model(self) -> str | Path:
        return self.model

    def with_draft_model(self, engine_dir: Path) -> "DraftTargetDrafter":
        return replace(self, model=engine_dir)

    def with_own_devices(self) -> "DraftTargetDrafter":
        from runtime.checkpoint.bundle import read_bundle
        from runtime.engine.devices import check_device_ids

        with draft_engine_errors():
            tp_size = read_bundle(Path(self.model)).config.mapping.tp_size
            return replace(self, device_ids=check_device_ids(self.device_ids, tp_size))

    @classmethod
    def reads(cls, model: str | Path) -> bool:
        from runtime.drafters.heads.head_config import is_head, is_parallel_model

        return not is_head(model) and not is_parallel_model(model)

    def open(self, opening: "Opener") -> "OpenDrafter":
        return opening.draft_model(self.model, self.device_ids, self)


@dataclass(frozen=True)
class PardDrafter(DraftTargetDrafter):
    """A parallel draft model (`runtime.drafters.parallel`): one pass drafts all tokens. Fields as in
    `DraftTargetDrafter`; `model` must have the target's tokenizer, and a `pard_token` in its config.json.
    """

    description = Description(
        "pard",
        "parallel draft model",
        help="Draft with a parallel draft model (PARD)",
        flag="pard_config",
        form=ListForm(_OF_DRAFT_MODEL, ("[8,[0],[0],False]", "8")),
        algorithm="PARD",
        label="PARD",
    )

    max_draft_len: Annotated[int, replace(_LENGTH, leader_default=_LONGEST_OF_PARD, leader_fixed=_LONGEST_OF_PARD)] = (
        _LONGEST_OF_PARD
    )

    @classmethod
    def reads(cls, model: str | Path) -> bool:
        from runtime.drafters.heads.head_config import is_parallel_model

        return is_parallel_model(model)

    @property
    def num_masks(self) -> int:
        return self.max_draft_len - 1

    def open(self, opening: "Opener") -> "OpenDrafter":
        from runtime.drafters.heads.head_config import check_is_parallel

        check_is_parallel(self.model)  # before an engine is built from it
        return super().open(opening)


def _head_setting(help: str) -> Setting:
    return Setting(help, flag="draft_engine_dir", leader=_DRAFT_MODEL_FLAG, is_path=True, key="head_dir")


@dataclass(frozen=True)
class HeadDrafter(DrafterSpec):
    """A trained drafter, which reads the target's hidden states (`runtime.drafters.head_draft`).

    `head` is its directory; the engine must be built for it. `use_logits` as in `DraftTargetDrafter`.
    """

    is_model, reads_states = True, True
    kind: ClassVar[str]

    head: str | Path | None
    max_draft_len: ModelLen = 4
    use_logits: bool = False

    def read_heads(self) -> "list[HeadConfig]":
        from runtime.drafters.heads.head_config import read_head

        if not self.head:
            raise UsageError(
                f"no directory of the {self.description.title} is given: {self.head}",
                hint="an `LLM` that was opened from an engine does not know its model: name it, `MtpDrafter(MODEL)`",
            )
        found = read_head(self.head)
        if found.kind != self.kind:
            raise UsageError(
                f"this is no {self.description.title}: {self.head}", hint="its config.json describes another drafter"
            )
        return [found]

    @classmethod
    def reads(cls, model: str | Path) -> bool:
        """True for a directory with a head of this kind. A model that has an MTP head is none: it may draft as a whole,
        unless MTP is chosen by name.
        """
        from runtime.drafters.heads.head_config import kind_of_head

        return kind_of_head(model) == cls.kind

    def open(self, opening: "Opener") -> "OpenDrafter":
        (config,) = self.read_heads()
        return opening.head(config, self)


def _form_of_model(length: int) -> ListForm:
    entries = (
        Entry("draft_len", "max_draft_len", "count"),
        Entry("device_list"),
        Entry("use_logits", "use_logits", "bool"),
    )
    return ListForm(entries, (f"[{length},[0]]", str(length)))


@dataclass(frozen=True)
class EagleDrafter(HeadDrafter):
    """An EAGLE-3 head, trained for the target. Its fields are those of `HeadDrafter`."""

    description = Description(
        "eagle",
        "EAGLE-3 head",
        help="Draft with an EAGLE-3 head",
        flag="eagle_config",
        form=_form_of_model(4),
        algorithm="EAGLE3",
        label="EAGLE-3",
    )
    kind = "eagle3"

    head: Annotated[str | Path, _head_setting("Directory of the trained head.")]


@dataclass(frozen=True)
class DFlashDrafter(HeadDrafter):
    """A DFlash or DSpark head, which drafts a block of tokens in one pass. Its fields are those of `HeadDrafter`."""

    description = Description(
        "dflash",
        "DFlash head",
        help="Draft with a DFlash or DSpark head",
        flag="dflash_config",
        form=_form_of_model(7),
        algorithm="DFLASH",
        label="DFlash",
    )
    kind = "dflash"

    head: Annotated[str | Path, _head_setting("Directory of the DFlash or DSpark head.")]
    max_draft_len: Annotated[
        int, replace(_LENGTH, leader_default=_LONGEST_OF_BLOCKS, leader_fixed=_LONGEST_OF_BLOCKS)
    ] = _LONGEST_OF_BLOCKS


@dataclass(frozen=True)
class AssistantDrafter(HeadDrafter):
    """A Gemma 4 assistant, which reads the target's keys and values. Its fields are those of `HeadDrafter`."""

    description = Description(
        "assistant",
        "Gemma 4 assistant",
        help="Draft with a Gemma 4 assistant",
        flag="assistant_config",
        form=_form_of_model(4),
        algorithm="ASSISTANT",
        label="assistant",
    )
    kind = "assistant"

    head: Annotated[str | Path, _head_setting("Directory of the assistant.")]


@dataclass(frozen=True)
class MtpDrafter(HeadDrafter):
    """The MTP head (multi-token prediction) in the files of the model `head`, a directory or hub id; None: the target's
    own head.
    """

    description = Description(
        "mtp",
        "MTP head",
        help="Draft with the MTP head that is part of the model",
        flag="mtp_config",
        form=_form_of_model(3),
        algorithm="MTP",
        label="MTP",
    )
    kind = "mtp"

    head: Annotated[str | Path | None, _head_setting("Directory of the model with the head.")] = None
    max_draft_len: ModelLen = 3

    def of_target(self, model: str | Path | None) -> "MtpDrafter":
        """A copy whose head is the target's own; SpecDecError for a model whose config or files have none."""
        if self.head is not None or model is None:
            return self
        of_model = replace(self, head=model)
        try:
            of_model.read_heads()
        except SpecDecError as error:
            raise SpecDecError(f"the model has no MTP head that drafts: {error.message}", hint=error.hint) from error
        if not self.is_in_model(model):
            raise SpecDecError(
                f"the model's files have no weights of its MTP head: {model}",
                hint="repackaged models often leave the MTP head out; take the original model",
            )
        return of_model

    @classmethod
    def is_in_model(cls, model: str | Path | None) -> bool:
        from runtime.drafters.heads.head_config import has_mtp_head

        return model is not None and has_mtp_head(model)


@dataclass(frozen=True)
class SelfDrafter(DrafterSpec):
    """The target's own copy with quantized weights (`runtime.drafters.draft_target`), which the engine must contain.
    `use_logits` as in `DraftTargetDrafter`.
    """

    description = Description(
        "self",
        "the target's own quantized copy",
        help="Self-draft with the target's quantized copy, made by `build --self-draft`",
        flag="self_draft_config",
        form=_form_of_model(8),
        algorithm="SELF",
        label="own copy",
    )
    is_model, needs_copy = True, True

    max_draft_len: ModelLen = 8
    use_logits: bool = False

    def open(self, opening: "Opener") -> "OpenDrafter":
        return opening.self_draft(self)


@dataclass(frozen=True)
class GrammarDrafter(DrafterSpec):
    """Drafts only the tokens that an output's grammar forces (`runtime.drafters.under_grammar`). With any other drafter
    these tokens are drafted too.
    """

    description = Description(
        "grammar",
        "forced tokens of a grammar",
        help="Draft only the tokens that an output's grammar forces",
        flag="grammar_config",
        form=_FORM_OF_LENGTH,
        algorithm="GRAMMAR",
        note=" Other drafters draft these tokens too.",
        is_tuned=False,
    )

    max_draft_len: LookupLen = 10

    def open(self, opening: "Opener") -> "OpenDrafter":
        from runtime.drafters.opened import OpenDrafter
        from runtime.drafters.under_grammar import NothingDrafted

        return OpenDrafter(NothingDrafted(), self.max_draft_len)


@dataclass(frozen=True)
class AnswerDrafter(DrafterSpec):
    """Drafts the old answer to the same prompt, or to a similar prompt (`runtime.drafters.answer_lookup`)."""

    description = Description(
        "answers",
        "old answers",
        help="Draft what the same prompt, or one like it, was answered before",
        flag="answers_config",
        form=_FORM_OF_LENGTH,
        algorithm="ANSWERS",
        is_tuned=False,
    )
    is_in_auto_of_many, comes_first = True, True

    max_draft_len: LookupLen = 10

    def open(self, opening: "Opener") -> "OpenDrafter":
        from runtime.drafters.answer_lookup import AnswerLookup
        from runtime.drafters.opened import OpenDrafter, adapted

        answers = opening.answers()
        lookup = adapted(AnswerLookup(answers), opening.costs, clock=opening.clock)
        return OpenDrafter(lookup, self.max_draft_len, [answers])


@dataclass(frozen=True)
class CustomDrafter(DrafterSpec):
    """The user's own drafter: the object that the function `factory` of a module returns."""

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

    def open(self, opening: "Opener") -> "OpenDrafter":
        from runtime.drafters.custom import load_custom_drafter

        return opening.guarded(load_custom_drafter(self.module, self.factory), self.max_draft_len)


@dataclass(frozen=True, eq=False)
class InlineDrafter(DrafterSpec):
    """A drafter that exists already: an object with `propose` and `forget`, or a function of tokens and a length."""

    drafter: "Drafter | DraftFunction"
    max_draft_len: int | None = None

    def __post_init__(self) -> None:
        """Do nothing: there is no setting to check."""

    @property
    def name(self) -> str:
        return CustomDrafter.description.name

    @property
    def label(self) -> str:
        return self.name

    @property
    def may_draw_by_probs(self) -> bool:
        return True

    def open(self, opening: "Opener") -> "OpenDrafter":
        from runtime.drafters.custom import guarded_drafter

        name = getattr(self.drafter, "__name__", type(self.drafter).__name__)
        return opening.guarded(guarded_drafter(name, self.drafter), self.max_draft_len)


load_plugins()  # here: the names that packages import from this module are defined above


def lookups() -> list[type[LookupDrafter]]:
    """Classes of the drafters that find drafts in earlier tokens, including classes of other packages."""
    return [spec for spec in DRAFTERS.values() if issubclass(spec, LookupDrafter)]


@dataclass(frozen=True, init=False)
class ChainDrafter:
    """Several drafters: each sequence gets the draft that promises most. Each drafter keeps its own draft length."""

    drafters: tuple[DrafterSpec, ...]

    def __init__(self, drafters: "Iterable[DrafterSpec | Drafter | DraftFunction]") -> None:
        object.__setattr__(self, "drafters", tuple(map(as_spec, drafters)))
        if not self.drafters:
            raise UsageError("a chain has no drafters: []", hint="name at least one")


AnySpec = DrafterSpec | ChainDrafter


def as_spec(drafter: "DrafterSpec | Drafter | DraftFunction") -> DrafterSpec:
    """The spec for a drafter given in Python; UsageError for any other object."""
    if isinstance(drafter, DrafterSpec):
        return drafter
    if not callable(getattr(drafter, "propose", None)) and not callable(drafter):
        raise UsageError(
            f"this is not a drafter: {drafter!r}",
            hint="a drafter has `propose` and `forget`, or is a function of tokens",
        )
    return InlineDrafter(drafter)
