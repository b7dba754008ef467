"""Generated tokens follow the target's distribution, whatever the drafts follow: statistics of many seeds.

The distributions are computed here by brute force, and draft tokens are really drawn from what the draft claims. The
seeds are fixed, so a test passes or fails for good; a p-value says how far the code is from failing by chance.
"""

import functools
import itertools
import math
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from strength import draws
from torch import Tensor

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.verify import verify
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.draft_state import DraftState

SMALLEST_P_VALUE = 1e-3
VOCAB_SIZE = 6
POSITIONS = ("first", "second", "bonus")
TARGET_LOGITS = torch.tensor(
    [[1.6, 0.9, 0.3, 0.1, -0.6, -1.2], [-0.9, 1.3, 1.1, -0.2, 0.6, -1.5], [0.2, -0.8, -0.1, 1.4, 0.9, 0.6]]
)
DRAFT_LOGITS = torch.tensor([[0.7, 1.5, -0.4, 0.6, -0.9, 0.0], [0.1, 0.5, 1.7, -1.0, 0.9, -0.6]])
LOOKUP = [0, 4]  # what the target likes most, and less
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.85},
    "all": {"temperature": 1.4, "top_k": 5, "top_p": 0.9},
}


def brute_force_distribution(
    logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0
) -> list[float]:
    """The `top_k` most likely tokens, and of those the fewest that have `top_p` together."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits)}
    kept = sorted(weights, key=lambda token: -weights[token])[: top_k or None]
    if top_p:
        total = sum(weights[token] for token in kept)
        sums = list(itertools.accumulate(weights[token] / total for token in kept))
        kept = kept[: 1 + sum(s < top_p for s in sums)]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in weights]


def distributions(logits: Tensor, sampling: dict[str, Any]) -> Tensor:
    """(n, vocab) float64 distributions of (n, vocab) logits."""
    return torch.tensor([brute_force_distribution(row, **sampling) for row in logits.tolist()], dtype=torch.float64)


class Fit(NamedTuple):
    """Fit of observed counts to a distribution: Pearson's chi-squared over the cells, and how many were observed."""

    p_value: float
    num_observed: int


def fit(counts: Tensor, probs: Tensor) -> Fit:
    """Fit of (groups, cells) counts, each group with a number of its own, to the distribution of one group, (cells,).

    Cells of probability zero must be empty. Groups in which a cell has less than 5 expected counts are left out.
    """
    assert not counts[:, probs == 0].any(), "a token that cannot be chosen was chosen"
    counts, probs = counts[:, probs > 0].double(), probs[probs > 0]
    expected = counts.sum(dim=1, keepdim=True) * probs
    enough = expected.min(dim=1).values >= 5
    assert enough.any()
    statistic = ((counts - expected) ** 2 / expected)[enough].sum()
    num_free = int(enough.sum()) * (len(probs) - 1)
    p_value = torch.special.gammaincc(torch.tensor(num_free / 2, dtype=torch.float64), statistic / 2)
    return Fit(float(p_value), int(counts[enough].sum()))


NUM_DRAWS = draws(10_000, 2000)
MORE_DRAWS = draws(10_000, 4000)
"""Draws of drafts without cuts: so many tell how a block is accepted from how each token alone would be."""
KINDS = ("lookup", "one-hot distribution", "drawn")
FEW = [("drawn", "plain"), ("drawn", "all"), ("lookup", "plain")]
COMBINATIONS = [
    pytest.param(kind, sampling, marks=() if (kind, sampling) in FEW else pytest.mark.slow)
    for kind in KINDS
    for sampling in SAMPLING
]


def drafts(kind: str, probs: Tensor, num_drafts: int) -> tuple[list[list[int]], Tensor | None]:
    """Draft tokens, and the distribution that is claimed: looked up (always the same) or drawn from `probs`.

    With "wrong" they are drawn from another distribution than is claimed.
    """
    if kind == "lookup":
        return [LOOKUP] * num_drafts, None
    if kind == "one-hot distribution":
        return [LOOKUP] * num_drafts, torch.eye(VOCAB_SIZE, dtype=torch.float64)[LOOKUP]
    drawn_from = probs.flip(0) if kind == "wrong" else probs
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(drawn_from, num_drafts, replacement=True, generator=generator).T.tolist(), probs


