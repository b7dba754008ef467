"""Helpers for processes, gates, clocks and waits, each in a worked example: read it before you write such a test.

`forks` starts a process that need not import torch; `gate` stops an engine in the middle of a generation; `work_clock`
has time go on with the engine's work; `wait_until` waits for another thread or process, and every wait has an end.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clocks import WorkClock
from forked import Forks
from gate import Gate
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, Hangs, wait_until, with_an_end

from runtime.drafters.specs import CustomDrafter
from specdec_cli import LLM, SamplingParams


def test_a_fork_is_a_process_with_its_own_arguments_streams_and_signals(forks: Forks) -> None:
    """The program is `specdec`, unless one is given."""
    done = forks.run("run", "--engine-dir", "none", "a prompt")
    assert (done.returncode, done.stdout) == (1, "") and "none" in done.stderr
    process = forks.start(program="import time; print('ready', flush=True); time.sleep(3600)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    process.close()


def test_an_engine_stands_still_at_a_gate_until_it_is_opened(gate: Gate, llama_engine_dir: Path) -> None:
    """The drafter `gate:Waits` drafts nothing, and waits in its step number 4."""
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(llama_engine_dir) as llm, ThreadPoolExecutor(1) as threads:
        drafter = CustomDrafter("gate", "Waits")
        answer = threads.submit(llm.generate, "The dog", asked, drafter=drafter, draft_len_mode="fixed")
        wait_until(lambda: gate.is_reached)
        assert not answer.done()  # on the fastest machine too
        gate.open()
        assert len(answer.result()[0].token_ids) == 8


def test_a_clock_goes_on_with_the_work_of_the_engine(work_clock: WorkClock, llama_engine_dir: Path) -> None:
    """A step of one token takes 2 layers x 1.05 ms, on any machine."""
    with LLM(llama_engine_dir) as llm:
        before = time.perf_counter()
        (output,) = llm.generate([5], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        seconds = time.perf_counter() - before
    assert output.stats.num_steps == 10
    assert seconds == pytest.approx(10 * work_clock.step_s(num_layers=2, num_tokens=1), rel=0.05)


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
        pytest.raises(Hangs, match=r"no end in 0\.2 s: it waits at tests/test_helpers.py:\d+ in "),
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
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # the limit is over, however long it took to come here
        threading.Event().wait()

    with pytest.raises(Hangs), with_an_end("it", 2):
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


def test_a_process_has_its_files_whatever_their_numbers(ranks_begin_as_forks: None) -> None:
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(600)]
    try:
        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
        process.join()
    finally:
        for number in others:
            os.close(number)
    assert process.exitcode == 0
