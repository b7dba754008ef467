"""Opened drafters: a drafter at work, and the interface that opens it.

A spec opens its drafter through an `Opener`, which the engine's side provides (`runtime.loop.opening`), so that specs
do not import the engine.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runtime.core.request import Draft, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter, DraftSeconds
from runtime.drafters.meter import Clock
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.owner_pools import OwnerPools
from runtime.drafters.protocol import CompositeDrafter, Drafter

if TYPE_CHECKING:
    from runtime.checkpoint.costs import CostModel
    from runtime.drafters.answer_lookup import Answers
    from runtime.drafters.custom import GuardedDrafter
    from runtime.drafters.draft_target import DraftModel, SelfDraftModel
    from runtime.drafters.head_draft import HeadDraft
    from runtime.drafters.heads.head_config import HeadConfig


@dataclass
class OpenDrafter:
    """A drafter at work, with the facts about its parts that a session needs."""

    drafter: Drafter
    max_draft_len: int | None
    """Longest draft; None for as long as the engine takes."""
    pools: "Seq[NgramPool | Answers]" = field(default_factory=list)
    draft_model: "DraftModel | None" = None
    self_draft: "SelfDraftModel | None" = None
    head_draft: "HeadDraft | None" = None
    guarded: "list[GuardedDrafter]" = field(default_factory=list)
    owner_pools: OwnerPools | None = None

    @property
    def is_model(self) -> bool:
        """True if a draft model, a self-draft copy or a head makes its drafts, which takes time."""
        return bool(self._models)

    @property
    def _models(self) -> "list[DraftModel | SelfDraftModel | HeadDraft]":
        return [model for model in (self.draft_model, self.self_draft, self.head_draft) if model is not None]

    @property
    def gives_probs(self) -> bool:
        """True if its drafts for sampling requests carry the probabilities that they were drawn from; for a user's own
        drafter, if one of its drafts did.
        """
        return any(drafter.has_given_probs for drafter in self.guarded) or any(one.use_logits for one in self._models)

    def clear_pools(self) -> None:
        """Forget the outputs of finished requests."""
        for pool in self.pools:
            pool.clear()
        if self.owner_pools is not None:
            self.owner_pools.clear()


class Opener(Protocol):
    """Interface through which a spec opens its drafter; `runtime.loop.opening.Opening` implements it with an engine."""

    @property
    def costs(self) -> "CostModel | None":
        """Costs of the target's steps; None if drafts have a fixed length."""

    @property
    def owner_pools(self) -> OwnerPools:
        """Pools that all lookups of the engine share."""

    def clock(self) -> float: ...

    def answers(self) -> "Answers":
        """Old answers, in memory and, if the engine keeps K/V on disk, on disk."""

    def guarded(self, drafter: "GuardedDrafter", max_draft_len: int | None) -> OpenDrafter:
        """Open the user's own drafter (`runtime.drafters.custom`)."""

    def draft_model(
        self, model: str | Path, devices: tuple[int, ...] | None, settings: "DraftModelSettings"
    ) -> OpenDrafter:
        """Open a draft model, by its name or its engine's directory."""

    def self_draft(self, settings: "ModelSettings") -> OpenDrafter:
        """Open the target's self-draft copy."""

    def head(self, config: "HeadConfig", settings: "ModelSettings") -> OpenDrafter:
        """Open a trained head, which reads the target's hidden states."""


class ModelSettings(Protocol):
    """Settings that `SelfDrafter` and `HeadDrafter` share."""

    @property
    def max_draft_len(self) -> int: ...

    @property
    def use_logits(self) -> bool: ...


class DraftModelSettings(ModelSettings, Protocol):
    """Settings of `DraftTargetDrafter` and `PardDrafter`."""

    @property
    def num_masks(self) -> int | None: ...


def adapted(
    drafter: Drafter,
    costs: "CostModel | None",
    draft_s: DraftSeconds | None = None,
    clock: Clock | None = None,
    *,
    at_once: bool = False,
) -> Drafter:
    """The drafter; if step costs are known, with its drafts cut to the length that pays (`AdaptiveDrafter`)."""
    if costs is None:
        return drafter
    return AdaptiveDrafter(drafter, costs.iteration_s, draft_s, clock, at_once=at_once)


class BoundedDrafter(CompositeDrafter):
    """A drafter whose drafts are bounded, within a chain or a server that would take longer drafts."""

    def __init__(self, drafter: Drafter, max_draft_len: int) -> None:
        super().__init__([drafter])
        self.max_draft_len = max_draft_len

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return self.members[0].propose(sequences, min(max_draft_len, self.max_draft_len))

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        return super().look_ahead(sequence, drafted, min(max_draft_len, self.max_draft_len))
