"""GGUF files: what their header says, read without torch and with nothing trusted that it says.

A file is a header (counts, metadata, a table of tensors) and then the tensors, each at a multiple of the alignment.
Sizes are checked against the file's before anything is allocated or read.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import SpecDecError
from runtime.files import Stamp, stamp_of

_ORIGINAL = "give the model that it was made of, config.json and safetensors"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
CHAT_TEMPLATE = "tokenizer.chat_template"
_MAX_ENTRIES = 2**20  # of metadata and of tensors each
_MAX_ITEMS = 2**24  # of an array: a vocabulary has fewer


@dataclass(frozen=True)
class BlockType:
    """How numbers are stored: so many in blocks of so many bytes."""

    name: str
    num_numbers: int
    num_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2), 8: BlockType("Q8_0", 32, 34),
    2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
}  # fmt: skip
"""By their numbers in files."""
_NOT_READ = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file; `shape` is rows first."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.num_numbers * self.type.num_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """What a file says before its tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_gguf(path: Path) -> GGUFHeader:
    """The header; SpecDecError for a file that is none, or cut, or of types that are not read."""
    return _read(path, stamp_of(path.stat()))


@cache  # one command asks several times
def _read(path: Path, stamp: Stamp) -> GGUFHeader:
    num_bytes = stamp.num_bytes
    with path.open("rb") as file:
        reader = _Reader(file, path, num_bytes)
        if reader.take(4) != _MAGIC:
            raise SpecDecError(
                f"this is not a GGUF file: {path}", hint="it does not begin with `GGUF`; download it again"
            )
        version = reader.number("I")
        if version not in _VERSIONS:
            raise SpecDecError(f"GGUF files of version {version} are not read: {path}", hint="versions 2 and 3 are")
        num_tensors, num_entries = reader.count(_MAX_ENTRIES), reader.count(_MAX_ENTRIES)
        metadata = dict(reader.entry() for _ in range(num_entries))
        table = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            reader.fail(f"its alignment is {alignment}")
        start = -(-file.tell() // alignment) * alignment
    if metadata.get("split.count", 0) not in (0, 1):
        raise SpecDecError(
            f"GGUF models in several files are not read: {path}", hint="llama.cpp merges them (`llama-gguf-split`)"
        )
    tensors = {name: _placed(name, shape, number, start + offset, path) for name, shape, number, offset in table}
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > num_bytes:
            reader.fail(f"it ends before `{tensor.name}` does")
    return GGUFHeader(metadata, tensors)


def _placed(name: str, shape: tuple[int, ...], number: int, offset: int, path: Path) -> GGUFTensor:
    if number not in TYPES:
        said = _NOT_READ.get(number, f"the number {number}")
        read = ", ".join(one.name for one in TYPES.values())
        raise SpecDecError(f"`{name}` is of a type that is not read, {said}: {path}", hint=f"{read} are")
    if not shape or shape[-1] % TYPES[number].num_numbers:
        raise SpecDecError(
            f"`{path}` is damaged: `{name}` of {list(shape)} is not made of whole blocks", hint="download it again"
        )
    return GGUFTensor(name, shape, TYPES[number], offset)


class _Reader:
    """Reads values one after the other, no further than the file goes."""

    def __init__(self, file: BinaryIO, path: Path, num_bytes: int) -> None:
        self._file, self._path, self._num_bytes = file, path, num_bytes

    def fail(self, how: str) -> None:
        raise SpecDecError(f"`{self._path}` is damaged: {how}", hint="download it again")

    def take(self, count: int) -> bytes:
        if count > self._num_bytes - self._file.tell():
            self.fail("it ends within its header")
        return self._file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, most: int) -> int:
        found = int(self.number("Q"))
        if found > most:
            self.fail(f"it says that it holds {found:,} of something")
        return found

    def text(self) -> str:
        return self.take(self.count(self._num_bytes)).decode("utf-8", errors="replace")

    def entry(self) -> tuple[str, Any]:
        return self.text(), self._value(self.number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            item, length = self.number("I"), self.count(_MAX_ITEMS)
            if item in _NUMBERS:
                form = _NUMBERS[item]
                return list(struct.unpack(f"<{length}{form}", self.take(struct.calcsize(f"<{length}{form}"))))
            if item == _TEXT:
                return [self.text() for _ in range(length)]
            self.fail(f"an array of values of the kind {item}")
        if kind not in _NUMBERS:
            self.fail(f"a value of the kind {kind}")
        return self.number(_NUMBERS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.text(), self.number("I")
        if num_dims > 4:
            self.fail(f"`{name}` has {num_dims} dimensions")
        shape = tuple(reversed([self.count(2**40) for _ in range(num_dims)]))
        return name, shape, self.number("I"), self.number("Q")


# The model's config


def config_of(path: Path) -> dict[str, Any]:
    """The Hugging Face config that the metadata stands for; SpecDecError for other families."""
    header = read_gguf(path)
    if header.architecture not in _MODEL_TYPES:
        read = ", ".join(f"`{name}`" for name in _MODEL_TYPES)
        raise SpecDecError(
            f"GGUF models of this family are not read, `{header.architecture}`: {path}", hint=f"{read} are"
        )
    metadata, tensors = header.metadata, header.tensors

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{header.architecture}.{key}", default)
        if value is None:
            raise SpecDecError(
                f"`{path}` lacks a value of its model: {header.architecture}.{key}", hint="download it again"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecDecError(
                f"`{path}` has a value that is no number: {header.architecture}.{key}", hint="download it again"
            )
        return value

    if metadata.get(f"{header.architecture}.rope.scaling.type") not in (None, "none"):
        raise SpecDecError(f"GGUF models with scaled rotary positions are not read: {path}", hint=_ORIGINAL)
    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "token_embd.weight" not in tensors:
        raise SpecDecError(f"`{path}` lacks the tensor: token_embd.weight", hint="it holds no language model")
    config = {
        "model_type": _MODEL_TYPES[header.architecture],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // max(heads, 1)),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_of(tensors.get(ROPE_FACTORS), get("rope.freq_base", 10000.0), path),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    if header.architecture == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    for key, name in _TOKENS.items():
        if (token := metadata.get(f"tokenizer.ggml.{name}")) is not None:
            config[key] = token
    return config


ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in all models that have factors (Llama 3.1 and later)."""


def _rope_of(factors: GGUFTensor | None, theta: float, path: Path) -> dict[str, Any]:
    """Rotary parameters; the file has the factors of Llama 3.1 and later number by number, and not what they are of."""
    if factors is None:
        return {"rope_type": "default", "rope_theta": theta}
    if factors.type.name != "F32" or not factors.num_bytes:
        raise SpecDecError(f"GGUF models with rotary factors of their own are not read: {path}", hint=_ORIGINAL)
    with path.open("rb") as file:
        file.seek(factors.offset)
        found = struct.unpack(f"<{prod(factors.shape)}f", file.read(factors.num_bytes))
    wanted = [_llama3_factor(theta ** (i / len(found)) * 2 * math.pi, max(found)) for i in range(len(found))]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
        raise SpecDecError(f"GGUF models with rotary factors of their own are not read: {path}", hint=_ORIGINAL)
    return {"rope_type": "llama3", "rope_theta": theta, "factor": max(found), **_LLAMA3}


def _llama3_factor(wavelength: float, factor: float) -> float:
    """How much longer a wavelength becomes: nothing if short, `factor` if long, and in between something between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    if turns > high or turns < low:
        return 1.0 if turns > high else factor
    share = (turns - low) / (high - low)
    return 1 / ((1 - share) / factor + share)


_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def name_of(tensor: GGUFTensor, path: Path) -> str:
    """What Hugging Face's models call it."""
    layer, _, part = tensor.name.rpartition(".")
    if layer in _WHOLE:
        return f"{_WHOLE[layer]}.{part}"
    block, _, inner = layer.removeprefix("blk.").partition(".")
    if layer.startswith("blk.") and block.isdigit() and inner in _OF_BLOCK:
        return f"model.layers.{block}.{_OF_BLOCK[inner]}.{part}"
    raise SpecDecError(f"`{path}` has a tensor that its model has not: {tensor.name}", hint=_ORIGINAL)


def rows_of(tensor: GGUFTensor, config: dict[str, Any]) -> tuple[int, ...] | None:
    """For queries and keys of Llama, whose rows llama.cpp reorders: from where each row comes. None: they stay.

    Two heads of 4 rows: the halves (0, 1) and (2, 3) of the first lie as 0, 2, 1, 3: (0, 2, 1, 3, 4, ...).
    """
    kind = tensor.name.split(".")[-2]
    if config["model_type"] != "llama" or kind not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    half = tensor.shape[0] // heads // 2
    return tuple((head * half + i) * 2 + side for head in range(heads) for side in range(2) for i in range(half))


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_config_of(path: Path) -> dict[str, Any]:
    """What llama.cpp's converter kept of the model's generation_config.json (`general.sampling.*`), by its names."""
    metadata = read_gguf(path).metadata
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    # Numbers of 32 bits, by the digits that were written.
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items() if v is not None}
