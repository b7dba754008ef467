"""Checkpoint directories: `config.json`, `rank{N}.safetensors` and the tokenizer's files.

A checkpoint holds a Hugging Face model's tensors under their own names, cast to one dtype. They are copied one at a
time, so memory does not grow with the model.
"""

import json
import math
import shutil
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.checksums import CONFIG, config_digest, record_files
from runtime.compiler.model import parameter_shapes, parse_language_model, probe_config, renames_weights
from runtime.config import CheckpointConfig, Dtype, as_json
from runtime.errors import SpecDecError, SpecDecWarning
from runtime.files import check_output_is_not_input, new_directory, read_json, write_json
from runtime.models import read_model_config

# What a tokenizer or generation needs beside the weights.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FEW = 1e-4  # of a sound model's weights are so near zero that float16 has no other number for them

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor of the source model, what it is called there and in the checkpoint, and the dtype it was saved in."""

    name: str
    source_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def num_bytes(self, float_dtype: torch.dtype) -> int:
        return math.prod(self.shape) * self.written_dtype(float_dtype).itemsize

    def written_dtype(self, float_dtype: torch.dtype) -> torch.dtype:
        return float_dtype if self.dtype.is_floating_point else self.dtype


def convert(
    model_dir: Path, output_dir: Path, dtype: Dtype | None, *, replace: bool, progress: Progress
) -> CheckpointConfig:
    """Write the checkpoint of a Hugging Face model directory. `dtype` None keeps the one the model was saved in.

    Raises SpecDecError for a model that is unsupported, incomplete or damaged; then nothing is written.
    """
    pretrained_config = read_model_config(model_dir)
    check_output_is_not_input(output_dir, model_dir)
    where = str(model_dir / "config.json")
    pretrained, inside = parse_language_model(pretrained_config, where)
    probe_config(pretrained)
    entries, shapes = _read_entries(model_dir), parameter_shapes(pretrained)
    if inside is not None:
        entries = _language_model_entries(entries, model_dir)
        if not renames_weights(pretrained):
            _check_names(entries, shapes, model_dir)
    _check_shapes(entries, shapes, model_dir)
    dtype = dtype or _saved_dtype(entries)
    checkpoint = CheckpointConfig(pretrained_config=inside or pretrained_config, dtype=dtype)
    with new_directory(output_dir, replace=replace) as directory:
        _write_safetensors(directory / "rank0.safetensors", entries, getattr(torch, dtype), progress)
        copy_tokenizer_files(model_dir, directory)
        checkpoint = replace_fields(checkpoint, files=record_files(directory))
        checkpoint = replace_fields(checkpoint, config_digest=config_digest(as_json(checkpoint)))
        write_json(directory / CONFIG, as_json(checkpoint))
    return checkpoint


def copy_tokenizer_files(source: Path, destination: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def _read_entries(model_dir: Path) -> list[_TensorEntry]:
    """Every tensor of the model, shard by shard; SpecDecError if a shard or tensor is missing or damaged."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise SpecDecError(
                f"`{index}` has no `weight_map` from tensors to files", hint="download or save the model again"
            )
        files = [model_dir / name for name in sorted(set(names))]
    elif (model_dir / "model.safetensors").is_file():
        weight_map, files = None, [model_dir / "model.safetensors"]
    else:
        _refuse_pickle(model_dir)
        raise SpecDecError(
            f"file is missing: {model_dir / 'model.safetensors'}", hint="download or save the model again"
        )
    entries = [entry for file in files for entry in _read_header(file)]
    if weight_map:  # it says which one counts where two shards hold a tensor of the same name
        entries = [entry for entry in entries if weight_map.get(entry.name) == entry.file.name]
    missing = sorted(set(weight_map or {}) - {entry.name for entry in entries})
    if missing:
        raise SpecDecError(
            f"`{index}` names a tensor that no shard holds: {missing[0]}", hint="download or save the model again"
        )
    return entries


def _language_model_entries(entries: list[_TensorEntry], model_dir: Path) -> list[_TensorEntry]:
    """The weights of the language model inside, by the names that it has by itself."""
    prefixes = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
    prefix = next((one for one in prefixes if any(entry.name.startswith(one) for entry in entries)), None)
    if prefix is None:
        raise SpecDecError(
            f"no weights of a language model are in this model of several kinds of input: {model_dir}",
            hint=f"they should begin with {' or '.join(f'`{prefix}`' for prefix in prefixes)}",
        )
    renamed = []
    for entry in entries:
        if entry.name.startswith(prefix):
            renamed.append(replace_fields(entry, name=f"model.{entry.name.removeprefix(prefix)}"))
        elif entry.name.endswith("lm_head.weight"):
            renamed.append(replace_fields(entry, name="lm_head.weight"))
    return renamed


def _check_names(entries: list[_TensorEntry], shapes: dict[str, tuple[int, ...]], model_dir: Path) -> None:
    """SpecDecError where the language model inside has weights of other names than by itself. Its last layer may be
    its embeddings."""
    missing = sorted(set(shapes) - {entry.name for entry in entries} - {"lm_head.weight"})
    if missing:
        raise SpecDecError(
            f"the language model inside does not have the weights that it has by itself, such as `{missing[0]}`: "
            f"{model_dir}",
            hint="the model is incomplete, or of a family whose names specdec does not know",
        )


