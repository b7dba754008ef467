"""Conversations from clients' bodies: messages and tools for the template, and the form of the answer."""

import ctypes
import json
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from commands.serve.errors import HTTPError, as_http_error
from commands.serve.protocol.schema import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    Conversation,
    FunctionTool,
    MessageCall,
    NamedTool,
)
from commands.serve.served import ServedModel
from runtime.core.form_prover import FormsBusy
from runtime.core.grammar import CompiledGrammar
from runtime.core.params import Grammar
from runtime.core.request import Request
from runtime.text.call_formats import JsonCall, Tool, ToolFormat
from runtime.text.call_grammar import Calls, SpecialIds, call_grammar, schema_grammar
from runtime.text.chat import Message, TemplateInputs
from runtime.text.parser import OutputForm, OutputParser, Parser, SpecialTokens
from runtime.text.prompt import with_tools_as_text
from runtime.text.response_template import TemplateParser
from runtime.text.text import encode_text
from runtime.text.thinking_tags import prompt_end
from runtime.util.errors import SpecDecError

_TEMPLATE_S = 2.0
_CHECKS_S = 2.0
"""Seconds for finding the tool whose schema cannot be used."""


def chat_tokens(served: ServedModel, body: Conversation) -> list[int]:
    """The tokens of the conversation, by the tokenizer's chat template."""
    if not served.has_chat_template:
        raise HTTPError(400, "the model's tokenizer has no chat template: send a prompt to /v1/completions instead")
    template = served.llm.chat_template
    text = template.tool_text if body.shown_tools else template.text
    messages, inputs = _messages(body), _inputs(text, body)
    size = sum(len(one["content"]) for one in messages) + len(json.dumps(inputs.tools))
    served.check_text_len(size, body.said_in)
    if served.refuses_special_tokens:
        served.check_has_no_special_token([messages, inputs.tools, inputs.documents, inputs.variables], body.said_in)
    messages = _as_template_has_it(text, messages)
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (inputs.tools or has_calls) and not template.knows_tools:
        form = served.tool_format
        is_writable = form is not None and isinstance(form.call, JsonCall)
        if not is_writable and not body.callable_tools and not has_calls:
            inputs = replace(inputs, tools=())  # nothing is lost: no tool may be called
        elif form is None:
            what = (
                "the model's chat template knows no tools: take a model that was trained for them, or start the "
                "server with `--tool-call-parser`, such as `hermes`"
            )
            raise HTTPError(400, what, param="tools" if inputs.tools else body.said_in, code="no_tools")
        else:
            try:
                messages = with_tools_as_text(messages, inputs.tools, form)
            except SpecDecError as error:
                raise as_http_error(error, "tools") from None
            inputs = replace(inputs, tools=())
    if "alternate" in text:
        messages = _alternating(_with_system_first(messages))
    elif "System message must be at the beginning" in text:
        messages = _with_system_first(messages)
    try:
        template.check_variables(inputs.variables)
    except SpecDecError as error:
        raise as_http_error(error, "chat_template_kwargs") from None
    try:
        with served.turn.rendering(), ended_after(_TEMPLATE_S):
            prompt = template.render(messages, inputs)
        return template.tokens(prompt)
    except SpecDecError as error:
        raise as_http_error(error, body.said_in) from None
    except TimeoutError:
        reason = f"the model's chat template takes longer than {_TEMPLATE_S:g} s for these messages"
        raise HTTPError(400, reason, param=body.said_in, code="template_timeout") from None


def _inputs(template: str, body: Conversation) -> TemplateInputs:
    variables = dict(body.chat_template_kwargs or {})
    if body.documents and "documents" not in template:
        what = "this server does not support `documents`: the model's chat template has no use for them"
        raise HTTPError(400, what, param="documents", code="unsupported")
    if body.reasoning_effort is not None:
        if body.reasoning_effort != "none" and not has_effort(template):
            what = "this server does not support `reasoning_effort`: the model's chat template has no use for it"
            raise HTTPError(400, what, param="reasoning_effort", code="unsupported")
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    tools = [_tool_document(tool) for tool in body.shown_tools]
    if body.continue_final_message and body.add_generation_prompt:
        what = "`continue_final_message` and `add_generation_prompt` cannot both be true"
        raise HTTPError(400, what, param="add_generation_prompt", code="invalid_value")
    return TemplateInputs(tools, body.documents or (), variables, body.params_of_conversation)


