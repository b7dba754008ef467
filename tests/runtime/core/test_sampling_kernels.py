"""The kernels choose as transformers' processors and warpers do, and as the form without kernels does, noise included.

What may differ: at the cut of top-p transformers adds up float32 shares, so that a token of a share at most `ROUNDING`
from the cut may fall on the other side; and of equal scores there its sort takes any, where ours takes the last.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strength import draws, examples
from test_sampling import CountedPenalty
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import runtime.core.sampling
from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import token_logprobs
from runtime.core.sampling import NoValidToken, Positions, Sampler, choose_all, gumbel
from runtime.kernels.ops import load_kernels
from runtime.loop.lossless.chi_squared import chi_squared_of, detectable_total_variation, p_value_of

ROUNDING = 1e-6
CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_k": 5},
    {"top_k": 900},
    {"top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
]
SIZES = [2, 16, 33, 1000, 40_000]  # the last is of three pieces, which threads share
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def loaded(kernels: Path) -> Iterator[None]:
    load_kernels(kernels)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def config(**fields: Any) -> SamplingConfig:
    return SamplingConfig(**({"top_k": 0} | fields))


def kinds_of_logits(size: int) -> Tensor:
    """(kinds, size): even, equal, a few likely ones, many equal ones, some never chosen, some nearly never; even ones,
    likelier where the kernels take a sample, and less likely.
    """
    rows = torch.randn(8, size, generator=torch.Generator().manual_seed(size))
    rows[1] = 0.5
    rows[2] *= 3
    rows[2, : size // 100 + 1] += 9
    rows[3] = (2 * rows[3]).round()
    rows[4, size // 2 :] = -torch.inf
    rows[5, size // 2 :] = -6e4
    is_sampled = torch.arange(size) % 256 < 16
    rows[6, is_sampled] += 2
    rows[7, is_sampled] -= 2
    return rows


def warped(scores: Tensor, cut: dict[str, Any]) -> Tensor:
    """Scores by transformers, in the order of its `generate`."""
    warpers = LogitsProcessorList()
    if "temperature" in cut:
        warpers.append(TemperatureLogitsWarper(cut["temperature"]))
    if "top_k" in cut:
        warpers.append(TopKLogitsWarper(cut["top_k"]))
    if "top_p" in cut:
        warpers.append(TopPLogitsWarper(cut["top_p"]))
    if "min_p" in cut:
        warpers.append(MinPLogitsWarper(cut["min_p"]))
    return warpers(torch.zeros(1, 0, dtype=torch.int64), scores[None])[0]


def is_rounding(scores: Tensor, differing: Tensor, cut: dict[str, Any]) -> bool:
    """True if the share of what is below each token that only one of both keeps is what is cut, up to rounding."""
    before = warped(scores, {name: value for name, value in cut.items() if name in ("temperature", "top_k")}).double()
    probs = before.softmax(0)
    for score in before[differing].unique():
        below, equal = probs[before < score].sum(), probs[before == score].sum()
        share = 1 - cut.get("top_p", 1.0)
        at_top_p = below - ROUNDING <= share <= below + equal + ROUNDING
        at_min_p = math.isclose(float((score - before.max()).exp()), cut.get("min_p", 0.0), rel_tol=ROUNDING)
        if not (at_top_p or at_min_p):
            return False
    return True


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(size, dtype, marks=pytest.mark.slow if size > 1000 and dtype != torch.float32 else ())
        for size in SIZES
        for dtype in DTYPES
    ],
    ids=str,
)
def test_what_is_left_is_what_transformers_leaves(size: int, dtype: torch.dtype) -> None:
    for logits in kinds_of_logits(size).to(dtype):
        for cut in CUTS:
            check_left(logits, cut)


@pytest.mark.parametrize("kind", [0, 1, 3, 6, 7])
def test_where_a_cut_is_guessed_what_is_left_is_transformers(kind: int) -> None:
    """Guess by a sample of many even scores, which is not like the others in the last two kinds: there it is wrong."""
    logits = kinds_of_logits(150_000)[kind]
    for cut in ({"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 1000}, {"top_k": 40_000}):
        check_left(logits, cut)


def check_left(logits: Tensor, cut: dict[str, Any]) -> None:
    theirs, ours = warped(logits.float(), cut), Sampler(config(**cut), (5,)).scores([5], logits)
    both = theirs.isfinite() & ours.isfinite()
    assert torch.equal(theirs[both], ours[both]), cut
    differing = (theirs.isfinite() != ours.isfinite()).nonzero()[:, 0]
    assert is_rounding(logits.float(), differing, cut), cut
    # Of equal ones at the cut as many are left, but for those whose share is less than the rounding.
    share = float(warped(logits.float(), {}).double().softmax(0)[differing].min()) if len(differing) else 1.0
    fewer = abs(int(theirs.isfinite().sum() - ours.isfinite().sum()))
    assert fewer <= math.ceil(ROUNDING / share), cut


@pytest.mark.parametrize("size", SIZES)
def test_of_equal_scores_at_the_cut_of_top_p_the_last_are_left(size: int) -> None:
    """Shares are computed here with fractions."""
    logits = torch.zeros(size)
    for top_p in (0.3, 0.5, 0.75):
        num_left = next(n for n in range(1, size + 1) if n / size >= top_p)
        sampler = Sampler(config(top_p=top_p), (5,))
        left = sampler.scores([5], logits).isfinite().nonzero()[:, 0]
        assert abs(len(left) - num_left) <= 1  # float32 at an exact half
        assert left.tolist() == list(range(size - len(left), size))


# -- Penalties, biases and bans --

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.6},
    {"presence_penalty": 0.3, "frequency_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"bad_words": ((5,), (3, 4), (1, 2, 3), (7, 7))},
    {"logit_bias": ((3, 2.5), (31, -4.0))},
    {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 2,
        "bad_words": ((0,), (2, 1)),
        "logit_bias": ((2, 1.5), (4, -1.0)),
    },
]


def processed(prefix: list[int], scores: Tensor, penalties: dict[str, Any]) -> Tensor:
    """Scores by transformers; it has no occurrence penalty, which is counted by brute force."""
    processors = LogitsProcessorList()
    if "logit_bias" in penalties:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in penalties["logit_bias"]}))
    if "repetition_penalty" in penalties:
        processors.append(RepetitionPenaltyLogitsProcessor(penalties["repetition_penalty"]))
    if "presence_penalty" in penalties or "frequency_penalty" in penalties:
        presence, frequency = (penalties.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
        processors.append(CountedPenalty(presence, frequency))
    if "no_repeat_ngram_size" in penalties:
        processors.append(NoRepeatNGramLogitsProcessor(penalties["no_repeat_ngram_size"]))
    if "bad_words" in penalties:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in penalties["bad_words"]]))
    return processors(torch.tensor([prefix]), scores[None])[0]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_after_penalties_are_transformers(penalties: dict[str, Any], temperature: float) -> None:
    """Prefixes go on, go back and are others, as after drafts and preemption, by one sampler."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 9, (4, 40), generator=generator).tolist()
    sampler = Sampler(config(temperature=temperature, **penalties), texts[0][:5])
    for i in range(examples(60)):
        prefix = texts[i % 4][: 1 + (7 * i) % 40]
        logits = 3 * torch.randn(33, generator=generator)
        expected = processed(prefix, logits, penalties) / temperature
        torch.testing.assert_close(sampler.scores(prefix, logits), expected, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("penalties", [{}, *PENALTIES], ids=str)
def test_positions_of_a_draft_are_chosen_as_one_after_the_other(penalties: dict[str, Any]) -> None:
    """Requests side by side, greedy and sampled, with drafts of several lengths, against each position by itself.

    Drafts are accepted to some position, behind which nothing has to be chosen.
    """
    generator = torch.Generator().manual_seed(1)
    asked, expected = [], []
    for i, (sampling, num_accepted) in enumerate(itertools.product(({"top_k": 1}, {}, {"top_p": 0.9}), (0, 1, 6))):
        for num_rejected in (0, 1, 3):
            tokens = torch.randint(0, 9, (12 + i,), generator=generator).tolist()
            logits, chosen, num_prefix = 2 * torch.randn(10, 33, generator=generator), [], len(tokens)
            for row in logits[: num_accepted + 1]:
                fresh = Sampler(config(random_seed=i, **sampling, **penalties), tokens[:4])
                chosen.append(fresh.choose(tokens, row))
                assert chosen[-1] == int(fresh.ranking(tokens, row).argmax())
                tokens.append(chosen[-1])
            wrong = [(chosen[-1] + 1) % 33] * num_rejected
            draft, logits = [*chosen[:-1], *wrong], logits[: num_accepted + num_rejected + 1]
            asked.append(Positions(fresh, tokens[:num_prefix], draft, logits))
            expected.append(chosen)
    for threads in (1, 3, 8):
        torch.set_num_threads(threads)
        together = [list(tokens) for tokens in choose_all(asked)]
        assert [tokens[: len(wanted)] for tokens, wanted in zip(together, expected, strict=True)] == expected
        one_by_one = [list(choose_all([one])[0]) for one in asked]
        assert [tokens[: len(wanted)] for tokens, wanted in zip(one_by_one, expected, strict=True)] == expected


def test_nothing_is_chosen_behind_a_token_that_is_not_the_drafts() -> None:
    """One thread computes it, which takes positions one after the other."""
    torch.set_num_threads(1)
    rows = torch.eye(8)[[3, 4, 5, 6]]
    drafts = [[3, 4, 5], [3, 4, 7], [3, 7, 5], [7, 4, 5]]
    chosen = choose_all([Positions(Sampler(GREEDY, (5,)), [5], draft, rows) for draft in drafts])
    assert [list(tokens) for tokens in chosen] == [[3, 4, 5, 6], [3, 4, 5], [3, 4], [3]]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"min_p": 0.3}, {"top_k": 5}, {"top_p": 1e-6}], ids=str)
