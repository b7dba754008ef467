"""The records in `config.json` of checkpoint and engine directories, frozen once parsed.

`parse` reads what `as_json` gives. It checks every key, so a damaged or foreign file gives an error that names the file
and the key, instead of a crash later.
"""

import dataclasses
import json
import re
import sys
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

from runtime.util.errors import SpecDecError, UsageError
from runtime.util.reading import shown
from runtime.util.words import meant

CHECKPOINT_FORMAT_VERSION, ENGINE_FORMAT_VERSION = 2, 19
"""Versions of the formats: raised whenever this code could not use, or would misread, what earlier code wrote."""

# Beyond these limits nothing useful can be built, and the value is most likely a slip.
MAX_BATCH_SIZE = 1024
MAX_DRAFT_LEN = 256
MAX_TOKENS_PER_BLOCK = 1024
MAX_SEQ_LEN = 2**24


@dataclass(frozen=True)
class Between:
    """Bounds of a number in a document; both bounds are allowed values."""

    least: float
    most: float = sys.float_info.max

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Give pydantic the same bounds, for records of documents."""
        from pydantic import Field

        most = self.most if self.most < sys.float_info.max else None
        schema = handler(Annotated[source, Field(ge=self.least, le=most)])
        return schema | {"allow_inf_nan": False} if schema["type"] == "float" else schema


Count = Annotated[int, Between(0)]
Size = Annotated[int, Between(1)]
Measure = Annotated[float, Between(0)]
Share = Annotated[float, Between(0, 1)]
Seconds = Annotated[float, Between(0, 10**6)]
"""Seconds of a step, so small that sums and products of several are finite."""

Dtype = Literal["float32", "float16", "bfloat16"]
Compiler = Literal["aot", "torch-compile", "none"]
Arithmetic = Literal["float32", "avx512_bf16", "amx_bf16"]
"""Arithmetic of our matmul kernels: float32, or bfloat16 by a set of instructions. Results differ in the last bits."""
ARITHMETICS: tuple[Arithmetic, ...] = typing.get_args(Arithmetic)  # in the order of the kernels' numbers
SpeculativeDecodingMode = Literal["none", "draft_tokens_external"]
IntFormat = Literal["int8", "int4"]
QuantFormat = Literal[IntFormat, "fp8"]
QuantAlgo = Literal[
    "W8A16", "W4A16", "W4A16_AWQ", "W4A16_GPTQ", "W8A16_GPTQ", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES",
    "W4A16_MXFP4", "NVFP4", "MIXED_PRECISION",
]  # fmt: skip
"""Quantization of weights, by TensorRT-LLM's names."""
KVCacheQuantAlgo = Literal["INT8", "FP8"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
"""Number format of keys and values; `auto` is the weights' dtype."""
KV_CACHE_ALGO: dict[KVCacheDtype, KVCacheQuantAlgo | None] = {"auto": None, "int8": "INT8", "fp8": "FP8"}
Activations = Literal["float", "int8", "int16"]
LayersActivations = Literal[Activations, "mixed"]
"""Format of a layer's inputs. `mixed` is int8 for weights of 4 bits, and int16 for weights of 8 bits."""


@dataclass(frozen=True)
class Mapping:
    """Distribution of a model over devices. A directory holds all ranks: its `rank` is 0."""

    world_size: Size = 1
    tp_size: Size = 1
    rank: Count = 0


ALONE = Mapping()


@dataclass(frozen=True)
class FileRecord:
    """A file of a directory as it was written; `name` is its path inside the directory."""

    name: str
    num_bytes: Count
    sha256: str


@dataclass(frozen=True)
class QuantConfig:
    """Quantization format of a conversion. Without a format the weights are not quantized."""

    qformat: QuantFormat | None = None
    group_size: int | None = None
    """Number of inputs that share a scale; None if all inputs of an output do."""
    quantize_lm_head: bool = False
    kv_cache: KVCacheQuantAlgo | None = None
    activations: Activations | None = None
    """Format of layers' inputs; None for the fastest that adds no more error than the weights' quantization."""

    @classmethod
    def by_default(
        cls, qformat: QuantFormat | None, kv_cache_dtype: KVCacheDtype, activations: Activations | None
    ) -> "QuantConfig":
        """Formats with the usual groups of a scale: 64 inputs in int8 and int4, a whole row in fp8."""
        group_size = 64 if qformat in ("int8", "int4") else None
        return cls(qformat, group_size, False, KV_CACHE_ALGO[kv_cache_dtype], activations)


@dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint as a whole. How one layer is quantized is seen from the layer's tensors."""

    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KVCacheQuantAlgo | None = None
    group_size: Size | None = None
    """Number of inputs that share a scale; None if all inputs of an output do, or if layers differ."""
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: tuple[str, ...] = ()
    """Linear layers that are not quantized."""
    activations: LayersActivations = "float"
    """Activation format of quantized layers."""
    source: str = "rounded"
    """Origin of quantized weights: `rounded` here, or the format of the model's files; `none` for K/V alone."""
    unrounded: str | None = None
    """The model that was quantized, by its shipped name or directory; None if it is not known."""

    @property
    def weights(self) -> str | None:
        """The weights' format in words: `W4A16 weights`, or, if layers differ, `weights of 4 and 8 bits`; None without
        quantization.
        """
        if self.quant_algo == "MIXED_PRECISION":
            return f"weights of {self.bits} bits"
        return None if self.quant_algo is None else f"{self.quant_algo} weights"

    @property
    def bits(self) -> str | None:
        """Bits of a quantized weight: `4` or `8`, `4 and 8` or `4 to 8` if layers differ; None without quantization."""
        if self.quant_algo is None:
            return None
        if self.quant_algo == "MIXED_PRECISION":  # activations of integers tell: 8 bits beside 4, and 16 beside 8
            return {"int8": "4", "int16": "8", "mixed": "4 and 8"}.get(self.activations, "4 to 8")
        return "4" if "4" in self.quant_algo.removeprefix("W").partition("A")[0] else "8"


@dataclass(frozen=True)
class CheckpointConfig:
    """`config.json` of a checkpoint directory. `pretrained_config` is the model's own Hugging Face config."""

    pretrained_config: dict[str, Any]
    dtype: Dtype
    quantization: Quantization | None = None
    mapping: Mapping = Mapping()
    files: tuple[FileRecord, ...] = ()
    """Records of all files, except files that people edit; empty until the files are written."""
    config_digest: str = ""
    """Digest of all other fields, as written."""
    format_version: int = CHECKPOINT_FORMAT_VERSION


@dataclass(frozen=True)
class LayerShape:
    """K/V shape of one attention layer, and the keys that a query sees: the keys in a window, the keys since the
    beginning of its chunk, or, if both are None, all keys before it.
    """

    layer: Count
    num_kv_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    sliding_window: Size | None
    attention_chunk_size: Size | None = None

    def first_seen(self, position: int) -> int:
        """The first key that a query at this position sees."""
        if self.attention_chunk_size is not None:
            return position // self.attention_chunk_size * self.attention_chunk_size
        return 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)


