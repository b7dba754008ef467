"""Pools of earlier outputs by owner and scope. A lookup drafts from a pool whose match is longer than the match in the
sequence's own text.

A pool has the last outputs that share a scope: an owner, a system prompt, a JSON schema, or a tool that was called. It
is a text with a character for each token. Outputs stand one behind the other, each after the last tokens of its prompt,
so that the beginning of an answer is found too.

An owner's pools are reached by the owner's name alone (`Request.cache_salt`), so tokens of another owner are never
drafted, whatever the scopes are. The number and size of pools are limited; the least recently used are removed first.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Seq
from typing import Protocol

from runtime.core.request import Draft, Sequence
from runtime.core.scopes import OWNER, Scope, ScopeKind
from runtime.drafters.lookup import Text, as_characters, cut_at_end_id, most_frequent
from runtime.drafters.protocol import CompositeDrafter, Drafter, ask, look_ahead

MOST_TOKENS = 1 << 21
"""Most tokens of all pools together, 8 MB."""
MOST_OWNERS, MOST_POOLS_OF_OWNER = 4096, 128
_MOST_TOKENS_OF: dict[ScopeKind, int] = {"tool": 1 << 14, "schema": 1 << 14, "system": 1 << 14, "owner": 1 << 15}
"""Most tokens of a pool. A search reads all of it, which takes 30 microseconds for the largest pool."""
_LONGEST_MATCH = 31
"""Limit on a match, and number of the prompt's last tokens that stand before an output."""
_END = chr(0x10FFFF)
"""Character behind each output, which stands for no token."""


class OutputStore(Protocol):
    """Interface of a store that keeps outputs over a restart: an engine with K/V on disk."""

    def keep_output(self, salt: str | None, scopes: Seq[Scope], tokens: list[int]) -> None:
        """Keep an output of an owner, with the last tokens of its prompt. It is written later, in another thread."""

    def kept_outputs(self, salt: str | None) -> list[tuple[list[Scope], list[int]]]:
        """The owner's last outputs, the oldest first."""


class Pool:
    """The last outputs of one scope, at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._text = Text()
        self._lengths: deque[int] = deque()
        """Number of characters of each output, with its end."""

    @property
    def num_tokens(self) -> int:
        return len(self._text.characters) - len(self._lengths)

    def add(self, characters: str) -> None:
        """Add an output, or its end if it is longer than the pool. The oldest outputs make room."""
        added, text = characters[-self.max_tokens :] + _END, self._text.characters
        num_dropped, num_kept = 0, self.num_tokens + len(added) - 1
        while num_kept > self.max_tokens:
            length = self._lengths.popleft()
            num_dropped, num_kept = num_dropped + length, num_kept - length + 1
        self._text.characters = text[num_dropped:] + added
        self._lengths.append(len(added))

    def find(self, tail: str, more_than: int) -> tuple[int, list[int]]:
        """(n, ends): length of the longest suffix of `tail`, of more than `more_than` tokens, that occurs here, and the
        ends of its occurrences with a token behind them, last first. (0, []) if there is no such suffix, or if it
        occurs only where outputs end.
        """
        n, last = self._text.find_longest(tail, _LONGEST_MATCH, more_than)
        if not last:
            return 0, []
        characters = self._text.characters
        ends = [end for end in self._text.ends_before(tail[-n:], last) if characters[end] != _END]
        return (n, ends) if ends else (0, [])

    def continuation(self, ends: list[int], draft_len: int) -> list[int]:
        """The most frequent token at these places, then the most frequent token after it, up to an output's end."""
        characters, draft = self._text.characters, list[int]()
        while ends and len(draft) < draft_len:
            best = most_frequent([ord(characters[end]) for end in ends])
            if best == ord(_END):
                break
            draft.append(best)
            ends = [end + 1 for end in ends if ord(characters[end]) == best]
        return draft


