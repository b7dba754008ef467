"""The name of this machine, for reports: its processor, and the cores that this process may use."""

import os
import platform
from functools import cache
from pathlib import Path


@cache
def machine_name() -> str:
    """The machine's name: `AMD EPYC 9B14, 2 cores`, or `aarch64, 1 core` if the system does not name the processor."""
    num_cores = len(os.sched_getaffinity(0))
    return f"{_processor_name()}, {num_cores} core{'' if num_cores == 1 else 's'}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    ]
    return " ".join(named[0].split()) if named and named[0] else platform.machine()
