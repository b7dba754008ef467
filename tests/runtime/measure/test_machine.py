"""Facts about the machine in Linux's files, in the forms that they have."""

import os
from pathlib import Path

import pytest

from runtime.measure.diagnosis.observe import huge_pages, num_numa_nodes
from runtime.util.control_groups import num_cores
from runtime.util.machine import machine_name

NUM_CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/cpu.max": "max 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "25000 100000", "a/b/cpu.max": "50000 100000"}, 0.25),
        ("0::/a/b\n", {"cpu.max": "30000 100000"}, 0.3),  # in a container
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "200000"}, 0.25),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, NUM_CORES),
        ("5:memory:/a\n", {"memory/a/cpu.max": "50000 100000"}, NUM_CORES),
        ("0::/\n", {"cpu.max": "max 100000"}, NUM_CORES),
        ("0::/\n", {"cpu.max": "nonsense"}, NUM_CORES),
        ("0::/\n", {}, NUM_CORES),
    ],
)
def test_the_narrowest_group_bounds_the_cores(
    lines: str, files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(lines)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert num_cores(tmp_path / "groups", tmp_path / "membership") == expected


@pytest.mark.parametrize(
    ("used", "expected"), [({0, 1}, 1), ({0, 3}, 1), ({3, 4}, 2), ({8}, 1), ({0, 5, 8}, 3), ({99}, 1)]
)
def test_nodes_are_counted_that_hold_cores_of_ours(used: set[int], expected: int, tmp_path: Path) -> None:
    for node, text in enumerate(("0-3", "4-7,12", "8", "")):  # the last one has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{text}\n")
    assert num_numa_nodes(used, tmp_path) == expected
    assert num_numa_nodes(used, tmp_path / "none") == 1


@pytest.mark.parametrize("chosen", ["always", "madvise", "never"])
def test_huge_pages_are_what_stands_in_brackets(chosen: str, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise never\n".replace(chosen, f"[{chosen}]"))
    assert huge_pages(tmp_path / "enabled") == chosen
    assert huge_pages(tmp_path / "none") is None


def test_a_system_without_affinity_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert f", {os.cpu_count()} core" in machine_name.__wrapped__()