@functools.cache
def outputs(kind: str, sampling: str, num_draws: int) -> list[list[int]]:
    """The accepted tokens and the one after them, of sequences that differ in their seed."""
    draft_tokens, probs = drafts(kind, distributions(DRAFT_LOGITS, SAMPLING[sampling]), num_draws)
    result = []
    for seed, tokens in enumerate(draft_tokens, 20_000):
        params = SamplingConfig(**({"top_k": 0} | SAMPLING[sampling]), random_seed=seed)
        verdict = verify(Sequence.start(Request(0, (1, 2), 9, sampling=params)), Draft(tokens, probs), TARGET_LOGITS)
        result.append([*tokens[: verdict.num_accepted], verdict.next_token])
    return result


def counts_at(position: int, all_tokens: list[list[int]]) -> Tensor:
    """(vocab, vocab) how often each token came at the position, grouped by the token before, which was accepted."""
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.int64)
    for tokens in all_tokens:
        if len(tokens) > position:
            counts[tokens[position - 1] if position else 0, tokens[position]] += 1
    return counts


@pytest.mark.parametrize(("kind", "sampling"), COMBINATIONS)
def test_every_position_follows_the_targets_distribution(kind: str, sampling: str) -> None:
    """The second given the first that was accepted, the bonus token given a draft accepted whole."""
    all_tokens = outputs(kind, sampling, MORE_DRAWS if (kind, sampling) == ("drawn", "plain") else NUM_DRAWS)
    num_kept = Counter(map(len, all_tokens))
    assert min(num_kept[n] for n in (1, 2, 3)) > draws(300, 60)  # else nothing would be tested
    for position, probs in enumerate(distributions(TARGET_LOGITS, SAMPLING[sampling])):
        assert fit(counts_at(position, all_tokens), probs).p_value > SMALLEST_P_VALUE, POSITIONS[position]


def test_wrong_probabilities_are_noticed() -> None:
    """The same statistic, where the draft claims another distribution than it was drawn from: it can fail."""
    all_tokens = outputs("wrong", "plain", draws(3000, 1000))
    first, second, bonus = (
        fit(counts_at(i, all_tokens), probs).p_value for i, probs in enumerate(distributions(TARGET_LOGITS, {}))
    )
    assert first < 1e-20 and second < 1e-20
    assert bonus > SMALLEST_P_VALUE  # after the draft the distribution is the target's own


@pytest.mark.parametrize(("kind", "sampling"), FEW[1:])
def test_no_more_is_rejected_than_must_be(kind: str, sampling: str) -> None:
    """No rule that follows the target accepts more than the distributions have in common: 1 - total variation."""
    target_probs = distributions(TARGET_LOGITS, SAMPLING[sampling])[0]
    draft_probs = distributions(DRAFT_LOGITS, SAMPLING[sampling])[0]
    in_common = (
        float(torch.minimum(draft_probs, target_probs).sum()) if kind == "drawn" else float(target_probs[LOOKUP[0]])
    )
    num_accepted = sum(len(tokens) > 1 for tokens in outputs(kind, sampling, NUM_DRAWS))
    assert abs(num_accepted / NUM_DRAWS - in_common) < 4 * math.sqrt(in_common * (1 - in_common) / NUM_DRAWS)


def test_as_many_are_accepted_as_a_block_can_have() -> None:
    """P(at least i accepted) is, over all drafts, the mean of `min(..., 1)` of the paper's equation 3; a test of each
    token alone accepts the mean of the product of `min(1, target / draft)`, which is less.
    """
    target, draft = (distributions(logits, {})[:2].tolist() for logits in (TARGET_LOGITS, DRAFT_LOGITS))
    by_block = by_token = 0.0
    for a, b in itertools.product(range(VOCAB_SIZE), repeat=2):
        if prob := draft[0][a] * draft[1][b]:
            ratios = target[0][a] / draft[0][a], target[1][b] / draft[1][b]
            first = min(ratios[0], 1)
            by_block += prob * (first + min(first * ratios[1], 1))
            by_token += prob * (first + first * min(ratios[1], 1))
    accepted = torch.tensor([len(tokens) - 1 for tokens in outputs("drawn", "plain", MORE_DRAWS)]).double()
    error = float(accepted.std()) / math.sqrt(MORE_DRAWS)
    assert abs(float(accepted.mean()) - by_block) < 4 * error
    assert float(accepted.mean()) > by_token + 2 * error


