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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
_SERVER = """
import atexit, fcntl, functools, gc, json, os, select, signal, socket, sys, tempfile, threading
from contextlib import suppress
from scripts.campaigns import forks
import commands.serve.http.server, specdec_cli.app, typer.main
import pygments.lexers, rich.markdown, typer.rich_utils  # what help and errors are shown by
import transformers.models.llama.modeling_llama
from transformers import AutoModelForCausalLM, PreTrainedModel  # for tests

forks.import_all()
typer.main.get_command = functools.cache(typer.main.get_command)  # or each would make all commands anew
typer.main.get_command(specdec_cli.app.app)
gc.collect()
gc.freeze()
listening = socket.socket(fileno=int(sys.argv[1]))
asking = [listening.accept()[0]]  # one connection for each worker, and one for who has them
waiting = {}  # processes that are waited for, and by whom

def ended(pid):
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None

while True:
    ready, *_ = select.select([*waiting, *asking, listening], [], [])[0]
    if ready in waiting:
        pid, connection = waiting.pop(ready)
        os.close(ready)
        with connection, suppress(OSError):  # nobody waits any more
            connection.send(str(ended(pid)).encode())
        continue
    connection = ready if ready in asking else listening.accept()[0]
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 64)
    question = json.loads(data or "{}")
    if "program" not in question:
        if "wait" in question:
            connection.send(json.dumps(ended(question["wait"])).encode())
        elif "ask" in question:
            asking.append(connection)
            connection.send(b"{}")
        else:
            asking.remove(connection)
            connection.close()
            if not asking:
                os._exit(0)
        continue
    if not (pid := os.fork()):
        break
    for stream in streams:
        os.close(stream)
    if connection in asking:
        connection.send(str(pid).encode())
    else:
        waiting[os.pidfd_open(pid)] = pid, connection
if len(streams) == 2:
    streams = [os.open(os.devnull, os.O_RDONLY), *streams]
# The fork's files, and what tells of the end of who waits, where no number is wanted; then each to its own.
numbers = [0, 1, 2, *question.get("files", [])]
free = max(512, *numbers) + 1
*streams, asker = [fcntl.fcntl(one, fcntl.F_DUPFD, free) for one in (*streams, connection)]
os.closerange(3, free)
for stream, number in zip(streams, numbers, strict=True):
    os.dup2(stream, number)
    os.close(stream)

def end_with_asker():
    if not socket.socket(fileno=asker).recv(1):
        os.kill(os.getpid(), signal.SIGKILL)

if "files" in question:
    threading.Thread(target=end_with_asker, daemon=True).start()
else:
    os.close(asker)
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

# As an interpreter ends, but that it would take half a second apart the modules, which are copies of the server's.
code = 0
try:
    exec(compile(question["program"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    code = end.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    code &= 255
except BaseException as error:
    sys.excepthook(type(error), error, error.__traceback__)
    code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
threading._shutdown()
atexit._run_exitfuncs()
try:
    sys.stdout.flush()
except (OSError, ValueError) as error:
    print(f"Exception ignored in: {sys.stdout!r}", repr(error), sep="\\n", file=sys.stderr)
    code = 120
if code < 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
os._exit(code)
"""
MAIN = "from specdec_cli.app import main; main()"
_COMMAND = """#!{python} -SE
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect({address!r})
except OSError:
    os.execv(sys.executable, [sys.executable, {otherwise}])

def is_open(number):
    try:
        return os.fstat(number) and number != connection.fileno()
    except OSError:
        return False

{program}
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to the fork too
files = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and is_open(number)]
question = {{"program": program, "arguments": sys.argv, "environment": dict(os.environ), "directory": os.getcwd()}}
socket.send_fds(connection, [json.dumps(question | {{"files": files}}).encode()], [0, 1, 2, *files])
code = int(connection.recv(100))
if code < 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_MODULE = f"program, sys.argv[:3] = {MAIN!r}, ['specdec']"
_PYTHON = """place = sys.argv.index("-c") + 1
program, sys.argv[:place + 1] = sys.argv[place], ["-c"]"""


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
    """The process that they are forks of, the same for all who have the directory. It ends with the last of them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._address, self._lock = _address(directory), threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        with FileLock(directory / "lock"):
            if not self._is_answered():
                self._connection.close()
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._begin()

    def _is_answered(self) -> bool:
        """False where there is no server, or one that has just ended with the last of the others."""
        try:
            self._connection.connect(self._address)
            self._connection.send(json.dumps({"ask": True}).encode())
            return bool(self._connection.recv(1 << 20))
        except OSError:
            return False

    def _begin(self) -> None:
        Path(self._address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self._address)
            listening.listen()
            command = [sys.executable, "-c", _SERVER, str(listening.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[listening.fileno()])
        self._connection.connect(self._address)

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

    def end(self) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.wait()  # for the other workers' tests


@contextmanager
def opened_forks(directory: Path) -> Iterator[Forks]:
    forks = Forks(directory)
    yield forks
    forks.end()


def command(made: Path, directory: Path) -> Path:
    """Make the program `specdec`, for a shell: a fork of `Forks(directory)` does what it is asked.

    It is a process as the fork is: it ends when that ends, and that is killed when it ends. Without forks it is one.
    """
    return _script(made, directory, f"program = {MAIN!r}", '"-m", "specdec_cli", *sys.argv[1:]')


def python(made: Path, directory: Path) -> Path:
    """The same for `python`: it takes options, a program behind `-c`, which a fork carries out, and its arguments."""
    return _script(made, directory, _PYTHON, "*sys.argv[1:]")


def module(made: Path, directory: Path) -> Path:
    """The same for `python -m specdec_cli`."""
    return _script(made, directory, _MODULE, "*sys.argv[1:]")


def _script(made: Path, directory: Path, program: str, otherwise: str) -> Path:
    text = _COMMAND.format(python=sys.executable, address=_address(directory), program=program, otherwise=otherwise)
    made.write_text(text)
    made.chmod(0o755)
    return made


def _address(directory: Path) -> str:
    return str(directory / "listening")
