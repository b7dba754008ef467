"""How much of a draft to send: as many tokens as pay for themselves, none where none does.

A step with a longer draft takes longer, by what the engine's cost model says, and yields more, by how often such drafts
were right so far. A token is worth sending while the tokens it promises cost less time than they do on average:
with R tokens per second so far, the length is chosen that makes (expected tokens - R x seconds) largest
(Dinkelbach 1967, of ratios; expected tokens by the survival of each position, not by one rate for all).

What a draft would have yielded is seen from what was generated, sent or not, because drafts never change that. So
lookups learn from every proposal, and being off costs little but looking. A draft model is asked for no more than is
sent, and while it does not pay only now and then.

Tokens that were drawn from a distribution are all sent: how many there are may depend on what they are, and to leave
some out for that would change what is generated. Who has drawn once is asked like a draft model from then on, for a
length that was chosen before anything is drawn.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.drafters.protocol import Drafter, check_request
from runtime.request import Draft, Request, Sequence

IterationSeconds = Callable[[int, int, float], float]
"""(batch size, context length, mean draft length) -> seconds; `CostModel.iteration_s`."""
DraftSeconds = Callable[[int, int], float]
"""(batch size, context length) -> seconds for one more token of every draft."""

_MATCH_LENS = (0, 1, 2, 3, 4, 6, 9, 16)
"""Drafts are told apart by how long their match was: this far, or longer."""
_OWN_MEMORY, _SHARED_MEMORY = 0.9, 0.995
"""What remains of a count when another draft is counted."""
_SHARED_WEIGHT, _PRIOR_WEIGHT = 4.0, 2.0
"""How many drafts of the request itself count as much as all others', and of others as much as the first guess."""
_PROBE_INTERVAL = 16
"""Steps without a draft of a draft model, before it is asked for a token to see whether it pays again."""
_REST_AFTER, _LOOK_INTERVAL = 16, 4
"""Steps without a draft after which a lookup looks at every fourth only: looking takes time too."""
_RATE_MEMORY = 0.98
_CONTEXT_STEP = 64
"""Contexts are rounded, so that the cost model need not be asked anew at every step."""


@dataclass
class _Survival:
    """How many drafts reached each position, and how many of them were right there; both fade."""

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


_NOTHING_KNOWN = _Survival(memory=0.0)


@dataclass
class _History:
    """What is known of one request: counts by match length, and drafts whose outcome is not known yet."""

    survivals: dict[int, _Survival] = field(default_factory=dict)
    pending: list[tuple[int, Draft]] = field(default_factory=list)
    """Position of a draft's first token, and the draft."""