def test_whether_is_drafted_may_depend_on_what_was_rejected() -> None:
    """Drafts are of two tokens; after one whose first was rejected comes another where its second was a small number.

    Were a position's draft drawn by the same number again, those that are sent would be small numbers only.
    """
    first, second = [], []
    for seed in range(draws(3000, 800)):
        params = SamplingConfig(top_k=0, random_seed=seed)
        sequence = Sequence.start(Request(0, (1, 2), 9, sampling=params))
        rejected = draw_draft(sequence)
        verdict = verify(sequence, rejected, TARGET_LOGITS[[0, 0, 0]])
        first.append([*rejected.tokens[: verdict.num_accepted], verdict.next_token])
        if verdict.num_accepted:
            continue
        sequence.tokens.append(verdict.next_token)
        draft = draw_draft(sequence) if rejected.tokens[1] < VOCAB_SIZE // 2 else Draft([])
        verdict = verify(sequence, draft, TARGET_LOGITS[[0, 0, 0]][: len(draft.tokens) + 1])
        second.append([*draft.tokens[: verdict.num_accepted], verdict.next_token])
    assert len(second) > draws(500, 120)
    for tokens in (first, second):
        assert fit(counts_at(0, tokens), distributions(TARGET_LOGITS, {})[0]).p_value > SMALLEST_P_VALUE


def draw_draft(sequence: Sequence) -> Draft:
    """Two tokens of one distribution."""
    follower = Sequence(sequence.request, list(sequence.tokens))
    follower.sampler = sequence.sampler
    proposal = DraftState(follower, 2, use_logits=True)
    while not proposal.is_done:
        proposal.draft_token(DRAFT_LOGITS[0])
    return proposal.draft()


END_ID = 3


def drawn_against_us(batch_size: int, context_len: int, draft_len: int) -> float:
    """A whole draft is as good as free and a shorter one dear: what an end id made shorter would not be sent."""
    return 1.0 + 3.0 * (0 < draft_len < 3)


class DrawsUntilAnEndId:
    """Draws from `DRAFT_LOGITS`' first row, for probabilities; its last token may be an end id."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.probs = torch.softmax(DRAFT_LOGITS[0].double(), dim=0)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            tokens: list[int] = []
            while len(tokens) < min(max_draft_len, sequence.max_draft_len) and END_ID not in tokens:
                tokens += self.random.choices(range(VOCAB_SIZE), self.probs.tolist())
            drafts.append(Draft(tokens, self.probs.expand(len(tokens), -1) if tokens else None))
        return drafts

    def forget(self, request_id: int) -> None:
        pass


def test_automatic_lengths_of_drawn_drafts_leave_the_distribution() -> None:
    """Though how long a draft is depends on its tokens. The model's logits are known: `TARGET_LOGITS`, by position.

    A total variation of 0.117 is found in 1,300 texts with 99 %, of 0.066 in 4,000 with `--slow`: the statistic of 29
    free cells is 4 x 4,000 x 0.066 squared = 70 more than it should be, at least, and 59 are taken for chance (0.1 %).
    """
    num_texts = draws(4000, 1300)
    drafter = AdaptiveDrafter(DrawsUntilAnEndId(), drawn_against_us)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_texts):
        params = SamplingConfig(top_k=0, random_seed=seed)
        sequence = Sequence.start(Request(seed, (1, 2), 5, end_ids=frozenset([END_ID]), sampling=params))
        while sequence.finish_reason is None and sequence.num_generated < 2:
            (draft,) = drafter.propose([sequence], 3)
            first = sequence.num_generated
            logits = torch.stack([TARGET_LOGITS[min(first + i, 2)] for i in range(len(draft.tokens) + 1)])
            sequence.commit(draft, verify(sequence, draft, logits))
        drafter.forget(seed)
        counts[tuple(sequence.output_tokens[:2])] += 1
    first, second, _ = distributions(TARGET_LOGITS, {}).tolist()
    expected = {(END_ID,): first[END_ID]} | {
        (a, b): first[a] * second[b] for a in range(VOCAB_SIZE) if a != END_ID for b in range(VOCAB_SIZE)
    }
    assert counts.keys() <= expected.keys()
    likely = [text for text, prob in expected.items() if prob * num_texts >= 5]
    cells = torch.tensor([counts[text] for text in likely])
    probs = torch.tensor([expected[text] for text in likely], dtype=torch.float64)
    cells = torch.cat([cells, num_texts - cells.sum(dim=0, keepdim=True)])  # the others are one cell
    result = fit(cells[None], torch.cat([probs, 1 - probs.sum(dim=0, keepdim=True)]))
    assert result.num_observed == num_texts
    assert result.p_value > SMALLEST_P_VALUE
