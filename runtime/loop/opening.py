"""Opens drafters for a session. That a drafter fits the target is checked in `runtime.loop.compatibility`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import EngineConfig, StepCost
from runtime.checkpoint.costs import CostModel
from runtime.core.old_answers import Answer
from runtime.drafters.adaptive import DraftSeconds
from runtime.drafters.answer_lookup import Answers, AnswersFirst
from runtime.drafters.chain import BestOf, DraftingModel
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.custom import GuardedDrafter
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.opened import BoundedDrafter, DraftModelSettings, ModelSettings, OpenDrafter, adapted
from runtime.drafters.owner_pools import OwnerPools
from runtime.drafters.parallel import ParallelDraftModel
from runtime.drafters.protocol import Drafter
from runtime.drafters.speculation import Speculation
from runtime.drafters.translated import TranslatedDraftModel
from runtime.drafters.under_grammar import UnderGrammar
from runtime.engine.draft_vocab import missing_ends
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.compatibility import (
    TargetIdentity,
    check_draft_engine,
    check_head_tokenizer,
    check_parallel_engine,
)
from runtime.loop.step_costs import costs_when_asked_for
from runtime.text.text import tokenizer_digest
from runtime.util.errors import SpecDecWarning, draft_engine_errors

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.drafters.heads.head_config import HeadConfig

FindEngine = Callable[[str | Path, int], Path]
"""Function (draft model, number of mask tokens that its engine takes behind a sequence) -> its engine's directory."""


