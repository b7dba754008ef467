"""Quantized layers of a trained head: made once, when an engine is built for the head, and kept beside the step under
names that tell the head; another head is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from runtime.checkpoint.bundle import HEAD_OUTPUT, TARGET_OUTPUT
from runtime.checkpoint.config import DraftOutput, IntFormat, SelfDraft
from runtime.checkpoint.quant.planning import load_numbers
from runtime.checkpoint.quant.weight import QuantizedWeight, take_quantized
from runtime.checkpoint.source import SourceTensor, read_tensors
from runtime.compiler.quantized_copy import quantized
from runtime.drafters.heads.head_config import HeadConfig
from runtime.drafters.heads.head_model import Head, output_tensor, quantizable_layers
from runtime.model.weights import read_weights, save_weights
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError

_LEAST_GROUP = 16
"""Least number of inputs in a group; other layers have one group for each output."""


@dataclass(frozen=True)
class QuantizedLayers:
    """A head's quantized layers: the output layer, and the others by their names."""

    output: QuantizedWeight | None = None
    others: dict[str, QuantizedWeight] = field(default_factory=dict)


def write_quantized(
    config: HeadConfig, wanted: DraftOutput, ids: Tensor | None, load: Callable[[], Head], engine_dir: Path
) -> None:
    """Quantize the `wanted` layers of a head into an engine's directory: its output layer (rows `ids` [n], if given),
    and the linear layers of the head that `load` returns.
    """
    made = dict[str, QuantizedWeight]()
    if wanted.qformat is not None:
        entry = output_tensor(config)
        (weight,) = load_numbers([entry])
        rows = weight if ids is None or not config.drafts_all_ids else weight[ids]
        made[_name(entry)] = quantized(entry.name, rows, _precision(wanted.qformat, rows.shape[1]))
    if wanted.layers is not None:
        prefix = _prefix(config)
        for name, layer in quantizable_layers(load()).items():
            own = _precision(wanted.layers, layer.in_features)
            made[f"{prefix}{name}"] = quantized(name, layer.weight.detach(), own)
    tensors = {f"{name}.{part}": one for name, weight in made.items() for part, one in weight.tensors().items()}
    save_weights(engine_dir / HEAD_OUTPUT, tensors)


def _precision(qformat: IntFormat, num_inputs: int) -> SelfDraft:
    return SelfDraft(qformat, None) if num_inputs % _LEAST_GROUP else SelfDraft(qformat)


def write_target_output(weight: Tensor, engine_dir: Path) -> None:
    """Write the target's output layer [vocab, hidden] for a head without one: the compiled step has it packed only."""
    save_weights(engine_dir / TARGET_OUTPUT, {"weight": weight.contiguous()})


def read_target_output(engine_dir: Path) -> Tensor | None:
    """The target's output layer, as `write_target_output` wrote it; None if it wrote none."""
    path = engine_dir / TARGET_OUTPUT
    return read_weights(path)["weight"] if path.is_file() else None


def read_quantized(config: HeadConfig, wanted: DraftOutput, engine_dir: Path) -> QuantizedLayers:
    """The `wanted` layers from the files of `write_quantized`; SpecDecError if the files are damaged or were made from
    another head.
    """
    path = engine_dir / HEAD_OUTPUT
    try:
        found = take_quantized(read_weights(path))
    except SafetensorError as error:
        raise SpecDecError(f"`{path}` is damaged: {error}", hint="build it again", code="engine") from error
    output = None if wanted.qformat is None else found.get(_name(output_tensor(config)))
    prefix = "" if wanted.layers is None else _prefix(config)
    layers = {name.removeprefix(prefix): one for name, one in found.items() if prefix and name.startswith(prefix)}
    if (output is None) != (wanted.qformat is None) or (not layers) != (wanted.layers is None):
        raise SpecDecError(
            f"the engine has the quantized layers of another head: {config.directory}",
            hint="build the engine for this head",
            code="layers_of_another_head",
            head=config.directory,
        )
    return QuantizedLayers(output, layers)


def _name(entry: SourceTensor) -> str:
    return digest([entry.name, file_digest(entry.file)])


def _prefix(config: HeadConfig) -> str:
    """Prefix of the names of a head's layers: a digest of its files."""
    files = {one.file for one in read_tensors(config.directory)}
    return f"{digest([file_digest(file) for file in sorted(files)])}."
