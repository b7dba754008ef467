"""The prompts of `specdec run`: texts from the command line, or a file of texts or token ids.

Every prompt returned has something in it: a row, a line or a cell that cannot be a prompt is an error that
says where it stands. Only blank lines of a .txt file are left out, with a warning. The file kinds are those of
TensorRT-LLM's `examples/run.py` (`parse_input`) and JSON lines.
"""

import csv
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.text.chat import Message, check_messages
from runtime.text.trace_lines import check_category, check_ids, check_text
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError
from runtime.util.files import check_regular
from runtime.util.reading import check_opens, raise_unreadable, read_json_lines, read_utf8, shown

if TYPE_CHECKING:
    from commands.options.engine_choice import EngineChoice
    from runtime.llm import LLM


@dataclass(frozen=True)
class Prompt:
    """A prompt: exactly one of text, ids and messages is set, and none is ever empty."""

    text: str | None
    ids: tuple[int, ...] | None
    category: str | None = None
    messages: tuple[Message, ...] | None = None

    @property
    def content(self) -> str | tuple[int, ...]:
        """The text or token ids to encode; a conversation has none (`content_by`)."""
        assert self.text is not None or self.ids is not None
        return self.text if self.text is not None else self.ids or ()

    def content_by(self, llm: "LLM") -> str | Sequence[int]:
        """Text or token ids to encode. For a conversation these are the token ids that the model's chat template
        gives.
        """
        return self.content if self.messages is None else llm.chat_template.encode(self.messages)

    @property
    def shown(self) -> str:
        """Text shown to people."""
        if self.messages is not None:
            return self.messages[-1]["content"]
        return self.text if self.text is not None else f"{len(self.ids or ())} token ids"

    def conversation(self, *, apply_chat_template: bool) -> tuple[Message, ...] | None:
        """The prompt's messages. With `apply_chat_template` a text becomes a single message of the user's."""
        if self.text is None or not apply_chat_template:
            return self.messages
        return ({"role": "user", "content": self.text},)


def read_prompts(input_text: Sequence[str], input_file: Path | None, *, pad_id: int | None = None) -> list[Prompt]:
    """The prompts given as texts or in a file, in order.

    The file's suffix gives its kind:
    `.txt`    a text on each line, without the line's end
    `.csv`    a row of comma-separated token ids for each prompt; rows may have different lengths
    `.npy`    integers [num_prompts, length] or [length]; `pad_id` is removed from the end of each row.
              (TensorRT-LLM removes it everywhere, but an end id that pads may also be inside a prompt.)
    `.jsonl`  an object on each line with `prompt` (text), `prompt_ids` (list of token ids) or `messages` (a
              conversation), and perhaps `category`

    Raises UsageError unless either texts or a file with a known suffix is given; SpecDecError, which names the line,
    row and column or byte, for prompts that cannot be used.
    """
    if input_file is None and not input_text:
        raise UsageError(
            "no prompt given", hint='specdec run MODEL "a prompt", `-` for standard input, or `--input-file`'
        )
    if input_file is None:
        texts = [_standard_input() if text == "-" else _as_utf8(text) for text in input_text]
        return [Prompt(check_text(text, f"prompt {i}"), None) for i, text in enumerate(texts, 1)]
    if input_text:
        raise UsageError(f"both a prompt and `--input-file` given: {input_file}", hint="pass one of the two")
    if str(input_file) == "-":
        return list(_txt_prompts(_standard_input(), Path("standard input")))
    suffix = input_file.suffix.lower()
    if suffix == ".npy":
        return list(_npy_prompts(input_file, pad_id))
    if suffix not in _TEXT_KINDS:
        check_opens(input_file)
        raise UsageError(
            f"unknown kind of input file: {input_file}",
            hint=f"use one of {', '.join(f'`{kind}`' for kind in sorted([*_TEXT_KINDS, '.npy']))}",
        )
    return list(_TEXT_KINDS[suffix](read_utf8(input_file), input_file))


def check_readable_by(choice: "EngineChoice", prompts: Sequence[Prompt]) -> None:
    """SpecDecError, as far as files show, for conversations without a chat template, or texts without a tokenizer."""
    if any(prompt.messages for prompt in prompts):
        choice.check_chat_template()
    elif any(prompt.text is not None for prompt in prompts):
        choice.check_tokenizer()


def without_padding(prompts: list[Prompt], input_file: Path | None, end_ids: frozenset[int]) -> list[Prompt]:
    """The prompts without padding: rows of an array are read again, now that the engine's end ids, with which they are
    padded, are known.
    """
    if input_file is None or input_file.suffix.lower() != ".npy" or not end_ids:
        return prompts
    return read_prompts([], input_file, pad_id=min(end_ids))


