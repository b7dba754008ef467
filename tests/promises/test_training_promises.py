"""Promises of the training of heads, wherever it is interrupted.

- a training that goes on from its state ends as one that was never interrupted: steps, weights and momentum
- the file of hidden states has whole texts alone, wherever it was cut off
- texts of an epoch come once each, in batches that depend on their arguments alone
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import make_eagle, save_eagle
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_model

from runtime.drafters.heads.head_config import read_head
from runtime.drafters.heads.head_model import load_head
from runtime.training.traced_states import StatesFile, record_type
from runtime.training.unrolled import Rows, Schedule, Trainer, batches, have_unrolled_attention

STATES, NUM_STEPS = (1, 2, 3), 4


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_model("llama", num_hidden_layers=4)
    directory = save_eagle(make_eagle(model, states=STATES), tmp_path_factory.mktemp("head"), "speculators")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (2, 9), generator=generator)
    states = torch.randn(2, 9, 3 * 32, generator=generator)
    ids, probs = torch.stack([tokens, (tokens + 7) % 32], -1), torch.tensor([0.75, 0.25]).expand(2, 9, 2)
    is_output = torch.arange(9).expand(2, 9) >= 4

    def make() -> Trainer:
        opened: Any = load_head(read_head(directory), model.get_input_embeddings().weight.detach(), torch.float32)
        of_step = [Rows(tokens, states * (1 + step), ids, probs, is_output) for step in range(NUM_STEPS)]
        return Trainer(have_unrolled_attention(opened), Schedule(NUM_STEPS, 1e-2, 2, 0), of_step.__getitem__)

    return make


@pytest.mark.parametrize("num_before", range(1, NUM_STEPS))
def test_training_that_goes_on_ends_as_one_that_was_never_interrupted(num_before: int, make_trainer: Any) -> None:
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    while not whole.is_done:
        whole.train_step()
    for _ in range(num_before):
        first.train_step()
    second.load_state(copy.deepcopy(first.state()))
    num_steps = 0
    while not second.is_done:
        second.train_step()
        num_steps += 1
    assert (num_steps, second.step) == (NUM_STEPS - num_before, NUM_STEPS)
    for one, other in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(one, other)


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), share=st.floats(0, 1, allow_subnormal=False))
def test_file_has_whole_texts_wherever_it_was_cut_off(
    lengths: list[int], share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("states") / "states.bin"
    token_bytes = record_type(4).itemsize
    size = int(share * sum(lengths) * token_bytes)
    path.write_bytes(b"\0" * size)
    whole = [end for end in range(len(lengths) + 1) if sum(lengths[:end]) * token_bytes <= size]
    file = StatesFile(Path(path), lengths, 4)
    assert file.num_texts == max(whole)
    assert path.stat().st_size == sum(lengths[: max(whole)]) * token_bytes


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=20), most=st.integers(1, 200), epoch=st.integers(0, 3))
def test_texts_of_an_epoch_come_once_each(lengths: list[int], most: int, epoch: int) -> None:
    found = batches(lengths, most, 7, epoch)
    assert found == batches(lengths, most, 7, epoch)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= most for batch in found)
