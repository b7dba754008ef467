"""Request bodies: the fields of OpenAI's and Anthropic's protocols, of vLLM and other servers, and our own.

Unknown fields are ignored. Fields that clients know and this server does not support are refused, unless their value
asks for nothing (`REFUSED`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from commands.output.help import config_flag
from commands.serve.errors import HTTPError, of_validation
from runtime.checkpoint.generation_config import Range
from runtime.core.params import (
    CONVERSATION_FIELDS,
    FIELDS,
    REQUEST_FIELDS,
    ConversationParams,
    GrammarKind,
    Protocol,
    RequestField,
    names_in,
)
from runtime.drafters.lists import ListForm
from runtime.drafters.specs import lookups

MAX_PROMPTS = 4096
_MOST_DEPTH = 200
"""Depth of nested lists and objects that pydantic's parser accepts."""
MAX_STOP_WORDS = 32
MAX_CHOICES = 1024
MAX_TOOLS = 1024
MAX_CALLS = 1024

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
LaxTokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=False)]
"""A token id that may be a text: keys of JSON objects are texts, and a prompt may be texts."""
StopWord = Annotated[str, Field(min_length=1, max_length=256)]
StopWords = StopWord | Annotated[list[StopWord], Field(max_length=MAX_STOP_WORDS)]


FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s\"\\<>{}\[\]()=,]+$")]
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
ConfigText = Annotated[str, Field(max_length=64)]
ConfigList = Annotated[
    list[Count | Annotated[list[Count], Field(max_length=4, fail_fast=True)]], Field(max_length=4, fail_fast=True)
]
TokenIds = Annotated[list[LaxTokenId], Field(fail_fast=True)]
Prompts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class Lenient(BaseModel):
    """Base of bodies: unknown fields are ignored, numbers must be finite, and a number or `true` is not taken for a
    text, as with OpenAI.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)

    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {}
    """The body's names, by patterns of names in a chat request that is made from the body."""


class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


CorpusName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]


class OwnLength(Lenient):
    model_config = ConfigDict(extra="forbid")

    draft_len: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="The longest draft.")
    corpus: CorpusName | Annotated[list[CorpusName], Field(min_length=1, max_length=16)] | None = Field(
        None, description="Corpora that are searched too, by their names."
    )

    @property
    def corpora(self) -> list[str]:
        """Names of the corpora."""
        return [self.corpus] if isinstance(self.corpus, str) else self.corpus or []


def _config_fields() -> dict[str, Any]:
    """A field of the body for each lookup; its value is the list that the lookup's flag takes."""
    fields: dict[str, Any] = {}
    for spec in lookups():
        form = spec.description.form
        assert isinstance(form, ListForm)
        kind = ConfigText | ConfigList | Count | None if form.least == 1 else ConfigText | ConfigList | None
        fields[spec.description.flag] = (
            kind,
            Field(None, description=f"As `{config_flag(spec)}`: {form.examples[-1]}."),
        )
    return fields


if TYPE_CHECKING:

    class Speculative(OwnLength):
        """Drafting for one request. `draft_len` alone shortens the server's own drafts."""
else:
    Speculative = create_model(
        "Speculative",
        __base__=OwnLength,
        __doc__="How to draft for one request. `draft_len` alone shortens the server's own drafts.",
        **_config_fields(),
    )


class TextPart(Lenient):
    type: Literal["text"]
    text: str


class RefusalPart(Lenient):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "a text"


MessagePart = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")], Discriminator(_part_kind)
]


class Prediction(Lenient):
    """Predicted output: the probable answer, which is drafted as long as it is right."""

    type: Literal["content"]
    content: str | list[TextPart]


class NamedSchema(Lenient):
    name: str | None = None
    description: str | None = None
    the_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The output is valid by the schema in either case.")


class ResponseFormat(Lenient):
    """OpenAI's `response_format`. The schema may also stand in a field of its own, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    the_schema: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.form is None:
            raise pydantic_core.PydanticCustomError("no_schema", "json_schema has no `schema`")
        return self

    @property
    def form(self) -> dict[str, Any] | None:
        """The JSON schema; None for plain text."""
        named = self.json_schema.the_schema if self.json_schema is not None else None
        schema = self.the_schema if self.type == "json_object" or named is None else named
        if self.type == "text":
            return None
        return {"type": "object"} if self.type == "json_object" and schema is None else schema


Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]


class StructuredOutputs(Lenient):
    """vLLM's `structured_outputs`. Its options that allow less freedom in JSON hold here in any case."""

    model_config = ConfigDict(extra="forbid")

    the_json: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _has_form(self) -> "StructuredOutputs":
        if not any((self.the_json is not None, self.json_object, self.regex, self.choice, self.grammar)):
            reason = "it has none of `json`, `json_object`, `regex`, `choice` and `grammar`"
            raise pydantic_core.PydanticCustomError("no_form", reason)
        return self


