"""Formats in which other tools save quantized weights: recognised by a model's config, and read layer by layer.

Each reader turns the tensors of one layer into a `QuantizedWeight` with exactly the same numbers.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from runtime.checkpoint.config import QuantAlgo
from runtime.checkpoint.quant.bitsandbytes import numbers_of_4_bits
from runtime.checkpoint.quant.mxfp4 import E2M1_TWICE, MXFP4, experts_of_blocks, powers_of
from runtime.checkpoint.quant.planning import PrequantizedLayer
from runtime.checkpoint.quant.weight import (
    QuantizedWeight,
    damaged,
    from_integers,
    scales_of,
    signed,
    unpack,
    unpack_awq,
)
from runtime.checkpoint.resolve import weight_files
from runtime.checkpoint.source import SourceTensor, load_tensors, of_two_models
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import read_json
from runtime.util.tensor_file import read_metadata

_CONFIG_KEYS = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"
_READ = (
    "AWQ, GPTQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes, torchao and GGUF are read; or convert the "
    "unquantized model"
)
_FOUR_BITS = "bitsandbytes in 4 bits"
_SIGNS = {
    "_proj_blocks": MXFP4, ".qweight": "AWQ or GPTQ", ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes", ".SCB": "bitsandbytes", "._weight_qdata": "torchao", ".weight_scale_2": "NVFP4",
}  # fmt: skip
"""Quantization methods, by the ends of tensors' names that give them away."""
_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """Quantization format of a model. `parts` are the last words of the names of a quantized layer's tensors."""

    name: str
    parts: tuple[str, ...]
    scheme_of: Callable[[str], "Scheme"]
    """Gives a layer's scheme by the layer's name in the model, or, with `by_source_name`, in the file."""
    unused: tuple[str, ...] = ()
    """Last words of further tensors' names, for the quantization of activations or K/V. These tensors are left out."""
    by_source_name: bool = False


@dataclass(frozen=True)
class Scheme:
    """Quantization scheme of one layer, which must have the tensors `needed`."""

    quant_algo: QuantAlgo
    needed: tuple[str, ...]
    read: Callable[[str, Parts], QuantizedWeight]
    """Reads a layer's tensors; the layer's name is for errors."""


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The config without its quantization. A dtype of 8 bits goes too: it is the weights' dtype, not the model's."""
    plain = {key: value for key, value in config.items() if key not in _CONFIG_KEYS}
    for key in ("dtype", "torch_dtype"):
        if str(plain.get(key)).startswith("float8"):
            del plain[key]
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain


def format_of(config: dict[str, Any], model_dir: Path) -> Format | None:
    """The model's format; None if its config says nothing of quantization. SpecDecError for an unsupported format."""
    _refuse_others(config, model_dir)
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    said = next((place[key] for place in places for key in _CONFIG_KEYS if place.get(key)), None)
    said = _said_beside(model_dir) if said is None else said
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else None
    where = str(model_dir / "config.json")
    try:
        match method:
            case "compressed-tensors":
                return _compressed_tensors(said, where)
            case "awq":
                return _awq(said, where)
            case "gptq":
                return _gptq(said, where)
            case "fp8" | "fbgemm_fp8":
                return _fp8(said)
            case "mxfp4":
                return Format(MXFP4, (), lambda layer: _refuse(f"layers by {MXFP4} but experts", where))
            case "bitsandbytes" if said.get("load_in_8bit"):
                return _bitsandbytes(where)
            case "bitsandbytes":
                return Format(_FOUR_BITS, (), lambda layer: _refuse("layers of bitsandbytes in 8 bits", where))
            case "modelopt" if said.get("quant_algo") == "FP8":
                return _fp8(said)
            case "modelopt" if said.get("quant_algo") == "NVFP4":
                return _nvfp4(where)
            case "torchao":
                return _torchao(model_dir)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(f"`{where}` does not say how the weights are quantized: {error!r}") from error
    _refuse(f"weights quantized by {_name_of(method, said)}", where)


