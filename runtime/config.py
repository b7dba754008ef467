"""The settings that travel in `config.json` of checkpoint and engine directories, frozen once parsed.

`as_json` and `parse` are inverse; parsing checks every key, so that a damaged or foreign file is an error that names
the file and the key and not a crash later.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from runtime.errors import SpecDecError

CHECKPOINT_FORMAT_VERSION = 1
# 1: K/V blocks were laid out token by token; 2: linear layers were torch's; 3: the package held the weights
ENGINE_FORMAT_VERSION = 4

Dtype = Literal["float32", "float16", "bfloat16"]
Compiler = Literal["aot", "torch-compile", "none"]
SpeculativeDecodingMode = Literal["none", "draft_tokens_external"]


@dataclass(frozen=True)
class Mapping:
    """How a model is spread over devices; one rank so far."""

    world_size: int = 1
    tp_size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class CheckpointConfig:
    """`config.json` of a checkpoint directory. `pretrained_config` is Hugging Face's own."""

    pretrained_config: dict[str, Any]
    dtype: Dtype
    quantization: None = None
    mapping: Mapping = Mapping()
    format_version: int = CHECKPOINT_FORMAT_VERSION


@dataclass(frozen=True)
class LayerShape:
    """K/V shape of one attention layer, and how far back it sees (None: everything)."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    sliding_window: int | None


@dataclass(frozen=True)
class BuildConfig:
    """What `build` fixed; `run` may not exceed it.

    `max_seq_len` includes `max_draft_len`, as in TensorRT-LLM: prompt and output together may have
    `max_request_len` tokens.
    """

    compiler: Compiler
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    tokens_per_block: int
    speculative_decoding_mode: SpeculativeDecodingMode

    @property
    def max_request_len(self) -> int:
        return self.max_seq_len - self.max_draft_len


@dataclass(frozen=True)
class Environment:
    """What a compiled step was made for; it runs nowhere else."""

    torch: str
    transformers: str
    device: Literal["cpu", "cuda"]
    capability: str


@dataclass(frozen=True)
class LogitsCheck:
    """Largest difference between the engine's logits and transformers' eager attention, when it was built."""

    max_abs_difference: float
    relative_difference: float
    tolerance: float


@dataclass(frozen=True)
class StepCost:
    """What a step took when the engine was built, of `num_tokens` in each of `batch_size` rows, after `context_len`."""

    batch_size: int
    context_len: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineConfig:
    """`config.json` of an engine directory."""

    pretrained_config: dict[str, Any]
    dtype: Dtype
    build_config: BuildConfig
    layers: tuple[LayerShape, ...]
    vocab_size: int
    environment: Environment
    logits_check: LogitsCheck
    step_costs: tuple[StepCost, ...] = ()
    host_s: float = 0.0
    """Seconds of a loop's turn beside the compiled step."""
    compiler_note: str | None = None
    mapping: Mapping = Mapping()
    format_version: int = ENGINE_FORMAT_VERSION


Config = TypeVar("Config")


def as_json(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def parse(kind: type[Config], data: Any, where: str) -> Config:
    """Build the dataclass `kind` from parsed JSON; SpecDecError names `where` and the key that is wrong."""
    if not isinstance(data, dict):
        raise SpecDecError(
            f"`{where}` is not a JSON object: {type(data).__name__}",
            hint="the file was changed or is damaged; make the directory again",
        )
    version = data.get("format_version")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if "format_version" in fields and version != (readable := fields["format_version"].default):
        raise SpecDecError(
            f"`{where}` has a format this version cannot read (it reads {readable}): {version}",
            hint="make it again with this version of specdec, or install the version that wrote it",
        )
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise SpecDecError(
            f"`{where}` has an unknown key: {unknown[0]}",
            hint="the file was changed or is damaged; make the directory again",
        )
    values = {}
    for field in fields.values():
        if field.name in data:
            values[field.name] = _parse_value(hints[field.name], data[field.name], f"{where}: {field.name}")
        elif field.default is dataclasses.MISSING:
            raise SpecDecError(
                f"`{where}` lacks the key: {field.name}",
                hint="the file was changed or is damaged; make the directory again",
            )
    return kind(**values)


def _parse_value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return parse(typing.cast(type[Any], kind), value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_parse_value(arguments[0], item, where) for item in value)
    if origin is Literal:
        valid = value in arguments
    elif origin is types.UnionType:
        valid = any(_is_a(value, argument) for argument in arguments)
    else:
        valid = _is_a(value, origin or kind)
    if not valid:
        raise SpecDecError(
            f"`{where}` has a value it cannot have: {value!r}",
            hint="the file was changed or is damaged; make the directory again",
        )
    return value


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
