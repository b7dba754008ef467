"""The nouns of generation: the request, the sequence that answers it, drafts and verdicts.

A sequence is its tokens plus one number, `num_computed`: tokens below it have valid K/V. A step only shortens the tail
of tokens beyond that number, and to reject a draft is to leave `num_computed` as it was.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from runtime.core.block_store import Record
from runtime.core.grammar import CompiledGrammar, Matcher
from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.sampling import NoValidToken, Sampler, have_kernels
from runtime.core.scopes import Scope
from runtime.core.stats import FinishReason, RequestStats, TokenLogprobs
from runtime.core.thinking_budget import Thinking, ThinkingBudget


class StopCheck(Protocol):
    """Finds stop words in generated tokens; made by code that knows the tokenizer."""

    def __call__(self, tokens: list[int], num_prompt_tokens: int) -> bool:
        """True if the last of `tokens` completed a stop word."""
        ...


class Decode(Protocol):
    """Gives the text of generated tokens; made by code that knows the tokenizer."""

    def __call__(self, tokens: list[int], /) -> str: ...


@dataclass(frozen=True)
class Request:
    """Request of a user. Generation ends at one of `end_ids`, at a stop word, or after `max_new_tokens`.

    `return_index` tells sampling requests with the same prompt and the same seed apart.
    """

    id: int
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    stop_check: StopCheck | None = None
    sampling: SamplingConfig = GREEDY
    return_index: int = 0
    keep_logits: bool = False
    num_logprobs: int | None = None
    """Number of most probable tokens whose log-probabilities are kept at each generated token, beside the token's own;
    None to keep none.
    """
    num_prompt_logprobs: int | None = None
    """The same number for each token of the prompt after the first."""
    grammar: CompiledGrammar | None = None
    """Form that the output's text must have."""
    thinking: Thinking | None = None
    """The model's tags of thinking, if thinking has a budget."""
    text_start: int | None = None
    """Index of the output's first token, if a part of the output stands in the prompt already."""
    label: str | None = None
    """User's name for the request, such as a row of a file."""
    shows_special_tokens: bool = False
    """True if the output's text shows special tokens, such as `<think>`."""
    shows_stop: bool = False
    """True if the output's text keeps the stop word, or the shown end id, that ended it."""
    wants_receipt: bool = False
    """True if the output has a receipt (`runtime.proof`)."""
    cache_salt: str | None = None
    """Name of the request's owner. A request finds only keys, values, earlier outputs and old answers of requests with
    the same name; all requests without a name have the owner None.
    """
    scopes: tuple[Scope, ...] = ()
    """Scopes of the request's output beside its owner, the most specific first: a tool before a system prompt."""
    decode: Decode | None = None
    """Function for the text of an output, in which names of called tools are looked for, or None."""

    @property
    def name(self) -> str:
        """Name of the request for errors."""
        return self.label or f"request {self.id}"

    def with_prompt(self, request_id: int, prompt_tokens: Seq[int], return_index: int = 0) -> "Request":
        """The same request with another prompt."""
        return replace(self, id=request_id, prompt_tokens=tuple(prompt_tokens), return_index=return_index)

    @property
    def output_start(self) -> int:
        """Index of the token at which the output begins."""
        return len(self.prompt_tokens) if self.text_start is None else self.text_start

    @property
    def wants_logits(self) -> bool:
        return self.keep_logits or self.num_logprobs is not None


