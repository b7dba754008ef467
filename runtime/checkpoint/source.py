"""A model's tensors in its files: found by reading headers alone, and loaded one by one.

Files are read, not mapped: a file that is cut off or overwritten meanwhile gives an error, and does not kill the
process.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.resolve import DOWNLOAD_AGAIN, INDEX, WEIGHTS, damage_told, shards_of
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import Stamp, check_regular, stamp_of
from runtime.util.tensor_file import read_header

DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
# Numbers that transformers computes, and once saved: masks of GPT-2 and GPT-NeoX, rotary frequencies.
_COMPUTED = (".masked_bias", ".rotary_emb.inv_freq")
_MASKS = (".attn.bias", ".attention.bias")
_WRAPPERS = {
    "_orig_mod.": "torch.compile leaves it: save `model._orig_mod`",
    "base_model.model.": "PEFT leaves it: save `model.merge_and_unload()`",
    "module.": "DistributedDataParallel leaves it: save `model.module`",
}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the model: `name` in the checkpoint, `source_name` in the file; shape and dtype when loaded."""

    name: str
    source_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Offset in bytes from the file's beginning."""
    stamp: Stamp
    """The file's time and size when its header was read."""
    rows: tuple[int, ...] | None = None
    """Position of each row in the file, if their order differs there."""
    shift: float = 0.0
    """Number added to each number in the file."""
    made_of: "tuple[SourceTensor, ...]" = ()
    """Tensors in the file from which `make` computes this tensor."""
    make: Callable[..., Tensor] | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """True for floating-point numbers that need no scale; 8-bit numbers need a scale."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def is_as_in_file(self) -> bool:
        """True if the tensor in the file has the same name and the same bytes."""
        return self.name == self.source_name and self.make is None and self.rows is None and not self.shift

    def without_values(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def load_tensors(tensors: Seq[SourceTensor]) -> list[Tensor]:
    """The tensors' values; SpecDecError if a file has changed since its header was read."""
    return [_load(tensor) for tensor in tensors]


def _load(tensor: SourceTensor) -> Tensor:
    if tensor.make is not None:
        return tensor.make(*load_tensors(tensor.made_of))
    values = torch.empty(tensor.num_elements * tensor.dtype.itemsize, dtype=torch.uint8)
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            is_whole = file.readinto(values.numpy().data) == values.numel()
            is_same = is_whole and not tensor.stamp.is_written_over(os.fstat(file.fileno()))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise written_over(tensor.file)
    values = values.view(tensor.dtype).view(tensor.shape)
    if tensor.shift:
        values = (values.float() + tensor.shift).to(tensor.dtype)
    return values if tensor.rows is None else values[list(tensor.rows)]


def of_two_models(name: str, shape: Seq[int], wanted: Seq[int], model: Path) -> SpecDecError:
    """The error for a tensor whose shape contradicts the config, or the metadata of a GGUF file."""
    said = "the file's metadata" if model.is_file() else "config.json"
    return SpecDecError(
        f"{said} and weights belong to two models, `{name}` is {list(shape)} and should be {list(wanted)} by {said}: "
        f"{model}",
        hint=DOWNLOAD_AGAIN,
    )


def written_over(path: Path) -> SpecDecError:
    return SpecDecError(
        f"a file of the model was written over while it was read: {path}", hint="start again when it is written"
    )


def read_tensors(model_dir: Path) -> list[SourceTensor]:
    """Every tensor of the model, shard by shard; SpecDecError if a shard or tensor is missing or damaged.

    If there is both a single file and an index, the single file is read, as by transformers.
    """
    index, single = model_dir / INDEX, model_dir / WEIGHTS
    if single.is_file():
        if index.is_file():
            warnings.warn(
                f"`{index.name}` and its shards are left out, as transformers does: the weights are those of {single}",
                SpecDecWarning,
                stacklevel=3,
            )
        return read_file_header(single)
    if index.is_file():
        return _read_shards(model_dir)
    shards = sorted(model_dir.glob("*-of-*.safetensors"))
    if shards:
        raise SpecDecError(
            f"the weights are in shards ({shards[0].name}), and their index is missing: {index}", hint=DOWNLOAD_AGAIN
        )
    _refuse_pickle(model_dir)
    raise SpecDecError(f"file is missing: {single}", hint=DOWNLOAD_AGAIN)


