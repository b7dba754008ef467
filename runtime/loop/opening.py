"""Drafters at work, for as long as a session lasts. Whether they fit the target is checked elsewhere."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import EngineConfig
from runtime.checkpoint.costs import CostModel
from runtime.drafters.chain import BestOf, DraftingModel
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.custom import GuardedDrafter
from runtime.drafters.draft_target import DraftModel, SelfDraft
from runtime.drafters.opened import BoundedDrafter, ModelSettings, OpenDrafter, adapted
from runtime.drafters.protocol import Drafter
from runtime.drafters.speculation import Speculation
from runtime.drafters.translated import TranslatedDraftModel
from runtime.drafters.under_grammar import UnderGrammar
from runtime.engine.draft_vocab import missing_ends
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.compatibility import TargetIdentity, check_draft_engine, check_head_tokenizer
from runtime.loop.step_costs import costs_when_asked_for
from runtime.util.errors import SpecDecWarning, draft_engine_errors

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.drafters.heads.head_config import HeadConfig

FindEngine = Callable[[str | Path], Path]
"""The engine's directory of a draft model."""


@dataclass(frozen=True)
class Opening:
    """Context in which drafters are opened. `costs`, where drafts are to be no longer than what pays. `stack` closes
    them.
    """

    engine: Engine
    costs: CostModel | None
    kv_cache: KVCacheConfig
    find_engine: FindEngine
    target: TargetIdentity
    end_ids: frozenset[int] = frozenset()
    """The target's."""
    stack: ExitStack = field(default_factory=ExitStack)

    def clock(self) -> float:
        """Seconds, by which steps are timed: the whole turn of a loop, for drafts are work outside the step too."""
        return perf_counter()

    def adapted(self, drafter: Drafter, draft_costs: CostModel | None = None, *, at_once: bool = False) -> Drafter:
        """Its drafts cut to what pays, where that is asked for."""
        return adapted(drafter, self.costs, draft_costs, self.clock, at_once=at_once)

    def draft_model(self, model: str | Path, devices: tuple[int, ...] | None, settings: ModelSettings) -> OpenDrafter:
        return _open_draft_model(model, devices, settings, self)

    def self_draft(self, settings: ModelSettings) -> OpenDrafter:
        return _open_self_draft(settings, self)

    def head(self, config: "HeadConfig", settings: ModelSettings) -> OpenDrafter:
        return _open_head(config, settings, self)

    def guarded(self, drafter: GuardedDrafter, max_draft_len: int | None) -> OpenDrafter:
        """A drafter of the user's own."""
        return OpenDrafter(self.adapted(drafter), max_draft_len, guarded=[drafter])


@contextmanager
def open_drafter(speculation: Speculation, opening: Opening) -> Iterator[OpenDrafter]:
    """The drafter, or several as one, for as long as the block lasts; and with it what grammars force."""
    with ExitStack() as stack:
        opening = replace(opening, stack=stack)
        is_one = len(speculation.drafters) == 1
        opened = speculation.drafters[0].open(opening) if is_one else _open_chain(speculation, opening)
        yield replace(opened, drafter=UnderGrammar(opened.drafter, is_model=opened.is_model))


def _open_draft_model(
    model_name: str | Path, devices: tuple[int, ...] | None, settings: ModelSettings, opening: Opening
) -> OpenDrafter:
    with draft_engine_errors():
        bundle = read_bundle(opening.find_engine(model_name))
    tokenizers = check_draft_engine(bundle, opening.target, use_logits=settings.use_logits)
    with draft_engine_errors():
        kv_cache = (
            opening.kv_cache if bundle.config.states else replace(opening.kv_cache, state_checkpoint_interval=None)
        )
        engine = opening.stack.enter_context(Engine.of_bundle(bundle, devices, kv_cache))
        draft_costs = None
        if opening.costs is not None:
            engine.config = costs_when_asked_for(bundle, engine)
            draft_costs = CostModel(engine.config.step_costs, engine.config.host_s)
    vocab_size = opening.engine.config.vocab_size if tokenizers is None else engine.config.vocab_size
    model = DraftModel(engine, vocab_size, use_logits=settings.use_logits)
    drafter = model if tokenizers is None else TranslatedDraftModel(model, *tokenizers)
    return OpenDrafter(opening.adapted(drafter, draft_costs), settings.max_draft_len, draft_model=model)


