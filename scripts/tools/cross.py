"""The CPU's kernels by other compilers and for other processors, beside their formulas.

Each compiler compiles the whole library beside torch's headers. Then it makes a program of the kernels and
`tests/runtime/kernels/standalone/`, which stands in for torch; it runs here or, for another processor, under qemu. A
set whose compiler or emulator is missing is named, and left out; one whose instructions this processor lacks is
compiled and not run.
With Debian's packages clang, g++-aarch64-linux-gnu and qemu-user and PyPI's ziglang none is.

    python -m scripts.tools.cross [name ...]

Exits with 1 if one cannot be compiled or computes something wrong.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from runtime.kernels.library import SOURCES_DIR, instructions

STANDALONE = Path(__file__).parents[2] / "tests" / "runtime" / "kernels" / "standalone"
FLAGS = ("-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-static", "-pthread", "-UNDEBUG")
"""Options of all compilers. With NDEBUG, which Zig defines, torch's headers declare a function unlike its C library."""
INCLUDES = (STANDALONE, SOURCES_DIR, Path(torch.__file__).parent / "include")
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target"]
COMPILERS = {
    "gcc": ("x86_64", ["g++"]),
    "clang": ("x86_64", ["clang++"]),
    "zig": ("x86_64", [*ZIG, "x86_64-linux-musl"]),
    "gcc-arm": ("aarch64", ["aarch64-linux-gnu-g++"]),
    "zig-arm": ("aarch64", [*ZIG, "aarch64-linux-musl"]),
    "zig-macos": ("arm64", [*ZIG, "aarch64-macos"]),
}
# The compiler's name, and what the processor must have where it is one of the machine's own kind.
SETS = {
    "x86_64": {
        "x86-64": "",
        "haswell": "avx2",
        "alderlake": "avx_vnni",
        "skylake-avx512": "avx512bw",
        "cascadelake": "avx512_vnni",
        "sapphirerapids": "amx_bf16",
    },
    "aarch64": {"armv8-a": "", "armv8.2-a+fp16+bf16": "bf16"},
    "arm64": {"apple_m1": "macOS"},
}


@dataclass(frozen=True)
class Target:
    """A compiler and a set of instructions, and what runs its programs."""

    compiler: list[str]
    march: str
    runner: list[str]
    missing: str | None
    lacking: str | None = None
    """Instructions that this processor would have to have for it to run."""


def targets() -> dict[str, Target]:
    """Targets by name, such as `gcc-arm armv8-a`."""
    return {
        f"{name} {march}": _target(compiler, march, machine, needed)
        for name, (machine, compiler) in COMPILERS.items()
        for march, needed in SETS[machine].items()
    }


def _target(compiler: list[str], march: str, machine: str, needed: str) -> Target:
    missing = None
    if compiler[1:2] == ["-m"]:
        missing = None if find_spec(compiler[2]) else f"the Python package {compiler[2]}"
        # Zig's names of processors have no dashes, nor ARM's any versions.
        march = {"armv8-a": "generic", "armv8.2-a+fp16+bf16": "neoverse_v1"}.get(march, march.replace("-", "_"))
        march = f"-mcpu={march}"
    else:
        missing = None if shutil.which(compiler[0]) else compiler[0]
        march = f"-march={march}"
    runner: list[str] = []
    lacking = None
    if machine == "arm64":
        lacking = needed
    elif machine != platform.machine():
        runner = [f"qemu-{machine}"]
        missing = missing or (None if shutil.which(runner[0]) else runner[0])
    elif needed and needed not in instructions():
        lacking = needed
    return Target(compiler, march, runner, missing, lacking)


def compile_library(target: Target) -> tuple[bool, str]:
    """Compile all sources, as one file and the fastest way: what is made of them does not matter here."""
    included = [word for source in sorted(SOURCES_DIR.glob("*.cpp")) for word in ("-include", str(source))]
    flags = ["-std=c++20", "-O0", "-UNDEBUG", '-DSPECDEC_SOURCES=""', target.march, f"-I{INCLUDES[-1]}"]
    with tempfile.TemporaryDirectory() as directory:
        command = [*target.compiler, *flags, "-c", "-o", f"{directory}/library.o", *included, "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0, done.stderr or "the library compiles"


def check_syntax(target: Target) -> tuple[bool, str]:
    """Parse the program alone: whether the stand-in for torch has all that the kernels ask of it."""
    done = subprocess.run([*_command(target), "-fsyntax-only"], capture_output=True, text=True)
    return done.returncode == 0, done.stderr or "nothing is missing"


def run(target: Target) -> tuple[bool, str]:
    """Compile and run it; returns whether it computes what it shall, and what was said."""
    return _run(target, "-O1")


def run_few(target: Target) -> tuple[bool, str]:
    """The same of fewer cases, compiled the fastest way."""
    return _run(target, "-O0", "few")


def _command(target: Target) -> list[str]:
    includes = [f"-I{path}" for path in INCLUDES]
    return [*target.compiler, *FLAGS, target.march, *includes, str(STANDALONE / "main.cpp")]


def _run(target: Target, optimization: str, *arguments: str) -> tuple[bool, str]:
    if target.lacking == "macOS":
        return True, "not run: this machine lacks macOS"
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "kernels")
        compiled = subprocess.run([*_command(target), optimization, "-o", program], capture_output=True, text=True)
        if compiled.returncode != 0:
            return False, compiled.stderr
        if target.lacking:
            return True, f"compiled and not run: this processor lacks {target.lacking}"
        done = subprocess.run(
            [*target.runner, program, *arguments], capture_output=True, text=True, env=dict(os.environ)
        )
        return done.returncode == 0, (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(targets()))
    names = parser.parse_args().names
    failed = False
    for name, target in targets().items():
        if names and name not in names:
            continue
        if target.missing:
            print(f"{name}: left out, {target.missing} is missing", flush=True)
            continue
        passed, said = compile_library(target)
        if passed:
            passed, said = run(target)
        failed |= not passed
        print(f"{name}: {'passed' if passed else 'failed'}; {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