class Forms(Lenient):
    """Fields that ask for a form of the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = Field(None, description="llama.cpp's.")
    grammar: str | None = Field(None, description="llama.cpp's: in GBNF's notation, or in Lark's.")
    regex: str | None = Field(None, description="SGLang's.")
    choice: Choices | None = None
    ebnf: str | None = Field(None, description="SGLang's.")

    @property
    def forms(self) -> list[tuple[str, GrammarKind, Any]]:
        """The grammars that are asked for: the body's field, and the parameter of `SamplingParams` with its value."""
        format_of, structured = self.response_format, self.structured_outputs or StructuredOutputs.model_construct()
        any_object = {"type": "object"} if structured.json_object else None
        all_forms: list[tuple[str, GrammarKind, Any]] = [
            ("response_format", "json_schema", None if format_of is None else format_of.form),
            *(("structured_outputs", "json_schema", schema) for schema in (structured.the_json, any_object)),
            ("structured_outputs", "regex", structured.regex),
            ("structured_outputs", "choice", structured.choice),
            ("structured_outputs", "grammar", structured.grammar),
            *(("guided_json", "json_schema", self.guided_json), ("json_schema", "json_schema", self.json_schema)),
            *(("guided_regex", "regex", self.guided_regex), ("regex", "regex", self.regex)),
            *(("guided_choice", "choice", self.guided_choice), ("choice", "choice", self.choice)),
            *(("guided_grammar", "grammar", self.guided_grammar), ("ebnf", "grammar", self.ebnf)),
            ("grammar", "grammar", self.grammar or None),  # llama.cpp's clients send an empty one
        ]
        return [form for form in all_forms if form[2] is not None]


Budget = Annotated[int, Field(ge=0, le=2**31 - 1)]
NO_LIMIT = -1
BudgetOrNone = Annotated[int, Field(ge=NO_LIMIT, le=2**31 - 1)]
"""A budget as llama.cpp has it, where -1 is no limit."""


class Budgets(Lenient):
    """`thinking_token_budget` under other servers' names. A request may use one of the names; -1 counts as given."""

    thinking_budget: Budget | None = Field(None, description="`thinking_token_budget` by Qwen's name.")
    thinking_budget_tokens: BudgetOrNone | None = Field(None, description="The same by llama.cpp's; -1 is no limit.")
    reasoning_budget_tokens: BudgetOrNone | None = Field(None, description="The same.")
    reasoning_budget: BudgetOrNone | None = Field(None, description="The same.")

    @property
    def budgets(self) -> dict[str, int]:
        """The budgets for thinking that are given, by their paths in the body; -1 is no limit."""
        values = {name: getattr(self, name) for name in ("thinking_token_budget", *Budgets.model_fields)}
        given = {name: value for name, value in values.items() if value is not None}
        for name in ("reasoning", "thinking"):
            holder: Effort | Thinking | None = getattr(self, name, None)
            given |= {} if holder is None else holder.budgets
        return given

    @property
    def budget(self) -> int | None:
        """The budget for thinking, -1 for no limit; HTTPError if the request gives several."""
        names = list(self.budgets)
        if len(names) > 1:
            shown = " and ".join(f"`{name}`" for name in names)
            what = f"an output can have only one budget for thinking, and the request gives several: {shown}"
            raise HTTPError(400, what, param=names[-1].partition(".")[0], code="invalid_value")
        return self.budgets[names[0]] if names else None

    @property
    def budget_in_chat(self) -> dict[str, int]:
        """The budget as a field of a chat request, where only llama.cpp's names accept -1."""
        budget = self.budget
        if budget is None:
            return {}
        return {"reasoning_budget" if budget == NO_LIMIT else "thinking_token_budget": budget}


class Effort(Lenient):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: str | None = None
    max_tokens: Budget | None = Field(None, description="OpenRouter's: as `thinking_token_budget`.")

    @property
    def budgets(self) -> dict[str, int]:
        return {} if self.max_tokens is None else {"reasoning.max_tokens": self.max_tokens}


