"""OpenAI's completions (choices of text) and chat completions (messages with text, reasoning and calls), each sent
whole or in chunks.
"""

import time
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from commands.serve.protocol.conversations import reader_of
from commands.serve.protocol.replies import (
    Chunks,
    Piece,
    PieceStream,
    TokenTexts,
    finish_reason,
    is_cut_call,
    metrics,
    receipt_key,
    usage,
)
from commands.serve.protocol.schema import ChatRequest, CompletionRequest, StreamOptions
from commands.serve.served import ServedModel
from runtime.loop.serving import RequestHandle
from runtime.text.parser import Said
from runtime.text.text import decode, token_starts
from runtime.util.digests import digest


class CompletionReply:
    """Writes the answers to one completion request."""

    def __init__(
        self,
        served: ServedModel,
        body: CompletionRequest,
        answers: list[RequestHandle],
        texts: TokenTexts,
        receipt_name: str | None = None,
    ) -> None:
        self.answers, self.receipt_name = answers, receipt_name
        self._served, self._body, self._texts = served, body, texts
        self._stream_options = body.stream_options or StreamOptions()
        self._num_prompts = len(answers) // (body.n or 1)
        self._shows_output = body.max_tokens != 0
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._echoed: dict[int, str] = {}
        self._has_begun: set[int] = set()

    def streams(self) -> list[PieceStream]:
        marks, ids = bool(self._body.return_token_kinds), bool(self._body.return_token_ids)
        return [PieceStream(answer, self._served.tokenizer, marks, gives_ids=ids) for answer in self.answers]

    def document(self) -> dict[str, Any]:
        choices = [
            self._choice(i, piece) | self._prompt_ids(i)
            for i, stream in enumerate(self.streams())
            if (piece := stream.next())
        ]
        if self._body.echo:
            for choice in choices:
                echoed = self._echo_choice(choice["index"])
                choice["text"] = echoed["text"] + choice["text"]
                if (before := echoed["logprobs"]) is not None:
                    choice["logprobs"] = {name: before[name] + choice["logprobs"][name] for name in before}
        return self._envelope(choices) | self._counts()

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last)

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        """The first chunk of an answer: none, since an echoed prompt comes with the first piece, when its
        log-probabilities are known.
        """
        yield from ()

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        is_first = index not in self._has_begun
        self._has_begun.add(index)
        if is_first and self._body.echo:
            yield self._envelope([self._echo_choice(index)])
        prompt_ids = self._prompt_ids(index) if is_first else {}
        chunk = self._envelope([self._choice(index, piece) | prompt_ids])
        yield chunk | ({"usage": self._usage()} if self._stream_options.continuous_usage_stats else {})

    def _echo_choice(self, index: int) -> dict[str, Any]:
        answer = self.answers[index]
        logprobs = None if self._body.logprobs is None else self._prompt_logprobs(answer)
        return {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": None}

    def _last(self) -> Iterator[dict[str, Any]]:
        if self._stream_options.include_usage:
            yield self._envelope([]) | self._counts()

    def _counts(self) -> dict[str, Any]:
        return {"usage": self._usage(), "metrics": metrics(self.answers, self._served.llm.engine.max_draft_len)}

    def _usage(self) -> dict[str, Any]:
        return usage(self.answers, self._num_prompts, counts_output=self._shows_output)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint.name,
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
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids if self._shows_output else []
        return choice | (receipt_key(self._served, answer, self.receipt_name) if piece.is_last else {})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt's ids, if the request asks for them; in a stream they are in the first chunk of each choice."""
        ids = list(self.answers[index].request.prompt_tokens)
        return {"prompt_token_ids": ids} if self._body.return_token_ids else {}

    def _prompt_logprobs(self, answer: RequestHandle) -> dict[str, Any]:
        tokens = answer.request.prompt_tokens
        starts = token_starts(self._served.tokenizer, tokens)
        return self._texts.completion_logprobs([None, *answer.sequence.prompt_logprobs], tokens, starts)

    def _echo(self, index: int) -> str:
        """The prompt's text for a choice; empty unless the request asks for an echo."""
        number = index * self._num_prompts // len(self.answers)
        if number not in self._echoed:
            tokens = self.answers[index].request.prompt_tokens
            self._echoed[number] = decode(self._served.tokenizer, tokens) if self._body.echo else ""
        return self._echoed[number]


def chat_streams(served: ServedModel, body: ChatRequest, answers: Seq[RequestHandle]) -> list[PieceStream]:
    """The answers as text, reasoning and calls."""
    marks, ids = bool(body.return_token_kinds), bool(body.return_token_ids)
    readers = [reader_of(served, body, answer.request) for answer in answers]
    return [
        PieceStream(answer, served.tokenizer, marks, *reader, gives_ids=ids)
        for answer, reader in zip(answers, readers, strict=True)
    ]


def call_id(answer: RequestHandle, index: int) -> str:
    """An id for a call; the same for the same answer to the same request with the same seed."""
    request = answer.request
    told = [request.sampling.random_seed, request.return_index, index, *request.prompt_tokens]
    return f"call_{digest(map(str, told))[:24]}"


class ChatReply:
    """Writes the answers to one chat request."""

    def __init__(
        self,
        served: ServedModel,
        body: ChatRequest,
        answers: list[RequestHandle],
        texts: TokenTexts,
        receipt_name: str | None = None,
    ) -> None:
        self.answers, self.receipt_name = answers, receipt_name
        self._served, self._body, self._texts = served, body, texts
        self._stream_options = body.stream_options or StreamOptions()
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._num_calls = [0] * len(answers)
        self._arguments = [""] * len(answers)
        """Arguments of the last call of each answer."""
        self._reasoning = [""] * len(answers)
        self._num_thought = 0

    def streams(self) -> list[PieceStream]:
        return chat_streams(self._served, self._body, self.answers)

    def document(self) -> dict[str, Any]:
        choices = []
        for index, stream in enumerate(self.streams()):
            if piece := stream.next():
                choices.append(self._choice(index, piece, "message", self._message(index, piece)))
        return self._envelope("chat.completion", choices) | self._prompt_ids() | self._counts()

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt's ids, if the request asks for them; in a stream they are in the first chunk."""
        ids = list(self.answers[0].request.prompt_tokens)
        return {"prompt_token_ids": ids} if self._body.return_token_ids else {}

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last)

    def _message(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        calls: list[dict[str, Any]] = []
        self._num_thought += piece.num_thought
        for kind, text in piece.said:
            if kind == "call":
                calls.append(self._call(index, text))
            elif kind == "arguments":
                calls[-1]["function"]["arguments"] += text
                self._arguments[index] += text
            elif kind == "reasoning":
                self._reasoning[index] += text
            else:
                message["content"] += text
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if self._reasoning[index] and self._body.include_reasoning is not False:
            message["reasoning_content"] = self._reasoning[index]
        return message

    def _call(self, index: int, name: str) -> dict[str, Any]:
        """A new call of an answer, without arguments yet."""
        number = self._num_calls[index]
        self._num_calls[index] += 1
        self._arguments[index] = ""
        function = {"name": name, "arguments": ""}
        return {"id": call_id(self.answers[index], number), "type": "function", "function": function}

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        """First chunk, with the role."""
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
        prompt_ids = self._prompt_ids() if index == 0 else {}
        yield self._chunk([choice | {"logprobs": None, "finish_reason": None}]) | prompt_ids

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        self._num_thought += piece.num_thought
        deltas = [delta for said in piece.said if (delta := self._delta(index, said)) is not None]
        # Log-probabilities and kinds of tokens come with the first chunk, the reason of the end with the last.
        for i, delta in enumerate(deltas or [{}]):
            shown = replace(piece, is_last=piece.is_last and i >= len(deltas) - 1)
            if i > 0:
                shown = replace(shown, logprobs=[], tokens=[], token_ids=[])
            chunk = self._chunk([self._choice(index, shown, "delta", delta)])
            yield chunk | ({"usage": self._usage()} if self._stream_options.continuous_usage_stats else {})

    def _delta(self, index: int, said: Said) -> dict[str, Any] | None:
        match said.kind:
            case "content":
                return {"content": said.text}
            case "reasoning":
                self._reasoning[index] += said.text
                return None if self._body.include_reasoning is False else {"reasoning_content": said.text}
            case "call":
                return {"tool_calls": [{"index": self._num_calls[index], **self._call(index, said.text)}]}
            case "arguments":
                self._arguments[index] += said.text
                return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": said.text}}]}

    def _last(self) -> Iterator[dict[str, Any]]:
        if self._stream_options.include_usage:
            yield self._chunk([]) | self._counts()

    def _counts(self) -> dict[str, Any]:
        return {"usage": self._usage(), "metrics": metrics(self.answers, self._served.llm.engine.max_draft_len)}

    def _usage(self) -> dict[str, Any]:
        counts = usage(self.answers, 1)
        counts["completion_tokens_details"]["reasoning_tokens"] = self._num_thought
        return counts

    def _choice(self, index: int, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._texts.chat_logprobs(piece.logprobs) if self._body.logprobs else None
        finish = finish_reason(self.answers[index]) if piece.is_last else None
        if finish == "stop" and self._num_calls[index] and not is_cut_call(self.answers[index], self._arguments[index]):
            finish = "tool_calls"
        choice = {"index": index, name: said, "logprobs": logprobs, "finish_reason": finish}
        if self._body.return_token_kinds:
            choice["tokens"] = piece.tokens
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice | (receipt_key(self._served, self.answers[index], self.receipt_name) if piece.is_last else {})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint.name,
            "choices": choices,
        }
