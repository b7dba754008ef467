"""Drafts for requests with a grammar or a budget for thinking: forced tokens are drafted without a model, and forbidden
tokens are not sent.

A forced token is the only token that is allowed at its place, so it is always accepted. Drafting it saves a step.
"""

from runtime.core.request import Draft, Sequence
from runtime.drafters.protocol import CompositeDrafter, Drafter, ask


class NothingDrafted:
    """Drafter without drafts of its own, so that only the tokens forced by grammars are drafted."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([])] * len(sequences)

    def forget(self, request_id: int) -> None:
        """Do nothing: there is nothing to forget."""


class UnderGrammar(CompositeDrafter):
    """Another drafter's drafts, each cut before its first forbidden token and continued with forced tokens. Drafts that
    were drawn from a distribution are cut behind that token.

    If the next token is forced, the draft consists of forced tokens. A drafter with `is_model` is not asked then; other
    drafters are, because they time their steps.
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
    return sequence.sampler.forced(sequence.tokens, drafted) if sequence.sampler.is_held else []


def _fitting(sequence: Sequence, draft: Draft, forced: list[int], max_draft_len: int) -> Draft:
    """The draft, cut and continued as `UnderGrammar` says; `forced` are the tokens that are forced before any draft."""
    if not sequence.sampler.is_held:
        return draft
    num_legal = sequence.sampler.num_legal(sequence.tokens, draft.tokens)
    if draft.probs is not None:
        # A forbidden token that was drawn is sent too: the distribution is exact only if the target rejects it.
        return draft.cut(num_legal + 1)
    tokens = forced or draft.tokens[:num_legal]
    num_predicted = 0 if forced else min(draft.num_predicted, num_legal)
    if tokens is not forced and len(tokens) < max_draft_len:
        tokens = tokens + _forced(sequence, tokens)
    whole = Draft(tokens, None, draft.match_len, num_predicted=num_predicted)
    return whole.cut(min(max_draft_len, sequence.max_draft_len))
