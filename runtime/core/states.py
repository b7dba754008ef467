"""States of sequences: the memory of earlier tokens that layers without attention have.

Such a layer keeps its inputs for a sequence's last tokens in the sequence's slot. The input of position p is at p
modulo the slot's length. Inputs of a rejected draft are overwritten when its positions are computed again, so rolling
back changes a number and copies nothing. A step may begin at any position for which the slot still has the tokens
before.

A recurrent state is kept for the first positions of the last few chunks of `CHUNK_SIZE` tokens. Beside it the slot has
each token's contribution to it, by position too (`runtime.model.recurrences`). A step reads the state once, and writes
it where a chunk begins.

Slots of released sequences are kept, the oldest until its slot is needed, and are found again by the tokens whose state
they have. A copy is also kept of the state after tokens that two sequences begin with, such as a system prompt.
`StateManager` does the bookkeeping and never touches a tensor; `States` has the memory too.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.checkpoint.config import BuildConfig, RecurrentShape, StateShape
from runtime.core.batch import Row
from runtime.core.kv_cache import PoolCopy
from runtime.core.request import Sequence
from runtime.core.stats import StateStats
from runtime.kernels.memory import zeros

NULL_SLOT = 0
CHUNK_SIZE = 32
"""Positions in a chunk; a chunk's first position has a recurrent state."""
_MORE_KEPT, _LEAST_KEPT, _KEPT_BYTES = 8, 2, 1 << 29
"""Slots for kept states: 8 more than sequences run at once, as far as they fit half a gigabyte, and at least 2."""
_LEAST_ROLLED_BACK = 32  # a draft model rolls back by the drafts of its target


@dataclass
class _Span:
    """Positions at which a step may begin with a slot, from `first` to `end`. All tokens before `end` are computed."""

    first: int
    end: int


@dataclass(frozen=True)
class _Kept:
    """State that is kept in a slot: the tokens that it was computed from, and the first position from which another
    sequence can continue. With `is_over` False the slot's own sequence will continue.
    """

    tokens: list[int]
    first: int
    is_over: bool
    salt: str | None = None
    """Owner of the sequence (`Request.cache_salt`)."""

    def match_len(self, tokens: Seq[int], most: int) -> int:
        """Number of first tokens in common with `tokens`, at most `most`, after which a sequence can continue, or 0."""
        first, most = self.first, min(most, len(self.tokens))
        if (
            first > most
            or (first and tokens[first - 1] != self.tokens[first - 1])
            or tokens[:first] != self.tokens[:first]
        ):
            return 0
        while first < most and tokens[first] == self.tokens[first]:
            first += 1
        return first


@dataclass(frozen=True)
class FoundState:
    """A kept state of a sequence's first `num_tokens` tokens; 0 stands for no state."""

    slot: int
    num_tokens: int


