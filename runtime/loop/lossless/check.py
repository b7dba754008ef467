"""Lossless check of speculation, token by token or by distribution.

Tokens are compared whenever the target draws its own tokens: for greedy requests, and for sampling with a seed. If two
outputs differ, the target's logits at the first difference show how near the two tokens are. Rejection sampling follows
the target's distribution with other draws: there, many next tokens are drawn after the same texts, and counted against
that distribution.
"""

import math
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from runtime.checkpoint.config import EngineConfig
from runtime.core.batch import generation_row
from runtime.core.kv_cache import num_common
from runtime.core.request import Request, Sequence
from runtime.core.sampling import Sampler
from runtime.engine.engine import Engine
from runtime.loop.lossless.chi_squared import (
    chi_squared_of,
    degrees_of_freedom_of,
    detectable_total_variation,
    p_value_of,
)
from runtime.loop.lossless.results import Difference, DistributionCheck, LosslessCheck, TokenCheck
from runtime.loop.session import Session
from runtime.util.errors import SpecDecWarning

P_VALUE_THRESHOLD = 1e-4
POWER, REQUIRED_TOTAL_VARIATION = 0.99, 0.15
MIN_DISTRIBUTIONS = 4
"""A check by distribution tells enough if it counts tokens of at least 4 distributions, and would have found a total
variation of 0.15 with a probability of 0.99. Otherwise it has too little to tell.
"""
NUM_PREFIXES, NUM_CANDIDATES = 8, 32
NUM_DRAWS_PER_PREFIX = (250, 500)  # the first number that suffices
_MIN_DRAWS_OF_A_TEXT = 50  # fewer draws say little about a distribution


def check_outputs(
    session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence], advance: Callable[[], None]
) -> LosslessCheck:
    """The `lossless` check of these outputs, by the rule that fits; `advance` is called up to NUM_PREFIXES times."""
    if session.draws_by_probs(sequences):
        return check_distribution(session, sequences, advance)
    return compare_tokens(session, sequences, without_drafter)


def compare_tokens(session: Session, sequences: Seq[Sequence], without_drafter: Seq[Sequence]) -> TokenCheck:
    """The `lossless` check by tokens. A near tie, which rounding decides, counts as a failure in float32, and for an
    engine whose logits have the same bits in any step.
    """
    differences = [
        _first_difference(session.engine, a, b)
        for a, b in zip(sequences, without_drafter, strict=True)
        if a.output_tokens != b.output_tokens
    ]
    if not any(sequence.stats.num_draft_tokens for sequence in sequences):
        warnings.warn(
            f"no drafts were verified, so that the lossless check shows nothing about them ({len(sequences)} outputs): "
            "automatic draft lengths draft where it pays, and an output of one token has no room for a draft",
            SpecDecWarning,
            stacklevel=3,
        )
    config = session.engine.config
    near_ties_pass = config.dtype != "float32" and not config.batch_invariant
    num_near_ties = sum(d.is_near_tie for d in differences)
    return TokenCheck(
        rule="tokens",
        num_samples=len(sequences),
        num_identical=len(sequences) - len(differences),
        num_near_ties=num_near_ties,
        num_different=len(differences) - num_near_ties,
        dtype=config.dtype,
        batch_invariant=config.batch_invariant,
        differences=tuple(differences),
        passed=not differences or (near_ties_pass and num_near_ties == len(differences)),
    )


def _first_difference(engine: Engine, a: Sequence, b: Sequence) -> Difference:
    """The first difference between output `a`, with the drafter, and output `b`, without it. The logits at that
    position are computed again, in a step without a draft.
    """
    tokens_a, tokens_b = a.output_tokens, b.output_tokens
    position = num_common(tokens_a, tokens_b)
    token_a, token_b = (t[position] if position < len(t) else None for t in (tokens_a, tokens_b))
    prefix = a.tokens[: len(a.request.prompt_tokens) + position]
    logits = next_logits(engine, a.request, prefix)
    rounding = rounding_of(engine.config, logits)
    margin, is_near_tie = None, False
    if token_a is not None and token_b is not None:
        margin = a.sampler.margin(prefix, logits, token_b, token_a)
        if margin is None:  # one of the tokens is cut
            is_near_tie = is_chosen_within(a.sampler, prefix, logits, token_a, rounding)
        else:
            margin = abs(margin)
            is_near_tie = margin <= 2 * rounding  # each of the two logits may be off by `rounding`
    return Difference(a.request.id, position, token_a, token_b, margin, rounding, is_near_tie)


