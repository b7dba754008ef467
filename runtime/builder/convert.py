"""Checkpoint directories: `config.json`, `rank{N}.safetensors` and the tokenizer's files.

A checkpoint holds a Hugging Face model's tensors under their own names, cast to one dtype, except for tensors that
transformers keeps in float32. They are copied one at a time, so memory does not grow with the model.
"""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from runtime.checkpoint.bundle import weights_files
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint
from runtime.checkpoint.checksums import record_files, write_config
from runtime.checkpoint.config import CheckpointConfig, Dtype, Mapping, QuantConfig
from runtime.checkpoint.generation_config import GENERATION_CONFIG, check_generation_config
from runtime.checkpoint.gguf.blocks import ExpertBlocks
from runtime.checkpoint.gguf.config import generation_config_of
from runtime.checkpoint.gguf.reader import has_tokenizer, is_gguf
from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer
from runtime.checkpoint.quant.mxfp4 import codes_of, is_in_codes
from runtime.checkpoint.quant.planning import Losses, PrequantizedLayer, Source, plan_pieces, quantize_experts
from runtime.checkpoint.resolve import WEIGHTS
from runtime.checkpoint.source import SourceTensor, load_tensors, read_file_header
from runtime.checkpoint.tekken import is_tekken_alone
from runtime.checkpoint.tensor_writer import Piece, Progress, write_pieces, write_shares
from runtime.checkpoint.tokenizer import TEMPLATE_DIR, TOKENIZER_FILES, template_files
from runtime.core.params import MODEL_DEFAULTS
from runtime.kernels.ops import load_compiled_kernels
from runtime.model.attention import PROBE
from runtime.model.model import (
    ModelKind,
    check_weights,
    dtypes_of_weights,
    expert_layers,
    fuse_expert_layers,
    fuse_experts,
    has_experts,
    loaded_otherwise,
    own_names,
    renames_weights,
    split_config,
)
from runtime.model.pretrained import layers_that_keep, parse_pretrained_config
from runtime.model.read_model import open_source
from runtime.model.tp_layers import Splitting
from runtime.text.text import load_tokenizer
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import check_output_is_not_input, new_directory, read_json, write_json
from runtime.util.tensor_file import read_header

_SIDE_FILES = (*TOKENIZER_FILES, "chat_template.jinja", GENERATION_CONFIG)
"""Files that a tokenizer or generation needs beside the weights."""
_AS_IT_IS = QuantConfig()
_MOST_COMPARED = 1 << 21  # numbers of a weight: a router of DeepSeek V3 has 1.8 M


