"""Whether speculation left the output what it is: compared token by token, or by distribution.

By tokens wherever the target draws its own tokens: greedy, and sampling with one seed. Where two outputs part, the
target's logits at that place say how near the two tokens are. Rejection sampling follows the target's distribution with
other draws; there, many next tokens are drawn from the same texts and counted against that distribution.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.request import Draft, Request, Sequence
from runtime.session import Session

P_VALUE_THRESHOLD = 1e-4
NUM_PREFIXES, NUM_DRAWS_PER_PREFIX = 8, 250
_MIN_DRAWS_OF_A_PREFIX = 50  # fewer say nothing about a distribution
_MIN_EXPECTED_COUNT = 5  # of a cell of the chi-squared statistic
_IMPOSSIBLE = 1e-12


@dataclass(frozen=True)
class Difference:
    """Where an output with the drafter first differs from the one without."""

    request: int
    position: int  # in the output
    token: int | None  # None: the output has ended
    token_without_drafter: int | None
    logit_margin: float | None  # between the two tokens, with the noise of sampling; None where one is cut
    rounding: float  # what a logit of this size may be off by
    is_near_tie: bool


def check_outputs(
    session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence], advance: Callable[[], None]
) -> dict[str, Any]:
    """The `lossless` check by the rule that fits; `advance` is called up to NUM_PREFIXES times."""
    if session.draws_by_probs(sequences):
        return check_distribution(session, sequences, advance)
    return compare_tokens(session, sequences, without_drafter)


def compare_tokens(session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence]) -> dict[str, Any]:
    """The `lossless` check by tokens. A near tie, where rounding decides, fails in float32 only."""
    differences = [
        _first_difference(session.engine, a, b)
        for a, b in zip(sequences, without_drafter, strict=True)
        if a.output_tokens != b.output_tokens
    ]
    dtype = session.engine.config.dtype
    num_near_ties = sum(d.is_near_tie for d in differences)
    return {
        "rule": "tokens",
        "num_samples": len(sequences),
        "num_identical": len(sequences) - len(differences),
        "num_near_ties": num_near_ties,
        "num_different": len(differences) - num_near_ties,
        "dtype": dtype,
        "differences": [asdict(d) for d in differences],
        "passed": not differences or (num_near_ties == len(differences) and dtype != "float32"),
    }


def _first_difference(engine: Engine, a: Sequence, b: Sequence) -> Difference:
    """`b` is without the drafter. The logits are computed again, without a draft."""
    tokens_a, tokens_b = a.output_tokens, b.output_tokens
    position = 0
    while position < min(len(tokens_a), len(tokens_b)) and tokens_a[position] == tokens_b[position]:
        position += 1
    token_a, token_b = (t[position] if position < len(t) else None for t in (tokens_a, tokens_b))
    prefix = a.tokens[: len(a.request.prompt_tokens) + position]
    logits = next_logits(engine, a.request, prefix)
    rounding = max(_unit_in_the_last_place(logits, engine.config.dtype), engine.config.logits_check.max_abs_difference)
    margin, is_near_tie = None, False
    if token_a is not None and token_b is not None:
        ranking = a.sampler.ranking(prefix, logits)
        temperature = 1.0 if a.sampler.is_greedy else a.request.sampling.temperature
        margin = float((ranking[token_b] - ranking[token_a]).abs()) * temperature
        is_near_tie = margin <= 2 * rounding  # each of the two may be off
        if not math.isfinite(margin):  # one of them is cut
            margin, is_near_tie = None, _is_chosen_within(a, prefix, logits, token_a, rounding)
    return Difference(a.request.id, position, token_a, token_b, margin, rounding, is_near_tie)


def _unit_in_the_last_place(logits: Tensor, dtype: str) -> float:
    """The spacing of numbers of this dtype at the largest logit."""
    largest = float(logits.abs().max())
    return float(torch.finfo(getattr(torch, dtype)).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30))))


def _is_chosen_within(sequence: Sequence, prefix: list[int], logits: Tensor, token: int, rounding: float) -> bool:
    """Whether the token is chosen too when the logits are off by no more than `rounding`, tried at random.

    For tokens at a cut (top_k, top_p, min_p), which moves with the logits.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        noise = (torch.rand(logits.shape, generator=generator) * 2 - 1) * rounding
        if sequence.sampler.choose(prefix, logits.float() + noise.to(logits.device)) == token:
            return True
    return False


def next_logits(engine: Engine, request: Request, prefix: list[int]) -> Tensor:
    """(vocab,) the target's logits after `prefix`, from a step without a draft, nothing reused."""
    engine.clear_cache()
    sequence = Sequence(request, list(prefix))
    admitted = engine.admit(sequence)
    assert admitted, "nothing else is running"
    try:
        return engine.forward([sequence], [Draft([])])[0][0]
    finally:
        engine.release(sequence)


