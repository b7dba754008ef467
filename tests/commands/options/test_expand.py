"""Groups of options: one dataclass each, whose fields Typer sees as flags."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from sentences import Said
from typer.testing import CliRunner

from commands.options.expand import expand_groups


@dataclass(frozen=True)
class Inner:
    size: Annotated[int | None, typer.Option(min=1, help="How many.", rich_help_panel="Sizes")] = None
    words: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    path: Annotated[Path, typer.Option(help="Where.")]
    inner: Inner = Inner()
    fast: Annotated[bool, typer.Option("--fast", help="Quickly.")] = False


@dataclass(frozen=True)
class Last:
    rate: "Annotated[float, typer.Option()]" = 0.5


def expanded() -> tuple[Any, list[tuple[object, ...]]]:
    """A command of two groups and an argument, and what it was called with."""
    calls: list[tuple[object, ...]] = []

    @expand_groups
    def command(name: Annotated[str, typer.Argument()], outer: Outer, last: Last) -> None:
        """Does something."""
        calls.append((name, outer, last))

    return command, calls


def invoke(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_signature_has_a_keyword_for_each_field_in_order() -> None:
    parameters = inspect.signature(expanded()[0], eval_str=True).parameters
    assert list(parameters) == ["name", "path", "size", "words", "fast", "rate"]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert [parameters[name].default for name in ("size", "words", "fast", "rate")] == [None, None, False, 0.5]
    assert parameters["path"].default is inspect.Parameter.empty


def test_command_gets_its_groups_filled() -> None:
    command, calls = expanded()
    result = invoke(command, "a", "--path", "p", "--size", "3", "--words", "x", "--words", "y", "--fast", "--rate", "2")
    assert result.exit_code == 0, result.output
    assert calls == [("a", Outer(path=Path("p"), inner=Inner(3, ["x", "y"]), fast=True), Last(2.0))]


def test_field_without_default_is_required(said: Said) -> None:
    command, calls = expanded()
    assert invoke(command, "a").exit_code == 2
    with pytest.raises(TypeError) as error:
        command(name="a")
    said(error, "path")
    assert calls == []


@pytest.mark.parametrize("group", [Inner, Outer])
def test_two_flags_of_one_name_are_refused_at_import(group: type, said: Said) -> None:
    def command(first: Inner, second: Any) -> None: ...

    command.__annotations__["second"] = group
    with pytest.raises(TypeError) as error:
        expand_groups(command)
    said(error, "size, words")