@dataclass(frozen=True)
class Opening:
    """Context in which drafters are opened. With `costs`, drafts get the length that pays. `stack` closes them."""

    engine: Engine
    costs: CostModel | None
    kv_cache: KVCacheConfig
    find_engine: FindEngine
    target: TargetIdentity
    end_ids: frozenset[int] = frozenset()
    """End ids of the target."""
    stack: ExitStack = field(default_factory=ExitStack)
    owner_pools: OwnerPools = field(default_factory=OwnerPools)

    def clock(self) -> float:
        """Clock in seconds, by which whole iterations of the loop are timed: drafts take time outside the step too."""
        return perf_counter()

    def answers(self) -> Answers:
        if not self.engine.has_disk:
            return Answers()
        tokenizer, config = self.target.tokenizer, self.engine.config
        vocabulary = config.weights_digest if tokenizer is None else tokenizer_digest(tokenizer)
        return Answers(disk=_AnswersOnDisk(self.engine, f"{vocabulary} {config.vocab_size}"))

    def adapted(self, drafter: Drafter, draft_s: DraftSeconds | None = None, *, at_once: bool = False) -> Drafter:
        """The drafter with its drafts cut to the length that pays; the drafter itself if lengths are fixed."""
        return adapted(drafter, self.costs, draft_s, self.clock, at_once=at_once)

    def draft_model(
        self, model: str | Path, devices: tuple[int, ...] | None, settings: DraftModelSettings
    ) -> OpenDrafter:
        num_masks = settings.num_masks
        with draft_engine_errors():
            bundle = read_bundle(self.find_engine(model, num_masks or 0))
        if num_masks is None:
            mask, tokenizers = None, check_draft_engine(bundle, self.target, use_logits=settings.use_logits)
        else:
            mask, tokenizers = check_parallel_engine(bundle, self.target, num_masks), None
        with draft_engine_errors():
            kv_cache = self.kv_cache
            if not bundle.config.states:
                kv_cache = replace(kv_cache, state_checkpoint_interval=None)
            engine = self.stack.enter_context(Engine.of_bundle(bundle, devices, kv_cache))
            draft_s = None
            if self.costs is not None:
                engine.config = costs_when_asked_for(bundle, engine)
                draft_s = _pass_s(engine.config.step_costs, engine.config.host_s, num_masks or 0)
        vocab_size = self.engine.config.vocab_size if tokenizers is None else engine.config.vocab_size
        if mask is not None:
            parallel = ParallelDraftModel(engine, vocab_size, mask, use_logits=settings.use_logits)
            if self.costs is not None and draft_s is not None:
                parallel.confidence_stop = ConfidenceStop(self.costs.iteration_s, draft_s, at_once=True)
            drafter = self.adapted(parallel, draft_s, at_once=True)
            return OpenDrafter(drafter, settings.max_draft_len, draft_model=parallel)
        draft = DraftModel(engine, vocab_size, use_logits=settings.use_logits)
        drafter = draft if tokenizers is None else TranslatedDraftModel(draft, *tokenizers)
        return OpenDrafter(self.adapted(drafter, draft_s), settings.max_draft_len, draft_model=draft)

    def self_draft(self, settings: ModelSettings) -> OpenDrafter:
        config, confidence_stop, copy_s = self.engine.config, None, None
        if self.costs is not None:
            copy_s = _pass_s(config.self_draft_costs, config.host_s)
            confidence_stop = ConfidenceStop(self.costs.iteration_s, copy_s)
        self._warn_of_missing_ends(self.engine.draft_ids)
        copy = SelfDraftModel(self.engine, use_logits=settings.use_logits, confidence_stop=confidence_stop)
        return OpenDrafter(self.adapted(copy, copy_s), settings.max_draft_len, self_draft=copy)

    def head(self, config: "HeadConfig", settings: ModelSettings) -> OpenDrafter:
        # Imported here with transformers' layers, for which other drafters need not wait.
        from runtime.drafters.head_draft import HeadDraft, measure_head, open_head

        engine = self.engine
        check_head_tokenizer(config.directory, self.target.tokenizer_dir, lambda: self.target.tokenizer)
        head, cache = open_head(engine, config)
        self._warn_of_missing_ends(head.draft_ids)
        self.stack.callback(engine.remove_head, cache)
        warn_of_short_blocks(config, engine.max_draft_len)
        draft = HeadDraft(engine, head, cache, measure_head(engine, head, cache), use_logits=settings.use_logits)
        draft_s = _pass_s(draft.step_costs, 0.0)
        if self.costs is not None:
            draft.confidence_stop = ConfidenceStop(self.costs.iteration_s, draft_s, at_once=head.drafts_at_once)
        drafter = self.adapted(draft, draft_s, at_once=head.drafts_at_once)
        return OpenDrafter(drafter, settings.max_draft_len, head_draft=draft)

    def guarded(self, drafter: GuardedDrafter, max_draft_len: int | None) -> OpenDrafter:
        """A drafter that the user wrote, wrapped so that its errors are reported as that drafter's."""
        return OpenDrafter(self.adapted(drafter), max_draft_len, guarded=[drafter])

    def _warn_of_missing_ends(self, drafted: "Tensor | None") -> None:
        """Warn if no end id is among the ids that may be drafted, `drafted` [n]; None stands for all ids."""
        if drafted is not None and (warning := missing_ends(drafted.tolist(), self.end_ids)) is not None:
            warnings.warn(warning, SpecDecWarning, stacklevel=2)


@dataclass(frozen=True)
class _AnswersOnDisk:
    """Answers of all engines with the same vocabulary: another model's answer is a draft like any other."""

    engine: Engine
    vocabulary: str

    def read(self, owner: str | None, after: int) -> tuple[list[Answer], int]:
        return self.engine.read_answers(self.vocabulary, owner, after)

    def write(self, owner: str | None, answer: Answer) -> None:
        self.engine.keep_answer(self.vocabulary, owner, answer)


@contextmanager
def open_drafter(speculation: Speculation, opening: Opening) -> Iterator[OpenDrafter]:
    """Open a drafter, or several as one, until the block ends. Tokens that a grammar forces are drafted too."""
    with ExitStack() as stack:
        opening = replace(opening, stack=stack, owner_pools=OwnerPools(opening.engine))
        is_one = len(speculation.drafters) == 1
        opened = speculation.drafters[0].open(opening) if is_one else _open_chain(speculation, opening)
        yield replace(opened, drafter=UnderGrammar(opened.drafter, is_model=opened.is_model))


