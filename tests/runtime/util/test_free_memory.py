"""Memory that control groups keep from this process is not free, whatever the machine has."""

from pathlib import Path

import psutil
import pytest

from runtime.util.control_groups import free_memory

MIB = 1 << 20


def write_group(directory: Path, version: int, limit: str, used: int, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )  # fmt: skip
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


@pytest.mark.parametrize(("version", "line"), [(2, "0::/a/b\n"), (1, "9:cpu,cpuacct:/x\n5:memory:/a/b\n")])
def test_the_narrowest_group_counts(version: int, line: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(line)
    root = tmp_path / "groups"
    base = root if version == 2 else root / "memory"
    write_group(base / "a", version, str(64 * MIB), 50 * MIB, 4 * MIB)
    write_group(base / "a" / "b", version, str(60 * MIB), 2 * MIB, 0)
    assert free_memory(root, tmp_path / "membership") == 18 * MIB
    write_group(base / "a" / "b", version, str(60 * MIB), 70 * MIB, 0)
    assert free_memory(root, tmp_path / "membership") == 0


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096), "none of your business"])
def test_without_a_limit_it_is_the_machines(limit: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/\n5:memory:/\n")
    write_group(tmp_path / "groups", 2, limit, 1, 0)
    write_group(tmp_path / "groups" / "memory", 1, limit, 1, 0)
    free = free_memory(tmp_path / "groups", tmp_path / "membership")
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.3)
    assert free_memory(tmp_path / "none", tmp_path / "none") > 0
