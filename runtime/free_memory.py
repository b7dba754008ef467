"""How much memory this process may still take: the machine's, and what its control groups leave of it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63


def free_memory(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes. Pages of files that a group holds are given up when they are needed, and count as free."""
    return min([int(psutil.virtual_memory().available), *_left_by_groups(root, membership)])


def _left_by_groups(root: Path, membership: Path) -> Iterator[int]:
    """What each control group above this process, of version 2 or 1, leaves of its limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / place.lstrip("/")
        # In a container the group's own path may not be there: its files are at the root.
        for directory in (group, *group.parents):
            if directory.is_relative_to(base):
                yield from _left_by(directory, *names)


def _left_by(directory: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    try:
        most = int((directory / limit).read_text())
        used = int((directory / usage).read_text())
        stats = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or `max`: no limit
        return
    if most < _UNLIMITED:
        yield max(most - used + int(stats.get(reclaimable, 0)), 0)
