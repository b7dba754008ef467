"""Settings of speculation for a command or a program: its drafters and their draft lengths."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoint.config import MAX_DRAFT_LEN
from runtime.drafters.spec import DrafterSpec, DraftLenMode
from runtime.drafters.specs import DRAFTERS, ChainDrafter, DraftTargetDrafter, LookupDrafter, PardDrafter, as_spec
from runtime.util.errors import SpecDecError, UsageError, draft_engine_errors

if TYPE_CHECKING:
    from runtime.checkpoint.config import BuildConfig
    from runtime.drafters.heads.head_config import HeadConfig
    from runtime.drafters.protocol import Drafter, DraftFunction
    from runtime.drafters.specs import AnySpec


@dataclass(frozen=True)
class Speculation:
    """The drafters, and the way in which draft lengths are chosen. Each sequence gets the draft that promises most.

    `bool` of it is False without drafters. `draft_len_mode` None stands for `default_mode`.
    """

    drafters: tuple[DrafterSpec, ...] = ()
    draft_len_mode: DraftLenMode | None = None

    @staticmethod
    def of(
        drafter: "DrafterSpec | ChainDrafter | Drafter | DraftFunction | None",
        draft_len_mode: DraftLenMode | None = None,
    ) -> "Speculation":
        """Speculation for a drafter given in Python; UsageError for any other object."""
        if drafter is None:
            return Speculation((), draft_len_mode)
        drafters = drafter.drafters if isinstance(drafter, ChainDrafter) else (as_spec(drafter),)
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
        """The only drafter, if it is a lookup: only lookups can draft for recorded answers again."""
        return self.drafters[0] if len(self.drafters) == 1 and isinstance(self.drafters[0], LookupDrafter) else None

    @property
    def names(self) -> list[str]:
        return [drafter.name for drafter in self.drafters]

    @property
    def has_model(self) -> bool:
        return any(drafter.is_model for drafter in self.drafters)

    @property
    def needs_copy(self) -> bool:
        """True if the engine must contain a self-draft copy."""
        return any(drafter.needs_copy for drafter in self.drafters)

    @property
    def draws_by_probs(self) -> bool:
        """True if drafts affect sampled tokens, by rejection sampling, as far as is known."""
        return any(drafter.draws_by_probs for drafter in self.drafters)

    @property
    def may_draw_by_probs(self) -> bool:
        """True if drafts affect sampled tokens, or if that is unknown."""
        return any(drafter.may_draw_by_probs for drafter in self.drafters)

    @property
    def shares_pool(self) -> bool:
        """True if a lookup also searches outputs of other requests. Old answers do not count."""
        return any(isinstance(drafter, LookupDrafter) and drafter.pool != "private" for drafter in self.drafters)

    @property
    def max_draft_len(self) -> int | None:
        """Length of the longest drafts; 0 without a drafter, and None if a drafter has no bound."""
        known = [drafter.max_draft_len for drafter in self.drafters if drafter.max_draft_len is not None]
        return max(known, default=0) if len(known) == len(self.drafters) else None

    @property
    def corpora(self) -> list[Path]:
        """The corpora that are searched."""
        return [corpus for drafter in self.drafters for corpus in drafter.corpora]

    def read_heads(self) -> "list[HeadConfig]":
        """Configs of the trained drafters; SpecDecError if a head cannot be read."""
        return [head for drafter in self.drafters for head in drafter.read_heads()]

    @property
    def label(self) -> str:
        return " + ".join(drafter.label for drafter in self.drafters) or "none"

    @property
    def in_words(self) -> str:
        """The drafters in words: `suffix matching, drafts of up to 10 tokens`, or `no drafter`."""
        if not self.drafters:
            return "no drafter"
        titles = " and ".join(drafter.description.title for drafter in self.drafters)
        longest = self.max_draft_len
        return f"{titles}, drafts of up to {longest} tokens" if longest else titles

    @property
    def lengths_label(self) -> str:
        """The drafters' longest drafts, such as `to 10` or `auto, to 10, 4`; `-` without a drafter."""
        lengths = ", ".join(str(drafter.max_draft_len) for drafter in self.drafters)
        if not lengths:
            return "-"
        return f"auto, to {lengths}" if self.draft_len_mode == "auto" else f"to {lengths}"

    def with_drafters(self, drafters: Iterable[DrafterSpec]) -> "Speculation":
        return replace(self, drafters=tuple(drafters))

    def with_owner_pools(self) -> "Speculation":
        """A copy whose private lookups also search their owner's pools, for commands with many requests. Unchanged if
        drafts affect sampled tokens: these would then depend on earlier requests.
        """
        if self.draws_by_probs:
            return self
        return self.with_drafters(
            replace(drafter, pool="owner")  # type: ignore[type-var]
            if isinstance(drafter, LookupDrafter) and drafter.pool == "private"
            else drafter
            for drafter in self.drafters
        )

    def of_target(self, model: str | Path | None) -> "Speculation":
        """Copy for the model of an `LLM`."""
        return self.with_drafters(one.of_target(model) for one in self.drafters)

    def in_mode(self, draft_len_mode: DraftLenMode | None) -> "Speculation":
        return replace(self, draft_len_mode=draft_len_mode)

    def with_length(self, max_draft_len: int) -> "Speculation":
        """A copy with drafts of at most this length: for the drafters that are models, or for all if none is."""
        return self.with_drafters(
            replace(drafter, max_draft_len=min(max_draft_len, drafter.max_draft_len or max_draft_len))  # type: ignore[type-var]
            if drafter.is_model or not self.has_model
            else drafter
            for drafter in self.drafters
        )

    def default_mode(self, *, is_leader: bool) -> DraftLenMode:
        """The usual draft length mode: `auto` in leader mode; `fixed` in orchestrator mode, as in TensorRT-LLM. Also
        `fixed` if drafts affect sampled tokens: a seed then gives the same text, whatever was drafted before.
        """
        return "auto" if self and is_leader and not self.draws_by_probs else "fixed"

    def _check_parts(self, build: "BuildConfig") -> None:
        """SpecDecError if the engine lacks the hidden states or the self-draft copy that a drafter needs."""
        if not build.hidden_states and (heads := self.read_heads()):
            raise SpecDecError(
                f"the engine's step gives no hidden states, which a trained drafter reads: {heads[0].directory}",
                hint="build the engine for this head: `LLM(model, head=HEAD)`",
                code="no_hidden_states",
                head=heads[0].directory,
            )
        if build.self_draft is None and self.needs_copy:
            raise SpecDecError(
                "the engine has no copy of its model that could draft for it",
                hint="build it with a copy that drafts",
                code="no_self_draft",
            )

    def check_files(self) -> None:
        """SpecDecError for a model, a head or a corpus whose files, read without torch, are missing or unfit."""
        from runtime.drafters.heads.head_config import check_is_parallel
        from runtime.text.corpus import Corpus

        for drafter in self.drafters:
            if drafter.draft_model is not None:
                _check_draft_model(drafter.draft_model)
                if drafter.num_masks is not None:
                    check_is_parallel(drafter.draft_model)
            drafter.read_heads()
            for corpus in drafter.corpora:
                Corpus.open(corpus)

    def check_fits(self, build: "BuildConfig | None", *, is_cut: bool = False) -> None:
        """SpecDecError if the engine was built for shorter drafts, for no drafts, or without the self-draft copy or the
        hidden states that are needed.

        `build` None: the engine is still to be built for these drafts, and UsageError if no engine takes drafts of this
        length. With `is_cut`, drafts longer than the engine's are cut instead of refused.
        """
        wanted = self.max_draft_len
        if (build is None or is_cut) and (wanted or 0) > MAX_DRAFT_LEN:
            raise UsageError(f"engines take drafts of at most {MAX_DRAFT_LEN} tokens: {wanted}", hint="lower it")
        if build is None:
            return
        engine_max_draft_len = build.max_draft_len
        self._check_parts(build)
        if self and not is_cut and (engine_max_draft_len == 0 or (wanted or 0) > engine_max_draft_len):
            takes = f"takes drafts of at most {engine_max_draft_len} tokens"
            built = takes if engine_max_draft_len else "was built without drafts"
            raise SpecDecError(
                f"the engine {built}, and the drafter's drafts have up to: {wanted or 'any number'}",
                hint=f"lower the draft length, or build with a max_draft_len of {wanted or 10}",
                code="draft_len",
                max_draft_len=wanted or 10,
                build=build,
                head=next((head.directory for head in self.read_heads()), None),
            )


