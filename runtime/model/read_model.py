"""A model's files, opened and checked against its config: tensors by the names in transformers' model."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from runtime.checkpoint.checksums import CONFIG
from runtime.checkpoint.gguf.blocks import read_gguf_tensors
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.checkpoint.quant.formats import check_shapes, find_layers, format_of, without_quantization
from runtime.checkpoint.quant.planning import PrequantizedLayer, Source
from runtime.checkpoint.resolve import read_model_config, warn_of_adapter
from runtime.checkpoint.source import (
    SourceTensor,
    check_head,
    check_not_wrapped,
    is_computed,
    load_tensors,
    of_two_models,
    predicts_further,
    read_tensors,
)
from runtime.model.model import (
    dtypes_of_weights,
    linear_layers,
    missing_weights,
    names_in_whole,
    own_names,
    parameter_shapes,
    probe_config,
    renames_weights,
    transposed_layers,
)
from runtime.model.pretrained import (
    MANY_LAYERS,
    counts_of_layers,
    parse_language_model,
    parse_pretrained_config,
    warn_of_unread_keys,
)
from runtime.util.errors import SpecDecError, SpecDecWarning


def read_numbers(
    model_dir: Path, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model's config, and the numbers of its `wanted` weights, dequantized: in `dtype`, or in float32 if transformers
    keeps the weight so.
    """
    source = open_source(model_dir)
    dtype_of = dtypes_of_weights(parse_pretrained_config(source.config, source.name), dtype)
    tensors = [tensor for tensor in source.tensors if wanted(tensor.name)]
    numbers = {tensor.name: load_tensors([tensor])[0].to(dtype_of(tensor.name)) for tensor in tensors}
    for name, layer in source.layers.items():
        if wanted(weight := f"{name}.weight"):
            numbers[weight] = layer.load().dequantize(dtype_of(weight))
    return source.config, numbers


def open_source(model_dir: Path) -> Source:
    """The model's tensors, checked against its config."""
    config = read_model_config(model_dir)
    where = str(model_dir if is_gguf(model_dir) else model_dir / CONFIG)
    found_format = format_of(config, model_dir)
    whole, config = config, without_quantization(config)
    _check_number_of_layers(config, model_dir)
    pretrained, inside = parse_language_model(config, where)
    if not is_gguf(model_dir):
        warn_of_unread_keys(pretrained, whole, where)
    probe_config(pretrained)
    shapes, transposed = parameter_shapes(pretrained), transposed_layers(pretrained)
    if is_gguf(model_dir):
        layers, tensors = _gguf_tensors(model_dir, config, shapes)
    else:
        whole_type = None if inside is None else str(config["model_type"])
        tensors = _read_weights(model_dir, inside or config, whole_type, shapes)
        if not renames_weights(pretrained):
            tensors = _named_as_whole(tensors, shapes)
        of_layers = shapes | {f"{name}.weight": shapes[f"{name}.weight"][::-1] for name in transposed}
        layers, tensors = find_layers(tensors, found_format, of_layers, model_dir)
    _check_shapes(tensors, shapes, model_dir)
    linears, head = linear_layers(pretrained)
    dtype_of = dtypes_of_weights(pretrained, torch.float16)  # transformers' quantizers leave out both of its lists
    linears = [name for name in linears if dtype_of(f"{name}.weight") == torch.float16]
    names = [*(tensor.name for tensor in tensors), *(f"{name}.weight" for name in layers)]
    names = own_names(pretrained, names)
    check_head(names, config, head, is_tied=getattr(pretrained, "tie_word_embeddings", False))
    _check_names(pretrained, names, model_dir, is_inside=inside is not None)
    format_name = "GGUF" if is_gguf(model_dir) else found_format.name if found_format else None
    name = str(model_dir.resolve())
    return Source(inside or config, tensors, layers, linears, transposed, head, name, format_name)


def _check_number_of_layers(config: dict[str, Any], model_dir: Path) -> None:
    """SpecDecError if the config has many more layers than the files have weights for, before the layers are made.

    A GGUF file's number of layers was compared with its tensors when its metadata was read.
    """
    for name, count in counts_of_layers(config):
        if count > MANY_LAYERS and not is_gguf(model_dir) and count > (found := len(read_tensors(model_dir))):
            raise SpecDecError(
                f"config.json and weights belong to two models, `{name}` is {count} and the files hold {found} "
                f"tensors: {model_dir}",
                hint="correct config.json, or download or save the model again",
            )


def _read_weights(
    model_dir: Path, config: dict[str, Any], whole_type: str | None, shapes: dict[str, tuple[int, ...]]
) -> list[SourceTensor]:
    """The tensors of this config's language model, which may be inside a whole model of another type."""
    warn_of_adapter(model_dir)
    tensors = read_tensors(model_dir)
    check_not_wrapped((tensor.name for tensor in tensors), model_dir)
    if whole_type is not None:
        tensors = _language_model_tensors(tensors, whole_type, shapes, model_dir)
    tensors = [tensor for tensor in tensors if not is_computed(tensor.name, tensor.shape)]
    further = [tensor.source_name for tensor in tensors if predicts_further(tensor.name, config)]
    if further:
        warnings.warn(
            f"layers that predict more than the next token (MTP) are no part of the engine, such as `{further[0]}`; "
            "the drafter `mtp` reads them where they are",
            SpecDecWarning,
            stacklevel=4,
        )
    return [tensor for tensor in tensors if not predicts_further(tensor.name, config)]