@dataclass(frozen=True)
class Conversion:
    """A checkpoint before it is written."""

    model_dir: Path
    config: CheckpointConfig
    """Configuration of the checkpoint, without the record of files."""
    pieces: list[Piece]
    splitting: Splitting | None
    losses: Losses

    def write(self, directory: Path, progress: Progress) -> None:
        """Write weights and tokenizer, but not the configuration; warn of weights that the dtype cannot hold."""
        if self.config.quantization is not None and self.config.quantization.source == "rounded":
            load_compiled_kernels()  # they quantize in a tenth of torch's time
        paths = [directory / name for name in weights_files(self.config.mapping)]
        if self.splitting is None:
            write_pieces(paths[0], self.pieces, progress)
        else:
            shares = {path: partial(self.splitting.piece, rank=rank) for rank, path in enumerate(paths)}
            write_shares(shares, self.pieces, progress)
        _keep_tokenizer(self.model_dir, directory)

    def check(self, directory: Path) -> None:
        """SpecDecError if transformers finds no weight under one of its names in the written files, or if a weight
        differs (`compare_with_model`). Names that transformers does not change were checked before.
        """
        pretrained = parse_pretrained_config(self.config.pretrained_config, str(self.model_dir))
        if self.splitting is None and renames_weights(pretrained):
            dtype = getattr(torch, self.config.dtype)
            kind = ModelKind(pretrained, dtype, PROBE, self.config.quantization)
            check_weights(kind, directory / weights_files(self.config.mapping)[0], str(self.model_dir))
        self.compare_with_model(directory)

    def compare_with_model(self, directory: Path) -> None:
        """SpecDecError if transformers reads other weights from the written files than from the model's own. Compares
        all weights that are neither quantized nor large, such as norms, biases and routers.
        """
        entries = [read_file_header(directory / name) for name in weights_files(self.config.mapping)]
        ranks = [{one.name: one for one in entry} for entry in entries]
        small = [
            source
            for piece in self.pieces
            for source in piece.sources[:1]
            if [*piece.forms] == [source.name] and source.is_float and source.num_elements <= _MOST_COMPARED
        ]
        if not small:
            return
        theirs = {source.name: load_tensors([source])[0] for source in small}
        ours = {}
        for name in theirs:
            parts = load_tensors([rank[name] for rank in ranks])
            ours[name] = parts[0] if self.splitting is None else self.splitting.join(name, parts)
        pretrained = parse_pretrained_config(self.config.pretrained_config, str(self.model_dir))
        if (other := loaded_otherwise(pretrained, getattr(torch, self.config.dtype), ours, theirs)) is not None:
            raise SpecDecError(
                f"`{other}` would differ from what transformers loads from the model: {self.model_dir}",
                hint="the model is not converted correctly and no checkpoint was written; please report it",
            )

    def has_weights_of(self, file: Path) -> bool:
        """True if the model's file equals the file that would be written: the same tensors, and no others."""
        if self.splitting is not None or any(len(piece.sources) != 1 for piece in self.pieces):
            return False
        sources = [piece.sources[0] for piece in self.pieces]
        if not all(one.file == file and one.is_as_in_file for one in sources):
            return False
        forms = [{one.name: (one.dtype, one.shape)} for one in sources]
        with file.open("rb") as opened:
            names = read_header(opened).tensors.keys()
        return forms == [piece.forms for piece in self.pieces] and names == {one.name for one in sources}

    def link(self, directory: Path, file: Path) -> None:
        """Link the model's own file in place of the file that would be written."""
        (directory / weights_files(self.config.mapping)[0]).symlink_to(file.resolve())
        _keep_tokenizer(self.model_dir, directory)

    def warn_of_losses(self) -> None:
        for message in self.losses.messages():
            warnings.warn(message, SpecDecWarning, stacklevel=3)


def convert(
    model_dir: Path,
    output_dir: Path,
    dtype: Dtype | None,
    *,
    replace: bool,
    progress: Progress,
    precision: QuantConfig = _AS_IT_IS,
    tp_size: int = 1,
) -> CheckpointConfig:
    """Write the checkpoint of a Hugging Face model directory or a GGUF file, split over `tp_size` ranks. `dtype` None
    keeps the dtype that most weights were saved in.

    Raises SpecDecError for a model that is unsupported, incomplete or damaged; then nothing is written.
    """
    check_output_is_not_input(output_dir, model_dir)
    conversion = plan_conversion(model_dir, dtype, precision, tp_size)
    with new_directory(output_dir, replace=replace) as directory:
        conversion.write(directory, progress)
        conversion.check(directory)
        checkpoint = write_config(directory, replace_fields(conversion.config, files=record_files(directory)))
    conversion.warn_of_losses()
    return checkpoint


def convert_for_build(conversion: Conversion, directory: Path, *, may_link: bool) -> OpenedCheckpoint:
    """Write the files that a build in this process reads of a model's checkpoint into an empty directory.

    Nothing opens the files later, so they are neither recorded, which would read them again, nor flushed to disk. With
    `may_link`, a file of weights that needs no conversion is linked instead of copied: the build notices if weights are
    overwritten meanwhile, or NaN.
    """
    weights = conversion.model_dir / WEIGHTS
    if may_link and weights.is_file() and conversion.has_weights_of(weights):
        conversion.link(directory, weights)
        return OpenedCheckpoint(directory, conversion.config, unread=weights)
    conversion.write(directory, lambda done, total: None)
    conversion.compare_with_model(directory)
    conversion.warn_of_losses()
    return OpenedCheckpoint(directory, conversion.config)


