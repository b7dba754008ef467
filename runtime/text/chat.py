"""Conversations: messages become a prompt, by the chat template of the model's tokenizer."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict

from runtime.core.params import ConversationParams
from runtime.text.call_formats import ReasoningFormat, ToolFormat, find_reasoning_format, find_tool_format
from runtime.text.chat_templates import DEFAULT, TOOL_USE, chat_templates
from runtime.util.errors import SpecDecError


class Message(TypedDict):
    """A message of a conversation: `role` is system, user, assistant or tool."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Calls in OpenAI's form, but with `arguments` as an object, as templates expect it."""
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True)
class TemplateInputs:
    """Values for a template besides the messages: functions to call, documents, its own variables, and the fields of
    the request.
    """

    tools: Seq[dict[str, Any]] = ()
    documents: Seq[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    params: ConversationParams = field(default_factory=ConversationParams)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for transformers."""
        given = {"tools": list(self.tools), "documents": list(self.documents)}
        return {**self.variables, **{name: value for name, value in given.items() if value}}


class ChatTemplate:
    """The chat template of a tokenizer; transformers renders it."""

    def __init__(self, tokenizer_dir: Path, pretrained_config: dict[str, Any]) -> None:
        """Read the template of a tokenizer's directory; SpecDecError if the tokenizer has none."""
        from runtime.text.text import load_tokenizer  # messages are checked without torch

        self._tokenizer: Any = load_tokenizer(tokenizer_dir, pretrained_config)
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise_no_chat_template(str(tokenizer_dir))

    @property
    def source(self) -> Any:
        """The template's source: a single text, or texts by name."""
        return self._tokenizer.chat_template

    @property
    def _templates(self) -> dict[str, Any]:
        return self.source if isinstance(self.source, dict) else {DEFAULT: self.source}

    @property
    def text(self) -> str:
        """The template for conversations; empty if it is not text."""
        source = self._templates.get(DEFAULT)
        return source if isinstance(source, str) else ""

    @property
    def tool_text(self) -> str:
        """The template for conversations with functions: the template `tool_use` if there is one, else `text`."""
        source = self._templates.get(TOOL_USE)
        return source if isinstance(source, str) else self.text

    @property
    def knows_tools(self) -> bool:
        """True if the template writes the functions that may be called into the prompt."""
        return "tools" in self.tool_text or self.tool_text != self.text

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the calls that the template writes, if it is known."""
        return find_tool_format(self.tool_text) or find_tool_format(self.text)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the reasoning that the template writes, if it is known."""
        return find_reasoning_format(self.text) or find_reasoning_format(self.tool_text)

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's own description of the model's output; None if it has none."""
        found = getattr(self._tokenizer, "response_template", None)
        return found if isinstance(found, dict) else None

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """SpecDecError for a variable that transformers sets itself."""
        own = signature(self._tokenizer.apply_chat_template).parameters
        if taken := [name for name in variables if name != "kwargs" and (name in own or name == "messages")]:
            raise SpecDecError(f"not a variable of a chat template: {taken[0]}", hint="leave it out")

    def encode(self, messages: Seq[Message], inputs: "TemplateInputs | None" = None) -> list[int]:
        """The tokens of the text from `render`."""
        return self.tokens(self.render(messages, inputs))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a rendered conversation."""
        from runtime.text.text import encode_text

        return encode_text(self._tokenizer, text)

    def render(self, messages: Seq[Message], inputs: "TemplateInputs | None" = None) -> str:
        """The conversation's text, up to the beginning of the output unless `inputs` say otherwise. SpecDecError if the
        template is broken or refuses the conversation.
        """
        from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError

        from runtime.text.bounded_templates import compile_bounded

        check_messages(messages, "the conversation")
        inputs = inputs or TemplateInputs()
        is_continued = inputs.params.continue_final_message
        if is_continued and not messages[-1]["content"]:
            raise SpecDecError(
                f"the last message has no text to continue: {messages[-1]!r:.200}",
                hint="give the message a text",
            )
        given = inputs.arguments()
        _check_default(self._templates, self._tokenizer.name_or_path)
        try:
            compile_bounded(self.tool_text if "tools" in given else self.text)
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=inputs.params.add_generation_prompt and not is_continued,
                continue_final_message=is_continued,
                tokenize=False,
                **given,
            )
            text.encode()  # no tokenizer takes half a pair of surrogates
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise SpecDecError(
                f"a text of the conversation has half a pair of surrogates: {half!a}", hint="send whole characters"
            ) from None
        except TemplateSyntaxError as error:  # also for a filter that jinja does not have
            _raise_broken(error)
        except UndefinedError as error:
            raise SpecDecError(
                f"the chat template uses a value that no conversation has: {error}", hint=_OTHER
            ) from None
        except Exception as error:  # a template is a program that comes with a model, and fails as programs do
            if type(error) is TemplateError:  # raised by the template itself; jinja raises subclasses
                raise SpecDecError(
                    f"the chat template refuses the conversation: {error}", hint="check which roles the model supports"
                ) from None
            raise SpecDecError(
                f"the chat template fails on the conversation: {type(error).__name__}: {error}",
                hint=_OTHER,
            ) from error
        return text