def check_distribution(session: Session, sequences: Seq[Sequence], advance: Callable[[], None]) -> dict[str, Any]:
    """The `lossless` check by distribution: chi-squared over speculated tokens after prefixes of these outputs.

    Every draw is one step from a prefix, with its own random numbers. The tokens of a step are counted by the text
    before them, and compared with the distribution that a step without a draft gives for that text.
    """
    prefixes = _choose_prefixes(session, sequences)
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for prefix in prefixes:
        for start in range(0, NUM_DRAWS_PER_PREFIX, session.engine.max_batch_size):
            draws = range(start, min(start + session.engine.max_batch_size, NUM_DRAWS_PER_PREFIX))
            for tokens, num_new in _draw_once(session, sequences[0].request, prefix, draws):
                for i in range(len(tokens) - num_new, len(tokens)):
                    counts[tuple(tokens[:i])][tokens[i]] += 1
        advance()
    chi_squared, degrees_of_freedom, num_distributions, num_counted = 0.0, 0, 0, 0
    for text, counter in counts.items():
        if counter.total() < _MIN_DRAWS_OF_A_PREFIX:
            continue
        request = replace(sequences[0].request, prompt_tokens=text, max_new_tokens=1)
        logits = next_logits(session.engine, request, list(text))
        distribution = Sequence.start(request).sampler.probs(list(text), logits)
        statistic, freedom = chi_squared_of(counter, distribution)
        chi_squared += statistic
        degrees_of_freedom += freedom
        num_distributions += 1
        num_counted += counter.total()
    p_value = chi_squared_p_value(chi_squared, degrees_of_freedom)
    return {
        "rule": "distribution",
        "num_prefixes": len(prefixes),
        "num_draws": len(prefixes) * NUM_DRAWS_PER_PREFIX,
        "num_distributions": num_distributions,
        "num_tokens": num_counted,
        "chi_squared": chi_squared if math.isfinite(chi_squared) else None,
        "degrees_of_freedom": degrees_of_freedom,
        "p_value": p_value,
        "threshold": P_VALUE_THRESHOLD,
        "passed": p_value >= P_VALUE_THRESHOLD,
    }


@dataclass(frozen=True)
class _Prefix:
    """A text to draw from, and how many tokens may follow it: the request it is of has no more."""

    tokens: tuple[int, ...]
    max_new_tokens: int


def _choose_prefixes(session: Session, sequences: Seq[Sequence]) -> list[_Prefix]:
    """Prompts with some of their outputs, no longer than a prompt may be."""
    rng = random.Random(sequences[0].request.sampling.random_seed)
    engines = [session.engine, *([session.draft_engine] if session.draft_engine else [])]
    max_input_len = min(engine.config.build_config.max_input_len for engine in engines)
    prefixes = set()
    for i in range(4 * NUM_PREFIXES):
        sequence = sequences[i % len(sequences)]
        num_prompt = len(sequence.request.prompt_tokens)
        last = max(min(len(sequence.tokens) - 1, max_input_len), num_prompt)
        length = rng.randint(num_prompt, last)
        max_new_tokens = num_prompt + sequence.request.max_new_tokens - length
        prefixes.add(_Prefix(tuple(sequence.tokens[:length]), min(max_new_tokens, session.max_draft_len + 1)))
        if len(prefixes) == NUM_PREFIXES:
            break
    return sorted(prefixes, key=lambda prefix: prefix.tokens)


def _draw_once(session: Session, like: Request, prefix: _Prefix, draws: range) -> list[tuple[list[int], int]]:
    """(tokens, how many of them are new) after one speculated step from the prefix, for each draw.

    The requests are like the given one, but that stop words are left out.
    """
    requests = [
        replace(
            like,
            id=i,
            prompt_tokens=prefix.tokens,
            max_new_tokens=prefix.max_new_tokens,
            return_index=i,
            stop_check=None,
            keep_logits=False,
            num_logprobs=None,
        )
        for i in draws
    ]
    first: dict[int, tuple[list[int], int]] = {}
    with closing(session.steps(requests)) as steps:
        for sequence, new_tokens in steps:  # some may step again before others begin
            first.setdefault(sequence.request.id, (list(sequence.tokens), len(new_tokens)))
            if len(first) == len(requests):
                break
    return [first[request.id] for request in requests]


def chi_squared_of(counter: Counter[int], distribution: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts against a (vocab,) distribution; rare tokens share cells."""
    num_draws = counter.total()
    if any(float(distribution[token]) < _IMPOSSIBLE for token in counter):
        return math.inf, 1
    cells = [(0, 0.0)]  # counted, expected
    rare = (0, 0.0)
    for token, expected in enumerate((distribution * num_draws).tolist()):
        if expected >= _MIN_EXPECTED_COUNT:
            cells.append((counter[token], expected))
            continue
        rare = (rare[0] + counter[token], rare[1] + expected)
        if rare[1] >= _MIN_EXPECTED_COUNT:
            cells.append(rare)
            rare = (0, 0.0)
    # What is left over goes to the last cell.
    cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    cells = cells if cells[0][1] else cells[1:]
    return sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1


def chi_squared_p_value(chi_squared: float, degrees_of_freedom: int) -> float:
    """Probability of a statistic at least as large; 1 where there is nothing to compare."""
    if math.isinf(chi_squared):
        return 0.0
    if degrees_of_freedom == 0:
        return 1.0
    half = torch.tensor([degrees_of_freedom / 2, chi_squared / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
