"""A hint names no flag that the command at hand has not: those of other commands stand behind the command's name."""

import contextlib
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from typer.main import get_command

from commands.doctor.work import REMEDIES
from commands.options.expand import CURRENT_COMMAND, MODEL_AT_HAND, Command
from commands.options.hints import HINTS, Advice, advised, flag_of_setting, hint_of, message_of
from runtime.builder.engine_options import OPTIONS
from runtime.checkpoint.bundle import read_bundle
from runtime.core.params import FIELDS
from runtime.util.errors import SpecDecError, draft_engine_errors
from specdec_cli.app import app

_TOP: Any = get_command(app)
_GROUPS = ("corpus", "cache", "config")
COMMANDS = {name: command for name, command in _TOP.commands.items() if name not in _GROUPS}
for _group in _GROUPS:
    COMMANDS.update(_TOP.commands[_group].commands)


def flags_of(command: Any) -> frozenset[str]:
    """Flags by Typer's own account."""
    names = [name for parameter in command.params for name in parameter.opts]
    return frozenset(name.removeprefix("--") for name in names if not (len(name) == 2 and name.startswith("-")))


FLAGS = {name: flags_of(command) for name, command in COMMANDS.items()}


def text_of(code: str) -> str:
    """All advice for a code."""
    given = HINTS[code]
    pieces = given if isinstance(given, tuple) else (given,)
    texts = [text for one in pieces for text in ((one.of_engine, one.of_model) if isinstance(one, Advice) else (one,))]
    return " ".join(text for text in texts if text is not None)


def error_with(code: str) -> SpecDecError:
    """Error of a code, with a value for whatever its hint speaks of."""
    names = {name for _, name, _, _ in Formatter().parse(text_of(code)) if name} - {"model_at_hand"}
    values: dict[str, object] = dict.fromkeys(names, "x")
    return SpecDecError("wrong", hint="the library's own words", code=code, **values)


# Facts that only these commands state, or that speak of a flag which all who state them have.
OF_COMMANDS = {
    "exists": ("convert", "build", "create", "merge"),
    "not_ours": ("convert", "build"),
    "bad_tokenizer": ("run", "chat", "summarize", "tune", "create"),
    "no_tokenizer": ("run", "chat", "summarize", "tune"),
    "other_model": ("summarize",),
}


@pytest.mark.parametrize("code", HINTS)
def test_hint_names_flags_that_the_command_has(code: str) -> None:
    for name, flags in FLAGS.items():
        token = CURRENT_COMMAND.set(Command(name, flags))
        try:
            hint = hint_of(error_with(code))
        finally:
            CURRENT_COMMAND.reset(token)
        assert hint, name
        named = set(re.findall(r"`--([a-z-]+)", hint))
        assert named <= flags, name
        if name in OF_COMMANDS.get(code, ()):
            assert hint != "the library's own words", name


@pytest.mark.parametrize("code", HINTS)
def test_flags_behind_a_command_are_its_own(code: str) -> None:
    for command, words in re.findall(r"`specdec (\w+(?: create)?)([^`]*)", text_of(code)):
        flags = flags_of(COMMANDS[command.split()[-1]])
        assert set(re.findall(r"--([a-z-]+)", words)) <= flags


def test_who_named_a_model_is_not_told_to_build_an_engine() -> None:
    tokens = CURRENT_COMMAND.set(Command("serve", FLAGS["serve"])), MODEL_AT_HAND.set("my model")
    try:
        hints = {code: hint_of(error_with(code)) or "" for code in HINTS}
    finally:
        CURRENT_COMMAND.reset(tokens[0])
        MODEL_AT_HAND.reset(tokens[1])
    for code in ("engine", "draft_len", "prompt_too_long"):
        assert "build`" not in hints[code] and "build --" not in hints[code] and "--model-dir" not in hints[code], code
    assert "`specdec rm 'my model'`" in hints["engine"] and "`--max-seq-len x`" in hints["prompt_too_long"]
    remedies = [advised(remedy, "demo") or "" for remedy in REMEDIES.values()]
    assert all(remedies)
    assert not any(f"specdec {command}` again" in one for one in remedies for command in ("build", "convert"))


