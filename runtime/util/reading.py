"""Reads users' files, with errors that name the place of a fault."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular

_MOST_BYTES = 1 << 34
_BEGINNING = 4096  # bytes of a file that tell whether it is text


def read_utf8(path: Path) -> str:
    """The whole text of a file without its byte order mark. Line ends are kept.

    Raises SpecDecError if the file cannot be read, has more than 16 GiB or only white space, or is not UTF-8 (the error
    names the line, and the byte's offset from the start of the file).
    """
    check_regular(path, _MOST_BYTES)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise_unreadable(path, error)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecDecError(
            f"not UTF-8 text at line {line}, byte offset {error.start}: {path}", hint="save the file as UTF-8"
        ) from error
    if not text.strip():
        raise SpecDecError(f"the file is empty: {path}", hint="put something into it, or give another file")
    return text


def check_opens(path: Path) -> None:
    """SpecDecError for a path that cannot be opened as a file: there is none, or it is a directory."""
    check_regular(path)
    try:
        path.open("rb").close()
    except OSError as error:
        raise_unreadable(path, error)


def has_lines(path: Path) -> bool:
    """False for a file that does not begin like text, such as an engine's weights: it has a byte 0, or no line in
    UTF-8. SpecDecError if it cannot be read.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            begins = file.read(_BEGINNING)
    except OSError as error:
        raise_unreadable(path, error)
    return b"\0" not in begins and (not begins.strip() or any(map(_is_text, begins.splitlines())))


def _is_text(line: bytes) -> bool:
    """True for a line of UTF-8 that is not blank; its last character may be cut off."""
    try:
        return bool(codecs.getincrementaldecoder("utf-8")().decode(line).strip())
    except UnicodeDecodeError:
        return False


def read_json_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, object) of each line of a JSON lines text; `path` is only named in errors.

    A line of white space has no value and is skipped. Raises SpecDecError, naming the line, for a line that is not JSON
    or not an object.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        value = parse_json(line, path, first_line=number)
        if not isinstance(value, dict):
            raise SpecDecError(
                f"line {number} is not a JSON object, {shown(value)}: {path}",
                hint='write one object a line, such as {"prompt": "..."}',
            )
        yield number, value


def parse_json(text: str, path: Path, *, first_line: int = 1) -> object:
    """The value of a JSON text that starts on `first_line` of the file at `path`.

    Raises SpecDecError, which names the line, and for a syntax error the column.
    """
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {first_line + error.lineno - 1}, column {error.colno}"
        raise SpecDecError(
            f"not JSON at {where} ({error.msg}): {path}", hint="correct the file at that place"
        ) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        reason = "brackets too deep" if isinstance(error, RecursionError) else "a number too long"
        raise SpecDecError(
            f"JSON too large to read from line {first_line} ({reason}): {path}",
            hint="check that this is the right file",
        ) from error
    return value


def shown(value: object) -> str:
    """The value as an error shows it: in one line that fits a terminal."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def raise_unreadable(path: Path, error: OSError) -> NoReturn:
    raise SpecDecError(f"cannot read the file ({error.strerror}): {path}", hint="check the path") from error
