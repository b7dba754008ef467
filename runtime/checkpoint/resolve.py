"""Finds a model's files by its name: a shipped name, a directory, a GGUF file, or a Hugging Face repository."""

import posixpath
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.checkpoint import hub
from runtime.checkpoint.gguf.config import config_of
from runtime.checkpoint.gguf.reader import gguf_files, has_tokenizer, is_gguf, without_later_parts
from runtime.checkpoint.hub import MODEL_FILES
from runtime.checkpoint.tekken import is_tekken_alone
from runtime.checkpoint.tokenizer import TOKENIZER_FILES, template_files
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import check_model_files, check_regular, read_json

_SHIPPED = {"demo": "target", "demo-draft": "draft", "demo-hybrid": "hybrid"}
_SHIPPED_HEADS = {"demo-head": "head"}
_ADAPTER = "adapter_config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


DOWNLOAD_AGAIN = "download or save the model again"


def resolve_model(name: str) -> Path:
    """The directory of a Hugging Face model, or a GGUF file, also for the directory that contains it. Shipped names
    come first: `./demo` is a directory of that name. A hub id is downloaded.

    SpecDecError if there is no such model here or on the hub, or the hub refuses it.
    """
    if name in _SHIPPED:
        return _shipped(name, _SHIPPED[name])
    path = Path(name).expanduser()
    if path.is_dir():
        check_model_files(path)
        return _gguf_within(path) or path
    check_regular(path)
    if is_gguf(path):
        return path
    _check_no_gguf(path)
    if path.exists():
        raise SpecDecError(f"model is a file, not a directory: {name}", hint="give the directory that holds it")
    if (shipped := name.partition(":")[0]) in _SHIPPED:
        raise SpecDecError(
            f"a shipped model has no quantized files: {name}",
            hint=f"give `{shipped}`, and quantize it",
            code="shipped_format",
            model=shipped,
        )
    model, at, revision = name.partition("@")
    if at and (model in _SHIPPED or hub.parse_name(model) is not None):
        raise SpecDecError(
            f"a model is taken as it is now, and not in a revision: {name}", hint=f"leave `@{revision}` out: `{model}`"
        )
    if hub.parse_name(name) is None:
        raise SpecDecError(
            f"model directory does not exist: {name}",
            hint="check the path; shipped models are `demo`, `demo-draft` and `demo-hybrid`; the shipped head is "
            "`demo-head`",
            code="no_such_model",
            name=name,
        )
    return hub.download(name)


def is_shipped(name: str) -> bool:
    return name in _SHIPPED


def shipped_models() -> list[str]:
    return [*_SHIPPED]


def files_of_model(model_dir: Path) -> list[Path]:
    """Files of a model that its engine depends on: weights, configs, tokenizer and templates."""
    if is_gguf(model_dir):
        return gguf_files(model_dir)
    found = {path for pattern in MODEL_FILES for path in model_dir.glob(pattern)}
    found |= {*template_files(model_dir), *shards_of(model_dir).values()}
    return sorted(path for path in found if path.is_file())


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files among `files_of_model`."""
    return [path for path in files_of_model(model_dir) if path.suffix == ".safetensors"]


def check_weight_files(model_dir: Path) -> None:
    """SpecDecError for a safetensors file that is damaged, as far as its header and its length show. This takes
    milliseconds, where a digest would read the whole file.
    """
    from runtime.util.tensor_file import read_header  # not for commands that read no weights

    single = model_dir / WEIGHTS
    for file in [single] if single.is_file() else sorted(set(shards_of(model_dir).values())):
        with suppress(OSError), file.open("rb") as opened, damage_told(file):
            read_header(opened)


@contextmanager
def damage_told(file: Path) -> Iterator[None]:
    """Turn safetensors' error about a damaged file into a SpecDecError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise SpecDecError(f"`{file}` is damaged: {error}", hint=DOWNLOAD_AGAIN) from None


def shards_of(model_dir: Path) -> dict[str, Path]:
    """The file of each tensor, as from `files_of_index`; empty if there is no index, or if the weights are one file."""
    index = model_dir / INDEX
    return {} if (model_dir / WEIGHTS).is_file() or not index.is_file() else files_of_index(index)


def files_of_index(index: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name, from an index. Files may be in a subdirectory, as
    `layers/0.safetensors`; `./a.safetensors` means `a.safetensors`.

    SpecDecError for an index without tensors, or with a file outside its directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values() or [None]):
        raise SpecDecError(f"`{index}` has no `weight_map` from tensors to files", hint=DOWNLOAD_AGAIN)
    inner = {name: posixpath.normpath(name) for name in set(weight_map.values())}
    for name in sorted(inner):
        if inner[name].startswith(("/", "..")):
            raise SpecDecError(f"`{index}` names a file outside the model's directory: {name}", hint=DOWNLOAD_AGAIN)
    return {tensor: index.parent / inner[name] for tensor, name in weight_map.items()}


def resolve_head(name: str) -> Path:
    """The directory of a trained drafter, or of a model that contains one, by a name as for `resolve_model`."""
    directory = shipped_head(name) or Path(name).expanduser()
    return directory if directory.is_dir() else resolve_model(name)


def shipped_head(name: str) -> Path | None:
    """The directory of a shipped trained drafter; None for another name."""
    return _shipped(name, _SHIPPED_HEADS[name]) if name in _SHIPPED_HEADS else None