def _refuse_others(config: dict[str, Any], model_dir: Path) -> None:
    """SpecDecError for MLX's and quanto's formats, which are not described under `quantization_config`."""
    where = str(model_dir / "config.json")
    if isinstance(said := config.get("quantization"), dict) and "bits" in said:
        _refuse(f"weights quantized by MLX in {said['bits']} bits", where)
    for name in ("quanto_qmap.json", "quantization_map.json"):
        if (model_dir / name).is_file():
            _refuse("weights quantized by quanto", str(model_dir / name))


def _said_beside(model_dir: Path) -> dict[str, Any] | None:
    """Quantization config from a separate file, as AutoGPTQ and AutoAWQ wrote it and ModelOpt does."""
    if (model_dir / _MODELOPT).is_file():
        said = read_json(model_dir / _MODELOPT).get("quantization")
        return {"quant_method": "modelopt", **(said if isinstance(said, dict) else {})}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (model_dir / name).is_file():
            return {"quant_method": method, **read_json(model_dir / name)}
    return None


def _name_of(method: object, said: object) -> str:
    """The quantization method as a sentence names it."""
    algo = said.get("quant_algo") if isinstance(said, dict) else None
    names = {"modelopt": f"ModelOpt ({algo})", None: "a method that it does not name"}
    return names.get(method if isinstance(method, str) else None, str(method))


def _refuse(what: str, where: str) -> NoReturn:
    raise SpecDecError(f"{what} are not read: {where}", hint=_READ)


def find_layers(
    tensors: list[SourceTensor], found: Format | None, shapes: Mapping[str, tuple[int, ...]], model_dir: Path
) -> tuple[dict[str, PrequantizedLayer], list[SourceTensor]]:
    """The quantized layers by name, and the remaining tensors; weights in MXFP4 and bitsandbytes' 4 bits are among
    these, to be dequantized.

    SpecDecError for a layer that lacks a tensor, or has another shape than in `shapes`, the model's.
    """
    if found is None:
        _refuse_unsaid(tensors, shapes, model_dir)
        return {}, tensors
    if found.name == MXFP4:
        return {}, experts_of_blocks(tensors, model_dir)
    if found.name == _FOUR_BITS:
        return {}, numbers_of_4_bits(tensors)
    parts: dict[str, dict[str, SourceTensor]] = {}
    others = []
    for tensor in tensors:
        layer, _, part = tensor.name.rpartition(".")
        if part == "weight" and tensor.is_float:
            others.append(tensor)
        elif part in found.parts:
            parts.setdefault(layer, {})[part] = tensor
        elif part not in found.unused:
            others.append(tensor)
    left_out = next((tensor.name for tensor in tensors if tensor.name.rpartition(".")[2] in found.unused), None)
    if left_out is not None:
        warnings.warn(
            f"activations, keys and values are not quantized, and their scales are left out, such as `{left_out}`",
            SpecDecWarning,
            stacklevel=2,
        )
    layers = {name: _layer(name, given, found) for name, given in parts.items()}
    if not layers:
        raise damaged(f"config.json says that weights are quantized ({found.name}), and none are: {model_dir}")
    check_shapes(layers, shapes, model_dir)
    return layers, [tensor for tensor in others if not _is_foreign_bias(tensor, layers, shapes)]


def _refuse_unsaid(tensors: list[SourceTensor], shapes: Mapping[str, object], model_dir: Path) -> None:
    """SpecDecError for quantized weights if config.json does not describe their quantization."""
    for tensor in tensors:
        kind = next((kind for end, kind in _SIGNS.items() if tensor.name.endswith(end)), None)
        if kind is not None and tensor.name not in shapes:
            raise SpecDecError(
                f"the files have weights quantized by {kind}, such as `{tensor.source_name}`, and config.json has no "
                f"`quantization_config`: {model_dir}",
                hint="download config.json again: it says how they are to be read",
            )


def check_shapes(
    layers: Mapping[str, PrequantizedLayer], shapes: Mapping[str, tuple[int, ...]], model_dir: Path
) -> None:
    """SpecDecError for a layer whose shape is not that in `shapes`, which follow from the config."""
    for name, layer in layers.items():
        shape = layer.read({part: tensor.without_values() for part, tensor in layer.parts.items()}).shape
        if shapes.get(f"{name}.weight", shape) != shape:
            in_file = next(iter(layer.parts.values())).source_name.rpartition(".")[0]
            raise of_two_models(in_file, shape, shapes[f"{name}.weight"], model_dir)