def _pass_s(step_costs: tuple[StepCost, ...], host_s: float, num_masks: int = 0) -> DraftSeconds:
    """Function for the seconds of a pass of the drafting model, with `num_masks` mask tokens behind each sequence."""
    return partial(CostModel(step_costs, host_s).iteration_s, draft_len=num_masks)


def warn_of_short_blocks(config: "HeadConfig", max_draft_len: int) -> None:
    """Warn if the engine's drafts are shorter than the blocks that the head was trained for."""
    block = config.block
    if block is None or block.size is None or block.is_cut or block.num_drafts(block.size) <= max_draft_len:
        return
    warnings.warn(
        f"the head drafts worse in blocks of fewer than {block.num_drafts(block.size)} tokens, and the engine takes "
        f"drafts of {max_draft_len}: {config.directory}",
        SpecDecWarning,
        stacklevel=3,
    )


def _open_chain(speculation: Speculation, opening: Opening) -> OpenDrafter:
    """All drafters as one: each sequence gets the draft that promises most, and drafters that come first are asked
    before all others.

    If all are lookups, the best draft of each sequence is cut to the length that pays; beside a model, each drafter
    cuts its own.
    """
    config = opening.engine.config
    costs = CostModel(config.step_costs, config.host_s) if config.step_costs else None
    opening_each = opening if speculation.has_model else replace(opening, costs=None)
    opened = [one.open(opening_each) for one in speculation]
    first, lookups = list[Drafter](), list[Drafter]()
    for spec, one in zip(speculation, opened, strict=True):
        if not one.is_model:
            bounded = BoundedDrafter(one.drafter, one.max_draft_len) if one.max_draft_len else one.drafter
            (first if spec.comes_first else lookups).append(bounded)
    models = [_drafting_model(one, config, has_costs=costs is not None) for one in opened if one.is_model]
    chain: Drafter
    if len(lookups) == 1 and not models:
        (chain,) = lookups
    else:
        iteration_s = costs.iteration_s if costs else lambda batch_size, context_len, draft_len: 1.0
        chain = BestOf(lookups, models, iteration_s, config.vocab_size)
    for one_before in reversed(first):
        chain = AnswersFirst(one_before, chain)
    return OpenDrafter(
        chain if speculation.has_model else opening.adapted(chain),
        speculation.max_draft_len,
        [pool for one in opened for pool in one.pools],
        next((one.draft_model for one in opened if one.draft_model), None),
        next((one.self_draft for one in opened if one.self_draft), None),
        next((one.head_draft for one in opened if one.head_draft), None),
        [guarded for one in opened for guarded in one.guarded],
        next((one.owner_pools for one in opened if one.owner_pools), None),
    )


def _drafting_model(one: OpenDrafter, target: EngineConfig, *, has_costs: bool) -> DraftingModel:
    """A draft model with its step costs, if they and the target's were measured; otherwise drafting counts as free."""
    assert one.max_draft_len is not None
    at_once, num_masks = False, 0
    if one.draft_model is not None:
        config = one.draft_model.engine.config
        step_costs, host_s = config.step_costs, config.host_s
        at_once = one.draft_model.drafts_at_once
        num_masks = one.max_draft_len - 1 if at_once else 0
    elif one.head_draft is not None:
        step_costs, host_s = one.head_draft.step_costs, 0.0
        at_once = one.head_draft.head.drafts_at_once
    else:
        assert one.self_draft is not None
        step_costs, host_s = target.self_draft_costs, target.host_s
    is_timed = has_costs and step_costs
    step_s = _pass_s(step_costs, host_s, num_masks) if is_timed else lambda batch_size, context_len: 0.0
    return DraftingModel(one.drafter, one.max_draft_len, step_s, one.self_draft, at_once)
