"""The check of a GPU, by its parts on the CPU, and what becomes of parts that crash, hang or do not fit."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from scripts.gpu_check import PARTS, ROOT, Report, Row, Setting, run_part


def check(output: Path, *arguments: str) -> tuple[int, dict[str, Row], str]:
    """Its exit status, the rows of its report, and what it printed."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--scale", "tiny"]
    ended = subprocess.run(
        [*command, "--output", str(output), *arguments],
        capture_output=True, text=True, timeout=HANG_S, cwd=output.parent,
    )  # fmt: skip
    document = json.loads((output / "report.json").read_text())
    return ended.returncode, {row["part"]: Row(**row) for row in document["parts"]}, ended.stdout


@pytest.mark.slow
def test_parts_run_in_order_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    status, rows, said = check(tmp_path / "report", "--parts", "machine", "--budget-s", "500")
    assert (status, rows["machine"].status) == (0, "passed"), rows["machine"].said
    assert rows["machine"].values["torch"].startswith("2.")
    assert (tmp_path / "report" / "report.txt").read_text().strip() in said
    status, rows, said = check(tmp_path / "late", "--budget-s", "3")
    assert status == 1
    assert [row.status for row in rows.values()] == ["not run"] * len(PARTS)
    assert list(rows) == list(PARTS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in PARTS])
def test_part_passes_on_the_cpu(name: str, tmp_path: Path) -> None:
    values = PARTS[name].run(Setting("cpu", "tiny", tmp_path))
    assert json.dumps(values)
    if name == "demo":
        assert values["as_transformers"] == values["same_with_drafts"] == values["outputs"] == 4


def run_program(tmp_path: Path, program: str, limit_s: float = HANG_S) -> Row:
    report = Report(tmp_path / "report", {})
    row = run_part(report, "part", [sys.executable, "-c", program], limit_s)
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["parts"][0]["status"] == row.status
    return row


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit('it has other tokens')", "failed"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "ended by a signal"),
    ],
)
def test_end_of_a_child_is_a_row(program: str, status: str, tmp_path: Path) -> None:
    row = run_program(tmp_path, program)
    assert row.status == status
    assert ("other tokens" in row.said) == (status == "failed")


def test_child_that_hangs_ends_with_its_limit_and_what_it_has_begun_too(tmp_path: Path) -> None:
    """A child of the child holds the lock until it ends."""
    holds = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    row = run_program(tmp_path, f"{holds}; time.sleep(3600)", limit_s=2)
    assert row.status == "over its time"
    assert row.wall_s < 3600


def test_report_of_a_run_that_is_killed_names_what_was_running(tmp_path: Path) -> None:
    report = Report(tmp_path, {}, [Row("demo", "passed", 1.0, {"outputs": 4})])
    report.rows.append(Row("1b", "running"))
    report.write()
    rows = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [row["status"] for row in rows] == ["passed", "running"]
    assert "outputs 4" in (tmp_path / "report.txt").read_text()
