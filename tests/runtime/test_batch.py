"""Packing: worked examples, and slots against the definition block_id x block_size + offset."""

from pathlib import Path

import pytest
import torch
from tiny import repetitive_prompt

from runtime.batch import Batch, Row, at_least_two, context_row, generation_row, pack
from runtime.engine import Engine
from runtime.request import Request, Sequence

CPU = torch.device("cpu")


def as_lists(batch: Batch) -> list[list[object]]:
    return [tensor.tolist() for tensor in batch.tensors()]


def test_example_of_the_docstring() -> None:
    """Tokens at positions 5, 6 with blocks [7, 2] of 4, beside three tokens at the start of block 9."""
    rows = [Row([11, 12], 5, [7, 2], 1), Row([21, 22, 23], 0, [9], 2)]
    assert as_lists(pack(rows, 4, CPU)) == [
        [[11, 12, 0], [21, 22, 23]],
        [[5, 6, 0], [0, 1, 2]],
        [[9, 10, 0], [36, 37, 38]],
        [[7, 2], [9, 0]],
        [1, 4, 5],
    ]


def test_blocks_after_a_chunk_are_not_looked_at() -> None:
    batch = pack([Row([1, 2], 2, [5, 6, 7, 8], 1)], 4, CPU)
    assert batch.block_tables.tolist() == [[5]]


def test_rows_of_a_sequence() -> None:
    sequence = Sequence(Request(0, (1,), 9), [1, 2, 3, 4, 5, 6], num_computed=2, block_table=[3, 4])
    assert generation_row(sequence, [7, 8]) == Row([3, 4, 5, 6, 7, 8], 2, [3, 4], num_logits=3)
    assert generation_row(sequence, []) == Row([3, 4, 5, 6], 2, [3, 4], num_logits=1)
    assert context_row(sequence, 3) == Row([3, 4, 5], 2, [3, 4], num_logits=1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_slots_follow_their_definition(block_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            start, length = torch.randint(0, 20, (2,), generator=generator).tolist()
            blocks = (torch.randperm(60, generator=generator)[:50] + 1).tolist()
            rows.append(Row(list(range(length + 1)), start, blocks, 1))
        batch = pack(rows, block_size, CPU)
        for b, row in enumerate(rows):
            for i in range(batch.input_ids.shape[1]):
                position = row.start + i
                is_real = i < len(row.tokens)
                slot = row.block_table[position // block_size] * block_size + position % block_size if is_real else 0
                assert batch.slot_mapping[b, i] == slot
                assert batch.positions[b, i] == (position if is_real else 0)
        Q = batch.input_ids.shape[1]
        assert batch.logit_indices.tolist() == [b * Q + len(row.tokens) - 1 for b, row in enumerate(rows)]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_padding_sizes_to_two_leaves_the_logits(num_rows: int, num_tokens: int, llama_uncompiled_dir: Path) -> None:
    engines = [Engine.open(llama_uncompiled_dir) for _ in range(2)]
    rows = [
        Row(repetitive_prompt(i, num_tokens), 0, list(range(1 + 5 * i, 6 + 5 * i)), num_tokens - i % num_tokens)
        for i in range(num_rows)
    ]
    batch = pack(rows, 4, CPU)
    padded = at_least_two(batch)
    assert min(*padded.input_ids.shape, padded.block_tables.shape[1], len(padded.logit_indices)) >= 2
    outputs = []
    for engine, inputs in zip(engines, (batch, padded), strict=True):
        with torch.inference_mode():
            outputs.append(engine._step(*inputs.tensors(), engine._pool.keys, engine._pool.values))
    torch.testing.assert_close(outputs[1][: len(outputs[0])], outputs[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(engines[1]._pool.keys, engines[0]._pool.keys, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-5)  # but for the null block