@dataclass(frozen=True)
class RecurrentShape:
    """Recurrent state of one layer: for each head a matrix [key_dim, value_dim]."""

    num_heads: Size
    key_dim: Size
    value_dim: Size
    num_decays: Size = 1
    """Number of decays of a token: one for the head, or one for each number of a key."""


@dataclass(frozen=True)
class StateShape:
    """State of one layer: the inputs of its convolution for the last tokens, `width` numbers each, and perhaps a
    recurrent state. `width` is 0 for a layer without a convolution.
    """

    layer: Count
    width: Count
    num_before: Count
    """Number of earlier tokens that a token's convolution depends on."""
    recurrent: RecurrentShape | None = None
    """Shape of the recurrent state; None if the layer's output depends on the convolution's tokens alone."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of the memory of earlier tokens that layers keep: keys and values (`layers`), states (`states`)."""

    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...] = ()

    def of(self, layer: int) -> tuple[LayerShape | StateShape, ...]:
        return tuple(one for one in self.layers + self.states if one.layer == layer)


@dataclass(frozen=True)
class SelfDraft:
    """Quantization of the linear layers' weights in a self-draft copy."""

    qformat: IntFormat
    group_size: Size | None = 64
    """Number of inputs that share a scale; None if all inputs of an output do."""


