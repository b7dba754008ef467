"""Choice of a compiler by default: on a GPU, none that may crash the process.

On the one machine with a GPU that was tried, opening a package that was compiled ahead of time ended the process by a
segmentation fault. So a small one is compiled, opened and run in a child process first, once on each machine.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from runtime.cache import cache_dir, digest, make_cache_dir, read_sealed, sealed
from runtime.compiler.kernels import cxx_compiler
from runtime.compiler.load import current_environment
from runtime.config import Compiler
from runtime.errors import SpecDecWarning
from runtime.files import write_file
from runtime.temporary import temporary_dir

_MOST_S = 600.0
_TRIAL = ("-c", "from runtime.compiler.trial import main; main()")


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


def packages_run(device: torch.device) -> bool:
    """True if a package was opened and run on the device, in a child process; the result is cached."""
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
