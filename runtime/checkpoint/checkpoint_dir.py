"""Checkpoint directories as `build` finds them; `runtime.builder.convert` writes them. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.bundle import weights_files
from runtime.checkpoint.checksums import (
    CONFIG,
    Artefact,
    check_config,
    check_contents,
    check_mapping,
    check_recorded,
    check_sizes,
)
from runtime.checkpoint.config import CheckpointConfig, SelfDraft, parse
from runtime.util.errors import SpecDecError
from runtime.util.files import check_model_files, read_json, read_json_and_text, recover_directory

CHECKPOINT = Artefact("the model was converted", "convert the model again", code="checkpoint")


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files were checked, or were written by this process and need no check."""

    directory: Path
    config: CheckpointConfig
    unread: Path | None = None
    """The model's own file, if it serves as the checkpoint's weights and was not yet checked for NaN and infinity."""


def is_checkpoint_dir(directory: Path) -> bool:
    """True if the directory's config.json says that it is a checkpoint's, whatever else may be wrong with it."""
    try:
        config = read_json(directory / CONFIG) if directory.is_dir() else {}
        return "format_version" in config and "build_config" not in config
    except SpecDecError:
        return False


def open_checkpoint(checkpoint_dir: Path) -> CheckpointConfig:
    """Parse and check a checkpoint directory; SpecDecError names the file or key that is missing or wrong.

    A file that has not changed since the last check is not read.
    """
    recover_directory(checkpoint_dir)
    if not checkpoint_dir.is_dir():
        raise SpecDecError(
            f"checkpoint directory does not exist: {checkpoint_dir}",
            hint="convert a model",
            code="no_checkpoint",
        )
    check_model_files(checkpoint_dir)
    data, text = read_json_and_text(checkpoint_dir / CONFIG)
    config = parse_checkpoint_config(data, checkpoint_dir)
    check_config(checkpoint_dir / CONFIG, text, CHECKPOINT)
    check_sizes(checkpoint_dir, config.files, CHECKPOINT)
    check_contents(checkpoint_dir, config.files, CHECKPOINT)
    return config


def parse_checkpoint_config(data: dict[str, Any], checkpoint_dir: Path) -> CheckpointConfig:
    """Parse the `config.json` of a checkpoint directory; SpecDecError if it is invalid."""
    if "build_config" in data:
        raise SpecDecError(
            f"this is an engine directory, not a checkpoint: {checkpoint_dir}",
            hint="give the directory of a converted model",
            code="engine_for_checkpoint",
        )
    if "model_type" in data:
        raise SpecDecError(
            f"this is a Hugging Face model, not a checkpoint: {checkpoint_dir}",
            hint="convert it first",
            code="model_for_checkpoint",
            model_dir=checkpoint_dir,
        )
    config = parse(CheckpointConfig, data, str(checkpoint_dir / CONFIG))
    check_mapping(config.mapping, checkpoint_dir, CHECKPOINT)
    check_recorded(weights_files(config.mapping), config.files, checkpoint_dir, CHECKPOINT)
    return config


def check_self_draft(checkpoint: CheckpointConfig, self_draft: SelfDraft | None) -> None:
    """SpecDecError for a self-draft copy of a split model, or with as many bits as the checkpoint's weights or more."""
    if self_draft is None:
        return
    check_not_split(checkpoint.mapping.tp_size)
    quantization = checkpoint.quantization
    if quantization is None or quantization.bits is None or quantization.quant_algo == "MIXED_PRECISION":
        return
    if int(quantization.bits) <= int(self_draft.qformat.removeprefix("int")):
        raise SpecDecError(
            f"the checkpoint's weights are in {quantization.bits} bits already ({quantization.quant_algo}), so a copy "
            f"in {self_draft.qformat} would draft no faster than the model",
            hint="leave `self_draft` out, or convert the model to a format with more bits by `quantization`",
            code="self_draft_bits",
        )


def check_hidden_states(checkpoint: CheckpointConfig, hidden_states: tuple[int, ...]) -> None:
    """SpecDecError if hidden states are asked for from a split model."""
    if hidden_states:
        check_has_no_head(checkpoint.mapping.tp_size)


def check_has_no_head(tp_size: int) -> None:
    """SpecDecError if a trained drafter is to draft for a model that is split over devices."""
    if tp_size > 1:
        raise SpecDecError(
            f"a model that is split over devices has no trained drafter: tp_size {tp_size}",
            hint="build it without a head, or convert the model for one device",
        )


def check_not_split(tp_size: int) -> None:
    """SpecDecError if a model that is split over devices is to draft for itself."""
    if tp_size > 1:
        raise SpecDecError(
            f"a model that is split over devices has no copy that drafts: tp_size {tp_size}",
            hint="build it without a copy, or convert the model for one device",
            code="self_draft_split",
        )
