"""The lossless check's own parts: what a near tie is, and the statistic against known values and simulation."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_models import WITH_DRAFTS, MakeDraftEngineDir
from tiny import make_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.llm import LLM
from runtime.loop.lossless.check import (
    P_VALUE_THRESHOLD,
    POWER,
    REQUIRED_TOTAL_VARIATION,
    TokenCheck,
    _num_draws_per_prefix,
    _unit_in_the_last_place,
    _verdict,
    compare_tokens,
    is_chosen_within,
    next_logits,
)
from runtime.loop.lossless.chi_squared import (
    _cells,
    chi_squared_of,
    degrees_of_freedom_of,
    detectable_total_variation,
    p_value_of,
)
from runtime.loop.session import Session

PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="session")
def twin_engine_dirs(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """A target in every dtype, whose tokens i and i + 150 have the same logit everywhere."""

    def twins() -> PreTrainedModel:
        model = make_model("llama", vocab_size=len(tokenizer))
        weight = model.get_output_embeddings().weight
        weight.data[150:] = weight.data[:150]
        return model

    return {name: make_draft_engine_dir(twins().to(dtype), **WITH_DRAFTS) for name, dtype in DTYPES.items()}


@contextmanager
def session_of(engine_dir: Path) -> Iterator[Session]:
    with LLM(engine_dir, mode="orchestrator") as llm:
        yield llm.session()


def generated(session: Session, num_sequences: int = 1, sampling: SamplingConfig = GREEDY) -> list[Sequence]:
    prompts = [(*PROMPT, 9 + i) for i in range(num_sequences)]
    return session.run(
        [Request(i, prompt, NUM_TOKENS, frozenset([0]), sampling=sampling) for i, prompt in enumerate(prompts)]
    ).sequences


def with_token(sequence: Sequence, position: int, token: int) -> Sequence:
    """Change a token of the output, and go on from it in another way."""
    tokens = list(sequence.tokens)
    tokens[len(sequence.request.prompt_tokens) + position :] = [token, 3, 4]
    return Sequence(sequence.request, tokens)


def cut(sequence: Sequence, num_tokens: int) -> Sequence:
    return Sequence(sequence.request, sequence.tokens[: len(sequence.request.prompt_tokens) + num_tokens])


def twin(token: int) -> int:
    return (token + 150) % 300


def logits_at(session: Session, sequence: Sequence, position: int) -> Tensor:
    prefix = sequence.tokens[: len(sequence.request.prompt_tokens) + position]
    return next_logits(session.engine, sequence.request, prefix).float()


def worst_at(session: Session, sequence: Sequence, position: int) -> int:
    return int(logits_at(session, sequence, position).argmin())


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "not"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_tie_is_counted_apart_and_fails_where_bits_are_promised(
    dtype: str, batch_invariant: bool, twin_engine_dirs: dict[str, Path]
) -> None:
    """Differences in float32 count too, promised or not: there they are too rare to be one."""
    with session_of(twin_engine_dirs[dtype]) as session:
        session.engine.config = replace(session.engine.config, batch_invariant=batch_invariant)
        first, second = generated(session, 2)
        token = second.output_tokens[3]
        check = compare_tokens(session, [first, with_token(second, 3, twin(token))], [first, second])
    (difference,) = check.differences
    assert check == TokenCheck(
        rule="tokens", num_samples=2, num_identical=1, num_near_ties=1, num_different=0, dtype=dtype,
        batch_invariant=batch_invariant,
        differences=(difference,),
        passed=dtype != "float32" and not batch_invariant,
    )  # fmt: skip
    assert difference.is_near_tie
    assert (difference.request, difference.position) == (1, 3)
    assert (difference.token, difference.token_without_drafter) == (twin(token), token)
    assert 0 <= difference.logit_margin <= difference.rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_difference_beyond_rounding_fails_in_every_dtype(dtype: str, twin_engine_dirs: dict[str, Path]) -> None:
    with session_of(twin_engine_dirs[dtype]) as session:
        (sequence,) = generated(session)
        logits, token = logits_at(session, sequence, 5), sequence.output_tokens[5]
        worst = int(logits.argmin())
        check = compare_tokens(session, [with_token(sequence, 5, worst)], [sequence])
    assert (check.num_near_ties, check.num_different, check.passed) == (0, 1, False)
    (difference,) = check.differences
    assert (difference.position, difference.token, difference.token_without_drafter) == (5, worst, token)
    assert difference.logit_margin == pytest.approx(float(logits[token] - logits[worst]))
    assert not difference.is_near_tie


@pytest.fixture
def session(twin_engine_dirs: dict[str, Path]) -> Iterator[Session]:
    """Session of the engine whose near ties pass."""
    with session_of(twin_engine_dirs["bfloat16"]) as opened:
        yield opened


def test_only_the_first_difference_of_an_output_is_looked_at(session: Session) -> None:
    """Tokens after it follow another text."""
    (sequence,) = generated(session)
    near = with_token(sequence, 2, twin(sequence.output_tokens[2]))
    far = with_token(near, 3, worst_at(session, near, 3))
    check = compare_tokens(session, [far], [sequence])
    assert [difference.position for difference in check.differences] == [2]
    assert check.passed


def test_output_of_another_length_differs_where_one_has_ended(session: Session) -> None:
    (sequence,) = generated(session)
    shorter, token = cut(sequence, 4), sequence.output_tokens[4]
    for pair, tokens in (((shorter, sequence), (None, token)), ((sequence, shorter), (token, None))):
        check = compare_tokens(session, [pair[0]], [pair[1]])
        (difference,) = check.differences
        assert (difference.token, difference.token_without_drafter) == tokens
        assert (difference.position, difference.logit_margin, difference.is_near_tie) == (4, None, False)
        assert not check.passed


def test_token_that_cannot_be_chosen_is_no_near_tie(session: Session) -> None:
    """The twin has the same logit, and is banned."""
    banned = twin(generated(session)[0].output_tokens[1])
    (sequence,) = generated(session, sampling=SamplingConfig(bad_words=((banned,),)))
    check = compare_tokens(session, [with_token(sequence, 1, banned)], [sequence])
    (difference,) = check.differences
    assert (difference.logit_margin, difference.is_near_tie, check.passed) == (None, False, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [0.013, 1.0, 3.99, 4.0, 17.3, -25.0])
def test_rounding_is_the_spacing_of_the_dtype(dtype: str, largest: float) -> None:
    number = torch.tensor(abs(largest)).to(DTYPES[dtype])
    spacing = torch.nextafter(number, torch.tensor(torch.inf, dtype=number.dtype)).float() - number.float()
    logits = torch.tensor([0.001, largest, -0.01])
    assert _unit_in_the_last_place(logits.to(DTYPES[dtype]), dtype) == pytest.approx(float(spacing))


def sampled_sequence() -> Sequence:
    """A sampling sequence with a cut after two tokens, whose noise at the next position prefers tokens 1 and 2."""
    for seed in range(1000):
        plain = Sequence.start(Request(0, (1,), 4, sampling=SamplingConfig(top_k=0, random_seed=seed)))
        noise = plain.sampler.ranking([1], torch.zeros(3)).tolist()
        if min(noise[1], noise[2]) > noise[0] + 1:
            return Sequence.start(Request(0, (1,), 4, sampling=SamplingConfig(top_k=2, random_seed=seed)))
    raise AssertionError("no such seed")


def test_token_at_a_cut_is_chosen_too_when_logits_are_off_by_rounding() -> None:
    """Token 0 is the best and 1 and 2 are equally good: which of them the cut leaves is for rounding to say."""
    logits = torch.tensor([0.5, 0.0, 0.0])
    assert all(is_chosen_within(sampled_sequence().sampler, [1], logits, token, 1e-3) for token in (1, 2))
    assert not is_chosen_within(sampled_sequence().sampler, [1], logits, 0, 1e-3)


@pytest.mark.parametrize(("measured", "is_near_tie"), [(1e3, True), (1e-9, False)])
def test_samples_nearer_than_rounding_are_near_ties(measured: float, is_near_tie: bool, session: Session) -> None:
    """The second best with the noise, where `build` found logits to be off by so much."""
    (sequence,) = generated(session, sampling=SamplingConfig(top_k=0))
    config = session.engine.config
    check = replace(config.logits_check, max_abs_difference=measured)
    session.engine.config = replace(config, logits_check=check)
    result = compare_tokens(session, [with_token(sequence, 2, worst_at(session, sequence, 2))], [sequence])
    assert (result.num_near_ties, result.passed) == (int(is_near_tie), is_near_tie)


@pytest.mark.parametrize(
    ("chi_squared", "degrees_of_freedom", "p_value"),
    [
        (3.841459, 1, 0.05),
        (6.634897, 1, 0.01),
        (18.307038, 10, 0.05),
        (23.209251, 10, 0.01),
        (124.342113, 100, 0.05),
        (9.341818, 10, 0.5),
        (15.136705, 1, 1e-4),
        (0.0, 5, 1.0),
    ],
)
def test_p_values_are_those_of_the_tables(chi_squared: float, degrees_of_freedom: int, p_value: float) -> None:
    assert p_value_of(chi_squared, degrees_of_freedom) == pytest.approx(p_value, rel=1e-4)


def test_impossible_has_no_probability_and_nothing_to_compare_has_all() -> None:
    assert p_value_of(float("inf"), 1) == 0
    assert p_value_of(0.0, 0) == 1
    assert 0 <= p_value_of(1e5, 3) < 1e-300


def law_of(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def test_statistic_is_the_sum_over_tokens() -> None:
    counts, distribution = [30, 12, 8, 0], law_of(4, 3, 2, 1)
    expected = 50 * distribution.numpy()
    brute_force = ((np.array(counts) - expected) ** 2 / expected).sum()
    statistic, degrees_of_freedom = chi_squared_of(Counter(dict(enumerate(counts))), distribution)
    assert (statistic, degrees_of_freedom) == (pytest.approx(brute_force), 3)


def test_rare_tokens_share_cells() -> None:
    """Twelve rare ones are each expected once in 100 draws, and six of them, 6 %, make a cell."""
    distribution = law_of(50, 38, *[1] * 12)
    counter = Counter({0: 45, 1: 38, 5: 9, 11: 8})
    statistic, degrees_of_freedom = chi_squared_of(counter, distribution)
    assert statistic == pytest.approx((45 - 50) ** 2 / 50 + 0 + (9 - 6) ** 2 / 6 + (8 - 6) ** 2 / 6)
    assert degrees_of_freedom == 3


def test_token_that_cannot_come_is_infinitely_wrong() -> None:
    statistic, degrees_of_freedom = chi_squared_of(Counter({0: 99, 2: 1}), law_of(3, 1, 0))
    assert p_value_of(statistic, degrees_of_freedom) == 0


def p_values(draws_of: Tensor, distribution: Tensor, num_samples: int) -> np.ndarray:
    """p-values of many samples of 250 draws."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(250, draws_of.numpy(), size=num_samples)
    return np.array(
        [p_value_of(*chi_squared_of(Counter({i: int(n) for i, n in enumerate(row) if n}), distribution))
         for row in counts]
    )  # fmt: skip