def plan_conversion(model_dir: Path, dtype: Dtype | None, precision: QuantConfig, tp_size: int = 1) -> Conversion:
    """Plan the conversion; SpecDecError if headers show that the model is unsupported, incomplete or damaged."""
    source = open_source(model_dir)
    if not is_gguf(model_dir):
        check_side_files(model_dir)
    pretrained = parse_pretrained_config(source.config, source.name)
    if tp_size > 1 or precision.qformat is not None or has_experts(pretrained):
        source = _with_own_names(source, pretrained)
    _refuse_quantizing_again(source, precision)
    if precision.kv_cache is not None and not layers_that_keep(pretrained)[0]:
        raise SpecDecError(
            f"no layer of {pretrained.model_type} has keys and values to be quantized to {precision.kv_cache}",
            hint="leave the dtype of keys and values as it is",
        )
    dtype = dtype or saved_dtype(source)
    if precision.qformat is None:
        kept = _with_experts_in_few_bits(source, pretrained)
        if tp_size > 1 and kept.experts:
            warnings.warn("experts that are split are dequantized", SpecDecWarning, stacklevel=3)
        source = kept if tp_size == 1 else source
    losses = Losses(getattr(torch, dtype))
    pieces, quantization = plan_pieces(source, dtypes_of_weights(pretrained, getattr(torch, dtype)), precision, losses)
    mapping = Mapping(tp_size, tp_size)
    checkpoint = CheckpointConfig(source.config, dtype, quantization, mapping)
    pieces = fuse_experts(pretrained, pieces)  # otherwise a build would have the experts twice in memory
    if precision.qformat is not None and (experts := expert_layers(pretrained)):
        if tp_size == 1:
            pieces = quantize_experts(pieces, experts, precision)
        else:
            warnings.warn("experts that are split stay as they are: not quantized", SpecDecWarning, stacklevel=3)
    return Conversion(model_dir, checkpoint, pieces, _split_up(source, pretrained, pieces, tp_size), losses)


def _with_experts_in_few_bits(source: Source, pretrained: PreTrainedConfig) -> Source:
    """The source, with tensors of experts as layers if the kernels can compute with their stored form."""
    wanted = expert_layers(pretrained)
    stored = {
        tensor.name: layer
        for tensor in source.tensors
        if tensor.name in wanted and (layer := _layer_of_experts(tensor)) is not None
    }
    tensors = [tensor for tensor in source.tensors if tensor.name not in stored]
    fused, others = fuse_expert_layers(pretrained, source.layers)
    experts = stored | fused
    return replace_fields(source, tensors=tensors, layers=others | experts, experts=frozenset(experts))


def _layer_of_experts(tensor: SourceTensor) -> PrequantizedLayer | None:
    """The experts as a layer, if the kernels can compute with their stored form; None otherwise."""
    if is_in_codes(tensor):
        blocks, scales = tensor.made_of
        parts = {"blocks": blocks, "scales": scales}
        return PrequantizedLayer(parts, lambda parts: codes_of(**parts), "W4A16_MXFP4")
    if isinstance(tensor.make, ExpertBlocks) and tensor.make.can_be_kept:
        parts = {str(i): part for i, part in enumerate(tensor.made_of)}
        return PrequantizedLayer(parts, tensor.make.read, "MIXED_PRECISION")
    return None


def _with_own_names(source: Source, pretrained: PreTrainedConfig) -> Source:
    """The weights under the model's own names, which the plan uses. Some files have other names (GPT-NeoX)."""
    names = own_names(pretrained, [tensor.name for tensor in source.tensors])
    tensors = [replace_fields(one, name=name) for one, name in zip(source.tensors, names, strict=True)]
    of_layers = own_names(pretrained, [f"{name}.weight" for name in source.layers])
    layers = {name.removesuffix(".weight"): one for name, one in zip(of_layers, source.layers.values(), strict=True)}
    return replace_fields(source, tensors=tensors, layers=layers)


