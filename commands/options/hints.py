"""Hints that name the flag to change: the command line's remedies for the library's errors, and the flags' names.

The library's hint stands at the setting (`Setting.hint`, `RequestField.hint`, `EngineOption.hint`) or where the error
is raised. It names settings: `compiler="none"`. Users of the command line read `--compiler none` instead, or
`specdec build --compiler none` if they built the engine. A message that begins with a setting names the flag too.

`HINTS` has the other hints, by the error's code (`SpecDecError.code`): hints that name a command, or a flag without a
setting.
Values of the error are filled in for names in braces. A hint may have several pieces of advice. A piece is shown if the
command has its flags, under the command's names for them; a flag of another command is written behind that command
(`specdec build --max-seq-len`). An `Advice` is a piece in two versions: for users who named a model, and for users who
built an engine.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from typer import TyperException

from commands.options.drafter_flags import example_of, users_of
from commands.options.expand import CURRENT_COMMAND, MODEL_AT_HAND, Command
from commands.options.foreign import COMMANDS
from commands.options.model_word import is_surely_model, may_be_model, near_model
from commands.options.parameters import commands_of, options_of
from commands.options.settings import origin_of
from commands.options.shared import COMMON
from commands.options.spellings import normalize_name
from commands.output.help import as_flag
from runtime.builder.engine_options import OPTIONS, literals_of, words_of
from runtime.checkpoint.bundle import DRAFT_VOCAB
from runtime.checkpoint.checkpoint_dir import is_checkpoint_dir
from runtime.core.params import REQUEST_FIELDS, GrammarKind
from runtime.drafters.specs import NgramDrafter
from runtime.util.errors import SpecDecError
from runtime.util.words import meant, nearest

_CONVERT_AGAIN = "run `specdec convert` again"
_DRAFTS = (
    "specdec build --speculative-decoding-mode draft_tokens_external --use-paged-context-fmha enable --max-draft-len"
)


@dataclass(frozen=True)
class Advice:
    """A remedy in two versions: for a user who built an engine, and for a user who named a model, from which the
    command made the engine. None in either place: no remedy for this user.
    """

    of_engine: str | None
    of_model: str | None = None


def anew(before: str = "", behind: str = "") -> Advice:
    """Advice to make the engine again; `behind` is added, such as ` on this machine`."""
    who_built, who_named = "run `specdec build` again", "have the engine built anew (`specdec rm {model_at_hand}`)"
    return Advice(f"{before}{who_built}{behind}", f"{before}{who_named}{behind}")


def advised(advice: str | Advice, model: str | None) -> str | None:
    """The version of the advice for a user who named this model; with None, for a user who built an engine."""
    if isinstance(advice, str):
        return advice
    return advice.of_engine if model is None else advice.of_model


def advice_at_hand(advice: str | Advice) -> str:
    """The version of the advice that fits the command at hand, which was given a model or an engine."""
    model = MODEL_AT_HAND.get()
    found = advised(advice, model) or ""
    return found if model is None or isinstance(advice, str) else found.format(model_at_hand=shlex.quote(model))


HINTS: dict[str, str | Advice | tuple[str | Advice, ...]] = {
    "bad_tokenizer": "give another tokenizer with `--tokenizer-dir`; transformers said: {reason}",
    "cache_too_large": ("lower `--max-tokens-in-paged-kv-cache`", "free memory"),
    "cache_too_large_for_gpu": ("raise `--kv-cache-free-gpu-memory-fraction`", "free memory on the device"),
    "cache_too_small": (
        "raise `--max-tokens-in-paged-kv-cache` or `--kv-cache-free-gpu-memory-fraction`",
        "free memory on the device",
    ),
    "cache_of_others": ("name another directory in SPECDEC_CACHE_DIR", "use no cache: `--no-cache`"),
    "cache_unwritable": ("name another directory in SPECDEC_CACHE_DIR", "use no cache: `--no-cache`"),
    "checkpoint": _CONVERT_AGAIN,
    "checkpoint_of_two_models": "config.json and the weights belong to two models: download the model again; if it was "
    f"converted, {_CONVERT_AGAIN}",
    "checkpoint_for_engine": "`specdec build` makes an engine of it: `specdec build --checkpoint-dir {path}`",
    "corpora_of_two_tokenizers": "make them with the same `specdec corpus create --tokenizer-dir`",
    "corpus_tokenizer": "recreate it, with the target's engine directory as `specdec corpus create --tokenizer-dir`",
    "damaged_corpus": "make it again with `specdec corpus create`",
    "draft_len": ("lower the draft length", Advice(f"build with `{_DRAFTS} {{max_draft_len}}{{what_drafts}}`")),
    "draft_len_of_masks": ("lower the draft length", Advice(f"build it with `{_DRAFTS} {{max_draft_len}}`")),
    "drafter_failed": "`specdec --debug` shows where",
    "engine": anew(),
    "engine_for_model": "it answers prompts as it is: `specdec run {path}`",
    "engine_for_checkpoint": "give the directory that `specdec convert` wrote",
    "exists": "`--force` replaces it",
    "group_size": ("quantize whole rows: `--group-size -1`", "quantize to `--quantization int8`"),
    "layers_of_another_head": (
        "build it for this head, with the same flags but for `--draft-model-dir {head}`",
        "give the model itself, as `--model-dir`",
    ),
    "model_for_checkpoint": "`specdec convert --model-dir {model_dir}` makes a checkpoint of it",
    "model_for_engine": ("name it as the first word: `specdec run {path}`", "to draft, as `--draft-model-dir {path}`"),
    "no_checkpoint": "make it with `specdec convert`: `specdec convert demo` writes the directory `checkpoint`",
    "no_corpus": "`specdec corpus create` makes one",
    "no_draft_engine": (
        "name a draft model, as in `--draft-model-dir demo-draft`",
        "make an engine with `specdec convert` and `specdec build`",
    ),
    "no_drafts_to_tune": f"build it with `{_DRAFTS} 10`",
    "no_engine": "name a model, as in `{with_model}`; or make an engine with `specdec convert` and `specdec build`",
    "no_gpu": "build with `specdec build --device cpu`",
    "no_head_of_layers": (
        "`--draft-model-dir` takes a trained head",
        Advice("quantize a draft model: `specdec convert --quantization {value}`"),
        Advice(None, "leave the flag out"),
    ),
    "no_layer_that_drafts": (
        "name a head with `--draft-model-dir`",
        "have a copy made with `--self-draft int4`",
    ),
    "no_hidden_states": (
        Advice("build it for this head: `specdec build --draft-model-dir {head}`"),
        "give the model itself, as `--model-dir`",
    ),
    "no_pard_token": (
        "take a model that was adapted for PARD",
        "adapt this one: `specdec train --parallel`",
        "draft token by token: `--spec-decode-algo DRAFT_TARGET`",
    ),
    "no_self_draft": (
        Advice("build it with `specdec build --self-draft int4`"),
        "give the model itself, as `--model-dir`",
        f"use another drafter: `{example_of(NgramDrafter)}`",
    ),
    "no_step_costs": anew(behind=", with memory free for a K/V cache to measure them with"),
    "no_unquantized_model": (
        "leave `--quality-text` out",
        "convert the model again: `specdec convert --quantization FORMAT`",
    ),
    "no_tokenizer": "name a tokenizer with `--tokenizer-dir`",
    "not_an_engine": "make one with `specdec build`",
    "not_ours": "`--force` replaces only specdec's own output; choose another directory or remove this one",
    "other_model": "give the model that the engine was made from with `--hf-model-dir`",
    "shipped_format": "`{model} --quantization int4` quantizes it",
    "profile": "make it again: `specdec tune --engine-dir ENGINE --output PROFILE.json`",
    "profile_of_an_engine": "name the engine, `specdec run {engine_dir}`, or tune the model: `specdec tune {model} "
    "--output {profile}`",
    "profile_of_another_model": "tune this one: `specdec tune {model} --output {profile}`; or leave `--profile` out",
    "profile_of_another_engine": "tune this one: `specdec tune --engine-dir {engine_dir} --output {profile}`; or leave "
    "`--profile` out",
    "prompt_past_positions": "keep the last tokens with `--max-input-length {fits}`",
    "prompt_too_long": (
        "keep the last tokens with `--max-input-length {fits}`",
        Advice("build with `specdec build --max-input-len {num_prompt} --max-seq-len {num_needed}`"),
        Advice("with `--model-dir` give `--max-seq-len {num_needed}`", "give `--max-seq-len {num_needed}`"),
    ),
    "self_draft_bits": (
        "leave `--self-draft` out",
        Advice("convert the model to a format with more bits: `specdec convert --quantization FORMAT`"),
        Advice(None, "draft by lookup: `--spec-decode-algo AUTO`"),
    ),
    "self_draft_split": (
        "leave `--self-draft` out",
        Advice("convert the model without `specdec convert --tp-size`"),
    ),
    "tokenizer_is_code": "name a tokenizer that transformers has a class for with `--tokenizer-dir`",
    "tune_draft_len": ("lower it", Advice("build with a larger `specdec build --max-draft-len`")),
}


MESSAGES: dict[str, str] = {
    "batch_size": "`--batch-size` exceeds the engine's max_batch_size {max_batch_size}: {batch_size}",
}
"""Messages that name flags which belong to no setting."""


def message_of(error: SpecDecError) -> str:
    """Message of the error. If it begins with a setting's name, the command's flag stands in place of that name."""
    template, name = MESSAGES.get(error.code or ""), str(error.values.get("field") or error.values.get("name"))
    if template is not None:
        return template.format(**error.values)
    flag, command = flag_of_setting(name), CURRENT_COMMAND.get()
    if flag is None or not error.message.startswith(f"{name} "):
        return error.message
    own = flag if command is None else _own_flag(flag, command)
    return error.message if own is None else f"`{own}`{error.message.removeprefix(name)}"


def _own_flag(flag: str, command: Command) -> str | None:
    """The command's name for a flag; None if it has none."""
    own = normalize_name(flag.removeprefix("--"), command.name)
    return as_flag(own) if own in command.flags else None