def lacks_switch(served: ServedModel, body: ChatRequest) -> bool:
    """True if the request turns thinking off and the model's template has no variable for that; a budget of 0 then has
    the same effect.
    """
    template = served.llm.chat_template.tool_text if body.shown_tools else served.template_text
    is_off = (body.chat_template_kwargs or {}).get("enable_thinking") is False and "enable_thinking" not in template
    is_none = body.reasoning_effort == "none" and not has_effort(template) and "enable_thinking" not in template
    return (is_off or is_none) and served.llm.reasoning_format is not None


def has_effort(template: str) -> bool:
    """True if the chat template uses `reasoning_effort`."""
    return "reasoning_effort" in template


def _tool_document(tool: FunctionTool) -> dict[str, Any]:
    """A tool in the form that templates expect."""
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function | {"parameters": parameters}}


def _messages(body: Conversation) -> list[Message]:
    """Messages in the form that templates expect; HTTPError for a call without a result, or a result without a call."""
    said: list[Message] = []
    names: dict[str, str] = {}
    unanswered: list[str | None] = []
    for i, message in enumerate(body.messages):
        place = body.place_of(i)
        if message.role == "tool":
            if not unanswered:
                raise HTTPError(400, f"{place}: the tool's answer belongs to no call", param=body.said_in)
            if message.tool_call_id is not None and message.tool_call_id not in unanswered and None not in unanswered:
                what = f"{place}: an answer of a tool to a call that is not there: {message.tool_call_id[:80]}"
                raise HTTPError(400, what, param=body.said_in)
            found = message.tool_call_id if message.tool_call_id in unanswered else unanswered[0]
            unanswered.remove(found)
            answer: Message = {"role": "tool", "content": message.text}
            if message.tool_call_id is not None:
                answer["tool_call_id"] = message.tool_call_id
            if name := message.name or names.get(found or ""):
                answer["name"] = name
            said.append(answer)
            continue
        _check_answered(unanswered, place, body.said_in)
        said.append(_message(message, place, body.said_in))
        unanswered = [call.id for call in message.tool_calls or ()]
        names = {call.id: call.function.name for call in message.tool_calls or () if call.id is not None}
    _check_answered(unanswered, body.place_of(len(body.messages)), body.said_in)
    return said


def _check_answered(unanswered: list[str | None], place: str, field: str) -> None:
    if unanswered:
        call = f" {unanswered[0][:80]}" if unanswered[0] else ""
        raise HTTPError(400, f"{place}: the tool call{call} before this message has no answer", param=field)


