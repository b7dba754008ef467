"""The CPU's kernels for attention and linear layers (`csrc`): loaded once per process, described to the compiler, and
measured. Importing this module loads nothing. The library comes from `runtime.kernels.library`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from runtime.checkpoint.config import ARITHMETICS, Arithmetic
from runtime.kernels.library import MARK, are_kernels_compiled, write_kernels
from runtime.util.errors import SpecDecError
from runtime.util.temporary import temporary_dir

_MOST_COLUMNS = 128
_MEASURED_SIZE = 2048  # of the layer that is measured, inputs and outputs
_MANY_TOKENS = 256
_PASSES = 3
# Functions that torch computes by MKL (VML) on the CPU.
_VECTOR_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.exp, torch.expm1, torch.log),
    *(torch.log10, torch.log1p, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh),
)


def load_kernels(path: Path) -> None:
    """Make `torch.ops.specdec` available. A process loads one library, which serves all engines with the same library.
    SpecDecError if it cannot be loaded, or if it was made from other sources than the library of this process, whose
    layouts may differ.
    """
    if hasattr(torch.ops.specdec, "linear"):
        if f"{MARK}{torch.ops.specdec.sources()}".encode() not in path.read_bytes():
            raise SpecDecError(
                f"this process has already loaded kernels of another build, and cannot load: {path}",
                hint="build the engines of one process with one version of specdec, or open each in a process of "
                "its own",
            )
        return
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise SpecDecError(f"`{path}` cannot be loaded: {error}", hint="build it again", code="engine") from error


def load_compiled_kernels() -> None:
    """Make `torch.ops.specdec` available if the kernels are compiled already, for work that torch can do as well."""
    if not hasattr(torch.ops.specdec, "linear") and are_kernels_compiled():
        with TemporaryDirectory(dir=temporary_dir()) as directory:
            write_kernels(Path(directory) / "kernels.so")
            load_kernels(Path(directory) / "kernels.so")


@contextmanager
def openmp_alone() -> Iterator[None]:
    """Within the block, this thread computes torch's own loops while torch's OpenMP threads sleep; the kernels' threads
    do not.

    Otherwise these threads would wait for more work on the cores that the kernels need: a prompt takes up to 1.6 times
    as long. Blocks are not nested: the end of each gives the threads back, wherever a Ctrl-C comes.
    """
    if not hasattr(torch.ops.specdec, "keep_openmp_alone"):  # no kernels are loaded, as in campaigns
        yield
        return
    keep_alone = torch.ops.specdec.keep_openmp_alone
    try:
        keep_alone(True)
        yield
    finally:
        try:
            keep_alone(False)
        except KeyboardInterrupt:  # it may come before the call, or behind it
            keep_alone(False)
            raise


_of_this_thread = threading.local()


def flush_denormals() -> None:
    """Treat numbers close to 0 as 0, in this thread and in the kernels' threads that help it.

    Otherwise some steps take 50 to 100 times as long. All threads must do the same, since a number's bits must not
    depend on the thread that computes it.
    """
    torch.set_flush_denormal(True)


def flush_denormals_of_openmp() -> None:
    """`flush_denormals` for this thread's OpenMP threads, for a step whose loops they compute."""
    if not getattr(_of_this_thread, "others_flush", False):
        torch.ops.specdec.flush_denormals_of_openmp()
        _of_this_thread.others_flush = True


def kernel_group_size(group_size: int) -> int:
    """Columns that the kernels take together: a weight's group, or its largest divisor of at most 128."""
    return next(size for size in range(min(group_size, _MOST_COLUMNS), 0, -1) if group_size % size == 0)


def describe_kernels() -> None:
    """Tell the compiler the shapes of the kernels' results, which it needs to export or compile a step."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *others: object, **more: object) -> Tensor:
        return query.new_empty(query.shape[2], query.shape[1], value.shape[3])

    panel = torch.ops.specdec.panel()

    def pack_linear(weight: Tensor) -> Tensor:
        return weight.new_empty(-(-weight.shape[0] // panel), weight.shape[1], panel)

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, *settings: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], num_outputs)

    def experts_linear(x: Tensor, packed: Tensor, chosen: Tensor, num_outputs: int, *settings: int) -> Tensor:
        return x.new_empty(chosen.shape[0], num_outputs)

    def like_first(inputs: Tensor, *others: object) -> Tensor:
        return torch.empty_like(inputs)

    def linear_attention(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
        return value.new_empty(value.shape)

    def pack_quantized(values: Tensor, scales: Tensor, zeros: Tensor | None, offsets: Tensor | None) -> Tensor:
        bits = 4 if values.dtype == torch.uint8 else 8
        num_inputs = values.shape[1] * 8 // bits
        columns = kernel_group_size(num_inputs // scales.shape[1])
        beside = (2 if scales.dtype == torch.float16 else 4) + (0 if zeros is None and offsets is None else 4)
        num_bytes = panel * (-(-columns // 4) * 4 * bits // 8 + beside)
        return values.new_empty(-(-values.shape[0] // panel), num_inputs // columns, num_bytes)

    def pack_codes(values: Tensor, scales: Tensor, book: Tensor) -> Tensor:
        num_inputs = values.shape[1] * 2
        columns = kernel_group_size(num_inputs // scales.shape[1])
        num_bytes = book.shape[0] + panel * (-(-columns // 4) * 2 + (2 if scales.dtype == torch.float16 else 4))
        shape = (-(-values.shape[0] // panel), num_inputs // columns, num_bytes // 2)
        return values.new_empty(shape, dtype=torch.int16)

    def quantized_rows(ids: Tensor, packed: Tensor, num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
        return ids.new_empty(*ids.shape, num_inputs, dtype=dtype)

    shapes: dict[str, Callable[..., Tensor]] = {
        "paged_attention": attention,
        "pack_linear": pack_linear,
        "linear": linear,
        "experts_linear": experts_linear,
        "short_conv": like_first,
        "selective_scan": like_first,
        "linear_attention": linear_attention,
        "pack_quantized": pack_quantized,
        "pack_codes": pack_codes,
        "quantized_linear": linear,
        "quantized_rows": quantized_rows,
    }
    for name, shape_of in shapes.items():
        torch.library.register_fake(f"specdec::{name}", shape_of, allow_override=True)


def fastest_arithmetic(dtype: torch.dtype, num_tokens: int) -> Arithmetic:
    """The kernels' fastest arithmetic for steps of `num_tokens` and for prompts, weighted equally; kernels must be
    loaded.

    It is measured, because processors differ by factors: vdpbf16ps has half the rate of float32 on Intel's Sapphire
    Rapids and twice that rate on AMD's Zen 5. Steps of few and of many tokens use the same arithmetic, since otherwise
    a token's logits would depend on the other tokens in its step.
    """
    choices = torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]
    if len(choices) == 1:
        return ARITHMETICS[choices[0]]
    seconds = {choice: _matmul_seconds(choice, dtype, num_tokens) for choice in choices}
    return ARITHMETICS[min(choices, key=lambda choice: prod(seconds[choice]))]


def _matmul_seconds(arithmetic: int, dtype: torch.dtype, num_tokens: int) -> list[float]:
    """Seconds of the fastest of a few calls, for few tokens and for many."""
    packed = torch.ops.specdec.pack_linear(torch.full((_MEASURED_SIZE, _MEASURED_SIZE), 1.0, dtype=dtype))
    shortest = []
    for count in (num_tokens, _MANY_TOKENS):
        x, times = torch.full((count, _MEASURED_SIZE), 1.0, dtype=dtype), []
        for _ in range(_PASSES + 1):  # the first warms up
            start = time.perf_counter()
            torch.ops.specdec.linear(x, packed, None, _MEASURED_SIZE, arithmetic)
            times.append(time.perf_counter() - start)
        shortest.append(min(times[1:]))
    return shortest


@cache
def choose_vector_math() -> None:
    """Have MKL choose each of its functions in a single thread, for the rest of this process's life.

    If two threads are the first to call a function, one may once get a version of low accuracy: rotary angles of a
    process's first prompt were wrong in the fourth digit (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _VECTOR_FUNCTIONS:
            function(number)
