"""Sampling parameters: as Python users write them, and as an engine takes them. Imports no torch.

`SamplingParams` has vLLM's names and defaults, and texts; `SamplingConfig` has TensorRT-LLM's names and defaults, and
tokens.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_type_hints

from runtime.checkpoint.generation_config import ANY_NUMBER, DefaultField, Range
from runtime.util.errors import UsageError

Protocol = Literal["completions", "chat", "responses", "messages"]
"""Protocols of requests' bodies: OpenAI's completions, chat and Responses, and Anthropic's Messages. A batch's requests
are of the first two.
"""
_OPENAI: tuple[Protocol, ...] = ("completions", "chat", "responses")


@dataclass(frozen=True)
class Flag:
    """A command's flag that sets the field."""

    shown: str | None = None
    """The default that help shows; None for the field's."""
    help: str | None = None
    """The flag's own help; None for the field's."""


Shapes = Literal["draw", "scores", "mask", "end", "prompt", "form"]
"""Part of the answer that a field affects: the draw of a sample, which greedy requests ignore; scores that depend on
earlier tokens, greedy or not; the set of tokens that may be chosen; the output's end; the prompt; or the form of the
output's text.
"""


@dataclass(frozen=True)
class RequestField:
    """Description of a request's field, without its type and default, which stand in the class.

    Checks of values, flags, bodies of requests, refusals, models' defaults and JSON records are made from it.
    """

    help: str
    names: Mapping[Protocol, str]
    """The field's name in each protocol that has it. The other protocols refuse it unless its value is `neutral`."""
    shapes: Shapes | None = None
    range: Range = ANY_NUMBER
    hint: str = "0 has no effect"
    """Hint for a value outside `range`."""
    in_body: Range | None = None
    """Range in bodies of requests; None for `range`."""
    most_items: int = 32
    """Most items of a list in a body."""
    neutral: tuple[Any, ...] = ()
    """Values, beside None, that ask for nothing."""
    flag: Flag | None = None
    config: str | None = None
    """Name in `SamplingConfig`, if it differs."""
    bans: bool = False
    """True if a field that shapes scores can forbid all tokens."""
    in_model: bool = False
    """True if a model's generation_config.json may have a default for the field."""
    in_every_document: bool = False
    """False if JSON documents of earlier versions may lack the field; it then has its default."""

    @property
    def greedy_ignores(self) -> bool:
        return self.shapes == "draw"

    @property
    def can_forbid_all(self) -> bool:
        """True if a value of the field may leave no token that can be chosen."""
        return self.shapes == "mask" or self.bans


def in_all(name: str, *protocols: Protocol) -> dict[Protocol, str]:
    """The same name in all these protocols; if none are given, in OpenAI's three."""
    return dict.fromkeys(protocols or _OPENAI, name)


def fields_of(described: type) -> dict[str, tuple[Any, RequestField]]:
    """The type and the description of each field of a class; TypeError for a field without a description."""
    found = {}
    for name, hint in get_type_hints(described, include_extras=True).items():
        descriptions = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, RequestField)]
        if len(descriptions) != 1:
            raise TypeError(f"a field of a request has no RequestField: {described.__name__}.{name}")
        found[name] = (get_args(hint)[0], descriptions[0])
    return found


Mode = Literal["orchestrator", "leader"]
"""Loop that answers: TensorRT-LLM's V1, which releases a sequence after each step, or V2, which keeps it."""


GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]
MOST_GRAMMAR = 1 << 18
"""Most characters of a grammar."""


def grammar_name(kind: str) -> str:
    """Name for errors of a grammar of this kind: the parameter that it comes from."""
    return "the grammar of calls" if kind == "lark" else kind


