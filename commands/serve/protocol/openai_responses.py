"""OpenAI's Responses, as Codex and `responses.create` use them: bodies become chat requests, and answers are written as
responses.
"""

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from commands.serve.errors import HTTPError
from commands.serve.protocol.completions import call_id, chat_streams
from commands.serve.protocol.conversations import has_effort
from commands.serve.protocol.replies import Chunks, Piece, PieceStream, is_cut_call, receipt_key, usage
from commands.serve.protocol.schema import (
    Budgets,
    ChatRequest,
    Generation,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    ResponsesRequest,
    text_of,
    validate_chat,
)
from commands.serve.served import ServedModel
from runtime.core.params import names_in
from runtime.loop.serving import RequestHandle

_MOST_STORED, _MOST_STORED_CHARACTERS = 1000, 64 << 20
_OWN = {"model", "stream", "stream_options", "max_tokens", "max_output_tokens", *Budgets.model_fields}
_PASSED_ON = frozenset({*Generation.model_fields, *names_in("responses").values()}) - _OWN
"""Fields of generation that mean the same in a chat request."""


class ResponseStore:
    """The latest responses, with the messages that a later request may continue. Their number and their characters are
    limited.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def add(self, document: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        size = len(json.dumps([document, messages], ensure_ascii=False))
        with self._lock:
            self._held[document["id"]] = document, messages, size
            self._size += size
            while len(self._held) > _MOST_STORED or self._size > _MOST_STORED_CHARACTERS:
                self._size -= self._held.popitem(last=False)[1][2]

    def document(self, response_id: str) -> dict[str, Any]:
        return self._find(response_id)[0]

    def messages(self, response_id: str) -> list[dict[str, Any]]:
        """Messages of the response that a request continues by its `previous_response_id`."""
        return self._find(response_id, "previous_response_id")[1]

    def delete(self, response_id: str) -> None:
        size = self._find(response_id)[2]
        with self._lock:
            if self._held.pop(response_id, None) is not None:
                self._size -= size

    def _find(self, response_id: str, param: str = "response_id") -> tuple[dict[str, Any], list[dict[str, Any]], int]:
        with self._lock:
            found = self._held.get(response_id)
        if found is None:
            what = f"no such response is kept (the server keeps the last {_MOST_STORED}): {response_id[:80]}"
            code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
            raise HTTPError(404, what, param=param, code=code)
        return found


def chat_of_responses(served: ServedModel, body: ResponsesRequest, said: list[dict[str, Any]]) -> ChatRequest:
    """The chat request that is equivalent to a request for a response, with the messages of `messages_of`."""
    if body.instructions:
        said = [{"role": "system", "content": body.instructions, "place": "instructions"}, *said]
    if not said:
        raise HTTPError(400, "`input` is empty", param="input", code="invalid_value")
    chat = {name: getattr(body, name) for name in body.model_fields_set & _PASSED_ON}
    chat |= body.budget_in_chat
    chat |= {"messages": _merged(said), "stream": body.stream, "max_completion_tokens": body.max_output_tokens}
    chat |= {"parallel_tool_calls": body.parallel_tool_calls, "chat_template_kwargs": body.chat_template_kwargs}
    chat |= _tools(body)
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = body.text.format.document
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None and (effort == "none" or (served.has_chat_template and has_effort(served.template_text))):
        chat["reasoning_effort"] = effort  # clients send it to any model
    return validate_chat(chat)


def messages_of(body: ResponsesRequest, store: ResponseStore) -> list[dict[str, Any]]:
    """The conversation before the answer, without instructions. Each message has its path in the client's body."""
    kept = [] if body.previous_response_id is None else store.messages(body.previous_response_id)
    said = [one | {"place": "previous_response_id"} for one in kept]
    if isinstance(body.input, str):
        return [*said, {"role": "user", "content": body.input, "place": "input"}]
    for i, item in enumerate(body.input):
        place = f"input.{i}"
        match item:
            case InputCall():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(said, place).setdefault("tool_calls", []).append(call)
            case InputCallOutput():
                answer = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                said.append(answer | {"place": place})
            case InputReasoning():
                thought = text_of(item.content or item.summary)
                said.append({"role": "assistant", "reasoning_content": thought, "place": place})
            case InputMessage(role="assistant"):
                _assistant(said, place, is_new=True)["content"] = text_of(item.content)
            case InputMessage():
                said.append({"role": item.role, "content": text_of(item.content), "place": place})
    return [one for one in said if one["role"] != "assistant" or one.get("content") is not None or "tool_calls" in one]


def _assistant(said: list[dict[str, Any]], place: str, *, is_new: bool = False) -> dict[str, Any]:
    """The assistant's message that an item belongs to: neighbouring reasoning, text and calls form one message."""
    last = said[-1] if said and said[-1]["role"] == "assistant" else None
    if last is None or (is_new and ("content" in last or "tool_calls" in last)):
        said.append({"role": "assistant", "place": place})
    else:
        said[-1] = dict(last) | ({"tool_calls": list(last["tool_calls"])} if "tool_calls" in last else {})
    return said[-1]


