"""Waiting for what another thread or process does: as long as the machine takes, with an end only where it hangs.

Each wait of a test has such an end, which says what was waited for: `wait_until` its own, and every other one, of
`thread.join()` or of a child, that of the test (`with_an_end`, around each test by `conftest.py`).
"""

import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

HANG_S = float(os.environ.get("SPECDEC_TEST_HANG_S", "600"))
"""Nothing that tests wait for takes nearly so long, on however slow or busy a machine."""
_MORE_S = 60.0
"""Seconds that a test has to end in after `Hangs`, before the process does."""
_ROOT = Path(__file__).parents[1]


class Hangs(BaseException):
    """A test has no end. No `Exception`, which a test or hypothesis would catch, and begin to wait again."""


def wait_until(condition: Callable[[], object]) -> None:
    until, pause_s = time.monotonic() + HANG_S, 0.001
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


@contextmanager
def ends(most_s: float = 60) -> Iterator[None]:
    """TimeoutError in the block where it goes on without an end: it takes less than a second, or for ever."""

    def fail(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"no end in {most_s:g} s")

    start, before = time.monotonic(), signal.signal(signal.SIGALRM, fail)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, most_s)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - start), 0.01) if left_s else 0)


@contextmanager
def with_an_end(name: str, stderr: int, limit_s: float = HANG_S) -> Iterator[None]:
    """Raise Hangs, with the line that waits, where the block takes longer than `limit_s`.

    Python looks for signals between two of its instructions. Where it has no turn either, in a kernel's loop, all
    threads' lines are written to the file descriptor `stderr` a minute later, and the process ends.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"no end in {limit_s:g} s: {name} waits at {_place(frame)}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + _MORE_S, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(frame: FrameType | None) -> str:
    """The innermost line of ours: `tests/waiting.py:31 in wait_until: time.sleep(0.002)`."""
    lines = [line for line in traceback.extract_stack(frame) if Path(line.filename).is_relative_to(_ROOT)]
    if not lines:
        return "no line of ours"
    last = lines[-1]
    return f"{Path(last.filename).relative_to(_ROOT)}:{last.lineno} in {last.name}: {last.line}"
