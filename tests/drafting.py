"""Requests run with a drafter, in either loop, and what it proposed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine
from runtime.loop import orchestrator, scheduler

LOOPS: dict[str, Callable[..., Any]] = {"orchestrator": orchestrator.generate, "leader": scheduler.generate}


def start(
    tokens: list[int], max_new_tokens: int = 1000, request_id: int = 0, end_ids: tuple[int, ...] = ()
) -> Sequence:
    return Sequence(Request(request_id, tuple(tokens), max_new_tokens, frozenset(end_ids)), list(tokens))


def propose(drafter: Drafter, sequence: Sequence, max_draft_len: int = 10) -> list[int]:
    """A lookup's draft, which has no probabilities."""
    (draft,) = drafter.propose([sequence], max_draft_len)
    assert draft.probs is None
    return draft.tokens


class Proposal(NamedTuple):
    tokens: list[int]
    """Tokens of the sequence."""
    num_remaining: int
    draft: Draft


@dataclass
class Recorded:
    """Passes proposals on, and keeps them with what they were for."""

    drafter: Drafter
    proposals: list[Proposal] = field(default_factory=list)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.drafter.propose(sequences, max_draft_len)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.proposals.append(Proposal(list(sequence.tokens), sequence.num_remaining, draft))
        return drafts

    def forget(self, request_id: int) -> None:
        self.drafter.forget(request_id)

    @property
    def drafted(self) -> list[tuple[list[int], list[int]]]:
        """Tokens of sequences and the drafts behind them, without empty ones."""
        return [(one.tokens, one.draft.tokens) for one in self.proposals if one.draft.tokens]


def check_idle(engine: Engine) -> None:
    """No sequence holds a block; the null block is nobody's."""
    engine._blocks.check_integrity()
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1


def run(engine: Engine, loop: str, requests: list[Request], drafter: Drafter | None, draft_len: int) -> list[Sequence]:
    """The requests' sequences, in order; in the end the engine is idle."""
    steps = LOOPS[loop](engine, requests, drafter, draft_len if drafter else 0)
    finished = {sequence.request.id: sequence for sequence, _ in steps if sequence.finish_reason is not None}
    check_idle(engine)
    return [finished[request.id] for request in requests]


def outputs(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.output_tokens for sequence in sequences]
