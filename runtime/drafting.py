"""Ask a drafter for drafts that an engine can take: what both loops do before a step."""

from runtime.drafters.protocol import Drafter, check_drafts
from runtime.engine import Engine
from runtime.request import Draft, Sequence


def propose(drafter: Drafter | None, engine: Engine, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """A checked draft for each sequence, no longer than what it can take: the target adds a token of its own."""
    if drafter is None or not sequences:
        return [Draft([])] * len(sequences)
    drafts = drafter.propose(sequences, max_draft_len)
    check_drafts(drafts, len(sequences), max_draft_len, engine.config.vocab_size)
    return [draft.cut(engine.max_draft_len_of(s)) for s, draft in zip(sequences, drafts, strict=True)]