class Reasoning(Effort):
    """OpenRouter's object `reasoning`."""

    enabled: bool | None = Field(None, description="false: as `reasoning_effort` none.")
    exclude: bool | None = Field(None, description="true: as `include_reasoning` false.")


class Thinking(Lenient):
    """Anthropic's object `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = Field(None, description="As `thinking_token_budget`; a model may have no thinking.")

    @property
    def budgets(self) -> dict[str, int]:
        is_given = self.budget_tokens is not None and self.type != "disabled"
        return {"thinking.budget_tokens": self.budget_tokens or 0} if is_given else {}


def _bounded(kind: Any, bounds: Range) -> Any:
    """Type of a number in a body, with its bounds; a whole number's bounds are integers, as a JSON schema
    shows them.
    """
    least, most = (None if math.isinf(one) else kind(one) for one in (bounds.least, bounds.most))
    return Annotated[kind, Field(gt=least, le=most) if bounds.is_open else Field(ge=least, le=most)]


def _type_in_body(hint: Any, described: RequestField) -> Any:
    """The type of a field in a body, from its type in Python, such as `int | None` or `Sequence[str] | None`."""
    kinds = [one for one in (get_args(hint) if NoneType in get_args(hint) else (hint,)) if one is not NoneType]
    kind = kinds[0] if len(kinds) == 1 else kinds
    bounds, at_most = described.in_body or described.range, Field(max_length=described.most_items)
    if kind is bool:
        return bool
    if kind in (int, float):
        return _bounded(kind, bounds)
    if kind == Sequence[int]:
        return Annotated[list[TokenId], at_most]
    if kind == Mapping[int, float]:
        number: Any = _bounded(float, bounds)
        return Annotated[dict[LaxTokenId, number], at_most]
    words = Annotated[list[StopWord], at_most]
    return words if kind == Sequence[str] else StopWord | words


def _fields_in(protocol: Protocol, *, of_conversation: bool = False) -> dict[str, Any]:
    """The request's fields that the protocol has, under the protocol's names: those of `ConversationParams`, or all
    others but the fields of grammars, which are in `Forms`.
    """
    fields: dict[str, Any] = {}
    for name, in_body in names_in(protocol).items():
        hint, described = REQUEST_FIELDS[name]
        if described.shapes != "form" and (name in CONVERSATION_FIELDS) == of_conversation:
            kind = _type_in_body(hint, described) | None
            fields[in_body] = (kind, Field(None, description=described.help))
    return fields


if TYPE_CHECKING:

    class Described(Lenient):
        """A body whose fields are made from `REQUEST_FIELDS`."""

        def __getattr__(self, name: str) -> Any: ...

    class CompletionFields(Described): ...

    class ChatFields(Described): ...

    class ConversationFields(Described): ...

    class ResponsesFields(Described): ...

    class MessagesFields(Described): ...
else:
    Described = Lenient
    CompletionFields = create_model("CompletionFields", __base__=Lenient, **_fields_in("completions"))
    ChatFields = create_model("ChatFields", __base__=Lenient, **_fields_in("chat"))
    ConversationFields = create_model(
        "ConversationFields", __base__=Lenient, **_fields_in("chat", of_conversation=True)
    )
    ResponsesFields = create_model("ResponsesFields", __base__=Lenient, **_fields_in("responses"))
    MessagesFields = create_model("MessagesFields", __base__=Lenient, **_fields_in("messages"))


CacheSalt = Annotated[
    Annotated[str, Field(min_length=1, max_length=1024)] | None,
    Field(description="Whose keys and values it may find: requests with the same text here."),
]


class Generation(Forms, Budgets, Described):
    """Fields that completions and chat share and `REQUEST_FIELDS` does not describe."""

    PROTOCOL: ClassVar[Protocol]

    _corpus_owners: tuple[str | None, ...] = PrivateAttr((None,))
    """Owners whose corpora the request may name (`commands.serve.corpora`)."""

    model: str | None = Field(None, description="The model's name; 404 for another one.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Who asks, for the turns of clients.")
    priority: Priority | None = Field(
        None, description="Place among the requests of one client: the lowest is first, 0 without it."
    )
    cache_salt: CacheSalt = None
    speculative: bool | Speculative | None = Field(
        None, description="false: nothing is drafted for this request; an object: how."
    )
    prediction: Prediction | None = None
    return_token_kinds: bool | None = Field(
        None, description="Add `tokens` to each choice of a stream: each token's text and kind."
    )

    @property
    def given_params(self) -> dict[str, Any]:
        """The request's fields by the names of `SamplingParams`. A budget of None removes the server's own limit."""
        names = {name: in_body for name, in_body in names_in(self.PROTOCOL).items() if name in FIELDS}
        values = {name: getattr(self, in_body) for name, in_body in names.items() if FIELDS[name][1].shapes != "form"}
        given = {name: value for name, value in values.items() if value is not None}
        if (budget := self.budget) is not None:
            given["thinking_token_budget"] = None if budget == NO_LIMIT else budget
        return given

    @property
    def field_names(self) -> dict[str, str]:
        """This body's names of the fields of `SamplingParams`, for errors. The grammar of calls has the
        name `tools`.
        """
        names: dict[str, str] = {**names_in(self.PROTOCOL), "lark": "tools"}
        names |= dict.fromkeys(["thinking_token_budget"], next(iter(self.budgets), "thinking_token_budget"))
        return names | {kind: name for name, kind, _ in self.forms}

    @property
    def tells_of_tokens(self) -> bool:
        """True if an answer has facts about each token, and so may be long."""
        return False


def _of_one_kind(prompt: Any) -> Any:
    """The list, unless it mixes texts and token ids: pydantic would report a mixture once for each form."""
    if isinstance(prompt, list) and prompt:
        others = (i for i, one in enumerate(prompt) if type(one) is not type(prompt[0]))
        kinds = (str, int, list)
        if isinstance(prompt[0], kinds) and (place := next(others, None)) and isinstance(prompt[place], kinds):
            reason = "a list has texts, token ids, or lists of token ids; item {place} is not of the kind of the first"
            raise pydantic_core.PydanticCustomError("mixed_prompts", reason, {"place": place})
    return prompt


class CompletionRequest(Generation, CompletionFields):
    PROTOCOL = "completions"

    prompt: Annotated[
        str | TokenIds | Prompts | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)],
        BeforeValidator(_of_one_kind),
    ]
    echo: bool | None = None

    @property
    def tells_of_tokens(self) -> bool:
        return self.logprobs is not None or bool(self.echo or self.return_token_ids)


class CalledFunction(Lenient):
    name: FunctionName
    arguments: str | dict[str, Any] | None = Field(None, description="A JSON object, or the text of one.")


class MessageCall(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = Field(
        None, description="Left out, or null, only where there are calls or a `refusal`."
    )
    refusal: str | None = Field(None, description="An assistant's refusal to answer, which is its text.")
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same.")
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise pydantic_core.PydanticCustomError("no_content", "a message has no `content`")
        if self.tool_calls and self.role != "assistant":
            raise pydantic_core.PydanticCustomError("no_caller", "a message has `tool_calls`, and is no assistant's")
        has_part = isinstance(self.content, list) and any(isinstance(part, RefusalPart) for part in self.content)
        if self.role != "assistant" and (has_part or self.refusal):
            raise pydantic_core.PydanticCustomError("no_refuser", "a message has a `refusal`, and is no assistant's")
        return self

    @property
    def text(self) -> str:
        return text_of(self.content) + (self.refusal or "")


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object":
        raise pydantic_core.PydanticCustomError(
            "no_object", "arguments are an object, and not of type {kind}", {"kind": kind}
        )
    return schema


class Function(Lenient):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = Field(
        None, description="JSON schema of the arguments, which are an object."
    )
    strict: bool | None = Field(None, description="Calls have valid arguments with `tool_choice` auto too.")


class FunctionTool(Lenient):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Lenient):
    name: FunctionName


class NamedTool(Lenient):
    type: Literal["function"] = "function"
    function: NamedFunction


class Allowance(Lenient):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]


class AllowedTools(Lenient):
    """A choice of some of the tools: the request is answered as if it had no others."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowance


class Conversation(ConversationFields):
    """Fields of a conversation: messages and tools."""

    _places: list[str] | None = PrivateAttr(None)
    """Path of each message in the client's body, if the body is of another protocol."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="A variable for the chat template, which it may have no use for."
    )

    def place_of(self, number: int) -> str:
        """Path of a message in the client's body; for a number after the last, the field that has all messages."""
        if self._places is None:
            return f"messages.{number}"
        return self._places[number] if number < len(self._places) else self.said_in

    @property
    def said_in(self) -> str:
        """The field in which the client wrote the last message."""
        return "messages" if self._places is None else self._places[-1].partition(".")[0]

    @property
    def params_of_conversation(self) -> ConversationParams:
        values = {name: getattr(self, name) for name in CONVERSATION_FIELDS}
        return ConversationParams(**{name: value for name, value in values.items() if value is not None})

    @property
    def call_choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """Choice among the tools that may be called."""
        choice = self.tool_choice or "auto"
        return choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice

    @property
    def shown_tools(self) -> list[FunctionTool]:
        """Tools that are written into the prompt: all tools, whichever may be called, so that the beginning of the
        prompt is in the K/V cache.
        """
        return self.tools or []

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """Tools that may be called."""
        if isinstance(self.tool_choice, AllowedTools):
            names = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in self.tools or () if tool.function.name in names]
        return [] if self.tool_choice == "none" else self.tools or []