@pytest.mark.parametrize("size", [33, 40_000])
def test_cuts_are_of_the_scores_that_penalties_leave(size: int, cut: dict[str, Any]) -> None:
    """Largest and smallest may have changed, be banned, outdone, or one of two by then."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0))
    order = logits.argsort(descending=True).tolist()
    logits[order[1]] = logits[order[0]]
    logits[order[-2]] = logits[order[-1]]
    for penalties in (
        {"bad_words": ((order[0],),)},
        {"bad_words": ((order[0],), (order[1],))},
        {"logit_bias": ((order[0], -3.0),)},
        {"logit_bias": ((order[5], 9.0), (order[6], 5.0))},
        {"logit_bias": ((order[0], 2.0), (order[-1], 9.0))},
        {"logit_bias": ((order[0], -90.0), (order[-1], -9.0))},
        {"repetition_penalty": 1.7, "bad_words": ((order[2],),)},
    ):
        prefix = [order[0], order[-1], order[7]]
        expected = processed(prefix, logits, penalties)
        left = Sampler(config(**cut, **penalties), prefix).scores(prefix, logits).isfinite()
        assert is_rounding(expected, (left != warped(expected, cut).isfinite()).nonzero()[:, 0], cut), penalties


def test_tokens_before_that_a_smaller_vocabulary_lacks_change_nothing() -> None:
    """Scores as of a draft model with fewer tokens than its target."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    fields = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    scores = Sampler(config(**fields), (5,)).scores([5, 25, 20], logits)
    torch.testing.assert_close(scores, processed([5, 25, 20], logits, fields))


