"""The first word of a command line, where it names a model or an engine: `run demo "…"`, `chat engine_outputs`."""

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer

from commands.options.settings import is_setting
from runtime.checkpoint.bundle import is_engine_dir
from runtime.checkpoint.cached_engines import cached_names
from runtime.checkpoint.checksums import CONFIG
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.resolve import is_shipped, shipped_models
from runtime.util.errors import UsageError
from runtime.util.words import NEAR

ModelWord = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model: directory, GGUF file, hub id or `demo` (its engine is built and cached), or an engine directory.",
        show_default=False,
    ),
]

_HUB_ID_OF_AN_OWNER = re.compile(
    r"(hf://|(https?://)?(hf\.co|huggingface\.co)/)?[A-Za-z0-9][\w.-]*/[\w.-]+([:@][\w./-]+)?"
)
_PATH = re.compile(r"(~|\.\.?)?/\S*")
_FILES = (".jsonl", ".json")
_ONE_WORD = re.compile(r"[A-Za-z0-9][\w.:@-]*")


def is_surely_model(word: str) -> bool:
    """True for a shipped name, or a file or directory here that is a model's or an engine's."""
    path = _path(word)
    return is_shipped(word) or (path is not None and (is_gguf(path) or _has_model(path)))


def may_be_model(word: str, *, is_answered: bool) -> bool:
    """True if a word of `run` names a model and is no prompt, where no flag names a model. Such a word is a model, a
    directory, a path such as `./model`, a GGUF file's name, or a hub id such as `Qwen/Qwen3-0.6B`. A single word such
    as `llama3` counts too, unless another model or engine is there to answer it.
    """
    path = _path(word)
    if path is None:
        return False
    if is_surely_model(word) or path.is_dir():
        return True
    if _HUB_ID_OF_AN_OWNER.fullmatch(word) or _PATH.fullmatch(word) or re.fullmatch(r"\S+\.(?i:gguf)", word):
        return True
    return _ONE_WORD.fullmatch(word) is not None and not is_answered


def near_model(word: str) -> str | None:
    """A model's name that `word` is nearly spelt like, such as `demo` for `dmeo`: a shipped name, a name in `specdec
    list`, or a model or an engine in the working directory. For a path such as `models/lama`, a model or an engine in
    that directory.
    """
    word = word.removesuffix("/")
    place, slash, name = word.rpartition("/")
    if slash and (found := _path(place)) is not None and found.is_dir():
        models = (path.name for path in found.iterdir() if is_gguf(path) or _has_model(path))
        return next((f"{place}/{near}" for near in difflib.get_close_matches(name, models, 1, NEAR)), None)
    if _ONE_WORD.fullmatch(word) is None:
        return None
    here = (path.name for path in Path().iterdir() if path.is_dir() or path.suffix == ".gguf")
    known = dict.fromkeys([*shipped_models(), *cached_names(), *here])
    near = difflib.get_close_matches(word, known, 3, NEAR)
    return next((name for name in near if not Path(name).exists() or is_surely_model(name)), None)


def model_among(files: list[str], *, has_flag: bool) -> tuple[str | None, list[str]]:
    """(model, files) from words that name files and perhaps a model or an engine: `receipts.jsonl demo`. The model is a
    word that surely names one. If there is none, and no flag names a model (`has_flag`), it is the last of several
    words that may name a model and that is neither a file here nor called like one: `Qwen/Qwen3-0.6B`, but not
    `old.jsonl`.
    """
    model = next((word for word in files if is_surely_model(word)), None)
    last = files[-1] if len(files) > 1 and not has_flag else None
    if model is None and last is not None and Path(last).suffix not in _FILES and not Path(last).is_file():
        model = last if may_be_model(last, is_answered=True) else None
    if model is None:
        return None, files
    place = files.index(model)
    return model, files[:place] + files[place + 1 :]


def named_by(word: str | None, model_dir: str | None, engine_dir: Path | None) -> tuple[str | None, Path | None]:
    """(model, engine): the command's first word as either of the two; without a word the flags' values. UsageError if a
    flag names another model or engine; a name from a variable or a file gives way to the word.
    """
    if word is None:
        return model_dir, engine_dir
    path = _path(word)
    is_engine = path is not None and not is_shipped(word) and is_engine_dir(path)
    for flag, given, is_same in (("--model-dir", model_dir, not is_engine), ("--engine-dir", engine_dir, is_engine)):
        if given is not None and not is_setting(flag.removeprefix("--").replace("-", "_")):
            two = f"two {'engines' if is_engine else 'models'}" if is_same else "a model and an engine"
            raise UsageError(f"{two} are given: `{word}`, and by `{flag}` {given}", hint="leave one of the two out")
    return (None, path) if is_engine else (word, None)


def _path(word: str) -> Path | None:
    """The word as a path; None if it cannot be a path, such as a prompt of many lines, or an empty prompt."""
    if not word:
        return None
    try:
        path = Path(word).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _has_model(path: Path) -> bool:
    return path.is_dir() and ((path / CONFIG).is_file() or any(map(is_gguf, path.iterdir())))
