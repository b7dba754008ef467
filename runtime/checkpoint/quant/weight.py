"""A linear layer's low-bit weight: its form in a checkpoint, whatever tool quantized it, and the numbers it stands for.

    weight[n, k] = scales[n, g] x (values[n, j] - zeros[n, g])                    zeros are 0 where there are none, or
    weight[n, k] = scales[n, g] x (values[n, j] + 2^(bits - 1)) + offsets[n, g]   where there are offsets, or
    weight[n, k] = scales[n, g] x book[values[n, j]]                              where there is a code book

in the group g = j // group_size; k is j, or `order[j]` where inputs were reordered. It is computed in float32, and then
rounded to the wanted dtype.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from runtime.checkpoint.config import Activations, QuantFormat
from runtime.util.errors import SpecDecError

ACTIVATIONS: dict[QuantFormat, Activations] = {"int8": "int16", "int4": "int8", "fp8": "float"}
"""Default activations for each format of weights. Integers are the fastest. Beside 4-bit weights, 8-bit activations add
little error; beside 8-bit weights they add much.
"""
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "weight_"
_VALUES = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
Present = Callable[..., AbstractContextManager[object]]
"""Context manager that gives tensors their numbers in memory for its block."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of eight neighbouring numbers within AWQ's 32-bit words."""


def damaged(said: str) -> SpecDecError:
    """The error for quantized weights that contradict each other, or the config."""
    return SpecDecError(said, hint="the model is damaged, or its config.json is another model's; download it again")


