"""Tools over HTTP: what clients ask for, what the model's calls become, whole and in a stream."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from sentences import Said
from serving_models import MakeServed, Served

from commands.serve.protocol.asking import ask_chat
from commands.serve.protocol.schema import ChatRequest
from runtime.core.request import Sequence

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Go"}]
STEP = {
    "type": "object",
    "properties": {"by": {"type": "integer", "minimum": 0, "maximum": 9}, "to": {"enum": ["left", "right"]}},
    "required": ["by", "to"],
}
SCHEMAS = {"step": STEP, "stop": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
CALL = {"id": "c1", "type": "function", "function": {"name": "step", "arguments": '{"by": 1, "to": "left"}'}}
GAVE = {"role": "tool", "tool_call_id": "c1", "content": "ok"}


def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post(CHAT, **({"messages": ASKED, "tools": TOOLS, "seed": 3} | body))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def joined(served: Served, **body: Any) -> dict[str, Any]:
    """The choice that a stream makes, as OpenAI's client puts it together."""
    chunks = served.stream(CHAT, **({"messages": ASKED, "tools": TOOLS, "seed": 3} | body))
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    finish = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}


NAMED = {"type": "function", "function": {"name": "step"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_come_is_valid_and_streamed_as_it_is_whole(tooled: Served, choice: Any) -> None:
    found = chat(tooled, tool_choice=choice, parallel_tool_calls=False)
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    name = call["function"]["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    assert choice == "required" or name == "step"
    assert joined(tooled, tool_choice=choice, parallel_tool_calls=False) == found
    without = chat(tooled, tool_choice=choice, parallel_tool_calls=False, speculative=False)
    assert without == found  # the calls are of the same tokens, drafts or not


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TWO = "\n".join(["I go.", written("step", '{"by": 2}'), written("stop", "{}")])


def test_calls_of_the_models_own_choice_are_read(tooled: Served) -> None:
    """A list of one text is all that the model can write: text before a call, and two of them."""
    found = chat(tooled, guided_choice=[TWO])
    assert found["message"]["content"] == "I go." and found["finish_reason"] == "tool_calls"
    calls = found["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "step", "arguments": '{"by": 2}'},
        {"name": "stop", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert joined(tooled, guided_choice=[TWO]) == found
    as_text = chat(tooled, guided_choice=[TWO], tool_choice="none")
    assert as_text["message"]["content"] == TWO and "tool_calls" not in as_text["message"]


def test_a_call_that_is_cut_off_says_so(tooled: Served) -> None:
    num_whole = len(tooled.model.llm.tokenizer(TWO)["input_ids"])
    for missing in (20, 45, 70):
        body = {"guided_choice": [TWO], "max_tokens": num_whole - missing}
        found = chat(tooled, **body)
        assert found["finish_reason"] == "length" and joined(tooled, **body) == found


def test_with_auto_only_the_beginning_of_a_call_binds(tooled: Served) -> None:
    """The grammar of the request that a body becomes forces something after the tag, and nothing before it."""
    body = ChatRequest.model_validate({"messages": ASKED, "tools": TOOLS[:1], "max_tokens": 50})
    (asked,) = ask_chat(tooled.model, body)
    sequence = Sequence.start(asked.request)
    matcher = sequence.sampler.matcher
    assert matcher is not None
    tokenizer = tooled.model.llm.tokenizer
    tag = tokenizer("I go. <tool_call>", add_special_tokens=False)["input_ids"]
    assert matcher.num_legal(sequence.tokens, tag) == len(tag) and not matcher.forced(sequence.tokens, tag[:-1])
    forced = matcher.forced(sequence.tokens, tag)
    assert tokenizer.decode(forced).startswith('\n{"name": "step", "arguments": ')
    (uncalled,) = ask_chat(tooled.model, body.model_copy(update={"tool_choice": "none"}))
    free = Sequence.start(uncalled.request)
    assert free.sampler.matcher is not None and free.sampler.matcher.num_legal(free.tokens, tag) < len(tag)


def test_the_prompt_has_all_tools_whichever_may_be_called(tooled: Served, make_served: MakeServed) -> None:
    """The last turn of an agent, which may call nothing, finds the turns before it in the cache."""
    only_stop = {"type": "function", "function": {"name": "stop"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [only_stop]}}
    long = [{"role": "user", "content": "Go on, and then on and on, until the end of all of it, and back."}]
    found = []
    for choice in ("auto", "auto", "none", allowed, NAMED):
        usage = tooled.post(CHAT, messages=long, tools=TOOLS, tool_choice=choice, max_tokens=4).json()["usage"]
        found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    assert set(found[2:]) == {found[1]} and 0 < found[1][1] < found[1][0]
    untaught = make_served(None)  # its template knows no tools: those that may not be called are left out
    assert untaught.post(CHAT, messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=2).status_code == 200
    assert untaught.post(CHAT, messages=ASKED, tools=TOOLS, max_tokens=2).status_code == 400


def test_reasoning_is_told_beside_the_text(tooled: Served) -> None:
    text = f"Hm.\n</think>\n\nI go. {written('stop', '{}')}"
    body = {"guided_choice": [text], "chat_template_kwargs": {"think": True}}
    found = chat(tooled, **body)
    message = found["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I go.")
    assert message["tool_calls"][0]["function"]["name"] == "stop"
    assert joined(tooled, **body) == found
    assert "reasoning_content" not in chat(tooled, **body, include_reasoning=False)["message"]
    as_text = chat(tooled, **body, separate_reasoning=False)["message"]
    assert as_text["content"].startswith("Hm.\n</think>")


@pytest.mark.parametrize("end", ["</think>\n\nI go.", "and so", "</think>"])
def test_tokens_of_reasoning_are_the_generated_ones(tooled: Served, end: str) -> None:
    """The model cuts the text into more tokens than the tokenizer would (`Hm` as `H`, `m`): all are counted.

    The second choice, which the seed does not take, has an end of thinking: without one the text would be the answer.
    """
    text = f"\nHm, hm. Well then\n{end}"
    body = {
        "messages": ASKED, "seed": 3, "guided_choice": [text, "</think>"], "temperature": 2,
        "chat_template_kwargs": {"think": True},
    }  # fmt: skip
    whole = tooled.post(CHAT, **body, logprobs=True, separate_reasoning=False).json()["choices"][0]
    tokens = [one["token"] for one in whole["logprobs"]["content"]]
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    thought_end = len("\nHm, hm. Well then") if "</think>" in end else len(text)
    expected = sum(start < thought_end for start in starts if start < len(text))
    encoded = tooled.model.llm.tokenizer(text[:thought_end].strip(), add_special_tokens=False)["input_ids"]
    assert "".join(tokens).startswith(text) and expected > len(encoded)
    usage = tooled.post(CHAT, **body).json()["usage"]
    streamed = tooled.stream(CHAT, **body, stream_options={"include_usage": True})[-1]["usage"]
    assert usage == streamed
    assert usage["completion_tokens_details"]["reasoning_tokens"] == expected <= usage["completion_tokens"]
    asked = {key: body[key] for key in ("guided_choice", "temperature", "chat_template_kwargs")}
    answer = tooled.post("/v1/responses", input="Go", seed=3, **asked).json()
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == expected


@pytest.mark.parametrize("word", ["left", "tool_call"])
def test_a_stop_word_in_a_call_ends_it_as_a_limit_does(tooled: Served, word: str) -> None:
    """It was said to be a whole call, or its tags were content."""
    num_stopped = 0
    for seed in range(3):
        body = {"tool_choice": NAMED, "stop": [word], "seed": seed}
        found, streamed = chat(tooled, **body), joined(tooled, **body)
        message = found["message"]
        assert streamed["message"] | {"content": streamed["message"]["content"] or ""} == message | {
            "content": message["content"] or ""
        }
        assert streamed["finish_reason"] == found["finish_reason"]
        calls = message.get("tool_calls", [])
        if found["finish_reason"] == "tool_calls":
            assert all(json.loads(call["function"]["arguments"]) for call in calls)
        if found["finish_reason"] == "stop":
            num_stopped += 1
            assert bool(calls) == (word in ("left", '"by"'))
        assert "<tool" not in (message["content"] or "")
    assert num_stopped > 0


@pytest.mark.parametrize(
    ("arguments", "written_as"),
    [('{"by": 1, "to": "left"}', '{"by": 1, "to": "left"}'), ('{"by": 1, "t', r'"{\"by\": 1, \"t"'), ("", "{}")],
    ids=["whole", "cut off", "none"],
)
def test_calls_and_what_they_gave_are_what_the_template_writes(tooled: Served, arguments: str, written_as: str) -> None:
    """A text that is no JSON, as of a call that was cut off, is written as transformers writes it: as a text."""
    made = CALL | {"function": {"name": "step", "arguments": arguments}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [made]}, GAVE]
    answer = tooled.post("/tokenize", messages=messages, tools=TOOLS)
    assert answer.status_code == 200, answer.text
    text = tooled.model.llm.tokenizer.decode(answer.json()["tokens"])
    call = f'<tool_call>\n{{"name": "step", "arguments": {written_as}}}\n</tool_call>'
    assert text == f"[step][stop]<user>Go\n<assistant>{call}\n<tool>ok\n<assistant>"


FILE = 'def area(width, height):\n    return width * height\n\nprint(area(3, 4), "\\\\")\n'


def test_what_a_tool_gave_is_drafted_from_as_a_call_would_have_it(tooled: Served) -> None:
    """Line breaks and quotes of a file are other tokens in the arguments of a call than in the prompt."""
    for gave, fields, copied in (
        (FILE, {}, json.dumps(FILE)),
        ("ok", {}, ""),
        (FILE, {"tool_choice": "none"}, ""),
        (FILE, {"speculative": False}, ""),
    ):
        messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, GAVE | {"content": gave}]
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 9} | fields
        (asked,) = ask_chat(tooled.model, ChatRequest.model_validate(body))
        assert tooled.model.llm.tokenizer.decode(asked.copied_tokens) == copied


def test_a_template_without_tools_has_them_written_as_text(make_served: MakeServed) -> None:
    served = make_served(None, tool_call_parser="hermes")
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, GAVE]
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokens = served.post("/tokenize", messages=messages, tools=tools).json()["tokens"]
    text = served.model.llm.tokenizer.decode(tokens)
    assert text.startswith("<system>You may call functions.") and '"name": "f"' in text
    assert "<user><tool_response>\nok\n</tool_response>\n<assistant>" in text


def test_messages_of_the_user_are_one_where_roles_must_alternate(
    make_served: MakeServed, chat_tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Codex sends its surroundings before what the user says, Claude Code reminders of the system after it."""
    shutil.copytree(chat_tokenizer_dir, tmp_path / "tokenizer")
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# roles must alternate #}")
    served = make_served(None, tokenizer_dir=tmp_path / "tokenizer")
    system, of_user = {"role": "system", "content": "S"}, [{"role": "user", "content": one} for one in "AB"]
    reminder = {"role": "system", "content": "B"}
    conversations = [
        [system, *of_user],
        [system, of_user[0], reminder],
        [system, {"role": "user", "content": "A\n\nB"}],
    ]
    tokens = [served.post("/tokenize", messages=messages).json()["tokens"] for messages in conversations]
    assert tokens[0] == tokens[1] == tokens[2]


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "fly"}}]}
UNREADABLE = {"name": "f", "parameters": {"$ref": "#/no"}, "strict": True}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tool without a name": ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
    "two of one name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "an allowance of none of them": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, "tool_choice"),
    "a choice without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "a schema that is none": ({"tools": [{"type": "function", "function": UNREADABLE}]}, "tools"),
    "a call without its answer": (
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALL]}, *ASKED]}, "messages"),
    "an answer to another call": (
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALL]}, GAVE | {"tool_call_id": "c2"}]}, "messages"),
    "arguments that are no object": (
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [
            CALL | {"function": {"name": "f", "arguments": "[1]"}}]}, GAVE]}, "messages"),
    "a message that says nothing": ({"messages": [{"role": "user", "content": None}]}, "messages"),
    "a user that calls": ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages"),
    "the messages as a variable": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "an effort that no template knows": ({"reasoning_effort": "high"}, "reasoning_effort"),
}  # fmt: skip


def test_a_model_that_knows_no_tools_says_so(served: Served, said: Said) -> None:
    answered = [*ASKED, {"role": "assistant", "tool_calls": [CALL]}, GAVE]
    for body, param in (({"tools": TOOLS}, "tools"), ({"messages": answered}, "messages")):
        response = served.post(CHAT, **({"messages": ASKED} | body))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "no_tools", param)
        said(error["message"], "`--tool-call-parser`")
    nothing = [*ASKED, {"role": "assistant", "content": "a", "tool_calls": []}]
    assert served.post(CHAT, messages=nothing, max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_tools_is_said(tooled: Served, name: str, said: Said) -> None:
    body, param = WRONG[name]
    response = tooled.post(CHAT, **({"messages": ASKED, "tools": TOOLS, "max_tokens": 2} | body))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] in (param, None)
    said(error["message"])