def _unit_in_the_last_place(logits: Tensor, dtype: str) -> float:
    """The spacing of numbers of this dtype at the largest logit."""
    largest = float(logits.abs().max())
    return float(torch.finfo(getattr(torch, dtype)).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30))))


def rounding_of(config: EngineConfig, logits: Tensor) -> float:
    """Rounding error of the largest logit: a unit in its last place, or the error that `build` found if larger."""
    return max(_unit_in_the_last_place(logits, config.dtype), config.logits_check.max_abs_difference)


def is_chosen_within(sampler: Sampler, prefix: list[int], logits: Tensor, token: int, rounding: float) -> bool:
    """True if the token is also chosen under random changes of the logits by at most `rounding`.

    For tokens at a cut (top_k, top_p, min_p), which moves with the logits.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        noise = (torch.rand(logits.shape, generator=generator) * 2 - 1) * rounding
        if sampler.choose(prefix, logits.float() + noise.to(logits.device)) == token:
            return True
    return False


def next_logits(engine: Engine, request: Request, prefix: list[int]) -> Tensor:
    """The target's logits `[vocab]` after `prefix`, from a step without a draft that reuses no keys and values."""
    with engine.without_disk():
        engine.clear_cache()
        sequence = Sequence(request, list(prefix))
        admitted = engine.admit(sequence)
        assert admitted, "nothing else is running"
        try:
            engine.catch_up(sequence)
            return engine.step([generation_row(sequence, [])])[0][0]
        finally:
            engine.release(sequence)


def check_distribution(session: Session, sequences: Seq[Sequence], advance: Callable[[], None]) -> DistributionCheck:
    """The `lossless` check by distribution: chi-squared over speculated tokens after prefixes of these outputs.

    Every draw is one step from a prefix, with its own random numbers. The tokens of a step with a draft are counted by
    the text before them, and compared with the distribution that a step without a draft gives for that text. `passed`
    is None if there were too few tokens to tell.
    """
    prefixes, num_draws = _choose_prefixes(session, sequences)
    counts: dict[Request, Counter[int]] = defaultdict(Counter)
    for prefix in prefixes:
        for start in range(0, num_draws, session.engine.max_batch_size):
            draws = range(start, min(start + session.engine.max_batch_size, num_draws))
            for tokens, num_new in _draw_once(session, prefix, draws):
                for i in range(len(tokens) - num_new, len(tokens)):
                    counts[_request_after(prefix, tokens[:i])][tokens[i]] += 1
        advance()
    chi_squared, degrees_of_freedom, num_distributions, num_counted = 0.0, 0, 0, 0
    for text, counter in counts.items():
        if counter.total() < _MIN_DRAWS_OF_A_TEXT:
            continue
        statistic, freedom = chi_squared_of(counter, _distribution(session, text))
        if freedom:
            chi_squared += statistic
            degrees_of_freedom += freedom
            num_distributions += 1
            num_counted += counter.total()
    p_value = p_value_of(chi_squared, degrees_of_freedom)
    detectable = _detectable(num_counted, degrees_of_freedom)
    return DistributionCheck(
        rule="distribution",
        num_prefixes=len(prefixes),
        num_draws=len(prefixes) * num_draws,
        num_distributions=num_distributions,
        num_tokens=num_counted,
        chi_squared=chi_squared if math.isfinite(chi_squared) else None,
        degrees_of_freedom=degrees_of_freedom,
        p_value=p_value,
        threshold=P_VALUE_THRESHOLD,
        power=POWER,
        detectable_total_variation=detectable,
        required_total_variation=REQUIRED_TOTAL_VARIATION,
        passed=_verdict(p_value, detectable, num_distributions),
    )


def _verdict(p_value: float, detectable: float | None, num_distributions: int) -> bool | None:
    """True if the check passed; None if too few tokens were drawn to tell."""
    if p_value < P_VALUE_THRESHOLD:
        return False
    return True if num_distributions >= MIN_DISTRIBUTIONS and _is_enough(detectable) else None


def _detectable(num_tokens: int, degrees_of_freedom: int) -> float | None:
    return detectable_total_variation(num_tokens, degrees_of_freedom, P_VALUE_THRESHOLD, POWER)


def _is_enough(detectable: float | None) -> bool:
    return detectable is not None and detectable <= REQUIRED_TOTAL_VARIATION


