"""Checkpoint directories as `build` finds them; `runtime.checkpoint` writes them. Imports no torch."""

from pathlib import Path

from runtime.config import CheckpointConfig, Mapping, parse
from runtime.errors import SpecDecError
from runtime.files import read_json


def open_checkpoint(checkpoint_dir: Path) -> CheckpointConfig:
    """Parse and check a checkpoint directory; SpecDecError names what is missing or wrong."""
    if not checkpoint_dir.is_dir():
        raise SpecDecError(
            f"checkpoint directory does not exist: {checkpoint_dir}",
            hint="convert a model",
            fact="no_checkpoint",
        )
    data = read_json(checkpoint_dir / "config.json")
    if "build_config" in data:
        raise SpecDecError(
            f"this is an engine directory, not a checkpoint: {checkpoint_dir}",
            hint="give the directory of a converted model",
            fact="engine_for_checkpoint",
        )
    if "model_type" in data:
        raise SpecDecError(
            f"this is a Hugging Face model, not a checkpoint: {checkpoint_dir}",
            hint="convert it first",
            fact="model_for_checkpoint",
            model_dir=checkpoint_dir,
        )
    config = parse(CheckpointConfig, data, str(checkpoint_dir / "config.json"))
    if config.mapping != Mapping():
        raise SpecDecError(
            f"the checkpoint is split over devices, which this version does not read: {checkpoint_dir}",
            hint="convert the model again",
            fact="checkpoint",
        )
    if not (checkpoint_dir / "rank0.safetensors").is_file():
        raise SpecDecError(
            f"file is missing: {checkpoint_dir / 'rank0.safetensors'}",
            hint="convert the model again",
            fact="checkpoint",
        )
    return config