class AdaptiveDrafter:
    """Another drafter's drafts, cut to the length that pays. With `draft_s` it is asked for no more than that."""

    def __init__(self, drafter: Drafter, iteration_s: IterationSeconds, draft_s: DraftSeconds | None = None) -> None:
        self.drafter = drafter
        self._iteration_s = iteration_s
        self._draft_s = draft_s
        self._is_asked_for_what_pays = draft_s is not None
        self._shared: dict[int, _Survival] = {}
        self._histories: dict[int, _History] = {}
        self._num_tokens = self._seconds = 0.0
        self._num_off = 0
        """Steps in a row for which nothing was sent of what was drafted."""
        self._known_seconds: dict[tuple[int, int], list[float]] = {}

    def check_request(self, request: Request) -> None:
        check_request(self.drafter, request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        for sequence in sequences:
            self._learn(sequence)
        if self._is_asked_for_what_pays:
            return self._propose_what_pays(sequences, max_draft_len)
        if self._num_off >= _REST_AFTER and self._num_off % _LOOK_INTERVAL:
            self._num_off += 1
            return [Draft([])] * len(sequences)
        drafts = self.drafter.propose(sequences, max_draft_len)
        self._remember(sequences, drafts)
        if any(draft.probs is not None for draft in drafts):
            self._is_asked_for_what_pays = True
            return drafts
        draft_len = self._best_len(sequences, [(draft.match_len, len(draft.tokens)) for draft in drafts])
        if any(draft.tokens for draft in drafts):  # or there was nothing to send, which says nothing about what pays
            self._num_off = 0 if draft_len else self._num_off + 1
        return [draft.cut(draft_len) for draft in drafts]

    def _propose_what_pays(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        """Drafts that cost something are not asked for to be thrown away."""
        draft_len = self._best_len(sequences, [(0, max_draft_len)] * len(sequences))
        self._num_off = 0 if draft_len else self._num_off + 1
        if draft_len == 0 and self._num_off % _PROBE_INTERVAL:
            return [Draft([])] * len(sequences)
        drafts = self.drafter.propose(sequences, max(draft_len, 1))
        self._remember(sequences, drafts)
        return drafts

    def forget(self, request_id: int) -> None:
        self._histories.pop(request_id, None)
        self.drafter.forget(request_id)

    def _remember(self, sequences: list[Sequence], drafts: list[Draft]) -> None:
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft.tokens:
                self._histories[sequence.request.id].pending.append((len(sequence.tokens), draft))

    def _learn(self, sequence: Sequence) -> None:
        """Count the drafts that by now are known to be right, or where they went wrong."""
        history = self._histories.setdefault(sequence.request.id, _History())
        still_pending = []
        for start, draft in history.pending:
            known = sequence.tokens[start : start + len(draft.tokens)]
            num_right = _num_common(draft.tokens, known)
            if num_right == len(known) < len(draft.tokens):
                still_pending.append((start, draft))
                continue
            # What is not known before drafting cannot be chosen by.
            match_len = 0 if self._is_asked_for_what_pays else _class_of(draft.match_len)
            own = history.survivals.setdefault(match_len, _Survival(_OWN_MEMORY))
            shared = self._shared.setdefault(match_len, _Survival(_SHARED_MEMORY))
            for survival in (own, shared):
                survival.add(num_right, len(draft.tokens))
        history.pending = still_pending

    def _expected_tokens(self, sequence: Sequence, match_len: int, max_len: int) -> list[float]:
        """Tokens that a step yields with a draft of 0, 1, ... max_len tokens: 1 + sum of P(at least i accepted)."""
        match_len = _class_of(match_len)
        own = self._histories[sequence.request.id].survivals.get(match_len, _NOTHING_KNOWN)
        shared = self._shared.get(match_len, _NOTHING_KNOWN)
        first_guess = _PRIOR_WEIGHT * (match_len + 1) / (match_len + 3)
        expected, survives, total = [1.0], 1.0, 1.0
        for i in range(max_len):
            share = first_guess / _PRIOR_WEIGHT
            if i < len(shared.reached):
                share = (shared.right[i] + first_guess) / (shared.reached[i] + _PRIOR_WEIGHT)
            if i < len(own.reached):
                share = (own.right[i] + _SHARED_WEIGHT * share) / (own.reached[i] + _SHARED_WEIGHT)
            survives *= share
            total += survives
            expected.append(total)
        return expected

    def _best_len(self, sequences: list[Sequence], drafts: list[tuple[int, int]]) -> int:
        """The length to cut all drafts of a step to; `drafts`: match, draft length."""
        if not sequences:
            return 0
        longest = max(draft_len for _, draft_len in drafts)
        rows = [self._expected_tokens(s, *draft) for s, draft in zip(sequences, drafts, strict=True)]
        if len(rows) == 1:
            tokens, num_drafted = rows[0], list(range(longest + 1))
        else:
            tokens = [sum(row[min(n, len(row) - 1)] for row in rows) for n in range(longest + 1)]
            num_drafted = [sum(min(n, draft_len) for _, draft_len in drafts) for n in range(longest + 1)]
        known = self._seconds_by_num_drafted(sequences, num_drafted[-1])
        seconds = [known[n] for n in num_drafted]
        rate = self._num_tokens / self._seconds if self._seconds else tokens[0] / seconds[0]
        gains = [token - rate * second for token, second in zip(tokens, seconds, strict=True)]
        best = gains.index(max(gains))
        self._num_tokens = self._num_tokens * _RATE_MEMORY + tokens[best]
        self._seconds = self._seconds * _RATE_MEMORY + seconds[best]
        return best

    def _seconds_by_num_drafted(self, sequences: list[Sequence], most: int) -> list[float]:
        """Seconds of a step with 0, 1, ... draft tokens in all its rows together, at least as far as `most`."""
        batch_size = len(sequences)
        context_len = max(len(sequence.tokens) for sequence in sequences) // _CONTEXT_STEP * _CONTEXT_STEP
        seconds = self._known_seconds.setdefault((batch_size, context_len), [])
        drafting = self._draft_s(batch_size, context_len) if self._draft_s else 0.0
        for n in range(len(seconds), most + 1):
            draft_len = n / batch_size
            seconds.append(self._iteration_s(batch_size, context_len, draft_len) + draft_len * drafting)
        return seconds


def _class_of(match_len: int) -> int:
    return _MATCH_LENS[bisect_right(_MATCH_LENS, match_len) - 1]


def _num_common(left: list[int], right: list[int]) -> int:
    num_common = min(len(left), len(right))
    if left[:num_common] == right[:num_common]:
        return num_common
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
