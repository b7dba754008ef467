"""Flags of generation that `run`, `chat` and `summarize` share: sampling, and the conditions that end an output."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from commands.options.shared import EndId, MaxNumTokens, end_id_params
from commands.output.help import INPUT, RUNTIME, SAMPLING, as_flag, option
from commands.output.output import warn
from runtime.core.params import FIELDS, REQUEST_FIELDS, ConversationParams, SamplingParams, fields_of
from runtime.util.errors import UsageError
from runtime.util.reading import read_utf8


def given_params(group: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that flags of the group give."""
    return {name: value for name, value in vars(group).items() if name in FIELDS and value is not None}


@dataclass(frozen=True)
class FormOptions:
    """Form of an output: at most one of these flags may be given."""

    json_schema: Annotated[
        str | None, option(SAMPLING, "JSON schema that each output is valid by.", metavar="FILE|TEXT")
    ] = None
    regex: Annotated[str | None, option(SAMPLING, "Expression that each output matches.")] = None
    grammar: Annotated[
        str | None, option(SAMPLING, "Grammar of each output, in Lark's or GBNF's notation.", metavar="FILE|TEXT")
    ] = None
    choice: Annotated[list[str] | None, option(SAMPLING, "Text that an output may be, among others; repeatable.")] = (
        None
    )

    def read(self) -> "FormOptions":
        """Copy with the content of each file in the place of its path. SpecDecError for a file that cannot be read."""
        if self.json_schema is None and self.grammar is None:
            return self
        schema, grammar = self.json_schema, self.grammar
        if schema is not None and not schema.lstrip().startswith(("{", "[")):
            schema = read_utf8(Path(schema))
        if grammar is not None and not re.search(r"[:\n]", grammar):
            grammar = read_utf8(Path(grammar))
        return replace(self, json_schema=schema, grammar=grammar)

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of `SamplingParams` that are given."""
        return given_params(self.read())


def _flag_of(name: str, panel: str, default: Any) -> tuple[str, Any, Any]:
    """A field of a group: its name, its type with the flag, and its default, which is None unless the help shows a
    default.
    """
    hint, described = REQUEST_FIELDS[name]
    assert described.flag is not None
    (kind,) = (one for one in get_args(hint) or (hint,) if one is not NoneType)
    kind = list[get_args(kind)[0]] if get_origin(kind) is Sequence else kind  # type: ignore[misc]  # made at run time
    shown, spellings = described.flag.shown, [as_flag(name)] if kind is bool else []
    flag = option(panel, described.flag.help or described.help, *spellings, shown=True if shown is None else shown)
    return (name, Annotated[kind, flag], default) if shown is None else (name, Annotated[kind | None, flag], None)


def _group_of(params: type, panel: str) -> type:
    """A group of the flags that a class of described fields has."""
    names = [name for name, (_, described) in fields_of(params).items() if described.flag is not None]
    flags = [_flag_of(name, panel, getattr(params, name)) for name in names]
    return make_dataclass(f"_{params.__name__}Flags", flags, frozen=True)


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class _ParamFlags:
        def __getattr__(self, name: str) -> Any: ...

    _ConversationFlags = _ParamFlags
else:
    _ParamFlags, _ConversationFlags = _group_of(SamplingParams, SAMPLING), _group_of(ConversationParams, INPUT)


@dataclass(frozen=True)
class ConversationOptions(_ConversationFlags):
    """The flags of `ConversationParams`."""

    @property
    def params(self) -> ConversationParams:
        return ConversationParams(**vars(self))


@dataclass(frozen=True)
class SamplingOptions(_ParamFlags):
    """The flags of `SamplingParams` (`RequestField.flag`); None if not given. The seed is the command's own flag."""

    form: FormOptions = field(default_factory=FormOptions)

    def for_chat(self, defaults: Mapping[str, Any]) -> "SamplingOptions":
        """Flags for a chat. The model's own values hold for the flags that are not given. They hold for none if the
        flags ask for greedy answers, or if flags are given and the model's values are greedy.
        """
        given = {name for name in given_params(self) if FIELDS[name][1].greedy_ignores}
        if self.temperature == 0 or self.top_k == 1 or (given and defaults.get("temperature") == 0):
            return self
        return replace(self, **{name: value for name, value in defaults.items() if name not in given})

    def params(self, **others: Any) -> SamplingParams:
        """The sampling parameters that are given, and `others`, which the command adds. UsageError for a value out of
        range.

        TensorRT-LLM without `--top-k` is greedy, whatever the temperature. Here a temperature alone asks for samples.
        """
        asks_to_sample = self.temperature is not None or self.top_p is not None or bool(self.min_p)
        top_k = (0 if asks_to_sample else 1) if self.top_k is None else self.top_k
        if self.top_k == 1 and asks_to_sample:
            warn("`--top-k 1` is greedy: `--temperature`, `--top-p` and `--min-p` have no effect")
        if self.temperature == 0 and (top_k > 1 or self.top_p is not None or self.min_p):
            warn("`--temperature 0` is greedy: `--top-k`, `--top-p` and `--min-p` have no effect")
        return SamplingParams(**given_params(self) | {"top_k": top_k} | self.form.params | others)


@dataclass(frozen=True)
class GenerationOptions:
    """Sampling, and the ends of outputs. Flags for beams and Python sessions are TensorRT-LLM's, and refused."""

    end_id: EndId = None
    stop_words: Annotated[list[str] | None, option(RUNTIME, "Text that ends an output; repeatable.", shown="none")] = (
        None
    )
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_num_tokens: MaxNumTokens = None
    num_beams: Annotated[int, typer.Option(hidden=True)] = 1
    use_py_session: Annotated[bool, typer.Option("--use-py-session", hidden=True)] = False

    def check(self) -> None:
        """UsageError for flags that ask for something that specdec cannot do."""
        if self.num_beams != 1:
            raise UsageError(f"beam search is not supported: `--num-beams {self.num_beams}`", hint="leave the flag out")
        if self.use_py_session:
            raise UsageError("there is no Python session to choose: `--use-py-session`", hint="leave the flag out")

    def params(self, **others: Any) -> SamplingParams:
        """Sampling parameters for a prompt; `others` are the command's. UsageError for a value that is out of range."""
        return self.sampling.params(stop=self.stop_words, **end_id_params(self.end_id), **others)