class StateManager:
    """Hands out, keeps and finds slots. Slot 0, the null slot, is never handed out.

    A step may begin `num_back` positions before the last one that was computed.
    """

    def __init__(self, num_slots: int, num_back: int, *, reuse: bool) -> None:
        self.num_slots = num_slots
        self.stats = StateStats()
        self._num_back = num_back
        self._reuse = reuse
        self._free = list(range(num_slots - 1, NULL_SLOT, -1))
        self._held: dict[int, _Span] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # oldest first

    @property
    def is_full(self) -> bool:
        """True if running sequences hold all slots."""
        return not self._free and not self._kept

    def find(self, sequence: Sequence, most: int) -> FoundState | None:
        """The kept state of the most tokens, up to `most`; None if running sequences hold all slots."""
        if self.is_full:
            self.count(num_waits=1)
            return None
        best = FoundState(NULL_SLOT, 0)
        for slot, kept in reversed(self._kept.items()):
            if kept.salt != sequence.request.cache_salt:
                continue
            num_tokens = kept.match_len(sequence.tokens, most)
            if num_tokens > best.num_tokens:
                best = FoundState(slot, num_tokens)
        return best

    def admit(self, sequence: Sequence, found: FoundState) -> PoolCopy | None:
        """Give the sequence a slot, with the state that was just found. Returns the copy to make, or None. A sequence
        that was released before its end gets its own slot back; a state that others may need is copied to a free slot.
        """
        kept = self._kept.get(found.slot, _Kept([], 0, is_over=True))
        goes_on = not kept.is_over and found.num_tokens == len(kept.tokens)
        slot = found.slot if goes_on else self._allocate(found.slot)
        self._kept.pop(slot, None)
        if found.slot in self._kept:
            self._kept.move_to_end(found.slot)  # as the last one that was used
        self._held[slot] = _Span(kept.first, found.num_tokens)
        sequence.state_slot = slot
        return None if found.slot in (slot, NULL_SLOT) else PoolCopy(found.slot, slot)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back, and keep its state for sequences that begin with the same computed tokens."""
        slot, num_tokens = sequence.state_slot, sequence.num_computed
        span = self._held.pop(slot)
        sequence.state_slot = NULL_SLOT
        if not self._reuse or not num_tokens or not span.first <= num_tokens <= span.end:
            self._free.append(slot)
            return
        self._put(slot, _Kept(sequence.tokens[:num_tokens], span.first, sequence.is_over, sequence.request.cache_salt))

    def keep(self, sequence: Sequence) -> PoolCopy | None:
        """Keep the state after the sequence's computed tokens; returns the copy to make, None if it is not kept."""
        if not self._reuse or self.is_full:
            return None
        slot = self._allocate(NULL_SLOT)
        self._kept.pop(slot, None)
        first = self._held[sequence.state_slot].first
        tokens, salt = sequence.tokens[: sequence.num_computed], sequence.request.cache_salt
        self._put(slot, _Kept(tokens, first, is_over=True, salt=salt))
        return PoolCopy(sequence.state_slot, slot)

    def drop(self, slot: int) -> None:
        """Forget the content of a kept slot."""
        del self._kept[slot]
        self._free.append(slot)

    def _put(self, slot: int, kept: _Kept) -> None:
        """Keep a slot, and drop another slot kept for the same tokens and salt."""
        for other in [one for one, its in self._kept.items() if (its.tokens, its.salt) == (kept.tokens, kept.salt)]:
            self.drop(other)
        self._kept[slot] = kept

    def advance(self, slot: int, start: int, num_tokens: int) -> None:
        """Note that a step computes `num_tokens` tokens from position `start` on; states more than `num_back` positions
        before the last are overwritten.
        """
        if slot != NULL_SLOT:
            span = self._held[slot]
            span.end = start + num_tokens
            span.first = max(span.first, span.end - self._num_back) if start else max(0, span.end - self._num_back)

    def can_begin(self, sequence: Sequence) -> bool:
        """True if the sequence's next step may begin behind its computed tokens."""
        span = self._held[sequence.state_slot]
        return span.first <= sequence.num_computed <= span.end

    def first_of(self, sequence: Sequence) -> int:
        """The first position at which the sequence's step may begin."""
        return self._held[sequence.state_slot].first

    def set_span(self, sequence: Sequence, first: int, end: int) -> None:
        """Note that the sequence's slot was given the states of other positions."""
        self._held[sequence.state_slot] = _Span(first, end)

    def count(self, **counts: int) -> None:
        """Add to the statistics."""
        self.stats = self.stats.plus(**counts)

    def clear(self) -> None:
        """Forget all kept states."""
        self._free += self._kept
        self._kept.clear()

    def check_integrity(self) -> None:
        """Assert the invariants of the slots; for tests and debugging."""
        slots = [*self._free, *self._held, *self._kept]
        assert sorted(slots) == list(range(1, self.num_slots)), "a slot is lost, or in two places"
        assert all(span.first <= span.end for span in self._held.values())
        assert all(0 <= kept.first <= len(kept.tokens) for kept in self._kept.values())

    def _allocate(self, source: int) -> int:
        """A free slot, or the slot that was kept longest; `source`, the slot to copy from, is taken last."""
        if self._free:
            return self._free.pop()
        self.count(num_evictions=1)
        return next((slot for slot in self._kept if slot != source), source)


