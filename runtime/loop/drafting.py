"""Shared parts of both loops: checking requests, drafting before a step, committing after it, and releasing."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack

from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken
from runtime.drafters.protocol import Drafter, check_drafts, check_request
from runtime.engine.engine import Engine
from runtime.util.errors import RequestError
from runtime.util.thread_turns import Holder


def check_requests(engine: Engine, drafter: Drafter | None, requests: Iterable[Request]) -> None:
    """SpecDecError if the engine, or a drafter that has something to say about requests, cannot serve one of them."""
    for request in requests:
        engine.check_request(request)
        check_request(drafter, request)


def make_room(engine: Engine, holder: Holder | None, request: Request) -> bool:
    """Take blocks from another generation for a request that found none; False where the others go on first.

    SpecDecError if no others can give any. `holder` as for `ThreadTurns.take_room`.
    """
    found = engine.turns.take_room(holder)
    if found is None:
        engine.raise_cache_is_taken(request)
    return found


def propose(drafter: Drafter | None, engine: Engine, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """A checked draft for each sequence, no longer than what it can take: the target adds a token of its own."""
    if drafter is None or not sequences:
        return [Draft([])] * len(sequences)
    drafts = drafter.propose(sequences, max_draft_len)
    check_drafts(drafts, len(sequences), max_draft_len, engine.config.vocab_size)
    return [draft.cut(engine.max_draft_len_of(s)) for s, draft in zip(sequences, drafts, strict=True)]


def commit(
    sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[VerifyResult | NoValidToken]
) -> list[tuple[Sequence, list[int]]]:
    """(sequence, new tokens) of those that go on or are done; of those that cannot go on the error is kept."""
    stepped = []
    for sequence, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
        if isinstance(verdict, NoValidToken):
            sequence.error = verdict
        else:
            stepped.append((sequence, sequence.commit(draft, verdict)))
    return stepped


def raise_first_error(sequences: Iterable[Sequence]) -> None:
    """RequestError of the first that could not go on."""
    for sequence in sequences:
        if (error := sequence.error) is not None:
            message = f"{sequence.request.name}: {error.message}"
            raise RequestError(message, hint=error.hint, code=error.code, **error.values)


def release_all(engine: Engine, drafter: Drafter | None, sequences: Seq[Sequence]) -> None:
    """Give back the blocks that a step which failed left to sequences, and the drafter's state of them.

    What fails for one of them is raised when the others have been let go.
    """
    with ExitStack() as stack:
        for sequence in reversed(sequences):
            if drafter:
                stack.callback(drafter.forget, sequence.request.id)
            stack.callback(engine.release, sequence)
