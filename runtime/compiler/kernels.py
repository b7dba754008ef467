"""The CPU's kernels for attention and linear layers (`csrc`): compiled once per machine, loaded once per process.

A wheel brings them compiled (`prebuilt.py`), and a bundle carries them, so that opening needs no compiler. Importing
this module compiles and loads nothing; `python -m runtime.compiler.kernels` compiles them ahead of their first use.
"""

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from runtime.cache import cache_dir, digest, make_cache_dir, read_sealed, sealed
from runtime.compiler.prebuilt import MARK, prebuilt_kernels, prebuilt_machines
from runtime.config import ARITHMETICS, Arithmetic
from runtime.errors import SpecDecError
from runtime.files import write_file
from runtime.temporary import temporary_dir

SOURCES_DIR = Path(__file__).parent / "csrc"
_SOURCES = sorted(SOURCES_DIR.glob("*.cpp"))
_HEADERS = sorted(SOURCES_DIR.glob("*.h"))
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_X86 = "abm adx amx avx bmi f16c fma gfni movbe popcnt sse ssse vaes vpclmulqdq"
_ARM = "asimd atomics bf16 crc32 fp i8mm sme sve"
_MOST_COLUMNS = 128
_INSTRUCTIONS = tuple((_ARM if platform.machine() in ("aarch64", "arm64") else _X86).split())
_MEASURED_SIZE = 2048  # of the layer that is measured, inputs and outputs
_MANY_TOKENS = 256
_PASSES = 3
# Of MKL (VML), which torch takes for cosines, exponentials and the like on the CPU.
_VECTOR_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.exp, torch.expm1, torch.log),
    *(torch.log10, torch.log1p, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh),
)


def write_kernels(path: Path) -> None:
    """Write the library for this processor to `path`: the wheel's, or one that is compiled here."""
    prebuilt = prebuilt_kernels(_processor_flags(), _sources())
    if prebuilt is None:
        compile_kernels(path)
    else:
        shutil.copyfile(prebuilt, path)


def compile_kernels(path: Path, march: str = "native") -> None:
    """Write the library to `path`, from the cache if it was compiled here before. SpecDecError without a compiler.

    For the processor that it is compiled on, unless `march` names another of the compiler's.
    """
    compiler = cxx_compiler()
    name = digest((*_FLAGS, march, *compiled_by()))
    cached = cache_dir() / f"kernels-{name[:16]}.so"
    library = read_sealed(cached)
    if library is not None:
        path.write_bytes(library)
        return
    with tempfile.TemporaryDirectory(dir=temporary_dir()) as directory:
        objects = compile_objects(compiler, Path(directory), (f"-march={march}",))
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
        run_at_once(compiler, [[*_FLAGS, "-shared", "-o", str(path), *objects, *libraries]])
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        make_cache_dir()
        write_file(cached, sealed(path.read_bytes()))


def cxx_compiler() -> str:
    """The command of the C++ compiler, as Inductor takes it too."""
    return os.environ.get("CXX", "").strip() or "g++"


def has_compiler() -> bool:
    """True if the command of the C++ compiler is there, whatever it can do."""
    try:
        return shutil.which(shlex.split(cxx_compiler())[0]) is not None
    except (ValueError, IndexError):  # a quote in CXX is not closed
        return False


def no_compiler() -> SpecDecError:
    machines, here = prebuilt_machines(), platform.machine()
    of_others = machines and here not in machines
    why = f", and this installation's kernels are for {', '.join(machines)}, not for {here}" if of_others else ""
    return SpecDecError(
        f"no working C++ compiler to build with: {cxx_compiler()}{why}",
        hint="install one (the package `g++`) or name it in the variable CXX",
        code="no_compiler",
    )


def compiled_by() -> tuple[str, ...]:
    """All that machine code depends on which is made here, beside its source: the kernels that it calls, too."""
    compiler = cxx_compiler()
    return _sources(), compiler, _toolchain(compiler), torch.__version__, processor()


