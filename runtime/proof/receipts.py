"""Receipts: for each answer a JSON line with everything that its tokens follow from, so that anyone can check them.

A token follows from the tokens before it, the engine and the request: the sampling parameters with the seed and the
output's index, the grammar, and the conditions that end the output. The drafter is no part of a receipt, because it
changes no token. The exception are drafts that are verified by probabilities, which draw with other random numbers;
`drawn` says so, and such an answer is checked by its likelihood.
"""

import codecs
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.config import parse
from runtime.core.request import Sequence
from runtime.proof.records import Fingerprint, IdsForm, Receipt, ids_digest
from runtime.text.text import stop_words_of
from runtime.text.trace_lines import check_ids, digest_problem
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular, write_file
from runtime.util.reading import raise_unreadable, shown

_MOST_LINE_BYTES = 1 << 26


def receipt_of(
    sequence: Sequence, fingerprint: Fingerprint, *, name: str | None = None, form: IdsForm = "ids"
) -> Receipt:
    """The receipt of a finished sequence."""
    request = sequence.request
    assert sequence.finish_reason is not None
    words = stop_words_of(request)
    prompt, output = request.prompt_tokens, tuple(sequence.output_tokens)
    return Receipt(
        name=name,
        fingerprint=fingerprint,
        prompt_ids=prompt if form == "ids" else None,
        output_ids=output if form == "ids" else None,
        prompt_digest=ids_digest(prompt),
        output_digest=ids_digest(output),
        return_index=request.return_index,
        max_new_tokens=request.max_new_tokens,
        end_ids=tuple(sorted(request.end_ids)),
        stop_words=() if words is None else words.words,
        grammar=None if request.grammar is None else request.grammar.form,
        thinking=None if request.thinking is None else request.thinking.name,
        sampling=request.sampling,
        drawn="by_probabilities" if sequence.is_drawn_by_probs else "by_tokens",
        finish_reason=sequence.finish_reason,
    )


def write_receipts(path: Path, sequences: Iterable[Sequence], fingerprint: Fingerprint, form: IdsForm) -> None:
    """Write a line for each finished sequence. The file is replaced as a whole; if that fails the old file stays."""
    lines = (receipt_of(one, fingerprint, name=one.request.label, form=form).line for one in sequences)
    write_file(path, "".join(lines).encode())


@dataclass(frozen=True)
class Read:
    """The receipt on a line. `problem` is a sentence that says why there is none, or what is wrong with it."""

    where: str
    receipt: Receipt | None
    problem: str | None = None


Answers = Mapping[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]
"""Ids of prompts and outputs by their digests, for receipts that have digests alone."""


def read_receipts(path: Path, answers: Answers | None = None) -> Iterator[Read]:
    """The receipts in a file, line after line. A line is a receipt, or a batch's result or a server's answer with
    receipts. If something is wrong with a line, its own `Read` says so. SpecDecError if the file cannot be read.
    """
    for line, where in lines_of(path):
        yield from _read_line(line, where, answers or {})


def lines_of(path: Path) -> Iterator[tuple[bytes, str]]:
    """(line, its place for errors) for each line that is more than white space. A byte order mark is left out, and a
    line beyond 64 MiB comes in pieces. SpecDecError if the file cannot be read.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield line, f"line {number} of {path}"
    except OSError as error:
        raise_unreadable(path, error)


def num_lines(path: Path) -> int:
    """Number of line ends in a file; SpecDecError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError as error:
        raise_unreadable(path, error)


def _read_line(line: bytes, where: str, answers: Answers) -> Iterator[Read]:
    try:
        data = parse_line(line, where)
    except SpecDecError as error:
        yield Read(where, None, error.message)
        return
    rows = list(rows_in(data))
    if not rows:
        yield Read(where, None, f"{where} has no receipt: {shown(data)}")
    for row in rows:
        yield read_row(row, where, answers)


def parse_line(line: bytes, where: str) -> Any:
    """The JSON value on a line. SpecDecError, naming `where`, for a line that is cut off or damaged."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        wrong = f"is not JSON at column {error.colno}"
    except RecursionError:
        wrong = "has brackets too deep to read"
    except ValueError:  # Python reads no integer of more than 4,300 digits
        wrong = "has a number too long to read"
    raise SpecDecError(f"{where} {wrong}: it is cut or damaged", hint="write the file again")


def rows_in(data: Any) -> Iterator[dict[str, Any]]:
    """The receipts on a line, parsed as `data`: the line itself, or the receipts of an answer and its choices."""
    if not isinstance(data, dict):
        return
    if isinstance(data.get("fingerprint"), dict):
        yield data
        return
    body = body_of(data)
    for place in (body, *choices_of(body)):
        if isinstance(place.get("receipt"), dict):
            yield place["receipt"]


def body_of(data: Any) -> dict[str, Any]:
    """The answer on a line: under `response` in a batch's result or a stream's last event, else the line itself."""
    response = data.get("response") if isinstance(data, dict) else None
    body = response.get("body", response) if isinstance(response, dict) else data
    return body if isinstance(body, dict) else {}


def choices_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = body.get("choices")
    yield from (one for one in choices if isinstance(one, dict)) if isinstance(choices, list) else ()


def read_row(row: object, where: str, answers: Answers) -> Read:
    """The receipt in a JSON object, with the token ids from `answers` if it has digests alone. If something is wrong,
    the problem is a sentence about `where`.
    """
    if not isinstance(row, Mapping):
        return Read(where, None, f"{where} has no receipt: {shown(row)}")
    row = dict(row)
    try:
        receipt = parse(Receipt, row, where)
        for name in ("prompt_ids", "output_ids"):
            ids = row[name]
            if ids or (ids is not None and name == "prompt_ids"):
                check_ids(ids, f"`{name}` on {where}")
    except SpecDecError as error:
        return Read(where, None, error.message)
    if (problem := _digest_problem(receipt, row, where)) is not None:
        return Read(where, receipt if receipt.prompt_ids and receipt.output_ids is not None else None, problem)
    if receipt.prompt_ids is None or receipt.output_ids is None:
        found = answers.get((receipt.prompt_digest, receipt.output_digest))
        if found is None:
            return Read(where, None, f"{where} has digests of token ids alone, and no answer beside it has them")
        receipt = dataclasses.replace(receipt, prompt_ids=found[0], output_ids=found[1])
    return Read(where, receipt)


def _digest_problem(receipt: Receipt, row: dict[str, Any], where: str) -> str | None:
    if (problem := digest_problem(row, where)) is not None:
        return problem
    for name in ("prompt", "output"):
        ids = getattr(receipt, f"{name}_ids")
        if ids is not None and ids_digest(ids) != row[f"{name}_digest"]:
            found = shown(row[f"{name}_digest"])
            return f"{where} has other ids, its `{name}_digest` should be {ids_digest(ids)}, and is: {found}"
    return None
