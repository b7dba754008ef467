"""An answer as it grows: its text in pieces, with log-probabilities and kinds of tokens if the request
asks for them.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from commands.serve.errors import HTTPError
from commands.serve.served import ServedModel
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.grammar import Matcher
from runtime.core.stats import FinishReason, TokenLogprobs, sum_stats
from runtime.loop.serving import RequestHandle
from runtime.measure.text_steps import TokenKind, forced_places, token_kinds
from runtime.proof.receipts import receipt_of
from runtime.text.parser import Parser, Said, SpecialTokens, joined
from runtime.text.text import TextStream, decode, encode_text
from runtime.text.token_text import token_bytes


@dataclass(frozen=True)
class Piece:
    """New part of an answer. `logprobs` belong to the tokens whose text begins in this part. `starts` has the positions
    at which these tokens begin, in characters of the answer. Tokens that a stop word cut off are left out.
    """

    text: str
    logprobs: list[TokenLogprobs]
    starts: list[int]
    tokens: list[dict[str, Any]]
    is_last: bool
    said: list[Said]
    """The text as the parts of a message; all of it is content if the answer is parsed as text alone."""
    num_thought: int
    """Number of tokens that were found to be reasoning since the last piece."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the new tokens, if the request asks for them, including tokens whose text is not shown."""

    @property
    def tells_something(self) -> bool:
        return bool(self.said or self.logprobs or self.tokens or self.token_ids or self.is_last)


@dataclass(frozen=True)
class Chunks:
    """Format of a stream's chunks: the first chunks, a chunk for each piece, and the last chunks."""

    first: Callable[[int], Iterable[dict[str, Any]]]
    of_piece: Callable[[int, Piece], Iterable[dict[str, Any]]]
    last: Callable[[], Iterable[dict[str, Any]]]
    error: Callable[[HTTPError], Iterable[dict[str, Any]]] = lambda error: [error.body]
    has_names: bool = False
    """True if events have their `type` as a name, and the stream has no end mark."""


@dataclass
class PieceStream:
    """The pieces of an answer: a piece each time that `next` is called."""

    answer: RequestHandle
    tokenizer: Tokenizer
    marks_tokens: bool = False
    parser: Parser | None = None
    """Parser of the answer; None for text alone."""
    special: SpecialTokens | None = None
    """Special tokens that the parser reads."""
    gives_ids: bool = False
    """True if pieces have `token_ids`."""
    _text: TextStream = field(init=False)
    _matcher: Matcher | None = None
    """A second matcher of the output's grammar: the loop's own belongs to another thread."""
    _num_read: int = 0
    _num_told: int = 0
    _is_over: bool = False
    _num_fed: int = 0
    """Characters that the parser has read."""
    _num_fed_tokens: int = 0
    _num_pending: int = 0
    """Number of tokens that the parser has read since its last report."""
    _num_thought: int = 0

    def __post_init__(self) -> None:
        request = self.answer.request
        shown = {} if self.special is None else self.special.shown
        if self.marks_tokens and request.grammar is not None:
            self._matcher = Matcher(request.grammar, 0, request.end_ids)
        self._text = TextStream.of_request(self.tokenizer, request, shown)

    def next(self) -> Piece | None:
        """The part of the answer that came since the last call; None if nothing came, or the answer had
        ended before.
        """
        progress = self.answer.progress
        if self._is_over or (progress.num_tokens == self._num_read and not progress.is_over):
            return None
        self._is_over = progress.is_over
        tokens = self.answer.output_tokens
        start, self._num_read = self._num_read, len(tokens)
        marked = self._marked(tokens, start, progress.num_steps) if self.marks_tokens else []
        # With marks the parser has read the whole text, and nothing is left.
        text = "".join(one["text"] for one in marked) + self._text.next_piece(tokens, finished=self._is_over)
        if self.special is not None:
            marked = [one | {"text": self.special.named(one["text"])} for one in marked]
        first, self._num_told = self._num_told, self._text.num_begun
        logprobs = self.answer.sequence.logprobs[first : self._num_told]
        starts = self._text.starts[first : first + len(logprobs)]
        num_thought = self._num_thought
        said = self._said(text)
        ids = tokens[start:] if self.gives_ids else []
        return Piece(text, logprobs, starts, marked, self._is_over, said, self._num_thought - num_thought, ids)

    def _said(self, text: str) -> list[Said]:
        if self.parser is None:
            return [Said("content", text)] if text else []
        is_cut = self.answer.progress.finish_reason in ("length", "stop")  # a stop word may be in the middle of a call
        said = [one for part in self._by_tokens(text) for one in self._counted(self.parser.feed(part))]
        return joined([*said, *(self._counted(self.parser.end(is_cut=is_cut)) if self._is_over else ())])

    def _by_tokens(self, text: str) -> Iterator[str]:
        """The text, cut where its tokens begin; `_num_pending` grows by the tokens of each part."""
        starts, end = self._text.starts, self._num_fed + len(text)
        while self._num_fed < end:
            first, last = self._num_fed, bisect_right(starts, self._num_fed)
            self._num_pending += max(last - self._num_fed_tokens, 0)
            self._num_fed_tokens = max(last, self._num_fed_tokens)
            self._num_fed = min(starts[last], end) if last < len(starts) else end
            yield text[first - end :][: self._num_fed - first]

    def _counted(self, said: list[Said]) -> list[Said]:
        """Assign tokens to the parser's reports: all tokens read since its last report have the kind of the new
        report.
        """
        if any(one.kind == "reasoning" for one in said):
            self._num_thought += self._num_pending
        if said:
            self._num_pending = 0
        return said

    def _marked(self, tokens: list[int], start: int, num_steps: int) -> list[dict[str, Any]]:
        """Text and kind of each new token, and whether the grammar forced it. Text that was held back comes with the
        token that released it.
        """
        forced = set() if self._matcher is None else forced_places(self._matcher, (), tokens, start)
        stats = self.answer.sequence.stats
        drafted, accepted = stats.per_step_drafted[:num_steps], stats.per_step_accepted[:num_steps]
        kinds: list[TokenKind] = [kind for step in token_kinds(drafted, accepted, len(tokens)) for kind in step]
        marked = []
        for end in range(start + 1, len(tokens) + 1):
            is_last = self._is_over and end == len(tokens)
            text = self._text.next_piece(tokens[:end], finished=is_last)
            marked.append({"text": text, "kind": kinds[end - 1], "forced": end - 1 in forced})
        return marked


