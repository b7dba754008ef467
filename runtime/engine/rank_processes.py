"""Processes of ranks other than 0, as rank 0 sees them: each runs `runtime.engine.rank_worker`. If any rank ends, all
end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any

from runtime.util.errors import SpecDecError
from runtime.util.processes import paths_of_child

_LOOKS_S = 0.1
_STOPPED_S = 4.0
"""Seconds after which a stopped process is given up."""
_ENDS_S = 2.0
_PYTHON = sys.executable
_START = "from runtime.engine.rank_worker import main; main()"


class RankProcesses:
    """Processes of ranks 1 to N - 1, which inherit `files`. If one of them ends or is stopped, all are killed and
    `on_failure` is called: in the thread that watches them, or in `wait_until_ready`.
    """

    def __init__(self, jobs: list[dict[str, Any]], files: Seq[int], on_failure: Callable[[], None]) -> None:
        self.failure: SpecDecError | None = None
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._is_closed = self._is_ready = False
        life, self._life = os.pipe()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._status: list[Any] = []
        try:
            for job in jobs:
                self._begin(job, files, life)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(life)
        self._tp_size = len(jobs) + 1
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _begin(self, job: dict[str, Any], files: Seq[int], life: int) -> None:
        read, write = os.pipe()
        self._status.append(os.fdopen(read))
        try:
            process = subprocess.Popen(
                [_PYTHON, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(*files, life, write),
                env=os.environ | {"PYTHONPATH": paths_of_child(), "PYTHONSAFEPATH": "1"},
                process_group=0,  # Ctrl-C is rank 0's to answer
                bufsize=0,
            )
        finally:
            os.close(write)
        self._processes.append(process)
        line = json.dumps(job | {"life": life, "status": write}).encode() + b"\n"
        with suppress(OSError):  # `_watch` notices a process that has ended already
            assert process.stdin is not None
            process.stdin.write(line)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def pipes(self) -> list[int]:
        """The pipes that the ranks read from."""
        return [process.stdin.fileno() for process in self._processes if process.stdin is not None]

    def wait_until_ready(self) -> None:
        """SpecDecError, with the rank's own message, if a rank cannot open its part of the engine."""
        for status in self._status:
            line = status.readline()
            if line.strip() != "{}":
                process = self._processes[self._status.index(status)]
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDS_S)
                self._fail(process, line)
                self.raise_failure()
        self._is_ready = True

    def raise_failure(self) -> None:
        """Raise the reason why the ranks have ended, if they have. Waits for it up to 2 s: it may arrive late."""
        end = time.monotonic() + _ENDS_S
        while self.failure is None and time.monotonic() < end and not self._is_closed:
            time.sleep(_LOOKS_S / 10)
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End all processes. Closing twice is allowed."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.close(self._life)  # each process ends when this pipe is closed
        end = time.monotonic() + _ENDS_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.01))
            self._kill(process)
        for status in self._status:
            status.close()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def _watch(self) -> None:
        looks_stopped = dict.fromkeys(self.pids, 0)
        while not self._is_closed:
            for process in self._processes:
                stopped = process.poll() is None and _is_stopped(process.pid)
                looks_stopped[process.pid] = looks_stopped[process.pid] + 1 if stopped else 0
                has_hung = looks_stopped[process.pid] * _LOOKS_S >= _STOPPED_S
                # Until the ranks are ready, `wait_until_ready` reads their last line.
                if has_hung or (self._is_ready and process.poll() is not None):
                    self._fail(process)
                    return
            time.sleep(_LOOKS_S)

    def _fail(self, process: subprocess.Popen[bytes], said: str | None = None) -> None:
        with self._lock:
            if self.failure is not None or self._is_closed:
                return
            code = process.poll()
            if said is None and code is not None:
                said = self._status[self._processes.index(process)].readline()
            self.failure = self._error(self._processes.index(process) + 1, code, said)
        for one in self._processes:
            one.kill()
        self._on_failure()

    def _error(self, rank: int, code: int | None, said: str | None) -> SpecDecError:
        which = f"rank {rank} of {self._tp_size}"
        told = json.loads(said) if said and said.strip() else {}
        if "hint" in told:
            return SpecDecError(f"{which}: {told['message']}", hint=told["hint"])
        if told.get("message"):
            return SpecDecError(f"{which} has failed: {told['message']}", hint="open the engine again")
        if code is None:
            return SpecDecError(f"{which} was stopped for {_STOPPED_S:g} s", hint="open the engine again")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return SpecDecError(f"{which} has ended: {how}", hint="open the engine again; memory may have run out")


def _is_stopped(pid: int) -> bool:
    """True if Linux reports the process as stopped; elsewhere False."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
