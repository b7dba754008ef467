"""The control groups that a process is in: what Linux, or a container, leaves it of the machine."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_above(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[int, Path]]:
    """The version, 2 or 1, and directory of each group above this process that may limit `controller`."""
    try:
        lines = membership.read_text().splitlines()
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
