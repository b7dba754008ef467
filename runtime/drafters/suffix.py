"""Drafts by the longest match of any length, followed by what came after it most often (SuffixDecoding, 2411.04975).

A suffix automaton holds every pattern of a sequence and grows with it by a few operations for each token. A state is a
set of patterns that end at the same places: those of more than `lengths[link]` and at most `lengths[state]` tokens,
each the end of the next; its link is the state of the longest pattern that is shorter still. Counts are kept for
patterns of up to MAX_COUNTED tokens, which bounds the work for a token: the patterns it ends lie in as many states at
most. SuffixDecoding's trees end at 64 tokens for the same reason.
"""

from dataclasses import dataclass, field

from runtime.drafters.lookup import cut_at_end_id
from runtime.drafters.pool import NgramPool
from runtime.errors import UsageError
from runtime.request import Draft, Sequence

MAX_COUNTED = 32
_PUBLIC_MARGIN = 2
"""Tokens by which a public match must be longer than a private one to be followed."""

_ROOT = 0
_NO_TOKEN = -1


class SuffixAutomaton:
    """All patterns of a text that grows at its end (Blumer et al. 1985), and how often each follower came.

    A pattern is given by a state and its number of tokens. States are indices into these lists.
    """

    def __init__(self, max_counted: int = MAX_COUNTED) -> None:
        self.max_counted = max_counted
        self.next: list[dict[int, int]] = [{}]
        self.links: list[int] = [_ROOT]
        self.lengths: list[int] = [0]
        self.num_occurrences: list[int] = [0]
        self.best: list[int] = [_NO_TOKEN]
        """Most frequent follower of each state's patterns, of equals the latest."""
        self._last = _ROOT
        self._tail = (_ROOT, 0)

    @property
    def match_len(self) -> int:
        """Tokens of the longest pattern at the text's end that occurred before, whatever its length."""
        return self.lengths[self.links[self._last]]

    def match(self) -> tuple[int, int]:
        """(state, n): the longest counted pattern at the end that has a follower; n is 0 where there is none."""
        return self._with_follower(*self._tail)

    def append(self, token: int) -> None:
        self._extend(token)
        self._count(token)

    def step(self, state: int, n: int, token: int) -> tuple[int, int]:
        """(state, n) of the longest counted pattern that ends the given one and `token`, and has a follower."""
        while state != _ROOT and token not in self.next[state]:
            state = self.links[state]
            n = self.lengths[state]
        target = self.next[state].get(token)
        if target is None:
            return _ROOT, 0
        return self._with_follower(*self._cut(target, n + 1))

    def followers(self, state: int) -> dict[int, int]:
        """Follower -> how often it came after the state's patterns."""
        return {token: self.num_occurrences[target] for token, target in self.next[state].items()}

    def _with_follower(self, state: int, n: int) -> tuple[int, int]:
        """Only what occurs nowhere but at the end has none, and what is shorter may have one."""
        while state != _ROOT and not self.next[state]:
            state = self.links[state]
            n = self.lengths[state]
        return state, n

    def _cut(self, state: int, n: int) -> tuple[int, int]:
        """The last tokens of a pattern: no more than have counted followers. Finds its place again if it was split."""
        n = min(n, self.max_counted - 1)
        while self.lengths[self.links[state]] >= n and state != _ROOT:
            state = self.links[state]
        return state, n

    def _extend(self, token: int) -> None:
        """Give the patterns that end with `token` their states."""
        next_, links, lengths = self.next, self.links, self.lengths
        new = self._add_state(lengths[self._last] + 1)
        state = self._last
        self._last = new
        while token not in next_[state]:
            next_[state][token] = new
            if state == _ROOT:
                return
            state = links[state]
        target = next_[state][token]
        if lengths[target] != lengths[state] + 1:
            target = self._split(target, state, token)
        links[new] = target

    def _add_state(self, length: int) -> int:
        self.next.append({})
        self.links.append(_ROOT)
        self.lengths.append(length)
        self.num_occurrences.append(0)
        self.best.append(_NO_TOKEN)
        return len(self.links) - 1

    def _split(self, target: int, state: int, token: int) -> int:
        """A state for those patterns of `target` that occur at the end too: they are those after `state`'s."""
        clone = self._add_state(self.lengths[state] + 1)
        self.next[clone] = self.next[target].copy()
        self.links[clone] = self.links[target]
        self.links[target] = clone
        self.num_occurrences[clone] = self.num_occurrences[target]
        self.best[clone] = self.best[target]
        while self.next[state].get(token) == target:
            self.next[state][token] = clone
            if state == _ROOT:
                break
            state = self.links[state]
        return clone

    def _count(self, token: int) -> None:
        """One more occurrence of `token` after each pattern that the text ended with before it."""
        next_, links, num_occurrences, best = self.next, self.links, self.num_occurrences, self.best
        state, n = self._cut(*self._tail)
        self._tail = self._cut(next_[state][token], n + 1)
        counted = _ROOT
        while True:
            target = next_[state][token]
            if target != counted:  # several patterns may have one state in common when `token` is after them
                num_occurrences[target] += 1
                counted = target
            if best[state] == _NO_TOKEN or num_occurrences[target] >= num_occurrences[next_[state][best[state]]]:
                best[state] = token
            if state == _ROOT:
                return
            state = links[state]


