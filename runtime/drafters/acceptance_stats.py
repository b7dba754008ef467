"""Acceptance statistics of drafts: by position in the draft and by match length, for one request and for all requests.

A draft never changes what is generated, so the generated tokens tell how right a draft was, also one that was not sent.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

from runtime.core.request import Draft, Sequence

_MATCH_LENS = (0, 1, 2, 3, 4, 6, 9, 16)
"""Drafts are told apart by how long their match was: this far, or longer."""
MODEL_PRIOR = 16
"""A model's drafts are taken to be as right as lookups with so long a match, until it is known how right they are."""
_FIRST_GUESSES = (0.33, 0.25, 0.5, 0.65, 0.7, 0.7, 0.75, 0.75, 0.75, *[0.83] * 7, 0.88)
"""Prior acceptance of the next token after a match of 0, 1, ... tokens. Lookups in the outputs of SmolLM2 135M for
Spec-Bench are so: 0.20 to 0.27 of 1 token, 0.47 to 0.52 of 2, 0.80 to 0.96 of 16. 0: not a lookup, so unknown.
"""
_OWN_MEMORY, _SHARED_MEMORY = 0.9, 0.995
"""Decay of a count for each further draft."""
_SHARED_WEIGHT, _PRIOR_WEIGHT = 8.0, 4.0
"""Numbers of drafts at which a request's own statistics weigh as much as all requests', and those as much as the prior.
"""
_LEAD_MEMORY, _FIRST_LEAD, _LEAST_LEAD, LOOK_INTERVAL = 0.995, 0.1, 0.02, 16
"""Looking takes two hundredths of a token's time in a batch of sixteen, and less in smaller ones."""


@dataclass
class _PositionStats:
    """Number of drafts that reached each position, and number of drafts that were right there; both counts decay."""

    memory: float
    reached: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, num_right: int, num_known: int) -> None:
        """A draft of `num_known` tokens, the first `num_right` of them right."""
        missing = num_known - len(self.reached)
        self.reached += [0.0] * missing
        self.right += [0.0] * missing
        for i in range(min(num_right + 1, num_known)):
            self.reached[i] = self.reached[i] * self.memory + 1
            self.right[i] = self.right[i] * self.memory + (i < num_right)


_NOTHING_KNOWN = _PositionStats(memory=0.0)


@dataclass
class _History:
    """Statistics of one request: counts by match length, and drafts whose outcome is not known yet."""

    survivals: dict[int, _PositionStats] = field(default_factory=dict)
    pending: list[tuple[int, list[int], int]] = field(default_factory=list)
    """Position of a draft's first token, its tokens, and the length of its match."""


