"""Wheels with the kernels compiled for each set of instructions, into `dist/`.

The machine's C++ compiler, or a cross compiler, makes the objects; Zig links them against the C library of
manylinux_2_28, and auditwheel checks that they ask for no newer one. Torch's libraries are found at run time, and
OpenMP's with them.

    python -m scripts.tools.wheel [machine ...]
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runtime.kernels.library import INSTRUCTION_SETS, InstructionSet, compile_objects, library_name

ROOT = Path(__file__).parents[2]
GLIBC = "2.28"
MANYLINUX = f"manylinux_{GLIBC.replace('.', '_')}"
ZIG = [sys.executable, "-m", "ziglang", "cc"]
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so")
BROUGHT_BY_TORCH = (
    "_ZSt28__throw_bad_array_new_lengthv",
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv",
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv",
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev",
    "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv",
)
"""Functions of libstdc++ that are newer than manylinux's: torch's libraries have them inside."""
SETUP = """
from setuptools import Distribution, setup

class WithKernels(Distribution):
    def has_ext_modules(self):
        return True

setup(distclass=WithKernels)
"""
"""A wheel with machine code is of one platform."""


def compiler_of(machine: str) -> str:
    return "g++" if machine == platform.machine() else f"{machine.replace('_', '-')}-linux-gnu-g++"


def link(machine: str, objects: Sequence[str], library: Path, directory: Path) -> None:
    """Link with the C library of `GLIBC`.

    Torch's libraries, and OpenMP's which they bring, are there when the library is loaded: others stand for them.
    """
    zig = [*ZIG, "-target", f"{machine}-linux-gnu.{GLIBC}"]
    torch, single_threaded = directory / "torch.c", directory / "single_threaded.c"
    torch.write_text("".join(f"void {name}(void) {{}}\n" for name in BROUGHT_BY_TORCH))
    # libstdc++ asks the C library, from 2.32 on, whether there is one thread only: there never is.
    single_threaded.write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded;\n')
    for name in TORCH_LIBRARIES:
        run([*zig, "-shared", f"-Wl,-soname,{name}", str(torch), "-o", str(directory / name)])
    compiler = compiler_of(machine)
    of_compiler = [run([compiler, f"-print-file-name={name}"]).strip() for name in ("libstdc++.so.6", "libgcc_s.so.1")]
    libraries = [*(str(directory / name) for name in TORCH_LIBRARIES), *of_compiler]
    run([*zig, "-shared", "-s", "-Wl,--no-as-needed", *objects, str(single_threaded), *libraries, "-o", str(library)])


def run(command: Sequence[str]) -> str:
    """Output of a command; exits with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_kernels(machine: str, sets: Sequence[InstructionSet], prebuilt_dir: Path) -> None:
    prebuilt_dir.mkdir()
    for instruction_set in sets:
        print(f"{machine}: kernels for {instruction_set.name}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            objects = compile_objects(compiler_of(machine), Path(directory), instruction_set.flags)
            link(machine, objects, prebuilt_dir / library_name(machine, instruction_set), Path(directory))


def make_wheel(machine: str, sets: Sequence[InstructionSet], to: Path) -> Path:
    """The wheel of the working tree with kernels for a machine's instruction sets."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tree, made = directory / "tree", directory / "made"
        tracked = run(["git", "-C", str(ROOT), "ls-files", "-z"])
        for file in filter(None, tracked.split("\0")):
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, tree / file)
        make_kernels(machine, sets, tree / "runtime" / "kernels" / "prebuilt")
        (tree / "setup.py").write_text(SETUP)
        run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(made), str(tree)])
        (wheel,) = made.iterdir()
        tags = ("--python-tag", "py3", "--abi-tag", "none", "--platform-tag", f"{MANYLINUX}_{machine}")
        run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel)])
        (wheel,) = made.iterdir()
        check_symbols(wheel)
        to.mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, to))


def check_symbols(wheel: Path) -> None:
    """Exit with what auditwheel says if the wheel needs newer libraries than its tag promises."""
    said = run([sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)])
    tag = json.loads(said)["sym_tag"]
    found = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    if found is None or [int(part) for part in found.groups()] > [int(part) for part in GLIBC.split(".")]:
        sys.exit(f"the kernels need newer libraries than {MANYLINUX}: {tag}\n{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machines", nargs="*", metavar="machine", help=", ".join(INSTRUCTION_SETS))
    parser.add_argument("--sets", nargs="+", help="of instructions, all if none is named")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for machine in arguments.machines or INSTRUCTION_SETS:
        if machine not in INSTRUCTION_SETS:
            parser.error(f"no such machine: {machine}; known are {', '.join(INSTRUCTION_SETS)}")
        if not shutil.which(compiler_of(machine)):
            sys.exit(f"{compiler_of(machine)} is missing: it compiles kernels for {machine}")
        sets = [one for one in INSTRUCTION_SETS[machine] if arguments.sets is None or one.name in arguments.sets]
        wheel = make_wheel(machine, sets, arguments.to)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