def token_logprobs(logits: Tensor, tokens: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of each token, and of the `num_top` most probable, from logits [tokens, vocab]."""
    num_top, chosen = min(num_top, logits.shape[-1]), torch.tensor(tokens)
    if have_kernels(logits):
        own, ids, values = torch.ops.specdec.logprobs(logits, chosen, num_top)
    else:
        all_logprobs = torch.log_softmax(logits.to("cpu", torch.float32), dim=-1)
        values, ids = all_logprobs.topk(num_top)
        own = all_logprobs.gather(-1, chosen[:, None])[:, 0]
    return [
        TokenLogprobs(token, logprob, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, own.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Draft:
    """A proposal of tokens for a sequence in a step."""

    tokens: list[int]
    probs: Tensor | None = None
    """Distributions [draft_len, vocab] float64 that the tokens were drawn from; None for tokens that were not drawn,
    such as a lookup's.
    """
    match_len: int = field(default=0, compare=False)
    """Number of tokens of the pattern that this draft continues, a measure of a lookup's certainty, or 0."""
    survivals: list[float] | None = field(default=None, compare=False)
    """P(at least 1 accepted), P(at least 2 accepted), ..., if the drafter has learned how often it is right."""
    num_predicted: int = field(default=0, compare=False)
    """Number of first tokens that come from the output that the request predicts."""

    def cut(self, max_len: int) -> "Draft":
        """The first `max_len` tokens. Verification stays exact if that length does not depend on the tokens."""
        if len(self.tokens) <= max_len:
            return self
        probs = None if self.probs is None else self.probs[:max_len]
        return Draft(self.tokens[:max_len], probs, self.match_len, num_predicted=min(self.num_predicted, max_len))


@dataclass(frozen=True)
class VerifyResult:
    """Result of verifying a draft: the number of accepted tokens, then a token of the target's own.

    `next_token` is the recovered token after a rejection, or the bonus token after a draft that was accepted whole.
    """

    num_accepted: int
    next_token: int
    logits: Tensor | None = field(default=None, compare=False)
    """The target's own logits [num_accepted + 1, vocab], if the request keeps them."""


@dataclass
class Sequence:
    """A request that is being answered, or, once it is finished, its result."""

    request: Request
    tokens: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    error: NoValidToken | None = None
    """Reason why the request cannot be continued."""
    logits: list[Tensor] = field(default_factory=list)
    """Generation logits, if requested: for each generated token float32 [vocab] on the CPU."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities for each generated token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities for each prompt token after the first, if requested."""
    state_slot: int = 0
    """Slot of the states of layers without attention; 0 if there is none."""
    is_drawn_by_probs: bool = False
    """True once a draft was verified by probabilities: the output then depends on more than the request's noise."""
    shared_len: int = 0
    """Number of first tokens, also those of another sequence, after which the state is to be kept; 0 for none."""
    kept_states: dict[int, bytes] = field(default_factory=dict)
    """States after certain numbers of its tokens, waiting to be written to disk."""
    unread: list[Record] = field(default_factory=list)
    """Records on disk with its next tokens, which are read before its next step."""
    num_saved: int = 0
    """Number of its whole blocks that were handed over to be written to disk."""

    @classmethod
    def start(cls, request: Request) -> "Sequence":
        sequence = cls(request, list(request.prompt_tokens))
        sequence.stats.start()
        return sequence

    @cached_property
    def sampler(self) -> Sampler:
        request = self.request
        matcher = None
        if request.grammar is not None:
            matcher = Matcher(request.grammar, request.output_start, request.end_ids)
        sampler = Sampler(request.sampling, request.prompt_tokens, request.return_index, matcher, request.end_ids)
        sampler.budget = self._budget()
        return sampler

    def _budget(self) -> ThinkingBudget | None:
        """The budget for thinking; None with a form that leaves no room for thinking, unlike grammars of tool calls."""
        request, budget = self.request, self.request.sampling.thinking_token_budget
        is_form = request.grammar is not None and request.grammar.form.kind != "lark"
        if request.thinking is None or budget is None or is_form:
            return None
        vocab_size = None if request.grammar is None else request.grammar.vocab_size
        return ThinkingBudget(request.thinking, budget, request.prompt_tokens[: request.output_start], vocab_size)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def num_unscored(self) -> int:
        """Number of prompt tokens whose log-probabilities are asked for and not computed yet."""
        if self.request.num_prompt_logprobs is None:
            return 0
        return len(self.request.prompt_tokens) - 1 - len(self.prompt_logprobs)

    @property
    def max_reused(self) -> int:
        """Number of first tokens whose K/V may be reused; tokens that are scored must be computed."""
        return len(self.prompt_logprobs) if self.num_unscored else len(self.tokens) - 1

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def num_remaining(self) -> int:
        return self.request.max_new_tokens - self.num_generated

    @property
    def max_draft_len(self) -> int:
        """Most tokens that a draft may have, so that the budget has room for the target's own token too."""
        return max(self.num_remaining - 1, 0)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt_tokens) :]

    def commit(self, draft: Draft, verdict: VerifyResult) -> list[int]:
        """Append the accepted tokens and the target's own token, cut where generation ends, and count them. The end is
        looked for token by token (end id, stop word, end of the grammar, budget), so that tokens, K/V and counters end
        at the same place. Returns the tokens that were kept.
        """
        start = len(self.tokens)
        for token in [*draft.tokens[: verdict.num_accepted], verdict.next_token]:
            self.tokens.append(token)
            self.finish_reason = self.reason_to_finish()
            if self.finish_reason is not None:
                break
        new_tokens = self.tokens[start:]
        self.num_computed = min(self.num_computed, len(self.tokens))
        if verdict.logits is not None:
            self._keep(verdict.logits[: len(new_tokens)], new_tokens)
        num_accepted = min(verdict.num_accepted, len(new_tokens))
        self.stats.record_step(len(draft.tokens), num_accepted, len(new_tokens))
        self.stats.num_predicted_tokens += draft.num_predicted
        self.stats.num_accepted_predicted_tokens += min(num_accepted, draft.num_predicted)
        if self.finish_reason is not None:
            self.stats.finish()
        return new_tokens

    def _keep(self, logits: Tensor, tokens: list[int]) -> None:
        """Store the requested parts of logits [tokens, vocab]; token i was chosen from row i."""
        if self.request.keep_logits:
            self.logits.extend(logits.to("cpu", torch.float32, copy=True))
        if self.request.num_logprobs is not None:
            self.logprobs += token_logprobs(logits, tokens, self.request.num_logprobs)

    def score(self, logits: Tensor) -> None:
        """Append log-probabilities of the prompt's next n tokens to `prompt_logprobs`, by logits [n, vocab]: row i
        predicts the i-th of these tokens.
        """
        start = len(self.prompt_logprobs) + 1
        tokens = self.request.prompt_tokens[start : start + len(logits)]
        assert self.request.num_prompt_logprobs is not None
        self.prompt_logprobs += token_logprobs(logits, tokens, self.request.num_prompt_logprobs)

    def reason_to_finish(self) -> FinishReason | None:
        """Reason why the output ends with its last token; None if it goes on."""
        if self.tokens[-1] in self.request.end_ids:
            return "end_id"
        stop_check = self.request.stop_check
        if stop_check is not None and stop_check(self.tokens, len(self.request.prompt_tokens)):
            return "stop"
        if self.sampler.matcher is not None and self.sampler.matcher.is_over(self.tokens):
            return "stop"
        return "length" if self.num_remaining <= 0 else None
