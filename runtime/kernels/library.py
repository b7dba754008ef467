"""The library of the CPU's kernels (`csrc`): from a wheel, or compiled once for each machine and cached.

A wheel has one library for each set of instructions (`scripts/wheel.sh`); the best library for the processor is taken.
An installation from source compiles its own; `python -m runtime.kernels.library` does that ahead of time.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.util.cache import OF_ALL_TO_READ, cache_dir, locked_entry, make_cache_dir, read_sealed, sealed
from runtime.util.digests import digest
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import write_file
from runtime.util.processes import paths_of_child
from runtime.util.temporary import temporary_dir

SOURCES_DIR = Path(__file__).parent / "csrc"
_SOURCES = sorted(SOURCES_DIR.glob("*.cpp"))
_HEADERS = sorted(SOURCES_DIR.glob("*.h"))
_HALF = ("linear", "quantized", "sampling")
"""Source files that take 40 of the compiler's 90 s together, and share templates. More pieces would each parse torch's
headers, which takes 5 s. With more files in this piece the compiler inlines less, and steps take about a tenth longer.
"""
_FUSED = "--param=avoid-fma-max-bits=0"
"""Option by which GNU's compiler uses fused multiply-add in all loops. Tuned for AMD's Zen 2 and 3 it would use it
for one number of rows and not for another, and a token's bits would depend on the other rows. Clang has no such tuning.
"""
_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", _FUSED, "-fopenmp", "-fPIC")
_X86 = "abm adx amx avx bmi f16c fma gfni movbe popcnt sse ssse vaes vpclmulqdq"
_ARM = "asimd atomics bf16 crc32 fp i8mm sme sve"
_INSTRUCTIONS = tuple((_ARM if platform.machine() in ("aarch64", "arm64") else _X86).split())
PREBUILT_DIR = Path(__file__).parent / "prebuilt"
_ERRORS = "kernels.errors"
"""File for the errors of the process that compiles in the background; empty unless it fails."""
_COMPILE = """
import os
from contextlib import suppress
from pathlib import Path
os.nice(10)
with suppress(OSError):
    Path("/proc/self/autogroup").write_text("10")  # else its session has an equal share of the processor; with 19, none
from runtime.kernels.library import main
main()
"""
MARK = "specdec-kernels-of:"
"""Text in each library before the digest of its sources."""


@dataclass(frozen=True)
class InstructionSet:
    """A processor's set of instructions, for which kernels are compiled."""

    name: str
    flags: tuple[str, ...]
    """Options of GNU's compiler."""
    needed: frozenset[str] = frozenset()
    """Names by which Linux lists the instructions in `/proc/cpuinfo`."""


def _instruction_set(name: str, flags: str, needed: str = "") -> InstructionSet:
    return InstructionSet(name, tuple(flags.split()), frozenset(needed.split()))


_AVX2 = "abm avx avx2 bmi1 bmi2 f16c fma movbe"
_AVX512 = f"{_AVX2} avx512bw avx512cd avx512dq avx512f avx512vl"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
_WIDE = "-march=x86-64-v4 -mprefer-vector-width=512"
INSTRUCTION_SETS = {
    "x86_64": (
        _instruction_set(
            "amx",
            f"{_WIDE} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
            f"{_BF16} amx_tile amx_bf16 amx_int8",
        ),
        _instruction_set("avx512-bf16", f"{_WIDE} -mavx512vnni -mavx512bf16", _BF16),
        _instruction_set("avx512-vnni", f"{_WIDE} -mavx512vnni", f"{_AVX512} avx512_vnni"),
        _instruction_set("avx512", _WIDE, _AVX512),
        _instruction_set("avx2-vnni", "-march=x86-64-v3 -mavxvnni", f"{_AVX2} avx_vnni"),
        _instruction_set("avx2", "-march=x86-64-v3", _AVX2),
        _instruction_set("baseline", "-march=x86-64"),
    ),
    "aarch64": (
        _instruction_set("bf16", "-march=armv8.2-a+dotprod+fp16+bf16+i8mm", "asimddp asimdhp bf16 i8mm"),
        _instruction_set("baseline", "-march=armv8-a"),
    ),
}
"""Sets of instructions for each kind of machine, the best first; the last is what every such processor has."""


def library_name(machine: str, instruction_set: InstructionSet) -> str:
    """Name in `PREBUILT_DIR` of the library, which fits one minor version of torch, whose C++ classes it uses."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return f"{machine}-{instruction_set.name}-torch{minor}.so"


def prebuilt_kernels(instructions: Collection[str], sources: str, directory: Path = PREBUILT_DIR) -> Path | None:
    """The wheel's best library for a processor with `instructions`; None if there is none, if it was made from other
    sources, or if the file is cut off.
    """
    for instruction_set in INSTRUCTION_SETS.get(platform.machine(), ()):
        library = directory / library_name(platform.machine(), instruction_set)
        if instruction_set.needed <= set(instructions) and library.is_file():
            read = library.read_bytes()
            return library if f"{MARK}{sources}".encode() in read and _is_whole(read) else None
    return None


def _is_whole(library: bytes) -> bool:
    """False for an ELF file that is cut off: loading it would kill the process by a bus error."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(library[at : at + size], "little")

    if not library.startswith(b"\x7fELF"):
        return True
    segments = (number(32, 8) + i * number(54, 2) for i in range(number(56, 2)))
    return all(number(at + 8, 8) + number(at + 32, 8) <= len(library) for at in segments)


