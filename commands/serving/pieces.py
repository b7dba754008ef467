"""An answer as it grows: its text in pieces, with log-probabilities and kinds of tokens where they are asked for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from runtime.evaluation.steps import TokenKind, token_kinds
from runtime.serving.answer import Answer
from runtime.stats import TokenLogprobs
from runtime.text import TextStream, stop_words_of
from runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """New part of an answer. `logprobs` are of the tokens whose text begins in it, `starts` where they do.

    `starts` counts characters of the answer. Of tokens that a stop word cut off nothing is told.
    """

    text: str
    logprobs: list[TokenLogprobs]
    starts: list[int]
    tokens: list[dict[str, str]]
    is_last: bool


@dataclass(frozen=True)
class Chunks:
    """Format of a stream's chunks: the first ones, one per piece, and the last ones."""

    first: Callable[[int], Iterable[dict[str, Any]]]
    of_piece: Callable[[int, Piece], Iterable[dict[str, Any]]]
    last: Callable[[], Iterable[dict[str, Any]]]


@dataclass
class PieceStream:
    """The pieces of one answer, one for each time it is looked at."""

    answer: Answer
    tokenizer: Tokenizer
    marks_tokens: bool = False
    _text: TextStream = field(init=False)
    _num_read: int = 0
    _num_told: int = 0
    _is_over: bool = False

    def __post_init__(self) -> None:
        request = self.answer.request
        self._text = TextStream(self.tokenizer, stop_words_of(request), request.prompt_tokens)

    def next(self) -> Piece | None:
        """New part since the last call; None if there is none, or it was already over."""
        progress = self.answer.progress
        if self._is_over or (progress.num_tokens == self._num_read and not progress.is_over):
            return None
        self._is_over = progress.is_over
        tokens = self.answer.output_tokens
        start, self._num_read = self._num_read, len(tokens)
        marked = self._marked(tokens, start, progress.num_steps) if self.marks_tokens else []
        # With marks all of it has been read, and nothing is left.
        text = "".join(one["text"] for one in marked) + self._text.next_piece(tokens, finished=self._is_over)
        first, self._num_told = self._num_told, self._text.num_begun
        logprobs = self.answer.sequence.logprobs[first : self._num_told]
        starts = self._text.starts[first : first + len(logprobs)]
        return Piece(text, logprobs, starts, marked, self._is_over)

    def _marked(self, tokens: list[int], start: int, num_steps: int) -> list[dict[str, str]]:
        """A text and a kind for each new token; text that was held back comes with the token that let it go."""
        stats = self.answer.sequence.stats
        drafted, accepted = stats.per_step_drafted[:num_steps], stats.per_step_accepted[:num_steps]
        kinds: list[TokenKind] = [kind for step in token_kinds(drafted, accepted, len(tokens)) for kind in step]
        marked = []
        for end in range(start + 1, len(tokens) + 1):
            is_last = self._is_over and end == len(tokens)
            text = self._text.next_piece(tokens[:end], finished=is_last)
            marked.append({"text": text, "kind": kinds[end - 1]})
        return marked
