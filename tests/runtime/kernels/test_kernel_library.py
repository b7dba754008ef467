"""Kernels that a wheel brings: which one a processor gets, and that no compiler is called for them.

What a processor has is GNU's compiler's to say: it knows each by its name.
"""

import platform
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from sentences import Said
from waiting import wait_until

from runtime.kernels import library
from runtime.kernels.library import (
    INSTRUCTION_SETS,
    MARK,
    InstructionSet,
    compile_kernels,
    cxx_compiler,
    library_name,
    no_compiler,
    prebuilt_kernels,
    prebuilt_machines,
    run_at_once,
)
from runtime.util.errors import SpecDecError, SpecDecWarning

# Linux's names of what GNU's compiler says by macros: `__AVX512BW__` is avx512bw; these have other names.
LINUX_NAMES = {
    "__LZCNT__": "abm", "__BMI__": "bmi1", "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16",
    "__AVXVNNI__": "avx_vnni", "__AMX_TILE__": "amx_tile", "__AMX_BF16__": "amx_bf16", "__AMX_INT8__": "amx_int8",
}  # fmt: skip
PROCESSORS = {
    "nehalem": "baseline",
    "haswell": "avx2",
    "znver3": "avx2",
    "alderlake": "avx2-vnni",
    "skylake-avx512": "avx512",
    "cascadelake": "avx512-vnni",
    "icelake-server": "avx512-vnni",
    "cooperlake": "avx512-bf16",
    "sapphirerapids": "amx",
}
is_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="g++ for x86-64 is not this machine's compiler")


def macros(flags: Sequence[str]) -> set[str]:
    """Instructions beyond what every x86-64 has, by the macros that say so: `__AVX2__`, `__FMA__`."""
    return _defined(flags) - _defined(["-march=x86-64"])


def _defined(flags: Sequence[str]) -> set[str]:
    command = ["g++", *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[1] for line in lines if line.endswith(" 1")}


def as_linux_names(found: set[str]) -> set[str]:
    return {LINUX_NAMES.get(macro, macro.strip("_").lower()) for macro in found}


def all_kernels(directory: Path, sources: str = "these") -> Path:
    for machine, sets in INSTRUCTION_SETS.items():
        for one in sets:
            (directory / library_name(machine, one)).write_text(f"{machine} {one.name} {MARK}{sources}")
    return directory


@is_x86
@pytest.mark.parametrize(("processor", "expected"), PROCESSORS.items())
def test_a_processor_gets_the_best_that_it_can_run(processor: str, expected: str, tmp_path: Path) -> None:
    has = macros([f"-march={processor}"])
    library = prebuilt_kernels(as_linux_names(has), "these", all_kernels(tmp_path))
    assert library is not None
    (taken,) = (one for one in INSTRUCTION_SETS["x86_64"] if library.name == library_name("x86_64", one))
    assert taken.name == expected
    assert macros(taken.flags) <= has


@is_x86
@pytest.mark.parametrize("one", INSTRUCTION_SETS["x86_64"], ids=lambda one: one.name)
def test_all_that_the_compiler_may_use_is_asked_for(one: InstructionSet) -> None:
    """A processor, or a virtual machine, with a part of it only would stop at an illegal instruction."""
    used = {name for name in as_linux_names(macros(one.flags)) if not name.startswith(("fp_fast", "gcc_"))}
    # Which every processor with AVX2 has.
    with_avx = {"crc32", "lahf_sahf", "popcnt", "sse3", "sse4_1", "sse4_2", "ssse3", "xsave"}
    assert used - with_avx <= one.needed


