"""Lookups and a model that drafts for itself, together: for each sequence the one that is worth more.

A lookup costs nothing, and is sent as it is where drafts with a match of that length yielded more tokens per second so
far than the model's own. Elsewhere the model drafts, and looks at what was looked up in one of its steps: what it
would have drafted itself it need not compute one by one.

Which of the two drafts is chosen before the model draws anything, by what was generated before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from runtime.drafters.outcomes import Outcomes
from runtime.drafters.protocol import Drafter, check_drafts, check_request
from runtime.request import Draft, Request, Sequence

_SURE = 16
"""A model's drafts are taken to be as right as lookups with so long a match, until it is known how right they are."""
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class DraftingModel:
    """A drafter that costs time for each token, drafts of at most `max_draft_len`, and can be told what to look at."""

    drafter: Drafter
    max_draft_len: int
    vocab_size: int
    suggest: Callable[[int, list[int]], None]
    """(request, tokens that may come next)."""
    turn_s: Callable[[int, int, float, float], float]
    """(batch size, context length, draft length, steps of the model's own) -> seconds of a turn of the loop."""


class ChoosingChain:
    """Lookups, and the model behind them."""

    def __init__(self, lookups: Drafter, model: DraftingModel) -> None:
        self.lookups = lookups
        self.model = model
        self._found, self._drafted = Outcomes(), Outcomes()

    def check_request(self, request: Request) -> None:
        check_request(self.lookups, request)
        check_request(self.model.drafter, request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        for sequence in sequences:
            self._found.learn(sequence)
            self._drafted.learn(sequence)
        drafts = self.lookups.propose(sequences, max_draft_len)
        check_drafts(drafts, len(sequences), max_draft_len, self.model.vocab_size)  # before the model reads them
        for sequence, draft in zip(sequences, drafts, strict=True):
            self._found.remember(sequence, draft.tokens, draft.match_len)
        left = []
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            worth = self._found.expected_tokens(sequence, draft.match_len, len(draft.tokens))[-1]
            if not draft.tokens or not self._is_worth_more(worth, draft, sequence, len(sequences)):
                left.append(i)
                # A step of the model's with more tokens takes longer: no more than are likely to be right.
                self.model.suggest(sequence.request.id, draft.tokens[: math.ceil(worth - 1)])
        longest = min(max_draft_len, self.model.max_draft_len)
        proposed = self.model.drafter.propose([sequences[i] for i in left], longest) if left else []
        for i, draft in zip(left, proposed, strict=True):
            self._drafted.remember(sequences[i], draft.tokens, _SURE)
            drafts[i] = draft if draft.tokens else drafts[i]
        return drafts

    def forget(self, request_id: int) -> None:
        self._found.forget(request_id)
        self._drafted.forget(request_id)
        self.lookups.forget(request_id)
        self.model.drafter.forget(request_id)

    def _is_worth_more(self, worth: float, draft: Draft, sequence: Sequence, batch_size: int) -> bool:
        """Whether a lookup of which `worth` tokens are expected yields more of them per second than the model's draft.

        The model's own time is less for what it need not compute one by one.
        """
        context_len = len(sequence.tokens) // _CONTEXT_STEP * _CONTEXT_STEP
        num_drafted = min(self.model.max_draft_len, max(sequence.max_draft_len, 1))
        of_model = self._drafted.expected_tokens(sequence, _SURE, num_drafted)[-1]
        num_steps = max(num_drafted - (worth - 1), 1.0)
        lookup_s = self.model.turn_s(batch_size, context_len, len(draft.tokens), 0)
        model_s = self.model.turn_s(batch_size, context_len, num_drafted, num_steps)
        return worth * model_s >= of_model * lookup_s
