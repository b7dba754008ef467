"""Quantized tensors of a GGUF file as our quantized weights: the same numbers, with blocks taken apart into integers
and scales.

llama.cpp's `ggml-common.h` defines the blocks; the `gguf` package reads the same numbers from them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.gguf.config import experts_alternate, name_of, rows_of, shift_of
from runtime.checkpoint.gguf.families import EXPERTS, SHARED_EXPERT_GATE
from runtime.checkpoint.gguf.reader import ORIGINAL, BlockType, GGUFTensor, damaged, read_gguf
from runtime.checkpoint.gguf.ropes import LONGROPE, ROPE_FACTORS
from runtime.checkpoint.quant.mxfp4 import E2M1_TWICE, half_powers
from runtime.checkpoint.quant.planning import PrequantizedLayer
from runtime.checkpoint.quant.weight import QuantizedWeight, pack_int4, signed
from runtime.checkpoint.source import SourceTensor
from runtime.util.errors import SpecDecError
from runtime.util.files import stamp_of

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = "blocks"
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers that the codes of IQ4_NL and IQ4_XS stand for (`kvalues_iq4nl` in llama.cpp)."""


def read_gguf_tensors(path: Path, config: dict[str, Any]) -> tuple[dict[str, PrequantizedLayer], list[SourceTensor]]:
    """The quantized matrices by their layers' names, embeddings among them, and all other tensors, by Hugging Face's
    names. Experts are single tensors of a layer. SpecDecError for a tensor that the model does not have, or that does
    not fit.
    """
    layers, floats, experts = {}, [], dict[str, dict[str, tuple[BlockType, SourceTensor]]]()
    for tensor in read_gguf(path).tensors.values():
        if tensor.name in (ROPE_FACTORS, *LONGROPE):
            continue  # the config has their numbers
        name, rows, shift = name_of(tensor, config, path), rows_of(tensor, config), shift_of(tensor, config)
        source = replace(_source(tensor), name=name, rows=rows, shift=shift)
        if name.endswith(f"{SHARED_EXPERT_GATE}.weight"):
            source = replace(source, shape=(1, source.shape[-1]))
        if (kind := tensor.name.split(".")[-2]) in EXPERTS and not tensor.name.endswith(".scale"):
            experts.setdefault(name, {})[kind] = tensor.type, source
        elif tensor.type.name in _FLOATS:
            floats.append(source)
        elif len(tensor.shape) != 2:
            raise SpecDecError(
                f"`{tensor.name}` is quantized ({tensor.type.name}) and not a matrix, {list(tensor.shape)}: {path}",
                hint=ORIGINAL,
            )
        else:
            read = partial(read_blocks, tensor.type)
            layers[source.name.removesuffix(".weight")] = PrequantizedLayer({_BLOCKS: source}, read, "MIXED_PRECISION")
    alternate = experts_alternate(config)
    made = [
        _experts(name, [parts[kind] for kind in EXPERTS if kind in parts], path, alternate=alternate)
        for name, parts in experts.items()
    ]
    return layers, floats + made


@dataclass(frozen=True)
class ExpertBlocks:
    """The weights of all experts of a layer from one tensor, or from the gates' and the up-projections', whose outputs
    follow each other in each expert. With `alternate` they alternate, and each expert's matrix is [inputs, outputs].
    """

    kinds: tuple[BlockType, ...]
    alternate: bool = False

    @property
    def can_be_kept(self) -> bool:
        """True if all tensors have one type, so that the weights can stay quantized."""
        return len(set(self.kinds)) == 1 and self.kinds[0].name not in _FLOATS

    def read(self, parts: dict[str, Tensor]) -> QuantizedWeight:
        """The weights of all experts as one weight [experts x outputs, inputs], if `can_be_kept`."""
        weights = [read_blocks(self.kinds[0], {_BLOCKS: part.flatten(0, 1)}) for part in parts.values()]
        by_expert = 0, (next(iter(parts.values())).shape[0], -1)
        rows = {
            name: self._joined([torch.unflatten(one.by_output()[name], *by_expert) for one in weights]).flatten(0, 1)
            for name in weights[0].by_output()
        }
        return replace(weights[0], **rows)

    def __call__(self, *parts: Tensor) -> Tensor:
        """The numbers [experts, outputs, inputs], with `alternate` [experts, inputs, outputs], or a bias's [experts,
        outputs]. Numbers of blocks become bfloat16.
        """
        numbers = self._joined([_numbers(kind, part) for kind, part in zip(self.kinds, parts, strict=True)])
        return numbers.mT.contiguous() if self.alternate and numbers.dim() == 3 else numbers

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, 2).flatten(1, 2) if self.alternate else torch.cat(parts, 1)


