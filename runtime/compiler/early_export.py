"""Early export: a process of its own exports a new model's step, while this one imports torch and reads the weights.

Each takes one core some seconds. What is exported is put into the cache, by the form of the model, where a build looks
for it (`runtime.compiler.kept_steps`). A build that does not find it exports by itself, so nothing depends on it.
"""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from threading import Thread

from runtime.cache import cache_dir
from runtime.config import Activations, Dtype
from runtime.models import files_of_model

_START = """
from runtime.collector import collect_rarely
collect_rarely()
from runtime.engine_cache import export_as_asked
export_as_asked()
"""
_LINE = b"\n"
LONGEST_END_S = 2.0
_LEAST_BYTES = 64 << 20
_PREBUILT = Path(__file__).parent / "prebuilt"  # `kernel_library` has it, and imports torch
_process: subprocess.Popen[bytes] | None = None


@dataclass(frozen=True)
class StepOfModel:
    """Settings that a step is exported of, beside the model."""

    dtype: Dtype | None
    activations: Activations | None
    max_draft_len: int
    hidden_states: Seq[int]


def begin_export(model_dir: Path, step: StepOfModel) -> None:
    """Begin a process that exports the model's step.

    None is begun where it would win nothing: on one core, beside a GPU, where torch is imported already, for a small
    model, which is read before the other process would have imported torch, and where kernels are to be compiled first.
    """
    global _process
    has_gpu = Path("/dev/nvidiactl").exists()
    is_small = sum(path.stat().st_size for path in files_of_model(model_dir)) < _LEAST_BYTES
    has_kernels = any(cache_dir().glob("kernels-*.so")) or any(_PREBUILT.glob("*.so"))
    if _process is not None or "torch" in sys.modules or is_small or has_gpu or not has_kernels:
        return
    from runtime.control_groups import num_cores  # psutil, for which a small model need not wait

    if num_cores() < 2:
        return
    paths = [os.path.abspath(path) for path in sys.path]
    with suppress(OSError):
        _process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # a line when it begins to export, and one when it has
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C is for the one that asks
            bufsize=0,
        )
        Thread(target=_process.wait, daemon=True).start()  # a server does not end for long
        atexit.register(end_export)
        assert _process.stdin is not None
        _process.stdin.write(json.dumps({"model_dir": str(model_dir), "step": asdict(step)}).encode() + b"\n")


def is_exporting() -> bool:
    """True if a process was begun that nobody has waited for."""
    return _process is not None and _process.stdout is not None and not _process.stdout.closed


def await_export() -> bool:
    """Wait until the process has exported, or ended, if one was begun; True if it has.

    One that is still to begin would not be earlier than this process, and ends.
    """
    if not is_exporting():
        return False
    assert _process is not None and _process.stdout is not None
    with _process.stdout as said:
        has_begun = bool(select([said], [], [], 0)[0]) and said.readline() == _LINE
        has_exported = has_begun and said.readline() == _LINE  # its end is not waited for: it takes a second
    if not has_exported and _process.stdin is not None:
        _process.stdin.close()  # by which it ends
    return has_exported


def end_export() -> None:
    """End the process, if there is one: nobody waits for it any more."""
    global _process
    if _process is not None:
        assert _process.stdin is not None
        _process.stdin.close()
        try:
            _process.wait(2 * LONGEST_END_S)
        except subprocess.TimeoutExpired:
            _process.kill()
            _process.wait()
        _process = None