def hint_of(error: SpecDecError) -> str | None:
    """Remedy for an error on the command line."""
    if error.code == "other_environment":
        return _rebuild(**error.values)
    near = near_model(str(error.values["name"])) if error.code == "no_such_model" else None
    if near is not None:
        return f"perhaps `{near}`; {error.hint}"
    given, model = HINTS.get(error.code or "", ()), MODEL_AT_HAND.get()
    pieces = given if isinstance(given, tuple) else (given,)
    hint = _fitting(pieces, model, error) or (None if model is None else _fitting(pieces, None, error))
    return hint or (error.hint if error.hint is None or error.code is None else _in_flags(error.hint))


def _in_flags(hint: str) -> str:
    """The hint with flags in the place of the settings that it names."""

    def as_typed(found: re.Match[str]) -> str:
        flag, value = _flag_at_hand(found[1]), found[2]
        return found[0] if flag is None else f"`{flag} {value}`" if value else f"`{flag}`"

    return _SETTING.sub(as_typed, hint)


def _flag_at_hand(name: str) -> str | None:
    """The flag of a setting that the user can change: an engine that was built is made anew by another command."""
    flag, command = flag_of_setting(name), CURRENT_COMMAND.get()
    if flag is None or command is None:
        return flag
    own, groups = _own_flag(flag, command), OPTIONS[name][1].flags if name in OPTIONS else ()
    if not groups or (own is not None and (MODEL_AT_HAND.get() is not None or command.name in ("convert", "build"))):
        return own
    return f"specdec {'convert' if 'convert' in groups else 'build'} {flag}"


