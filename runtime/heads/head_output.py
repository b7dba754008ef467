"""Quantized output layer of a trained head: made once, when an engine is built for the head, and kept beside the step.

It is of the weights that the head had then, and no other head is given it.
"""

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from runtime.bundle import HEAD_OUTPUT, TARGET_OUTPUT
from runtime.cache import digest, file_digest
from runtime.compiler.quantized_copy import quantized
from runtime.compiler.weights import read_weights, save_weights
from runtime.config import IntFormat, SelfDraft
from runtime.errors import SpecDecError
from runtime.heads.head_config import HeadConfig
from runtime.heads.head_model import output_tensor
from runtime.quantization.planning import load_numbers
from runtime.quantization.weight import QuantizedWeight, take_quantized
from runtime.source import SourceTensor


def write_output(config: HeadConfig, qformat: IntFormat, ids: Tensor | None, engine_dir: Path) -> None:
    """Quantize the head's output layer, (n,) `ids` of it where these are given, into an engine's directory."""
    entry = output_tensor(config)
    (weight,) = load_numbers([entry])
    rows = weight if ids is None or not config.drafts_all_ids else weight[ids]
    made = quantized(entry.name, rows, SelfDraft(qformat))
    save_weights(engine_dir / HEAD_OUTPUT, {f"{_name(entry)}.{part}": one for part, one in made.tensors().items()})


def write_target_output(weight: Tensor, engine_dir: Path) -> None:
    """Keep the target's (vocab, hidden) output layer for a head that has none: in a compiled step it is packed."""
    save_weights(engine_dir / TARGET_OUTPUT, {"weight": weight.contiguous()})


def read_target_output(engine_dir: Path) -> Tensor | None:
    """Read the output of `write_target_output`; None where there is none."""
    path = engine_dir / TARGET_OUTPUT
    return read_weights(path)["weight"] if path.is_file() else None


def read_output(config: HeadConfig, engine_dir: Path) -> QuantizedWeight:
    """Read the output of `write_output`; SpecDecError if it is of another head, or damaged."""
    path = engine_dir / HEAD_OUTPUT
    try:
        found = take_quantized(read_weights(path))
    except SafetensorError as error:
        raise SpecDecError(f"`{path}` is damaged: {error}", hint="build it again", code="engine") from error
    weight = found.get(_name(output_tensor(config)))
    if weight is None:
        raise SpecDecError(
            f"the engine has the quantized output layer of another head: {config.directory}",
            hint="build the engine for this head",
            code="no_hidden_states",
            head=config.directory,
        )
    return weight


def _name(entry: SourceTensor) -> str:
    return digest([entry.name, file_digest(entry.file)])
