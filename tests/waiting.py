"""Waiting for what another thread or process does: as long as the machine takes, with an end only where it hangs."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HANG_S = 600.0
"""Nothing that tests wait for takes nearly so long, on however slow or busy a machine."""


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


@contextmanager
def ends(most_s: int = 60) -> Iterator[None]:
    """TimeoutError in the block where it goes on without an end: it takes less than a second, or for ever."""

    def fail(signal_number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(most_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