_LEAST_LOGPROB = -9999.0  # for a token that is never chosen: JSON has no infinity
_FINISH_REASONS: dict[FinishReason, str] = {"end_id": "stop", "stop": "stop", "length": "length"}


def receipt_key(served: ServedModel, answer: RequestHandle, name: str | None = None) -> dict[str, Any]:
    """The key `receipt` for a finished answer whose request asks for a receipt; otherwise no key."""
    if not answer.request.wants_receipt or answer.progress.finish_reason is None:
        return {}
    return {"receipt": receipt_of(answer.sequence, served.fingerprint, name=name).as_json()}


def is_cut_call(answer: RequestHandle, arguments: str) -> bool:
    """True if a call's arguments are incomplete: there was no more room, or they contained a stop word."""
    if answer.progress.finish_reason == "end_id":
        return False
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return True
    return False


def finish_reason(answer: RequestHandle) -> str | None:
    reason = answer.progress.finish_reason
    return None if reason is None else _FINISH_REASONS[reason]


def usage(answers: Seq[RequestHandle], num_prompts: int, *, counts_output: bool = True) -> dict[str, Any]:
    """Token counts over all answers to a request. Each prompt counts once, however many answers it has. OpenAI's counts
    of prediction tokens are those drafted from the prediction.
    """
    n = len(answers) // num_prompts
    num_prompt = sum(len(answer.request.prompt_tokens) for answer in answers[::n])
    num_output = sum(answer.progress.num_tokens for answer in answers) if counts_output else 0
    num_accepted = sum(answer.progress.num_accepted_predicted_tokens for answer in answers)
    num_predicted = sum(answer.progress.num_predicted_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(a.progress.num_cached_tokens for a in answers[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_predicted - num_accepted,
            "reasoning_tokens": 0,
        },
    }


def metrics(answers: Seq[RequestHandle], max_draft_len: int) -> dict[str, Any]:
    """Speculation metrics over all answers to a request, which have ended: vLLM's keys, and further keys."""
    stats = sum_stats(answer.sequence.stats for answer in answers)
    accepted = stats.accepted_per_position
    return {
        "speculative_decoding": {
            **stats.speculation_record(max_draft_len),
            "num_drafts": stats.num_spec_steps,
            "num_accepted_tokens": stats.num_accepted_draft_tokens,
            "acceptance_rate": stats.draft_acceptance_rate,
            "accepted_per_position": accepted + [0] * (len(stats.drafted_per_position) - len(accepted)),
            "drafted_per_position": stats.drafted_per_position,
            "tokens_per_step": stats.tokens_per_step,
        }
    }


class TokenTexts:
    """The text of single tokens, as they appear in the middle of a text."""

    def __init__(self, served: ServedModel) -> None:
        tokenizer = served.tokenizer
        before = encode_text(tokenizer, "a")

        @lru_cache(maxsize=1 << 16)
        def shown(token: int) -> str:
            return decode(tokenizer, [token], before)

        self._tokenizer, self._shown, self._bytes_of = tokenizer, shown, token_bytes(tokenizer)

    def text_of(self, token: int) -> str:
        """Text of a token; for a special token, which texts do not show, its name."""
        return self._shown(token) or str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def completion_logprobs(
        self, logprobs: Seq[TokenLogprobs | None], tokens: Seq[int], offsets: Seq[int]
    ) -> dict[str, Any]:
        """Log-probabilities in OpenAI's form for completions; None for a prompt's first token, which
        nothing predicts.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one, offset in zip(tokens, logprobs, offsets, strict=True):
            found["tokens"].append(self._name(token))
            found["token_logprobs"].append(None if one is None else _finite(one.logprob))
            found["top_logprobs"].append(None if one is None else self._top(one))
            found["text_offset"].append(offset)
        return found

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities of the most probable tokens, then the chosen token's, by text. Of two tokens with the same
        text, the more probable is shown.
        """
        top: dict[str, float] = {}
        for token, logprob in (*logprobs.top, (logprobs.token, logprobs.logprob)):
            top.setdefault(self._name(token), _finite(logprob))
        return top

    def _name(self, token: int) -> str:
        r"""A token's text. For a token with a part of a character, its bytes in OpenAI's form: `bytes:\xe1`."""
        text = self.text_of(token)
        own = self._bytes_of(token) if "\ufffd" in text and self._bytes_of is not None else None
        if not own or own == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def chat_logprobs(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities in OpenAI's form for chat."""
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
        """The token's own bytes, which may be a part of a character; for a special token the bytes of its name."""
        if self._bytes_of is None:
            return None if "\ufffd" in text else list(text.encode())
        return list(self._bytes_of(token) or text.encode())


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
