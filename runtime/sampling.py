"""How a request chooses tokens: the distribution its parameters make of the target's logits, and draws from it.

A draw is a function of (random_seed, prompt, return_index, position) and of nothing else. So the same request gets the
same text with any drafter or none, in any batch, with K/V found or computed again. A token is chosen as the argmax of
scores and Gumbel noise, which makes it a sample; a draft model that uses the same noise chooses the same token almost
as often as their distributions allow (Daliri et al., arXiv 2408.07978).
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from runtime.errors import SpecDecError
from runtime.params import GREEDY, SamplingConfig

Purpose = Literal["target", "accept"]
"""What a uniform number is for in rejection sampling. Numbers of one position are independent between purposes."""

Processor = Callable[..., Tensor]
"""As transformers' LogitsProcessor: (1, n) int64 prefix, (1, vocab) scores -> (1, vocab) scores."""


class NoChoice(SpecDecError):
    """No token can be chosen at a position, whatever is drafted."""

    def __init__(self, position: int, message: str, *, hint: str, fact: str | None = None) -> None:
        super().__init__(f"{message}: position {position}", hint=hint, fact=fact)
        self.position = position


def no_token_left(position: int) -> NoChoice:
    return NoChoice(
        position,
        "there is no token left to choose, penalties and bans leave none",
        hint="relax the penalties, no_repeat_ngram_size or bad_words",
        fact="no_token_left",
    )


def no_numbers(position: int) -> NoChoice:
    return NoChoice(
        position,
        "the model's logits are NaN or infinite",
        hint="its weights or this text make numbers too large for its dtype: try another dtype or another text",
    )


class OccurrencePenalty:
    """Subtracts `presence` from the score of a token that occurred, and `frequency` for each time it did.

    Tokens before `start` are not looked at.
    """

    def __init__(self, presence: float, frequency: float, start: int = 0) -> None:
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class LogitBias:
    """Adds to the scores of tokens what (token, bias) pairs say."""

    def __init__(self, biases: Seq[tuple[int, float]]) -> None:
        self.tokens = torch.tensor([token for token, _ in biases])
        self.biases = torch.tensor([bias for _, bias in biases])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        biases = self.biases.to(scores.device, scores.dtype)
        return scores.index_add(1, self.tokens.to(scores.device), biases[None])


def penalties(params: SamplingConfig, num_prompt_tokens: int = 0) -> list[Processor]:
    """Biases, and what depends on the tokens before, in the order of transformers' `generate`.

    It has no occurrence penalty.
    """
    neutral = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "bad_words")
    if all(getattr(params, name) == getattr(GREEDY, name) for name in (*neutral, "logit_bias")):
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
    """What shapes the distribution, in the order of transformers' `generate`; nothing for greedy requests."""
    if params.is_greedy:
        return []
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors: list[Processor] = []
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if 0.0 < params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


