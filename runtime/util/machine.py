"""This machine's name, for reports, and its cores."""

import os
import platform
from functools import cache
from pathlib import Path

NUMA_NODES = Path("/sys/devices/system/node")


@cache
def machine_name() -> str:
    """The machine's name: `AMD EPYC 9B14, 2 cores`, or `aarch64, 1 core` if the system does not name the processor."""
    num_cores = len(allowed_cores())
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


def allowed_cores() -> set[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def numa_nodes(nodes: Path = NUMA_NODES) -> list[set[int]]:
    """Cores of each NUMA node, by the nodes' numbers; empty if the system does not list nodes."""
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return [_parse_cores(path.read_text(encoding="utf-8")) for path in lists]


def _parse_cores(text: str) -> set[int]:
    """The cores in a list of Linux's: 0, 1, 2, 3 and 8 for `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
