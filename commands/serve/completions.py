"""Completions: choices of text, whole or in chunks."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from commands.serve.replies import Chunks, Piece, PieceStream, TokenTexts, finish_reason, metrics, usage
from commands.serve.schema import CompletionRequest
from commands.serve.served import ServedModel
from runtime.serving.loop import RequestHandle
from runtime.text import decode, token_starts


class CompletionReply:
    """Writes the answers to one completion request."""

    def __init__(
        self, served: ServedModel, body: CompletionRequest, answers: list[RequestHandle], texts: TokenTexts
    ) -> None:
        self.answers = answers
        self._served, self._body, self._texts = served, body, texts
        self._num_prompts = len(answers) // (body.n or 1)
        self._shows_output = body.max_tokens != 0
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._echoed: dict[int, str] = {}
        self._has_echoed: set[int] = set()

    def streams(self) -> list[PieceStream]:
        marks = bool(self._body.return_token_kinds)
        return [PieceStream(answer, self._served.tokenizer, marks) for answer in self.answers]

    def document(self) -> dict[str, Any]:
        choices = [self._choice(i, piece) for i, stream in enumerate(self.streams()) if (piece := stream.next())]
        if self._body.echo:
            for choice in choices:
                echoed = self._echo_choice(choice["index"])
                choice["text"] = echoed["text"] + choice["text"]
                if (before := echoed["logprobs"]) is not None:
                    choice["logprobs"] = {name: before[name] + choice["logprobs"][name] for name in before}
        return self._envelope(choices) | {"usage": self._usage(), "metrics": metrics(self.answers)}

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last)

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        """Nothing: what is echoed comes with the first piece, when its log-probabilities are known."""
        yield from ()

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if self._body.echo and index not in self._has_echoed:
            self._has_echoed.add(index)
            yield self._envelope([self._echo_choice(index)])
        chunk = self._envelope([self._choice(index, piece)])
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        yield chunk

    def _echo_choice(self, index: int) -> dict[str, Any]:
        answer = self.answers[index]
        logprobs = None if self._body.logprobs is None else self._prompt_logprobs(answer)
        return {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": None}

    def _last(self) -> Iterator[dict[str, Any]]:
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._envelope([]) | {"usage": self._usage(), "metrics": metrics(self.answers)}

    def _usage(self) -> dict[str, Any]:
        return usage(self.answers, self._num_prompts, counts_output=self._shows_output)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        answer = self.answers[index]
        choice: dict[str, Any] = {"index": index, "text": piece.text if self._shows_output else "", "logprobs": None}
        if self._body.logprobs is not None:
            shown = piece.logprobs if self._shows_output else []
            echoed_len = len(self._echo(index))
            offsets = [echoed_len + start for start in piece.starts[: len(shown)]]
            choice["logprobs"] = self._texts.completion_logprobs(shown, [one.token for one in shown], offsets)
        choice["finish_reason"] = finish_reason(answer) if piece.is_last else None
        if self._body.return_token_kinds:
            choice["tokens"] = piece.tokens
        return choice

    def _prompt_logprobs(self, answer: RequestHandle) -> dict[str, Any]:
        tokens = answer.request.prompt_tokens
        starts = token_starts(self._served.tokenizer, tokens)
        return self._texts.completion_logprobs([None, *answer.sequence.prompt_logprobs], tokens, starts)

    def _echo(self, index: int) -> str:
        """The prompt's text, once for all of its answers, if it is to be echoed."""
        number = index * self._num_prompts // len(self.answers)
        if number not in self._echoed:
            tokens = self.answers[index].request.prompt_tokens
            self._echoed[number] = decode(self._served.tokenizer, tokens) if self._body.echo else ""
        return self._echoed[number]