def _merged(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning into one: many templates accept only one."""
    num_first = next((i for i, one in enumerate(said) if one["role"] not in ("system", "developer")), len(said))
    if num_first < 2:
        return said
    text = "\n\n".join(one["content"] for one in said[:num_first])
    return [{"role": "system", "content": text, "place": said[0]["place"]}, *said[num_first:]]


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """Tools and the choice among them, as fields of a chat request."""
    for i, tool in enumerate(body.tools or ()):
        if not isinstance(tool.get("type"), str):
            raise HTTPError(400, f"tools.{i}.type: it is missing", param="tools", code="invalid_value")
    functions = [tool for tool in body.tools or () if tool["type"] == "function"]
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = [one for one in choice.get("tools") or () if isinstance(one, dict)]
        named = [{"function": one} for one in allowed if one.get("type", "function") == "function"]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}
    elif isinstance(choice, dict):
        if choice.get("type") != "function":
            kind = str(choice.get("type"))[:80]
            raise HTTPError(400, f"`tool_choice` of a type that is not supported: {kind}", param="tool_choice")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    keys = ("name", "description", "parameters", "strict")
    tools = [{"type": "function", "function": {key: tool[key] for key in keys if key in tool}} for tool in functions]
    return {"tools": tools or None, "tool_choice": None if choice == "auto" else choice}


class ResponsesReply:
    """Writes the answer to a request for a response."""

    def __init__(
        self,
        served: ServedModel,
        body: ResponsesRequest,
        chat: ChatRequest,
        answers: list[RequestHandle],
        keep: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    ) -> None:
        """`keep` takes the finished document and its messages, if they are to be stored."""
        self.answers = answers
        self._served, self._body, self._chat, self._keep = served, body, chat, keep
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._num_calls = self._num_events = self._num_thought = 0

    def streams(self) -> list[PieceStream]:
        return chat_streams(self._served, self._chat, self.answers)

    def chunks(self) -> Chunks:
        return Chunks(self._first, self._of_piece, self._last, self._error, has_names=True)

    def document(self) -> dict[str, Any]:
        (stream,) = self.streams()
        if piece := stream.next():
            for _ in self._of_piece(0, piece):
                pass
        return self._finished()

    def _first(self, index: int) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._envelope("in_progress"))
        yield self._event("response.in_progress", response=self._envelope("in_progress"))

    def _of_piece(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        self._num_thought += piece.num_thought
        for kind, text in piece.said:
            if kind == "call":
                yield from self._close()
                yield from self._open(self._call_item(text))
                continue
            of_kind = {"content": "message", "reasoning": "reasoning", "arguments": "function_call"}[kind]
            if not self._is_open or self._items[-1]["type"] != of_kind:
                yield from self._close()
                yield from self._open(self._text_item(of_kind))
            yield from self._add(text)
        if piece.is_last:
            if not self._items:
                yield from self._open(self._text_item("message"))
            yield from self._close()

    def _last(self) -> Iterator[dict[str, Any]]:
        document = self._finished()
        yield self._event(f"response.{document['status']}", response=document)

    def _error(self, error: HTTPError) -> Iterator[dict[str, Any]]:
        failure = {"code": error.code or "server_error", "message": error.message}
        yield self._event("error", **failure, param=error.param)
        yield self._event("response.failed", response=self._envelope("failed") | {"error": failure})

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **values}

    # Items of the output

    def _call_item(self, name: str) -> dict[str, Any]:
        number = self._num_calls
        self._num_calls += 1
        own = {"call_id": call_id(self.answers[0], number), "name": name, "arguments": ""}
        return {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", **own}

    def _text_item(self, kind: str) -> dict[str, Any]:
        if kind == "message":
            return {"type": kind, "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        return {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._is_open = True
        self._items.append(item | {"status": "in_progress"})
        copy = self._items[-1] | ({} if item["type"] == "function_call" else {"content": []})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=copy)
        if item["type"] == "function_call":
            return
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
        self._items[-1]["content"].append(part)
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))

    def _add(self, text: str) -> Iterator[dict[str, Any]]:
        item = self._items[-1]
        match item["type"]:
            case "function_call":
                item["arguments"] += text
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=text)
            case "reasoning":
                item["content"][0]["text"] += text
                yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
            case _:
                item["content"][0]["text"] += text
                place = self._place() | {"content_index": 0, "logprobs": []}
                yield self._event("response.output_text.delta", **place, delta=text)

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._place()
        if item["type"] == "function_call":
            is_cut = is_cut_call(self.answers[0], item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            is_cut = self.answers[0].progress.finish_reason == "length"
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            others: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
            yield self._event(f"response.{kind}.done", **place, content_index=0, text=part["text"], **others)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        item["status"] = "incomplete" if is_cut else "completed"
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    # The document

    def _finished(self) -> dict[str, Any]:
        is_cut = self.answers[0].progress.finish_reason == "length"
        document = self._envelope("incomplete" if is_cut else "completed")
        document |= {"completed_at": int(time.time()), "usage": self._usage()}
        document |= receipt_key(self._served, self.answers[0])
        if is_cut:
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store is not False:
            self._keep(document, self._said())
        return document

    def _said(self) -> list[dict[str, Any]]:
        """The answer as the assistant's next message of the conversation, in a list."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self._items:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            else:
                key = "content" if item["type"] == "message" else "reasoning_content"
                message[key] = message.get(key, "") + item["content"][0]["text"]
        return [message]

    def _usage(self) -> dict[str, Any]:
        counts = usage(self.answers, 1)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": counts["total_tokens"],
        }

    def _envelope(self, status: str) -> dict[str, Any]:
        body, tools = self._body, [tool for tool in self._body.tools or () if tool.get("type") == "function"]
        form = None if body.text is None else body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._served.name,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": False, **tool} for tool in tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