def _fitting(pieces: tuple[str | Advice, ...], model: str | None, error: SpecDecError) -> str:
    """The pieces of advice that this user can follow, with the command's names for its flags."""
    values = _values(error) | ({} if model is None else {"model_at_hand": shlex.quote(model)})
    advice = [one for piece in pieces if (one := advised(piece, model)) is not None]
    named = [one for piece in advice if (one := _by_the_commands_names(piece)) is not None]
    return ", or ".join(named).format(**values)


def _by_the_commands_names(piece: str) -> str | None:
    """The piece of advice with flags as the command at hand calls them; None if the command lacks a flag. Outside a
    command it is returned as it is.
    """
    command = CURRENT_COMMAND.get()
    if command is None:
        return piece
    named = _FLAG.sub(lambda found: f"`--{normalize_name(found[1], command.name)}", piece)
    return named if {found[1] for found in _FLAG.finditer(named)} <= command.flags else None


_FLAG = re.compile(r"`--([a-z-]+)")
_SETTING = re.compile(r'`([a-z_]+)(?:="?([^`"]+)"?)?`')


def _values(error: SpecDecError) -> dict[str, object]:
    build, head = error.values.get("build"), error.values.get("head") or "HEAD"
    command = CURRENT_COMMAND.get()
    with_model = _WITH_MODEL.get(command.name, f"specdec {command.name} demo") if command else "specdec run demo"
    what_drafts = "" if build is None else _what_drafts(build, head)
    return {"what_drafts": what_drafts, "with_model": with_model} | error.values


_WITH_MODEL = {"check": "specdec check receipts.jsonl demo"}
"""Examples of commands that take a model, where it is not the first word."""