@pytest.mark.parametrize(
    ("machine", "has", "expected"),
    [
        ("aarch64", "fp asimd", "aarch64-baseline"),
        ("aarch64", "fp asimd asimddp asimdhp", "aarch64-baseline"),  # Graviton 2
        ("aarch64", "fp asimd asimddp asimdhp bf16 i8mm sve", "aarch64-bf16"),  # Graviton 3
        ("riscv64", "", None),
    ],
)
def test_other_machines(
    machine: str, has: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    library = prebuilt_kernels(has.split(), "these", all_kernels(tmp_path))
    assert (library and library.name.rpartition("-")[0]) == expected


def test_kernels_of_other_sources_or_another_torch_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_kernels(tmp_path, sources="other")
    assert prebuilt_kernels((), "these", tmp_path) is None
    assert prebuilt_kernels((), "other", tmp_path) is not None
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert prebuilt_kernels((), "other", tmp_path) is None


def test_a_wheel_for_another_machine_or_torch_says_so_where_a_compiler_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.98.1+cpu")
    monkeypatch.setattr(prebuilt_machines, "__defaults__", (all_kernels(tmp_path),))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert "kernels are for" not in no_compiler().message
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    said(no_compiler().message)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    said(no_compiler().message)


def test_a_library_that_is_cut_off_is_not_taken(kernels: Path, tmp_path: Path) -> None:
    """Its mark may stand in what is left of it, and to load it would end the process."""
    whole, sources = kernels.read_bytes(), library._sources()
    mark = f"{MARK}{sources}".encode()
    least = whole.index(mark) + len(mark)
    for num_bytes, is_taken in ((len(whole), True), (max(least, len(whole) // 2), False), (least, False)):
        for path in all_kernels(tmp_path).glob("*.so"):
            path.write_bytes(whole[:num_bytes])
        assert is_taken == (prebuilt_kernels((), sources, tmp_path) is not None), num_bytes


SUM = """
typedef float Lanes __attribute__((vector_size(32)));
Lanes sum(const Lanes* a, const float* b, long n) {
  Lanes sum{};
  for (long k = 0; k < n; ++k) sum += a[k] * b[k];
  return sum;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's processors")
@pytest.mark.parametrize("processor", ["znver3", "haswell"])
def test_sums_are_fused_whatever_processor_the_compiler_tunes_for(processor: str) -> None:
    """GNU's splits some loops' multiply-add for a Zen, and not the same sum where it is unrolled: bits would differ."""
    to_assembly = ("-S", "-x", "c++", "-o", "-", "-")
    command = [*shlex.split(cxx_compiler()), *library._FLAGS, f"-march={processor}", *to_assembly]
    done = subprocess.run(command, input=SUM, capture_output=True, text=True, check=True)
    assert "vfmadd" in done.stdout
    assert "vmulps" not in done.stdout


def test_two_that_want_the_kernels_at_once_compile_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A compiler that waits at a gate stands for g++."""
    compiler, cache, opened, calls = (tmp_path / name for name in ("compiler", "cache", "opened", "calls"))
    compiler.write_text(
        f"""#!/bin/sh
[ "$1" = -v ] && exit
for word; do [ "$last" = -o ] && output=$word; last=$word; done
case "$*" in *" -c "*) echo >> {calls}; until [ -e {opened} ]; do sleep 0.01; done ;; esac
echo made > "$output"
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))

    def num_calls() -> int:
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    with ThreadPoolExecutor(2) as pool, pytest.warns(SpecDecWarning) as warned:
        first = pool.submit(compile_kernels, tmp_path / "first")
        wait_until(lambda: num_calls() == 2 or first.done())  # its two parts
        second = pool.submit(compile_kernels, tmp_path / "second")
        wait_until(lambda: len(warned.list) > 1 or num_calls() > 2 or second.done())
        opened.touch()
        first.result(), second.result()
    said(warned)
    assert num_calls() == 2
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["made\n"] * 2


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    compiler = tmp_path / "compiler"
    said_before = "In file included from kernels.cpp:"  # as g++ begins
    compiler.write_text(f"#!/bin/sh\necho '{said_before}' >&2; echo 'error: no such flag' >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SpecDecError) as raised:
        compile_kernels(tmp_path / "kernels.so")
    said(raised, "no such flag")
    assert raised.value.code == "compiler_fails"
    assert not (tmp_path / "kernels.so").exists()


def test_what_a_compiler_began_ends_with_it(tmp_path: Path) -> None:
    """g++ compiles in a process of its own: none is left when another piece failed."""
    begins = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    fails = f"until [ -s {tmp_path}/child ]; do sleep 0.01; done; exit 1"
    with pytest.raises(SpecDecError):
        run_at_once("sh", [["-c", fails], ["-c", begins]])
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