def _sources() -> str:
    """A digest of the kernels' source."""
    return digest(file.read_text() for file in (*_SOURCES, *_HEADERS))


def processor() -> str:
    """Processor as `-march=native` sees it; a cache may be shared by machines of several kinds."""
    return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()} {' '.join(_processor_flags())}"


def instructions() -> tuple[str, ...]:
    """The processor's sets of instructions that `-march=native` may use, by Linux's names; none where it names none."""
    return tuple(flag for flag in _processor_flags() if flag.startswith(_INSTRUCTIONS))


def _processor_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(flags.partition(":")[2].split())


def _toolchain(compiler: str) -> str:
    """Version of the compiler and of the C library; empty without a compiler."""
    said = ""
    with contextlib.suppress(OSError, ValueError):
        said = subprocess.run([*shlex.split(compiler), "-v"], capture_output=True, text=True).stderr
    return f"{said} {' '.join(platform.libc_ver())}"


def compile_objects(compiler: str, directory: Path, machine_flags: Seq[str]) -> list[str]:
    """Object files of the kernels, in two parts of about equal size that are compiled at once: parsing torch's headers
    dominates, so more would not pay. SpecDecError without a working compiler.
    """
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    flags = [*_FLAGS, f'-DSPECDEC_SOURCES="{_sources()}"', *machine_flags, include]
    pieces = [[source for source in _SOURCES if (source.stem == "paged_attention") == alone] for alone in (True, False)]
    objects = [f"{directory}/{number}.o" for number in range(len(pieces))]
    compilations = []
    for sources, to in zip(pieces, objects, strict=True):
        included = [word for source in sources for word in ("-include", str(source))]
        compilations.append([*flags, "-c", "-o", to, *included, "-x", "c++", os.devnull])
    run_at_once(compiler, compilations)
    return objects


def run_at_once(compiler: str, calls: list[list[str]]) -> None:
    """Calls of a compiler beside each other; SpecDecError with what the first that failed said."""
    with ExitStack() as stack:
        processes = []
        try:
            for arguments in calls:
                command = [*shlex.split(compiler), *arguments]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                processes.append(stack.enter_context(process))
                stack.callback(process.kill)  # before it is waited for, if another failed
        except (OSError, ValueError) as error:  # ValueError: a quote in CXX is not closed
            raise no_compiler() from error
        for process in processes:
            said = process.communicate()[1].strip()
            if process.returncode != 0:
                raise SpecDecError(
                    f"the C++ compiler cannot compile the kernels: {compiler}",
                    hint=f"it said: {said.splitlines()[0] if said else 'nothing'}",
                )


def load_kernels(path: Path) -> None:
    """Make `torch.ops.specdec` available. The first library of a process serves all engines that have the same one.

    SpecDecError if the library cannot be loaded, or is of other sources than the process's, whose layouts may differ.
    """
    if hasattr(torch.ops.specdec, "linear"):
        if f"{MARK}{torch.ops.specdec.sources()}".encode() not in path.read_bytes():
            raise SpecDecError(
                f"this process has loaded other kernels than those of: {path}",
                hint="build its engines with one version, or open them in processes of their own",
            )
        return
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise SpecDecError(f"`{path}` cannot be loaded: {error}", hint="build it again", code="engine") from error


@contextmanager
def openmp_alone() -> Iterator[None]:
    """Torch's own loops are computed by this thread, and its OpenMP's others sleep; the kernels' threads do not.

    After a loop they wait for more work on the cores that the kernels want: a prompt takes up to 1.6 times as long.
    """
    if not hasattr(torch.ops.specdec, "keep_openmp_alone"):  # a step that is no package's, as campaigns have it
        yield
        return
    before = torch.ops.specdec.keep_openmp_alone(True)
    try:
        yield
    finally:
        torch.ops.specdec.keep_openmp_alone(before)


_of_this_thread = threading.local()


def flush_denormals() -> None:
    """Take numbers close to 0 for 0, in this thread and in the kernels' threads that help it.

    Without it single steps take 50 to 100 times as long; and a number's bits must not depend on which thread computes
    it.
    """
    torch.set_flush_denormal(True)