class AcceptanceStats:
    """Remembers drafts, learns which of their tokens were right, and predicts how many tokens of the next will be.

    `are_cut`: a drafter returns no more tokens than it was asked for, so longer drafts have to be tried to be known.
    """

    def __init__(self, *, are_cut: bool = False) -> None:
        self._are_cut = are_cut
        self._shared: dict[int, _PositionStats] = {}
        self._histories: dict[int, _History] = {}

    def __len__(self) -> int:
        """Number of requests with a history."""
        return len(self._histories)

    def remember(self, sequence: Sequence, tokens: list[int], match_len: int) -> None:
        """A draft for what comes next."""
        if tokens:
            self._history(sequence).pending.append((len(sequence.tokens), tokens, _class_of(match_len)))

    def learn(self, sequence: Sequence) -> None:
        """Count the drafts that the tokens generated since have shown to be right or wrong."""
        history = self._histories.get(sequence.request.id)
        if history is None or not history.pending:
            return
        still_pending = []
        for start, tokens, match_len in history.pending:
            known = sequence.tokens[start : start + len(tokens)]
            num_right = num_common(tokens, known)
            if num_right == len(known) < len(tokens):
                still_pending.append((start, tokens, match_len))
                continue
            own = history.survivals.setdefault(match_len, _PositionStats(_OWN_MEMORY))
            shared = self._shared.setdefault(match_len, _PositionStats(_SHARED_MEMORY))
            for survival in (own, shared):
                survival.add(num_right, len(tokens))
        history.pending = still_pending

    def survivals(self, sequence: Sequence, match_len: int, max_len: int) -> list[float]:
        """Survival of a draft of `max_len` tokens: P(at least 1 accepted), P(at least 2 accepted), ..., decreasing."""
        kind = _class_of(match_len)
        own = self._history(sequence).survivals.get(kind, _NOTHING_KNOWN)
        shared = self._shared.get(kind, _NOTHING_KNOWN)
        right, reached, own_right, own_reached = shared.right, shared.reached, own.right, own.reached
        num_shared, num_own, are_cut = len(reached), len(own_reached), self._are_cut
        survivals, survives, share = list[float](), 1.0, 0.0
        for i, first_guess in enumerate(_first_guesses(kind, max_len)):
            # Or no draft would be longer than those before.
            share = max(share, first_guess) if are_cut else first_guess
            if i < num_shared:
                share = (right[i] + _PRIOR_WEIGHT * share) / (reached[i] + _PRIOR_WEIGHT)
            if i < num_own:
                share = (own_right[i] + _SHARED_WEIGHT * share) / (own_reached[i] + _SHARED_WEIGHT)
            survives *= share
            survivals.append(survives)
        return survivals

    def expected_tokens(self, sequence: Sequence, match_len: int, draft_len: int) -> float:
        """Tokens that a step yields with a draft of `draft_len` tokens."""
        return 1 + sum(self.survivals(sequence, match_len, draft_len))

    def forget(self, request_id: int) -> None:
        self._histories.pop(request_id, None)

    def _history(self, sequence: Sequence) -> _History:
        return self._histories.setdefault(sequence.request.id, _History())


class Leads:
    """Chooses, among several lookups, which ones to run: those that may find the best draft.

    All lookups run at first. The lookup whose drafts have most correct tokens always runs. Each other lookup has a
    lead: by how many tokens its draft was better than the best other draft, on average over the steps where its draft
    was chosen. A lookup without a lead runs for one request in sixteen, so that its lead is still learned.
    """

    def __init__(self, num_lookups: int) -> None:
        self._leads = [_FIRST_LEAD] * num_lookups
        self._num_right = [0.0] * num_lookups
        """Mean number of right tokens of a draft; it decays."""
        self._pending: dict[int, tuple[int, int, list[tuple[int, list[int]]]]] = {}
        """Pending drafts of a request: their position, the chosen lookup, and the drafts of all that looked."""

    def looks(self, number: int, sequence: Sequence) -> bool:
        if self._leads[number] >= _LEAST_LEAD or sequence.request.id % LOOK_INTERVAL == 0:
            return True
        return number == self._num_right.index(max(self._num_right))

    def remember(self, sequence: Sequence, chosen: int, drafts: list[tuple[int, Draft]]) -> None:
        """Remember the drafts of all lookups of a step, and which was chosen. Drafts drawn from a distribution are left
        out.
        """
        if len(drafts) > 1 and all(draft.probs is None for _, draft in drafts):
            found = [(number, draft.tokens) for number, draft in drafts]
            self._pending[sequence.request.id] = len(sequence.tokens), chosen, found

    def learn(self, sequence: Sequence) -> None:
        """Count how many tokens of the last drafts were right, as far as tokens were generated since."""
        if (pending := self._pending.pop(sequence.request.id, None)) is None:
            return
        start, chosen, drafts = pending
        known = sequence.tokens[start:]
        right = {number: num_common(tokens, known) for number, tokens in drafts}
        others = max(num_right for number, num_right in right.items() if number != chosen)
        for number, num_right in right.items():
            lead = num_right - others if number == chosen else 0
            self._leads[number] += (lead - self._leads[number]) * (1 - _LEAD_MEMORY)
            self._num_right[number] += (num_right - self._num_right[number]) * (1 - _LEAD_MEMORY)

    def forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


@cache
def _first_guesses(kind: int, num: int) -> list[float]:
    """Prior for the next tokens, in order: the tokens that were right so far count as a match too."""
    return [_FIRST_GUESSES[min(kind + i, MODEL_PRIOR) if kind else 0] for i in range(num)]


def _class_of(match_len: int) -> int:
    return _MATCH_LENS[bisect_right(_MATCH_LENS, match_len) - 1]


def num_common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
