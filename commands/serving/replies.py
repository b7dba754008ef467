"""Response bodies: choices, log-probabilities, usage, and speculation metrics."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

from commands.serving.served import ServedModel
from runtime.serving.answer import Answer
from runtime.stats import FinishReason, TokenLogprobs, sum_stats
from runtime.text import decode, encode_text
from runtime.token_text import token_bytes

_LEAST_LOGPROB = -9999.0  # of a token that is never chosen; JSON has no infinity
_FINISH_REASONS: dict[FinishReason, str] = {"end_id": "stop", "stop": "stop", "length": "length"}


def finish_reason(answer: Answer) -> str | None:
    reason = answer.progress.finish_reason
    return None if reason is None else _FINISH_REASONS[reason]


def usage(answers: Seq[Answer], num_prompts: int, *, counts_output: bool = True) -> dict[str, Any]:
    """Tokens of all answers to a request; each prompt once, however many answers it has."""
    n = len(answers) // num_prompts
    num_prompt = sum(len(answer.request.prompt_tokens) for answer in answers[::n])
    num_output = sum(answer.progress.num_tokens for answer in answers) if counts_output else 0
    num_accepted = sum(answer.progress.num_accepted_tokens for answer in answers)
    num_drafted = sum(answer.progress.num_draft_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(a.progress.num_cached_tokens for a in answers[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
            "reasoning_tokens": 0,
        },
    }


def metrics(answers: Seq[Answer]) -> dict[str, Any]:
    """Speculation metrics over all answers to a request, which are finished."""
    stats = sum_stats(answer.sequence.stats for answer in answers)
    accepted = stats.accepted_per_position
    return {
        "speculative_decoding": {
            "num_drafts": stats.num_spec_steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_draft_tokens,
            "acceptance_rate": stats.draft_acceptance_rate,
            "accepted_per_position": accepted + [0] * (len(stats.drafted_per_position) - len(accepted)),
            "tokens_per_step": stats.tokens_per_step,
        }
    }


class TokenTexts:
    """The text of single tokens, as they are in the middle of a text."""

    def __init__(self, served: ServedModel) -> None:
        tokenizer = served.tokenizer
        before = encode_text(tokenizer, "a")

        @lru_cache(maxsize=1 << 16)
        def shown(token: int) -> str:
            return decode(tokenizer, [token], before)

        self._tokenizer, self._shown, self._bytes_of = tokenizer, shown, token_bytes(tokenizer)

    def text_of(self, token: int) -> str:
        """Text of a token; for a special token, which is not shown in texts, its name."""
        return self._shown(token) or str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def completion_logprobs(
        self, logprobs: Seq[TokenLogprobs | None], tokens: Seq[int], offsets: Seq[int]
    ) -> dict[str, Any]:
        """OpenAI's form for completions; None for a prompt's first token, of which nothing is known."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one, offset in zip(tokens, logprobs, offsets, strict=True):
            found["tokens"].append(self.text_of(token))
            found["token_logprobs"].append(None if one is None else _finite(one.logprob))
            found["top_logprobs"].append(None if one is None else self._top(one))
            found["text_offset"].append(offset)
        return found

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """The best first, and the token itself. Of two tokens with one text the better one is shown."""
        top: dict[str, float] = {}
        for token, logprob in (*logprobs.top, (logprobs.token, logprobs.logprob)):
            top.setdefault(self.text_of(token), _finite(logprob))
        return top

    def chat_logprobs(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """OpenAI's form for chat."""
        content = [
            self._entry(one.token, one.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text_of(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": self._bytes(token, text)}

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """Its own, which need not be a text by themselves; of a special token those of its name."""
        if self._bytes_of is None:
            return None if "\ufffd" in text else list(text.encode())
        return list(self._bytes_of(token) or text.encode())


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