def flush_denormals_of_openmp() -> None:
    """The same in this thread's OpenMP threads, for a step whose loops they compute."""
    if not getattr(_of_this_thread, "others_flush", False):
        torch.ops.specdec.flush_denormals_of_openmp()
        _of_this_thread.others_flush = True


def kernel_group_size(group_size: int) -> int:
    """Columns that the kernels take together: those of a weight's group, or the largest part that is short enough."""
    return next(size for size in range(min(group_size, _MOST_COLUMNS), 0, -1) if group_size % size == 0)


def describe_kernels() -> None:
    """Tell the compiler the shapes of what the kernels return; needed to export or compile, not to run."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *others: object, scales: object = None) -> Tensor:
        return query.new_empty(query.shape[2], query.shape[1], value.shape[3])

    panel = torch.ops.specdec.panel()

    def pack_linear(weight: Tensor) -> Tensor:
        return weight.new_empty(-(-weight.shape[0] // panel), weight.shape[1], panel)

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, arithmetic: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], num_outputs)

    def experts_linear(x: Tensor, packed: Tensor, chosen: Tensor, num_outputs: int, arithmetic: int) -> Tensor:
        return x.new_empty(chosen.shape[0], num_outputs)

    torch.library.register_fake("specdec::experts_linear", experts_linear, allow_override=True)
    torch.library.register_fake("specdec::paged_attention", attention, allow_override=True)
    torch.library.register_fake("specdec::pack_linear", pack_linear, allow_override=True)
    torch.library.register_fake("specdec::linear", linear, allow_override=True)

    def pack_quantized(values: Tensor, scales: Tensor, zeros: Tensor | None, offsets: Tensor | None) -> Tensor:
        bits = 4 if values.dtype == torch.uint8 else 8
        num_inputs = values.shape[1] * 8 // bits
        columns = kernel_group_size(num_inputs // scales.shape[1])
        beside = (2 if scales.dtype == torch.float16 else 4) + (0 if zeros is None and offsets is None else 4)
        num_bytes = panel * (-(-columns // 4) * 4 * bits // 8 + beside)
        return values.new_empty(-(-values.shape[0] // panel), num_inputs // columns, num_bytes)

    def quantized_linear(
        x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, arithmetic: int, token_bits: int
    ) -> Tensor:
        return x.new_empty(*x.shape[:-1], num_outputs)

    torch.library.register_fake("specdec::pack_quantized", pack_quantized, allow_override=True)
    torch.library.register_fake("specdec::quantized_linear", quantized_linear, allow_override=True)


def fastest_arithmetic(dtype: torch.dtype, num_tokens: int) -> Arithmetic:
    """The kernels' fastest for steps of `num_tokens` and for prompts, which count the same; they must be loaded.

    By measurement, because processors differ in it by factors: vdpbf16ps has half the rate of float32 on Intel's
    Sapphire Rapids and twice that on AMD's Zen 5. One arithmetic serves steps of few and of many tokens, or a token's
    logits would depend on the company it is computed in.
    """
    choices = torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]
    if len(choices) == 1:
        return ARITHMETICS[choices[0]]
    seconds = {choice: _matmul_seconds(choice, dtype, num_tokens) for choice in choices}
    return ARITHMETICS[min(choices, key=lambda choice: prod(seconds[choice]))]


def _matmul_seconds(arithmetic: int, dtype: torch.dtype, num_tokens: int) -> list[float]:
    """The shortest of a few calls, for few tokens and for many."""
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
    """Have MKL choose each of its functions while one thread asks for it, for all of this process's life.

    Where two threads are the first to ask, one may get a function of low accuracy for that one time: rotary angles of a
    process's first prompt were wrong in the fourth digit (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _VECTOR_FUNCTIONS:
            function(number)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=temporary_dir()) as _directory:
        write_kernels(Path(_directory) / "kernels.so")