@dataclass(frozen=True)
class DraftOutput:
    """Output layer for drafts of a trained head or a self-draft copy, with fewer ids or bits than the model's."""

    qformat: IntFormat | None = None
    """Format of the layer's weights; None for the model's own."""
    vocab_size: Size | None = None
    """Number of ids that may be drafted; None for all."""
    layers: IntFormat | None = None
    """Quantization of the head's other linear layers; None for the head's own format."""

    @property
    def is_quantized(self) -> bool:
        return (self.qformat or self.layers) is not None


USUAL_MAX_BATCH_SIZE, USUAL_TOKENS_PER_BLOCK = 4, 32
USUAL_MAX_DRAFT_LEN = 10
"""Longest draft that an engine takes unless a length is given: so drafters can be tried without a new build."""
_USUAL_SEQ_LEN = 4096  # the K/V cache for all positions of a long-context model would not fit


def max_draft_len_for(num_masks: int) -> int:
    """The `max_draft_len` of a draft model's engine, whose steps take `num_masks` mask tokens behind a sequence."""
    return max(num_masks, USUAL_MAX_DRAFT_LEN) if num_masks else 0


def positions_in(config: dict[str, Any]) -> int | None:
    """The number of positions that a model's `config.json` names; None if it names none. The number that can be served
    is `num_positions`, and may be smaller.
    """
    inner = config.get("text_config")
    positions = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def usual_max_seq_len(num_positions: int | None) -> int:
    """The number of the model's positions, at most 4,096; 4,096 if the model's config has no number."""
    return min(num_positions or _USUAL_SEQ_LEN, _USUAL_SEQ_LEN)


@dataclass(frozen=True)
class BuildConfig:
    """Limits fixed by `build`, which `run` may not exceed.

    `max_seq_len` includes `max_draft_len`, as in TensorRT-LLM: prompt and output together may have `max_request_len`
    tokens.
    """

    compiler: Compiler
    max_batch_size: Annotated[int, Between(1, MAX_BATCH_SIZE)]
    max_input_len: Annotated[int, Between(1, MAX_SEQ_LEN)]
    max_seq_len: Annotated[int, Between(2, MAX_SEQ_LEN + MAX_DRAFT_LEN)]
    max_draft_len: Annotated[int, Between(0, MAX_DRAFT_LEN)]
    tokens_per_block: Annotated[int, Between(1, MAX_TOKENS_PER_BLOCK)]
    speculative_decoding_mode: SpeculativeDecodingMode
    self_draft: SelfDraft | None = None
    """Quantization of the self-draft copy; None if there is no copy."""
    hidden_states: tuple[Count, ...] = ()
    """Hidden states that the step returns for a trained drafter, by transformers' numbers: number i is the input of
    layer i, or, if i is the number of layers, the output of the final norm.
    """
    draft_output: DraftOutput = DraftOutput()

    @property
    def max_request_len(self) -> int:
        return self.max_seq_len - self.max_draft_len


@dataclass(frozen=True)
class StepShape:
    """Shape that a step is compiled for."""

    dtype: Dtype
    vocab_size: Size
    layers: tuple[LayerShape, ...]
    build_config: BuildConfig
    kv_cache: KVCacheQuantAlgo | None = None
    """Quantization of keys and values; None if they have the model's dtype."""
    states: tuple[StateShape, ...] = ()

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.layers, self.states)


@dataclass(frozen=True)
class Environment:
    """Environment that a compiled step was built for; the step runs in no other environment."""

    torch: str
    transformers: str
    device: Literal["cpu", "cuda"]
    capability: str
    instructions: tuple[str, ...] = ()
    """Sets of CPU instructions that the step's code may use, by Linux's names."""


@dataclass(frozen=True)
class LogitsCheck:
    """Comparison at build of the engine's logits with the logits of transformers' eager attention: the largest absolute
    difference, and the largest difference of a row relative to the row's norm.

    If that exceeds `tolerance`, both are compared with logits of the same weights in more bits: float32 for an engine
    of 16 bits, float64 for an engine in float32.
    """

    max_abs_difference: Measure
    relative_difference: Measure
    tolerance: Measure
    from_float32: Measure | None = None
    """Largest relative difference of the engine's logits from float32's; None if it was not measured."""
    transformers_from_float32: Measure | None = None
    from_float64: Measure | None = None
    """Largest relative difference of the engine's logits from float64's; None if it was not measured."""
    transformers_from_float64: Measure | None = None


