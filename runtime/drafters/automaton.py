"""A suffix automaton holds every pattern of a sequence and grows with it by a few operations for each token.

A state is a set of patterns that end at the same places: those of more than `lengths[link]` and at most
`lengths[state]` tokens, each the end of the next; its link is the state of the longest pattern that is shorter still.
Counts are kept for patterns of up to MAX_COUNTED tokens, which bounds the work for a token: the patterns it ends lie in
as many states at most. SuffixDecoding's trees end at 64 tokens for the same reason.
"""

from dataclasses import dataclass, field

from runtime.request import Sequence

MAX_COUNTED = 32

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

    def _with_follower(self, state: int, n: int) -> tuple[int, int]:
        """Longest suffix with a follower: a text that occurs only at the end has none, and a shorter one may have."""
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