def _numbers(kind: BlockType, part: Tensor) -> Tensor:
    if kind.name in _FLOATS:
        return part
    weight = read_blocks(kind, {_BLOCKS: part.flatten(0, 1)})
    return torch.unflatten(weight.dequantize(torch.bfloat16), 0, (part.shape[0], -1))


def _num_numbers(kind: BlockType, stored: int) -> int:
    """Length of a row of `stored` numbers, or, for blocks, of `stored` bytes."""
    return stored if kind.name in _FLOATS else stored // kind.num_bytes * kind.num_numbers


def _experts(name: str, parts: list[tuple[BlockType, SourceTensor]], path: Path, *, alternate: bool) -> SourceTensor:
    """The experts' parameter `name`; SpecDecError if the tensors that it consists of do not fit each other."""
    kinds, sources = tuple(kind for kind, _ in parts), tuple(source for _, source in parts)
    num_dims = 2 if name.endswith("_bias") else 3
    shapes = [
        (*one.shape[:2], *(_num_numbers(kind, size) for size in one.shape[2:]))
        for kind, one in parts
        if len(one.shape) == num_dims and (num_dims == 3 or kind.name in _FLOATS)
    ]
    forms = {(shape[0], *shape[2:]) for shape in shapes} | ({shape[1] for shape in shapes} if alternate else set())
    if len(shapes) != len(parts) or len(forms) != (2 if alternate else 1):
        raise damaged(f"the tensors of `{name}` do not fit each other: {[list(one.shape) for one in sources]}: {path}")
    outputs = sum(shape[1] for shape in shapes)
    shape = (shapes[0][0], outputs, *shapes[0][2:])
    if alternate and num_dims == 3:
        shape = (shape[0], shape[2], shape[1])
    dtype = _FLOATS.get(kinds[0].name, torch.bfloat16)
    return replace(
        sources[0], name=name, shape=shape, dtype=dtype, made_of=sources, make=ExpertBlocks(kinds, alternate)
    )