@dataclass(frozen=True)
class Grammar:
    """Form that an output's text must have: a JSON schema, a regular expression, a grammar (Lark, or llama.cpp's GBNF),
    or a JSON list of texts to choose from.

    `kind` is also the name of the parameter of `SamplingParams`; `lark` is a grammar that specdec itself writes, in
    llguidance's notation.
    """

    kind: GrammarKind | Literal["lark"]
    text: str

    @property
    def name(self) -> str:
        """Name for errors."""
        return grammar_name(self.kind)

    def __post_init__(self) -> None:
        if len(self.text) > MOST_GRAMMAR:
            raise UsageError(
                f"{self.name} is longer than {MOST_GRAMMAR:,} characters: {len(self.text):,}",
                hint="shorten it",
                field=self.kind,
            )


def is_greedy(temperature: float, top_k: int) -> bool:
    """True if decoding is greedy. At temperatures below 1e-5, logits divided by the temperature exceed the range of
    float32, so that is greedy too.
    """
    return top_k == 1 or temperature < 1e-5


@dataclass(frozen=True)
class SamplingConfig:
    """TensorRT-LLM's names and defaults; `bad_words` and penalties take the prompt into account too, as in
    TensorRT-LLM. Without `penalize_prompt`, presence and frequency penalties count generated tokens only, as OpenAI's
    do. `logit_bias` has pairs (token, bias); a bias is added to its token's logit before anything else. Ids that end an
    output cannot be chosen before the output has `min_tokens` tokens, and other ids than `allowed_token_ids` never.
    After `thinking_token_budget` tokens of thinking, the end of thinking is forced, if the request has the model's
    tags.

    top_k 1 and temperature 0 (below 1e-5) are greedy; top_k 0 leaves the whole vocabulary; top_p 1.0, min_p 0.0,
    no_repeat_ngram_size 0 and neutral penalties (1.0, 0.0, 0.0) change nothing. UsageError if out of range: `top_p` is
    more than 0, where TensorRT-LLM takes 0.0 for none.
    """

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    random_seed: int = 0
    penalize_prompt: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias:
            if not bias < math.inf:
                raise UsageError(
                    f"the bias of token {token} must be a number: {bias}", hint="0 has no effect", field="logit_bias"
                )
        for name, (_, field) in FIELDS.items():
            value = getattr(self, name, None)
            if isinstance(value, Real) and not field.range.has(value):
                raise UsageError(f"{name} must be {field.range.form_of_number}: {value}", hint=field.hint, field=name)
        if any(not word for word in self.bad_words):
            raise UsageError("a bad word has no tokens: ()", hint="leave it out", field="bad_words")
        if self.allowed_token_ids == ():
            raise UsageError(
                "allowed_token_ids allows no token: []",
                hint="leave it out, or name one id or more",
                field="allowed_token_ids",
            )

    def after(self, num_tokens: int) -> "SamplingConfig":
        """The same parameters for the rest of an output, whose first `num_tokens` tokens are in the prompt now."""
        return replace(self, min_tokens=max(self.min_tokens - num_tokens, 0)) if self.min_tokens else self

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.temperature, self.top_k)

    @property
    def has_penalties(self) -> bool:
        """True if there are biases, penalties or bans."""
        names = [name for name, (_, field) in FIELDS.items() if field.shapes == "scores"]
        return any(getattr(self, name) != getattr(GREEDY, name) for name in names)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(one, kind) for one in value)


