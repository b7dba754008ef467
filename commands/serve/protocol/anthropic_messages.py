"""Anthropic's Messages, as Claude Code uses them: bodies become chat requests, and answers are written as messages."""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic_core import from_json

from commands.serve.protocol.completions import call_id, chat_streams
from commands.serve.protocol.conversations import has_effort
from commands.serve.protocol.replies import Chunks, Piece, PieceStream, receipt_key, usage
from commands.serve.protocol.schema import (
    AnthropicBlock,
    AnthropicMessage,
    ChatRequest,
    CountRequest,
    Forms,
    MessagesRequest,
    OutputConfig,
    text_of,
    validate_chat,
)
from commands.serve.served import ServedModel
from runtime.core.params import GrammarKind, names_in
from runtime.loop.serving import RequestHandle
from runtime.text.text import decode

_FORMS = get_args(GrammarKind)
_ACCOUNTING = "x-anthropic-billing-header:"
_CHOICES = {"auto": None, "any": "required", "none": "none"}


def chat_of_messages(served: ServedModel, body: CountRequest) -> ChatRequest:
    """The chat request that is equivalent to a request for a message."""
    said: list[dict[str, Any]] = []
    if system := _system(body):
        said.append({"role": "system", "content": system, "place": "system"})
    for i, message in enumerate(body.messages):
        said += [one | {"place": f"messages.{i}"} for one in _messages(message)]
    chat: dict[str, Any] = {"messages": said, "tools": _tools(body)}
    if (choice := body.tool_choice) is not None:
        if choice.type == "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
        else:
            chat["tool_choice"] = _CHOICES[choice.type]
        chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesRequest):
        in_chat = names_in("chat")
        named = {in_chat[name]: in_body for name, in_body in names_in("messages").items() if name not in _FORMS}
        chat |= {name: getattr(body, name) for name in Forms.model_fields}
        config = body.output_config or OutputConfig()
        if (form := config.format or body.output_format) is not None:
            chat["response_format"] = form.document
        if config.effort is not None and has_effort(served.template_text):
            chat["reasoning_effort"] = config.effort
        chat |= {name: getattr(body, in_body) for name, in_body in named.items()}
        chat |= _budget(served, body)
        chat |= {name: getattr(body, name) for name in ("stream", "priority", "cache_salt", "speculative")}
        chat |= {"stop": body.stop_sequences or None, "user": body.metadata and body.metadata.user_id}
    asked = validate_chat(chat)
    asked._takes_what_fits = True
    return asked


def _budget(served: ServedModel, body: MessagesRequest) -> dict[str, int]:
    """Budget for thinking, as a field of a chat request. Claude Code sends `thinking` to any model; for a model that
    does not think the field is ignored.
    """
    budget = body.budget_in_chat
    is_anthropics = all(name.startswith("thinking.") for name in body.budgets)
    return {} if is_anthropics and served.reasoning_format is None else budget


def _system(body: CountRequest) -> str:
    """System message of the body. A line that Claude Code adds for accounting is dropped: it would make the beginning
    of each conversation different.
    """
    if isinstance(body.system, str):
        return body.system
    return _joined(part.text for part in body.system or () if not part.text.startswith(_ACCOUNTING))


def _tools(body: CountRequest) -> list[dict[str, Any]] | None:
    """Tools that the client runs. Tools of Anthropic's servers, which have another type, are left out."""
    keys = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    own = [tool for tool in body.tools or () if tool.get("type") in (None, "custom")]
    functions = [{key: tool[name] for key, name in keys.items() if tool.get(name) is not None} for tool in own]
    return [{"type": "function", "function": function} for function in functions] or None


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message of blocks as chat messages: one message with calls, or the tools' results followed by a text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = [block.text or "" for block in message.content if block.type == "text"]
    if message.role != "assistant":
        texts = _joined(blocks)
        gave = [_gave(block) for block in message.content if block.type == "tool_result"]
        return [*gave, *([{"role": message.role, "content": texts}] if texts or not gave else [])]
    texts = "".join(blocks)
    said: dict[str, Any] = {"role": "assistant", "content": texts}
    if thought := "".join(block.thinking or "" for block in message.content if block.type == "thinking"):
        said["reasoning_content"] = thought
    if calls := [_call(block) for block in message.content if block.type == "tool_use"]:
        said["tool_calls"] = calls
    return [said]


def _joined(texts: Iterable[str]) -> str:
    """Join texts of a message by empty lines: a client may add blocks of its own to the user's text."""
    return "\n\n".join(text for text in texts if text)


def _gave(block: AnthropicBlock) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}


def _call(block: AnthropicBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


class MessagesReply:
    """Writes the answer to a request for a message."""

    def __init__(
        self, served: ServedModel, body: MessagesRequest, chat: ChatRequest, answers: list[RequestHandle]
    ) -> None:
        self.answers = answers
        self._served, self._body, self._chat = served, body, chat
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False
        self._num_calls = 0

    def streams(self) -> list[PieceStream]:
        return chat_streams(self._served, self._chat, self.answers)

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last, lambda error: [error.anthropic_body], has_names=True)

    def document(self) -> dict[str, Any]:
        (stream,) = self.streams()
        if piece := stream.next():
            for _ in self._of_piece(0, piece):
                pass
        return self._envelope() | {"content": self._blocks, **self._end(), "usage": self._usage(), **self._receipt()}

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        message = self._envelope() | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": self._usage() | {"output_tokens": 0}}}

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        for kind, text in piece.said:
            if kind == "call":
                yield from self._close()
                call = {"id": call_id(self.answers[0], self._num_calls), "name": text, "input": {}}
                self._num_calls += 1
                yield from self._open({"type": "tool_use", **call})
            elif kind == "arguments":
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            else:
                block_type = "text" if kind == "content" else "thinking"  # and the key of its text
                if not self._is_open or self._blocks[-1]["type"] != block_type:
                    yield from self._close()
                    signature = {"signature": ""} if block_type == "thinking" else {}
                    yield from self._open({"type": block_type, block_type: "", **signature})
                self._blocks[-1][block_type] += text
                yield self._delta({"type": f"{block_type}_delta", block_type: text})
        if piece.is_last:
            if not self._blocks:
                yield from self._open({"type": "text", "text": ""})
            yield from self._close()

    def _last(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage(), **self._receipt()}
        yield {"type": "message_stop"}

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._is_open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"], self._arguments = _input(self._arguments), ""
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _end(self) -> dict[str, Any]:
        answer = self.answers[0]
        word = None
        match answer.progress.finish_reason:
            case "length":
                is_full = answer.request.max_new_tokens < self._body.max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case "stop" if word := self._stop_word(answer):
                reason = "stop_sequence"
            case _:
                reason = "tool_use" if self._num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": word}

    def _receipt(self) -> dict[str, Any]:
        return receipt_key(self._served, self.answers[0])

    def _stop_word(self, answer: RequestHandle) -> str | None:
        """The stop word that ended the text."""
        text = decode(self._served.tokenizer, answer.output_tokens, answer.request.prompt_tokens)
        return next((word for word in self._body.stop_sequences or () if word in text), None)

    def _usage(self) -> dict[str, Any]:
        """Numbers of tokens. Tokens found in the K/V cache are counted apart."""
        counts = usage(self.answers, 1)
        num_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counts["completion_tokens"],
        }

    def _envelope(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._served.name}


def _input(arguments: str) -> Any:
    """A call's arguments as an object. If the answer was cut off in the arguments, the object has the part that came:
    clients of the stream have the same.
    """
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
