"""Results of the Python API: whole outputs, and pieces of outputs as they come."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from runtime.stats import FinishReason, RequestStats, TokenLogprobs


@dataclass(frozen=True)
class Output:
    """Output of a prompt."""

    index: int
    """Among the `n` outputs of its prompt."""
    prompt: str | None
    """None where it was given as token ids."""
    prompt_token_ids: list[int]
    text: str | None
    """Without end ids and what follows a stop word; None without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None
    """Log-probabilities of each token, if `SamplingParams.logprobs` asks for them."""
    generation_logits: Tensor | None = None
    """(num_tokens, vocab) float32, where `SamplingParams.return_generation_logits` asks for them."""


@dataclass(frozen=True)
class Piece:
    """Tokens that one step adds to an output. Printed, it is its text."""

    text: str
    """Empty where the step's tokens end inside a character or may begin a stop word, and without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None but in the last piece of an output."""
    stats: RequestStats
    """Statistics of the request so far."""
    logprobs: Seq[TokenLogprobs] | None
    """Log-probabilities of these tokens, if `SamplingParams.logprobs` asks for them."""
    prompt_index: int = 0
    """Index of the prompt."""
    index: int = 0
    """Index of the output among the prompt's `n`."""

    def __str__(self) -> str:
        return self.text