def _message(message: ChatMessage, place: str, field: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    said: Message = {"role": role, "content": message.text}
    if message.tool_calls:
        said["tool_calls"] = [_call_document(call, place, field) for call in message.tool_calls]
    if thought := message.reasoning_content or message.reasoning:
        said["reasoning_content"] = thought
    return said


def _call_document(call: MessageCall, place: str, field: str) -> dict[str, Any]:
    """A call for the template, with its arguments as an object, or as text if they were cut off."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) and arguments.strip():
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments and not isinstance(arguments, dict | str):
        what = f"{place}: the arguments of a call of `{call.function.name[:80]}` are no JSON object: {arguments!r:.80}"
        raise HTTPError(400, what, param=field)
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _as_template_has_it(template: str, messages: list[Message]) -> list[Message]:
    """Messages adapted to the template: DeepSeek's template recognises a call by a message without content, and
    gpt-oss's reads the key `thinking`.
    """
    has_none = "content'] is none" in template or "content is none" in template
    has_thinking = ".thinking" in template and "reasoning_content" not in template
    changed: list[Message] = []
    for message in messages:
        one: dict[str, Any] = dict(message)
        if has_none and "tool_calls" in one and not one["content"]:
            one["content"] = None
        if has_thinking and "reasoning_content" in one:
            one["thinking"] = one.pop("reasoning_content")
        changed.append(one)  # type: ignore[arg-type]
    return changed


def _with_system_first(messages: list[Message]) -> list[Message]:
    """System messages behind the first message become user messages, for templates that refuse them: agents send
    reminders.
    """
    return [
        {"role": "user", "content": message["content"]} if i and message["role"] == "system" else message
        for i, message in enumerate(messages)
    ]


def _alternating(messages: list[Message]) -> list[Message]:
    """Join neighbouring user messages, for templates that refuse several in a row: agents send them."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {"role": "user", "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def tools_of(body: Conversation) -> tuple[Tool, ...]:
    """The functions that may be called. HTTPError for two functions with the same name, for a `tool_choice` that names
    none of the functions, and for `required` without functions.
    """
    tools = [
        Tool(one.function.name, one.function.parameters or {}, bool(one.function.strict)) for one in body.callable_tools
    ]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise HTTPError(400, f"tools: two tools have the same name: {twice}", param="tools", code="invalid_value")
    choice = body.call_choice
    if isinstance(body.tool_choice, AllowedTools):
        allowed = [one.function.name for one in body.tool_choice.allowed_tools.tools]
        if unknown := [name for name in allowed if name not in names]:
            what = f"`tool_choice` allows a function that is none of the `tools`: {unknown[0]}"
            raise HTTPError(400, what, param="tool_choice", code="invalid_value")
    if choice == "required" and not tools:
        raise HTTPError(400, "`tool_choice` needs `tools`: required", param="tool_choice", code="invalid_value")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
        if not tools:
            what = f"`tool_choice` names none of the `tools`: {choice.function.name}"
            raise HTTPError(400, what, param="tool_choice", code="invalid_value")
    return tuple(tools)


def output_form(served: ServedModel, body: ChatRequest) -> OutputForm:
    """The form by which answers are parsed into text, reasoning and calls."""
    reasoning = None if body.separate_reasoning is False else served.reasoning_format
    return OutputForm.of(served.tool_format, reasoning, served.special_tokens, tools_of(body))


def reader_of(served: ServedModel, body: ChatRequest, request: Request) -> tuple[Parser | None, SpecialTokens | None]:
    """Parser of an answer, and the special tokens that it reads; None for answers that are text alone.

    The parser follows the tokenizer's own response template, if there is one and no other format is asked for. If the
    prompt opened a thought and the output's grammar leaves no room to end it, such as a choice of "yes" and "no", the
    answer is not parsed as thinking.
    """
    goes_on = not _leaves_no_thinking(served, request.grammar)
    own = served.response_template
    if own is not None and body.separate_reasoning is not False:
        if not body.callable_tools:
            own = own | {"fields": {name: one for name, one in own["fields"].items() if name != "tool_calls"}}
        special = SpecialTokens(served.special_tokens, served.special_tokens)
        tools = [_tool_document(tool) for tool in body.callable_tools]
        prompt = prompt_end(served.tokenizer, request.prompt_tokens) if goes_on else ""
        return TemplateParser(own, prompt, tools, special), special
    form = output_form(served, body)
    if form.says_only_text:
        return None, None
    in_reasoning = goes_on and is_in_reasoning(served, form, request.prompt_tokens)
    return OutputParser(form, in_reasoning=in_reasoning), form.special


def _leaves_no_thinking(served: ServedModel, grammar: CompiledGrammar | None) -> bool:
    """True for a grammar of the whole output in which thinking cannot end: it does not mention the end tag, and does
    not allow an output to begin with it, as the regular expression `.*` does.
    """
    reasoning = served.reasoning_format
    if grammar is None or grammar.form.kind not in ("regex", "grammar", "choice") or reasoning is None:
        return False
    text = grammar.form.text.replace("\\", "")
    closes = [close.strip() for close in reasoning.closes]
    begins = (encode_text(served.tokenizer, close) for close in closes)
    return not any(close in text for close in closes) and not any(
        grammar.start().validate_tokens(tokens) == len(tokens) for tokens in begins
    )


def is_in_reasoning(served: ServedModel, form: OutputForm, prompt: Seq[int]) -> bool:
    """True if the prompt ends within the model's reasoning."""
    return form.reasoning is not None and form.is_in_reasoning(prompt_end(served.tokenizer, prompt))


def form_grammar(served: ServedModel, body: ChatRequest, prompt: Seq[int]) -> CompiledGrammar | None:
    """Grammar for the answer's calls, or for its JSON after the reasoning. None if there is nothing to constrain, or if
    the grammar that the request asks for holds from the first token.
    """
    tools = tools_of(body)
    form = output_form(served, body)
    in_reasoning = is_in_reasoning(served, form, prompt)
    format_of = served.tool_format
    if not tools and body.shown_tools and not body.forms and format_of is not None:
        return _compiled_calls(served, Calls((), "none"), format_of, form, in_reasoning=in_reasoning)
    if not tools:
        return _after_thought(served, body, form) if in_reasoning and body.forms else None
    is_auto = body.call_choice == "auto"
    if format_of is None:
        if is_auto and served.response_template is not None:
            return None
        what = "the format in which the model calls tools is not known: start the server with `--tool-call-parser`"
        raise HTTPError(400, what, param="tools", code="no_tools")
    schema = None
    if is_auto and body.forms:
        (_, kind, value), *_ = body.forms
        if kind != "json_schema":
            return None  # the form holds for everything that the model writes, calls too
        schema = json.loads(value) if isinstance(value, str) else value
    calls = Calls(tools, "auto" if is_auto else "required", body.parallel_tool_calls is not False, schema)
    return _compiled_calls(served, calls, format_of, form, in_reasoning=in_reasoning)


def _compiled_calls(
    served: ServedModel, calls: Calls, format_of: ToolFormat, form: OutputForm, *, in_reasoning: bool
) -> CompiledGrammar | None:
    """Compiled grammar of the calls; HTTPError that names the tool whose schema cannot be used."""
    try:
        special = _special_ids(served)
        text = call_grammar(calls, format_of, form.reasoning, special, in_reasoning=in_reasoning)
        return None if text is None else served.llm.grammars.compiled(Grammar("lark", text))
    except FormsBusy as busy:
        raise as_http_error(busy, "tools") from None
    except SpecDecError as error:
        end = time.monotonic() + _CHECKS_S
        for tool in calls.tools:
            if (calls.choice == "required" or tool.is_strict) and time.monotonic() < end:
                _check_schema(served, tool)
        if calls.choice == "auto" and calls.schema is None and not any(tool.is_strict for tool in calls.tools):
            return None  # nothing was asked for that a grammar has to hold
        raise as_http_error(error, "tools") from None


def _check_schema(served: ServedModel, tool: Tool) -> None:
    try:
        served.llm.grammars.check(Grammar("json_schema", json.dumps(tool.parameters)))
    except FormsBusy as busy:
        raise as_http_error(busy, "tools") from None
    except SpecDecError as error:
        what = f"tools: the parameters of `{tool.name}`: {error.message}"
        raise HTTPError(400, what, param="tools", code="invalid_value") from None


def _after_thought(served: ServedModel, body: ChatRequest, form: OutputForm) -> CompiledGrammar | None:
    """Grammar for JSON under a schema, applied after the reasoning that the prompt opened; other grammars apply from
    the first token.
    """
    (_, kind, value), *_ = body.forms
    if kind != "json_schema" or form.reasoning is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return served.llm.grammars.compiled(Grammar("lark", schema_grammar(text, form.reasoning, _special_ids(served))))


def _special_ids(served: ServedModel) -> SpecialIds:
    return SpecialIds(served.llm.grammars.special_tokens(), served.llm.end_ids)


class _TooLong(BaseException):
    """Exception that a timer's thread raises in the thread whose template takes too long. It is not an `Exception`,
    because templates' errors are caught.
    """


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, at the next line of Python that it runs: templates are programs
    with loops.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    try:
        try:
            timer.start()  # on a busy machine the time may be over before this returns
            yield
        finally:
            with lock:
                is_over = True
            timer.cancel()  # an exception raised meanwhile arrives before this call ends
    except _TooLong:
        raise TimeoutError from None
