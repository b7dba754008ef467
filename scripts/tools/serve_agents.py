"""Agents that others wrote against a server of ours, unmodified: tools, structured answers, Responses and Messages.

pip install openai langchain-openai "pydantic-ai-slim[openai,anthropic]" litellm anthropic
specdec serve --model-dir demo --spec-decode-algo AUTO --tool-call-parser hermes
python -m scripts.tools.serve_agents http://localhost:8000

The shipped model calls no tool by itself: calls are required, or forced as the only text that it can write. Exit 1 if a
client does not get what it asked for.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import anthropic
import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1].rstrip("/")
NUM_TURNS = 12
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"line": {"type": "integer", "minimum": 1, "maximum": 9}, "text": {"enum": ["red", "green", "blue"]}},
    "required": ["line", "text"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "set_line", "description": "Set a line of the file", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id


class Pet(BaseModel):
    kind: Literal["dog", "cat"]
    age: Literal[1, 2, 3]


def edit(path: Path, line: int, text: str) -> str:
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    return f"line {line} is {text}"


def agent_loop(*, stream: bool) -> None:
    """A file that is edited by the model's calls, turn after turn; each turn begins with all that came before."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file.txt"
        path.write_text("\n".join(["line"] * 9) + "\n")
        messages: list[Any] = [{"role": "user", "content": "Colour the lines of the file."}]
        for turn in range(NUM_TURNS):
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [TOOL], "tool_choice": "required"}
            asked |= {"parallel_tool_calls": False, "seed": turn, "max_tokens": 100}
            if stream:
                with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                    for _ in events:
                        pass
                    completion = events.get_final_completion()
            else:
                completion = client.chat.completions.create(**asked)
            message = completion.choices[0].message
            assert completion.choices[0].finish_reason == "tool_calls" and message.tool_calls
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in messages[-1]["tool_calls"]:
                call["function"].pop("parsed_arguments", None)
                gave = edit(path, **json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": gave})
            if turn:
                assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
                assert completion.usage.prompt_tokens_details.cached_tokens, "nothing of the turns before was found"
        assert set(path.read_text().split()) <= {"line", "red", "green", "blue"} and path.read_text().count("line") < 9


def openai_parse() -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "A pet"}], response_format=Pet, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, Pet)


def openai_auto() -> None:
    """A call of the model's own choice: the only text that it can write."""
    text = 'I set it. <tool_call>\n{"name": "set_line", "arguments": {"line": 2, "text": "red"}}\n</tool_call>'
    said = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Go"}],
        tools=[TOOL],
        max_tokens=100,
        extra_body={"guided_choice": [text]},
    )
    message = said.choices[0].message
    assert message.content == "I set it." and message.tool_calls
    call: Any = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"line": 2, "text": "red"}


def openai_responses() -> None:
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    previous: str | None = None
    asked: Any = "Colour a line."
    for turn in range(NUM_TURNS):
        response = client.responses.create(
            model=MODEL,
            input=asked,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            previous_response_id=previous,
            instructions="Be brief." if turn == 0 else None,
            max_output_tokens=100,
        )
        assert response.status == "completed", response
        call: Any = response.output[0]
        assert set(json.loads(call.arguments)) == {"line", "text"}
        previous, asked = response.id, [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    only: Any = {"guided_choice": ["Hello, all of you."]}  # the client takes no response that is cut off
    with client.responses.stream(model=MODEL, input="Say something", extra_body=only) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text
    parsed = client.responses.parse(model=MODEL, input="A pet", text_format=Pet, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Pet)


def anthropic_messages() -> None:
    own = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    tool: Any = {"name": "set_line", "description": "Set a line", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": "Colour a line."}]
    for turn in range(NUM_TURNS):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": messages, "tools": [tool]}
        asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        if turn % 2:
            with own.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = own.messages.create(**asked)
        assert message.stop_reason == "tool_use"
        block = message.content[0]
        assert set(block.input) == {"line", "text"}
        messages.append(
            {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in message.content]}
        )
        gave = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        messages.append({"role": "user", "content": [gave]})
    assert own.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 100


def anthropic_parse() -> None:
    """`messages.parse`, whose schema goes by `output_config`."""
    answers = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0).messages
    asked: Any = [{"role": "user", "content": "A pet"}]
    found = answers.parse(model=MODEL, max_tokens=60, messages=asked, output_format=Pet)
    assert isinstance(found.parsed_output, Pet), found


def langchain_tools() -> None:
    model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_completion_tokens=100)  # type: ignore[arg-type]
    bound = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("Colour a line.")]
    for turn in range(4):
        if turn % 2:
            said: Any = None
            for chunk in bound.stream(messages):
                said = chunk if said is None else said + chunk
        else:
            said = bound.invoke(messages)
        (call,) = said.tool_calls
        assert set(call["args"]) == {"line", "text"}
        messages += [said, ToolMessage("done", tool_call_id=call["id"])]
    assert isinstance(model.with_structured_output(Pet).invoke("A pet"), Pet)
    assert isinstance(model.with_structured_output(Pet, method="function_calling").invoke("A pet"), Pet)


def pydantic_ai_output() -> None:
    """Its output is a call of a tool that must come."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    agent = Agent(model, output_type=Pet, model_settings={"max_tokens": 100, "parallel_tool_calls": False})
    for seed in range(3):
        assert isinstance(agent.run_sync("A pet", model_settings={"seed": seed}).output, Pet)


def litellm_tools() -> None:
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 100}
    asked |= {"tools": [TOOL], "tool_choice": "required", "messages": [{"role": "user", "content": "Colour a line."}]}
    said: Any = litellm.completion(**asked, parallel_tool_calls=False)
    assert set(json.loads(said.choices[0].message.tool_calls[0].function.arguments)) == {"line", "text"}
    chunks: Any = list(litellm.completion(**asked, parallel_tool_calls=False, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert set(json.loads(whole.choices[0].message.tool_calls[0].function.arguments)) == {"line", "text"}


TASKS: dict[str, tuple[str, Callable[[], None]]] = {
    f"an agent of {NUM_TURNS} turns that edits a file": ("openai", lambda: agent_loop(stream=False)),
    "the same, streamed": ("openai", lambda: agent_loop(stream=True)),
    "an answer parsed by a class": ("openai", openai_parse),
    "a call of the model's own": ("openai", openai_auto),
    f"Responses, {NUM_TURNS} turns": ("openai", openai_responses),
    f"Messages, {NUM_TURNS} turns": ("anthropic", anthropic_messages),
    "an output type of a message": ("anthropic", anthropic_parse),
    "tools and structured output": ("langchain-openai", langchain_tools),
    "an output type": ("pydantic-ai-slim", pydantic_ai_output),
    "tools": ("litellm", litellm_tools),
}


def main() -> int:
    num_failed = 0
    for name, (package, task) in TASKS.items():
        try:
            task()
            result = "ok"
        except Exception:
            num_failed += 1
            result = traceback.format_exc(limit=-4)
        print(f"{package} {version(package)}: {name}: {result}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
