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
from threading import Thread

from runtime.config import Activations, Dtype

_START = "from runtime.engine_cache import export_as_asked; export_as_asked()"
LONGEST_END_S = 2.0
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

    None is begun where it would win nothing: on one core, beside a GPU, or where torch is imported already.
    """
    global _process
    from runtime.control_groups import num_cores  # most starts have an engine, and need not wait for psutil

    has_gpu = Path("/dev/nvidiactl").exists()
    if _process is not None or "torch" in sys.modules or has_gpu or num_cores() < 2:
        return
    paths = [os.path.abspath(path) for path in sys.path]
    with suppress(OSError):
        _process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # a byte when it has exported
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
    """Wait until the process has exported, or ended, if one was begun; True if there was one."""
    if not is_exporting():
        return False
    assert _process is not None and _process.stdout is not None
    with _process.stdout as said:  # not for its end: torch takes a second to be given back
        said.read(1)
    return True


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