def _check_type(name: str, value: Any, hint: Any) -> None:
    """UsageError for a value without the type of its field, such as `int | None` or `Sequence[str] | None`."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if value is None and type(None) in kinds:
        return
    if bool in kinds:
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False: {value!r}", hint="leave it out, or give one", field=name)
    elif int in kinds or float in kinds:
        kind, form = (Integral, "an integer") if int in kinds else (Real, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise UsageError(f"{name} must be {form}: {value!r}", hint="leave it out, or correct its value", field=name)
    elif Sequence[int] in kinds or Sequence[str] in kinds:
        item, form = (Integral, "a list of token ids") if Sequence[int] in kinds else (str, "a list of texts")
        form = f"a text or {form}" if str in kinds else form
        if not _is_list_of(item, value) and not (str in kinds and isinstance(value, str)):
            raise UsageError(f"{name} must be {form}: {value!r}", hint="leave it out, or give one", field=name)


def _are_biases(value: Any) -> bool:
    """True for a mapping from token ids to numbers."""
    return isinstance(value, Mapping) and all(
        isinstance(token, Integral) and isinstance(bias, Real) for token, bias in value.items()
    )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a prompt, with vLLM's names and defaults; each field's `RequestField` describes it.

    Without a `seed` every call draws a new seed. A `repetition_penalty` or `no_repeat_ngram_size` of None is the
    model's own (`runtime.checkpoint.generation_config`). `logprobs` are computed from the model's own logits, before
    any penalty or cut. UsageError if a value is out of range.
    """

    n: Annotated[
        int,
        RequestField("Outputs of each prompt.", in_all("n", "completions", "chat"), None, Range(1), "raise it",
                     Range(1, 128), neutral=(1,)),
    ] = 1  # fmt: skip
    temperature: Annotated[
        float,
        RequestField(
            "Divides the logits; 0 is greedy.", in_all("temperature", *_OPENAI, "messages"), "draw", Range(0),
            "0 is greedy, 1 no effect", Range(0, 100), in_model=True, in_every_document=True,
            flag=Flag("1.0 (chat: the model's)"),
        ),
    ] = 1.0  # fmt: skip
    top_p: Annotated[
        float,
        RequestField(
            "Samples among the best tokens of this total probability; 1 is no effect.",
            in_all("top_p", *_OPENAI, "messages"), "draw", Range(0, 1, is_open=True), "1 is no effect", in_model=True,
            in_every_document=True,
            flag=Flag("1.0 (chat: the model's)"),
        ),
    ] = 1.0  # fmt: skip
    top_k: Annotated[
        int,
        RequestField(
            "Samples among this many best tokens; 0 and -1 leave all, 1 is greedy.",
            in_all("top_k", *_OPENAI, "messages"), "draw", Range(0), "0 is the whole vocabulary, 1 greedy",
            Range(-1, 2**63 - 1), in_model=True, in_every_document=True,
            flag=Flag("1; 0 with --temperature, --top-p or --min-p (chat: the model's)"),
        ),
    ] = 0  # fmt: skip
    min_p: Annotated[
        float,
        RequestField(
            "Leaves out tokens below this share of the best token's probability; 0 is off.", in_all("min_p"), "draw",
            Range(0, 1), neutral=(0.0, 0), in_model=True, in_every_document=True,
            flag=Flag("0.0 (chat: the model's)"),
        ),
    ] = 0.0  # fmt: skip
    repetition_penalty: Annotated[
        float | None,
        RequestField(
            "Divides positive scores of tokens that occurred, in the prompt too, and multiplies negative ones; "
            "1 is off.",
            in_all("repetition_penalty"), "scores", Range(0, is_open=True), "1 is no effect",
            Range(0, 100, is_open=True), neutral=(1.0, 1), in_model=True, in_every_document=True,
            flag=Flag("the model's, or 1.0"),
        ),
    ] = None  # fmt: skip
    presence_penalty: Annotated[
        float,
        RequestField(
            "Subtracted from the score of tokens that occurred.", in_all("presence_penalty"), "scores",
            in_body=Range(-2, 2), neutral=(0.0, 0), in_every_document=True,
            flag=Flag(),
        ),
    ] = 0.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        RequestField(
            "Subtracted from a token's score for each occurrence.", in_all("frequency_penalty"), "scores",
            in_body=Range(-2, 2), neutral=(0.0, 0), in_every_document=True,
            flag=Flag(),
        ),
    ] = 0.0  # fmt: skip
    no_repeat_ngram_size: Annotated[
        int | None,
        RequestField(
            "No n-gram of this size occurs twice, the prompt included; 0 is off.", {}, "scores", Range(0), neutral=(0,),
            bans=True, in_model=True, in_every_document=True,
            flag=Flag("the model's, or 0"),
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        RequestField(
            "Seed of the draws: the same request with the same seed has the same output.",
            in_all("seed", *_OPENAI, "messages"), "draw", in_body=Range(-(2**63), 2**64 - 1), config="random_seed",
            in_every_document=True,
        ),
    ] = None  # fmt: skip
    stop: Annotated[
        str | Sequence[str] | None,
        RequestField("An output ends at the first of these texts, and is cut before it.",
                     in_all("stop") | in_all("stop_sequences", "messages"), "end", neutral=([],)),
    ] = None  # fmt: skip
    stop_token_ids: Annotated[
        Sequence[int] | None,
        RequestField("Ids that end an output, beside the model's own.", in_all("stop_token_ids"), "end", neutral=([],)),
    ] = None
    include_stop_str_in_output: Annotated[
        bool,
        RequestField("True: the text keeps the stop text that ended it. As in vLLM.",
                     in_all("include_stop_str_in_output", "completions", "chat"), neutral=(False,)),
    ] = False  # fmt: skip
    skip_special_tokens: Annotated[
        bool,
        RequestField("False: the text has special tokens, such as `<think>`, but the end id that ended it. As in vLLM.",
                     in_all("skip_special_tokens", "completions", "chat"), neutral=(True,)),
    ] = True  # fmt: skip
    bad_words: Annotated[
        Sequence[str] | None,
        RequestField(
            "Texts whose tokens are banned.", in_all("bad_words"), "scores", neutral=([],), bans=True,
            in_every_document=True,
            flag=Flag("none", "Text whose tokens are banned, with or without a space before it; repeatable."),
        ),
    ] = None  # fmt: skip
    ignore_eos: Annotated[
        bool,
        RequestField("True: the model's own end ids are ordinary tokens; `stop_token_ids` end an output all the same.",
                     in_all("ignore_eos"), "end", neutral=(False,)),
    ] = False  # fmt: skip
    max_tokens: Annotated[
        int | None,
        RequestField(
            "Most tokens of an output; None: as many as there is room for.",
            in_all("max_tokens", "completions", "chat", "messages") | in_all("max_output_tokens", "responses"),
            "end", Range(1), "raise it", Range(0, 2**31 - 1),
        ),
    ] = 16  # fmt: skip
    min_tokens: Annotated[
        int,
        RequestField(
            "Least tokens of an output: until then no end id can be chosen and no stop word ends it; 0 is off. "
            "As in vLLM.",
            in_all("min_tokens"), "mask", Range(0), neutral=(0,), in_body=Range(0, 2**31 - 1),
            flag=Flag(),
        ),
    ] = 0  # fmt: skip
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        RequestField(
            "The only ids that can be chosen; the model's end ids are among them only if named. As in vLLM.",
            in_all("allowed_token_ids"), "mask", most_items=1 << 20,
            flag=Flag("all", "Id of a token that may be chosen, and no other may; repeatable."),
        ),
    ] = None  # fmt: skip
    thinking_token_budget: Annotated[
        int | None,
        RequestField(
            "Most tokens that the model thinks in an output; then its own end tag is forced, with 0 at once. "
            "As in vLLM.",
            in_all("thinking_token_budget", *_OPENAI, "messages"), "mask", Range(0), "0 ends thinking at once",
            Range(0, 2**31 - 1),
            flag=Flag("no limit"),
        ),
    ] = None  # fmt: skip
    truncate_prompt_tokens: Annotated[
        int | None,
        RequestField(
            "Keep this many last tokens of a prompt; -1: as many as the engine takes. As in vLLM.",
            in_all("truncate_prompt_tokens", "completions", "chat"), "prompt", in_body=Range(-1, 2**31 - 1),
        ),
    ] = None  # fmt: skip
    logprobs: Annotated[
        int | None,
        RequestField(
            "Log-probabilities of each chosen token and of this many best tokens.",
            in_all("logprobs", "completions") | in_all("top_logprobs", "chat"), None, Range(0), "raise it",
            Range(0, 20), neutral=(False, 0),
        ),
    ] = None  # fmt: skip
    penalize_prompt: Annotated[
        bool,
        RequestField("True: presence and frequency penalties count the prompt's tokens too. A server's never do.", {},
                     neutral=(False,)),
    ] = True  # fmt: skip
    logit_bias: Annotated[
        Mapping[int, float] | None,
        RequestField("Token id -> number that is added to its logit.", in_all("logit_bias"), "scores",
                     in_body=Range(-100, 100), most_items=1024, neutral=({},), bans=True),
    ] = None  # fmt: skip
    return_generation_logits: Annotated[
        bool, RequestField("True: the output has the logits of each generated token.", {}, neutral=(False,))
    ] = False
    receipt: Annotated[
        bool,
        RequestField("True: the output has a receipt, by which its tokens can be computed again and checked.",
                     in_all("receipt", *_OPENAI, "messages"), neutral=(False,)),
    ] = False  # fmt: skip
    json_schema: Annotated[
        str | Mapping[str, Any] | None,
        RequestField("JSON schema that the output is valid by; `{\"type\": \"object\"}` is any object. At most "
                     "one form is given.", in_all("json_schema", *_OPENAI, "messages"), "form"),
    ] = None  # fmt: skip
    regex: Annotated[
        str | None,
        RequestField("Regular expression that the whole output matches, without look-around and back-references.",
                     in_all("regex", *_OPENAI, "messages"), "form"),
    ] = None  # fmt: skip
    grammar: Annotated[
        str | None,
        RequestField("Grammar of the output, in Lark's or GBNF's notation.",
                     in_all("grammar", *_OPENAI, "messages"), "form"),
    ] = None  # fmt: skip
    choice: Annotated[
        Sequence[str] | None,
        RequestField("Texts of which the output is one.", in_all("choice", *_OPENAI, "messages"), "form"),
    ] = None

    def __post_init__(self) -> None:
        for name, (hint, field) in FIELDS.items():
            if field.shapes != "form":
                _check_type(name, getattr(self, name), hint)
        if self.logit_bias is not None and not _are_biases(self.logit_bias):
            raise UsageError(
                f"logit_bias must be numbers by token ids: {self.logit_bias!r}",
                hint="write `{5: -1.0}` for a bias of -1 on token 5",
                field="logit_bias",
            )
        for name, (_, field) in FIELDS.items():
            value, is_in_config = getattr(self, name), (field.config or name) in _CONFIG_NAMES
            if isinstance(value, Real) and not is_in_config and not field.range.has(value):
                raise UsageError(f"{name} must be {field.range.form}: {value}", hint=field.hint, field=name)
        if (kept := self.truncate_prompt_tokens) is not None and kept < 1 and kept != -1:
            what = f"truncate_prompt_tokens must be at least 1, or -1: {kept}"
            raise UsageError(what, hint="-1 keeps as many as the engine takes", field="truncate_prompt_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"min_tokens is more than max_tokens: {self.min_tokens} > {self.max_tokens}"
            raise UsageError(what, hint="lower min_tokens, or raise max_tokens", field="min_tokens")
        for name, words in (("stop", self.stop_words), ("bad_words", tuple(self.bad_words or ()))):
            if any(not word for word in words):
                raise UsageError(f"{name} has an empty word: ''", hint="leave it out", field=name)
        self.config()
        self.output_grammar  # noqa: B018  # or what is wrong with it

    @property
    def output_grammar(self) -> Grammar | None:
        """The grammar of the output; None if there is none. UsageError for two grammars, or for an invalid one."""
        kinds: list[GrammarKind] = [kind for kind in get_args(GrammarKind) if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise UsageError(
                f"an output can have only one grammar, and is given several: {' and '.join(kinds)}",
                hint="give one of them",
                field=kinds[-1],
            )
        return Grammar(kinds[0], _grammar_text(kinds[0], getattr(self, kinds[0]))) if kinds else None

    @property
    def stop_words(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def config(self, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingConfig:
        """The same parameters for an engine, with `bad_words` as tokens. Without a seed `random_seed` is 0; penalties
        of None, which are left to the model, are off.
        """
        values = {field.config or name: getattr(self, name) for name, (_, field) in FIELDS.items()}
        given = {name: value for name, value in values.items() if name in _CONFIG_NAMES and value is not None}
        given |= {"bad_words": bad_words, "top_k": 0 if self.top_k == -1 else self.top_k}
        given["logit_bias"] = tuple((self.logit_bias or {}).items())
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = tuple(self.allowed_token_ids)
        return SamplingConfig(**given)


def greedy_params(max_tokens: int, **others: Any) -> SamplingParams:
    """Parameters of greedy answers with at most `max_tokens` tokens; `others` are other fields."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **others)


@dataclass(frozen=True)
class AnswerParams:
    """Fields of a request that decide how it is answered, and that affect no token's choice."""

    return_token_ids: Annotated[
        bool,
        RequestField("True: the answer has the ids of the prompt and of each output. As in vLLM.",
                     in_all("return_token_ids", "completions", "chat"), neutral=(False,)),
    ] = False  # fmt: skip


@dataclass(frozen=True)
class ConversationParams:
    """Fields of a request that decide how its conversation becomes a prompt."""

    continue_final_message: Annotated[
        bool,
        RequestField("True: the output goes on from the last of the `messages`, which stays open. As in vLLM.",
                     in_all("continue_final_message", "chat"), "prompt", neutral=(False,), flag=Flag()),
    ] = False  # fmt: skip
    add_generation_prompt: Annotated[
        bool,
        RequestField("False: the prompt ends with the last message, and no answer is begun. As in vLLM.",
                     in_all("add_generation_prompt", "chat"), "prompt", neutral=(True,)),
    ] = True  # fmt: skip


FIELDS = fields_of(SamplingParams)
"""Type and description of each field of `SamplingParams`."""
CONVERSATION_FIELDS = fields_of(ConversationParams)
REQUEST_FIELDS = FIELDS | fields_of(AnswerParams) | CONVERSATION_FIELDS
MODEL_DEFAULTS = {
    name: DefaultField(
        field.in_body if int in (hint, *get_args(hint)) and field.in_body else field.range,
        is_whole=int in (hint, *get_args(hint)),
        is_penalty=not field.greedy_ignores,
    )
    for name, (hint, field) in FIELDS.items()
    if field.in_model
}
"""Fields for which a model's generation_config.json may have a default. Whole numbers have the range of bodies."""
_CONFIG_NAMES = frozenset(one.name for one in dataclasses.fields(SamplingConfig))
GREEDY = SamplingConfig()


def names_in(protocol: Protocol) -> dict[str, str]:
    """Field -> its name in bodies of the protocol, if the protocol has it."""
    return {name: field.names[protocol] for name, (_, field) in REQUEST_FIELDS.items() if protocol in field.names}


def _grammar_text(kind: GrammarKind, value: Any) -> str:
    """The text of a `Grammar`; UsageError for a value that does not have the kind's form."""
    form = "a text that is not empty"
    if kind == "choice":
        form = "a list of texts, none of them empty"
        if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
            return json.dumps(value)
    elif kind == "json_schema":
        form = "a JSON object"
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            if isinstance(json.loads(text), dict):
                return text
        except RecursionError:
            form = "nested less deeply"
        except (TypeError, ValueError):
            pass
    elif isinstance(value, str) and value:
        return value
    shown = repr(value)
    raise UsageError(
        f"{kind} must be {form}: {shown if len(shown) <= 80 else f'{shown[:80]}...'}",
        hint="docs/structured-output.md has examples",
        field=kind,
    )
