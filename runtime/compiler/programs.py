"""Graphs compiled by Inductor: each a library, kept in the cache by all that it is made of.

A layer of one kind and width is the same program in every model, and in every copy and rank of one.
"""

import errno
import io
import os
import shlex
import subprocess
import zipfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from runtime.kernels.library import SOURCES_DIR, compiled_by, cxx_compiler
from runtime.util.cache import OF_ALL_TO_READ, cache_dir, digest, locked_entry, read_sealed, sealed
from runtime.util.errors import SpecDecError
from runtime.util.files import write_file

if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA

LIBRARY, OPERATIONS = "program.so", "program.json"
"""The machine code, and those of the operations it calls that it does not call by address; often there are none."""

Files = dict[str, bytes]


def compile_programs(programs: Seq[GraphModule]) -> list[Files]:
    """The files of graphs for the CPU, whose constants are handed over when they are opened: from the cache if they
    were compiled here before. The kernels must be loaded."""
    from runtime.compiler.cutting import describe  # not to open an engine

    # The numbers of short weights too: else they are written into a program that others, of other numbers, find.
    options = cpu_options() | {"always_keep_tensor_constants": True}
    names = [digest([describe(program), repr(options), *compiled_by()]) for program in programs]
    entries = [cache_dir() / "programs" / name[:16] for name in names]
    with ExitStack() as locks:  # of several processes that want a program one makes it
        for entry in sorted(entries):  # in one order, or two would wait for each other
            with suppress(SpecDecError):  # a cache that cannot be written costs time, and nothing else
                locks.enter_context(locked_entry(entry, on_wait=lambda: None))
        found = {entry: _unpacked(data) for entry in entries if (data := read_sealed(entry)) is not None}
        missing = {entry: program for entry, program in zip(entries, programs, strict=True) if entry not in found}
        for entry, files in zip(missing, _compile(list(missing.values()), options), strict=True):
            found[entry] = files
            with suppress(OSError):
                write_file(entry, sealed(_packed(files)), OF_ALL_TO_READ)
    return [found[entry] for entry in entries]


def _compile(programs: Seq[GraphModule], options: dict[str, Any]) -> list[Files]:
    """Inductor writes a program's source while those before it are compiled, as many files at once as cores."""
    from runtime.compiler.capture import examples

    options = options | {
        "aot_inductor.package_cpp_only": True,  # Inductor itself would compile one file after the other
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    }
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = []
        for program in programs:
            inputs = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
            made = run_inductor(program, examples(inputs), options)
            compile_, link, library = _compiler_calls([file for file in made if isinstance(file, str)], options)
            begun.append((pool.submit(_run, compile_), link, library))
        for compilation, link, _ in begun:
            compilation.result()
            _run(link)
    return [_files_of(library) for _, _, library in begun]


def _compiler_calls(made: list[str], options: dict[str, Any]) -> tuple[list[str], list[str], Path]:
    """Calls of the compiler and of the linker, as Inductor itself would make them, and the library."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions  # only to build
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    def builder(sources: list[str], *, compile_only: bool = False) -> CppBuilder:
        settings = CppTorchDeviceOptions(
            aot_mode=True,
            device_type="cpu",
            vec_isa=pick_vec_isa(),
            compile_only=compile_only,
        )
        return CppBuilder(Path(sources[0]).stem, sources, settings, str(Path(sources[0]).parent))

    with torch._inductor.config.patch(options), instructions_looked_up(), named_compiler():
        (wrapper,) = (file for file in made if file.endswith(".wrapper.cpp"))
        objects = [file for file in made if file.endswith(".o")]
        compiler = builder([wrapper], compile_only=True)  # its loops too, so with all optimizations
        linker = builder([compiler.get_target_file_path(), *objects])
        compile_, link = (shlex.split(one.get_command_line()) for one in (compiler, linker))
        return compile_, link, Path(linker.get_target_file_path())


def _run(command: list[str]) -> None:
    in_english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=in_english)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise RuntimeError(f"the C++ compiler says: {next(iter(done.stderr.splitlines()), 'nothing')}")


def _files_of(library: Path) -> Files:
    files = {LIBRARY: library, OPERATIONS: library.with_suffix(".json")}
    return {name: path.read_bytes() for name, path in files.items() if path.exists()}


def run_inductor(program: GraphModule, examples: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """The names of the files that Inductor makes of a graph, and weights."""
    with instructions_looked_up(), one_loop_a_region(), named_compiler():
        made = torch._inductor.aot_compile(program, examples, options=options)
    assert isinstance(made, list)  # because it is to be packaged
    return made


def _packed(files: Files) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return memory.getvalue()


def _unpacked(data: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_options() -> dict[str, Any]:
    """Inductor's options for whatever is packaged."""
    return {
        # torch writes into its own `metadata`, by which a later torch-compile would not be found again.
        "aot_inductor.metadata": {},
        "aot_inductor.package": True,
        "aot_inductor.precompile_headers": False,  # for few programs it takes as long as reading them
        "aot_inductor.enable_line_tables": False,
    }


def cpu_options() -> dict[str, Any]:
    """The same on a CPU, where loops are computed by the kernels' threads: `csrc/program_calls.h`.

    As many threads as there are, whatever their number here. Other compilers than GNU's do not call what is put in the
    place of OpenMP: their loops are computed by one thread.
    """
    from torch._inductor.cpp_builder import is_gcc

    with named_compiler():
        is_gnus = is_gcc()
    if not is_gnus:
        return package_options() | {"cpp.threads": 1}
    source = "\n".join((SOURCES_DIR / name).read_text() for name in ("kernel_table.h", "program_calls.h"))
    kernels = torch.ops.specdec
    # What is said to be the declaration of an operation's C function is put into the package as it is.
    return package_options() | {
        "cpp.threads": 4,  # for as many a loop over heads, of few tokens, is divided by tokens too
        "cpp.min_chunk_size": 64,
        "cpp.dynamic_threads": True,
        "aot_inductor.custom_ops_to_c_shims": {
            kernels.linear.default: [f"int specdec_calls;\n{source}"],
            kernels.experts_linear.default: [],
            kernels.quantized_linear.default: [],
            kernels.paged_attention.default: [],
        },
    }


def named_compiler() -> AbstractContextManager[None]:
    """Inductor calls the compiler that compiles the kernels. By itself it takes an empty CXX for a compiler's name."""
    compiler = cxx_compiler()
    patched: AbstractContextManager[None] = torch._inductor.config.patch(
        {"cpp.cxx": (None, compiler), "aot_inductor.custom_op_libs": _shared_libraries(compiler)}
    )
    return patched


@cache
def _shared_libraries(compiler: str) -> list[str] | None:
    """The libstdc++ that a process has, to be linked first, where the compiler finds it.

    Some g++ link one of their own into each library. A regular expression that reads a device's name, in Inductor's
    runtime, then takes facets of the other one, and the process crashes (seen on Ubuntu 24.04).
    """
    name = "libstdc++.so.6"
    with suppress(OSError, ValueError):
        command = [*shlex.split(compiler), f"-print-file-name={name}"]
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.strip()
        if os.path.isabs(found):
            return [f":{name}"]
    return None


@contextmanager
def one_loop_a_region() -> Iterator[None]:
    """Inductor begins a parallel region for each loop: between two of one region its threads wait for each other."""
    from torch._inductor.codegen.cpp import WorkSharing  # only to build

    before = WorkSharing.parallel

    def begin(self: "WorkSharing", threads: int) -> None:
        self.close()  # type: ignore[no-untyped-call]
        before(self, threads)  # type: ignore[no-untyped-call]

    WorkSharing.parallel = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkSharing.parallel = before  # type: ignore[method-assign]


@contextmanager
def instructions_looked_up() -> Iterator[None]:
    """Inductor asks the compiler which instructions it knows, and does not compile and load a library for each set.

    That takes 2 s for each of six, and the processor is asked elsewhere.
    """

    def knows(instructions: "VecISA", code: str) -> bool:
        flags = instructions.build_arch_flags().split()
        command = [*shlex.split(cxx_compiler()), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    from torch._inductor.cpu_vec_isa import VecISA  # only to build

    before = VecISA.check_build
    VecISA.check_build = knows  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        VecISA.check_build = before  # type: ignore[method-assign]
