"""The samples of `specdec summarize`: shipped, from the Hugging Face hub, or from the user's files.

The tasks (but `question`), the hub datasets and the shuffle are as in TensorRT-LLM's `examples/summarize.py`. Two
invariants. Every sample has a text and, unless it is a question, a reference: a row that lacks either is an error, and
is never left out. A local file is read as it is now, because nothing derived from it is kept on disk.
"""

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Literal

from runtime.checkpoint.hub import quiet_hub
from runtime.text.trace_lines import check_text
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.files import check_regular
from runtime.util.reading import parse_json, raise_unreadable, read_json_lines, read_utf8, shown

EvalTask = Literal["summarize", "code_completion", "question"]

DEMO = "demo"
HUB_DATASETS = {
    "summarize": "ccdv/cnn_dailymail",
    "code_completion": "openai/openai_humaneval",
}
_HUB_CONFIGS = {
    "ccdv/cnn_dailymail": "3.0.0",
    "abisee/cnn_dailymail": "3.0.0",
    "nvidia/SPEED-Bench": "qualitative",
}
_NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Mark that SPEED-Bench puts in place of texts that it may not contain."""
_HUB_ALIASES = {"openai_humaneval": "openai/openai_humaneval"}  # the id TensorRT-LLM uses
_SPLIT = "test"

_TEXT_COLUMNS: dict[EvalTask, tuple[str, ...]] = {
    "summarize": ("article", "prompt", "text", "document", "input"),
    "code_completion": ("prompt",),
    "question": ("turns", "messages", "question", "prompt", "instruction", "text"),
}
_REFERENCE_COLUMNS: dict[EvalTask, tuple[str, ...]] = {
    "summarize": ("highlights", "reference", "summary", "output"),
    "code_completion": ("canonical_solution",),
    "question": ("reference", "answer", "output"),
}
_ID_COLUMNS = ("id", "task_id", "question_id")
_PARQUET_MARK = b"PAR1"
_FILE_KINDS = (".csv", ".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Sample:
    """A row of a dataset. `text` is the row's own text, such as an article; `summarization_prompt` makes a prompt from
    it. Only a question may lack a reference.
    """

    id: str
    category: str | None
    text: str
    reference: str | None
    where: str = field(default="", compare=False)
    """The row's number, or its line, and the dataset's name."""


@dataclass(frozen=True)
class _Table:
    """A dataset's rows. For a file of lines, `lines` has each row's line number."""

    columns: Sequence[str]
    rows: Sequence[Mapping[str, object]]
    lines: Sequence[int] | None = None

    def place(self, i: int) -> str:
        return f"row {i + 1}" if self.lines is None else f"line {self.lines[i]}"


@dataclass(frozen=True)
class Columns:
    """Names of the columns with text and reference; None for the names that datasets usually have."""

    text: str | None = None
    reference: str | None = None


def load_samples(
    name: str,
    *,
    eval_task: EvalTask,
    dataset_dir: Path | None,
    max_samples: int | None,
    seed: int,
    columns: Columns = Columns(),
    needs_reference: bool = True,
) -> list[Sample]:
    """The first `max_samples` samples (None: all) of the dataset `name`, shuffled with `seed`.

    `name` is `demo`, a local .jsonl, .json, .csv or .parquet file, a directory of such files or one written
    by `save_to_disk`, or a hub id (split `test`). `dataset_dir` is where a hub dataset is looked for instead
    of the hub: the directory holding it, or the one above (`dataset_dir`/`name`).

    A question may be a list of turns, as in MT-Bench and Spec-Bench, or of messages, as SPEED-Bench's `prepare.py`
    writes them. The first is asked, which must be a user's. Its reference may be a list, of which the first is the
    first turn's. Without `needs_reference` none is looked for.

    The order is that of `datasets.Dataset.shuffle(seed)`, as in TensorRT-LLM. `demo` keeps the order of its
    file, in which the categories alternate, so that the first few samples show each of them.

    Raises SpecDecError, with the row or line where there is one, where the dataset cannot be found or read,
    is empty, lacks a column or has a row among the samples without text or reference; UsageError for
    arguments that contradict each other.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"the number of samples must be at least 1: {max_samples}", hint="ask for one or more")
    table = _read_table(name, dataset_dir)
    if not len(table.rows):
        raise SpecDecError(f"the dataset has no rows: {name}", hint="give a file with at least one row")
    text_column = _column(table, columns.text, _TEXT_COLUMNS[eval_task], "text", name)
    reference_column: str | None
    if not needs_reference:
        reference_column = None
    elif eval_task == "question" and columns.reference is None:
        reference_column = next((c for c in _REFERENCE_COLUMNS[eval_task] if c in table.columns), None)
    else:
        reference_column = _column(table, columns.reference, _REFERENCE_COLUMNS[eval_task], "reference", name)
    order = range(len(table.rows)) if name == DEMO else _shuffled(len(table.rows), seed)
    return [
        _sample(table.rows[i], f"{table.place(i)} of {name}", str(i + 1), text_column, reference_column, eval_task)
        for i in islice(order, max_samples)
    ]