class Sampler:
    """Chooses the tokens of one request. Identical requests choose alike unless their `return_index` differs."""

    def __init__(self, params: SamplingConfig, prompt_tokens: Seq[int], return_index: int = 0) -> None:
        self.is_greedy = params.is_greedy
        self._penalties, self._warpers = penalties(params, len(prompt_tokens)), warpers(params)
        identity = repr((params.random_seed, return_index, tuple(prompt_tokens)))
        self._key = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        # An engine of this process has loaded it. Found once: finding it takes twice as long as what it does.
        self._argmax_kernel = torch.ops.specdec.argmax.default if hasattr(torch.ops.specdec, "argmax") else None

    @property
    def is_argmax(self) -> bool:
        """Whether a choice is the argmax of the logits, whatever came before."""
        return self.is_greedy and not self._penalties

    def scores(self, prefix: list[int], logits: Tensor) -> Tensor:
        """(vocab,) float32 after penalties, bans and cuts; -inf for what cannot be chosen. `logits` is (vocab,).

        NoChoice if nothing can. Of logits -inf is one that is never chosen.
        """
        scores = logits[None].float()
        if not math.isfinite(scores.max()):
            raise no_numbers(len(prefix))
        if self._penalties:
            scores = _apply(self._penalties, torch.tensor([prefix], device=logits.device), scores)
        if self._warpers:
            scores = _apply(self._warpers, torch.empty((1, 0), dtype=torch.int64, device=logits.device), scores)
        if not math.isfinite(scores.max()):
            raise no_token_left(len(prefix))
        return scores[0]

    def probs(self, prefix: list[int], logits: Tensor) -> Tensor:
        """(vocab,) float64 distribution of the token after `prefix`; one-hot for a greedy request."""
        scores = self.scores(prefix, logits)
        if self.is_greedy:
            return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
        return torch.softmax(scores.double(), dim=-1)

    def choose(self, prefix: list[int], logits: Tensor) -> int:
        """The request's own token after `prefix`: the argmax, or a sample that depends on nothing but the position."""
        return int(self.ranking(prefix, logits).argmax())

    def ranking(self, prefix: list[int], logits: Tensor) -> Tensor:
        """(vocab,) what `choose` takes the largest of: scores, with the position's noise unless greedy."""
        scores = self.scores(prefix, logits)
        if self.is_greedy:
            return scores
        # torch's generator takes 32 bits of a seed: two of 100,000 positions would have the same noise.
        generator = np.random.Generator(np.random.Philox(key=self._number(len(prefix), "noise")))
        exponential = generator.standard_exponential(len(scores))
        noise = -np.log(np.maximum(exponential, np.finfo(np.float64).tiny))
        return scores.double() + torch.from_numpy(noise).to(scores.device)

    def choices(self, prefix: list[int], logits: Tensor) -> Iterable[int]:
        """The request's own tokens row by row of (n, vocab) logits, each after the prefix and those before it."""
        if self.is_argmax:
            for row, token in enumerate(self._argmaxes(logits)):
                if token < 0:
                    raise no_numbers(len(prefix) + row)
                yield token
            return
        prefix = list(prefix)
        for row in logits:
            token = self.choose(prefix, row)
            yield token
            prefix.append(token)

    def _argmaxes(self, logits: Tensor) -> Iterable[int]:
        """Row by row, -1 where the largest is not finite.

        On a CPU by the kernel or by NumPy: torch looks at one number after the other.
        """
        if logits.device.type != "cpu":
            tokens = logits.argmax(dim=-1)
            return tokens.where(logits.gather(-1, tokens[:, None])[:, 0].isfinite(), -1).tolist()
        if self._argmax_kernel is not None:
            return self._argmax_kernel(logits).tolist()  # type: ignore[no-any-return]
        rows = logits.float().numpy()
        largest = zip(rows, rows.argmax(axis=-1), strict=True)
        return (int(token) if math.isfinite(row[token]) else -1 for row, token in largest)

    def draft_uniform(self, position: int, start: int) -> float:
        """As `uniform`, to draw a draft's token by; another number in each draft, which begins at position `start`.

        What was drafted before, and rejected, may decide whether and how much is drafted now (`runtime.drafters`): were
        its numbers used again, drafts would not follow their distribution.
        """
        return self._uniform(position, f"draft from {start}")

    def uniform(self, position: int, purpose: Purpose) -> float:
        """In [0, 1), the same for the same arguments. 52 bits: times a sum of probabilities it stays below the sum."""
        return self._uniform(position, purpose)

    def _uniform(self, position: int, purpose: str) -> float:
        return (self._number(position, purpose) >> 12) * 2.0**-52

    def _number(self, position: int, purpose: str) -> int:
        """64 bits."""
        digest = hashlib.blake2b(f"{position} {purpose}".encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def draw(weights: Tensor, uniform: float) -> int:
    """Inverse CDF of (vocab,) float64 weights, which need not add up to one. Never a token of weight zero.

    On the CPU, whose sums never decrease; a GPU adds them up in parallel.
    """
    sums = weights.cpu().cumsum(dim=-1)
    total = float(sums[-1])
    if not 0 < total < math.inf:
        raise SpecDecError(f"these are no weights to draw a token by, their sum is: {total}")
    return int(torch.searchsorted(sums, uniform * total, right=True))


def _apply(processors: Iterable[Processor], prefix: Tensor, scores: Tensor) -> Tensor:
    for processor in processors:
        scores = processor(prefix, scores)
    return scores