def _is_foreign_bias(tensor: SourceTensor, layers: Mapping[str, object], shapes: Mapping[str, object]) -> bool:
    """True for zeros that AutoGPTQ saves as the bias of a layer without one. SpecDecError for other numbers."""
    name, _, part = tensor.name.rpartition(".")
    is_known = f"{name}.weight" in shapes or _OF_AN_EXPERT.search(name) is not None
    if part != "bias" or name not in layers or not is_known or tensor.name in shapes:
        return False
    if bool(load_tensors([tensor])[0].any()):
        raise damaged(f"a layer has a bias that the model has no place for: {tensor.name}")
    return True


def _layer(name: str, parts: dict[str, SourceTensor], found: Format) -> PrequantizedLayer:
    in_file = next(iter(parts.values())).source_name.rpartition(".")[0]
    scheme = found.scheme_of(in_file if found.by_source_name else name)
    missing = next((part for part in scheme.needed if part not in parts), None)
    if missing is not None:
        raise damaged(f"a tensor of a quantized layer is missing: {name}.{missing}")

    def read(tensors: Parts) -> QuantizedWeight:
        try:
            return scheme.read(name, tensors)
        except (RuntimeError, IndexError, ValueError) as error:  # shapes that no such layer can have
            said = str(error).splitlines()[0]
            raise damaged(f"the tensors of `{name}` do not fit each other: {said}") from error

    return PrequantizedLayer(parts, read, scheme.quant_algo)


def _check_groups(name: str, scales: Tensor, inputs: int, group_size: int | None) -> None:
    """SpecDecError unless there is a scale for each group of `group_size` inputs; None or -1 means all inputs."""
    size = inputs if group_size is None or group_size < 0 else group_size
    if size == 0 or inputs % size:
        raise damaged(f"groups of {size} do not divide the {inputs} inputs of `{name}`")
    if scales.shape[-1] != inputs // size:
        raise damaged(
            f"config.json says groups of {size}, so `{name}` has {inputs // size} groups, and its scales are for "
            f"{scales.shape[-1]}"
        )


def _check_symmetric(name: str, zeros: Tensor | None, said: str) -> None:
    if zeros is not None and not zeros.is_meta and bool(zeros.any()):
        raise damaged(f"config.json has {said}, but zero points of `{name}` are not in the middle")