def summarization_prompt(text: str) -> str:
    """The prompt that TensorRT-LLM's `examples/summarize.py` makes from an article (GPT-2's "TL;DR:")."""
    return (text + " TL;DR: ").strip().replace(" n't", "n't")


def _read_table(name: str, dataset_dir: Path | None) -> _Table:
    path = Path(name)
    is_directory = os.path.isdir(name)
    is_file = not is_directory and (path.suffix.lower() in _FILE_KINDS or os.path.isfile(name))
    if dataset_dir is not None and (name == DEMO or is_file):
        raise UsageError(
            f"`--dataset-dir` is for hub datasets only, and this is not one: {name}",
            hint=f"name the hub dataset the directory holds, such as `{HUB_DATASETS['summarize']}`",
        )
    if name == DEMO:
        return _read_file(_demo_file())
    if is_file:
        return _read_file(path)
    if dataset_dir is not None:
        nested = dataset_dir / name
        return _read_directory(nested if os.path.isdir(nested) else dataset_dir, name)
    if is_directory:
        return _read_directory(path, name)
    return _read_hub(_HUB_ALIASES.get(name, name))


def _demo_file() -> Path:
    return Path(str(resources.files("runtime"))) / "demo" / "articles.jsonl"


def _read_file(path: Path) -> _Table:
    """A local file. Text formats are parsed here: `datasets` names no line in its errors, and its readers
    take "2024-01-01" for a date, "007" for a number and "NA" for nothing."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path)
    if suffix not in _FILE_KINDS:
        kinds = ", ".join(f"`{kind}`" for kind in _FILE_KINDS)
        raise SpecDecError(f"unknown kind of dataset file: {path}", hint=f"use one of {kinds}")
    text = read_utf8(path)
    if suffix == ".csv":
        return _parse_csv(text, path)
    rows = _parse_json_array(text, path) if suffix == ".json" and text.lstrip().startswith("[") else None
    lines = None
    if suffix == ".json" and rows is None and _is_one_object(text):
        raise SpecDecError(
            f"the file holds one JSON object over several lines, and not rows: {path}",
            hint="a dataset is a list of objects, or has one on each line",
        )
    if rows is None:
        numbered = list(read_json_lines(text, path))
        rows, lines = [row for _, row in numbered], [number for number, _ in numbered]
    return _Table(columns=list(dict.fromkeys(key for row in rows for key in row)), rows=rows, lines=lines)


def _is_one_object(text: str) -> bool:
    if "\n" not in text.strip():
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json_array(text: str, path: Path) -> list[dict[str, object]]:
    values = parse_json(text, path)
    assert isinstance(values, list)
    rows: list[dict[str, object]] = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise SpecDecError(
                f"row {number} is not a JSON object, {shown(value)}: {path}",
                hint='a row is an object such as {"article": "...", "highlights": "..."}',
            )
        rows.append(value)
    return rows


def _parse_csv(text: str, path: Path) -> _Table:
    # An article may be longer than the csv module's limit of 131,072 characters a cell.
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[dict[str, object]] = []
    try:
        header = next((cells for cells in reader if any(cell.strip() for cell in cells)), None)
        if header is None:
            raise SpecDecError(f"the file has no header: {path}", hint="name the columns in its first line")
        if len(set(header)) < len(header):
            raise SpecDecError(
                f"the header names a column twice, {shown(header)}: {path}", hint="give every column its own name"
            )
        for cells in reader:
            if cells and len(cells) != len(header):
                raise SpecDecError(
                    f"the row ending on line {reader.line_num} has {len(cells)} cells "
                    f"and the header {len(header)}: {path}",
                    hint="put quotes around text with commas or line ends in it",
                )
            if cells:
                rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise SpecDecError(
            f"line {reader.line_num} is not CSV ({error}): {path}",
            hint="put quotes around text with commas, quotes or line ends in it",
        ) from error
    finally:
        csv.field_size_limit(limit)
    return _Table(columns=header, rows=rows)


def _read_parquet(path: Path) -> _Table:
    check_regular(path)
    if not os.path.isfile(path):
        raise SpecDecError(f"no such dataset file: {path}", hint="check the path")
    _check_parquet(path)
    datasets = _datasets()
    with TemporaryDirectory(prefix="specdec-dataset-") as cache:
        try:
            loaded = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # pyarrow's and datasets' errors have no common base
            raise SpecDecError(
                f"cannot read the Parquet file ({_reason(error)}): {path}", hint="check that the file is whole"
            ) from error
    return _Table(columns=loaded.column_names, rows=loaded)


def _check_parquet(path: Path) -> None:
    """SpecDecError unless the file begins and ends as Parquet's format says. `datasets` gives a vaguer error, and takes
    a second.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(-min(4, path.stat().st_size), os.SEEK_END)
            end = file.read()
    except OSError as error:
        raise_unreadable(path, error)
    if start != _PARQUET_MARK:
        raise SpecDecError(f"not a Parquet file: {path}", hint="check that the file is what its name says")
    if end != _PARQUET_MARK:
        raise SpecDecError(f"the Parquet file is cut short: {path}", hint="download or write it again")