def state_pools(
    states: Seq[StateShape], num_slots: int, num_back: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The memory of states: for each layer with a convolution [num_slots, num_before + num_back, width], and after
    these, for each layer with a recurrent state, float32 [num_slots, num_heads, numbers of a head].
    """
    sizes = [(num_slots, state.num_before + num_back, state.width) for state in states if state.width]
    matrices = [(num_slots, one.num_heads, _numbers_of_head(one, num_back)) for one in _recurrent(states)]
    return [zeros(size, dtype, device) for size in sizes] + [zeros(size, torch.float32, device) for size in matrices]


def _recurrent(states: Seq[StateShape]) -> list[RecurrentShape]:
    return [state.recurrent for state in states if state.recurrent is not None]


def _numbers_of_head(shape: RecurrentShape, num_back: int) -> int:
    """Numbers that a head has in a slot. A slot has all chunks that a position and the `num_back` positions before it
    can touch: 2 for 32 positions. A chunk has its state, and a key, a value and decays for each of its tokens.
    """
    of_tokens = CHUNK_SIZE * (shape.key_dim + shape.value_dim + shape.num_decays)
    return (1 + math.ceil(num_back / CHUNK_SIZE)) * (shape.key_dim * shape.value_dim + of_tokens)


def state_inputs(rows: Seq[Row], pools: list[Tensor]) -> tuple[()] | tuple[Tensor, list[Tensor]]:
    """Further inputs of a step whose model has states: the slot of each row [rows], and the pools."""
    return (torch.tensor([row.state_slot for row in rows], device=pools[0].device), pools) if pools else ()


class States:
    """The slots of an engine: a slot for each sequence that runs at once, and further slots to keep states, as far as
    memory allows.

    States of prompts are kept after each `interval` tokens; with None no states are kept. Every copy is reported to
    `copied`, if it is given.
    """

    def __init__(
        self,
        states: Seq[StateShape],
        build: BuildConfig,
        dtype: torch.dtype,
        device: torch.device,
        interval: int | None,
        copied: Callable[[PoolCopy], None] | None = None,
    ) -> None:
        self._interval, self._copied = interval, copied
        num_slots, num_back = num_slots_of(states, build, dtype), num_rolled_back(build.max_draft_len)
        self.manager = StateManager(num_slots, num_back, reuse=interval is not None)
        self.pools = state_pools(states, num_slots, num_back, dtype, device)
        self.pools_of_ranks = list[Tensor]()
        """Pools of the other ranks of a split engine, if their memory is in this process."""

    def admit(self, sequence: Sequence, found: FoundState) -> None:
        """Give the sequence a slot, with the state that was found."""
        self._copy(self.manager.admit(sequence, found))
        is_prompt, is_miss = not sequence.num_generated, sequence.shared_len > 0
        self.manager.count(
            num_hits=is_prompt and not is_miss and found.num_tokens > 0, num_misses=is_prompt and is_miss
        )

    def next_kept(self, sequence: Sequence) -> int:
        """The next position in the uncomputed part of a prompt at which its state is kept, or 0."""
        computed = sequence.num_computed
        ends = [sequence.shared_len]
        if self._interval is not None:
            ends.append((computed // self._interval + 1) * self._interval)
        return min((end for end in ends if computed < end < len(sequence.tokens)), default=0)

    def keep(self, sequence: Sequence) -> None:
        copy = self.manager.keep(sequence)
        try:
            self._copy(copy)
        except BaseException:  # Ctrl-C between two layers
            if copy is not None:
                self.manager.drop(copy.destination)
            raise

    def _copy(self, copy: PoolCopy | None) -> None:
        if copy is not None:
            copy.make(self.pools)
            if self._copied is not None:
                self._copied(copy)

    def saved(self, sequence: Sequence) -> bytes | None:
        """The state after a sequence's computed tokens, as bytes; None if its slot has no state there."""
        if not sequence.num_computed or not self.manager.can_begin(sequence):
            return None
        first = self.manager.first_of(sequence).to_bytes(8, "little")
        rows = [pool[sequence.state_slot].cpu().view(-1).view(torch.uint8) for pool in self._all_pools]
        return first + b"".join(row.numpy().tobytes() for row in rows)

    def load(self, sequence: Sequence, num_tokens: int, saved: bytes) -> None:
        """Give a sequence the state after its first `num_tokens` tokens, from the bytes of `saved`."""
        first, at = int.from_bytes(saved[:8], "little"), 8
        self.manager.set_span(sequence, first, num_tokens)
        for pool in self._all_pools:
            size = pool[sequence.state_slot].nbytes
            numbers = torch.frombuffer(bytearray(saved[at : at + size]), dtype=pool.dtype)
            pool[sequence.state_slot] = numbers.view(pool.shape[1:]).to(pool.device)
            at += size

    @property
    def num_saved_bytes(self) -> int:
        """Bytes of one sequence's `saved` state."""
        return 8 + sum(pool[NULL_SLOT].nbytes for pool in self._all_pools)

    @property
    def _all_pools(self) -> list[Tensor]:
        return self.pools + self.pools_of_ranks

    def rewind(self, sequence: Sequence) -> None:
        """Have all tokens of a sequence computed again, if its slot has no state after its computed tokens."""
        if not self.manager.can_begin(sequence):
            sequence.num_computed = 0

    def advance(self, rows: Seq[Row]) -> None:
        for row in rows:
            self.manager.advance(row.state_slot, row.start, len(row.tokens))


def num_slots_of(states: Seq[StateShape], build: BuildConfig, dtype: torch.dtype) -> int:
    """Number of an engine's slots, the null slot included."""
    num_kept = min(build.max_batch_size + _MORE_KEPT, _KEPT_BYTES // bytes_per_slot(states, build.max_draft_len, dtype))
    return 1 + build.max_batch_size + max(num_kept, _LEAST_KEPT)


def bytes_per_slot(states: Seq[StateShape], max_draft_len: int, dtype: torch.dtype) -> int:
    """Bytes of a sequence's states."""
    num_back = num_rolled_back(max_draft_len)
    inputs = sum((state.num_before + num_back) * state.width for state in states) * dtype.itemsize
    return inputs + 4 * sum(one.num_heads * _numbers_of_head(one, num_back) for one in _recurrent(states))


def num_rolled_back(max_draft_len: int) -> int:
    """Most positions by which a step begins before the last computed position. The self-draft copy computes a draft,
    and then the target computes the same tokens: 2 x 11 positions for drafts of 10. At least 32.
    """
    return max(2 * (max_draft_len + 1), _LEAST_ROLLED_BACK)