def _read_shards(model_dir: Path) -> list[SourceTensor]:
    files = shards_of(model_dir)
    entries = [entry for file in sorted(set(files.values())) for entry in read_file_header(file)]
    # If two shards hold a tensor of the same name, the index says which of the two counts.
    entries = [entry for entry in entries if files.get(entry.name) == entry.file]
    missing = sorted(set(files) - {entry.name for entry in entries})
    if missing:
        raise SpecDecError(
            f"`{model_dir / INDEX}` names a tensor that no shard holds: {missing[0]}", hint=DOWNLOAD_AGAIN
        )
    return entries


def _refuse_pickle(model_dir: Path) -> None:
    pickled = sorted(model_dir.glob("*.bin")) + sorted(model_dir.glob("*.pt")) + sorted(model_dir.glob("*.pth"))
    if pickled:
        raise SpecDecError(
            f"weights are pickled, which can run code when opened: {pickled[0]}",
            hint="if you trust them, re-save as safetensors: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )


def read_file_header(file: Path) -> list[SourceTensor]:
    """The tensors in a safetensors file; SpecDecError if it is missing or damaged, or has an unsupported dtype."""
    check_regular(file)
    if not file.is_file():
        raise SpecDecError(f"file is missing: {file}", hint=DOWNLOAD_AGAIN)
    with file.open("rb") as opened, damage_told(file):
        stamp, tensors = stamp_of(os.fstat(opened.fileno())), read_header(opened).tensors
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise SpecDecError(
                f"`{file}` holds a tensor of a dtype that is not supported: {tensor.dtype}",
                hint="save the model in float32, float16 or bfloat16",
            )
    return [
        SourceTensor(name, name, file, tensor.shape, DTYPES[tensor.dtype], tensor.start, stamp)
        for name, tensor in sorted(tensors.items())
    ]


def check_not_wrapped(names: Iterable[str], model_dir: Path) -> None:
    """SpecDecError if the weights' names have the prefix of a wrapper from training, such as `module.`."""
    first = next(iter(names), "")
    for prefix, hint in _WRAPPERS.items():
        if first.startswith(prefix):
            raise SpecDecError(
                f"the names of the weights begin with `{prefix}`, which no model's do: {model_dir}",
                hint=f"{hint}, or save the weights again without it",
            )


def check_head(names: Iterable[str], config: Mapping[str, Any], head: str | None, *, is_tied: bool) -> None:
    """SpecDecError for a model whose output layer has no weight; transformers would fill it with random numbers."""
    if head is not None and not is_tied and not any(name.startswith(f"{head}.") for name in names):
        raise SpecDecError(
            f"the model has no weight for its last layer, `{head}`, and its config says that the embeddings do not "
            f"stand for it: {config['model_type']}",
            hint="if they do, write `tie_word_embeddings: true` into config.json; else download or save the model "
            "again",
        )


def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """True for a tensor of the file that is not a weight: transformers computes it from the config."""
    return name.endswith(_COMPUTED) or (name.endswith(_MASKS) and len(shape) == 4)


def predicts_further(name: str, config: Mapping[str, Any]) -> bool:
    """True for a weight of MTP layers, which predict tokens after the next token. The model's class has no such layers.

    DeepSeek V3 and GLM number these layers on from the model's own, other families name them `mtp`.
    """
    parts = name.split(".")
    if any(part == "mtp" or part.startswith("mtp_") for part in parts[:3]):
        return True
    num_layers, num_further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(num_layers, int) or not isinstance(num_further, int) or parts[:2] != ["model", "layers"]:
        return False
    return len(parts) > 2 and parts[2].isdigit() and num_layers <= int(parts[2]) < num_layers + num_further
