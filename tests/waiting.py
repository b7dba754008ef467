"""Waiting for what another thread or process does: as long as the machine takes, with an end only where it hangs."""

import time
from collections.abc import Callable

HANG_S = 600.0
"""Nothing that tests wait for takes nearly so long, on however slow or busy a machine."""


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)