_OF_COMMANDS = {
    "head": "--draft-model-dir",
    "block_reuse": "--kv-cache-enable-block-reuse",
    "disk_dir": "--kv-cache-dir",
    "disk_bytes": "--kv-cache-disk-size",
    "max_input_len": "--max-input-len",
    "stop_token_ids": "--end-id",
    **{name: as_flag(name) for name in ("state_checkpoint_interval", *get_args(GrammarKind))},
}
"""Flags of settings that commands describe themselves."""


def flag_of_setting(name: str) -> str | None:
    """The flag of a setting: of a request's field, a drafter's setting or an option of an engine; None if it has no
    flag. The flag of a field may have another name, such as `--random-seed` for `seed`.
    """
    own, flag = as_flag(normalize_name(name)), as_flag(name)
    if name in REQUEST_FIELDS and (own != flag or REQUEST_FIELDS[name][1].flag is not None):
        return own
    if users_of(name) or (name in OPTIONS and OPTIONS[name][1].flags):
        return flag
    return _OF_COMMANDS.get(name)


def _rebuild(engine_dir: object, build: Any) -> str:
    """The command that made the engine."""
    mode = f" --speculative-decoding-mode {build.speculative_decoding_mode} --use-paged-context-fmha enable"
    mode += _what_drafts(build, "HEAD", engine_dir)
    return (
        f"rebuild it here: specdec build --checkpoint-dir CKPT --output-dir {shlex.quote(str(engine_dir))} --force "
        f"--max-batch-size {build.max_batch_size} --max-input-len {build.max_input_len} "
        f"--max-seq-len {build.max_request_len} --max-draft-len {build.max_draft_len} "
        f"--tokens-per-block {build.tokens_per_block} --compiler {build.compiler}{mode if build.max_draft_len else ''}"
    )


def _what_drafts(build: Any, head: object = "HEAD", engine_dir: object = "ENGINE") -> str:
    """Flags of `build` for the parts that an engine has for its drafters: hidden states, a copy, an output layer."""
    flags = ""
    if build.self_draft is not None:
        flags += f" --self-draft {build.self_draft.qformat} --self-draft-group-size {build.self_draft.group_size or -1}"
    if build.hidden_states:
        flags += f" --draft-model-dir {shlex.quote(str(head))}"
    if build.draft_output.qformat is not None:
        flags += f" --draft-output-layer {build.draft_output.qformat}"
    if build.draft_output.layers is not None:
        flags += f" --draft-layers {build.draft_output.layers}"
    if build.draft_output.vocab_size is not None:
        flags += f" --draft-vocab {shlex.quote(str(Path(str(engine_dir)) / DRAFT_VOCAB))}"
    return flags


_FEW = 3
_EXTRA_WORD = re.compile(r"[Gg]ot unexpected extra arguments?(?:\(s\))? \(([^ )]+)")
_OF_EXTRA_WORD = {
    "build": "`--checkpoint-dir` names a checkpoint; `specdec convert {word}` makes one of a model, and "
    "`specdec run {word}` converts, builds and answers",
}
"""Hints for a word too many, by command."""
_NO_COMMAND = re.compile("No such command `([^`]+)`")
_OF_MISSING = {
    "check receipts": "`specdec check receipts.jsonl demo`; `specdec run demo --receipts receipts.jsonl` writes them",
    "regress --traces": "`specdec regress demo --traces old.jsonl`; `specdec run demo --output-traces old.jsonl` has "
    "them",
    "train --output-dir": "name a new directory for the head: `--output-dir head`",
}
"""Hints for arguments that are missing, by the command and the flag or argument."""
_NUMBERS = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def usage_message(error: TyperException) -> tuple[str, str]:
    """The message and the hint for an error of Typer's. Its cause may be pydantic's error, since pydantic reads the
    values.
    """
    where: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    option, similar = getattr(error, "option_name", None) or "", getattr(error, "possibilities", None) or ()
    nearest_name = nearest(option.lstrip("-"), [name.lstrip("-") for name in similar])
    near = [] if nearest_name is None else [f"--{nearest_name}"]
    flags = near or getattr(parameter, "opts", None) or [option]
    hint = "`specdec --help` shows the usage" if where is None else help_hint(where, flags)
    problems = getattr(error.__cause__, "errors", None)
    if problems is not None:
        return _about_value(error, problems()[0], hint)
    text = str(getattr(error, "message", error)).rstrip(".").replace("'", "`")
    command = getattr(where, "info_name", "")
    if option and where is not None:
        hint = _in_other_commands(option, where) or hint
    hint = _perhaps(near, hint)
    if extra := _EXTRA_WORD.match(text):
        hint = _OF_EXTRA_WORD.get(command, hint).format(word=extra[1])
        if command == "build" and is_checkpoint_dir(Path(extra[1])):
            hint = f"`specdec build --checkpoint-dir {extra[1]}` builds from this checkpoint"
    if found := _NO_COMMAND.match(text):
        text, hint = found[0], _instead_of_command(found[1], where, hint)
    if not text:  # a value that must be given
        text = f"missing: {_flag(error)}"
        hint = _OF_MISSING.get(f"{command} {parameter.opts[0]}", hint)
    return text[:1].lower() + text[1:], hint


