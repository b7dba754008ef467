"""How long torch's OpenMP threads wait for work on the cores that the kernels' threads want."""

import os
import subprocess
import sys

import pytest

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
    ids=["ours", "the user's number", "the user's policy"],
)
def test_openmps_threads_wait_as_long_as_is_set(own: dict[str, str], expected: str) -> None:
    """As GNU's OpenMP itself says when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-c", "import runtime, torch"]
    display = {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run(command, env=environment | own | display, capture_output=True, text=True, check=True)
    said = [line.split("=")[1].strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not said:
        pytest.skip("torch has no GNU OpenMP here")
    assert set(said) == {f"'{expected}'"}