def _check_words(name: str, part: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise damaged(f"`{name}.{part}` should be a table of 32-bit integers: {tensor.dtype} {list(tensor.shape)}")


def _awq(said: dict[str, Any], where: str) -> Format:
    bits, version = said.get("bits", said.get("w_bit", 4)), str(said.get("version", "gemm")).lower()
    if bits != 4:
        _refuse(f"AWQ weights of {bits} bits", where)
    if version != "gemm":
        _refuse(f"AWQ weights in the layout `{version}`", where)
    group_size = int(said.get("group_size", said.get("q_group_size", 128)))
    has_zeros = bool(said.get("zero_point", True))

    def read(name: str, parts: Parts) -> QuantizedWeight:
        _check_words(name, "qweight", parts["qweight"])
        integers = signed(unpack_awq(parts["qweight"]), 4).t()
        scales = parts["scales"].t()
        _check_groups(name, scales, integers.shape[1], group_size)
        zeros = signed(unpack_awq(parts["qzeros"]), 4).t().short().contiguous() if "qzeros" in parts else None
        if not has_zeros:
            _check_symmetric(name, zeros, "no `zero_point`")
            zeros = None
        return from_integers(integers.contiguous(), scales, bits=4, zeros=zeros)

    def scheme_of(name: str) -> Scheme:
        if name.rpartition(".")[2] in ("act", "act_fn"):
            _refuse(f"AWQ weights whose activations are scaled (`{name}.scales`)", where)
        return scheme

    scheme = Scheme("W4A16_AWQ", ("qweight", "scales", "qzeros") if has_zeros else ("qweight", "scales"), read)
    return Format("AWQ", ("qweight", "qzeros", "scales"), scheme_of)


def _gptq(said: dict[str, Any], where: str) -> Format:
    bits = said["bits"]
    if bits not in (4, 8):
        _refuse(f"GPTQ weights of {bits} bits", where)
    if said.get("dynamic"):
        _refuse("GPTQ weights with per-layer settings (`dynamic`)", where)
    layout = said.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        _refuse(f"GPTQ weights in the layout `{layout}`", where)
    group_size, is_symmetric = int(said.get("group_size", 128)), bool(said.get("sym", True))
    added = 1 if layout == "gptq" else 0  # it stores zero points less 1

    def read(name: str, parts: Parts) -> QuantizedWeight:
        _check_words(name, "qweight", parts["qweight"])
        integers = signed(unpack(parts["qweight"].t(), bits), bits)
        scales = parts["scales"].t()
        _check_groups(name, scales, integers.shape[1], group_size)
        zeros = unpack(parts["qzeros"], bits).short().t() + (added - 2 ** (bits - 1))
        if is_symmetric:
            _check_symmetric(name, zeros, "`sym`")
        order = None
        if said.get("desc_act"):
            order = _order_of(name, parts["g_idx"], integers.shape[1] // scales.shape[1])
            integers = integers[:, order.long()]
        zeros = None if is_symmetric else zeros.contiguous()
        return from_integers(integers, scales, bits=bits, zeros=zeros, order=order)

    needed = ("qweight", "scales", "qzeros", *(("g_idx",) if said.get("desc_act") else ()))
    scheme = Scheme("W4A16_GPTQ" if bits == 4 else "W8A16_GPTQ", needed, read)
    return Format("GPTQ", ("qweight", "qzeros", "scales", "g_idx"), lambda name: scheme)


def _order_of(name: str, groups: Tensor, group_size: int) -> Tensor:
    """The order in which the inputs of a group stand side by side. SpecDecError for groups of different sizes."""
    order = groups.argsort(stable=True).int()
    if not groups.is_meta:
        wanted = torch.arange(len(groups)) // group_size
        if not torch.equal(groups[order.long()].long(), wanted):
            raise damaged(f"the groups of `{name}` do not have {group_size} inputs each (`g_idx`)")
    return order


def _fp8(said: dict[str, Any]) -> Format:
    """FP8 with a scale for the whole weight, each output, or each block."""
    block = said.get("weight_block_size")
    if block and (not isinstance(block, list) or len(block) != 2):
        raise ValueError(f"weight_block_size {block!r}")
    rows, columns = (int(block[0]), int(block[1])) if block else (1, None)

    def read(name: str, parts: Parts) -> QuantizedWeight:
        scales = next((parts[part] for part in ("weight_scale_inv", "weight_scale") if part in parts), None)
        if scales is None:
            raise damaged(f"a tensor of a quantized layer is missing: {name}.weight_scale")
        if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):  # ue8m0, which may lie as float32 too
            scales = powers_of(scales.view(torch.uint8))
        return _read_values(name, parts["weight"], scales, None, (rows, columns))

    algorithm: QuantAlgo = "FP8_BLOCK_SCALES" if block else "FP8"
    scheme = Scheme(algorithm, ("weight",), read)
    unused = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale")
    return Format("FP8", ("weight", "weight_scale", "weight_scale_inv"), lambda name: scheme, unused)


def _read_values(
    name: str, values: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int | None]
) -> QuantizedWeight:
    """A weight with the values [outputs, inputs] unchanged. `block` is the number of outputs that share scales, and the
    number of inputs that share one, None for all.
    """
    outputs, inputs = values.shape
    rows, columns = block
    if rows > 1 and columns is not None and inputs > columns and inputs % columns:
        raise SpecDecError(
            f"`{name}` has {inputs} inputs in blocks of {columns}, and the last block is not whole: such weights are "
            "not read",
            hint=_READ,
        )
    scales = scales_of(scales, outputs, rows)
    if columns is not None and inputs > columns:
        _check_groups(name, scales, inputs, columns)
    if rows > 1 and scales.shape[0] != outputs:
        raise damaged(f"the scales of `{name}` do not fit its {outputs} x {inputs} values")
    zeros = None if zeros is None else scales_of(zeros, outputs).short().contiguous()
    return QuantizedWeight(values.contiguous(), scales.contiguous(), zeros=zeros)