@dataclass
class History:
    """One request's automaton, and how much of the request's tokens it has."""

    sequence: Sequence
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_indexed: int = 0

    def index(self, sequence: Sequence) -> None:
        self.sequence = sequence
        append = self.automaton.append
        for token in sequence.tokens[self.num_indexed :]:
            append(token)
        self.num_indexed = len(sequence.tokens)


class SuffixLookup:
    """Follows, token by token, the most frequent follower of the longest match (of equals the latest).

    Matches are looked for in the sequence itself, the draft so far included. With a `pool` its longest pattern
    is followed where it is more than two tokens longer than the sequence's own match, or that has none.

    `growth` makes drafts longer with the match they start from: at most `growth` tokens for each token of it. None
    drafts as much as is allowed, which yields the most tokens per step and the most rejected ones.
    """

    def __init__(self, *, growth: float | None = None, pool: NgramPool | None = None) -> None:
        if growth is not None and not growth > 0:
            raise UsageError(f"growth is not above 0: {growth}", hint="tokens of a draft for each one of its match")
        self.growth = growth
        self.pool = pool
        self._histories: dict[int, History] = {}

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._look_up(sequence, max_draft_len) for sequence in sequences]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        """What may follow these tokens after a sequence that was looked at before. Nothing is learned of them."""
        if (history := self._histories.get(sequence.request.id)) is None:
            return Draft([])
        state, n = history.automaton.match()
        for token in [*sequence.tokens[history.num_indexed :], *drafted]:
            state, n = history.automaton.step(state, n, token)
        return self._follow(history, (state, n), n, drafted, max_draft_len)

    def forget(self, request_id: int) -> None:
        history = self._histories.pop(request_id, None)
        if history is not None and self.pool is not None:
            self.pool.add(history.sequence)

    def _look_up(self, sequence: Sequence, max_draft_len: int) -> Draft:
        history = self._histories.setdefault(sequence.request.id, History(sequence))
        history.index(sequence)
        automaton = history.automaton
        draft_len = min(max_draft_len, sequence.max_draft_len)
        return self._follow(history, automaton.match(), automaton.match_len, [], draft_len)

    def _follow(
        self, history: History, match: tuple[int, int], match_len: int, drafted: list[int], draft_len: int
    ) -> Draft:
        """What comes after the match, which is a state and a number of tokens, and `drafted`."""
        automaton, draft, (state, n) = history.automaton, list[int](), match
        size = self.pool.max_matching_ngram_size if self.pool else 0
        tail = [*history.sequence.tokens[-size:], *drafted][-size:] if size else []
        while len(draft) < draft_len:
            token = automaton.best[state] if n else _NO_TOKEN
            public = self._find_public(tail, n)
            if public is not None:
                token = public[1]
            if token == _NO_TOKEN:
                break
            if not draft:
                match_len = max(match_len, public[0] if public else 0)
                draft_len = self._draft_len(match_len, draft_len)
            draft.append(token)
            state, n = automaton.step(state, n, token)
            if size:
                tail = [*tail, token][-size:]
        match_len = match_len if draft else 0
        return Draft(cut_at_end_id(draft, history.sequence.request.end_ids), match_len=match_len)

    def _find_public(self, tail: list[int], num_private: int) -> tuple[int, int] | None:
        if self.pool is None:
            return None
        return self.pool.find(tail, num_private + 1 + _PUBLIC_MARGIN if num_private else 1)

    def _draft_len(self, match_len: int, draft_len: int) -> int:
        return draft_len if self.growth is None else min(draft_len, max(int(self.growth * match_len), 1))