def _open_self_draft(settings: ModelSettings, opening: Opening) -> OpenDrafter:
    engine, config, confidence_stop, copy_costs = opening.engine, opening.engine.config, None, None
    if opening.costs is not None:
        copy_costs = CostModel(config.self_draft_costs, config.host_s)
        confidence_stop = ConfidenceStop(opening.costs.iteration_s, partial(copy_costs.iteration_s, draft_len=0))
    _warn_of_missing_ends(engine.draft_ids, opening)
    copy = SelfDraft(engine, use_logits=settings.use_logits, confidence_stop=confidence_stop)
    return OpenDrafter(opening.adapted(copy, copy_costs), settings.max_draft_len, self_draft=copy)


def _open_head(config: "HeadConfig", settings: ModelSettings, opening: Opening) -> OpenDrafter:
    from runtime.drafters.head_draft import (
        HeadDraft,
        measure_head,
        open_head,  # with transformers' layers, which other drafters need not wait for
    )

    engine = opening.engine
    check_head_tokenizer(config.directory, opening.target.tokenizer_dir, lambda: opening.target.tokenizer)
    head, cache = open_head(engine, config)
    _warn_of_missing_ends(head.draft_ids, opening)
    opening.stack.callback(engine.remove_head, cache)
    warn_of_short_blocks(config, engine.max_draft_len)
    draft = HeadDraft(engine, head, cache, measure_head(engine, head, cache), use_logits=settings.use_logits)
    head_costs = CostModel(draft.step_costs, 0.0)
    if opening.costs is not None:
        draft_s = partial(head_costs.iteration_s, draft_len=0)
        draft.confidence_stop = ConfidenceStop(opening.costs.iteration_s, draft_s, at_once=head.drafts_at_once)
    drafter = opening.adapted(draft, head_costs, at_once=head.drafts_at_once)
    return OpenDrafter(drafter, settings.max_draft_len, head_draft=draft)


def _warn_of_missing_ends(drafted: "Tensor | None", opening: Opening) -> None:
    """Warn where no end id is among the (n,) ids that are drafted; None: all are."""
    if drafted is not None and (warning := missing_ends(drafted.tolist(), opening.end_ids)) is not None:
        warnings.warn(warning, SpecDecWarning, stacklevel=2)


def warn_of_short_blocks(config: "HeadConfig", max_draft_len: int) -> None:
    """SpecDecWarning where a block has no room for what it was trained to have."""
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
    """All of them, of which each sequence gets the draft that is worth most.

    Where all are lookups their best drafts are cut to what pays, together; beside a model each cuts its own.
    """
    config = opening.engine.config
    costs = CostModel(config.step_costs, config.host_s) if config.step_costs else None
    opening_each = opening if speculation.has_model else replace(opening, costs=None)
    opened = [one.open(opening_each) for one in speculation]
    lookups: list[Drafter] = [
        BoundedDrafter(one.drafter, one.max_draft_len) if one.max_draft_len else one.drafter
        for one in opened
        if not one.is_model
    ]
    models = [_drafting_model(one, config, has_costs=costs is not None) for one in opened if one.is_model]
    chain = BestOf(lookups, models, costs.iteration_s if costs else _always_the_same, config.vocab_size)
    return OpenDrafter(
        chain if speculation.has_model else opening.adapted(chain),
        speculation.max_draft_len,
        [pool for one in opened for pool in one.pools],
        next((one.draft_model for one in opened if one.draft_model), None),
        next((one.self_draft for one in opened if one.self_draft), None),
        next((one.head_draft for one in opened if one.head_draft), None),
        [guarded for one in opened for guarded in one.guarded],
    )


def _drafting_model(one: OpenDrafter, target: EngineConfig, *, has_costs: bool) -> DraftingModel:
    """Draft model with its step costs, if they and the target's were measured; else drafting counts as free."""
    assert one.max_draft_len is not None
    if one.draft_model is not None:
        config = one.draft_model.engine.config
        step_costs, host_s = config.step_costs, config.host_s
    elif one.head_draft is not None:
        step_costs, host_s = one.head_draft.step_costs, 0.0
    else:
        assert one.self_draft is not None
        step_costs, host_s = target.self_draft_costs, target.host_s
    known = CostModel(step_costs, host_s) if has_costs and step_costs else None

    def step_s(batch_size: int, context_len: int) -> float:
        return known.iteration_s(batch_size, context_len, 0) if known else 0.0

    at_once = one.head_draft is not None and one.head_draft.head.drafts_at_once
    return DraftingModel(one.drafter, one.max_draft_len, step_s, one.self_draft, at_once)


def _always_the_same(batch_size: int, context_len: int, draft_len: float) -> float:
    """Constant step costs, if none were measured."""
    return 1.0