LAWS = {
    "even": law_of(*[1] * 20),
    "a language model's": law_of(*(1 / rank**1.2 for rank in range(1, 301))),
    "one token and a tail": law_of(200, *[1] * 100),
}


@pytest.mark.parametrize("distribution", LAWS.values(), ids=LAWS)
def test_p_values_of_right_draws_are_uniform(distribution: Tensor) -> None:
    values = np.sort(p_values(distribution, distribution, 1000))
    distance = np.abs(values - (np.arange(1000) + 0.5) / 1000).max()
    assert distance < 1.63 / np.sqrt(1000) + 0.03  # Kolmogorov's 1 % point, and room for counts being whole numbers
    assert (values < 1e-4).sum() <= 2
    assert 0.02 < (values < 0.05).mean() < 0.08


def fault_of(distribution: Tensor, total_variation: float, half: list[int]) -> Tensor:
    """The distribution with so much more probability in a half of it, and as much less in the other."""
    in_half = torch.zeros_like(distribution, dtype=torch.bool)
    in_half[half] = True
    share = float(distribution[in_half].sum())
    factor_in, factor_out = 1 + total_variation / share, 1 - total_variation / (1 - share)
    return distribution * torch.where(in_half, factor_in, factor_out)


def statistics_of(
    draws_of: Tensor, distribution: Tensor, num_draws: int, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """The statistics of 1,000 samples, and their degrees of freedom."""
    weights = draws_of.numpy()
    counts = rng.multinomial(num_draws, weights / weights.sum(), size=1000)
    cells = np.array(_cells(distribution, num_draws))
    in_cell = cells[:, None] == np.arange(cells.max() + 1)
    expected = num_draws * distribution.numpy() @ in_cell
    return ((counts @ in_cell - expected) ** 2 / expected).sum(axis=1), int(cells.max())


def share_found(draws_of: list[Tensor], distributions: list[Tensor], num_draws: int) -> float:
    """Share of 1,000 checks that find the fault, each of so many draws from every distribution."""
    rng = np.random.default_rng(1)
    results = [statistics_of(d, p, num_draws, rng) for d, p in zip(draws_of, distributions, strict=True)]
    freedom = sum(freedom for _, freedom in results)
    sums = np.sum([statistics for statistics, _ in results], axis=0)
    return float(np.mean([p_value_of(float(one), freedom) < P_VALUE_THRESHOLD for one in sums]))


def detectable_by(distributions: list[Tensor], num_draws: int) -> float:
    freedom = sum(degrees_of_freedom_of(d, num_draws) for d in distributions)
    found = detectable_total_variation(num_draws * len(distributions), freedom, P_VALUE_THRESHOLD, POWER)
    assert found is not None
    return found


POWER_CASES = {  # distributions, and a half of equal probability
    "even": ([law_of(*[1] * 20)] * 3, list(range(10))),
    "two tokens": ([law_of(1, 1)] * 8, [0]),
    "steep": ([law_of(8, 2, 2, 1, 1, 1, 1)] * 4, [0]),
    "with a tail": ([law_of(100, *[1] * 100)] * 2, [0]),
}


@pytest.mark.parametrize(("distributions", "half"), POWER_CASES.values(), ids=POWER_CASES)
def test_fault_of_the_detectable_size_is_found_99_times_of_100(distributions: list[Tensor], half: list[int]) -> None:
    """Shares of 1,000 checks have a standard deviation of 0.3 %; a check without a fault fails hardly ever."""
    size = detectable_by(distributions, 250)
    wrong = [fault_of(distribution, size, half) for distribution in distributions]
    assert all(float((w - d).abs().sum()) == pytest.approx(2 * size) for w, d in zip(wrong, distributions, strict=True))
    assert share_found(wrong, distributions, 250) > 0.98
    assert share_found(distributions, distributions, 250) <= 0.003


def test_detectable_size_is_that_of_the_fault_that_is_hardest_to_find() -> None:
    """A token of half the probability grows, and a long tail shrinks."""
    distributions, half = POWER_CASES["with a tail"]
    size = detectable_by(distributions, 250)
    smaller = [fault_of(distribution, 0.85 * size, half) for distribution in distributions]
    assert 0.5 < share_found(smaller, distributions, 250) < 0.97


@pytest.mark.parametrize(
    ("distributions", "num_draws"),
    [([law_of(1, 1)] * 8, 250), ([law_of(*[1] * 300)] * 8, 250), ([law_of(*[1] * 300)] * 4, 500)],
)
def test_so_many_draws_are_made_as_it_takes(distributions: list[Tensor], num_draws: int) -> None:
    assert _num_draws_per_prefix(distributions) == num_draws
    assert detectable_by(distributions, num_draws) <= REQUIRED_TOTAL_VARIATION
    if num_draws > 250:
        assert detectable_by(distributions, 250) > REQUIRED_TOTAL_VARIATION


@pytest.mark.parametrize(
    ("p_value", "detectable", "num_distributions", "passed"),
    [
        (0.5, 0.15, 4, True),
        (0.5, 0.151, 4, None),
        (0.5, None, 4, None),
        (0.5, 0.1, 3, None),
        (1e-5, 0.1, 8, False),
        (1e-5, None, 1, False),
    ],
)
def test_little_power_or_few_places_tell_too_little(
    p_value: float, detectable: float | None, num_distributions: int, passed: bool | None
) -> None:
    """But a failure is one at any power."""
    assert _verdict(p_value, detectable, num_distributions) is passed
