"""Results: of a run, finished sequences and times; of the Python API, whole outputs and their pieces."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runtime.core.request import Sequence
from runtime.core.stats import FinishReason, LoopTimes, RequestStats, TokenLogprobs, ratio, sum_stats
from runtime.util.errors import RequestError, SpecDecError


@dataclass(frozen=True)
class Generation:
    """Result of a run: finished sequences, and the parts of the time."""

    sequences: list[Sequence]
    times: LoopTimes

    @property
    def work(self) -> "Work":
        return Work(self.times.wall_s, sum(sequence.num_generated for sequence in self.sequences))

    def total(self, max_draft_len: int) -> dict[str, Any]:
        """Counts over all requests, the rates derived from them, and the times."""
        return total_record(self.sequences, self.times, max_draft_len)


class Interrupted(KeyboardInterrupt):
    """Exception for Ctrl-C, with the sequences that had finished."""

    def __init__(self, finished: Generation) -> None:
        super().__init__()
        self.finished = finished


class Unanswered(SpecDecError):
    """Exception for a request that failed, with the results of the other requests."""

    def __init__(self, error: RequestError, finished: Generation) -> None:
        super().__init__(error.message, hint=error.hint, code=error.code, **error.values)
        self.finished = finished


@dataclass(frozen=True)
class Work:
    """Seconds that a number of tokens took."""

    wall_s: float
    num_tokens: int

    def speedup_over(self, other: "Work") -> float:
        """Ratio of the other's time for a token to this time; of wall times, if both made as many tokens."""
        return other.wall_s / self.wall_s * (self.num_tokens / other.num_tokens)


def total_record(sequences: Seq[Sequence], times: LoopTimes, max_draft_len: int) -> dict[str, Any]:
    """The `total` of a document: counts, rates and times."""
    total = sum_stats(sequence.stats for sequence in sequences)
    return {
        "num_requests": len(sequences),
        **total.counts(max_draft_len),
        "wall_s": times.wall_s,
        "output_tokens_per_second": ratio(total.num_generated_tokens, times.wall_s),
        "draft_time_s": times.draft_time_s,
        "draft_model_time_s": times.draft_model_time_s,
        "target_time_s": times.target_time_s,
        "host_time_s": times.host_time_s,
        "num_iterations": times.num_iterations,
        **{
            f"{part}_time_per_step_s": ratio(getattr(times, f"{part}_time_s"), times.num_iterations)
            for part in ("draft", "draft_model", "target", "host")
        },
    }


@dataclass(frozen=True)
class Output:
    """An output of a prompt, like vLLM's `CompletionOutput`."""

    index: int
    """Index among the `n` outputs of the prompt."""
    text: str | None
    """Text without end ids, up to the stop word that ended it; None without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None
    """Log-probabilities of each token, if `SamplingParams.logprobs` asks for them."""
    generation_logits: Tensor | None = None
    """Logits [tokens, vocab] float32, if `SamplingParams.return_generation_logits` asks for them."""
    receipt: dict[str, Any] | None = None
    """JSON object with everything that the tokens follow from, if `SamplingParams.receipt` asks for it."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities, if `SamplingParams.logprobs` asks for them."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `n` outputs, as in vLLM. Its own `text`, `token_ids` and so on are the first output's.

    A list of results is as long as the list of prompts: `zip(prompts, results)` pairs them whatever `n` is.
    """

    request_id: str
    """Index of the prompt in the call, as text such as "0"; with `AsyncLLM`, the id that was given."""
    prompt: str | None
    """The prompt's text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Output]
    finished: bool = True
    """True unless it is a result of `AsyncLLM` before the request's last."""

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stats(self) -> RequestStats:
        return self.outputs[0].stats

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def generation_logits(self) -> Tensor | None:
        return self.outputs[0].generation_logits

    @property
    def receipt(self) -> dict[str, Any] | None:
        return self.outputs[0].receipt


@dataclass(frozen=True)
class Piece:
    """Tokens that one step adds to an output. Printed, it is its text."""

    text: str
    """Text of the tokens. Empty if they end inside a character or may begin a stop word, and without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Reason why the output ended; None except in its last piece."""
    stats: RequestStats
    """Statistics of the request so far."""
    logprobs: Seq[TokenLogprobs] | None
    """Log-probabilities of these tokens, if `SamplingParams.logprobs` asks for them."""
    prompt_index: int = 0
    """Index of the prompt."""
    index: int = 0
    """Index of the output among the prompt's `n`."""
    receipt: dict[str, Any] | None = None
    """Receipt, as in `Output`; only in the last piece, if `SamplingParams.receipt` asks for it."""

    def __str__(self) -> str:
        return self.text