@dataclass(frozen=True)
class Quality:
    """Distance of the quantized model's probabilities from the unquantized model's, on `num_tokens` tokens."""

    num_tokens: Size
    mean_kl: Annotated[float, Between(-1)]
    """Mean Kullback-Leibler divergence, in nats. Rounding may make a value near 0 slightly negative."""
    top1_agreement: Share
    """Share of positions at which both models have the same most probable token."""
    unrounded: str
    text: str


_FEW_TOKENS = 200


@dataclass(frozen=True)
class RelativeTime:
    """Time of a step of `num_tokens` tokens with 8-bit activations ÷ its time with more bits, measured in turns."""

    num_tokens: Size
    ratio: Measure
    """The median of the turns."""
    least: Measure
    most: Measure

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True)
class InEightBits:
    """Comparison of an engine with activations of 8 bits with the same engine with the activations `instead_of`."""

    instead_of: LayersActivations
    num_tokens: Size
    """Number of tokens that were compared."""
    mean_kl: Measure
    """Mean Kullback-Leibler divergence, in nats."""
    top1_agreement: Share
    """Share of positions at which both engines have the same most probable token."""
    times: tuple[RelativeTime, ...]
    """Times of steps, shortest first: of one token, of the longest draft, and of a chunk of a prompt."""

    def __str__(self) -> str:
        *steps, prompt = self.times
        said = [f"a step of {time.num_tokens} in {time}" for time in steps]
        said.append(f"{prompt.num_tokens} tokens of a prompt in {prompt}")
        return (
            f"{', '.join(said)} of the time with {self.instead_of}; KL divergence {self.mean_kl:.2g}, the same most "
            f"probable token at {self.top1_agreement:.2%} of {self.num_tokens:,} tokens"
            + (", too few to tell small changes" if self.num_tokens < _FEW_TOKENS else "")
        )


@dataclass(frozen=True)
class StepCost:
    """Measured time of a step: `batch_size` rows with `num_tokens` tokens each, after `context_len` tokens."""

    batch_size: Size
    context_len: Count
    num_tokens: Size
    seconds: Seconds


@dataclass(frozen=True)
class MachineSpeed:
    """Speed of the machine at the time when the engine's steps were measured."""

    num_threads: Size
    memory_bytes_per_s: Measure
    """Bytes a second that all threads read and write, in a copy that is larger than the caches."""


@dataclass(frozen=True)
class EngineConfig:
    """`config.json` of an engine directory."""

    pretrained_config: dict[str, Any]
    dtype: Dtype
    build_config: BuildConfig
    layers: tuple[LayerShape, ...]
    vocab_size: Size
    environment: Environment
    logits_check: LogitsCheck
    weights_digest: str
    files: tuple[FileRecord, ...] = ()
    """Records of all files, except files that people edit; empty until the files are written."""
    step_costs: tuple[StepCost, ...] = ()
    host_s: Seconds = 0.0
    """Seconds of an iteration of the loop outside the compiled step."""
    self_draft_check: LogitsCheck | None = None
    """Logits check of the self-draft copy, against the same quantized weights."""
    self_draft_costs: tuple[StepCost, ...] = ()
    """Step times of the self-draft copy."""
    states: tuple[StateShape, ...] = ()
    machine: MachineSpeed | None = None
    """Speed of the machine on which the steps were measured."""
    quantization: Quantization | None = None
    quality: Quality | None = None
    compiler_note: str | None = None
    why_whole: str | None = None
    """Reason why an `aot` step is a single program; None if each kind of layer has a program of its own."""
    arithmetic: Arithmetic | None = None
    """Arithmetic of our kernels in linear layers; None if the engine does not use our kernels."""
    batch_invariant: bool = False
    """True if a token's logits are bitwise independent of the rest of its step: batch, draft, chunk of a prompt."""
    mapping: Mapping = Mapping()
    config_digest: str = ""
    """Digest of all other fields, as written."""
    format_version: int = ENGINE_FORMAT_VERSION

    @property
    def bits(self) -> str:
        """Bits of a weight of the linear layers, such as `16`, or `4 and 8` if layers differ."""
        quantized = None if self.quantization is None else self.quantization.bits
        return quantized or ("32" if self.dtype == "float32" else "16")

    @property
    def step_shape(self) -> StepShape:
        kv_cache = None if self.quantization is None else self.quantization.kv_cache_quant_algo
        return StepShape(self.dtype, self.vocab_size, self.layers, self.build_config, kv_cache, self.states)


