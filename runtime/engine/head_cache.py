"""Memory of a trained drafter (a head), by the slots of its target's K/V cache.

The slot of token j has the hidden state of token j, as soon as the target has computed it. It also has the keys and
values that the head makes from the pair (token j, hidden state of token j - 1). Neither depends on tokens behind token
j, so both are found again, copied and freed together with the target's own keys and values. The head may be behind the
target, after drafts by lookup or in a prompt that another request has computed; it then computes the keys and values
that it lacks.

The first token of a sequence has no pair, and no query of the head sees it. A head that drafts blocks takes no pairs:
its keys and values of token j are made from that token's own hidden state, the first token's too.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoint.config import LayerShape
from runtime.core.kv_cache import KVPool, PoolCopy, bytes_per_block
from runtime.kernels.memory import zeros


class ReadsStates(Protocol):
    """The part of a head that an engine calls."""

    @property
    def state_size(self) -> int: ...

    @property
    def kv_layers(self) -> Seq[LayerShape]: ...

    @property
    def first_token(self) -> int:
        """The first token of a sequence for which the head has keys and values: 1 if it takes pairs."""
        ...

    def reduce(self, states: Tensor) -> Tensor:
        """The first numbers of the tokens' states, from the hidden states [tokens, width] that the target's step
        returns: [tokens, state_size], or fewer numbers if the head's own outputs follow them.
        """
        ...


def bytes_of_head(head: ReadsStates, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of memory that the head needs for one block of tokens."""
    return bytes_per_block(head.kv_layers, block_size, dtype) + block_size * head.state_size * dtype.itemsize


class HeadCache:
    """The memory of a head; `num_blocks` and `block_size` are the engine's."""

    def __init__(
        self, head: ReadsStates, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._reduce, self.block_size, self._first = head.reduce, block_size, head.first_token
        self.states = zeros((num_blocks, block_size, head.state_size), dtype, device)
        self.pool = KVPool(head.kv_layers, num_blocks, block_size, dtype, device)
        self._has_state = np.zeros((num_blocks, block_size), dtype=bool)
        self._has_kv = np.zeros((num_blocks, block_size), dtype=bool)

    def keep(self, slots: Tensor, states: Tensor) -> None:
        """Keep hidden states [tokens, width] of the tokens in `slots` [tokens]."""
        reduced = self._reduce(states).to(self.states.dtype)
        self.states.flatten(0, 1)[slots, : reduced.shape[-1]] = reduced
        self._has_state.reshape(-1)[slots.cpu().numpy()] = True

    def flags(self) -> list[Tensor]:
        """Flags [num_blocks, block_size] of slots with a hidden state, and of slots with keys and values."""
        return [torch.from_numpy(self._has_state), torch.from_numpy(self._has_kv)]

    def copy_block(self, copy: PoolCopy) -> None:
        self.pool.copy_block(copy)
        copy.make((self.states, self._has_state, self._has_kv))

    def forget(self, block_table: Seq[int], start: int) -> None:
        """Clear the flags of a sequence's slots from position `start` on, which have another sequence's numbers."""
        first, offset = divmod(start, self.block_size)
        for has in (self._has_state, self._has_kv):
            has[block_table[first : first + 1], offset:] = False
            has[block_table[first + 1 :]] = False

    def num_known(self, block_table: Seq[int], num_tokens: int) -> int | None:
        """Number of first tokens of a sequence whose keys and values the head has, among the `num_tokens` that the
        target has computed. It is at least 1 if the head takes pairs, since the first token needs none, and
        `num_tokens` if the head has no keys and values. None if the other tokens lack a hidden state.
        """
        own = list(block_table[: -(-num_tokens // self.block_size)])
        has_kv, has_state = (has[own].reshape(-1)[:num_tokens] for has in (self._has_kv, self._has_state))
        first = self._first
        lacks = np.flatnonzero(~has_kv[first:])
        start = int(lacks[0]) + first if len(lacks) and self.pool.keys else num_tokens
        return start if has_state[start - first :].all() else None

    def mark_known(self, block_table: Seq[int], start: int, end: int) -> None:
        """Mark the keys and values of the sequence's tokens `start` to `end` - 1 as computed by the head."""
        self._has_kv.reshape(-1)[self.slots(block_table, start, end)] = True

    def keep_own(self, block_table: Seq[int], start: int, outputs: Tensor, width: int) -> None:
        """Keep the head's own outputs [tokens, state_size] for the sequence's tokens from `start` on, beside their
        hidden states: the numbers after the first `width`.
        """
        slots = torch.tensor(self.slots(block_table, start, start + len(outputs)), device=self.states.device)
        self.states.flatten(0, 1)[slots, width:] = outputs[:, width:]

    def states_for(self, block_table: Seq[int], start: int, end: int) -> Tensor:
        """Hidden states [end - start, state_size] of the tokens before tokens `start` to `end` - 1, or, if the head
        takes no pairs, of these tokens themselves.
        """
        first = self._first
        slots = torch.tensor(self.slots(block_table, start - first, end - first), device=self.states.device)
        return self.states.flatten(0, 1)[slots]

    def slots(self, block_table: Seq[int], start: int, end: int) -> list[int]:
        size = self.block_size
        return [block_table[i // size] * size + i % size for i in range(start, end)]
