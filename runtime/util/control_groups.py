"""Control groups of this process: the memory and the cores that they and the machine leave to it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from runtime.util.machine import allowed_cores

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_above(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[int, Path]]:
    """The version, 2 or 1, and directory of each group above this process that may limit `controller`."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        version, base = (1, root / controller) if controllers else (2, root)
        group = base / place.lstrip("/")
        # In a container the group's own path may not be there: its files are at the root.
        yield from ((version, directory) for directory in (group, *group.parents) if directory.is_relative_to(base))


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63


def free_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Free memory in bytes: the least that the machine and each group leave. A group's inactive cached file pages count
    as free, since they are given up when needed.
    """
    groups = groups_above("memory", root, membership)
    left = (left for version, directory in groups for left in _left_by(directory, *_FILES[version]))
    return min([int(psutil.virtual_memory().available), *left])


def _left_by(directory: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    try:
        most = int((directory / limit).read_text())
        used = int((directory / usage).read_text())
        stats = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or `max`: no limit
        return
    if most < _UNLIMITED:
        yield max(most - used + int(stats.get(reclaimable, 0)), 0)


def num_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """Number of cores by affinity, or by the smallest quota of the control groups, whichever is less. A quota of 150 ms
    in every 100 ms is 1.5 cores.
    """
    quotas = (_quota_of(directory) for _, directory in groups_above("cpu", root, membership))
    return min([float(len(allowed_cores())), *(quota for quota in quotas if quota is not None)])


def _quota_of(directory: Path) -> float | None:
    try:
        if (directory / "cpu.max").is_file():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or `max`: no limit
        return None