Config = TypeVar("Config")
_DAMAGED = "the file was changed or is damaged; make the directory again"


def as_json(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def parse(kind: type[Config], data: Any, where: str) -> Config:
    """Build the dataclass `kind` from parsed JSON; SpecDecError names `where` and the key that is wrong."""
    if not isinstance(data, dict):
        raise SpecDecError(f"`{where}` is not a JSON object: {type(data).__name__}", hint=_DAMAGED)
    version, readable = data.get("format_version"), getattr(kind, "format_version", None)
    if readable is not None and version != readable:
        raise SpecDecError(
            f"`{where}` has a format this version cannot read (it reads {readable}): {shown(version)}",
            hint="make it again with this version of specdec, or install the version that wrote it",
        )
    from pydantic import ValidationError  # which `--help` need not wait for

    try:
        config: Config = _adapter(cast(Any, kind)).validate_json(json.dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        raise SpecDecError(_complaint(error.errors()[0], where), hint=_DAMAGED) from None
    return config


def check_arguments(kind: Any, given: typing.Mapping[str, Any]) -> None:
    """UsageError for an argument whose value does not have the type that `kind`, a dataclass or TypedDict, declares.
    The hint is the argument's own, if its description has one.
    """
    from pydantic import ValidationError

    types = typing.get_type_hints(kind, include_extras=True)
    for name, value in given.items():
        if name not in types:
            continue  # Python's own error says so
        try:
            _adapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            described = getattr(types[name], "__metadata__", ())
            forms = dict.fromkeys(filter(None, map(_form, error.errors())))
            words = re.findall("'([^']+)'", " ".join(forms))
            if words and any(getattr(one, "takes_none", False) for one in described):
                words.append("none")
                forms = dict.fromkeys([", ".join(map(repr, words[:-1])), "'none'"])
            near = " or ".join(map(repr, meant(value, words))) if isinstance(value, str) else ""
            hints = [hint for one in described if (hint := getattr(one, "hint", None))]
            hint = (hints or ["leave it out, or correct its value"])[0]
            raise UsageError(
                f"{name} must be {' or '.join(forms)}: {value!r:.100}",
                hint=f"perhaps {near}; or {hint}" if near else hint,
            ) from None


def _form(error: Any) -> str | None:
    """The form that a value should have, in words, from a pydantic error; None if the form would not help."""
    bounds = error.get("ctx", {})
    match error["type"]:
        case "none_required" | "is_instance_of":
            return None
        case "literal_error":
            return str(bounds["expected"])
        case "greater_than_equal":
            return f"at least {bounds['ge']:,.10g}"
        case "less_than_equal":
            return f"at most {bounds['le']:,.10g}"
    forms = {"int_type": "an integer", "float_type": "a number", "bool_type": "True or False", "string_type": "a text"}
    return forms.get(error["type"], "of another type")


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _complaint(error: Any, where: str) -> str:
    """A sentence for a pydantic error, which names the key."""
    if not error["loc"]:  # the only error without a key
        return f"`{where}` has a text with half of a surrogate pair, which is no character"
    *places, key = error["loc"]
    outer = ": ".join([where, *(place for place in places if isinstance(place, str))])
    inner = f"{outer}: {key}" if isinstance(key, str) else outer
    value, bounds = shown(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"`{outer}` lacks the key: {key}"
        case "unexpected_keyword_argument":
            return f"`{outer}` has an unknown key: {key}"
        case "dataclass_type":
            return f"`{inner}` is not a JSON object: {type(error['input']).__name__}"
        case "greater_than_equal":
            return f"`{inner}` must be at least {bounds['ge']:,.10g}: {value}"
        case "less_than_equal":
            return f"`{inner}` must be at most {bounds['le']:,.10g}: {value}"
    return f"`{inner}` has a value it cannot have: {value}"
