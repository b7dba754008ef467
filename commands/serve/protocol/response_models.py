"""Models of the responses that the routes document: keys that clients may rely on. Real responses have further keys."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """A part of a document, which has more keys than are described."""

    model_config = ConfigDict(extra="allow")


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any]
    completion_tokens_details: dict[str, Any]


class TextChoice(ResponseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(ResponseModel):
    """Completions of one or several prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    metrics: dict[str, Any]


class AnsweredFunction(ResponseModel):
    name: str
    arguments: str


class AnsweredCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[AnsweredCall] = []


class ChatChoice(ResponseModel):
    index: int
    message: AnsweredMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(ResponseModel):
    """The assistant's next messages."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: dict[str, Any]


class ResponseItem(ResponseModel):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]


class ResponseUsage(ResponseModel):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, Any]
    output_tokens_details: dict[str, Any]


class ResponseAnswer(ResponseModel):
    """A response of OpenAI's Responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage


class MessageBlock(ResponseModel):
    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(ResponseModel):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(ResponseModel):
    """A message of Anthropic's Messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class ServedFacts(ResponseModel):
    """Facts about the server in `/v1/models`: the bits of its model's weights, its machine, its drafter."""

    bits: str
    dtype: str
    machine: str
    drafter: str
    max_draft_len: int


class ModelAnswer(ResponseModel):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    specdec: ServedFacts


class ModelsAnswer(ResponseModel):
    """The model by each of its names."""

    object: Literal["list"]
    data: list[ModelAnswer]
    models: list[dict[str, Any]]


class ErrorWords(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseModel):
    """An error, as OpenAI's clients read it."""

    error: ErrorWords


class AnthropicErrorWords(ResponseModel):
    type: str
    message: str


class AnthropicError(ResponseModel):
    """An error, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicErrorWords
