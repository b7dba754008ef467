"""All index arithmetic of a step: from sequences and drafts to the tensors that the compiled step takes."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.core.kv_cache import NULL_BLOCK
from runtime.core.request import Sequence

_ROW_CONTEXT, _CONTEXT_STEP = 4096, 256
"""Context length at which the K/V that a row reads cost as much as one more token in the row; and the step to which
context lengths are rounded down, so that few widths are computed.
"""


@dataclass(frozen=True)
class Row:
    """A sequence's part of a step: tokens to compute, the position of the first, and the number of logits to return."""

    tokens: list[int]
    start: int
    block_table: list[int]
    num_logits: int  # of the last tokens
    state_slot: int = 0


class Batch(NamedTuple):
    """Inputs of the compiled step, in their order, and nothing else. B rows, padded to the longest: Q tokens, N blocks.

    Several rows may be of one sequence, because all K/V are written before any is read; layers with states take rows in
    their order.

    Example, block_size 4: a row of tokens at positions 5, 6 with blocks [7, 2] in a batch with Q = 3:
    positions [5, 6, 0], slot_mapping [9, 10, 0] (block 2, offsets 1 and 2; padding goes to the null block).
    """

    input_ids: Tensor  # (B, Q) int64
    positions: Tensor  # (B, Q) int64
    slot_mapping: Tensor  # (B, Q) int64
    block_tables: Tensor  # (B, N) int64
    logit_indices: Tensor  # (T,) int64 into the flattened (B, Q)


def generation_row(sequence: Sequence, draft_tokens: Seq[int]) -> Row:
    """A row with the tokens of a sequence that are not computed yet, followed by the draft. The step returns logits for
    the last of these tokens and for each token of the draft.
    """
    tokens = [*sequence.tokens[sequence.num_computed :], *draft_tokens]
    return Row(tokens, sequence.num_computed, sequence.block_table, len(draft_tokens) + 1, sequence.state_slot)


def context_row(sequence: Sequence, num_tokens: int) -> Row:
    """A row with the next `num_tokens` of a long uncomputed tail. It asks for the logits of the last of these tokens,
    since a step returns the logits of at least one token.
    """
    start = sequence.num_computed
    return Row(sequence.tokens[start : start + num_tokens], start, sequence.block_table, 1, sequence.state_slot)


def pack(rows: Seq[Row], block_size: int, device: torch.device) -> Batch:
    """The batch of these rows, made from lists: a step has few tokens, and operations on small tensors are slower."""
    Q = max(len(row.tokens) for row in rows)
    N = max(-(-(row.start + len(row.tokens)) // block_size) for row in rows)
    input_ids: list[list[int]] = []
    positions: list[list[int]] = []
    slots: list[list[int]] = []
    block_tables: list[list[int]] = []
    logit_indices: list[int] = []
    for b, row in enumerate(rows):
        num_tokens, table = len(row.tokens), row.block_table[:N]
        padding = [0] * (Q - num_tokens)
        own = range(row.start, row.start + num_tokens)
        input_ids.append(row.tokens + padding)
        positions.append([*own, *padding])
        own_slots = [table[position // block_size] * block_size + position % block_size for position in own]
        slots.append(own_slots + [NULL_BLOCK * block_size] * len(padding))
        block_tables.append(table + [NULL_BLOCK] * (N - len(table)))
        end = b * Q + num_tokens
        logit_indices += range(end - row.num_logits, end)
    fields = (input_ids, positions, slots, block_tables, logit_indices)
    return Batch(*(torch.from_numpy(np.array(values, dtype=np.int64)).to(device) for values in fields))


def split_long_rows(rows: Seq[Row]) -> Seq[Row]:
    """The rows, split if that leaves less padding: rows of 11, 1 and 1 tokens become 13 rows of one token."""
    lengths = tuple(sorted(len(row.tokens) for row in rows))
    context_len = max(row.start for row in rows)
    width = folded_width(lengths, context_len // _CONTEXT_STEP * _CONTEXT_STEP)
    if all(len(row.tokens) <= width for row in rows):
        return rows
    return [piece for row in rows for piece in _pieces(row, width)]


@lru_cache(maxsize=4096)
def folded_width(lengths: tuple[int, ...], context_len: int) -> int:
    """Tokens of the longest row after folding rows of these lengths. Rows of equal length stay as they are."""
    longest = max(lengths)
    if longest == min(lengths):
        return longest

    def cost(width: int) -> float:
        num_rows = sum(-(-length // width) for length in lengths)
        return num_rows * (width + context_len / _ROW_CONTEXT)

    return min(range(longest, 0, -1), key=cost)


def _pieces(row: Row, width: int) -> Iterator[Row]:
    num_tokens = len(row.tokens)
    for i in range(0, num_tokens, width):
        tokens = row.tokens[i : i + width]
        num_after = num_tokens - i - len(tokens)
        num_logits = min(max(row.num_logits - num_after, 0), len(tokens))
        yield Row(tokens, row.start + i, row.block_table, num_logits, row.state_slot)


def pad_to_min_2(batch: Batch) -> Batch:
    """The same step with B, Q, N and T of at least 2, for a compiler that treats sizes of 1 specially. Padding goes to
    the null block; logits beyond the first T belong to padding. With Q = 1 the token at i moves to 2 i.
    """
    (B, Q), N, T = batch.input_ids.shape, batch.block_tables.shape[1], len(batch.logit_indices)

    def padded(tensor: Tensor, num_columns: int) -> Tensor:
        return F.pad(tensor, (0, num_columns - tensor.shape[1], 0, max(B, 2) - B))

    logit_indices = batch.logit_indices // Q * max(Q, 2) + batch.logit_indices % Q
    return Batch(
        padded(batch.input_ids, max(Q, 2)),
        padded(batch.positions, max(Q, 2)),
        padded(batch.slot_mapping, max(Q, 2)),
        padded(batch.block_tables, max(N, 2)),
        F.pad(logit_indices, (0, max(T, 2) - T)),
    )
