"""Chat completions: messages of the assistant, whole or in chunks."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from commands.serving.pieces import Chunks, Piece, PieceStream
from commands.serving.replies import TokenTexts, finish_reason, metrics, usage
from commands.serving.schema import ChatRequest
from commands.serving.served import ServedModel
from runtime.serving.answer import Answer


class ChatReply:
    """Writes the answers to one chat request."""

    def __init__(self, served: ServedModel, body: ChatRequest, answers: list[Answer], texts: TokenTexts) -> None:
        self.answers = answers
        self._served, self._body, self._texts = served, body, texts
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def streams(self) -> list[PieceStream]:
        marks = bool(self._body.return_token_kinds)
        return [PieceStream(answer, self._served.tokenizer, marks) for answer in self.answers]

    def document(self) -> dict[str, Any]:
        choices = []
        for index, stream in enumerate(self.streams()):
            if piece := stream.next():
                message = {"role": "assistant", "content": piece.text, "refusal": None}
                choices.append(self._choice(index, piece, "message", message))
        envelope = self._envelope("chat.completion", choices)
        return envelope | {"usage": usage(self.answers, 1), "metrics": metrics(self.answers)}

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last)

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        """First chunk, with the role."""
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
        yield self._chunk([choice | {"logprobs": None, "finish_reason": None}])

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        delta = {"content": piece.text}
        chunk = self._chunk([self._choice(index, piece, "delta", delta)])
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage(self.answers, 1)
        yield chunk

    def _last(self) -> Iterator[dict[str, Any]]:
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([]) | {"usage": usage(self.answers, 1), "metrics": metrics(self.answers)}

    def _choice(self, index: int, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._texts.chat_logprobs(piece.logprobs) if self._body.logprobs else None
        finish = finish_reason(self.answers[index]) if piece.is_last else None
        choice = {"index": index, name: said, "logprobs": logprobs, "finish_reason": finish}
        if self._body.return_token_kinds:
            choice["tokens"] = piece.tokens
        return choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }
