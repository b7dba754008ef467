"""The kernel for quantized weights beside our own for bfloat16: what a linear layer costs in few bits.

Calls alternate, and a ratio is the median over the rounds, because absolute times on shared machines mean little. Each
call reads another copy of the weight, so that all of them come from memory, as in a step of a large model.

    python -m scripts.bench.quantized [--layers 768x2048] [--rows 1 5] [--seconds 1] [--megabytes 160]

Prints a Markdown table: the time ÷ that of our bfloat16 at each number of rows, the time ÷ that of the first number of
rows, and how fast the weight is read then.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from runtime.checkpoint.config import ARITHMETICS, QuantConfig
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.kernels.library import compile_kernels
from runtime.kernels.ops import fastest_arithmetic, load_kernels

FORMATS = {  # config, inputs per group (None: all), bits of a token's numbers (0: floats)
    "int8, groups of 64": (QuantConfig("int8"), 64, 16),
    "int4, groups of 64": (QuantConfig("int4"), 64, 8),
    "int8 by channel": (QuantConfig("int8"), None, 16),
    "int8, activations int8": (QuantConfig("int8"), 64, 8),
    "int4, activations int16": (QuantConfig("int4"), 64, 16),
    "int8, activations float": (QuantConfig("int8"), 64, 0),
    "int4, activations float": (QuantConfig("int4"), 64, 0),
    "e4m3": (QuantConfig("fp8"), None, 0),
}
Call = Callable[[Tensor, int], object]


def kernels_of(inputs: int, outputs: int, num_bytes: int, arithmetic: int) -> dict[str, tuple[Call, int]]:
    """Computation of a layer by each of the copies of its weight, by name, and the bytes of one."""
    ops, weight = torch.ops.specdec, torch.randn(outputs, inputs)
    kernels: dict[str, tuple[Call, int]] = {}

    def add(name: str, packed: Tensor, call: Callable[[Tensor, Tensor], object]) -> None:
        copies = [packed.clone() for _ in range(max(1, num_bytes // packed.nbytes))]
        kernels[name] = lambda x, i: call(x, copies[i % len(copies)]), packed.nbytes

    packed = ops.pack_linear(weight.bfloat16())
    add("bfloat16", packed, lambda x, packed: ops.linear(x, packed, None, outputs, arithmetic))
    for name, (precision, group_size, bits) in FORMATS.items():
        quantized = quantize_weight(weight, precision, group_size or inputs)
        packed = ops.pack_quantized(quantized.values, quantized.scales, None, None)
        add(
            name,
            packed,
            lambda x, packed, bits=bits: ops.quantized_linear(x, packed, None, outputs, arithmetic, bits),
        )
    return kernels


def measure(calls: dict[str, Call], x: Tensor, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, round by round; the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, i = time.perf_counter() + seconds, 0
    while i < 4 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call(x, i)
            times[name].append(time.perf_counter() - start)
        i += 1
    return {name: taken[1:] for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=["768x768", "768x2048", "2048x5632"], help="inputs x outputs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 5, 11, 44, 512])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each layer and number of rows")
    parser.add_argument("--megabytes", type=int, default=160, help="of copies of each weight")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as directory:
        compile_kernels(Path(directory) / "kernels.so")
        load_kernels(Path(directory) / "kernels.so")
    arithmetic = ARITHMETICS.index(fastest_arithmetic(torch.bfloat16, 11))
    print(f"{torch.get_num_threads()} threads, bfloat16 in {ARITHMETICS[arithmetic]}\n")
    print(f"| layer | weight | {' | '.join(f'÷ bfloat16, {rows}' for rows in arguments.rows)}", end=" | ")
    print(f"{' | '.join(f'{rows} ÷ {arguments.rows[0]}' for rows in arguments.rows[1:])} | GB/s, {arguments.rows[0]} |")
    print("|---" * (2 + 2 * len(arguments.rows)) + "|")
    for layer in arguments.layers:
        inputs, outputs = map(int, layer.split("x"))
        kernels = kernels_of(inputs, outputs, arguments.megabytes * 2**20, arithmetic)
        calls = {name: call for name, (call, _) in kernels.items()}
        times = [measure(calls, torch.randn(rows, inputs).bfloat16(), arguments.seconds) for rows in arguments.rows]
        for name, (_, num_bytes) in kernels.items():
            ratios = [median(a / b for a, b in zip(t[name], t["bfloat16"], strict=True)) for t in times]
            own = [median(t[name]) for t in times]
            cells = [f"{ratio:.2f}" for ratio in ratios] + [f"{one / own[0]:.2f}" for one in own[1:]]
            print(f"| {layer} | {name} | {' | '.join(cells)} | {num_bytes / own[0] / 1e9:.1f} |", flush=True)


if __name__ == "__main__":
    main()