def _check_shapes(entries: list[_TensorEntry], shapes: dict[str, tuple[int, ...]], model_dir: Path) -> None:
    """SpecDecError for a tensor of another shape than the config makes it, or of integers where it makes numbers with
    a fraction. Names that transformers maps are passed."""
    for entry in entries:
        wanted = shapes.get(entry.name)
        if wanted is not None and not entry.dtype.is_floating_point:
            raise SpecDecError(
                f"`{entry.source_name}` is saved in {_name_of(entry.dtype)}, without a config that says what its "
                f"integers stand for: {model_dir}",
                hint="save the model in float32, float16 or bfloat16",
            )
        if wanted is not None and wanted != entry.shape:
            raise SpecDecError(
                f"config.json and weights are of two models, `{entry.source_name}` is {list(entry.shape)} and by "
                f"config.json {list(wanted)}: {model_dir}",
                hint="download or save the model again",
            )


def _refuse_pickle(model_dir: Path) -> None:
    pickled = sorted(model_dir.glob("*.bin")) + sorted(model_dir.glob("*.pt")) + sorted(model_dir.glob("*.pth"))
    if pickled:
        raise SpecDecError(
            f"weights are pickled, which can run code when opened: {pickled[0]}",
            hint="if you trust them, re-save as safetensors: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )


def _read_header(file: Path) -> list[_TensorEntry]:
    if not file.is_file():
        raise SpecDecError(f"file is missing: {file}", hint="download or save the model again")
    entries = []
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                tensor = tensors.get_slice(name)
                if tensor.get_dtype() not in _DTYPES:
                    raise SpecDecError(
                        f"`{file}` holds a tensor of a dtype that is not supported: {tensor.get_dtype()}",
                        hint="save the model in float32, float16 or bfloat16",
                    )
                entries.append(_TensorEntry(name, name, file, tuple(tensor.get_shape()), _DTYPES[tensor.get_dtype()]))
    except SafetensorError as error:
        raise SpecDecError(f"`{file}` is damaged: {error}", hint="download or save the model again") from None
    return entries


def _saved_dtype(entries: list[_TensorEntry]) -> Dtype:
    """The dtype most of the weights have."""
    num_elements: dict[Dtype, int] = {"float32": 0, "float16": 0, "bfloat16": 0}
    for entry in entries:
        for name in num_elements:
            if entry.dtype == getattr(torch, name):
                num_elements[name] += math.prod(entry.shape)
    return max(num_elements, key=lambda name: num_elements[name])


def _write_safetensors(path: Path, entries: list[_TensorEntry], float_dtype: torch.dtype, progress: Progress) -> None:
    """Write the tensors one by one: the format is a length (8 bytes, little endian), a JSON header, then the data."""
    header, offset = {}, 0
    for entry in entries:
        end = offset + entry.num_bytes(float_dtype)
        dtype = _NAMES[entry.written_dtype(float_dtype)]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of 8
    done, losses = 0, _Losses(float_dtype)
    with open(path, "wb") as output:
        output.write(struct.pack("<Q", len(encoded)) + encoded)
        for file in dict.fromkeys(entry.file for entry in entries):
            with safe_open(file, framework="pt") as tensors:
                for entry in entries:
                    if entry.file == file:
                        tensor = tensors.get_tensor(entry.source_name)
                        written = tensor.to(entry.written_dtype(float_dtype))
                        losses.check(tensor, written, entry)
                        output.write(_bytes_of(written))
                        done += entry.num_bytes(float_dtype)
                        progress(done, offset)
    for message in losses.messages():
        warnings.warn(message, SpecDecWarning, stacklevel=2)


class _Losses:
    """Counts the weights that a dtype is too small for, at either end of its range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = _name_of(dtype)
        self._num_weights = 0
        self._infinite: dict[str, int] = {}
        self._zero: dict[str, int] = {}

    def check(self, saved: Tensor, written: Tensor, entry: _TensorEntry) -> None:
        """Count those of one tensor. SpecDecError for weights that are no numbers as they were saved."""
        if not saved.dtype.is_floating_point:
            return
        self._num_weights += saved.numel()
        if not bool(written.isfinite().all()):
            num_bad = int((~saved.isfinite()).sum())
            if num_bad:
                raise SpecDecError(
                    f"{num_bad / saved.numel():.2%} of `{entry.source_name}` are NaN or infinite: {entry.file}",
                    hint="the model is damaged; download it again, or train it again",
                )
            self._infinite[entry.name] = int((~written.isfinite()).sum())
        if saved.dtype != written.dtype:
            num_zero = int(saved.count_nonzero() - written.count_nonzero())
            if num_zero:
                self._zero[entry.name] = num_zero

    def messages(self) -> list[str]:
        """What to warn of: weights that became infinite, and zeros where they are more than a few."""
        said = []
        num_infinite, num_zero = sum(self._infinite.values()), sum(self._zero.values())
        if num_infinite:
            said.append(
                f"weights too large for {self._dtype} became infinite: {num_infinite:,}, such as in "
                f"`{next(iter(self._infinite))}`; bfloat16 holds them"
            )
        if num_zero > self._num_weights * _FEW:
            said.append(
                f"weights too small for {self._dtype} became zero: {num_zero:,} ({num_zero / self._num_weights:.2%}), "
                f"such as in `{max(self._zero, key=lambda name: self._zero[name])}`; bfloat16 holds them"
            )
        return said


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> memoryview:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return array.data