def prebuilt_machines(directory: Path = PREBUILT_DIR) -> dict[str, list[str]]:
    """Kinds of machines for which this installation has kernels, each with versions of torch: `x86_64`, `["2.13"]`."""
    found: dict[str, set[str]] = {}
    for path in directory.glob("*-*-torch*.so"):
        machine, _, version = path.stem.partition("-")
        found.setdefault(machine, set()).add(version.rpartition("-torch")[2])
    return {machine: sorted(found[machine]) for machine in INSTRUCTION_SETS if machine in found}


def check_kernels_can_be_made() -> None:
    """SpecDecError on a machine without a compiler, unless there are kernels for its processor."""
    if not has_compiler() and not are_kernels_compiled():
        raise no_compiler()


def write_kernels(path: Path) -> None:
    """Write the library for this processor to `path`: the wheel's, or a library compiled here.

    A cached library is used even if the compiler that made it is no longer installed.
    """
    if (prebuilt := prebuilt_kernels(_processor_flags(), _sources())) is not None:
        shutil.copyfile(prebuilt, path)
    elif (kept := _kept_without_compiler()) is not None:
        path.write_bytes(kept)
    else:
        compile_kernels(path)


def are_kernels_compiled() -> bool:
    """True if `write_kernels` will find the library, and compile nothing."""
    if prebuilt_kernels(_processor_flags(), _sources()) is not None:
        return True
    return read_sealed(_in_cache("native")) is not None or _kept_without_compiler() is not None


def kernels_can_wait() -> bool:
    """True if there is a compiler and no compiled library yet: another process may compile the kernels, while the model
    computes without them.

    False if such a process has ended without a library: it failed, or it was killed, as all processes are when a
    container ends.
    """
    return has_compiler() and not are_kernels_compiled() and not _has_ended()


def _has_ended() -> bool:
    """True if a process was started by `begin_kernels`, is no longer running, and has made no kernels."""
    try:
        with (cache_dir() / _ERRORS).open("rb") as errors:
            fcntl.flock(errors, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # some file systems have no locks
        pass
    return True


def begin_kernels() -> None:
    """Start a process, with a low priority, that compiles the kernels into the cache and outlives this one. Does
    nothing if there is such a process.

    That process holds the lock that is taken here, on the file for its errors, until it ends.
    """
    environment = os.environ | {"PYTHONPATH": paths_of_child(), "PYTHONSAFEPATH": "1"}
    with contextlib.suppress(OSError), (make_cache_dir() / _ERRORS).open("ab") as errors:
        fcntl.flock(errors, fcntl.LOCK_EX | fcntl.LOCK_NB)
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _COMPILE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            cwd="/",
            start_new_session=True,
        )


def _in_cache(march: str) -> Path:
    compiler = cxx_compiler()
    return cache_dir() / f"{_name_of(march)}-{digest((compiler, _toolchain(compiler)))[:8]}.so"


def _name_of(march: str) -> str:
    """Prefix of a cached library's name: everything that it depends on except the compiler."""
    return f"kernels-{digest((*_FLAGS, march, _sources(), torch.__version__, processor()))[:16]}"


def _kept_without_compiler() -> bytes | None:
    """A library in the cache, if there is no compiler to make one; None if there is a compiler, or no such library."""
    if has_compiler():
        return None
    all_kept = map(read_sealed, sorted(cache_dir().glob(f"{_name_of('native')}-*.so")))
    return next((kept for kept in all_kept if kept is not None), None)


def compile_kernels(path: Path, march: str = "native") -> None:
    """Write the library to `path`, from the cache if it was compiled here before. SpecDecError without a compiler. It
    is made for this processor, unless `march` names another of the compiler's.
    """
    compiler = cxx_compiler()
    cached = _in_cache(march)
    library = read_sealed(cached)
    with ExitStack() as stack:
        if library is None:
            with contextlib.suppress(SpecDecError):  # a cache that cannot be written costs time, and nothing else
                stack.enter_context(locked_entry(cached, _say_that_it_waits))
            library = read_sealed(cached)
        if library is not None:
            path.write_bytes(library)
            return
        if march == "native":
            warnings.warn("compiling the CPU kernels: 1 to 4 minutes, once", SpecDecWarning, stacklevel=2)
        with tempfile.TemporaryDirectory(dir=temporary_dir()) as directory:
            objects = compile_objects(compiler, Path(directory), (f"-march={march}",))
            libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
            run_at_once(compiler, [[*_FLAGS, "-shared", "-o", str(path), *objects, *libraries]])
        with contextlib.suppress(OSError):
            write_file(cached, sealed(path.read_bytes()), OF_ALL_TO_READ)
            (cache_dir() / _ERRORS).unlink(missing_ok=True)


