"""Compare the CPU's kernels with what one core of the machine can do.

python -m scripts.bench.kernels                              a layer of a Llama of 1.1 B: 2,048 inputs, 5,632 outputs
python -m scripts.bench.kernels --inputs 768 --outputs 2048 --rows 1 11

First `peak.cpp` measures the instruction that multiplies 8-bit weights, that of floats, and reading. A product's least
time is the larger of bytes / bandwidth and operations / peak; its share is that time divided by the product's time.
Peaks are those of x86's instructions, without AMX. Then attention of 16 sequences over 4,096 tokens that lie apart, and
over 4,096 that all have in common. All times are a thread's own, the least of several.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from runtime.checkpoint.config import ARITHMETICS, QuantConfig, QuantFormat
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.kernels.library import compile_kernels, cxx_compiler
from runtime.kernels.ops import fastest_arithmetic, load_kernels

PEAK = Path(__file__).with_name("peak.cpp")
GROUP = 64
NOT_IN_CACHE = 120 << 20  # bytes of weights that are multiplied in turn
# Name, format, bits of activations. On AVX-512 VNNI 16 bits of activations are two products of 8.
FORMATS: list[tuple[str, QuantFormat | None, int]] = [
    ("bfloat16", None, 16),
    ("int8", "int8", 16),
    ("int8, 8-bit activations", "int8", 8),
    ("int4, 16-bit activations", "int4", 16),
    ("int4", "int4", 8),
]


def measure_peak(directory: Path) -> dict[str, float | str]:
    program = directory / "peak"
    subprocess.run(
        [*cxx_compiler().split(), "-std=c++20", "-O3", "-march=native", str(PEAK), "-o", str(program)], check=True
    )
    peak: dict[str, float | str] = json.loads(subprocess.run([program], check=True, capture_output=True).stdout)
    return peak


def least_s(calls: list[Callable[[], object]], num_turns: int = 5) -> float:
    """Least processor seconds of one call, of some that are made in turn."""
    for call in calls:
        call()
    taken = []
    for _ in range(num_turns):
        for call in calls:
            start = time.thread_time()
            call()
            taken.append(time.thread_time() - start)
    return min(taken)


def product(name: str, weight: Tensor, rows: int) -> tuple[float, int]:
    """Least seconds to multiply `rows` tokens by a weight `[outputs, inputs]`, and the bytes of the packed weight."""
    _, quant, token_bits = next(one for one in FORMATS if one[0] == name)
    outputs, inputs = weight.shape
    tokens = torch.randn(rows, inputs).bfloat16()
    arithmetic = ARITHMETICS.index(fastest_arithmetic(torch.bfloat16, rows))
    if quant is None:
        packed = torch.ops.specdec.pack_linear(weight.bfloat16())
    else:
        rounded = quantize_weight(weight, QuantConfig(quant), GROUP)
        packed = torch.ops.specdec.pack_quantized(rounded.values, rounded.scales, None, None)

    def multiply(copy: Tensor) -> None:
        if quant is None:
            torch.ops.specdec.linear(tokens, copy, None, outputs, arithmetic)
        else:
            torch.ops.specdec.quantized_linear(tokens, copy, None, outputs, arithmetic, token_bits)

    copies = [packed.clone() for _ in range(max(1, NOT_IN_CACHE // packed.nbytes))]
    return least_s([partial(multiply, copy) for copy in copies], 5 if rows < 100 else 1), packed.nbytes


def products(peak: dict[str, float | str], inputs: int, outputs: int, rows: list[int]) -> Table:
    table = Table(
        "weights", *(f"{count}: ms, share" for count in rows), title=f"{outputs} x {inputs}, by the number of tokens"
    )
    weight = torch.randn(outputs, inputs)
    for name, quant, token_bits in FORMATS:
        cells = []
        for count in rows:
            seconds, num_bytes = product(name, weight, count)
            operations = 2 * inputs * outputs * count
            if quant is not None and token_bits == 16 and "VNNI" in str(peak["instructions"]):
                operations *= 2
            gops = float(peak["float_gops" if quant is None else "integer_gops"])
            least = max(num_bytes / float(peak["gb_per_s"]), operations / gops) * 1e-9
            cells.append(f"{seconds * 1e3:.3f}  {least / seconds:.0%}")
        table.add_row(name, *cells)
    return table


def attention(num_tokens: int, is_shared: bool, stored: torch.dtype) -> float:
    """Least seconds of attention of 16 sequences with a Llama 1.1 B's heads, after 4,096 tokens."""
    B, H, Hk, D, size, common = 16, 32, 4, 64, 32, 4096
    own = -(-num_tokens // size)
    blocks = torch.arange(common // size).repeat(B, 1)
    if not is_shared:
        blocks += torch.arange(B)[:, None] * blocks.shape[1]
    tables = torch.cat([blocks, blocks.max() + 1 + torch.arange(B * own).view(B, own)], 1)
    num_blocks = int(tables.max()) + 1
    keys, values = (torch.randn(num_blocks, Hk, *shape).mul(20).to(stored) for shape in ((D, size), (size, D)))
    scales = torch.full((num_blocks, Hk, 2, size), 0.01) if stored == torch.int8 else None
    positions = (common + torch.arange(num_tokens)).repeat(B, 1)
    slots = tables.gather(1, positions // size) * size + positions % size
    given = (torch.randn(1, B * num_tokens, heads, D).bfloat16().transpose(1, 2) for heads in (H, Hk, Hk))
    arguments = (*given, keys, values, positions, slots, tables, D**-0.5, 0)
    arithmetic = ARITHMETICS.index(fastest_arithmetic(torch.bfloat16, num_tokens))
    return least_s([lambda: torch.ops.specdec.paged_attention(*arguments, arithmetic, scales=scales)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=5632)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 11, 32, 128, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    console = Console(width=max(Console().width, 140))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        compile_kernels(directory / "kernels.so")
        load_kernels(directory / "kernels.so")
        peak = measure_peak(directory)
    console.print(
        f"{peak['instructions']}: {peak['integer_gops']} GOP/s of 8-bit weights, {peak['float_gops']} of floats, "
        f"{peak['gb_per_s']} GB/s, one of {os.cpu_count()} cores"
    )
    console.print(products(peak, arguments.inputs, arguments.outputs, arguments.rows))
    table = Table(
        "keys and values", "tokens", "apart ms", "in common ms", "ratio", title="16 sequences after 4,096 tokens"
    )
    for stored in (torch.bfloat16, torch.int8):
        for num_tokens in (1, 11):
            apart, shared = (attention(num_tokens, is_shared, stored) * 1e3 for is_shared in (False, True))
            table.add_row(str(stored)[6:], str(num_tokens), f"{apart:.2f}", f"{shared:.2f}", f"{shared / apart:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
