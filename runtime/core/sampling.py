"""Sampling: the distribution that a request's parameters make from the target's logits, and draws from it.

A draw is a function of (random_seed, prompt, return_index, position) and of nothing else. So the same request gets the
same text with any drafter or none, in any batch, with K/V found or computed again. The chosen token is the argmax of
scores plus Gumbel noise, which is a sample. A draft model that uses the same noise chooses the same token almost as
often as their distributions allow (Daliri et al., arXiv 2408.07978). Noise is a function of the position and of the
token, so it need not be computed for tokens that penalties, bans and cuts have excluded.

On a CPU the kernels choose (`csrc/sampling.cpp`), for all positions of a step at once. Elsewhere, and if no kernels
were loaded, transformers' own processors and NumPy do the same, position by position.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.core.grammar import Mask, Matcher
from runtime.core.occurrences import NO_ENTRIES, Adjustments, Occurrences
from runtime.core.params import FIELDS, GREEDY, SamplingConfig, grammar_name
from runtime.core.thinking_budget import Rule, ThinkingBudget
from runtime.util.errors import SpecDecError

Processor = Callable[..., Tensor]
"""Logits processor with transformers' interface: (1, n) int64 prefix, (1, vocab) scores -> (1, vocab) scores."""


NO_RULE = Rule()
_NOTHING = Adjustments(NO_ENTRIES, NO_ENTRIES, [])
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_NUMBERS, _NOT_ASKED = -1, -3  # in place of a token; every other negative one says that no token is left


