"""Statistics of earlier drafts, which predict how often the next drafts will be right. Drafts never change the text, so
the generated text shows how many tokens of a draft were right, even if it was not sent. `PendingDrafts` keeps drafts
until that text is there, and compares. Three classes count:

- `AcceptanceStats`: position by position, for each length of match, of one request and of all requests
- `Leads`: lookup by lookup, to know which of them is worth asking
- `ConfidenceStop` (`runtime.drafters.confidence_stop`): by how sure a model was of its token
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

from runtime.core.kv_cache import num_common
from runtime.core.request import Draft, Sequence

_MATCH_LENS = (0, 1, 2, 3, 4, 6, 9, 16)
"""Classes of match lengths. Drafts with a match this long, or longer, are counted together."""
MODEL_PRIOR = 16
"""Match length of lookups whose acceptance is assumed for a model's drafts, until the model's own is known."""
_FIRST_GUESSES = (0.33, 0.25, 0.5, 0.65, 0.7, 0.7, 0.75, 0.75, 0.75, *[0.83] * 7, 0.88)
"""Prior acceptance of the next token after a match of 0, 1, ... tokens. Lookups in the outputs of SmolLM2 135M for
Spec-Bench have these rates: 0.20 to 0.27 after 1 token, 0.47 to 0.52 after 2, 0.80 to 0.96 after 16. The first is for
drafts that are no lookup's.
"""
_OWN_MEMORY, _SHARED_MEMORY = 0.9, 0.995
"""Factor by which counts decay with each further draft: a request's own, and those of all requests."""
_SHARED_WEIGHT, _PRIOR_WEIGHT = 8.0, 4.0
"""Numbers of drafts at which a request's own statistics weigh as much as all requests' statistics, and at which all
requests' statistics weigh as much as the prior.
"""
_LEAD_MEMORY, _FIRST_LEAD, _LEAST_LEAD, LOOK_INTERVAL = 0.995, 0.1, 0.02, 16
"""Parameters of `Leads`: decay, lead at the start, least lead, and the interval of looks. In a batch of sixteen a
lookup takes two hundredths of a token's time, and less in smaller batches.
"""


Note = TypeVar("Note")


class PendingDrafts(Generic[Note]):
    """Drafts by request, kept until later text shows which tokens were right: (first position, tokens, a note)."""

    def __init__(self) -> None:
        self.drafts: dict[int, list[tuple[int, list[int], Note]]] = {}

    def remember(self, sequence: Sequence, tokens: list[int], note: Note, start: int | None = None) -> None:
        """Keep a draft for the next tokens, or, with `start`, for the tokens from that position on."""
        place = len(sequence.tokens) if start is None else start
        self.drafts.setdefault(sequence.request.id, []).append((place, tokens, note))

    def take(self, sequence: Sequence) -> list[tuple[int, list[int], Note, int, int]]:
        """The request's drafts, each with the number of its first tokens that were right, and the number of tokens that
        the text has there so far. For a draft 5 6 7 and the text 5 6 both numbers are 2: nothing is known of the 7.
        """
        return [
            (start, tokens, note, num_common(tokens, sequence.tokens[start:]), len(sequence.tokens) - start)
            for start, tokens, note in self.drafts.pop(sequence.request.id, ())
        ]

    def forget(self, request_id: int) -> None:
        self.drafts.pop(request_id, None)


@dataclass
class _PositionStats:
    """Number of drafts that reached each position, and number of drafts that were right there; both counts decay."""

    memory: float
    reached: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, num_right: int, num_known: int) -> None:
        """Count a draft of which `num_known` tokens can be compared, and the first `num_right` were right."""
        missing = num_known - len(self.reached)
        self.reached += [0.0] * missing
        self.right += [0.0] * missing
        for i in range(min(num_right + 1, num_known)):
            self.reached[i] = self.reached[i] * self.memory + 1
            self.right[i] = self.right[i] * self.memory + (i < num_right)


_NOTHING_KNOWN = _PositionStats(memory=0.0)


_Kind = tuple[int, int]
"""The number of a drafter, and the class of its match length."""


