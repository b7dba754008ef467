"""Choice of a compiler by default: on a GPU, none that may crash the process.

Opening a package that was compiled ahead of time may end the process by a segmentation fault, as it did on the first
machine with a GPU that was tried. So a small engine is built and run in a child process first, once on each machine.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TypeVar

import torch

from runtime.cache import cache_dir, digest, make_cache_dir, read_sealed, sealed
from runtime.compiler.kernel_library import cxx_compiler
from runtime.compiler.load import current_environment
from runtime.config import BuildConfig, Compiler
from runtime.errors import SpecDecError, SpecDecWarning
from runtime.files import write_file
from runtime.temporary import temporary_dir

Made = TypeVar("Made")
_MOST_S = 600.0
_TRIAL = ("-c", "from runtime.compiler.choosing import try_package; try_package()")


def default_compiler(device_type: str, packages_run: Callable[[], bool]) -> Compiler:
    """`aot`; on a GPU only where packages run there, and `none` elsewhere. On a CPU that is not asked."""
    return "aot" if device_type == "cpu" or packages_run() else "none"


def compiler_for(device: torch.device, asked: Compiler | None) -> Compiler:
    """The one that is asked for, or the default; a SpecDecWarning says where that is slower than it might be."""
    if asked is not None:
        return asked
    compiler = default_compiler(device.type, lambda: packages_run(device))
    if compiler == "none":
        warnings.warn(
            "a package that is compiled ahead of time does not run on this GPU: the model is computed as it is",
            SpecDecWarning,
            stacklevel=2,
        )
    return compiler


def as_can_be_made(asked: Compiler | None, compiler: Compiler, make: Callable[[Compiler], Made]) -> Made:
    """Make an engine with `compiler`, or, where it lacks a C++ compiler and was not asked for, a SpecDecWarning and one
    with none.
    """
    try:
        return make(compiler)
    except SpecDecError as error:
        if asked is not None or error.code != "no_compiler":
            raise
        warnings.warn(
            f"{error.message}: the model is computed as it is, which is slower, until there is one",
            SpecDecWarning,
            stacklevel=3,
        )
        return make("none")


def packages_run(device: torch.device) -> bool:
    """True if an engine was built and ran on the device, in a child process; the result is cached."""
    name = digest([repr(current_environment(device)), cxx_compiler(), sys.executable])
    record = cache_dir() / f"packages-{name[:16]}"
    known = read_sealed(record)
    if known is not None:
        return known == b"run"
    run = ends_well([sys.executable, *_TRIAL, str(device)])
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        make_cache_dir()
        write_file(record, sealed(b"run" if run else b"fail"))
    return run


def ends_well(command: Seq[str]) -> bool:
    """True if the child process ends by itself and reports success. Its output is discarded."""
    paths = [os.path.abspath(path) for path in sys.path]
    with tempfile.TemporaryDirectory(dir=temporary_dir()) as directory:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",
            "TORCHINDUCTOR_CACHE_DIR": directory,
        }
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=_MOST_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == 0


def try_package() -> None:
    """Find out, in a child process, whether engines run on the device of the last argument, such as `cuda:0`.

    The shipped demo is built, which compares its step with transformers' model, and answers. The child ends with exit
    status 0 if it did; opening a package may end it by a signal.
    """
    from runtime.checkpoint import convert
    from runtime.compiler.build import BuildEffort, build_engine
    from runtime.engine import Engine, KVCacheConfig
    from runtime.models import resolve_model
    from runtime.request import Request
    from runtime.scheduler import generate

    device, build = torch.device(sys.argv[-1]), BuildConfig("aot", 2, 32, 64, 4, 32, "draft_tokens_external")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_dir, engine_dir = Path(directory) / "checkpoint", Path(directory) / "engine"
        convert(resolve_model("demo"), checkpoint_dir, None, replace=False, progress=lambda done, total: None)
        config = build_engine(
            checkpoint_dir,
            engine_dir,
            build,
            device,
            replace=False,
            phase=lambda name: None,
            effort=BuildEffort(measure_costs=False),
        )
        if config.build_config.compiler != "aot":  # it could not be compiled ahead of time
            sys.exit(1)
        device_ids = None if device.index is None else [device.index]
        with Engine.open(engine_dir, device_ids, KVCacheConfig(max_tokens=256)) as engine:
            for _ in generate(engine, [Request(i, (3, 4, 5 + i), 4) for i in range(2)]):
                pass
