"""Every wait of a test has an end, which says what was waited for."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, Hangs, with_an_end

WAITS: dict[str, Callable[[], object]] = {
    "event.wait()": lambda: threading.Event().wait(),
    "thread.join()": lambda: join_for_ever(),
    "subprocess": lambda: subprocess.run([sys.executable, "-c", "import signal; signal.pause()"]),
    "loop": lambda: all(True for _ in iter(int, 1)),
}


def join_for_ever() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


@pytest.mark.parametrize("wait", WAITS)
def test_wait_without_an_end_is_ended_and_its_line_told(wait: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(Hangs, match=r"no end in 0\.2 s: it waits at tests/test_waiting.py:\d+ in "),
        with_an_end("it", 2, limit_s=0.2),
    ):
        WAITS[wait]()
    assert signal.getsignal(signal.SIGALRM) is before


def test_hypothesis_does_not_begin_to_wait_again() -> None:
    num_waits = 0

    @given(st.integers())
    def waits(number: int) -> None:
        nonlocal num_waits
        num_waits += 1
        threading.Event().wait()

    with pytest.raises(Hangs), with_an_end("it", 2, limit_s=0.5):
        waits()
    assert num_waits == 1


def test_what_ends_in_time_is_left_alone() -> None:
    with with_an_end("it", 2, limit_s=HANG_S):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # that of this test too, which is over then


@pytest.fixture
def seconds_left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_every_test_has_an_end_and_its_fixtures_too(seconds_left: float) -> None:
    assert seconds_left > 0 and signal.getitimer(signal.ITIMER_REAL)[0] > 0