def _say_that_it_waits() -> None:
    warnings.warn(
        "waiting for another process, which is compiling the CPU kernels: 1 to 4 minutes, once",
        SpecDecWarning,
        stacklevel=2,
    )


def cxx_compiler() -> str:
    """The command of the C++ compiler: CXX or `g++`, as in Inductor."""
    return os.environ.get("CXX", "").strip() or "g++"


def has_compiler() -> bool:
    """True if the command of the C++ compiler exists, whether it works or not."""
    try:
        return shutil.which(shlex.split(cxx_compiler())[0]) is not None
    except (ValueError, IndexError):  # a quote in CXX is not closed
        return False


def says_no_compiler(error: BaseException) -> bool:
    """True if the error says that the command of the C++ compiler does not exist; it may be ours or Inductor's."""
    if isinstance(error, FileNotFoundError):
        return error.filename in cxx_compiler().split()[:1]
    return type(error).__name__ == "InvalidCxxCompiler"


def no_compiler() -> SpecDecError:
    machines, here, torchs = prebuilt_machines(), platform.machine(), torch.__version__.partition("+")[0]
    why = ""
    if machines and here not in machines:
        why = f", and this installation's kernels are for {', '.join(machines)}, not for {here}"
    elif machines and not torchs.startswith(tuple(f"{one}." for one in machines[here])):
        why = f", and this installation's kernels are for torch {', '.join(machines[here])}, not for {torchs}"
    return SpecDecError(
        f"no working C++ compiler to build with: {cxx_compiler()}{why}",
        hint='install one (the package `g++`), name it in the variable CXX, or use no compiler: `compiler="none"`',
        code="no_compiler",
    )


def _sources() -> str:
    """A digest of the kernels' source."""
    return digest(file.read_text("utf-8") for file in (*_SOURCES, *_HEADERS))


def processor() -> str:
    """Processor as `-march=native` sees it. Machines of several kinds may share a cache."""
    return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()} {' '.join(_processor_flags())}"


def instructions() -> tuple[str, ...]:
    """Sets of instructions that `-march=native` may use on this processor, by Linux's names."""
    return tuple(flag for flag in _processor_flags() if flag.startswith(_INSTRUCTIONS))


def _processor_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(flags.partition(":")[2].split())


def _toolchain(compiler: str) -> str:
    """Versions of the compiler and of the C library; without a compiler, of the C library alone."""
    said = ""
    with contextlib.suppress(OSError, ValueError):
        said = subprocess.run([*shlex.split(compiler), "-v"], capture_output=True, text=True).stderr
    return f"{said} {' '.join(platform.libc_ver())}"


def compile_objects(compiler: str, directory: Path, machine_flags: Seq[str]) -> list[str]:
    """Object files of the kernels, compiled in parallel. SpecDecError without a working compiler."""
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    flags = [*_FLAGS, f'-DSPECDEC_SOURCES="{_sources()}"', *machine_flags, include]
    pieces = [[source for source in _SOURCES if (source.stem in _HALF) == inside] for inside in (True, False)]
    objects = [f"{directory}/{number}.o" for number in range(len(pieces))]
    compilations = []
    for sources, to in zip(pieces, objects, strict=True):
        included = [word for source in sources for word in ("-include", str(source))]
        compilations.append([*flags, "-c", "-o", to, *included, "-x", "c++", os.devnull])
    run_at_once(compiler, compilations)
    return objects


def _kill_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def run_at_once(compiler: str, calls: list[list[str]]) -> None:
    """Run several calls of a compiler in parallel; SpecDecError with the message of the first that failed."""
    with ExitStack() as stack:
        processes = []
        try:
            for arguments in calls:
                command = [*shlex.split(compiler), *arguments]
                # A group of processes, which is killed as a whole: g++ has a child that compiles.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
                )
                processes.append(stack.enter_context(process))
                stack.callback(_kill_group, process)  # if another call failed, before this one is waited for
        except (OSError, ValueError) as error:  # ValueError: a quote in CXX is not closed
            raise no_compiler() from error
        for process in processes:
            said = process.communicate()[1].strip()
            if process.returncode != 0:
                raise SpecDecError(
                    f"the C++ compiler cannot compile the kernels: {compiler}; it said: {_first_error(said)}",
                    hint='repair it, name another compiler in the variable CXX, or use no compiler: `compiler="none"`',
                    code="compiler_fails",
                )


def _first_error(said: str) -> str:
    """The line of a compiler's output that has the error; lines before it name the files that include the source."""
    lines = said.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "nothing")


def main() -> None:
    """Compile the kernels into the cache, unless they are there."""
    with tempfile.TemporaryDirectory(dir=temporary_dir()) as _directory:
        write_kernels(Path(_directory) / "kernels.so")


if __name__ == "__main__":
    main()
