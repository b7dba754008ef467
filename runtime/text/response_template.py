"""Reads outputs by the tokenizer's own response template, which is transformers' description of a model's output.

Text and reasoning are reported as they come, calls when they are complete.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from runtime.text.parser import Said, SpecialTokens, joined
from runtime.util.errors import SpecDecError

_CONTENT, _REASONING, _CALLS = "content", ("reasoning_content", "thinking", "reasoning"), "tool_calls"


class TemplateParser:
    """Parser of an output; it has the interface of `runtime.text.parser.Parser`."""

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[Any], special: SpecialTokens) -> None:
        """`prompt` is a text that includes special tokens. SpecDecError for an invalid template."""
        from transformers.utils.chat_parsing import ResponseParser

        try:
            self._parser: Any = ResponseParser(dict(template), prefix=prompt, tools=tools or None)
        except Exception as error:  # a template comes with a model, and may be anything
            raise SpecDecError(
                f"the tokenizer's response template cannot be used: {error}", hint="name the format of its calls"
            ) from None
        self._special = special
        self._has_failed = self._is_in_call = False
        self._untold = ""
        """Text that was read and not reported yet, tags included."""

    def feed(self, text: str) -> list[Said]:
        """The parts that are known by now. They do not depend on how the text is split: it is read by characters."""
        said: list[Said] = []
        for character in self._special.named(text):
            self._untold += character
            said += self._said(lambda new=character: self._parser.feed(new))  # type: ignore[misc]
        return joined(said)

    def end(self, *, is_cut: bool = False) -> list[Said]:
        """Report the text that was held back, and nothing of a call that was cut off."""
        if is_cut and self._is_in_call:
            return []
        return self._said(lambda: self._parser.finalize()[1])

    def _said(self, read: Callable[[], Any]) -> list[Said]:
        """The parts that transformers' parser reads. Once it has failed, all text not yet reported is content."""
        events = []
        if not self._has_failed:
            try:
                events = read()
            except Exception:  # text that is no call of this format stays text
                self._has_failed, self._is_in_call = True, False
        if self._has_failed:
            text, self._untold = self._untold, ""
            return [Said("content", text)] if text else []
        return [said for event in events for said in self._of_event(event)]

    def _of_event(self, event: dict[str, Any]) -> list[Said]:
        name = event["field"]
        if name == _CALLS:
            self._is_in_call = event["type"] != "region_close"
        if event["type"] == "region_chunk" and name != _CALLS:
            self._untold = self._untold.partition(event["text"])[2]
            return [Said("reasoning" if name in _REASONING else "content", event["text"])]
        if event["type"] == "region_close" and name == _CALLS:
            self._untold = ""
            value = event["value"]
            return [said for call in (value if isinstance(value, list) else [value]) for said in _call(call)]
        return []


def _call(call: Any) -> list[Said]:
    function = call.get("function", call) if isinstance(call, dict) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        return [Said("content", json.dumps(call, ensure_ascii=False))]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [Said("call", name), Said("arguments", text)]
