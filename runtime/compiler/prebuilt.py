"""Kernels that a wheel brings: compiled for each set of instructions, of which the processor's best one is taken.

`scripts/wheel.sh` makes them. An installation from source has none and compiles its own for the processor.
"""

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

PREBUILT_DIR = Path(__file__).parent / "prebuilt"
MARK = "specdec-kernels-of:"
"""In each library, before the digest of its sources."""


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
"""Of each kind of machine, the best first; the last one is what every such processor has."""


def library_name(machine: str, instruction_set: InstructionSet) -> str:
    """Name of the library in `PREBUILT_DIR`; it fits one minor version of torch, whose C++ classes it uses."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return f"{machine}-{instruction_set.name}-torch{minor}.so"


def prebuilt_kernels(instructions: Collection[str], sources: str, directory: Path = PREBUILT_DIR) -> Path | None:
    """The library of these sources for a processor of this machine's kind with `instructions`; None if none is here."""
    for instruction_set in INSTRUCTION_SETS.get(platform.machine(), ()):
        library = directory / library_name(platform.machine(), instruction_set)
        if instruction_set.needed <= set(instructions) and library.is_file():
            return library if f"{MARK}{sources}".encode() in library.read_bytes() else None
    return None


def prebuilt_machines(directory: Path = PREBUILT_DIR) -> list[str]:
    """Kinds of machines that this installation brings kernels for."""
    return [machine for machine in INSTRUCTION_SETS if any(directory.glob(f"{machine}-*.so"))]