@dataclass(frozen=True)
class QuantizedWeight:
    """Integers of 8 or 4 bits, or e4m3, with scales for groups of inputs."""

    values: Tensor
    """Values, int8 or e4m3 [outputs, inputs], or uint8 [outputs, inputs / 2]: two values of 4 bits plus 8 in a byte,
    the first in the lower half.
    """
    scales: Tensor
    """Scales [outputs, groups] in float32, float16 or bfloat16; they may be negative."""
    zeros: Tensor | None = None
    """Zero points, int16 [outputs, groups]."""
    offsets: Tensor | None = None
    """Offsets, float32 [outputs, groups]. A weight with offsets has no zeros."""
    order: Tensor | None = None
    """The input that each column belongs to, int32 [inputs]; None if columns are in the inputs' order."""
    book: Tensor | None = None
    """Code book, int8 [16], of a weight without zeros and offsets: the numbers that 4-bit values stand for."""

    @property
    def kind(self) -> QuantFormat:
        return _VALUES[self.values.dtype]  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight, (outputs, inputs)."""
        outputs, columns = self.values.shape
        return outputs, columns * 2 if self.kind == "int4" else columns

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def integers(self) -> Tensor:
        """The values one by one, [outputs, inputs]: int8, or e4m3 unchanged."""
        if self.kind != "int4":
            return self.values
        halves = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(1)
        return halves.view(torch.int8).sub_(8) if self.book is None else self.book[halves.int()]

    def in_stored_order(self) -> Tensor:
        """The weight as float32 [outputs, inputs], its columns in stored order."""
        outputs, inputs = self.shape
        weight = self.integers().float().view(outputs, -1, self.group_size)  # a copy, which is written over
        scales = self.scales.float()[:, :, None]
        if self.offsets is not None:
            weight.add_(self._half_range).mul_(scales).add_(self.offsets[:, :, None])
        elif self.zeros is not None:
            weight.sub_(self.zeros.float()[:, :, None]).mul_(scales)
        else:
            weight.mul_(scales)
        return weight.view(outputs, inputs)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight's numbers, [outputs, inputs]."""
        weight = self.in_stored_order()
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)

    @property
    def _half_range(self) -> int:
        return 8 if self.kind == "int4" else 128

    def tensors(self) -> dict[str, Tensor]:
        """The weight's tensors by the suffixes of their names in a file."""
        named = {f"{_PREFIX}{field.name}": getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def by_output(self) -> dict[str, Tensor]:
        """The tensors that have a row for each output."""
        parts = {"values": self.values, "scales": self.scales, "zeros": self.zeros, "offsets": self.offsets}
        return {name: part for name, part in parts.items() if part is not None}

    def rows(self, order: Tensor) -> "QuantizedWeight":
        """The weight with only these outputs, in this order."""
        return replace(self, **{name: part[order] for name, part in self.by_output().items()})

    def check(self, name: str) -> None:
        """SpecDecError, naming the layer, if its tensors' shapes, dtypes or numbers cannot be those of a weight."""
        self._check_forms(name)
        if self.values.is_meta:
            return
        for part in ("scales", "offsets"):
            tensor = getattr(self, part)
            if tensor is not None and not bool(tensor.isfinite().all()):
                share = float((~tensor.isfinite()).sum()) / tensor.numel()
                raise damaged(f"{share:.2%} of the {part} of `{name}` are NaN or infinite")
        if self.kind == "fp8" and bool(self.values.isnan().any()):
            raise damaged(f"8-bit numbers of `{name}` are NaN")
        if self.zeros is not None and int(self.zeros.abs().max()) > self._half_range:
            raise damaged(f"a zero point of `{name}` is out of the range of {self.kind}: {int(self.zeros.abs().max())}")
        if self.book is not None and (self.book.shape != (16,) or self.zeros is not None or self.offsets is not None):
            raise damaged(
                f"the code book of `{name}` should have 16 numbers, without zero points or offsets: "
                f"{list(self.book.shape)}"
            )
        inputs = self.shape[1]
        if self.order is not None and not torch.equal(
            self.order.sort().values, torch.arange(inputs, dtype=torch.int32)
        ):
            raise damaged(f"the order of inputs of `{name}` does not name each of its {inputs} inputs once")

    def _check_forms(self, name: str) -> None:
        (outputs, inputs), groups = self.shape, self.scales.shape[-1]
        grouped = [self.scales, *(part for part in (self.zeros, self.offsets) if part is not None)]
        if any(part.shape != (outputs, groups) for part in grouped) or not groups or inputs % groups:
            raise damaged(
                f"the scales of `{name}` do not fit its {outputs} x {inputs} values: {list(self.scales.shape)}"
            )
        if self.scales.dtype not in SCALE_DTYPES:
            raise damaged(f"the scales of `{name}` are no floating-point numbers: {self.scales.dtype}")
        if self.order is not None and self.order.shape != (inputs,):
            raise damaged(f"the order of inputs of `{name}` should have {inputs} entries: {list(self.order.shape)}")


def pack_int4(integers: Tensor) -> Tensor:
    """Two values in a byte, uint8 [outputs, inputs / 2], from int8 [outputs, inputs] with values from -8 to 7."""
    counts = (integers + 8).to(torch.uint8)
    return counts[:, ::2] | counts[:, 1::2] << 4


def from_integers(
    integers: Tensor, scales: Tensor, *, bits: int, zeros: Tensor | None = None, order: Tensor | None = None
) -> QuantizedWeight:
    """The weight with these int8 integers [outputs, inputs], which fit into `bits`, 4 or 8."""
    values = pack_int4(integers) if bits == 4 else integers.contiguous()
    return QuantizedWeight(values, scales.contiguous(), zeros=zeros, order=order)


def take_quantized(
    tensors: dict[str, Tensor], present: Present = lambda *_: nullcontext()
) -> dict[str, QuantizedWeight]:
    """Quantized weights by layers' names, taken out of `tensors`, and checked within `present`."""
    parts: dict[str, dict[str, Tensor]] = {}
    suffixes = {f".{_PREFIX}{field.name}": field.name for field in fields(QuantizedWeight)}
    for name in list(tensors):
        for suffix, field in suffixes.items():
            if name.endswith(suffix):
                parts.setdefault(name.removesuffix(suffix), {})[field] = tensors.pop(name)
    return {name: _from_parts(name, found, present) for name, found in parts.items()}


def _from_parts(name: str, parts: Mapping[str, Tensor], present: Present) -> QuantizedWeight:
    if not {"values", "scales"} <= parts.keys() or parts["values"].dtype not in _VALUES:
        raise SpecDecError(f"a layer has no values or no scales: {name}", hint="convert the model again")
    weight = QuantizedWeight(**parts)
    looked_at = [part for key, part in parts.items() if key != "values" or weight.kind == "fp8"]
    with present(*looked_at):
        weight.check(name)
    return weight


# Integers from the words that they are packed into. No value is looked at, so this works on the device `meta` too.


def unpack(words: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits, uint8 [rows, numbers], from words int32 [rows, words], lowest bits first."""
    numbers: Tensor = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    halves: Tensor = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
    return halves


def unpack_awq(words: Tensor) -> Tensor:
    """Numbers of 4 bits as from `unpack`, from words in AWQ's order."""
    numbers = unpack(words, 4)
    ordered: Tensor = numbers.view(numbers.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)
    return ordered


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Signed numbers, int8: codes from 0 on, less half of their range, which is 8 for 4 bits."""
    centred: Tensor = numbers.to(torch.int16) - 2 ** (bits - 1)
    return centred.to(torch.int8)


def scales_of(scales: Tensor, outputs: int, block_rows: int = 1) -> Tensor:
    """Scales [outputs, groups] from one scale, one for each output, or one for each block of `block_rows` outputs."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    if scales.dim() == 1:
        return scales[:, None]
    if scales.shape[0] != outputs and block_rows > 1:
        return scales.repeat_interleave(block_rows, 0)[:outputs]
    return scales
