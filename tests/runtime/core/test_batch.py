"""Packing, against its definition: slots are block_id x block_size + offset."""

from collections.abc import Sequence as Seq
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import repetitive_prompt

from runtime.core.batch import (
    Row,
    context_row,
    folded_width,
    generation_row,
    pack,
    pad_to_min_2,
    split_long_rows,
)
from runtime.core.request import Request, Sequence
from runtime.engine.engine import Engine

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8), st.integers(0, 8000), st.randoms(use_true_random=False))
def test_folded_rows_have_every_token_once_and_never_more_padding(
    lengths: list[int], context_len: int, random: Random
) -> None:
    rows = []
    for length in lengths:
        start, tokens_of_row = random.randint(0, context_len), [random.randrange(99) for _ in range(length)]
        rows.append(Row(tokens_of_row, start, [start], random.randint(1, length), random.randrange(3)))
    folded = split_long_rows(rows)

    def tokens(of: Seq[Row]) -> list[tuple[object, ...]]:
        return [
            (token, row.start + i, row.block_table, row.state_slot, i >= len(row.tokens) - row.num_logits)
            for row in of
            for i, token in enumerate(row.tokens)
        ]

    assert tokens(folded) == tokens(rows)
    widths = [max(len(row.tokens) for row in of) for of in (folded, rows)]
    assert widths[0] * len(folded) <= widths[1] * len(rows)
    assert len(set(lengths)) > 1 or folded == rows


def test_folding_pays_less_after_a_long_context() -> None:
    """Each row reads its sequence's K/V once more."""
    lengths = (1, 1, 2, 11)
    assert folded_width(lengths, 0) == 1 < folded_width(lengths, 8192) < folded_width(lengths, 1 << 20) == 11


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_slots_follow_their_definition(block_size: int) -> None:
    """And blocks behind the last token are not looked at."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            start, length = torch.randint(0, 20, (2,), generator=generator).tolist()
            num_held = -(-(start + length + 1) // block_size) + int(torch.randint(3, (), generator=generator))
            blocks = (torch.randperm(60, generator=generator)[:num_held] + 1).tolist()
            rows.append(Row(list(range(start + 70, start + 71 + length)), start, blocks, 1 + length // 2))
        rows = list(split_long_rows(rows))
        batch = pack(rows, block_size, CPU)
        num_blocks = max(-(-(row.start + len(row.tokens)) // block_size) for row in rows)
        for b, row in enumerate(rows):
            for i in range(batch.input_ids.shape[1]):
                position = row.start + i
                is_real = i < len(row.tokens)
                slot = row.block_table[position // block_size] * block_size + position % block_size if is_real else 0
                assert batch.slot_mapping[b, i] == slot
                assert batch.positions[b, i] == (position if is_real else 0)
                assert batch.input_ids[b, i] == (position + 70 if is_real else 0)
            assert batch.block_tables[b].tolist() == [*row.block_table, *[0] * num_blocks][:num_blocks]
        Q = batch.input_ids.shape[1]
        ends = [
            b * Q + i for b, row in enumerate(rows) for i in range(len(row.tokens) - row.num_logits, len(row.tokens))
        ]
        assert batch.logit_indices.tolist() == ends


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_padding_sizes_to_two_leaves_the_logits(num_rows: int, num_tokens: int, llama_engine_dir: Path) -> None:
    engines = [Engine.open(llama_engine_dir) for _ in range(2)]
    rows = [
        Row(repetitive_prompt(i, num_tokens), 0, list(range(1 + 5 * i, 6 + 5 * i)), num_tokens - i % num_tokens)
        for i in range(num_rows)
    ]
    batch = pack(rows, 4, CPU)
    padded = pad_to_min_2(batch)
    assert min(*padded.input_ids.shape, padded.block_tables.shape[1], len(padded.logit_indices)) >= 2
    outputs = []
    for engine, inputs in zip(engines, (batch, padded), strict=True):
        with torch.inference_mode():
            outputs.append(engine._step(*inputs, engine._pool.keys, engine._pool.values))
    torch.testing.assert_close(outputs[1][: len(outputs[0])], outputs[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(engines[1]._pool.keys, engines[0]._pool.keys, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-5)  # but for the null block


@given(
    num_tokens=st.integers(1, 20),
    num_computed=st.integers(0, 19),
    draft=st.lists(st.integers(0, 9)),
    slot=st.integers(0, 9),
)
def test_rows_of_a_sequence_have_all_that_is_its_own(
    num_tokens: int, num_computed: int, draft: list[int], slot: int
) -> None:
    """Promises of rows, whatever is cut: each token once, at its position, with its sequence's blocks and slot."""
    num_computed = min(num_computed, num_tokens - 1)
    sequence = Sequence(Request(0, (1,), 9), list(range(num_tokens)), num_computed, [5, 3, 8], state_slot=slot)
    whole = generation_row(sequence, draft)
    assert [*sequence.tokens[:num_computed], *whole.tokens] == [*sequence.tokens, *draft]
    assert whole.num_logits == len(draft) + 1
    for part in (1, num_tokens - num_computed):
        row = context_row(sequence, part)
        assert row.tokens == sequence.tokens[num_computed : num_computed + part] and row.num_logits == 1
        for one in (row, whole):
            assert (one.start, one.block_table, one.state_slot) == (num_computed, [5, 3, 8], slot)