def _bitsandbytes(where: str) -> Format:
    """bitsandbytes in 8 bits (LLM.int8): each output has a scale for 127."""

    def read(name: str, parts: Parts) -> QuantizedWeight:
        layout = parts.get("weight_format", parts["SCB"])
        if layout.dtype == torch.uint8 and not layout.is_meta and bool(layout.any()):
            _refuse(f"bitsandbytes weights in the layout {int(layout.max())} (`{name}.weight_format`)", where)
        return _read_values(name, parts["weight"], parts["SCB"].float() / 127, None, (1, None))

    scheme = Scheme("W8A16", ("weight", "SCB"), read)
    return Format("bitsandbytes", ("weight", "SCB", "weight_format"), lambda name: scheme)


def _nvfp4(where: str) -> Format:
    """ModelOpt's NVFP4: numbers in e2m1, a scale in e4m3 for each 16 of a row, and one for all."""

    def read(name: str, parts: Parts) -> QuantizedWeight:
        if "pre_quant_scale" in parts:
            _refuse(f"NVFP4 weights whose activations are scaled (`{name}.pre_quant_scale`)", where)
        scales = parts["weight_scale"].float() * _scale_of_all(name, parts["weight_scale_2"])
        return _read_codes(name, parts["weight"], scales, 16)

    scheme = Scheme("NVFP4", ("weight", "weight_scale", "weight_scale_2"), read)
    unused = ("input_scale", "k_scale", "v_scale")
    return Format("NVFP4", (*scheme.needed, "pre_quant_scale"), lambda name: scheme, unused)


def _scale_of_all(name: str, scale: Tensor) -> Tensor:
    if scale.numel() != 1:
        raise damaged(f"`{name}` has {scale.numel()} scales for all its numbers, and should have one")
    return scale.float()


def _read_codes(name: str, codes: Tensor, scales: Tensor, group_size: int) -> QuantizedWeight:
    """A weight with the codes of e2m1 unchanged, uint8 [outputs, inputs / 2]: the first in the lower half of a byte."""
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise damaged(f"`{name}` should be a table of bytes: {codes.dtype} {list(codes.shape)}")
    _check_groups(name, scales, codes.shape[1] * 2, group_size)
    return QuantizedWeight(codes, scales.contiguous() / 2, book=torch.tensor(E2M1_TWICE, dtype=torch.int8))


def _torchao(model_dir: Path) -> Format:
    """torchao's formats as transformers saves them: tensors such as `NAME._weight_qdata`, and their class in the file's
    header.
    """
    classes = _torchao_classes(model_dir)

    def scheme_of(name: str) -> Scheme:
        try:
            kind, settings = classes[f"{name}.weight"]["_type"], classes[f"{name}.weight"]["_data"]
            if kind in _TORCHAO:
                return _TORCHAO[kind](settings, str(model_dir))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise damaged(f"no header of a file says how torchao quantized `{name}.weight`: {model_dir}") from error
        _refuse(f"torchao weights of the class {kind} (`{name}`)", str(model_dir))

    parts = ("qdata", "scale", "zero_point", "act_pre_scale", "scale_and_zero", "per_tensor_scale")
    return Format("torchao", tuple(f"_weight_{part}" for part in parts), scheme_of, by_source_name=True)


def _torchao_classes(model_dir: Path) -> dict[str, dict[str, Any]]:
    """Records in the files' headers, by names of weights: the class `_type`, and `_data` with its settings."""
    said = dict[str, Any]()
    for path in weight_files(model_dir):
        with path.open("rb") as file, suppress(SafetensorError):  # raised again when the file's tensors are read
            said |= read_metadata(file)
    return {name: json.loads(value) for name, value in said.items() if name.endswith(".weight")}


def _torchao_scheme(
    settings: dict[str, Any], where: str, algorithm: QuantAlgo, read: Callable[[str, Parts, int], QuantizedWeight]
) -> Scheme:
    group_size = int(settings["block_size"][-1])

    def read_parts(name: str, parts: Parts) -> QuantizedWeight:
        if "_weight_act_pre_scale" in parts:
            _refuse(f"torchao weights whose activations are scaled (`{name}._weight_act_pre_scale`)", where)
        return read(name, {part.removeprefix("_weight_"): one for part, one in parts.items()}, group_size)

    is_float = algorithm == "FP8"
    needed = ("qdata", "scale") if is_float else ("qdata", "scale", "zero_point")
    return Scheme(algorithm, tuple(f"_weight_{part}" for part in needed), read_parts)