# -- Draws --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_forms_choose_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = kinds_of_logits(3000).to(dtype)
    asked = [
        Positions(Sampler(config(random_seed=seed, **cut), (5,)), [5, 6], [], row[None])
        for seed in range(examples(3))
        for cut in CUTS
        for row in rows
    ]
    chosen = [list(tokens) for tokens in choose_all(asked)]
    monkeypatch.setattr(runtime.core.sampling, "have_kernels", lambda logits: False)
    assert [list(tokens) for tokens in choose_all(asked)] == chosen


def test_a_choice_does_not_depend_on_company_or_threads() -> None:
    rows = kinds_of_logits(40_000)
    samplers = [Sampler(config(random_seed=i, temperature=0.7, top_p=0.9), (5,)) for i in range(len(rows))]
    asked = [Positions(sampler, [5], [], row[None]) for sampler, row in zip(samplers, rows, strict=True)]
    together = [next(tokens) for tokens in choose_all(asked)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert [next(choose_all([one])[0]) for one in asked] == together
        assert [next(tokens) for tokens in choose_all(asked[::-1])] == together[::-1]


@pytest.mark.parametrize("scale", [1e-30, 1e3, 1e20, 1e37])
def test_scores_of_any_size_are_drawn_from(scale: float) -> None:
    """Two equally likely ones: the noise decides between them, however large they are."""
    logits = torch.tensor([-scale, scale, 0.0, scale])
    samplers = (Sampler(config(temperature=1.0, random_seed=seed, min_p=0.5), (5,)) for seed in range(200))
    chosen = Counter(sampler.choose([5], logits) for sampler in samplers)
    assert chosen[1] > 60 and chosen[3] > 60 if scale > 1 else min(chosen.values()) > 25


NUM_DRAWS, POWER = draws(20_000, 8_000), 0.99


@pytest.mark.one_in(6)
@pytest.mark.parametrize("cut", [*CUTS, *({"temperature": 0.8, **one} for one in PENALTIES[:3])], ids=str)
def test_draws_follow_transformers_distribution(cut: dict[str, Any]) -> None:
    """8,000 seeds, chi-squared at 0.001: a total variation of 0.05 would be found with 99 %, of 0.03 in 20,000."""
    logits = 1.5 * torch.randn(60, generator=torch.Generator().manual_seed(5))
    prefix = [3, 4, 4, 5]
    samplers = (Sampler(config(random_seed=seed, **cut), (3,)) for seed in range(NUM_DRAWS))
    chosen = Counter(next(one) for one in choose_all([Positions(s, prefix, [], logits[None]) for s in samplers]))
    expected = warped(processed(prefix, logits, cut), cut).double().softmax(0)
    statistic, freedom = chi_squared_of(chosen, expected)
    if freedom:
        assert p_value_of(statistic, freedom) > 1e-3
        detectable = detectable_total_variation(NUM_DRAWS, freedom, 1e-3, POWER)
        assert detectable is not None and detectable < draws(30, 50) / 1000
    assert all(expected[token] > 0 for token in chosen)


def test_noise_depends_on_every_bit_of_its_key() -> None:
    """Every noise is another, of which the old tells nothing; two tokens may exchange theirs: 2,000 pairs."""
    tokens = np.arange(4000, dtype=np.uint32)
    a = gumbel(12345678901234567, tokens)
    for bit in range(64):
        b = gumbel(12345678901234567 ^ 1 << bit, tokens)
        assert not (a == b).any(), bit
        assert abs(np.corrcoef(np.exp(-np.exp(-a)), np.exp(-np.exp(-b)))[0, 1]) < 5 / math.sqrt(2000), bit


def test_noise_of_neighbouring_tokens_is_independent() -> None:
    """Pairs of tokens 1 to 4096 apart, in 8 x 8 cells of equal probability; p below 1e-4 in none of 13."""
    for shift in range(13):
        u = np.concatenate(
            [np.exp(-np.exp(-gumbel(key << 32 | 77, np.arange(9000, dtype=np.uint32)))) for key in range(9)]
        )
        cells = (8 * u).astype(int)
        counts = np.bincount(8 * cells[: -(1 << shift)] + cells[1 << shift :], minlength=64)
        expected = counts.sum() / 64
        assert p_value_of(float(((counts - expected) ** 2 / expected).sum()), 63) > 1e-4


# -- Log-probabilities --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_logprobs_are_those_of_torch(size: int, dtype: torch.dtype) -> None:
    """Probabilities of the best, and of any token; float32 has 6 digits of numbers like these."""
    rows = kinds_of_logits(size).to(dtype)
    tokens, num_top = [(7 * i) % size for i in range(len(rows))], min(size, 20)
    expected = rows.double().log_softmax(dim=-1)
    for row, token, one in zip(expected, tokens, token_logprobs(rows, tokens, num_top), strict=True):
        assert one.token == token and one.logprob == pytest.approx(float(row[token]), rel=1e-5, abs=1e-6)
        values = torch.tensor([value for _, value in one.top], dtype=torch.float64)
        torch.testing.assert_close(values, row.topk(num_top).values, rtol=1e-5, atol=1e-6)
        best = [best for best, _ in one.top]
        torch.testing.assert_close(values, row[best], rtol=1e-5, atol=1e-6)
        assert len(set(best)) == num_top


def test_logprobs_of_what_is_no_number_are_none() -> None:
    rows = torch.zeros(2, 5)
    rows[0, 3] = math.nan
    wrong, right = token_logprobs(rows, [1, 1], 2)
    assert math.isnan(wrong.logprob) and all(math.isnan(value) for _, value in wrong.top)
    assert right.logprob == pytest.approx(-math.log(5)) and [token for token, _ in right.top] == [0, 1]


# -- What cannot be chosen from --


@pytest.mark.parametrize("fields", [{"top_k": 1}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("size", [3, 40_000])
def test_a_number_gone_wrong_is_found_wherever_it_is(fields: dict[str, Any], wrong: float, size: int) -> None:
    for place in (0, 1, size // 2, size - 1):
        logits = torch.zeros(size)
        logits[place] = wrong
        with pytest.raises(NoValidToken, match="NaN or infinite"):
            Sampler(config(**fields), (5,)).choose([5], logits)