def _split_up(source: Source, pretrained: PreTrainedConfig, pieces: list[Piece], tp_size: int) -> Splitting | None:
    """The plan that splits the weights over ranks, None for a single rank. SpecDecError if a layer of the plan has no
    weight. Warns of weights that each rank has whole.
    """
    splitting = split_config(pretrained, tp_size)
    if splitting is None:
        return None
    found = {name.rpartition(".")[0] for piece in pieces for name in piece.forms}
    shared = {source.head} if pretrained.tie_word_embeddings else set()  # with the embeddings
    missing = sorted(set(splitting.layers) - found - shared)
    if missing:
        raise SpecDecError(
            f"a layer to be split over devices has no weight under its name, `{missing[0]}`: {source.name} "
            f"({pretrained.model_type})",
            hint="load the model with transformers and save it again, or run it on one device",
        )
    if splitting.whole:
        warnings.warn(
            f"each of {tp_size} devices has these weights whole, as they cannot be split: {', '.join(splitting.whole)}",
            SpecDecWarning,
            stacklevel=3,
        )
    return splitting


def _refuse_quantizing_again(source: Source, precision: QuantConfig) -> None:
    if precision.qformat is not None and source.layers:
        raise SpecDecError(
            f"the model is already quantized ({source.format}) and cannot be quantized again to {precision.qformat}: "
            f"{source.name}",
            hint="leave `quantization` out, or give the unquantized model",
            code="quantized_already",
        )


def _keep_tokenizer(model_dir: Path, directory: Path) -> None:
    if not is_gguf(model_dir):
        copy_side_files(model_dir, directory)
        if is_tekken_alone(model_dir):
            keep_converted(lambda: load_tokenizer(model_dir, None), directory)
        return
    if sampling := generation_config_of(model_dir):
        write_json(directory / GENERATION_CONFIG, sampling)
        check_generation_config(directory, MODEL_DEFAULTS)
    if not has_tokenizer(model_dir):
        warnings.warn(f"the file has no tokenizer: {model_dir}", SpecDecWarning, stacklevel=3)
        return
    keep_converted(lambda: make_gguf_tokenizer(model_dir), directory)


def keep_converted(make: Callable[[], Any], directory: Path) -> None:
    """Save a converted tokenizer; if it cannot be converted, warn: prompts of token ids need none."""
    try:
        make().save_pretrained(directory)
    except SpecDecError as error:
        warnings.warn(f"{error}; {error.hint}", SpecDecWarning, stacklevel=4)


def copy_side_files(source: Path, destination: Path) -> None:
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    for file in template_files(source):
        (destination / TEMPLATE_DIR).mkdir(exist_ok=True)
        shutil.copyfile(file, destination / TEMPLATE_DIR / file.name)


def check_side_files(directory: Path) -> None:
    """SpecDecError for a file beside the weights that would be copied and could not be read afterwards: JSON that does
    not parse, a tokenizer without a vocabulary, or wrong generation settings. A missing file is no error.
    """
    for name in _SIDE_FILES:
        if name.endswith(".json") and (directory / name).is_file():
            content = read_json(directory / name)
            if name == "tokenizer.json":
                _check_tokenizer(content, directory / name)
    check_generation_config(directory, MODEL_DEFAULTS)


def _check_tokenizer(content: dict[str, Any], path: Path) -> None:
    """SpecDecError for a tokenizer.json without a model and its vocabulary."""
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise SpecDecError(
            f"`{path}` is not a tokenizer: it has no `model` with a `vocab`",
            hint="download or save the tokenizer again, or remove the file to give token ids",
        )


def saved_dtype(source: Source) -> Dtype:
    """The dtype of most weights. For a GGUF file whose weights are all quantized, except norms, bfloat16."""
    if source.format == "GGUF" and source.layers:
        return "bfloat16"
    num_elements: dict[Dtype, int] = {"float32": 0, "float16": 0, "bfloat16": 0}
    for entry in source.tensors:
        for name in num_elements:
            if entry.dtype == getattr(torch, name):
                num_elements[name] += entry.num_elements
    return max(num_elements, key=lambda name: num_elements[name])