class AcceptanceStats:
    """Remembers drafts, counts how many of their tokens were right, and predicts that for the next drafts.

    Drafters are told apart by number (`source`). With `are_cut`, drafts are as short as was asked for: positions that
    were never reached are then assumed to be as good as positions before them, so that longer drafts are tried.
    """

    def __init__(self, *, are_cut: bool = False) -> None:
        self._are_cut = are_cut
        self._shared: dict[_Kind, _PositionStats] = {}
        self._own: dict[int, dict[_Kind, _PositionStats]] = {}
        """Counts of each request."""
        self._pending = PendingDrafts[_Kind]()

    def remember(self, sequence: Sequence, tokens: list[int], match_len: int, source: int = 0) -> None:
        """Remember a draft for the next tokens."""
        if tokens:
            self._pending.remember(sequence, tokens, (source, _class_of(match_len)))

    def learn(self, sequence: Sequence) -> None:
        """Count the drafts that the tokens generated since have shown to be right or wrong."""
        for start, tokens, kind, num_right, num_known in self._pending.take(sequence):
            if num_right == num_known < len(tokens):
                self._pending.remember(sequence, tokens, kind, start)
                continue
            own = self._own.setdefault(sequence.request.id, {}).setdefault(kind, _PositionStats(_OWN_MEMORY))
            shared = self._shared.setdefault(kind, _PositionStats(_SHARED_MEMORY))
            for survival in (own, shared):
                survival.add(num_right, len(tokens))

    def survivals(self, sequence: Sequence, match_len: int, max_len: int, source: int = 0) -> list[float]:
        """Survival of a draft of `max_len` tokens: P(at least 1 accepted), P(at least 2 accepted), ..., decreasing."""
        match_class = _class_of(match_len)
        kind = source, match_class
        own = self._own.get(sequence.request.id, {}).get(kind, _NOTHING_KNOWN)
        shared = self._shared.get(kind, _NOTHING_KNOWN)
        right, reached, own_right, own_reached = shared.right, shared.reached, own.right, own.reached
        num_shared, num_own, are_cut = len(reached), len(own_reached), self._are_cut
        survivals, survives, share = list[float](), 1.0, 0.0
        for i, first_guess in enumerate(_first_guesses(match_class, max_len)):
            share = max(share, first_guess) if are_cut else first_guess
            if i < num_shared:
                share = (right[i] + _PRIOR_WEIGHT * share) / (reached[i] + _PRIOR_WEIGHT)
            if i < num_own:
                share = (own_right[i] + _SHARED_WEIGHT * share) / (own_reached[i] + _SHARED_WEIGHT)
            survives *= share
            survivals.append(survives)
        return survivals

    def expected_tokens(self, sequence: Sequence, match_len: int, draft_len: int, source: int = 0) -> float:
        """Number of tokens that a step is expected to yield with a draft of `draft_len` tokens."""
        return 1 + sum(self.survivals(sequence, match_len, draft_len, source))

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)
        self._pending.forget(request_id)


class Leads:
    """Chooses, among several lookups, which ones to run: those that may find the best draft.

    All lookups run at first. The lookup whose drafts have most right tokens always runs. Each other lookup has a lead:
    the number of right tokens that its draft had more than the best other draft if it was chosen, and 0 if it was not,
    on average over the steps in which it ran. A lookup without a lead runs for one request in sixteen, so that its lead
    is still learned.
    """

    def __init__(self, num_lookups: int) -> None:
        self._leads = [_FIRST_LEAD] * num_lookups
        self._num_right = [0.0] * num_lookups
        """Mean number of right tokens in a draft, for each lookup; it decays."""
        self._pending = PendingDrafts[tuple[int, bool]]()
        """Drafts of all lookups that ran, with the lookup's number, and whether its draft was chosen."""

    def looks(self, number: int, sequence: Sequence) -> bool:
        if self._leads[number] >= _LEAST_LEAD or sequence.request.id % LOOK_INTERVAL == 0:
            return True
        return number == self._num_right.index(max(self._num_right))

    def remember(self, sequence: Sequence, chosen: int, drafts: list[tuple[int, Draft]]) -> None:
        """Remember a step's drafts and the lookup that was chosen, unless a draft was drawn from a distribution."""
        if len(drafts) > 1 and all(draft.probs is None for _, draft in drafts):
            for number, draft in drafts:
                self._pending.remember(sequence, draft.tokens, (number, number == chosen))

    def learn(self, sequence: Sequence) -> None:
        """Count how many tokens of the last drafts were right, as far as tokens have been generated since."""
        outcomes = self._pending.take(sequence)
        others = max((num_right for _, _, (_, is_chosen), num_right, _ in outcomes if not is_chosen), default=0)
        for _, _, (number, is_chosen), num_right, _ in outcomes:
            lead = num_right - others if is_chosen else 0
            self._leads[number] += (lead - self._leads[number]) * (1 - _LEAD_MEMORY)
            self._num_right[number] += (num_right - self._num_right[number]) * (1 - _LEAD_MEMORY)

    def forget(self, request_id: int) -> None:
        self._pending.forget(request_id)


@cache
def _first_guesses(match_class: int, num: int) -> list[float]:
    """Prior probabilities for the next tokens, in order: right tokens of the draft lengthen the match."""
    return [_FIRST_GUESSES[min(match_class + i, MODEL_PRIOR) if match_class else 0] for i in range(num)]


def _class_of(match_len: int) -> int:
    return _MATCH_LENS[bisect_right(_MATCH_LENS, match_len) - 1]