def _torchao_integers(settings: dict[str, Any], where: str) -> Scheme:
    """Scheme for integers of 8 bits or fewer, each in a byte; integers of up to 4 bits are packed in pairs here."""
    target = settings.get("target_dtype")
    bits = int(str(target["_data"]).removeprefix("int")) if isinstance(target, dict) else 8
    bits = 4 if bits <= 4 else 8

    def read(name: str, parts: Parts, group_size: int) -> QuantizedWeight:
        values, zeros = parts["qdata"], parts["zero_point"]
        if zeros.dtype != torch.int8:
            _refuse(f"torchao weights with zero points that are no integers (`{name}`)", where)
        weight = _read_values(name, values, parts["scale"], zeros, (1, group_size))
        return weight if bits == 8 else _in_4_bits(name, weight)

    return _torchao_scheme(settings, where, "W4A16" if bits == 4 else "W8A16", read)


def _torchao_packed(settings: dict[str, Any], where: str) -> Scheme:
    """Scheme for pairs of 4-bit integers, the lower half first; scales and zero points are [groups, outputs]."""

    def read(name: str, parts: Parts, group_size: int) -> QuantizedWeight:
        integers = (unpack(parts["qdata"], 4).to(torch.int8) ^ 8) - 8
        scales, zeros = parts["scale"].t().contiguous(), parts["zero_point"].t().float()
        _check_groups(name, scales, integers.shape[1], group_size)
        if zeros.shape != scales.shape:
            raise damaged(
                f"`{name}` has scales of shape {list(scales.shape)}, and zero points of shape {list(zeros.shape)}"
            )
        return replace(from_integers(integers, scales, bits=4), offsets=(zeros - 8 * scales.float()).contiguous())

    return _torchao_scheme(settings, where, "W4A16", read)


def _torchao_float8(settings: dict[str, Any], where: str) -> Scheme:
    def read(name: str, parts: Parts, group_size: int) -> QuantizedWeight:
        rows = int(settings["block_size"][0])
        return _read_values(name, parts["qdata"], parts["scale"], None, (rows, group_size))

    return _torchao_scheme(settings, where, "FP8", read)


_TORCHAO: dict[str, Callable[[dict[str, Any], str], Scheme]] = {
    "Int8Tensor": _torchao_integers,
    "IntxUnpackedToInt8Tensor": _torchao_integers,
    "Int4Tensor": _torchao_packed,
    "Float8Tensor": _torchao_float8,
}