def _num_draws_per_prefix(distributions: list[Tensor]) -> int:
    """Number of draws from each prefix that suffices if only a step's first token tells; the minimum if none does."""
    for num_draws in NUM_DRAWS_PER_PREFIX:
        freedoms = [degrees_of_freedom_of(distribution, num_draws) for distribution in distributions]
        if _is_enough(_detectable(num_draws * sum(freedom > 0 for freedom in freedoms), sum(freedoms))):
            return num_draws
    return NUM_DRAWS_PER_PREFIX[0]


def _request_after(prefix: Request, tokens: list[int]) -> Request:
    """The request for the token behind `tokens`: the prefix's prompt, and tokens that were drawn after it."""
    sampling = prefix.sampling.after(len(tokens) - len(prefix.prompt_tokens))
    return replace(prefix, prompt_tokens=tuple(tokens), max_new_tokens=1, sampling=sampling)


def _distribution(session: Session, prefix: Request) -> Tensor:
    """The target's probabilities `[vocab]` of the token after the request's prompt, from a step without a draft."""
    request, text = replace(prefix, max_new_tokens=1), list(prefix.prompt_tokens)
    return Sequence.start(request).sampler.probs(text, next_logits(session.engine, request, text))


def _choose_prefixes(session: Session, sequences: Seq[Sequence]) -> tuple[list[Request], int]:
    """Choose texts after which the target is uncertain of the next token, and the number of draws from each.

    They are chosen by the target's distributions alone, before anything is drawn, so the p-value stays valid. If the
    target is sure nearly everywhere, draws can still find tokens that it would never choose.
    """
    candidates = _candidates(session, sequences)
    distributions = {prefix: _distribution(session, prefix) for prefix in candidates}
    unsure = [prefix for prefix in candidates if degrees_of_freedom_of(distributions[prefix], NUM_DRAWS_PER_PREFIX[0])]
    chosen = (unsure if len(unsure) >= MIN_DISTRIBUTIONS else candidates)[:NUM_PREFIXES]
    return chosen, _num_draws_per_prefix([distributions[prefix] for prefix in chosen])


def _candidates(session: Session, sequences: Seq[Sequence]) -> list[Request]:
    """Requests whose prompts are these sequences' prompts with some of their output's tokens."""
    like = replace(sequences[0].request, stop_check=None, keep_logits=False, num_logprobs=None)
    like = replace(like, sampling=replace(like.sampling, penalize_prompt=True))  # prompts end at different tokens
    rng = random.Random(like.sampling.random_seed)
    engines = [session.engine, *([session.draft_engine] if session.draft_engine else [])]
    max_input_len = min(engine.config.build_config.max_input_len for engine in engines)
    found: dict[Request, None] = {}
    for i in range(NUM_CANDIDATES):
        sequence = sequences[i % len(sequences)]
        num_prompt, max_new_tokens = len(sequence.request.prompt_tokens), sequence.request.max_new_tokens
        # Two tokens must have room after the text, or nothing is drafted.
        last = max(min(len(sequence.tokens) - 1, max_input_len, num_prompt + max_new_tokens - 2), num_prompt)
        length = rng.randint(num_prompt, last)
        num_left = num_prompt + max_new_tokens - length
        most = min(num_left, session.max_draft_len + 1)
        grammar = sequence.request.grammar
        # Some drafters draft nothing at the beginning of an output, so the output is said to have begun with the
        # prompt; not with a grammar or a budget for thinking, which begin with the output.
        is_held = grammar is not None or sequence.request.thinking is not None
        text_start, tokens = num_prompt if is_held else 0, tuple(sequence.tokens[:length])
        prefix = replace(like, prompt_tokens=tokens, max_new_tokens=most, grammar=grammar, text_start=text_start)
        found[prefix] = None
    return list(found)


def _draw_once(session: Session, prefix: Request, draws: range) -> list[tuple[list[int], int]]:
    """(tokens, number of new tokens) after the first step from the prefix, for each draw whose step had a draft."""
    requests = [replace(prefix, id=i, return_index=i) for i in draws]
    first: dict[int, tuple[list[int], int]] = {}
    with closing(session.steps(requests)) as steps:
        for sequence, new_tokens in steps:  # some may step again before others begin
            if sequence.request.id not in first:
                had_draft = sequence.stats.num_draft_tokens > 0
                first[sequence.request.id] = (list(sequence.tokens), len(new_tokens) if had_draft else 0)
            if len(first) == len(requests):
                break
    return [(tokens, num_new) for tokens, num_new in first.values() if num_new]
