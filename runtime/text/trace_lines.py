"""The lines of a traces file: their digests, and whether they are valid. Needs no torch."""

import codecs
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.checksums import document_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular
from runtime.util.reading import read_json_lines, read_utf8, shown

MAX_TOKEN_ID = 2**63 - 1  # ids travel as int64
_DIGEST_LEN = 16  # enough for damage, and lines of short answers stay short
_NUM_READ = 4096  # bytes that tell what a file is
_FORM = 'write {"prompt_ids": [...], "output_ids": [...]}, or `prompt` and `output` as text'


@dataclass(frozen=True)
class Trace:
    """A recorded request: the token ids of its prompt and of its greedy output, an end id included if there was one."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    category: str | None = None


def check_text(value: object, where: str) -> str:
    """`value` if it is text that can be tokenised. Raises SpecDecError, naming `where`, otherwise."""
    if not isinstance(value, str):
        raise SpecDecError(f"{where} is not text: {shown(value)}", hint="give a string")
    if not value.strip():
        raise SpecDecError(f"{where} is empty: {shown(value)}", hint="give it text, or take it out")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair: from "\ud800" in JSON, or a raw byte in argv
        raise SpecDecError(
            f"{where} cannot be written as UTF-8 at character {error.start}: {shown(value)}",
            hint="remove that character",
        ) from error
    return value


def check_category(row: dict[str, object], where: str) -> str | None:
    """Check the category of a JSON line, None if absent. Raises SpecDecError, naming `where`, unless it is text."""
    category = row.get("category")
    return None if category in (None, "") else check_text(category, where)


def check_ids(values: object, where: str) -> tuple[int, ...]:
    """`values` as a tuple if they are token ids, at least one. Raises SpecDecError, naming `where`, otherwise."""
    if not isinstance(values, list):
        raise SpecDecError(f"{where} is not a list: {shown(values)}", hint="give a list of token ids")
    if not values:
        raise SpecDecError(f"{where} holds no token id", hint="give it token ids, or take it out")
    ids: list[int] = []
    for position, value in enumerate(values, 1):
        # type() and not isinstance: JSON's true is an int to Python.
        if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
            raise SpecDecError(
                f"column {position} is not a token id, {shown(value)}: {where}",
                hint="token ids are integers from 0 up",
            )
        ids.append(value)
    return tuple(ids)


def line_digest(row: dict[str, object]) -> str:
    """Digest of a line without its `digest`."""
    return document_digest(row, "digest")[:_DIGEST_LEN]


def digest_problem(row: dict[str, object], where: str) -> str | None:
    """A sentence on a digest that is missing or does not match; None if it is right."""
    expected = line_digest(row)
    if "digest" not in row:
        return f"{where} has lost its digest, which should be: {expected}"
    if row["digest"] != expected:
        found = shown(row["digest"])
        return f"{where} has changed since it was written, its digest should be {expected}, and is: {found}"
    return None


def check_digest(row: dict[str, object], where: str) -> bool:
    """True if a line has a digest; SpecDecError if it does not match."""
    if "digest" not in row:
        _check_is_ones_own(row, where)
        return False
    if (problem := digest_problem(row, where)) is not None:
        raise SpecDecError(problem, hint="write the traces again; a line that you change yourself has no `digest`")
    return True


def _check_is_ones_own(row: dict[str, object], where: str) -> None:
    """SpecDecError for a line that has its own digest under another key."""
    for name, value in row.items():
        is_like_digest = isinstance(value, str) and len(value) == _DIGEST_LEN
        if is_like_digest and value == document_digest(row, name)[:_DIGEST_LEN]:
            raise SpecDecError(
                f"{where} has changed since it was written, its digest is called: {shown(name)}",
                hint="write the traces again; a line that you change yourself has no `digest`",
            )


def check_part(row: dict[str, object], name: str, where: str) -> str | tuple[int, ...]:
    """The text under `name`, or the ids under `name`_ids; SpecDecError unless the line has just one of them."""
    if (name in row) == (f"{name}_ids" in row):
        raise SpecDecError(f"{where} needs either `{name}` or `{name}_ids`, it has: {shown(sorted(row))}", hint=_FORM)
    if name in row:
        return check_text(row[name], f"`{name}` on {where}")
    return check_ids(row[f"{name}_ids"], f"`{name}_ids` on {where}")


def is_like_traces(path: Path) -> bool:
    """True if a file's name or beginning looks like JSON lines with prompts, however damaged the file is."""
    if path.suffix.lower() == ".jsonl":
        return True
    check_regular(path)
    with path.open("rb") as file:
        start = file.read(_NUM_READ)
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") and b'"prompt' in start.partition(b"\n")[0]


def check_trace_lines(path: Path) -> tuple[int, int]:
    """The numbers of traces, and of those with a digest. SpecDecError names the line of an invalid trace."""
    num_lines = num_with_digest = 0
    for number, row in read_json_lines(read_utf8(path), path):
        where = f"line {number} of {path}"
        num_lines += 1
        num_with_digest += check_digest(row, where)
        for name in ("prompt", "output"):
            check_part(row, name, where)
        check_category(row, f"`category` on {where}")
    return num_lines, num_with_digest