def _in_4_bits(name: str, weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with two 4-bit values in a byte, from a weight with one in each. SpecDecError for larger values."""
    values = weight.values
    if not values.is_meta and bool(((values > 7) | (values < -8)).any()):
        raise damaged(f"numbers of `{name}` do not fit 4 bits")
    return replace(from_integers(values, weight.scales, bits=4), zeros=weight.zeros)


def _compressed_tensors(said: dict[str, Any], where: str) -> Format:
    if said.get("transform_config") and said["transform_config"].get("config_groups"):
        _refuse("compressed-tensors weights that were rotated (`transform_config`)", where)
    sparsity = (said.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        _refuse(f"compressed-tensors weights stored as sparse (`{sparsity}`)", where)
    groups = list(said["config_groups"].values())
    schemes = [_compressed_scheme(group, group.get("format") or said.get("format", "dense"), where) for group in groups]

    def scheme_of(name: str) -> Scheme:
        for group, scheme in zip(groups, schemes, strict=True):
            if any(_matches(name, target) for target in group.get("targets", ["Linear"])):
                return scheme
        raise damaged(f"config.json does not say how a layer is quantized: {name}")

    parts = (
        "weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx",
    )  # fmt: skip
    unused = (
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale",
        "v_scale", "q_scale",
    )  # fmt: skip
    return Format("compressed-tensors", parts, scheme_of, unused)


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, "Linear")


def _compressed_scheme(group: dict[str, Any], layout: str, where: str) -> Scheme:
    weights = group["weights"]
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy") or "tensor"
    if layout in _CODES:
        return _CODES[layout]
    if layout not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        _refuse(f"compressed-tensors weights in the layout `{layout}`", where)
    if bits not in (4, 8) or (kind, bits) == ("float", 4):
        _refuse(f"compressed-tensors weights of {bits} bits ({kind})", where)
    if strategy not in ("tensor", "channel", "group", "block"):
        _refuse(f"compressed-tensors weights with scales by {strategy}", where)
    group_size = weights.get("group_size") if strategy == "group" else None
    needed = ("weight_scale",) if weights.get("symmetric", True) else ("weight_scale", "weight_zero_point")
    algorithm: QuantAlgo
    if kind == "float":
        algorithm = "FP8_BLOCK_SCALES" if strategy == "block" else "FP8"
    else:
        algorithm = "W4A16" if bits == 4 else "W8A16"
    if layout == "pack-quantized":
        read = _packed_reader(bits, group_size, has_zeros=len(needed) > 1)
        return Scheme(algorithm, ("weight_packed", "weight_shape", *needed), read)
    block = tuple(weights["block_structure"]) if strategy == "block" else (1, group_size)
    return Scheme(algorithm, ("weight", *needed), _plain_reader(bits, block, has_zeros=len(needed) > 1))


def _read_nvfp4(name: str, parts: Parts) -> QuantizedWeight:
    scales = parts["weight_scale"].float() / _scale_of_all(name, parts["weight_global_scale"])
    return _read_codes(name, parts["weight_packed"], scales, 16)


def _read_mxfp4(name: str, parts: Parts) -> QuantizedWeight:
    return _read_codes(name, parts["weight_packed"], powers_of(parts["weight_scale"]), 32)


_CODES = {
    "nvfp4-pack-quantized": Scheme("NVFP4", ("weight_packed", "weight_scale", "weight_global_scale"), _read_nvfp4),
    "mxfp4-pack-quantized": Scheme("W4A16_MXFP4", ("weight_packed", "weight_scale"), _read_mxfp4),
}
"""Schemes of layouts whose numbers are in e2m1."""


def _packed_reader(bits: int, group_size: int | None, *, has_zeros: bool) -> Callable[[str, Parts], QuantizedWeight]:
    def read(name: str, parts: Parts) -> QuantizedWeight:
        _check_words(name, "weight_packed", parts["weight_packed"])
        integers = signed(unpack(parts["weight_packed"], bits), bits)
        outputs, inputs = integers.shape
        shape = parts["weight_shape"]
        if not shape.is_meta and shape.tolist() != [outputs, inputs]:
            raise damaged(f"`{name}.weight_shape` is {shape.tolist()}, and its packed weights are {[outputs, inputs]}")
        scales = scales_of(parts["weight_scale"], outputs)
        _check_groups(name, scales, inputs, group_size)
        zeros = _packed_zeros(parts["weight_zero_point"], bits, outputs) if has_zeros else None
        order = None
        if "weight_g_idx" in parts:
            order = _order_of(name, parts["weight_g_idx"], inputs // scales.shape[1])
            integers = integers[:, order.long()]
        return from_integers(integers, scales, bits=bits, zeros=zeros, order=order)

    return read


def _packed_zeros(words: Tensor, bits: int, outputs: int) -> Tensor:
    """Zero points, int16 [outputs, groups], from words packed along the outputs."""
    if words.dtype != torch.int32:
        return words.short()  # a whole weight's, which is not packed
    return signed(unpack(words.t(), bits)[:, :outputs], bits).t().short().contiguous()


def _plain_reader(
    bits: int, block: tuple[int, int | None], *, has_zeros: bool
) -> Callable[[str, Parts], QuantizedWeight]:
    def read(name: str, parts: Parts) -> QuantizedWeight:
        zeros = parts["weight_zero_point"] if has_zeros else None
        values = parts["weight"]
        if zeros is not None and not zeros.is_meta and int(zeros.short().abs().max()) > 2 ** (bits - 1):
            raise damaged(f"a zero point of `{name}` does not fit {bits} bits: {int(zeros.max())}")
        weight = _read_values(name, values, parts["weight_scale"], zeros, block)
        return weight if bits == 8 or values.dtype != torch.int8 else _in_4_bits(name, weight)

    return read
