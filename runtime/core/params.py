"""Sampling parameters: what a Python user asks for, and what an engine does. Imports no torch.

`SamplingParams` has vLLM's names and defaults, and knows words; `SamplingConfig` has TensorRT-LLM's, and knows tokens.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from runtime.util.errors import UsageError

_AT_LEAST_0 = ("temperature", "top_k", "no_repeat_ngram_size")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_HINTS = {
    "temperature": "0 is greedy, 1 no effect",
    "top_k": "0 is the whole vocabulary, 1 greedy",
    "top_p": "1 is no effect",
    "repetition_penalty": "1 is no effect",
}

Mode = Literal["orchestrator", "leader"]
"""Loop that answers: TensorRT-LLM's V1, which releases a sequence after each step, or V2, which keeps it."""


GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]
_MOST_GRAMMAR = 1 << 18
"""Characters."""


@dataclass(frozen=True)
class Grammar:
    """Form that the text of an output has: a JSON schema, a regular expression, a grammar (Lark, or llama.cpp's GBNF),
    or a JSON list of the texts to choose from. `kind` is also the name of the parameter of `SamplingParams`; `lark` is
    a grammar of our own making, in llguidance's notation.
    """

    kind: GrammarKind | Literal["lark"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > _MOST_GRAMMAR:
            raise UsageError(
                f"{self.kind} is longer than {_MOST_GRAMMAR:,} characters: {len(self.text):,}", hint="shorten it"
            )


def is_greedy(temperature: float, top_k: int) -> bool:
    """True if decoding is greedy. Colder than 1e-5, logits over temperature leave the range of float32."""
    return top_k == 1 or temperature < 1e-5


@dataclass(frozen=True)
class SamplingConfig:
    """TensorRT-LLM's names and defaults; `bad_words` and penalties see the prompt too, as there.

    Without `penalize_prompt` presence and frequency count what was generated only, as OpenAI's do. `logit_bias` is
    added to the logits of tokens, as (token, bias), before anything else.

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

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias:
            if not bias < math.inf:
                raise UsageError(f"the bias of token {token} must be a number: {bias}", hint="0 is no effect")
        ranges = [(name, 0 <= getattr(self, name) < math.inf, "a number of at least 0") for name in _AT_LEAST_0]
        ranges += [(name, math.isfinite(getattr(self, name)), "a number") for name in _PENALTIES]
        ranges.append(("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"))
        ranges.append(("min_p", 0 <= self.min_p <= 1, "between 0 and 1"))
        ranges.append(("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"))
        for name, is_valid, form in ranges:
            if not is_valid:
                raise UsageError(
                    f"{name} must be {form}: {getattr(self, name)}", hint=_HINTS.get(name, "0 is no effect")
                )
        if any(not word for word in self.bad_words):
            raise UsageError("a bad word has no tokens: ()", hint="leave it out")

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.temperature, self.top_k)


GREEDY = SamplingConfig()


def _is_list_of(kind: type, value: Any) -> bool:
    """True of None too."""
    if value is None:
        return True
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(one, kind) for one in value)


def _are_biases(value: Any) -> bool:
    """True of None too."""
    if value is None:
        return True
    return isinstance(value, Mapping) and all(
        isinstance(token, Integral) and isinstance(bias, Real) for token, bias in value.items()
    )


_INTEGERS = ("n", "top_k", "no_repeat_ngram_size", "seed", "max_tokens", "truncate_prompt_tokens", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TRUE_OR_FALSE = ("ignore_eos", "penalize_prompt", "return_generation_logits")
_MAY_BE_NONE = {
    "repetition_penalty",
    "no_repeat_ngram_size",
    "seed",
    "max_tokens",
    "truncate_prompt_tokens",
    "logprobs",
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a prompt, with vLLM's names and defaults.

    Temperature 0 is greedy; top_k 0 (or -1) and top_p 1.0 leave the whole vocabulary. Without a `seed` every call
    draws one. Penalties and `no_repeat_ngram_size` see the prompt too; a `repetition_penalty` or
    `no_repeat_ngram_size` of None is the model's own (`runtime.checkpoint.generation_config`). `stop` is text that
    ends an output and is not part of the output. `logprobs` asks for the log-probabilities of that many best tokens
    and of the chosen one, by the model's own logits, before any penalty or cut. UsageError if a value is out of
    range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    """True if the model's own end ids are ordinary tokens; `stop_token_ids` end an output in either case."""
    max_tokens: int | None = 16
    """None: as many as there is room for."""
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of a prompt; None: all."""
    logprobs: int | None = None
    penalize_prompt: bool = True
    """True if presence and frequency penalties count the prompt's tokens too."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit."""
    return_generation_logits: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    """JSON schema that the output is valid by; `{"type": "object"}` is any object. Of this and the next three, one."""
    regex: str | None = None
    """Regular expression that the whole output matches, without look-around and back-references."""
    grammar: str | None = None
    """Grammar of the output, in Lark's or GBNF's notation."""
    choice: Sequence[str] | None = None
    """Texts of which the output is one."""

    def __post_init__(self) -> None:
        for names, kinds, form in ((_INTEGERS, Integral, "an integer"), (_NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                if value is None and name in _MAY_BE_NONE:
                    continue
                if isinstance(value, bool) or not isinstance(value, kinds):
                    raise UsageError(f"{name} must be {form}: {value!r}", hint="leave it out, or give it as one")
        for name in _TRUE_OR_FALSE:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(
                    f"{name} must be True or False: {getattr(self, name)!r}", hint="leave it out, or give one"
                )
        for name, kind, form in (
            ("stop", str, "a text or a list of texts"),
            ("bad_words", str, "a list of texts"),
            ("stop_token_ids", Integral, "a list of token ids"),
        ):
            if not _is_list_of(kind, getattr(self, name)) and not (name == "stop" and isinstance(self.stop, str)):
                raise UsageError(f"{name} must be {form}: {getattr(self, name)!r}", hint="leave it out, or give one")
        if not _are_biases(self.logit_bias):
            raise UsageError(f"logit_bias must be numbers by token ids: {self.logit_bias!r}", hint="`{5: -1.0}` is one")
        bounds = {"n": 1, "max_tokens": 1, "truncate_prompt_tokens": 1, "logprobs": 0}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}: {value}", hint="raise it")
        for name, words in (("stop", self.stop_words), ("bad_words", tuple(self.bad_words or ()))):
            if any(not word for word in words):
                raise UsageError(
                    f"{name} has a word of no letters: ''", hint="leave it out", code="empty_word", name=name
                )
        self.config()
        self.output_grammar  # noqa: B018  # or what is wrong with it

    @property
    def output_grammar(self) -> Grammar | None:
        """The grammar of the output, if there is one; UsageError for two, or for one that is not of its form."""
        given: dict[GrammarKind, Any] = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "grammar": self.grammar,
            "choice": self.choice,
        }
        named = [(kind, value) for kind, value in given.items() if value is not None]
        if len(named) > 1:
            names = " and ".join(kind for kind, _ in named)
            raise UsageError(f"an output has one grammar, and is given: {names}", hint="give one of them")
        return Grammar(named[0][0], _grammar_text(*named[0])) if named else None

    @property
    def stop_words(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def config(self, bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingConfig:
        """The same for an engine; `bad_words` as tokens. Without a seed it is 0, and what is left to a model is off."""
        return SamplingConfig(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size or 0,
            bad_words=bad_words,
            random_seed=self.seed or 0,
            penalize_prompt=self.penalize_prompt,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )


def _grammar_text(kind: GrammarKind, value: Any) -> str:
    """The text of a `Grammar`; UsageError for a value of another form."""
    form = "a text that is not empty"
    if kind == "choice":
        form = "a list of texts, none of them empty"
        if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
            return json.dumps(value)
    elif kind == "json_schema":
        form = "a JSON object"
        with suppress(TypeError, ValueError, RecursionError):
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            if isinstance(json.loads(text), dict):
                return text
    elif isinstance(value, str) and value:
        return value
    shown = repr(value)
    raise UsageError(
        f"{kind} must be {form}: {shown if len(shown) <= 80 else f'{shown[:80]}...'}",
        hint="docs/structured-output.md has examples",
    )
