"""Processes that begin as forks of one that has imported what takes seconds.

Else they are as others: they have their own arguments, variables, directory and streams, are sent signals, and end as
an interpreter does.

Not for tests of what a process imports, or of what the variables are at its very beginning.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from waiting import HANG_S

ROOT = Path(__file__).parents[1]
_SERVER = """
import gc, json, os, select, socket, sys, tempfile
from scripts.campaigns import forks
import commands.serve.server

forks.import_all()
gc.collect()
gc.freeze()
asked, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
waiting = {}  # by the process that is waited for

def ended(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None

while True:
    for pid, connection in list(waiting.items()):
        if (code := ended(pid)) is not None:
            connection.send(str(code).encode())
            waiting.pop(pid).close()
    ready, _, _ = select.select([asked, listening], [], [], 0.005 if waiting else None)
    if not ready:
        continue
    connection = asked if asked in ready else listening.accept()[0]
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not data:
        os._exit(0)
    question = json.loads(data)
    if "wait" in question:
        asked.send(json.dumps(ended(question["wait"])).encode())
        continue
    if not (pid := os.fork()):
        break
    for stream in streams:
        os.close(stream)
    if connection is asked:
        asked.send(str(pid).encode())
    else:
        waiting[pid] = connection
for one in (asked, listening, connection, *waiting.values()):
    one.close()
if len(streams) == 2:
    streams = [os.open(os.devnull, os.O_RDONLY), *streams]
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
os.environ.clear()
os.environ.update(question["environment"])
os.chdir(question["directory"])
tempfile.tempdir = None
sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
sys.stdin = open(0, closefd=False)
sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
sys.stdout.reconfigure(write_through=unbuffered)
sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
sys.argv = question["arguments"]
exec(compile(question["program"], "<string>", "exec"), {"__name__": "__main__"})
"""
MAIN = "from specdec_cli.app import main; main()"
_COMMAND = """#!{python} -SE
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
question = {{"program": {program!r}, "arguments": sys.argv, "environment": dict(os.environ), "directory": os.getcwd()}}
socket.send_fds(connection, [json.dumps(question).encode()], [0, 1, 2])
sys.exit(int(connection.recv(100)))
"""


class Process:
    """A process as `subprocess.Popen` has it, with pipes of text."""

    def __init__(self, forks: "Forks", pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self._forks, self.pid, self.stdout, self.stderr = forks, pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float = HANG_S) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float = HANG_S) -> tuple[str, str]:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        output = self.stdout.read()
        reader.join()
        self.wait(timeout)
        self.close()
        return output, errors[0]

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


class Forks:
    """The process that they are forks of. It ends when the connection to it does."""

    def __init__(self, stack: ExitStack) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection, self._lock = stack.enter_context(ours), threading.Lock()
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self._directory / "listening"))
            listening.listen()
            numbers = [theirs.fileno(), listening.fileno()]
            command = [sys.executable, "-c", _SERVER, *map(str, numbers)]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=numbers)

    def ask(self, question: dict[str, Any], streams: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(question).encode()], list(streams))
            answer = self._connection.recv(1 << 20)
        assert answer, "the process that they are forks of has ended"
        return json.loads(answer)

    def start(
        self, *arguments: object, program: str = MAIN, environment: dict[str, str] | None = None, directory: Path = ROOT
    ) -> Process:
        """Run a program, `specdec` unless one is given, with these arguments and variables."""
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        question = {
            "program": program,
            "arguments": ["specdec", *map(str, arguments)],
            "environment": dict(os.environ if environment is None else environment),
            "directory": str(directory),
        }
        try:
            pid = self.ask(question, [to_out, to_err])
        finally:
            os.close(to_out)
            os.close(to_err)
        return Process(self, pid, open(out, encoding="utf-8"), open(err, encoding="utf-8"))

    def run(self, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Wait for its end, as `subprocess.run` does."""
        process = self.start(*arguments, **settings)
        stdout, stderr = process.communicate()
        assert process.returncode is not None
        return subprocess.CompletedProcess([*map(str, arguments)], process.returncode, stdout, stderr)

    def command(self, directory: Path) -> Path:
        """Make `specdec` in a directory, for a shell: a program that has a fork do what it is asked."""
        address = str(self._directory / "listening")
        made = directory / "specdec"
        made.write_text(_COMMAND.format(python=sys.executable, address=address, program=MAIN))
        made.chmod(0o755)
        return made

    def end(self) -> None:
        self._connection.close()
        self._process.wait(HANG_S)


@contextmanager
def opened_forks() -> Iterator[Forks]:
    with ExitStack() as stack:
        forks = Forks(stack)
        yield forks
        forks.end()