def _about_value(error: Any, problem: Any, hint: str) -> tuple[str, str]:
    """The message and the hint for a value that a flag does not take; `hint` is the hint at the help."""
    parameter, value = error.param, str(problem["input"])
    if parameter.name == "dtype" and words_of("quantization").get(value.lower()):
        hint = f"`--quantization {value.lower()}` quantizes the weights"
    choices = _choices_of(parameter)
    if choices:
        hint = (OPTIONS[parameter.name][1].hint if parameter.name in OPTIONS else None) or hint
        hint = _perhaps(meant(value, choices), hint)
    return _value_message(_flag(error), problem, choices) + _origin(error), hint


def _perhaps(words: Sequence[str], hint: str) -> str:
    return f"perhaps {' or '.join(f'`{word}`' for word in words)}; {hint}" if words else hint


def _instead_of_command(word: str, context: Any, hint: str) -> str:
    """Advice for a word that is no command: our command for it, a similar command, or `run` if it names a model."""
    if word in COMMANDS:
        return COMMANDS[word]
    is_top = context.parent is None
    answers = f"`specdec run {shlex.quote(word)}` answers prompts by this model"
    if is_top and is_surely_model(word):
        return answers
    if near := nearest(word, context.command.commands):
        return _perhaps([near], hint)
    if is_top and (model := near_model(word)) is not None:
        return _perhaps([f"specdec run {shlex.quote(model)}"], hint)
    return answers if is_top and may_be_model(word, is_answered=True) and not Path(word).is_dir() else hint


def help_hint(context: Any, flags: Sequence[str]) -> str:
    """The hint at a command's help: at `--help-all` if `--help` leaves out one of these flags, as `--ngram-pool`."""
    command, options = context.command, options_of(context.command)
    named = [options.get(normalize_name(flag.lstrip("-"), command.name or "")) for flag in flags]
    is_short = any(param.name == "help_all" for param in command.params)
    is_left_out = is_short and any(one is not None and one.name not in COMMON for one in named)
    return f"`{context.command_path} --help{'-all' if is_left_out else ''}` shows the usage"


def _in_other_commands(option: str, context: Any) -> str | None:
    """Commands that have a flag which this command has not; None for none, or many. After `convert` comes `build`."""
    own = context.info_name
    having = [
        f"`specdec {name} --{flag}`"
        for name, command in commands_of(context).items()
        if (flag := normalize_name(option.lstrip("-"), name)) in options_of(command)
    ]
    made = [one for one in having if one.split()[1] in ("convert", "build")]
    having = made if own in ("convert", "build") and made else having
    if not 0 < len(having) <= _FEW:
        return None
    have = "have" if len(having) > 1 else "has"
    return f"{' and '.join(having)} {have} it; `{context.command_path} --help` shows the usage"


def _origin(error: Any) -> str:
    """The variable or file that the value comes from, in parentheses; empty for the command line."""
    held = origin_of(error.ctx, error.param.name)
    return "" if held is None else f" ({held.origin.text})"


def _flag(error: Any) -> str:
    parameter = error.param
    return f"`{parameter.opts[0] if parameter.param_type_name == 'option' else parameter.metavar or parameter.name}`"


def _choices_of(parameter: Any) -> list[str]:
    """The words that a flag takes, without other programs' words for them; none if it takes other values."""
    name = parameter.name
    if name in OPTIONS:
        return [*literals_of(OPTIONS[name][0]), *(["none"] if OPTIONS[name][1].takes_none else [])]
    return [*map(str, parameter.type_descriptor.choices or ())]


def _value_message(flag: str, problem: Any, choices: Sequence[str]) -> str:
    value, details = problem["input"], problem.get("ctx", {})
    if problem["type"] in _BOUNDS:
        words, key = _BOUNDS[problem["type"]]
        return f"{flag} must be {words} {details[key]}: {value}"
    if problem["type"] in _NUMBERS:
        return f"{flag} must be {_NUMBERS[problem['type']]}: {value}"
    if choices:
        return f"{flag} must be one of {', '.join(choices)}: {value}"
    return f"{flag}: {str(details.get('error', problem['msg'])).rstrip('.')}: {value}"