def name_of(path: Path) -> str:
    """The name of the shipped model or head at this path, or the path itself."""
    named = {_shipped(name, directory): name for name, directory in (_SHIPPED | _SHIPPED_HEADS).items()}
    return named.get(path, str(path))


def _shipped(name: str, directory_name: str) -> Path:
    directory = Path(str(files("runtime") / "demo" / directory_name))
    if not directory.is_dir():
        raise SpecDecError(f"the shipped model is missing from this installation: {name}", hint="install it again")
    return directory


def _gguf_within(directory: Path) -> Path | None:
    """The GGUF file in a directory, for a model in parts its first file. None if there is no such file, or if there are
    other weights; SpecDecError for several models.
    """
    found = without_later_parts(sorted(path for path in directory.iterdir() if is_gguf(path)))
    has_weights = (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))
    if not found or has_weights:
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise SpecDecError(f"the directory holds several GGUF files: {names}", hint=f"name one: {found[0]}")
    return found[0]


def _check_no_gguf(path: Path) -> None:
    """SpecDecError for the name of a GGUF file that does not exist."""
    if path.suffix.lower() == ".gguf":
        raise SpecDecError(f"GGUF file does not exist: {path}", hint="check the path")


def resolve_tokenizer(path: Path) -> Path:
    """A directory with a tokenizer, or the GGUF file that describes one, also for a directory that contains the file. A
    directory with neither is returned as it is. SpecDecError for a path that does not exist, or a GGUF file without a
    tokenizer.
    """
    if path.is_dir():
        check_model_files(path)
        found = None if _has_tokenizer_files(path) else _gguf_within(path)
    else:
        check_regular(path)
        found = path if is_gguf(path) else None
        if found is None:
            _check_no_gguf(path)
            raise SpecDecError(
                f"tokenizer directory does not exist: {path}",
                hint="give the directory of a Hugging Face tokenizer, or a GGUF file",
            )
    if found is not None and not has_tokenizer(found):
        raise SpecDecError(
            f"the file has no tokenizer: {found}",
            hint="name the tokenizer of the model that the GGUF file was made from",
        )
    return found or path


def _has_tokenizer_files(directory: Path) -> bool:
    return is_tekken_alone(directory) or any((directory / name).is_file() for name in TOKENIZER_FILES)


def refuse_unreadable_tokenizer(path: Path) -> None:
    """SpecDecError for a directory or a GGUF file without a tokenizer, or with a tokenizer that cannot be read here."""
    if is_gguf(path):
        from runtime.checkpoint.gguf.tokenizer import check_gguf_tokenizer

        check_gguf_tokenizer(path)
    else:
        if not _has_tokenizer_files(path):
            raise SpecDecError(
                f"there is no tokenizer for texts in: {path}",
                hint="name a tokenizer, or give token ids",
                code="no_tokenizer",
            )
        refuse_sentencepiece(path)


def refuse_sentencepiece(directory: Path) -> None:
    """SpecDecError for a tokenizer that is only a SentencePiece file, if the package to read it is missing."""
    alone = (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").is_file()
    if alone and find_spec("sentencepiece") is None:
        raise SpecDecError(
            f"the tokenizer is a SentencePiece file alone, and the package that reads one is not installed: "
            f"{directory / 'tokenizer.model'}",
            hint="`pip install sentencepiece protobuf`; or save it with transformers elsewhere, and add its "
            "tokenizer.json",
        )


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face model, or a GGUF file's metadata as one; SpecDecError if there is no model."""
    if is_gguf(model_dir):
        return config_of(model_dir)
    if not model_dir.is_dir():
        raise SpecDecError(f"model directory does not exist: {model_dir}", hint="check the path")
    check_model_files(model_dir)
    check_not_an_adapter(model_dir)
    config = read_json(model_dir / "config.json")
    if "format_version" in config:
        is_engine = "build_config" in config
        raise SpecDecError(
            f"this is {'an engine' if is_engine else 'a checkpoint'}, not a Hugging Face model: {model_dir}",
            hint="it answers prompts as it is" if is_engine else "build it first",
            code="engine_for_model" if is_engine else "checkpoint_for_engine",
            path=model_dir,
        )
    return config


def check_is_model(model_dir: Path) -> None:
    """SpecDecError unless there is a `config.json` that names a `model_type`."""
    if "model_type" not in read_model_config(model_dir):
        raise SpecDecError(
            f"`{model_dir / 'config.json'}` names no `model_type`: this is no Hugging Face model",
            hint="check the path, or download or save the model again",
        )


def check_not_an_adapter(model_dir: Path) -> None:
    """SpecDecError for a directory with an adapter (PEFT) and no model."""
    if (model_dir / _ADAPTER).is_file() and not (model_dir / "config.json").is_file():
        base = read_json(model_dir / _ADAPTER).get("base_model_name_or_path")
        raise SpecDecError(
            f"this is an adapter and no model (PEFT), made for {base}: {model_dir}",
            hint="merge it into its model and save that: PEFT's `merge_and_unload` and `save_pretrained`",
        )


def warn_of_adapter(model_dir: Path) -> None:
    """Warn of an adapter beside the model: transformers would load it too, if PEFT is installed."""
    if (model_dir / _ADAPTER).is_file():
        warnings.warn(
            f"an adapter next to the model is ignored: {model_dir / _ADAPTER}; to have it answer, merge it "
            "into the model (PEFT's `merge_and_unload`)",
            SpecDecWarning,
            stacklevel=4,
        )
