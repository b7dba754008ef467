"""Resources that the machine gives this process: cores, a share of their time, memory, and its thread settings."""

import os
import time
from pathlib import Path

from runtime.compiler.profile_steps import measure_machine
from runtime.config import MachineSpeed
from runtime.control_groups import MEMBERSHIP, ROOT, groups_above
from runtime.diagnosis.observations import Machine

_NUM_WINDOWS, _WINDOW_S, _ENOUGH = 4, 0.15, 0.8
_NODES, _HUGE_PAGES = Path("/sys/devices/system/node"), Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine_machine(when_built: MachineSpeed | None, memory_bytes: int) -> Machine:
    return Machine(
        now=measure_machine(),
        when_built=when_built,
        num_cores=num_cores(),
        cpu_share=_cpu_share(),
        num_numa_nodes=num_numa_nodes(cores()),
        huge_pages=huge_pages(),
        memory_bytes=memory_bytes,
    )


def cores() -> set[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """Number of cores by affinity, or their time share by control groups: 1.5 for 150 ms in every 100."""
    quotas = (_quota_of(directory) for _, directory in groups_above("cpu", root, membership))
    return min([float(len(cores())), *(quota for quota in quotas if quota is not None)])


def _quota_of(directory: Path) -> float | None:
    try:
        if (directory / "cpu.max").is_file():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or `max`: no limit
        return None


def _cpu_share() -> float:
    """The largest of a few windows."""
    share = 0.0
    for _ in range(_NUM_WINDOWS):
        if share > _ENOUGH:
            break
        start, cpu_start = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < _WINDOW_S:
            pass
        share = max(share, (time.thread_time() - cpu_start) / (time.perf_counter() - start))
    return min(share, 1.0)


def num_numa_nodes(used: set[int], nodes: Path = _NODES) -> int:
    """NUMA nodes that the cores are on; 1 where the system does not say."""
    lists = [_cores_of(path) for path in sorted(nodes.glob("node[0-9]*/cpulist"))]
    return max(sum(bool(used & of_node) for of_node in lists), 1)


def _cores_of(path: Path) -> set[int]:
    """`0-3,8` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def huge_pages(path: Path = _HUGE_PAGES) -> str | None:
    """Choice among `always [madvise] never`; None if the system has none."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None
