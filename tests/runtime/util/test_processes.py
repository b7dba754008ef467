"""Pieces of work that processes do at once come back in order; a process that ends is an error, and none is left."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import Said
from waiting import wait_until

from runtime.util.errors import SpecDecError
from runtime.util.processes import do_at_once, paths_of_child

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("num_processes", [1, 2, 9])
def test_pieces_come_back_in_order(num_processes: int) -> None:
    assert do_at_once(math.isqrt, [4, 9, 16, 25, 36], num_processes) == [2, 3, 4, 5, 6]


def test_what_is_raised_elsewhere_is_raised_here() -> None:
    with pytest.raises(ValueError, match="nonnegative"):
        do_at_once(math.isqrt, [4, -9], 2)


def test_a_process_that_ends_is_an_error(said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        do_at_once(os._exit, [3, 3], 2)
    said(raised)


def test_a_users_module_does_not_replace_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "types.py").write_text("raise SystemExit('the wrong types')")
    (tmp_path / "own.py").write_text("print('own')")
    monkeypatch.syspath_prepend(tmp_path)
    environment = os.environ | {"PYTHONPATH": paths_of_child(), "PYTHONSAFEPATH": "1"}
    child = [sys.executable, "-c", "import json, types, own"]
    assert subprocess.run(child, env=environment, capture_output=True, text=True).stdout == "own\n"


def test_none_outlives_who_asks(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import time\nfrom runtime.util.processes import do_at_once\n"
        "if __name__ == '__main__':\n    do_at_once(time.sleep, [600, 600], 2)\n"
    )
    with subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)}) as asking:
        wait_until(lambda: len(sleeping_children(asking.pid)) == 2)
        children = sleeping_children(asking.pid)
        asking.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_there, children)))


def sleeping_children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() != b""