def _source(tensor: GGUFTensor) -> SourceTensor:
    """The tensor as the file has it: numbers, or the bytes of blocks."""
    shape, dtype = tensor.shape, _FLOATS.get(tensor.type.name)
    if dtype is None:
        shape = (*shape[:-1], shape[-1] // tensor.type.num_numbers * tensor.type.num_bytes)
    stamp = stamp_of(tensor.path.stat())
    return SourceTensor(tensor.name, tensor.name, tensor.path, shape, dtype or torch.uint8, tensor.offset, stamp)


def read_blocks(kind: BlockType, parts: dict[str, Tensor]) -> QuantizedWeight:
    """The weight from the bytes of blocks, uint8 [outputs, bytes]."""
    data = parts[_BLOCKS]
    return _form(kind, tuple(data.shape)) if data.is_meta else _read(kind, data)


@lru_cache(maxsize=64)
def _form(kind: BlockType, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight without values. Cached: a file has hundreds of weights of few shapes, and each takes a millisecond."""
    return _read(kind, torch.empty(shape, dtype=torch.uint8, device="meta"))


def _read(kind: BlockType, data: Tensor) -> QuantizedWeight:
    return _READERS[kind.name](data.view(data.shape[0], -1, kind.num_bytes))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The two bytes of each block from `start` on, as float16 [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper halves, [..., 2 x bytes]."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _few(counts: Tensor, scales: Tensor, offsets: Tensor | None = None) -> QuantizedWeight:
    """A 4-bit weight from codes 0 to 15, [rows, groups, group_size]."""
    values = pack_int4(signed(counts.flatten(1), 4))
    return QuantizedWeight(values, scales.contiguous(), offsets=None if offsets is None else offsets.contiguous())


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return _few(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    return _few(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2).float())


def _of_5_bits(blocks: Tensor, start: int) -> Tensor:
    """Codes 0 to 31, [rows, blocks, 32]: four bytes from `start` on hold the highest bits, the next the others."""
    high = blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return _nibbles(blocks[..., start + 4 :]) | high.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight((_of_5_bits(blocks, 2).to(torch.int8) - 16).flatten(1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    counts = signed(_of_5_bits(blocks, 4).flatten(1), 8)
    return QuantizedWeight(counts, _half(blocks, 0), offsets=_half(blocks, 2).float())


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, float32 [rows, 8 x blocks]: 6 bits each, in bytes 4 to 15 of a block."""
    low, minimum, both = torch.unflatten(blocks[..., 4:16], -1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, both & 15 | low >> 2 & 48), dim=-1)
    minima = torch.cat((minimum & 63, both >> 4 | minimum >> 2 & 48), dim=-1)
    of_all = _half(blocks, 0).float()[..., None], _half(blocks, 2).float()[..., None]
    return (of_all[0] * scales.float()).flatten(1), (of_all[1] * minima.float()).flatten(1)


def _by_pairs(data: Tensor) -> Tensor:
    """Codes [rows, blocks, 8, 32] from bytes [rows, blocks, 128]: the lower halves of 32, then the upper halves."""
    halves = _nibbles(torch.unflatten(data, -1, (-1, 32)))
    return torch.unflatten(halves, -1, (2, 32)).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, minima = _scales_and_minima(blocks)
    return _few(_by_pairs(blocks[..., 16:]), scales, -minima)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, minima = _scales_and_minima(blocks)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[..., None, 16:48] >> bits & 1
    counts = _by_pairs(blocks[..., 48:]) | high << 4
    return QuantizedWeight(signed(counts.flatten(1), 8), scales, offsets=-minima)


def _by_shifts(data: Tensor) -> Tensor:
    """Codes [rows, groups, 16] from bytes [rows, blocks, 64]: 2 bits of 32 bytes, from the lowest, are two groups."""
    counts = torch.unflatten(data, -1, (-1, 1, 32)) >> _shifts(data, 0, 2, 4, 6) & 3
    return torch.unflatten(counts.flatten(-3), -1, (-1, 16)).flatten(1, 2)


def _q2_k(blocks: Tensor) -> QuantizedWeight:
    both, of_all = blocks[..., :16], (_half(blocks, 80).float()[..., None], _half(blocks, 82).float()[..., None])
    scales, minima = of_all[0] * (both & 15).float(), of_all[1] * (both >> 4).float()
    return _few(_by_shifts(blocks[..., 16:80]), scales.flatten(1), -minima.flatten(1))


def _q3_k(blocks: Tensor) -> QuantizedWeight:
    """Codes of 3 bits, whose highest bits are in the first 32 bytes; scales of 6 bits in bytes 96 to 107, the highest 2
    bits of each in the last four.
    """
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = (_nibbles(low) | high << 4).to(torch.int8) - 32
    scales = (_half(blocks, 108).float()[..., None] * scales.float()).flatten(1)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    top = torch.unflatten((blocks[..., None, :32] >> bits & 1).flatten(-2), -1, (-1, 16)).flatten(1, 2)
    counts = _by_shifts(blocks[..., 32:96]) | top << 2
    return QuantizedWeight(pack_int4(counts.flatten(1).to(torch.int8) - 4), scales)


def _by_book(codes: Tensor, scales: Tensor, book: tuple[int, ...]) -> QuantizedWeight:
    """A weight of codes [rows, groups, group_size] that stand for numbers in `book`."""
    numbers = torch.tensor(book, dtype=torch.int8, device=codes.device)
    return QuantizedWeight(pack_int4(signed(codes.flatten(1), 4)), scales.contiguous(), book=numbers)


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    return _by_book(_nibbles(blocks[..., 2:]), _half(blocks, 0), _IQ4)


def _iq4_xs(blocks: Tensor) -> QuantizedWeight:
    """Scales of 6 bits for 32 numbers each: the highest 2 bits in bytes 2 and 3, the others in the next four."""
    high = (blocks[..., 2:4, None] >> _shifts(blocks, 0, 2, 4, 6)[:, 0] & 3).flatten(-2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    scales = _half(blocks, 0).float()[..., None] * ((low | high << 4).to(torch.int8) - 32).float()
    codes = _nibbles(torch.unflatten(blocks[..., 8:], -1, (8, 16)))
    return _by_book(codes.flatten(1, 2), scales.flatten(1), _IQ4)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    return _by_book(_nibbles(blocks[..., 1:]), half_powers(blocks[..., 0]), E2M1_TWICE)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    low = torch.unflatten(blocks[..., :128], -1, (2, 1, 64)) >> _shifts(blocks, 0, 4) & 15
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)) >> _shifts(blocks, 0, 2, 4, 6) & 3
    counts = low.flatten(-3) | high.flatten(-3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (_half(blocks, 208).float()[..., None] * scales).flatten(1)
    return QuantizedWeight((counts.to(torch.int8) - 32).flatten(1), scales)


def _shifts(like: Tensor, *shifts: int) -> Tensor:
    return torch.tensor(shifts, dtype=torch.uint8, device=like.device)[:, None]


_READERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
