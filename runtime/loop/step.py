"""One step of the loop: draft, batch, step, verify, commit. Orchestrator mode, leader mode and the server run this.

| part | what happens | room |
|---|---|---|
| draft | a drafter proposes tokens for each sequence | `runtime.drafters` |
| batch | a sequence's uncomputed tokens and its draft become a row | `runtime.core.batch` |
| step | the target computes logits after the last token, and after each drafted token | `runtime.engine` |
| verify | drafted tokens are accepted for as long as the target chooses the same | `runtime.core.verify` |
| commit | the accepted tokens, and one token of the target's own, are appended | `runtime.core.request` |

Example: of the tokens 5 6 7 only 7 is not computed, and the draft is 8 9. The row is 7 8 9. If the target chooses 8 4 1
after these tokens, 8 is accepted, 4 is the target's own, and the sequence becomes 5 6 7 8 4.
"""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace

from runtime.core.batch import generation_row
from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken
from runtime.core.stats import LoopTimes
from runtime.core.verify import compute_masks_ahead, verify_all
from runtime.drafters.protocol import Drafter, check_drafts, check_request
from runtime.engine.engine import Engine
from runtime.util.errors import RequestError
from runtime.util.thread_turns import Holder

Stepped = list[tuple[Sequence, list[int]]]
"""(sequence, new tokens) of the sequences that continue or are done."""


def step(
    engine: Engine, drafter: Drafter | None, sequences: list[Sequence], max_draft_len: int, times: LoopTimes
) -> Stepped:
    """Run a step of admitted sequences. A sequence that cannot be continued is not returned, and has an `error`."""
    start = time.perf_counter()
    drafts = propose(engine, drafter, sequences, max_draft_len)
    if drafter is not None:
        times.draft_time_s += time.perf_counter() - start
    with engine.alone():
        verdicts = judge(engine, sequences, drafts)
        return commit(sequences, drafts, verdicts)


def propose(engine: Engine, drafter: Drafter | None, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """A checked draft for each sequence, cut so that a token of the target's own has room behind it."""
    if drafter is None:
        return [Draft([])] * len(sequences)
    drafts = drafter.propose(sequences, max_draft_len)
    check_drafts(drafts, len(sequences), max_draft_len, engine.config.vocab_size)
    return [draft.cut(engine.max_draft_len_of(s)) for s, draft in zip(sequences, drafts, strict=True)]


def judge(engine: Engine, sequences: Seq[Sequence], drafts: Seq[Draft]) -> list[VerifyResult | NoValidToken]:
    """Compute the sequences with their drafts; returns the target's verdict on each draft.

    The sequences' tokens stay as they are. `num_computed` is set to the number of tokens whose K/V the verdict makes
    valid; K/V of rejected tokens lie beyond it. A verdict is NoValidToken if its sequence cannot be continued, which
    affects no other sequence.
    """
    compute_masks_ahead(sequences, drafts)  # of grammars, in a thread while the target computes
    for sequence in sequences:
        engine.catch_up(sequence)  # the beginning of a long prompt
    # Batch (`runtime.core.batch`)
    rows = [generation_row(sequence, draft.tokens) for sequence, draft in zip(sequences, drafts, strict=True)]
    # Step (`runtime.engine`)
    all_logits = engine.step(rows)
    # Verify (`runtime.core.verify`)
    verdicts = verify_all(sequences, drafts, all_logits)
    for i, (sequence, logits, verdict) in enumerate(zip(sequences, all_logits, verdicts, strict=True)):
        if not isinstance(verdict, NoValidToken):
            sequence.num_computed = len(sequence.tokens) + verdict.num_accepted
            if sequence.request.wants_logits:
                verdicts[i] = replace(verdict, logits=logits[: verdict.num_accepted + 1])
    return verdicts


def commit(sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[VerifyResult | NoValidToken]) -> Stepped:
    """Append each verdict's tokens to its sequence; a sequence that cannot be continued keeps the error."""
    stepped = []
    for sequence, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
        if isinstance(verdict, NoValidToken):
            sequence.error = verdict
        else:
            stepped.append((sequence, sequence.commit(draft, verdict)))
    return stepped


# Before the first step of a request, and after its last.


def check_requests(engine: Engine, drafter: Drafter | None, requests: Iterable[Request]) -> None:
    """SpecDecError if the engine or the drafter cannot serve one of the requests."""
    for request in requests:
        engine.check_request(request)
        check_request(drafter, request)


def make_room(engine: Engine, holder: Holder | None, request: Request) -> bool:
    """Take blocks from another generation for a request that found none; False if other generations must be continued
    first. SpecDecError if no other generation holds blocks. `holder` is `asking` of `ThreadTurns.take_room`.
    """
    found = engine.turns.take_room(holder)
    if found is None:
        engine.raise_cache_is_taken(request)
    return found


def raise_first_error(sequences: Iterable[Sequence]) -> None:
    """RequestError of the first sequence that could not be continued."""
    for sequence in sequences:
        if (error := sequence.error) is not None:
            message = f"{sequence.request.name}: {error.message}"
            raise RequestError(message, hint=error.hint, code=error.code, **error.values)


def release_all(engine: Engine, drafter: Drafter | None, sequences: Seq[Sequence]) -> None:
    """Free the blocks of sequences that are left, and the drafter's state of them. If freeing a sequence fails, the
    error is raised after all have been freed.
    """
    with ExitStack() as stack:
        for sequence in reversed(sequences):
            if drafter:
                stack.callback(drafter.forget, sequence.request.id)
            stack.callback(engine.release, sequence)