class NoValidToken(SpecDecError):
    """Exception: no token can be chosen at a position, whatever is drafted."""

    def __init__(
        self, position: int, message: str, *, hint: str, code: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(f"{message}: position {position}", hint=hint, code=code, field=field)
        self.position = position


def no_token_left(position: int, fields: Seq[str]) -> NoValidToken:
    """The error for a position at which `fields`, such as `regex` and `allowed_token_ids`, forbid all tokens."""
    names, leave = [grammar_name(name) for name in fields], "leaves none" if len(fields) == 1 else "leave none"
    return NoValidToken(
        position,
        f"there is no token left to choose, {' and '.join(names) or 'penalties'} {leave}",
        hint=f"relax {' or '.join(f'`{name}`' for name in fields) or 'the penalties'}",
        code="no_token_left",
        field=fields[-1] if fields else None,
    )


def no_numbers(position: int) -> NoValidToken:
    return NoValidToken(
        position,
        "the model's logits are NaN or infinite",
        hint="its weights or this text make numbers too large for its dtype: try another dtype or another text",
    )


def out_of_grammar(position: int, kind: str, reason: str) -> NoValidToken:
    names = {"lark": grammar_name("lark"), "grammar": "the grammar"}
    return NoValidToken(
        position,
        f"{names.get(kind, f'the {kind} grammar')} allows no token: {reason}",
        hint="simplify it; docs/structured-output.md has its limits",
        field=kind,
    )


class OccurrencePenalty:
    """Subtracts `presence` from scores of tokens that occurred from `start` on, and `frequency` for each time."""

    def __init__(self, presence: float, frequency: float, start: int = 0) -> None:
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class LogitBias:
    """Adds the biases of (token, bias) pairs to the scores of their tokens."""

    def __init__(self, biases: Seq[tuple[int, float]]) -> None:
        self.tokens = torch.tensor([token for token, _ in biases])
        self.biases = torch.tensor([bias for _, bias in biases])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        biases = self.biases.to(scores.device, scores.dtype)
        return scores.index_add(1, self.tokens.to(scores.device), biases[None])


class TopP:
    """transformers' `TopPLogitsWarper` with a stable sort: of tokens with equal scores at the cut, the ones with the
    largest ids are kept. transformers' sort leaves open which.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ascending, tokens = torch.sort(scores, dim=-1, stable=True)
        is_cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
        is_cut[:, -1] = False
        return scores.masked_fill(is_cut.scatter(1, tokens, is_cut), -math.inf)


def penalties(params: SamplingConfig, num_prompt_tokens: int = 0) -> list[Processor]:
    """Biases, and processors that depend on earlier tokens, in the order of transformers' `generate`. transformers
    itself has no occurrence penalty.
    """
    if not params.has_penalties:
        return []  # before transformers is imported, which plain requests do not need
    from transformers.generation.logits_process import (
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
    )

    processors: list[Processor] = [LogitBias(params.logit_bias)] if params.logit_bias else []
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        start = 0 if params.penalize_prompt else num_prompt_tokens
        processors.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty, start))
    if params.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    return processors


def warpers(params: SamplingConfig) -> list[Processor]:
    """Processors that cut the distribution, in the order of transformers' `generate`; none for greedy requests."""
    if params.is_greedy:
        return []
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
    )

    processors: list[Processor] = []
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopP(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


class Choosable:
    """Sets logits to -inf at a position: of end ids before an output has `min_tokens` tokens, and of all tokens but
    `allowed_token_ids`. It depends on the position alone, so a draft changes nothing.

    With a prompt of 4 tokens and `min_tokens` 2, the end ids are out at positions 4 and 5, and come back at 6. If a
    grammar leaves only end ids, they may be chosen all the same, since nothing else can follow.
    """

    def __init__(self, params: SamplingConfig, num_prompt_tokens: int, end_ids: Collection[int] = ()) -> None:
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else torch.tensor(sorted(set(allowed)))
        self._ends = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self._first_end = num_prompt_tokens + params.min_tokens if len(self._ends) else 0
        self.is_all = self._allowed is None and self._first_end <= num_prompt_tokens
        self.emptied: set[int] = set()
        """Positions at which `apply` found tokens that could be chosen, and left none."""

    def apply(self, position: int, logits: Tensor, *, in_grammar: bool = False) -> None:
        """Change the logits [vocab] of a position, in place."""
        if self.is_all:
            return
        before = float(logits.max())
        if self._allowed is not None:
            kept = self._allowed[self._allowed < len(logits)].to(logits.device)
            values = logits.index_select(0, kept)
            logits.fill_(-math.inf).index_copy_(0, kept, values)
        if position < self._first_end:
            ends = self._ends[self._ends < len(logits)].to(logits.device)
            values = logits.index_select(0, ends)
            logits.index_fill_(0, ends, -math.inf)
            if in_grammar and float(logits.max()) == -math.inf:
                logits.index_copy_(0, ends, values)
        self.emptied.discard(position)
        if before > -math.inf and float(logits.max()) == -math.inf:
            self.emptied.add(position)


class Sampler:
    """Chooses the tokens of a request. Identical requests get the same tokens unless their `return_index` differs."""

    def __init__(
        self,
        params: SamplingConfig,
        prompt_tokens: Seq[int],
        return_index: int = 0,
        matcher: Matcher | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self.is_greedy = params.is_greedy
        self.matcher = matcher
        """State of the output in its grammar; None without a grammar."""
        self.budget: ThinkingBudget | None = None
        """Budget for thinking; None without one."""
        self._params, self._num_prompt_tokens = params, len(prompt_tokens)
        self._choosable = Choosable(params, len(prompt_tokens), end_ids)
        identity = repr((params.random_seed, return_index, tuple(prompt_tokens)))
        self._key = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self.rules = (
            *(float(params.is_greedy), params.temperature, params.top_k, params.top_p, params.min_p),
            *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        )
        """The kernels' `Rules` for this request."""

    @cached_property
    def _penalties(self) -> list[Processor]:
        return penalties(self._params, self._num_prompt_tokens)

    @cached_property
    def _warpers(self) -> list[Processor]:
        return warpers(self._params)

    @cached_property
    def _occurrences(self) -> Occurrences | None:
        """Token counts; None if choices depend on the logits alone."""
        return Occurrences(self._params, self._num_prompt_tokens) if self._params.has_penalties else None

    def adjustments(self, prefix: list[int], draft_tokens: Seq[int]) -> Iterable[Adjustments]:
        """Score adjustments after `prefix`, and after each token of a draft that follows it."""
        if self._occurrences is None:
            return itertools.repeat(_NOTHING, len(draft_tokens) + 1)
        return self._occurrences.at(prefix, draft_tokens)

    def legal(self, prefix: list[int], draft_tokens: Seq[int], logits: Tensor, *, in_place: bool = False) -> Tensor:
        """[draft_len + 1, vocab] logits after `prefix` and after each token of a draft; -inf where the grammar, the
        budget for thinking, `min_tokens` or `allowed_token_ids` forbid a token.
        """
        if not self.is_held and self._choosable.is_all:
            return logits
        with torch.inference_mode():  # as the step, whose logits could not be written to elsewhere
            logits = logits if in_place else logits.clone()
            masks = [None] * len(logits) if self.matcher is None else self.matcher.allowed(prefix, draft_tokens)
            rules = [NO_RULE] * len(logits) if self.budget is None else self.budget.rules(prefix, draft_tokens)
            for position, (row, mask, rule) in enumerate(zip(logits, masks, rules, strict=True), start=len(prefix)):
                if mask is not None:
                    _apply_mask(mask, row)
                apply_rule(rule, row)
                self._choosable.apply(position, row, in_grammar=self.matcher is not None)
        return logits

    @property
    def is_held(self) -> bool:
        """True if a grammar or a budget for thinking decides which tokens may come next."""
        return self.matcher is not None or self.budget is not None

    def num_legal(self, prefix: Seq[int], draft_tokens: Seq[int]) -> int:
        """Number of a draft's tokens before the first that the grammar or the budget for thinking forbids."""
        num = len(draft_tokens) if self.matcher is None else self.matcher.num_legal(prefix, draft_tokens)
        return num if self.budget is None else self.budget.num_legal(prefix, draft_tokens[:num])

    def forced(self, prefix: Seq[int], drafted: Seq[int]) -> list[int]:
        """The tokens that must follow `prefix` and a draft; empty if there is a choice."""
        if self.budget is not None and (tokens := self.budget.forced(prefix, drafted)):
            return tokens
        return [] if self.matcher is None else self.matcher.forced(prefix, drafted)

    def no_choice(self, code: int, position: int) -> NoValidToken:
        """Reason for an error code that kernels return instead of a token."""
        if self.matcher is not None and self.matcher.error is not None:
            return out_of_grammar(position, self.matcher.kind, self.matcher.error)
        if position in self._choosable.emptied:
            return self._no_token_left(position)
        return no_numbers(position) if code == _NO_NUMBERS else self._no_token_left(position)

    def _no_token_left(self, position: int) -> NoValidToken:
        own = [] if self.matcher is None else [self.matcher.kind]
        forbidding = [name for name, (_, field) in FIELDS.items() if field.can_forbid_all]
        given = [name for name in forbidding if getattr(self._params, name) != getattr(GREEDY, name)]
        return no_token_left(position, [*own, *given])

    def noise_key(self, position: int) -> int:
        """64-bit key of a position's noise; the noise is unused in greedy decoding."""
        return 0 if self.is_greedy else self._number(position, "noise")

    def scores(self, prefix: list[int], logits: Tensor) -> Tensor:
        """Scores float32 [vocab] after penalties, bans and cuts, from `logits` [vocab]; -inf for tokens that cannot be
        chosen. NoValidToken if no token can be chosen. A logit of -inf is never chosen.
        """
        if have_kernels(logits):
            kept: tuple[Tensor, Tensor] = torch.ops.specdec.scores(
                *kernel_arguments([Positions(self, prefix, [], logits[None])])
            )
            if (code := int(kept[1])) < 0:
                raise self.no_choice(code, len(prefix))
            return kept[0][0]
        scores = self.legal(prefix, [], logits[None]).float()
        if not math.isfinite(scores.max()):
            raise self.no_choice(_NO_NUMBERS, len(prefix))
        if self._penalties:
            scores = _apply(self._penalties, torch.tensor([prefix], device=logits.device), scores)
        if self._warpers:
            scores = _apply(self._warpers, torch.empty((1, 0), dtype=torch.int64, device=logits.device), scores)
        if not math.isfinite(scores.max()):
            raise self._no_token_left(len(prefix))
        return scores[0]

    def probs(self, prefix: list[int], logits: Tensor) -> Tensor:
        """Distribution float64 [vocab] of the token after `prefix`; one-hot for a greedy request."""
        scores = self.scores(prefix, logits)
        if self.is_greedy:
            return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
        numbers, left = _left(scores)
        weights, probs = np.exp(numbers - numbers.max()), np.zeros(len(scores))
        probs[left] = weights / weights.sum()
        return torch.from_numpy(probs).to(scores.device)

    def choose(self, prefix: list[int], logits: Tensor) -> int:
        """The request's own token after `prefix`: the argmax of the scores, with the position's noise for a sample."""
        return next(iter(choose_all([Positions(self, prefix, [], logits[None])])[0]))

    @property
    def looks_back(self) -> bool:
        """True if a choice depends on earlier tokens, and not only on the logits and the position."""
        return self.is_held or self._occurrences is not None

    def choose_each(self, prefix: list[int], logits: Tensor) -> Iterator[int]:
        """Tokens from `prefix` on, by logits [positions, vocab]; only for requests whose choices do not look back."""
        places = [Positions(self, [*prefix, *[0] * i], [], row[None]) for i, row in enumerate(logits)]
        for chosen in choose_all(places):
            yield next(chosen)

    def ranking(self, prefix: list[int], logits: Tensor) -> Tensor:
        """Scores [vocab], with the position's noise unless the request is greedy; `choose` takes the largest."""
        scores = self.scores(prefix, logits)
        if self.is_greedy:
            return scores
        numbers, left = _left(scores)
        noise, ranking = gumbel(self.noise_key(len(prefix)), left.astype(np.uint32)), np.full(len(scores), -np.inf)
        ranking[left] = numbers - numbers.max() + noise
        return torch.from_numpy(ranking).to(scores.device)

    def margin(self, prefix: list[int], logits: Tensor, token: int, other: int) -> float | None:
        """Difference of the `logits` [vocab] of two tokens after `prefix`, with the noise of sampling; None if one of
        them cannot be chosen.
        """
        ranking, temperature = self.ranking(prefix, logits), 1.0 if self.is_greedy else self._params.temperature
        margin = float(ranking[token] - ranking[other]) * temperature
        return margin if math.isfinite(margin) else None

    def choices(self, prefix: list[int], draft_tokens: Seq[int], logits: Tensor) -> Iterator[int]:
        """The request's own tokens after `prefix` and after each token of a draft, from `logits` [draft_len + 1,
        vocab], without the kernels. Each token is computed when it is asked for, unless all are plain argmaxes.
        """
        if self.is_greedy and not self._params.has_penalties:
            yield from self._argmaxes(prefix, self.legal(prefix, draft_tokens, logits))
            return
        prefix = list(prefix)
        for row, next_token in zip(logits, [*draft_tokens, None], strict=True):
            yield int(self.ranking(prefix, row).argmax())
            prefix += [] if next_token is None else [next_token]

    def _argmaxes(self, prefix: list[int], logits: Tensor) -> Iterator[int]:
        """Argmax of each row. On a CPU NumPy computes it: torch takes the numbers one after another."""
        if logits.device.type == "cpu":
            rows = logits.float().numpy()
            tokens = rows.argmax(axis=-1).tolist()
            is_number = [math.isfinite(row[token]) for row, token in zip(rows, tokens, strict=True)]
        else:
            chosen = logits.argmax(dim=-1)
            is_number = logits.gather(-1, chosen[:, None])[:, 0].isfinite().tolist()
            tokens = chosen.tolist()
        for row, token in enumerate(tokens):
            if not is_number[row]:
                raise self.no_choice(_NO_NUMBERS, len(prefix) + row)
            yield token

    def draft_uniform(self, position: int, start: int) -> float:
        """Uniform number for drawing a draft's token; it differs between drafts that begin at different positions
        `start`. Tokens that were drafted before and rejected may decide whether and how much is drafted now
        (`runtime.drafters`). If their random numbers were used again, drafts would not follow their distribution.
        """
        return self.uniform(position, f"draft from {start}")

    def accept_uniform(self, position: int, start: int) -> float:
        """Uniform number to accept the tokens before `position` of the draft from `start` on, as `draft_uniform`."""
        return self.uniform(position, f"accept from {start}")

    def uniform(self, position: int, purpose: str) -> float:
        """Uniform number in [0, 1), the same for the same arguments. It has 52 bits, so that its product with a sum of
        probabilities stays below the sum.
        """
        return (self._number(position, purpose) >> 12) * 2.0**-52

    def _number(self, position: int, purpose: str) -> int:
        """64 random bits, the same for the same arguments."""
        digest = hashlib.blake2b(f"{position} {purpose}".encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _apply_mask(mask: Mask, logits: Tensor) -> None:
    """Set logits [vocab] of forbidden tokens to -inf, by functions for which torch wakes no threads."""
    indices = torch.from_numpy(mask.indices).to(logits.device)
    if mask.forbids:
        logits.index_fill_(0, indices, -math.inf)
    else:
        values = logits.index_select(0, indices)
        logits.fill_(-math.inf).index_copy_(0, indices, values)


def apply_rule(rule: Rule, logits: Tensor) -> None:
    """Set logits [vocab] of all tokens that the rule excludes to -inf. A forced token that a grammar has excluded
    changes nothing, and neither does a forbidden token if it is the only one left.
    """
    if rule.unfinished is not None:
        logits[: len(rule.unfinished)].masked_fill_(torch.from_numpy(rule.unfinished).to(logits.device), -math.inf)
    if rule.forced is not None and float(value := logits[rule.forced].clone()) > -math.inf:
        logits.fill_(-math.inf)[rule.forced] = value
    if rule.forbidden is not None:
        value = logits[rule.forbidden].clone()
        logits[rule.forbidden] = -math.inf
        if float(logits.max()) == -math.inf:
            logits[rule.forbidden] = value


def _left(scores: Tensor) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Scores and ids of the tokens that can be chosen; by NumPy, since waking torch's threads takes longer."""
    numbers = scores.cpu().numpy()
    left = np.flatnonzero(np.isfinite(numbers))
    return numbers[left].astype(np.float64), left


@dataclass(frozen=True)
class Positions:
    """Positions at which a request chooses tokens: after a prefix, and after each token of a draft."""

    sampler: Sampler
    prefix: list[int]
    draft_tokens: Seq[int]
    logits: Tensor
    """Logits [draft_len + 1, vocab]."""
    is_spare: bool = False
    """True if the logits may be overwritten: a copy takes longer than applying a grammar."""


def choose_all(asked: Seq[Positions]) -> list[Iterator[int]]:
    """Choose each request's tokens at its positions. After the first token that differs from the draft, tokens may be
    missing. NoValidToken is raised when the token of a position without a choice is asked for.
    """
    if not all(have_kernels(positions.logits) for positions in asked):
        return [one.sampler.choices(one.prefix, one.draft_tokens, one.logits) for one in asked]
    if not asked:
        return []
    draft_tokens = torch.tensor([token for one in asked for token in (*one.draft_tokens, -1)])
    tokens = iter(torch.ops.specdec.choose(*kernel_arguments(asked), draft_tokens).tolist())
    chosen = [list(itertools.islice(tokens, len(one.logits))) for one in asked]
    return [_checked(of_one, one) for of_one, one in zip(chosen, asked, strict=True)]


def _checked(tokens: list[int], asked: Positions) -> Iterator[int]:
    for position, token in enumerate(tokens, start=len(asked.prefix)):
        if token == _NOT_ASKED:
            return
        if token < 0:
            raise asked.sampler.no_choice(token, position)
        yield token


def have_kernels(logits: Tensor) -> bool:
    """True if an engine of this process has loaded kernels that accept the logits."""
    is_taken = logits.device.type == "cpu" and logits.dtype in _DTYPES and logits.stride(-1) == 1
    return is_taken and hasattr(torch.ops.specdec, "choose")


def kernel_arguments(asked: Seq[Positions]) -> tuple[list[Tensor], *tuple[Tensor, ...]]:
    """Arguments of the kernels for these positions."""
    keys, bounds, bans = list[int](), list[tuple[int, ...]](), list[int]()
    entries, num_entries = list[NDArray[np.int32]](), 0
    for one in asked:
        own_start = num_entries
        for row, adjustments in enumerate(one.sampler.adjustments(one.prefix, one.draft_tokens)):
            if row == 0:
                entries.append(adjustments.entries)
                num_entries += len(adjustments.entries)
            own = own_start, own_start + len(adjustments.entries)
            later = num_entries, num_entries + len(adjustments.later)
            bounds.append((*own, *later, len(bans), len(bans) + len(adjustments.bans)))
            entries.append(adjustments.later)
            num_entries += len(adjustments.later)
            bans += adjustments.bans
            keys.append(one.sampler.noise_key(len(one.prefix) + row))
    rules = [one.sampler.rules for one in asked for _ in range(len(one.draft_tokens) + 1)]
    arrays = (
        np.array(rules, np.float64),
        np.array(keys, np.uint64).view(np.int64),
        np.concatenate(entries),
        np.array(bans, np.int32),
        np.array(bounds, np.int64),
    )
    legal = [one.sampler.legal(one.prefix, one.draft_tokens, one.logits, in_place=one.is_spare) for one in asked]
    return legal, *map(torch.from_numpy, arrays)


def draw(weights: Tensor, uniform: float) -> int:
    """Index drawn by `uniform` from weights float64 [vocab], which need not add up to 1 (inverse CDF). An index with
    weight 0 is never drawn. The weights are added up on the CPU, one after another, so that the sums never decrease; a
    GPU adds up in parallel. SpecDecError if their sum is 0, infinite or NaN.
    """
    sums = weights.cpu().cumsum(dim=-1)
    total = float(sums[-1])
    if not 0 < total < math.inf:
        raise SpecDecError(f"no token can be drawn by these weights, their sum is: {total}")
    return int(torch.searchsorted(sums, uniform * total, right=True))


def _apply(processors: Iterable[Processor], prefix: Tensor, scores: Tensor) -> Tensor:
    for processor in processors:
        scores = processor(prefix, scores)
    return scores


def gumbel(key: int, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Gumbel noise of each token, from the 64 bits of its position's key: -log(-log(1 - v)) for 52-bit v in (0, 1).

    `noise.h` of the kernels computes the same. Integers are exact. Two libraries may round the last bit of a logarithm
    differently, but that decides only between two tokens whose scores and noise are equal to 15 digits. Large noise
    comes from small v, which are odd multiples of 1.1e-16, so probabilities down to 1e-15 are drawn correctly.
    """
    first, second = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    upper, lower = _bits(tokens, first, second), _bits(tokens, second, first)
    bits = (upper.astype(np.uint64) << np.uint64(32) | lower) >> np.uint64(12)
    v = (2 * bits + 1).astype(np.float64) * 2.0**-53
    return -np.log(-np.log(1.0 - v))


def _bits(tokens: NDArray[np.uint32], first: np.uint32, second: np.uint32) -> NDArray[np.uint32]:
    """32 bits for each token, from the halves of the key; with the halves exchanged, 32 other bits."""
    return _mixed(_mixed(tokens ^ first) ^ second)


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A permutation of 32-bit numbers: changing one bit of x changes every bit of the result about half the time.

    It has two rounds of shifting and multiplying, with the constants that Wellons' search found to be least biased
    (github.com/skeeto/hash-prospector).
    """
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x735A2D97)
    return x ^ x >> np.uint32(15)