def head_drafter(model: str | Path) -> DrafterSpec | None:
    """The drafter for a trained head, or for a model that contains a head; None for another model."""
    for spec in DRAFTERS.values():
        if spec.reads_states and (spec.reads(model) or spec.is_in_model(model)):
            return spec(head=model)  # type: ignore[call-arg]
    return None


def model_drafter(model: str | Path) -> DrafterSpec:
    """The drafter for a model: for the head that it is or contains, else for a draft model."""
    return head_drafter(model) or (PardDrafter if PardDrafter.reads(model) else DraftTargetDrafter)(model)


def _check_draft_model(model: str | Path) -> None:
    """SpecDecError unless `model` can be a draft model. A `Path` is an engine's directory; a string names a model or an
    engine's directory.
    """
    from runtime.checkpoint.bundle import is_engine_dir, read_bundle
    from runtime.checkpoint.resolve import read_model_config, resolve_model

    for spec in DRAFTERS.values():
        if spec.reads_states and spec.reads(model):
            raise SpecDecError(
                f"this is a trained head, not a draft model: {model}",
                hint=f"give it to the drafter {spec.description.algorithm}",
            )

    with draft_engine_errors():
        if isinstance(model, Path):
            read_bundle(model)
        elif not is_engine_dir(Path(model)):
            read_model_config(resolve_model(model))


NO_SPECULATION = Speculation((), "fixed")