def has_chat_template(tokenizer_dir: Path) -> bool:
    """True if a GGUF file or a directory has a chat template."""
    return bool(chat_templates(tokenizer_dir))


def check_chat_template(tokenizer_dir: Path, tokenizer: str) -> None:
    """SpecDecError unless the tokenizer has a chat template for conversations that jinja can compile. It is called
    before an engine is built. `tokenizer` is the name that the user gave.
    """
    from jinja2 import TemplateSyntaxError

    from runtime.text.bounded_templates import BoundedEnvironment

    templates = chat_templates(tokenizer_dir)
    if not templates:
        raise_no_chat_template(tokenizer)
    _check_default(templates, tokenizer)
    try:
        BoundedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation()]).compile(templates[DEFAULT])
    except TemplateSyntaxError as error:
        _raise_broken(error)


def _check_default(templates: Mapping[str, Any], tokenizer: str) -> None:
    """SpecDecError if none of several templates is named the default, or if the default is empty or not text."""
    if DEFAULT not in templates:
        raise SpecDecError(
            f"none of the tokenizer's chat templates is the default, {', '.join(sorted(templates))}: {tokenizer}",
            hint=f"name one of them `{DEFAULT}` in its tokenizer_config.json",
        )
    template = templates[DEFAULT]
    if not isinstance(template, str) or not template.strip():
        raise SpecDecError(f"the chat template is not text, {template!r}: {tokenizer}", hint=_OTHER)


def _generation() -> type[Any]:
    """transformers' `generation` block, around text that a model is trained to write, as a jinja tag."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _raise_broken(error: Any) -> NoReturn:
    raise SpecDecError(f"the chat template is broken, line {error.lineno}: {error.message}", hint=_OTHER) from None


def raise_no_chat_template(tokenizer: str) -> NoReturn:
    raise SpecDecError(
        f"the tokenizer has no chat template: {tokenizer}",
        hint="take a model that was trained for conversations, or give this one its prompt as text",
    )


def check_messages(messages: Any, where: str) -> tuple[Message, ...]:
    """The messages; SpecDecError, naming `where`, unless this is a non-empty list of messages."""
    if not isinstance(messages, list | tuple) or not messages:
        raise SpecDecError(f"{where} is not a list of messages: {messages!r}", hint=_FORM)
    for message in messages:
        if not _is_message(message):
            raise SpecDecError(f"{where} has a message without a role and text: {message!r}", hint=_FORM)
    return tuple(messages)


def _is_message(message: Any) -> bool:
    """True for a dict with a role and text, and perhaps calls, reasoning, or the id and name of a call that the text
    answers. With calls, `content` may be None.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    others = set(message) - {"role", "content"}
    has_calls = isinstance(message.get("tool_calls"), list) and bool(message["tool_calls"])
    has_text = isinstance(message.get("content"), str) or (message.get("content", "") is None and has_calls)
    texts = ("tool_call_id", "name", "reasoning_content", "thinking")
    return (
        has_text
        and others <= {"tool_calls", *texts}
        and all(isinstance(message[name], str) for name in texts if name in message)
    )


_OTHER = "correct the template, or name a tokenizer with another"
_FORM = '[{"role": "user", "content": "…"}] is one; roles are system, user and assistant'