def _as_utf8(text: str) -> str:
    """Text of an argument. In an ASCII locale Python leaves its bytes undecoded; they are decoded as UTF-8 here."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def _standard_input() -> str:
    """All of standard input, without the end of its last line; SpecDecError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SpecDecError(f"standard input is not UTF-8: {error}", hint="convert it to UTF-8") from None


def _txt_prompts(text: str, path: Path) -> Iterator[Prompt]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    blank = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if 0 < len(blank) < len(lines):
        which = f"line{'s' if len(blank) > 1 else ''} {', '.join(map(str, blank))}"
        warnings.warn(f"blank {which} of {path} left out", SpecDecWarning, stacklevel=1)
    for number, line in enumerate(lines, 1):
        if line.strip() or len(blank) == len(lines):
            yield Prompt(check_text(line, f"line {number} of {path}"), None)


def _csv_prompts(text: str, path: Path) -> Iterator[Prompt]:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        for number, row in enumerate(reader, 1):
            cells = [_csv_id(cell, f"row {number}, column {i} of {path}") for i, cell in enumerate(row, 1)]
            yield Prompt(None, check_ids(cells, f"row {number} of {path}"))
    except csv.Error as error:
        raise SpecDecError(
            f"line {reader.line_num} is not CSV ({error}): {path}", hint="write integers from 0 up, separated by commas"
        ) from error


def _csv_id(cell: str, where: str) -> object:
    digits = cell.strip()
    # int() alone would take "1_000" and digits of other scripts, and refuse 5,000 digits with its own error.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise SpecDecError(
            f"{where} is not a token id: {shown(cell)}", hint="write integers from 0 up, separated by commas"
        )
    return int(digits)


def _jsonl_prompts(text: str, path: Path) -> Iterator[Prompt]:
    for number, row in read_json_lines(text, path):
        if sum(name in row for name in ("prompt", "prompt_ids", "messages")) != 1:
            raise SpecDecError(
                f"line {number} needs `prompt`, `prompt_ids` or `messages`, it has {shown(sorted(row))}: {path}",
                hint='write {"prompt": "..."}, {"prompt_ids": [...]} or {"messages": [{"role": "user", ...}]}',
            )
        category = check_category(row, f"`category` on line {number} of {path}")
        if "prompt" in row:
            yield Prompt(check_text(row["prompt"], f"`prompt` on line {number} of {path}"), None, category)
            continue
        if "messages" in row:
            messages = check_messages(row["messages"], f"`messages` on line {number} of {path}")
            yield Prompt(None, None, category, messages)
            continue
        yield Prompt(None, check_ids(row["prompt_ids"], f"`prompt_ids` on line {number} of {path}"), category)


def _npy_prompts(path: Path, pad_id: int | None) -> Iterator[Prompt]:
    for number, row in enumerate(_npy_rows(path), 1):
        while row and row[-1] == pad_id:
            row.pop()
        yield Prompt(None, check_ids(row, f"row {number} of {path}"))


def _npy_rows(path: Path) -> list[list[int]]:
    import numpy as np

    check_regular(path)
    try:
        with path.open("rb") as file:
            # Not np.load, which would open a .npz archive or a bare pickle under this name as well.
            array = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise_unreadable(path, error)
    except Exception as error:  # a broken header fails in numpy, ast, tokenize or in allocating its shape
        raise SpecDecError(
            f"not a NumPy array of numbers ({shown(str(error))}): {path}",
            hint="write it with `numpy.save` from an integer array",
        ) from error
    if not np.issubdtype(array.dtype, np.integer):
        raise SpecDecError(
            f"token ids must be integers, the array holds {array.dtype}: {path}",
            hint="save the array with an integer dtype",
        )
    if array.ndim not in (1, 2):
        raise SpecDecError(
            f"token ids need 1 or 2 dimensions, the array has shape {array.shape}: {path}",
            hint="save it as (num_prompts, length) or (length,)",
        )
    if array.size == 0:
        raise SpecDecError(f"the array is empty, its shape is {array.shape}: {path}", hint="save at least one prompt")
    rows: list[list[int]] = np.atleast_2d(array).tolist()
    return rows


_TEXT_KINDS: dict[str, Callable[[str, Path], Iterator[Prompt]]] = {
    ".txt": _txt_prompts,
    ".csv": _csv_prompts,
    ".jsonl": _jsonl_prompts,
}
