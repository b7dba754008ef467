"""Drafts of requests that have a grammar: what it forces is drafted without a model, and what it forbids is not sent.

A forced token is the only one that the target can choose, so it is always accepted; it takes a place in a step that
would otherwise be a step of its own.
"""

from runtime.core.request import Draft, Sequence
from runtime.drafters.protocol import CompositeDrafter, Drafter, ask


class NothingDrafted:
    """Drafter without drafts of its own: those that grammars force are all there are."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([])] * len(sequences)

    def forget(self, request_id: int) -> None:
        """Forget nothing."""


class UnderGrammar(CompositeDrafter):
    """Another drafter, whose drafts are cut before the first illegal token and go on with forced ones.

    Where a draft would begin with forced tokens they are the draft. A drafter with `is_model` is not asked then; others
    are, because they time their steps.
    """

    def __init__(self, drafter: Drafter, *, is_model: bool = False) -> None:
        super().__init__([drafter])
        self._is_model = is_model

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        forced = [_forced(sequence, []) for sequence in sequences]
        asked = [i for i, tokens in enumerate(forced) if not (tokens and self._is_model)]
        drafts = [Draft([])] * len(sequences)
        for i, draft in zip(asked, ask(self.members[0], [sequences[i] for i in asked], max_draft_len), strict=True):
            drafts[i] = draft
        return [
            _fitting(sequence, draft, tokens, max_draft_len)
            for sequence, draft, tokens in zip(sequences, drafts, forced, strict=True)
        ]


def _forced(sequence: Sequence, drafted: list[int]) -> list[int]:
    matcher = sequence.sampler.matcher
    return [] if matcher is None else matcher.forced(sequence.tokens, drafted)


def _fitting(sequence: Sequence, draft: Draft, forced: list[int], max_draft_len: int) -> Draft:
    """The draft as the grammar has it, with what follows."""
    matcher = sequence.sampler.matcher
    if matcher is None:
        return draft
    num_legal = matcher.num_legal(sequence.tokens, draft.tokens)
    if draft.probs is not None:
        # An illegal token that was drawn is sent too: its rejection is part of what makes the distribution exact.
        return draft.cut(num_legal + 1)
    tokens = forced or draft.tokens[:num_legal]
    num_predicted = 0 if forced else min(draft.num_predicted, num_legal)
    if tokens is not forced and len(tokens) < max_draft_len:
        tokens = tokens + _forced(sequence, tokens)
    whole = Draft(tokens, None, draft.match_len, num_predicted=num_predicted)
    return whole.cut(min(max_draft_len, sequence.max_draft_len))