class ChatRequest(Conversation, Generation, ChatFields):
    PROTOCOL = "chat"

    _takes_what_fits: bool = PrivateAttr(False)
    """True if `max_tokens` may be more than there is room for."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    include_reasoning: bool | None = Field(None, description="false: what was thought is not told.")
    separate_reasoning: bool | None = Field(None, description="false: what was thought is part of the content.")

    @model_validator(mode="after")
    def _in_own_fields(self) -> "ChatRequest":
        """Copy the settings of `reasoning` and `thinking` beside the budget into the fields for them, unless those
        fields are given.
        """
        if self.reasoning is not None:
            effort = "none" if self.reasoning.enabled is False else self.reasoning.effort
            self.reasoning_effort = effort if self.reasoning_effort is None else self.reasoning_effort
            self.include_reasoning = False if self.reasoning.exclude else self.include_reasoning
        if self.thinking is not None:
            variables = {"enable_thinking": self.thinking.type != "disabled"}
            self.chat_template_kwargs = variables | (self.chat_template_kwargs or {})
        return self

    @property
    def field_names(self) -> dict[str, str]:
        of_calls = "tools" if self.callable_tools or not self.forms else self.forms[0][0]
        length = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().field_names | {"prompt": self.said_in, "lark": of_calls} | length

    @property
    def tells_of_tokens(self) -> bool:
        return bool(self.logprobs or self.return_token_ids)


class InputPart(Lenient):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


def text_of(content: str | Sequence[TextPart | RefusalPart | InputPart] | None) -> str:
    """The text of a message's content: the content itself, or the texts of its parts, joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


InputParts = list[InputPart | RefusalPart]


