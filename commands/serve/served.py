"""The model that a server answers with: its names, its limits, and the defaults for fields that clients leave out."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from commands.serve.corpora import Corpora
from commands.serve.errors import HTTPError
from commands.serve.turn import Turn
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.llm import LLM
from runtime.loop.serving import ServingLoop
from runtime.proof.records import Fingerprint
from runtime.text.call_formats import (
    ReasoningFormat,
    ToolFormat,
    named_reasoning_format,
    named_tool_format,
)
from runtime.text.chat import has_chat_template
from runtime.text.text import tokenizer_digest
from runtime.text.token_text import special_token_ids
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json
from runtime.util.machine import machine_name


@dataclass(frozen=True)
class ServedModel:
    """An opened model behind a loop."""

    llm: LLM
    loop: ServingLoop
    names: tuple[str, ...]
    """Names that clients may use for the model; the first is the one in answers."""
    created: int
    """Time at which the server was started, in seconds since 1970."""
    has_chat_template: bool
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of fields that a client leaves out."""
    tool_call_parser: str | None = None
    """Name of the format of tool calls; None: the chat template's."""
    reasoning_parser: str | None = None
    """Name of the format of reasoning; None: the chat template's."""
    refuses_special_tokens: bool = False
    """True if a special token in a message's text is refused."""
    takes_any_name: bool = False
    """True if a request that names another model is answered too, with this model."""
    drafter: str = "no drafter"
    """The server's own drafter, in words."""
    turn: Turn = field(default_factory=Turn)
    """Turns of the threads that read requests."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def fingerprint(self) -> Fingerprint:
        """The engine's fingerprint, which is computed before the first request."""
        return self.llm.fingerprint

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None  # `check_can_serve`
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its output may have together."""
        return self.llm.bundle.config.build_config.max_request_len

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the page shows beside OpenAI's fields: bits of the weights, machine, drafter."""
        config = self.llm.bundle.config
        return {
            "bits": config.bits,
            "dtype": config.dtype,
            "machine": machine_name(),
            "drafter": self.drafter,
            "max_draft_len": self.llm.engine.max_draft_len,
        }

    @property
    def template_text(self) -> str:
        """The text of the model's chat template; empty if the model has no chat template."""
        return self.llm.chat_template.text if self.has_chat_template else ""

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's calls of tools, if it is known."""
        if self.tool_call_parser is not None:
            return named_tool_format(self.tool_call_parser)
        return self.llm.chat_template.tool_format if self.has_chat_template else None

    @cached_property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's own description of what the model writes, unless other formats are named."""
        if not self.has_chat_template or self.tool_call_parser is not None or self.reasoning_parser is not None:
            return None
        return self.llm.chat_template.response_template

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the model's reasoning, if it is known."""
        if self.reasoning_parser is not None:
            return named_reasoning_format(self.reasoning_parser)
        return self.llm.chat_template.reasoning_format if self.has_chat_template else None

    @cached_property
    def corpora(self) -> Corpora:
        """Corpora that requests may name."""
        return Corpora(self.llm.bundle.config.vocab_size, tokenizer_digest(self.tokenizer))

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens' ids by name, such as `</s>`."""
        return special_token_ids(self.tokenizer)

    @cached_property
    def _longest_token(self) -> int:
        return max(len(token) for token in self.tokenizer.get_vocab())

    @cached_property
    def tokenizer_info(self) -> dict[str, Any]:
        """Special tokens by name, the tokenizer's class, the chat template, and the sizes of vocabulary and context."""
        path = self.llm.tokenizer_dir / "tokenizer_config.json"
        if is_gguf(self.llm.tokenizer_dir):  # the config that transformers would save for the special tokens
            tokenizer: Any = self.tokenizer
            config = {**tokenizer.special_tokens_map, "tokenizer_class": type(tokenizer).__name__}
        else:
            config = read_json(path) if path.is_file() else {}
        found = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return found | {
            "tokenizer_class": config.get("tokenizer_class"),
            "chat_template": self.llm.chat_template.source if self.has_chat_template else None,
            "vocab_size": self.llm.bundle.config.vocab_size,
            "model_max_length": self.max_model_len,
        }

    def check_name(self, name: str | None) -> None:
        """HTTPError if the name is another model's; the error has the names of this server's model."""
        if name is None or name in self.names or self.takes_any_name:
            return
        own = ", ".join(f"`{own}`" for own in self.names)
        message = f"the model `{name[:200]}` does not exist; this server has {own}"
        raise HTTPError(404, message, param="model", code="model_not_found")

    @property
    def max_text_len(self) -> int:
        """Number of characters that the longest text of `max_model_len` tokens can have."""
        return self.max_model_len * self._longest_token

    def check_text_len(self, num_characters: int, param: str) -> None:
        """HTTPError for a text with more characters than any prompt that fits; it runs before the text is tokenized."""
        if num_characters > self.max_text_len:
            what = f"the text is longer than {self.max_model_len} tokens can be: {num_characters} characters"
            raise HTTPError(400, what, param=param, code="context_length_exceeded")

    def check_has_no_special_token(self, texts: Any, param: str) -> None:
        """HTTPError for a special token in a text; texts inside lists and objects are checked too."""
        if isinstance(texts, str):
            found = next((token for token in self.special_tokens if token and token in texts), None)
            if found is not None:
                raise HTTPError(400, f"a text contains a special token, {found!r}", param=param, code="special_token")
        elif isinstance(texts, dict | list | tuple):
            for inner in texts.values() if isinstance(texts, dict) else texts:
                self.check_has_no_special_token(inner, param)

    def check_drafts_fit(self, draft_len: int, param: str) -> None:
        """HTTPError if the engine takes no drafts of this length."""
        longest = self.llm.engine.max_draft_len
        if draft_len > longest:
            raise HTTPError(400, f"the engine takes drafts of at most {longest} tokens: {draft_len}", param=param)


def _content(token: Any) -> str | None:
    """Text of a special token, which is given as a string or as an object that has one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def check_can_serve(llm: LLM) -> None:
    """SpecDecError for an engine without a tokenizer, since clients send and read texts."""
    if llm.tokenizer is None:
        raise SpecDecError(
            "serving needs a tokenizer, and the engine has none", hint="name a tokenizer", code="no_tokenizer"
        )


def prepare_chat(llm: LLM) -> bool:
    """Load the chat template before the first client needs it; returns True if there is one."""
    is_there = has_chat_template(llm.tokenizer_dir)
    if is_there:
        llm.chat_template  # noqa: B018  # it is kept
    return is_there
