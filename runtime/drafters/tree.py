"""Draft trees: several continuations at once, the most probable first, for `runtime.tuning.replay` to judge.

A target would verify a tree in one step, and keep the longest path that is right. Nodes are added in the order of their
estimated probability (SuffixDecoding, arXiv 2411.04975; REST, arXiv 2311.08252), so that the tree is
the best of its size if the estimates are right.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.drafters.automaton import History
from runtime.drafters.pool import NgramPool
from runtime.request import Sequence

ROOT = -1
_NEGLIGIBLE = 0.02
"""What is left for shorter patterns, below which they are not looked at."""


@dataclass
class Tree:
    """Node i is `tokens[i]` after the path that ends at node `parents[i]`, which is less than i; ROOT is no node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)

    def add(self, parent: int, token: int) -> int:
        """The new node. The same token is never added twice after one node."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self._children[parent, token] = node
        return node

    def child(self, node: int, token: int) -> int | None:
        return self._children.get((node, token))

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        path = list[int]()
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


@dataclass(frozen=True)
class _Place:
    """Where a path has got to: the pattern matched in the sequence itself, and the last tokens for the pool."""

    state: int
    n: int
    tail: list[int]


class TreeDrafter:
    """Expands the most probable path again and again, whichever it is, until there are enough nodes.

    A pattern with T occurrences gives a follower that came c times the probability c / (T + 1), and leaves 1 / (T + 1)
    to the next shorter pattern: the longest comes first, the sequence's own before the pool's of the same length.
    """

    def __init__(self, *, pool: NgramPool | None = None) -> None:
        self.pool = pool
        self._histories: dict[int, History] = {}

    def propose_tree(self, sequence: Sequence, num_nodes: int) -> Tree:
        """A tree of at most `num_nodes` nodes, none of them deeper than what the budget leaves."""
        history = self._histories.setdefault(sequence.request.id, History(sequence))
        history.index(sequence)
        max_depth, tree = min(num_nodes, sequence.max_draft_len), Tree()
        size = self.pool.max_matching_ngram_size if self.pool else 0
        place = _Place(*history.automaton.match(), sequence.tokens[-size:] if size else [])
        # (minus probability, number in which it came, parent, its place, token, depth)
        frontier: list[tuple[float, int, int, _Place, int, int]] = []
        node, probability, depth, num_seen = ROOT, 1.0, 0, 0
        while True:
            if depth < max_depth:
                for token, p in self._likely(history, place, num_nodes - len(tree.tokens)):
                    num_seen += 1
                    heapq.heappush(frontier, (-probability * p, num_seen, node, place, token, depth + 1))
            if not frontier or len(tree.tokens) >= num_nodes:
                return tree
            minus_probability, _, parent, place, token, depth = heapq.heappop(frontier)
            node, probability = tree.add(parent, token), -minus_probability
            if token in sequence.request.end_ids:
                depth = max_depth  # nothing comes after it
            place = self._step(history, place, token)

    def forget(self, request_id: int) -> None:
        history = self._histories.pop(request_id, None)
        if history is not None and self.pool is not None:
            self.pool.add(history.sequence)

    def _step(self, history: History, place: _Place, token: int) -> _Place:
        state, n = history.automaton.step(place.state, place.n, token)
        size = self.pool.max_matching_ngram_size if self.pool else 0
        return _Place(state, n, [*place.tail, token][-size:] if size else [])

    def _likely(self, history: History, place: _Place, num_wanted: int) -> list[tuple[int, float]]:
        """The most probable next tokens with their estimates."""
        probabilities: dict[int, float] = {}
        left = 1.0
        for counts in self._counts(history, place):
            share = left / (sum(counts.values()) + 1)
            for token, count in counts.items():
                probabilities[token] = probabilities.get(token, 0.0) + share * count
            left = share
            if left < _NEGLIGIBLE:
                break
        return heapq.nlargest(num_wanted, probabilities.items(), key=lambda item: item[1])

    def _counts(self, history: History, place: _Place) -> Iterator[dict[int, int]]:
        """How often each follower came after the matches, the longest match first."""
        automaton, state, n = history.automaton, place.state, place.n
        public_n = len(place.tail)
        while n or public_n:
            if n >= public_n:
                yield automaton.followers(state)
                state = automaton.links[state]
                n = automaton.lengths[state]
            else:
                counts = self.pool.counts(tuple(place.tail[-public_n:])) if self.pool else {}
                if counts:
                    yield counts
                public_n -= 1
