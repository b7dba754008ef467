"""Conversations: messages become the prompt that a model was trained on, by the template of its tokenizer."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from runtime.errors import SpecDecError
from runtime.files import read_json
from runtime.gguf import CHAT_TEMPLATE, is_gguf, read_gguf


class Message(TypedDict):
    """One message of a conversation: `role` is system, user or assistant."""

    role: str
    content: str


class ChatTemplate:
    """The chat template of a tokenizer; transformers renders it."""

    def __init__(self, tokenizer_dir: Path, pretrained_config: dict[str, Any]) -> None:
        """SpecDecError for a tokenizer without a template."""
        from runtime.text import load_tokenizer  # messages are checked without torch

        self._tokenizer: Any = load_tokenizer(tokenizer_dir, pretrained_config)
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise_no_chat_template(str(tokenizer_dir))

    @property
    def source(self) -> Any:
        """The template itself."""
        return self._tokenizer.chat_template

    def encode(self, messages: Seq[Message]) -> list[int]:
        """The conversation's tokens, up to where the assistant goes on; SpecDecError where the template says no."""
        text = self.render(messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def render(self, messages: Seq[Message]) -> str:
        """The conversation's text, up to where the assistant goes on; SpecDecError where the template says no."""
        from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError

        check_messages(messages, "the conversation")
        _check_default(
            self.source if isinstance(self.source, dict) else {_DEFAULT: self.source}, self._tokenizer.name_or_path
        )
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            text.encode()  # no tokenizer takes half a pair of surrogates
        except TemplateSyntaxError as error:  # a filter that there is none of, too
            _raise_broken(error)
        except UndefinedError as error:
            raise SpecDecError(f"the chat template asks for what no conversation has: {error}", hint=_OTHER) from None
        except Exception as error:  # a template is a program that comes with a model, and fails as programs do
            if type(error) is TemplateError:  # what a template says itself; jinja's own are kinds of it
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


def chat_templates(tokenizer_dir: Path) -> dict[str, Any]:
    """Chat templates of a GGUF file or a directory by their names, by transformers' rules but without transformers.

    They should be texts. `chat_template.json` is that of a processor of images and sounds, which no tokenizer reads.
    """
    if is_gguf(tokenizer_dir):
        template = read_gguf(tokenizer_dir).metadata.get(CHAT_TEMPLATE)
    elif (file := tokenizer_dir / "chat_template.jinja").exists():
        template = file.read_text(encoding="utf-8", errors="replace")
    else:
        config = tokenizer_dir / "tokenizer_config.json"
        template = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        return {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
    return {} if template is None else {_DEFAULT: template}


def check_chat_template(tokenizer_dir: Path, tokenizer: str) -> None:
    """SpecDecError unless it has a chat template for conversations, of which a program can be made: before an engine is
    built. `tokenizer` is the name that the user gave.
    """
    from jinja2 import Environment, TemplateSyntaxError

    templates = chat_templates(tokenizer_dir)
    if not templates:
        raise_no_chat_template(tokenizer)
    _check_default(templates, tokenizer)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", _generation()]).compile(templates[_DEFAULT])
    except TemplateSyntaxError as error:
        _raise_broken(error)


def _check_default(templates: Mapping[str, Any], tokenizer: str) -> None:
    """SpecDecError where none is called the default, or that is no text with something in it."""
    if _DEFAULT not in templates:
        raise SpecDecError(
            f"none of the tokenizer's chat templates is the default, {', '.join(sorted(templates))}: {tokenizer}",
            hint=f"name one of them `{_DEFAULT}` in its tokenizer_config.json",
        )
    template = templates[_DEFAULT]
    if not isinstance(template, str) or not template.strip():
        raise SpecDecError(f"the chat template is no text, {template!r}: {tokenizer}", hint=_OTHER)


def _generation() -> type[Any]:
    """transformers' block around what a model is trained to say, as a tag of jinja's."""
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
    """The messages; SpecDecError, naming `where`, unless it is a list of messages with something in it."""
    if not isinstance(messages, list | tuple) or not messages:
        raise SpecDecError(f"{where} is not a list of messages: {messages!r}", hint=_FORM)
    for message in messages:
        keys = set(message) if isinstance(message, dict) else set()
        if keys != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise SpecDecError(f"{where} has a message without a role and text: {message!r}", hint=_FORM)
    return tuple(messages)


_DEFAULT = "default"
_OTHER = "correct the template, or name a tokenizer with another"
_FORM = '[{"role": "user", "content": "…"}] is one; roles are system, user and assistant'
