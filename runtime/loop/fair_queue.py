"""A fair queue: clients share an engine by tokens, and the requests of one client go by priority and arrival.

The counters are those of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a client's counter
grows by every token that is computed for it, of a prompt or generated, and the client with the lowest counter comes
first. A client that comes, or comes back, begins at the lowest counter of the present clients: absence earns nothing.
In addition to the paper, a running sequence makes room for a waiting one (`FairQueue.leaving`), so that the first token
of a client does not wait for the last one of another client.

With 4 places and 64 requests of client A, a request of B gets a place in the next step, and A keeps 3. If B sends 64
too, places change hands until both counters grow equally.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.core.request import Sequence

_PATIENCE = 64
"""Tokens by which a client must be ahead of another before it makes room for a request that has run before."""
_SOON = 256
"""Tokens within which a sequence must end to keep its place, although a client that already runs another sequence waits
for it. Sequences that began together thus end together, and their places are not idle at different times at the end.
"""
_FORESEEN = 1024
"""Tokens of a running sequence that count before they are computed, if clients that run one wait for a place."""
_MAX_REMEMBERED = 4096
"""Number of clients without requests whose counters are kept."""


@dataclass
class _Ticket:
    """A sequence's place in the order. `num_charged` is the number of its tokens that its client's counter includes."""

    client: Hashable
    priority: int
    arrival: int
    num_charged: int = 0
    has_run: bool = False


class FairQueue:
    """Waiting sequences, and the order of all waiting and running sequences.

    Sequences of the same client and priority are ordered by arrival.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Sequence]] = {}
        """Each client's waiting sequences, in order; none is empty."""
        self._tickets: dict[int, _Ticket] = {}
        self._used: dict[Hashable, int] = {}
        """Each client's counter."""
        self._num_arrived = 0
        self._present: Counter[Hashable] = Counter()
        """Number of each client's waiting and running sequences."""
        self._num_until_change = 0.0
        """Tokens that may be charged before a running sequence could have to make room; 0 if that is not known."""

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences."""
        return (sequence for queue in self._queues.values() for sequence in queue)

    def __len__(self) -> int:
        """Number of waiting sequences."""
        return sum(map(len, self._queues.values()))

    @property
    def are_due(self) -> bool:
        """False if no waiting sequence can get the place of a running one now."""
        return self._num_until_change <= 0

    def settle(self, running: Seq[Sequence]) -> None:
        """Compute for how many further tokens `are_due` stays False. It is True at once when a sequence comes, starts
        running or ends.

        Asking for every client's turn in every step would take 80 us of a small model's 2 ms.
        """
        missing = [self._first_leaving(sequence, running)[1] for sequence in self.candidates(running)]
        self._num_until_change = min(missing, default=math.inf)

    def add(self, sequence: Sequence, client: Hashable = None, priority: int = 0) -> None:
        """Let a new sequence wait. A lower priority comes first."""
        if not self._present:
            self._used.clear()
        least = min((self._used[one] for one in self._present), default=0)
        self._present[client] += 1
        if self._present[client] == 1:
            self._used[client] = max(self._used.get(client, 0), least)
            self._forget_clients(least)
        self._tickets[sequence.request.id] = _Ticket(client, priority, self._num_arrived)
        self._num_arrived += 1
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Let a sequence that was running wait."""
        self._num_until_change = 0
        insort(self._queues.setdefault(self._ticket(sequence).client, []), sequence, key=self._rank)

    def run(self, sequence: Sequence) -> None:
        """Let a waiting sequence run. Tokens whose K/V were found at its first admission are free."""
        ticket = self._ticket(sequence)
        self._take(sequence)
        if not ticket.has_run:
            ticket.has_run, ticket.num_charged = True, sequence.num_computed

    def remove(self, sequence: Sequence) -> None:
        """Forget a running sequence that has ended, or a sequence that was dropped."""
        self._take(sequence)
        ticket = self._tickets.pop(sequence.request.id)
        self._present[ticket.client] -= 1
        if not self._present[ticket.client]:
            del self._present[ticket.client]

    def _take(self, sequence: Sequence) -> None:
        """Take a sequence out of its client's queue, if it is there."""
        self._num_until_change = 0
        client = self._ticket(sequence).client
        queue = self._queues.get(client, [])
        place = bisect_left(queue, self._rank(sequence), key=self._rank)
        if queue[place : place + 1] and queue[place] is sequence:
            del queue[place]
            if not queue:
                del self._queues[client]

    def charge(self, running: Iterable[Sequence]) -> None:
        """Add the tokens that a step has computed to the clients' counters. No token is counted twice."""
        for sequence in running:
            ticket = self._ticket(sequence)
            num_new = sequence.num_computed - ticket.num_charged
            if num_new > 0:
                self._used[ticket.client] += num_new
                self._num_until_change -= num_new
                ticket.num_charged = sequence.num_computed

    def in_order(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """The sequences, beginning with those of the client with the lowest counter."""
        if len(self._present) == 1:
            return sorted(sequences, key=self._rank)
        num_of = self._count(sequences)

        def place(sequence: Sequence) -> tuple[int, int, int, int]:
            client = self._ticket(sequence).client
            return self._used[client], num_of[client], *self._rank(sequence)

        return sorted(sequences, key=place)

    def candidates(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Each client's first waiting sequence, in the order in which they should start: first the sequences of clients
        that run none, then those of the clients that have used the fewest tokens.

        Tokens that running sequences are about to get count as used: of eight free places, a client that is 100 tokens
        behind does not get all.
        """
        foreseen = self._foreseen(running)

        def place(client: Hashable) -> tuple[bool, int, tuple[int, int]]:
            return client in foreseen, self._used[client] + foreseen[client], self._rank(self._queues[client][0])

        return [self._queues[client][0] for client in sorted(self._queues, key=place)]

    def leaving(self, sequence: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """The running sequence that makes room for a waiting one; None if that must wait.

        1. A sequence of the same client whose priority is worse. 2. For a client that runs no sequence: the last
        sequence of a client that runs several. 3. The last sequence of the client with the highest counter, if that
        counter is far enough ahead.

        A client keeps its only place, and a place that is free soon, unless the waiting client has none. The counter
        need not be ahead at all for a request that runs for the first time, if its client runs nothing else. Otherwise
        it must be ahead by as many tokens as may have to be computed again, if the waiting sequence has lost its K/V.
        """
        last, num_missing = self._first_leaving(sequence, running)
        return last if num_missing <= 0 else None

    def _first_leaving(self, sequence: Sequence, running: Seq[Sequence]) -> tuple[Sequence | None, float]:
        """The first running sequence that will make room, and how many tokens its client must use until then."""
        own, last = self._ticket(sequence), self._last_of_each(running)
        mine = last.pop(own.client, None)
        if mine is not None and self._ticket(mine).priority > own.priority:
            return mine, 0
        num_of = self._count(running)
        asked = [client for client in last if num_of[client] > 1]
        patience: float = _PATIENCE if sequence.block_table else max(_PATIENCE, len(sequence.tokens))
        if mine is not None:
            asked = [client for client in asked if _num_left(last[client]) > _SOON]
        elif asked:
            patience = -math.inf
        else:
            asked, patience = list(last), patience if own.has_run else 0
        if not asked:
            return None, math.inf
        client = max(asked, key=lambda one: self._used[one])
        num_missing = self._used[own.client] + patience - self._used[client]
        if mine is not None:  # with one place more it must not be ahead itself
            foreseen = self._foreseen([*running, sequence])
            ahead = self._used[own.client] + foreseen[own.client] - self._used[client] - foreseen[client]
            num_missing = max(num_missing, ahead)
        return last[client], num_missing

    def _foreseen(self, sequences: Iterable[Sequence]) -> Counter[Hashable]:
        """Number of tokens that each client's running sequences are about to get."""
        foreseen: Counter[Hashable] = Counter()
        for sequence in sequences:
            foreseen[self._ticket(sequence).client] += min(_num_left(sequence), _FORESEEN)
        return foreseen

    def _last_of_each(self, sequences: Seq[Sequence]) -> dict[Hashable, Sequence]:
        """The last of each client's sequences."""
        return {self._ticket(sequence).client: sequence for sequence in sorted(sequences, key=self._rank)}

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Order among the sequences of one client."""
        ticket = self._ticket(sequence)
        return ticket.priority, ticket.arrival

    def _ticket(self, sequence: Sequence) -> _Ticket:
        return self._tickets[sequence.request.id]

    def _count(self, sequences: Iterable[Sequence]) -> Counter[Hashable]:
        return Counter(self._ticket(sequence).client for sequence in sequences)

    def _forget_clients(self, least: int) -> None:
        """Forget the low counters of clients that have left, until few are kept; a return would raise most of these."""
        if len(self._used) > _MAX_REMEMBERED + len(self._present):
            absent = sorted((one for one in self._used if one not in self._present), key=lambda one: self._used[one])
            high = [one for one in absent if self._used[one] > least]
            for client in {*absent} - {*high[-_MAX_REMEMBERED // 2 :]}:
                del self._used[client]


def _num_left(sequence: Sequence) -> int:
    """Number of tokens that a running sequence may still have computed."""
    return len(sequence.tokens) + sequence.num_remaining - sequence.num_computed