class InputMessage(Lenient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | InputParts


class InputCall(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class InputCallOutput(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts


class InputReasoning(Lenient):
    type: Literal["reasoning"]
    summary: list[InputPart] | None = None
    content: list[InputPart] | None = None


def _item_type(item: Any) -> Any:
    """Type of an item; an item without a type is a message."""
    return (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", "message")


InputItem = Annotated[
    Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputMessage, Tag("message")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="items of this type are not supported, only message, function_call, function_call_output "
        "and reasoning",
    ),
]


class OutputFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    the_schema: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def document(self) -> dict[str, Any]:
        """The format as a chat's `response_format`."""
        return self.model_dump(by_alias=True, exclude={"name"})


class OutputText(Lenient):
    format: OutputFormat | None = None


def _without_logprobs(include: list[str]) -> list[str]:
    if "message.output_text.logprobs" in include:
        reason = "responses have no log-probabilities: ask for them in chats or completions"
        raise pydantic_core.PydanticCustomError("logprobs", reason)
    return include


class ResponsesRequest(Generation, ResponsesFields):
    """OpenAI's Responses. Tools of other types than `function` are not offered to the model."""

    PROTOCOL = "responses"

    CHAT_FIELDS = {
        r"max_(completion_)?tokens": "max_output_tokens",
        "response_format": "text.format",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"tool_choice\.allowed_tools": "tool_choice",
    }

    input: str | Annotated[list[InputItem], Field(max_length=4096)]
    instructions: str | None = None
    max_tokens: None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Effort | None = None
    text: OutputText | None = None
    store: bool | None = Field(None, description="Unless it is false, the response can be continued and asked for.")
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Annotated[list[str], AfterValidator(_without_logprobs)] | None = None


class AnthropicBlock(Lenient):
    """A part of a message: `text`, `thinking`, `tool_use` or `tool_result`."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "AnthropicBlock":
        needed = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
        name = needed.get(self.type)
        if name is not None and getattr(self, name) is None:
            raise pydantic_core.PydanticCustomError("no_part", f"a {self.type} has no `{name}`")
        return self


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class AnthropicChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


def _without_beginning(messages: list[AnthropicMessage]) -> list[AnthropicMessage]:
    if messages[-1].role == "assistant":
        reason = "the last one is the assistant's, and an answer does not go on from it: end with the user's"
        raise pydantic_core.PydanticCustomError("prefilled", reason)
    return messages


class OutputConfig(Lenient):
    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None


class CountRequest(Lenient):
    """Anthropic's request to count the tokens of a message's prompt."""

    CHAT_FIELDS = {
        "response_format": "output_config.format",
        r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
        r"tools\.(\d+)\.function": r"tools.\1",
    }

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    system: str | list[TextPart] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None


class MessageMetadata(Lenient):
    user_id: str | None = Field(None, description="Who asks, for the turns of clients.")


class MessagesRequest(CountRequest, Forms, Budgets, MessagesFields):
    """Anthropic's Messages. Tools of Anthropic's own servers are not offered to the model."""

    PROTOCOL: ClassVar[Protocol] = "messages"

    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=4096), AfterValidator(_without_beginning)
    ]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[StopWord], Field(max_length=MAX_STOP_WORDS)] | None = None
    stream: bool | None = None
    speculative: bool | Speculative | None = None
    metadata: MessageMetadata | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="`output_config.format` by its name before.")


class TokenizeRequest(Conversation):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Lenient):
    model: str | None = None
    tokens: list[TokenId]


class AddCorpusRequest(Lenient):
    """A corpus to add, as SGLang's clients ask for it."""

    corpus_id: CorpusName | None = Field(None, description="Its name; one is made up for none.")
    documents: Annotated[list[str], Field(min_length=1, max_length=1 << 16)] | None = Field(
        None, description="The texts."
    )
    file_path: str | None = Field(None, description="SGLang's; refused, for requests name no files.")
    cache_salt: CacheSalt = None


class RemoveCorpusRequest(Lenient):
    corpus_id: CorpusName
    cache_salt: CacheSalt = None


def _asks_nothing(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == one and type(value) is type(one) for one in neutral)


def _unless(values: dict[tuple[str, ...], tuple[Any, ...]]) -> dict[str, Callable[[Any], bool]]:
    """A test for a field: True for a value that asks for nothing, which is null or one of `values`."""
    return {name: _asks_nothing(*neutral) for names, neutral in values.items() for name in names}


# fmt: off
REFUSED = _unless({
    (
        "tools", "functions", "logits_processors", "documents", "stop_regex", "stop_sequences", "lora",
        "banned_tokens", "bad_words_ids", "banned_strings",
    ): ([],),
    ("tool_choice", "function_call"): ("none", "auto"),
    ("modalities",): (["text"],),
    (
        "audio", "web_search_options", "reasoning_effort", "reasoning",
        "prompt_logprobs", "prompt_embeds", "structural_tag",
        "guided_whitespace_pattern", "chat_template", "custom_logit_processor",
        "custom_params", "session_params", "lora_path", "input_ids", "inputs", "max_new_tokens", "do_sample",
        "truncate", "adapter_id", "guideline", "samplers", "random_seed", "max_length", "thinking",
        "enable_thinking", "repetition_context_size", "max_thinking_tokens", "drafter",
    ): (),
    ("verbosity",): ("medium",),
    ("suffix", "input_prefix", "input_suffix", "custom_token_bans", "negative_prompt"): ("",),
    ("best_of", "num_beams"): (1,),
    (
        "use_beam_search", "return_tokens_as_token_ids",
        "no_stop_trim", "return_hidden_states", "separate_reasoning", "watermark",
        "return_full_text", "decoder_input_details",
    ): (False,),
    ("length_penalty", "typical_p", "repeat_penalty", "tfs_z", "guidance_scale"): (1.0, 1),
    (
        "min_new_tokens", "top_n_tokens", "n_probs", "min_keep",
        "mirostat", "repetition_penalty_range",
    ): (0,),
    (
        "add_special_tokens", "include_reasoning", "spaces_between_special_tokens",
    ): (True,),
    ("vllm_xargs", "chat_template_kwargs", "mm_processor_kwargs", "parameters"): ({},),
    ("n_predict", "repeat_last_n", "sampler_seed"): (-1,),
    (
        "dry_multiplier", "xtc_probability", "dynatemp_range", "top_a", "epsilon_cutoff", "eta_cutoff",
        "smoothing_factor", "penalty_alpha", "top_nsigma",
    ): (0.0, 0),
    ("top_n_sigma",): (-1.0, -1, 0.0, 0),
    ("adaptive_target",): (-1.0, -1),
    ("t_max_predict_ms",): (-1, 0),
    ("reasoning_format",): ("none",),
})
"""Fields of OpenAI's, vLLM's, SGLang's, TGI's, transformers', llama.cpp's and other servers' requests that are refused,
with a test for values that ask for nothing. Our own `drafter` is among them, since it names code.
"""
_REFUSED_IN_CHAT = _unless({
    ("echo", "add_special_tokens"): (False,),  # a template has special tokens of its own
})
_REFUSED_IN_RESPONSES = _unless({
    ("messages", "max_completion_tokens", "conversation", "prompt"): (),
    ("background",): (False,),
    ("truncation",): ("disabled",),
    ("top_logprobs",): (0,),
})
_REFUSED_IN_MESSAGES = _unless({
    ("container", "thread", "compaction", "prediction", "max_completion_tokens"): (),
    ("mcp_servers",): ([],),
    ("echo",): (False,),
    ("top_logprobs",): (0,),
})
# fmt: on


@cache
def _refused_params(protocol: Protocol | None) -> dict[str, Callable[[Any], bool]]:
    """Names of request fields that the protocol lacks; with None, of fields that change a prompt."""
    return {
        name: _asks_nothing(*described.neutral)
        for name, (_, described) in REQUEST_FIELDS.items()
        if (described.shapes == "prompt" if protocol is None else described.names.get(protocol) != name)
    }


def refused_field(body: dict[str, Any], model: type[Lenient]) -> str | None:
    """The first field that asks for something that this server does not support. Fields of the body's own class are
    supported.
    """
    of_model = {
        ChatRequest: _REFUSED_IN_CHAT,
        ResponsesRequest: _REFUSED_IN_RESPONSES,
        MessagesRequest: _REFUSED_IN_MESSAGES,
    }
    refused = _refused_params(getattr(model, "PROTOCOL", None)) | REFUSED | of_model.get(model, {})
    asked = ((name, value) for name, value in body.items() if name in refused and name not in model.model_fields)
    return next((name for name, value in asked if not refused[name](value)), None)


def validate_chat(chat: dict[str, Any]) -> ChatRequest:
    """Validate a chat request made from another protocol's body; fields that are None are left out. Messages carry the
    `place` where the client wrote them, for errors.
    """
    chat = {
        name: value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in chat.items()
        if value is not None
    }
    places = [message["place"] for message in chat["messages"]]
    try:
        found = validate_body(chat, ChatRequest)
    except HTTPError as error:
        named = re.match(r"messages(?:\.(\d+))?", error.message)
        if named is None:
            raise
        place = places[int(named[1])] if named[1] else places[-1].partition(".")[0]
        what = place + error.message[named.end() :]
        raise HTTPError(400, what, param=place.partition(".")[0], code=error.code) from None
    found._places = places
    return found


Body = TypeVar("Body", bound=Lenient)


def parse_body(body: bytes, model: type[Body]) -> Body:
    """Parse a body as `model`, whatever its Content-Type says; HTTPError unless it is JSON that `model` takes."""
    try:
        # This parser stops at a depth of 200, and takes neither NaN nor half of a surrogate pair.
        value: Any = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            what = f"the body is nested deeper than {_MOST_DEPTH} lists and objects"
            raise HTTPError(400, what, code="nested_too_deep") from None
        raise HTTPError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return validate_body(value, model)


def validate_body(value: Any, model: type[Body]) -> Body:
    """`parse_body` for JSON that is parsed already."""
    if not isinstance(value, dict):
        raise HTTPError(400, f"the body is not a JSON object: {type(value).__name__}", code="invalid_json")
    refused = refused_field(value, model)
    if refused is not None:
        raise HTTPError(400, f"this server does not support `{refused}`", param=refused, code="unsupported")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error, value) from None