def _gguf_tensors(
    path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, PrequantizedLayer], list[SourceTensor]]:
    """All weights of a GGUF file, quantized and plain. SpecDecError if one is missing."""
    layers, tensors = read_gguf_tensors(path, config)
    check_shapes(layers, shapes, path)
    found = {*(tensor.name for tensor in tensors), *(f"{name}.weight" for name in layers)}
    missing = sorted(set(shapes) - found - {"lm_head.weight"})
    if missing:
        raise SpecDecError(f"`{path}` lacks a weight of its model: {missing[0]}", hint="download it again")
    return layers, tensors


def _language_model_tensors(
    entries: list[SourceTensor], whole_type: str, shapes: dict[str, tuple[int, ...]], model_dir: Path
) -> list[SourceTensor]:
    """The weights of the language model inside, under its own names."""
    # Either as saved, or renamed: transformers has other names for Cosmos 3 and Molmo 2 than their files.
    names = names_in_whole(whole_type, (entry.name for entry in entries))
    renamed = [replace_fields(entry, name=name) for entry, name in zip(entries, names, strict=True)]
    modules = {name.rpartition(".")[0] for name in shapes}
    either = [_without_prefix(these) for these in (entries, renamed)]
    # Most modules of its own, then fewest weights: in DeepSeek-OCR 2's files the vision tower has the same prefix.
    found = max(
        either, key=lambda found: (len(modules & {entry.name.rpartition(".")[0] for entry in found}), -len(found))
    )
    if not found:
        raise SpecDecError(
            f"this multimodal model's files have no weights of a language model: {model_dir}",
            hint="the names of such weights should begin with "
            f"{' or '.join(f'`{prefix}`' for prefix in _PREFIXES_INSIDE)}",
        )
    return found


_PREFIXES_INSIDE = (
    *("model.language_model.", "language_model.model.", "model.text_model.", "text_model.model.", "thinker.model."),
    "model.",
)


def _without_prefix(entries: list[SourceTensor]) -> list[SourceTensor]:
    """The weights whose names have the prefix of a language model inside, under its own names."""
    prefix = next((one for one in _PREFIXES_INSIDE if any(entry.name.startswith(one) for entry in entries)), None)
    if prefix is None:
        return []
    renamed = []
    for entry in entries:
        if entry.name.startswith(prefix):
            # transformers saves Kimi-K2.5 and Qianfan-OCR with their vision towers' names for layers.
            own = re.sub(r"^(encoder\.layers|blocks)\.(?=\d)", "layers.", entry.name.removeprefix(prefix))
            renamed.append(replace_fields(entry, name=f"model.{own}"))
        elif entry.name.endswith("lm_head.weight"):
            renamed.append(replace_fields(entry, name="lm_head.weight"))
    return renamed


def _named_as_whole(tensors: list[SourceTensor], shapes: dict[str, tuple[int, ...]]) -> list[SourceTensor]:
    """The tensors of a model that was saved without its output layer, under the whole model's names: GPT-2's `h.0.attn`
    becomes `transformer.h.0.attn`.
    """
    layers = {name.rpartition(".")[0] for name in shapes}
    prefixes = {name.partition(".")[0] for name in shapes}

    def named(tensor: SourceTensor) -> SourceTensor:
        layer = tensor.name.rpartition(".")[0]
        prefix = next((one for one in prefixes if layer not in layers and f"{one}.{layer}" in layers), None)
        return tensor if prefix is None else replace_fields(tensor, name=f"{prefix}.{tensor.name}")

    return [named(tensor) for tensor in tensors]


def _check_names(pretrained: PreTrainedConfig, names: list[str], model_dir: Path, *, is_inside: bool) -> None:
    """SpecDecError if weights of the model are missing, or have unknown names inside another model."""
    missing = missing_weights(pretrained, names)
    if missing and is_inside:
        raise SpecDecError(
            f"the language model inside this model lacks weights, such as `{missing[0]}`: {model_dir}",
            hint="the model is incomplete, or of a family whose names specdec does not know",
        )
    if missing:
        raise SpecDecError(
            f"`{model_dir}` lacks {len(missing)} of the model's weights, such as: {missing[0]}",
            hint="config.json and weights belong to two models, or the model is incomplete; download or correct it",
        )


def _check_shapes(entries: list[SourceTensor], shapes: dict[str, tuple[int, ...]], model_dir: Path) -> None:
    """SpecDecError for another shape than the config's, and for integers. Names that transformers maps are skipped."""
    for entry in entries:
        wanted = shapes.get(entry.name)
        if wanted is not None and not entry.is_float:
            raise SpecDecError(
                f"`{entry.source_name}` is saved in {str(entry.dtype).removeprefix('torch.')}, without a config that "
                f"says what its integers stand for: {model_dir}",
                hint="save the model in float32, float16 or bfloat16",
            )
        if wanted is not None and wanted != entry.shape:
            raise of_two_models(entry.source_name, entry.shape, wanted, model_dir)
