"""Verification by tokens: accepted while the draft is the target's choice. By probabilities: without statistics.

That rejection sampling follows the target's distribution is in test_rejection.py.
"""

from typing import Any

import pytest
import torch
from sentences import Said
from torch import Tensor

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken
from runtime.core.verify import verify

PROMPT = (1, 2, 3)
NUM_SEEDS = 200


def start(*generated: int, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Sequence:
    """A sequence that asks for the whole vocabulary, unless told otherwise."""
    params = SamplingConfig(**({"top_k": 0} | sampling))
    return Sequence(Request(0, prompt, 20, sampling=params), [*prompt, *generated])


def log(*rows: list[float]) -> Tensor:
    """Logits whose softmax is these distributions."""
    return torch.tensor(rows, dtype=torch.float64).log().float()


def distribution(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, id="cut"),
        pytest.param({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "frequency_penalty": 0.3}, id="penalties"),
        pytest.param({"top_k": 1, "repetition_penalty": 1.5, "presence_penalty": 1.0}, id="greedy with penalties"),
    ],
)
def test_by_tokens_a_draft_changes_nothing_but_the_number_of_steps(sampling: dict[str, Any]) -> None:
    """Choices of plain steps, one token each, are followed as far as the draft does, at every length of the draft."""
    generator = torch.Generator().manual_seed(0)
    num_accepted = set()
    for seed in range(30):
        logits = 2 * torch.randn(6, 8, generator=generator)
        plain: list[int] = []
        for row in logits:
            plain.append(verify(start(*plain, random_seed=seed, **sampling), Draft([]), row[None]).next_token)
        for num_right in range(6):
            wrong = (plain[num_right] + 1) % 8
            draft = [*plain[:num_right], wrong, *plain[num_right + 1 : 5]][:5]
            verdict = verify(start(random_seed=seed, **sampling), Draft(draft), logits)
            assert verdict == VerifyResult(num_right, plain[num_right])
            num_accepted.add(verdict.num_accepted)
    assert num_accepted == set(range(6))


def test_greedy_request_takes_no_notice_of_probabilities() -> None:
    """Its distribution is one-hot, though the drafter calls another token certain, or the argmax impossible."""
    logits = log([0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8])
    for greedy in ({"top_k": 1}, {"temperature": 0.0}):
        for probs in (distribution([0, 1, 0], [0, 1, 0]), distribution([0, 0, 1], [1 / 3] * 3)):
            assert verify(start(**greedy), Draft([1, 1], probs), logits) == VerifyResult(1, 0)
            assert verify(start(**greedy), Draft([1, 0], probs), logits) == VerifyResult(2, 2)


def verdicts(draft: Draft, logits: Tensor, **sampling: Any) -> list[VerifyResult]:
    return [verify(start(random_seed=seed, **sampling), draft, logits) for seed in range(NUM_SEEDS)]


def test_equal_distributions_accept_everything_whatever_the_rounding() -> None:
    """The draft model is the target: logits in float32 on both sides, their distributions made one by one."""
    logits = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(logits[:4].double() / 0.7, dim=-1)
    draft = Draft([int(row.argmin()) for row in probs], probs)
    assert {v.num_accepted for v in verdicts(draft, logits, temperature=0.7)} == {4}


def test_where_rounding_leaves_no_residual_the_targets_distribution_is_drawn_from() -> None:
    """Rounding errors are rare; a draft of twice the target's weights is rejected half the time, with no residual."""
    probs = [0.5, 0.3, 0.2]
    outcome = verdicts(Draft([0], 2 * distribution(probs)), log(probs, [0.0, 0.0, 1.0]))
    assert {v.next_token for v in outcome if v.num_accepted == 0} == {0, 1, 2}
    assert {v.next_token for v in outcome if v.num_accepted == 1} == {2}


@pytest.mark.parametrize("probs", [None, distribution([0.5, 0.5])], ids=["by tokens", "by probabilities"])
@pytest.mark.parametrize(
    ("sampling", "bad_row"),
    [
        pytest.param({"no_repeat_ngram_size": 2}, [0.5, 0.5], id="all banned"),
        pytest.param({}, [torch.nan, 0.5], id="NaN"),
        pytest.param({}, [0.5, torch.inf], id="infinite"),
        pytest.param({}, [0, 0], id="nothing but -inf"),
        pytest.param({"top_k": 1}, [0.5, torch.inf], id="greedy infinite"),
    ],
)
def test_position_with_no_token_left_is_an_error(
    sampling: dict[str, Any], bad_row: list[float], probs: Tensor | None, said: Said
) -> None:
    """After 0 0 1 0 both 0 and 1 would repeat a pair; after a 1 only 0 would, so a step could go on from there."""
    for token in (0, 1):
        for seed in range(20):
            sequence = start(prompt=(0, 0, 1, 0), random_seed=seed, **sampling)
            with pytest.raises(NoValidToken) as error:
                verify(sequence, Draft([token], probs), log(bad_row, [0.5, 0.5]))
            said(error, "4")


@pytest.mark.parametrize("probs", [None, distribution([0, 1, 0], [0, 0, 1])], ids=["by tokens", "by probabilities"])
def test_where_no_token_is_left_the_last_accepted_is_the_targets_own(probs: Tensor | None) -> None:
    """A verdict has a token of the target's: of the accepted 1 2 it is the 2, which comes once."""
    logits = log([0, 1, 0], [0, 0, 1], [torch.nan, 0.5, 0.5])
    assert verify(start(), Draft([1, 2], probs), logits) == VerifyResult(1, 2)
