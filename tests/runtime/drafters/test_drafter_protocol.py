"""Anybody may write a drafter: what it may not return is an error that names what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import Said
from tiny import hf_greedy
from torch import Tensor
from transformers import PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.protocol import check_drafts
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.util.errors import SpecDecError

VOCAB_SIZE = 6
GOOD = Draft([1, 5])


def distribution(*shape: int) -> Tensor:
    return torch.full(shape, 1 / VOCAB_SIZE, dtype=torch.float64)


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param([GOOD, Draft([])], id="lookups"),
        pytest.param(
            [Draft([0, 5, 3, 0], distribution(4, VOCAB_SIZE)), GOOD], id="with probabilities, as long as can be"
        ),
        pytest.param([Draft([], distribution(0, VOCAB_SIZE)), GOOD], id="probabilities of nothing"),
    ],
)
def test_drafts_the_target_can_take_pass(drafts: list[Draft]) -> None:
    check_drafts(drafts, 2, 4, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        pytest.param(None, "`Draft`", id="nothing"),
        pytest.param((GOOD, GOOD), "`Draft`", id="a tuple"),
        pytest.param([GOOD, [1, 5]], "`Draft`", id="tokens without a draft around them"),
        pytest.param([GOOD, None], "`Draft`", id="None for no proposal"),
        pytest.param([GOOD], "1; 2", id="too few"),
        pytest.param([GOOD] * 3, "3; 2", id="too many"),
        pytest.param([GOOD, Draft([1] * 5)], "4; 5", id="too long"),
        pytest.param([GOOD, Draft([1, 6])], "6", id="token beyond the vocabulary"),
        pytest.param([Draft([-1]), GOOD], "6; -1", id="token below zero"),
        pytest.param([GOOD, Draft([1.0])], "6; 1.0", id="float"),
        pytest.param([GOOD, Draft(["1"])], "6; '1'", id="string"),
        pytest.param([GOOD, Draft([torch.tensor(1)])], "6; tensor(1)", id="tensor for a token"),
        pytest.param([GOOD, Draft([1], [[1.0]])], "(1, 6); list", id="probabilities in a list"),
        pytest.param([GOOD, Draft([1], distribution(6))], "(1, 6); (6,)", id="no row"),
        pytest.param([GOOD, Draft([1], distribution(2, 6))], "(1, 6); (2, 6)", id="a row too many"),
        pytest.param([GOOD, Draft([1], distribution(1, 7))], "(1, 6); (1, 7)", id="a column too many"),
        pytest.param([GOOD, Draft([], distribution(1, 6))], "(0, 6); (1, 6)", id="rows, no tokens"),
    ],
)
def test_what_the_target_cannot_take_is_an_error(drafts: Any, message: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        check_drafts(drafts, 2, 4, VOCAB_SIZE)
    said(error, *message.split("; "))
    assert error.value.message.startswith("the drafter") and error.value.hint


class Constant:
    """Returns what it is given, right or wrong."""

    def __init__(self, *drafts: Any) -> None:
        self.drafts = list(drafts)
        self.forgotten: list[int] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> Any:
        return self.drafts

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


def one_hot(token: int, size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[token : token + 1]


@pytest.mark.parametrize(
    ("make_draft", "message"),
    [
        pytest.param(lambda size: [5], "`Draft`", id="no draft"),
        pytest.param(lambda size: Draft([5], one_hot(6, size)), "5; 0.0", id="zero"),
        pytest.param(lambda size: Draft([5], one_hot(5, size) * torch.nan), "", id="no number"),
    ],
)
def test_wrong_drafter_ends_the_loop_and_leaves_the_engine_usable(
    make_draft: Any, message: str, llama_engine_dir: Path, llama: PreTrainedModel, said: Said
) -> None:
    engine, prompt = Engine.open(llama_engine_dir), [5, 6, 7]
    request = Request(4, tuple(prompt), 8, sampling=SamplingConfig(top_k=0))
    drafter = Constant(make_draft(engine.config.vocab_size))
    with pytest.raises(SpecDecError) as error:
        list(generate(engine, [request], drafter, 3))
    said(error, *message.split("; "))
    assert error.value.message.startswith("the drafter") and error.value.hint
    assert drafter.forgotten == [4]
    engine._blocks.check_integrity()
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    output = [
        token for _, new_tokens in generate(engine, [Request(5, tuple(prompt), 8)], None, 0) for token in new_tokens
    ]
    assert output == hf_greedy(llama, prompt, 8)


def test_draft_longer_than_the_budget_is_cut(llama_engine_dir: Path, llama: PreTrainedModel) -> None:
    """A drafter is told the longest draft and not what every request has left; the loop knows."""
    right = hf_greedy(llama, [5, 6, 7], 4)
    for max_new_tokens in (1, 2, 3):
        request = Request(0, (5, 6, 7), max_new_tokens)
        ((sequence, new_tokens),) = generate(Engine.open(llama_engine_dir), [request], Constant(Draft(right)), 4)
        assert new_tokens == right[:max_new_tokens]
        assert sequence.stats.per_step_drafted == sequence.stats.per_step_accepted == [max_new_tokens - 1]


@pytest.mark.parametrize(
    "row",
    [[1.0] * 6, [torch.inf] * 6, [torch.nan] * 6, [1.5, -0.5, 0.0, 0.0, 0.0, 0.0], [0.1] * 6],
    ids=["ones", "infinite", "no numbers", "negative", "too little"],
)
def test_probabilities_that_are_no_distribution_are_an_error(row: list[float], said: Said) -> None:
    check_drafts([Draft([0], torch.full((1, 6), 1 / 6))], 1, 5, 6)
    with pytest.raises(SpecDecError) as raised:
        check_drafts([Draft([0], torch.tensor([row]))], 1, 5, 6)
    said(raised)