def _read_directory(directory: Path, name: str) -> _Table:
    """Read a directory of data files (such as a copy of a hub dataset's repository), or a directory that `save_to_disk`
    wrote.
    """
    if not os.path.isdir(directory):
        raise SpecDecError(f"no such dataset directory: {directory}", hint="check `--dataset-dir`")
    for file in directory.rglob("*"):
        check_regular(file)
    datasets = _datasets()
    path = str(directory)
    with TemporaryDirectory(prefix="specdec-dataset-") as cache:
        try:
            if any((directory / file).is_file() for file in ("dataset_dict.json", "state.json")):
                loaded = datasets.load_from_disk(path, keep_in_memory=True)
            else:
                config = _HUB_CONFIGS.get(name)
                config = config if config in datasets.get_dataset_config_names(path) else None
                loaded = datasets.load_dataset(path, config, cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # these loaders raise whatever their readers do
            raise SpecDecError(
                f"cannot read the dataset directory ({_reason(error)}): {directory}",
                hint="it should hold data files, or what `save_to_disk` wrote",
            ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if _SPLIT not in loaded and len(loaded) != 1:
            raise SpecDecError(
                f"no split `{_SPLIT}` among {shown(list(loaded))}: {directory}", hint="name the split to use `test`"
            )
        loaded = loaded[_SPLIT if _SPLIT in loaded else next(iter(loaded))]
    return _Table(columns=loaded.column_names, rows=loaded)


def _read_hub(hub_id: str) -> _Table:
    """A dataset of the hub, downloaded once into the Hugging Face cache."""
    hint = f"pass a local file, `--dataset-dir` or `{DEMO}`"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id, re.ASCII):
        raise SpecDecError(f"no such dataset file or directory, and not a hub id: {hub_id}", hint=hint)
    datasets = _datasets()
    quiet_hub()
    config = _HUB_CONFIGS.get(hub_id)
    try:
        try:
            loaded = datasets.load_dataset(hub_id, config, split=_SPLIT)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            # ccdv/cnn_dailymail is a script, which datasets 4 stopped running; the hub exports it as Parquet.
            export = f"hf://datasets/{hub_id}@refs/convert/parquet/{config or 'default'}/{_SPLIT}/*.parquet"
            loaded = datasets.load_dataset("parquet", data_files={_SPLIT: export}, split=_SPLIT)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise SpecDecError(f"the Hugging Face hub has no such dataset: {hub_id}", hint=hint) from error
    except ConnectionError as error:
        raise SpecDecError(f"the Hugging Face hub cannot be reached for the dataset: {hub_id}", hint=hint) from error
    except Exception as error:  # datasets, huggingface_hub, httpx and pyarrow errors have no common base
        raise SpecDecError(
            f"cannot load the dataset from the Hugging Face hub ({_reason(error)}): {hub_id}", hint=hint
        ) from error
    return _Table(columns=loaded.column_names, rows=loaded)


def _datasets() -> ModuleType:
    """The `datasets` package, quiet. Imported on demand: it takes a second, and `--help` must not wait."""
    import datasets

    datasets.disable_progress_bars()
    module: ModuleType = datasets
    return module


def _reason(error: Exception) -> str:
    """The first line of an error of `datasets`. If it wraps another error, the line is of the wrapped error, which says
    more.
    """
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def _column(table: _Table, asked: str | None, usual: tuple[str, ...], role: str, name: str) -> str:
    """The column that the user named, or the first of the usual names that the table has."""
    for column in usual if asked is None else (asked,):
        if column in table.columns:
            return column
    found = ", ".join(f"`{column}`" for column in table.columns)
    wanted = f"no {role} column" if asked is None else f"no column `{asked}`"
    names = " or ".join(f"`{column}`" for column in usual)
    hint = f"name it with `--{role}-column`; without the flag it is {names}"
    raise SpecDecError(f"{wanted}, the columns are {found}: {name}", hint=hint)


def _shuffled(num_rows: int, seed: int) -> Sequence[int]:
    """Row indices in the order of `datasets.Dataset.shuffle(seed)`, which uses this permutation."""
    import numpy as np

    order: list[int] = np.random.default_rng(seed).permutation(num_rows).tolist()
    return order


def _sample(
    row: Mapping[str, object],
    where: str,
    number: str,
    text_column: str,
    reference_column: str | None,
    eval_task: EvalTask,
) -> Sample:
    row_id = next((row[column] for column in _ID_COLUMNS if row.get(column) not in (None, "")), number)
    category = row.get("category")
    text, reference = row.get(text_column), row.get(reference_column) if reference_column else None
    if eval_task == "question":
        text, reference = first_turn(text, where), _first(reference)
        if text is None:
            raise SpecDecError(
                f"`{text_column}` in {where} has no question: {shown(row.get(text_column))}",
                hint="give a text, or a list that begins with a user's turn; all rows have the same column",
            )
    has_reference = reference_column is not None and (eval_task != "question" or reference not in (None, ""))
    return Sample(
        id=check_text(str(row_id), f"the id of {where}"),
        category=None if category in (None, "") else check_text(str(category), f"`category` in {where}"),
        text=check_text(text, f"`{text_column}` in {where}"),
        reference=check_text(reference, f"`{reference_column}` in {where}") if has_reference else None,
        where=where,
    )


def first_turn(value: object, where: str) -> object:
    """The first of a list of turns, or the content of the first message, if its role is the user's. SpecDecError, which
    names the row `where`, for SPEED-Bench's mark of a text that it may not contain.
    """
    first = _first(value)
    if isinstance(first, dict):
        first = first.get("content") if first.get("role") == "user" else None
    if isinstance(first, str) and first.startswith(_NOT_FETCHED):
        raise SpecDecError(
            f"the dataset has only a mark in the place of the text: {where}",
            hint="`nemo_skills/dataset/speed-bench/prepare.py` of NVIDIA-NeMo/Skills fetches SPEED-Bench's texts",
        )
    return first


def _first(value: object) -> object:
    """The first element of a list; None if it is empty. An element that is a list (of equally good answers) gives its
    first. Any other value is returned as it is.
    """
    while isinstance(value, list):
        value = value[0] if value else None
    return value