class OwnerPools:
    """The pools of all owners. An owner's outputs in the `store` are read when the owner asks first."""

    def __init__(self, store: OutputStore | None = None, max_tokens: int = MOST_TOKENS) -> None:
        self._store, self.max_tokens = store, max_tokens
        self._owners: OrderedDict[str | None, OrderedDict[tuple[str, str], Pool]] = OrderedDict()
        """Each owner's pools, by the kind and digest of their scope; the last used owner is the last."""
        self._running: dict[int, Sequence] = {}
        self.num_pools: Counter[ScopeKind] = Counter()
        self.num_tokens: Counter[ScopeKind] = Counter()

    def clear(self) -> None:
        """Forget all outputs in memory."""
        self._owners.clear()
        self.num_pools.clear()
        self.num_tokens.clear()

    def see(self, sequences: Seq[Sequence]) -> None:
        """Remember these sequences; their outputs are added when they have ended."""
        self._running.update((sequence.request.id, sequence) for sequence in sequences)

    def learn(self, request_id: int) -> None:
        """Add the output of a remembered sequence, once."""
        sequence = self._running.pop(request_id, None)
        if sequence is None or not sequence.num_generated:
            return
        request = sequence.request
        tokens = sequence.tokens[max(len(request.prompt_tokens) - _LONGEST_MATCH, 0) :]
        scopes = [*_scopes_of(sequence), OWNER]
        self._add(request.cache_salt, scopes, tokens)
        if self._store is not None:
            self._store.keep_output(request.cache_salt, scopes, tokens)

    def draft(self, sequence: Sequence, drafted: list[int], more_than: int, draft_len: int) -> Draft:
        """The continuation of the longest match of more than `more_than` tokens in the request's pools. The match is of
        the sequence's last tokens, followed by the tokens `drafted`. Of equally long matches, the most specific pool's
        is taken.
        """
        request = sequence.request
        pools = self._pools_of(request.cache_salt)
        if not pools or draft_len <= 0:
            return Draft([])
        tail = as_characters([*sequence.tokens[-_LONGEST_MATCH:], *drafted][-_LONGEST_MATCH:])
        best, ends, match_len = None, list[int](), more_than
        for scope in (*request.scopes, OWNER):
            pool = pools.get((scope.kind, scope.digest))
            if pool is None or match_len == len(tail):
                continue
            n, found = pool.find(tail, match_len)
            if found:
                best, ends, match_len = pool, found, n
                pools.move_to_end((scope.kind, scope.digest))
        if best is None:
            return Draft([])
        tokens = cut_at_end_id(best.continuation(ends, draft_len), request.end_ids)
        return Draft(tokens, match_len=match_len)

    def _pools_of(self, owner: str | None) -> OrderedDict[tuple[str, str], Pool]:
        """The owner's pools, which are read from the store at first use."""
        pools = self._owners.get(owner)
        if pools is None:
            if len(self._owners) >= MOST_OWNERS:
                self._remove_first_owner()
            pools = self._owners[owner] = OrderedDict()
            for scopes, tokens in self._store.kept_outputs(owner) if self._store is not None else ():
                self._add(owner, scopes, tokens)
        self._owners.move_to_end(owner)
        return pools

    def _add(self, owner: str | None, scopes: Seq[Scope], tokens: list[int]) -> None:
        pools, characters = self._pools_of(owner), as_characters(tokens)
        for scope in reversed(scopes):
            key = scope.kind, scope.digest
            if key not in pools:
                pools[key] = Pool(_MOST_TOKENS_OF[scope.kind])
                self.num_pools[scope.kind] += 1
            pools.move_to_end(key)
            before = pools[key].num_tokens
            pools[key].add(characters)
            self.num_tokens[scope.kind] += pools[key].num_tokens - before
        while len(pools) > MOST_POOLS_OF_OWNER:
            self._remove_first(pools)
        while self.num_tokens.total() > self.max_tokens:
            if len(self._owners) > 1:
                self._remove_first_owner()
            else:
                self._remove_first(pools)

    def _remove_first_owner(self) -> None:
        """Remove the pools of the owner that was least recently used."""
        _, pools = self._owners.popitem(last=False)
        while pools:
            self._remove_first(pools)

    def _remove_first(self, pools: OrderedDict[tuple[str, str], Pool]) -> None:
        """Remove the least recently used pool."""
        (kind, _), pool = pools.popitem(last=False)
        self.num_pools[kind] -= 1  # type: ignore[index]
        self.num_tokens[kind] -= pool.num_tokens  # type: ignore[index]


def _scopes_of(sequence: Sequence) -> list[Scope]:
    """Scopes that an output belongs to. A tool is among them if its name is in the output's text."""
    scopes = sequence.request.scopes
    if all(scope.kind != "tool" for scope in scopes) or sequence.request.decode is None:
        return [scope for scope in scopes if scope.kind != "tool"]
    text = sequence.request.decode(sequence.output_tokens)
    return [scope for scope in scopes if scope.kind != "tool" or scope.name in text]


class PooledLookup(CompositeDrafter):
    """A lookup's drafts; if a pool has a longer match than the lookup, the pool's draft."""

    def __init__(self, lookup: Drafter, pools: OwnerPools) -> None:
        super().__init__([lookup])
        self.pools = pools

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.pools.see(sequences)
        drafts = ask(self.members[0], sequences, max_draft_len)
        return [
            self._longer(sequence, [], draft, min(max_draft_len, sequence.max_draft_len))
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        draft = look_ahead(self.members[0], sequence, drafted, max_draft_len)
        return self._longer(sequence, drafted, draft, max_draft_len)

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self.pools.learn(request_id)

    def _longer(self, sequence: Sequence, drafted: list[int], draft: Draft, draft_len: int) -> Draft:
        if draft.probs is not None:
            return draft
        found = self.pools.draft(sequence, drafted, draft.match_len if draft.tokens else 0, draft_len)
        return found if found.tokens else draft