def test_who_names_a_model_as_a_draft_engine_is_told_the_flag_of_models(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="demo-draft") as caught, draft_engine_errors():
        read_bundle(tmp_path / "demo-draft")
    having = [name for name, flags in FLAGS.items() if "draft-engine-dir" in flags]
    assert {"run", "summarize", "tune"} <= {*having}
    for name in having:
        token = CURRENT_COMMAND.set(Command(name, FLAGS[name]))
        try:
            assert "`--draft-model-dir demo-draft`" in (hint_of(caught.value) or ""), name
        finally:
            CURRENT_COMMAND.reset(token)


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("run", "top_k", "`--top-k` is wrong"),
        ("run", "max_tokens", "`--max-output-len` is wrong"),
        ("summarize", "max_tokens", "`--output-len` is wrong"),
        ("run", "draft_vocab_size", "`--draft-vocab-size` is wrong"),
        ("run", "min_matching_ngram_size", "`--min-matching-ngram-size` is wrong"),
        ("run", "regex", "`--regex` is wrong"),
        ("check", "top_k", "top_k is wrong"),
        ("run", "logit_bias", "logit_bias is wrong"),
    ],
)
def test_a_message_names_the_commands_flag_for_its_setting(command: str, name: str, message: str) -> None:
    token = CURRENT_COMMAND.set(Command(command, FLAGS[command]))
    try:
        assert message_of(SpecDecError(f"{name} is wrong", field=name)) == message
        assert message_of(SpecDecError("the value is wrong", field=name)) == "the value is wrong"
    finally:
        CURRENT_COMMAND.reset(token)


@pytest.mark.parametrize(
    ("command", "model", "hint"),
    [
        ("run", "demo", "lower `--max-output-len`, raise `--max-seq-len` or `tokenizers`, `--compiler none`"),
        (
            "run",
            None,
            "lower `--max-output-len`, raise `specdec build --max-seq-len` or `tokenizers`, "
            "`specdec build --compiler none`",
        ),
        ("build", None, "lower `max_tokens`, raise `--max-seq-len` or `tokenizers`, `--compiler none`"),
        (
            "convert",
            None,
            "lower `max_tokens`, raise `specdec build --max-seq-len` or `tokenizers`, `specdec build --compiler none`",
        ),
    ],
)
def test_a_hint_names_the_flags_that_this_user_can_turn(command: str, model: str | None, hint: str) -> None:
    tokens = CURRENT_COMMAND.set(Command(command, FLAGS[command])), MODEL_AT_HAND.set(model)
    said = 'lower `max_tokens`, raise `max_seq_len` or `tokenizers`, `compiler="none"`'
    try:
        assert hint_of(SpecDecError("wrong", hint=said, code="x")) == hint
    finally:
        CURRENT_COMMAND.reset(tokens[0])
        MODEL_AT_HAND.reset(tokens[1])


def test_every_flag_of_a_setting_is_a_flag() -> None:
    known = frozenset().union(*FLAGS.values())
    named = {flag for name in (*FIELDS, *OPTIONS) if (flag := flag_of_setting(name)) is not None}
    assert {flag.removeprefix("--") for flag in named} <= known and len(named) > 25


def test_flags_of_a_command_are_those_that_typer_knows() -> None:
    """`expand_groups` finds them by itself."""
    for name, command in COMMANDS.items():
        found = command.callback
        assert found is not None
        with contextlib.suppress(Exception), command.context_class(command):
            found()  # whatever is missing: it has said who it is by then
        current = CURRENT_COMMAND.get()
        assert current is not None and current.name in (name, found.__name__)
        arguments = {parameter.name for parameter in command.params if parameter.param_type_name == "argument"}
        assert current.flags - {"config"} == flags_of(command) - arguments - {"help", "help-all", "config"}
