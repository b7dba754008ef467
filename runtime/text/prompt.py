"""Conversations with tools for a chat template that knows no tools: calls and tools' results become texts of messages.

The tools are described in a system message like those that Hermes models are trained with. Calls are written in the
format in which the output's calls are read.
"""

import json
from collections.abc import Sequence as Seq
from typing import Any

from runtime.text.call_formats import JsonCall, ToolFormat
from runtime.text.chat import Message
from runtime.util.errors import SpecDecError


def with_tools_as_text(messages: Seq[Message], tools: Seq[dict[str, Any]], form: ToolFormat) -> list[Message]:
    """Messages for a template that knows no tools: the tools are described in the system message, and calls and their
    results are texts of the assistant and the user. SpecDecError for a format that does not write calls as JSON.
    """
    if not isinstance(form.call, JsonCall):
        raise SpecDecError(
            "the chat template knows no tools, and specdec cannot write calls into its messages in this format: "
            f"{form.name}",
            hint="use hermes, llama3_json, mistral, granite or phi4, or take a model that was trained for tools",
        )
    written: list[Message] = []
    for message in messages:
        text = message["content"]
        if calls := message.get("tool_calls"):
            text = f"{text}\n{_calls(calls, form)}".strip()
        if message["role"] != "tool":
            written.append({"role": message["role"], "content": text})
            continue
        text = f"<tool_response>\n{text}\n</tool_response>"
        if written and written[-1]["role"] == "user" and written[-1]["content"].endswith("</tool_response>"):
            written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
        else:
            written.append({"role": "user", "content": text})
    if not tools:
        return written
    description = _description(tools, form)
    if written and written[0]["role"] == "system":
        return [{"role": "system", "content": f"{written[0]['content']}\n\n{description}"}, *written[1:]]
    return [{"role": "system", "content": description}, *written]


def _description(tools: Seq[dict[str, Any]], form: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}
    return (
        f"You may call functions. They are described within <tools></tools>:\n<tools>\n{functions}\n</tools>\n\n"
        f"To call one, write its name and arguments like this:\n{_calls([example], form)}"
    )


def _calls(calls: Seq[dict[str, Any]], form: ToolFormat) -> str:
    assert isinstance(form.call, JsonCall)
    key = form.call.arguments
    written = [
        json.dumps({"name": call["function"]["name"], key: call["function"]["arguments"]}, ensure_ascii=False)
        for call in calls
    ]
    if form.call.is_list:
        return f"{form.open}[{', '.join(written)}]{form.close}"
    if form.starts_output:
        return form.between.join(written)
    return form.between.join(f"{form.open}{form.space}{one}{form.space}{form.close}" for one in written)
