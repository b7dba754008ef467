"""Traces: prompts and the model's answers, a JSON object on each line.

`{"prompt_ids": [...], "output_ids": [...], "category": "..."}`; `prompt` and `output` give the same as text, and the
category may be left out. Commands write ids, so that reading gives exactly the generated tokens, and a digest in each
line. So lines may be removed, shuffled and joined, and a damaged line is noticed. A line that a user wrote has no
`digest`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.request import Sequence
from runtime.text.text import encode, encode_text
from runtime.text.trace_lines import Trace, check_category, check_digest, check_part, line_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import write_file
from runtime.util.reading import read_json_lines, read_utf8, shown


def read_traces(path: Path, tokenizer: Tokenizer | None, vocab_size: int | None = None) -> list[Trace]:
    """The traces of a file, at least one; SpecDecError names the line of an invalid trace.

    Texts need the tokenizer; ids must be below `vocab_size`.
    """
    rows = read_json_lines(read_utf8(path), path)
    return [read_trace(row, f"line {number} of {path}", tokenizer, vocab_size) for number, row in rows]


def read_trace(row: dict[str, object], where: str, tokenizer: Tokenizer | None, vocab_size: int | None = None) -> Trace:
    """The trace in a line; `where` is the line's place, for errors. SpecDecError if the line is no trace."""
    check_digest(row, where)
    prompt = _read_tokens(row, "prompt", where, tokenizer, vocab_size)
    output = _read_tokens(row, "output", where, tokenizer, vocab_size)
    return Trace(prompt, output, check_category(row, f"`category` on {where}"))


def write_traces(path: Path, answers: Iterable[tuple[Sequence, str | None]]) -> None:
    """Write finished sequences, each with its category or None. The file is written completely, or left unchanged."""
    write_file(path, "".join(trace_line(sequence, category) for sequence, category in answers).encode())


def trace_line(sequence: Sequence, category: str | None) -> str:
    """The line for a finished sequence."""
    row: dict[str, object] = {"prompt_ids": list(sequence.request.prompt_tokens)}
    row["output_ids"] = sequence.output_tokens
    if category is not None:
        row["category"] = category
    return json.dumps(row | {"digest": line_digest(row)}) + "\n"


def _read_tokens(
    row: dict[str, object], name: str, where: str, tokenizer: Tokenizer | None, vocab_size: int | None
) -> tuple[int, ...]:
    """The ids under `name`_ids, or the tokens of the text under `name`."""
    part = check_part(row, name, where)
    if isinstance(part, str):
        return _encode(part, name, where, tokenizer)
    if vocab_size is not None and max(part) >= vocab_size:
        raise SpecDecError(
            f"`{name}_ids` on {where} has an id outside the vocabulary of {vocab_size}: {max(part)}",
            hint="traces and tokenizer must belong together",
        )
    return part


def _encode(text: str, name: str, where: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise SpecDecError(
            f"there is no tokenizer for a text, `{name}` on {where}: {shown(text)}",
            hint="name a tokenizer",
            code="no_tokenizer",
        )
    # A prompt as `run` reads it; an output goes on from there and has no start of its own.
    tokens = encode(text, tokenizer)[0] if name == "prompt" else encode_text(tokenizer, text)
    if not tokens:
        raise SpecDecError(f"the tokenizer finds no tokens in `{name}` on {where}: {shown(text)}", hint="leave it out")
    return tuple(tokens)
