"""Lookups that may rest: those whose chosen drafts were no better than the others'.

Initially all of them look. The one whose drafts have most right tokens always looks. For each other one its lead is
learned: the number of right tokens beyond the best other draft, per look, counted when its draft was chosen. A lookup
without a lead rests: it looks for one request in sixteen, so that its lead is still learned.
"""

from runtime.drafters.outcomes import num_common
from runtime.request import Draft, Sequence

_MEMORY, _FIRST_LEAD, _LEAST_LEAD, _INTERVAL = 0.995, 0.1, 0.02, 16
"""Looking takes two hundredths of a token's time in a batch of sixteen, and less in smaller ones."""


class Leads:
    """State of `num_lookups` lookups, which are identified by their numbers."""

    def __init__(self, num_lookups: int) -> None:
        self._leads = [_FIRST_LEAD] * num_lookups
        self._num_right = [0.0] * num_lookups
        """Mean number of right tokens of a draft; it decays."""
        self._pending: dict[int, tuple[int, int, list[tuple[int, list[int]]]]] = {}
        """Pending drafts of a request: their position, the chosen lookup, and the drafts of all that looked."""

    def looks(self, number: int, sequence: Sequence) -> bool:
        if self._leads[number] >= _LEAST_LEAD or sequence.request.id % _INTERVAL == 0:
            return True
        return number == self._num_right.index(max(self._num_right))

    def remember(self, sequence: Sequence, chosen: int, drafts: list[tuple[int, Draft]]) -> None:
        """Remember the drafts of lookups, one of which was chosen; drawn drafts were not weighed."""
        if len(drafts) > 1 and all(draft.probs is None for _, draft in drafts):
            found = [(number, draft.tokens) for number, draft in drafts]
            self._pending[sequence.request.id] = len(sequence.tokens), chosen, found

    def learn(self, sequence: Sequence) -> None:
        """Count how right the last drafts were, as far as is known."""
        if (pending := self._pending.pop(sequence.request.id, None)) is None:
            return
        start, chosen, drafts = pending
        known = sequence.tokens[start:]
        right = {number: num_common(tokens, known) for number, tokens in drafts}
        others = max(num_right for number, num_right in right.items() if number != chosen)
        for number, num_right in right.items():
            lead = num_right - others if number == chosen else 0
            self._leads[number] += (lead - self._leads[number]) * (1 - _MEMORY)
            self._num_right[number] += (num_right - self._num_right[number]) * (1 - _MEMORY)

    def forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)
