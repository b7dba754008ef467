"""Replays recorded outputs through a drafter, without a model, and gives the counts that a greedy loop would have had.

After every prefix of its output, a target that generates greedily chooses the token that it chose when the output was
recorded. So the record is sufficient to accept or reject a draft. Steps and drafts are those of
`runtime.loop.orchestrator` and `runtime.loop.scheduler`: the step that computes the prompt carries a draft too, drafts
are cut to the budget, and the last step yields fewer tokens if the output ends.
"""

import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.core.stats import RequestStats
from runtime.drafters.protocol import Drafter, check_drafts, check_num_drafts
from runtime.text.trace_lines import Trace


@dataclass(frozen=True)
class ReplayedStep:
    """A step of sequences in lockstep: each one's number of tokens (first, of its prompt) and draft length."""

    num_tokens: tuple[int, ...]
    draft_lens: tuple[int, ...]
    is_first: bool


@dataclass
class ReplayedBatches:
    """Counts and computed tokens of a replayed loop, and the drafter's own time."""

    stats: list[RequestStats] = field(default_factory=list)
    steps: list[ReplayedStep] = field(default_factory=list)
    draft_time_s: float = 0.0


def replay_batches(
    traces: Seq[Trace],
    drafter: Drafter | None,
    max_draft_len: int,
    batch_size: int = 1,
    *,
    max_new_tokens: int | None = None,
    end_ids: frozenset[int] = frozenset(),
) -> ReplayedBatches:
    """Counts for the traces in groups of `batch_size` that step together, as orchestrator mode answers them; `drafter`
    None drafts nothing. A group is forgotten when all its requests are done. Drafters do not draft `end_ids`.

    The budget of each request is its output's length. With `max_new_tokens` all requests have that budget instead. A
    shorter output then ends where the recorded one ended, which no drafter can know: the number of steps stays the
    same, but more is drafted in the last steps. Spec-Bench counts in this way, with 1,024.
    """
    replayed = ReplayedBatches()
    for start in range(0, len(traces), batch_size):
        group = traces[start : start + batch_size]
        sequences = [_start(trace, start + i, max_new_tokens, end_ids) for i, trace in enumerate(group)]
        running = [i for i, sequence in enumerate(sequences) if not _is_done(sequence, group[i])]
        is_first = True
        while running:
            rows = [sequences[i] for i in running]
            before = time.perf_counter()
            drafts = _propose(drafter, rows, max_draft_len)
            replayed.draft_time_s += time.perf_counter() - before
            num_tokens = tuple(len(sequence.tokens) for sequence in rows)
            replayed.steps.append(ReplayedStep(num_tokens, tuple(len(draft.tokens) for draft in drafts), is_first))
            for i, draft in zip(running, drafts, strict=True):
                remaining = group[i].output_tokens[sequences[i].num_generated :]
                sequences[i].commit(draft, _verify(draft.tokens, remaining))
            running = [i for i in running if not _is_done(sequences[i], group[i])]
            is_first = False
        if drafter is not None:
            for sequence in sequences:
                drafter.forget(sequence.request.id)
        replayed.stats += [sequence.stats for sequence in sequences]
    return replayed


def _start(trace: Trace, request_id: int, max_new_tokens: int | None, end_ids: frozenset[int]) -> Sequence:
    def has_ended(tokens: list[int], num_prompt_tokens: int) -> bool:
        return len(tokens) - num_prompt_tokens >= len(trace.output_tokens)

    budget = len(trace.output_tokens) if max_new_tokens is None else max_new_tokens
    stop_check = None if max_new_tokens is None else has_ended
    return Sequence.start(Request(request_id, trace.prompt_tokens, budget, end_ids, stop_check))


def _is_done(sequence: Sequence, trace: Trace) -> bool:
    return sequence.finish_reason is not None or not trace.output_tokens


def _propose(drafter: Drafter | None, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """Checked drafts, cut to the budget as in a real step. Probabilities are not used, since the target is greedy."""
    if drafter is None:
        return [Draft([])] * len(sequences)
    drafts = drafter.propose(sequences, max_draft_len)
    check_num_drafts(drafts, len(sequences))
    drafts = [Draft(draft.tokens) for draft in drafts]
    check_drafts(drafts, len(sequences), max_draft_len, vocab_size=sys.maxsize)
    return [draft.cut(s.max_draft_len) for s, draft in zip(sequences, drafts, strict=True)]


def _verify(draft_tokens: list[int], target_tokens: Seq[int]) -> VerifyResult:
    """Result of verifying a draft if a greedy target is going to generate `target_tokens`."""
    pairs = zip(draft_tokens, target_tokens, strict=False)
    num_accepted = next((i for i, (drafted, right) in enumerate(pairs) if drafted != right), None)
    if num_accepted is None:
        num_accepted = min(len(draft_tokens), len(target_tokens))
    # At the output's end there is no next token: -1 stands for it, and is cut off.
    return VerifyResult(num_accepted, target_tokens[num_accepted] if num_accepted < len(target_tokens) else -1)
