"""What both loops do before the first step and before every step: check requests, and ask for drafts."""

from collections.abc import Iterable

from runtime.drafters.protocol import Drafter, check_drafts, check_request
from runtime.engine import Engine
from runtime.request import Draft, Request, Sequence


def check_requests(engine: Engine, drafter: Drafter | None, requests: Iterable[Request]) -> None:
    """SpecDecError if the engine, or a drafter that has something to say about requests, cannot serve one of them."""
    for request in requests:
        engine.check_request(request)
        check_request(drafter, request)


def propose(drafter: Drafter | None, engine: Engine, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """A checked draft for each sequence, no longer than what it can take: the target adds a token of its own."""
    if drafter is None or not sequences:
        return [Draft([])] * len(sequences)
    drafts = drafter.propose(sequences, max_draft_len)
    check_drafts(drafts, len(sequences), max_draft_len, engine.config.vocab_size)
    return [draft.cut(engine.max_draft_len_of(s)) for s, draft in zip(sequences, drafts, strict=True)]
