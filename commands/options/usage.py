"""What is wrong with a command line, in the words of all other errors: what, the value, what to do."""

from typing import Any

from typer import TyperException

_NUMBERS = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def usage_message(error: TyperException) -> tuple[str, str]:
    """The message and the hint of one of Typer's errors. pydantic, which reads the values, is its cause."""
    where: Any = getattr(error, "ctx", None)
    hint = f"`{where.command_path if where else 'specdec'} --help` lists what there is"
    problems = getattr(error.__cause__, "errors", None)
    if problems is not None:
        return _value_message(_flag(error), problems()[0]), hint
    near = getattr(error, "possibilities", None)
    text = str(getattr(error, "message", error)).rstrip(".").replace("'", "`").replace(". Did", "; did")
    if near:
        hint = f"perhaps {' or '.join(f'`{name}`' for name in near)}; {hint}"
    if not text:  # a value that must be given
        text = f"missing: {_flag(error)}"
    return text[:1].lower() + text[1:], hint


def _flag(error: Any) -> str:
    parameter = error.param
    return f"`{parameter.opts[0] if parameter.param_type_name == 'option' else parameter.metavar or parameter.name}`"


def _value_message(flag: str, problem: Any) -> str:
    value, details = problem["input"], problem.get("ctx", {})
    if problem["type"] in _BOUNDS:
        words, key = _BOUNDS[problem["type"]]
        return f"{flag} must be {words} {details[key]}: {value}"
    if problem["type"] in _NUMBERS:
        return f"{flag} must be {_NUMBERS[problem['type']]}: {value}"
    reason = str(details.get("error", problem["msg"])).rstrip(".")
    _, is_choice, choices = reason.partition(" is not one of ")
    return (
        f"{flag} must be one of {choices.replace(chr(39), '')}: {value}" if is_choice else f"{flag}: {reason}: {value}"
    )
