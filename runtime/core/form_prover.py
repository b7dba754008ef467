"""A process that compiles clients' grammars on trial before this process compiles them.

llguidance's constructor has no bound: 90 bytes of a schema can take all memory, or overflow the stack. So each grammar
is tried in a process of its own, forked from a process that has read the vocabulary, with limits on memory and
processor time. If that process dies, only this grammar is refused. All these processes end with the process that asked,
however it ends.
"""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from runtime.core.forms import ENDLESS, TOO_DEEP, check_forced_text, reason, start_of, written
from runtime.util.errors import SpecDecError
from runtime.util.processes import paths_of_child

MOST_S, MOST_BYTES = 0.5, 128 << 20
"""Limits for compiling a grammar: seconds of a core, and bytes of memory. A grammar for an object of 1,000 optional
properties takes 0.1 s and 10 MB.
"""
MOST_AT_ONCE = 16
"""Grammars compiled on trial at once, each in a process. A further grammar ends the oldest of the slow processes."""
_FIRST_S = 0.05
"""Seconds after which a grammar's process gets a lower priority, so that it gives way to the model's steps."""
_NICE = 15
_PATIENCE_S = 60.0
_STACK_BYTES = 4 << 20
"""Stack of the thread that compiles on trial; `runtime.core.grammar` then compiles with a larger stack."""
_ENVIRONMENT = {"PYTHONSAFEPATH": "1", "MALLOC_ARENA_MAX": "1"}
"""Variables of the process: malloc has a single arena. If memory is limited, glibc finds no room for a second arena,
and each allocation costs a system call.
"""
_START = "from runtime.core.form_prover import main; main()"
_TOO_MUCH = f"it never ends, or takes more than {MOST_S:g} s of a core or {MOST_BYTES >> 20} MB to compile"
_OVERFLOWS = f"{TOO_DEEP}, or by too long a chain of references: it takes {_STACK_BYTES >> 20} MB of stack to compile"


class FormRefused(Exception):
    """A grammar that cannot be used; the exception's text is the reason."""


class FormsBusy(SpecDecError):
    """Too many grammars are being compiled at the same time."""

    def __init__(self) -> None:
        super().__init__("too many forms are being compiled, and this one takes long", hint="ask again later")


@dataclass(frozen=True)
class Proof:
    """A grammar that was compiled on trial: its text for llguidance, and the processor time and memory that it took."""

    written: str
    seconds: float
    num_bytes: int


class FormProver:
    """Compiles grammars for a vocabulary (a `tokenizer.json`) in other processes. Threads may share it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Seq[int] | None) -> None:
        self._state = json.dumps([tokenizer_json, vocab_size, end_ids, [MOST_S, MOST_BYTES]]).encode()
        self._lock = threading.Lock()
        self._server: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._slow: OrderedDict[int, None] = OrderedDict()
        """Processes that have taken longer than `_FIRST_S`, the oldest first."""
        self._num_running = 0
        self._ended: set[int] = set()

    @property
    def pid(self) -> int | None:
        """Id of the process that forks the others; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to read the vocabulary, unless that has begun. SpecDecError if no process can be started."""
        with self._lock:
            if self._server is None:
                self._begin()

    def close(self) -> None:
        """End the process; the next grammar begins a new one."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._server = self._process = self._end = None

    def prove(self, kind: str, text: str) -> Proof:
        """FormRefused for a grammar that is invalid or takes more than the limits; FormsBusy if too many are compiled
        at the same time; SpecDecError if no process answers.
        """
        with self._lock:
            self._num_running += 1
            if self._num_running > MOST_AT_ONCE and self._slow:
                pid, _ = self._slow.popitem(last=False)
                self._ended.add(pid)
                _kill(pid)
        try:
            for _ in range(2):  # the second time in a new process
                found = self._ask(json.dumps([kind, text]).encode())
                if found is not None:
                    return _proof(found)
        finally:
            with self._lock:
                self._num_running -= 1
        raise SpecDecError("the process that compiles forms has ended", hint="memory may have run out")

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as state:
            state.write(self._state)
            state.seek(0)
            files = {"server": theirs.fileno(), "state": state.fileno()}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(files)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=tuple(files.values()),
                    env=os.environ | _ENVIRONMENT | {"PYTHONPATH": paths_of_child()},
                    process_group=0,  # Ctrl-C is not its to answer
                )
            except OSError as error:
                ours.close()
                raise SpecDecError(
                    f"no process can be started to compile forms: {error}", hint="memory may have run out"
                ) from None
        self._server, self._process = ours, process
        self._end = weakref.finalize(self, _end, ours, process)

    def _ask(self, request: bytes) -> bytes | None:
        """The answer for one grammar, with a line's end if it is complete; None if no process took the grammar."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_PATIENCE_S)
            with theirs, self._lock:
                if self._server is None:
                    self._begin()
                server = self._server
                assert server is not None
                with suppress(OSError):  # it has ended: nobody answers
                    socket.send_fds(server, [b"f"], [theirs.fileno()])
            pid = 0
            with suppress(OSError):
                ours.sendall(request)
                ours.shutdown(socket.SHUT_WR)
                pid = int.from_bytes(ours.recv(8), "little")
            if pid:
                return self._answer_of(pid, ours)
        self._give_up(server)
        return None

    def _give_up(self, server: socket.socket) -> None:
        """Have the next grammar start a new process, unless that has happened already."""
        with self._lock:
            if self._server is server:
                self._close()

    def _answer_of(self, pid: int, ours: socket.socket) -> bytes:
        ours.settimeout(_FIRST_S)
        said = bytearray()
        while True:
            try:
                part = ours.recv(1 << 20)
            except TimeoutError:
                if ours.gettimeout() != _FIRST_S:
                    _kill(pid)
                    break
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, pid, _NICE)
                with self._lock:
                    self._slow[pid] = None
                ours.settimeout(_PATIENCE_S)
                continue
            except OSError:
                break
            if not part:
                break
            said += part
        with self._lock:
            self._slow.pop(pid, None)
            if pid in self._ended:
                self._ended.remove(pid)
                if not said.endswith(b"\n"):
                    raise FormsBusy
        return bytes(said)


def _proof(said: bytes) -> Proof:
    if not said.endswith(b"\n"):
        raise FormRefused(_TOO_MUCH)
    found = json.loads(said)
    if "refused" in found:
        raise FormRefused(_TOO_MUCH if found["refused"] == ENDLESS else found["refused"])
    return Proof(**found)


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _end(server: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End a process by closing its socket: the process ends when the socket is closed."""
    server.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
        return
    process.kill()
    process.wait()


def main() -> None:
    """Keep a process forked for the next grammar, until nobody can send one any more."""
    from llguidance import LLTokenizer

    files = json.loads(sys.argv[1])
    with os.fdopen(files["state"], "rb") as state:
        tokenizer_json, vocab_size, end_ids, limits = json.loads(state.read())
    vocabulary = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=end_ids)
    start_of(vocabulary, written("grammar", 'root ::= "a"'))  # makes the tables that a vocabulary needs once
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    server = socket.socket(fileno=files["server"])
    gc.disable()
    gc.freeze()  # a garbage collection would write to, and so copy, pages shared with the parent
    is_taken = True
    while is_taken:
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.close(read)
                _try_form(vocabulary, server, write, *limits)
            finally:
                os._exit(1)
        os.close(write)
        is_taken = bool(os.read(read, 1))
        os.close(read)


def _try_form(vocabulary: Any, server: socket.socket, taken: int, most_s: float, most_bytes: int) -> None:
    """Wait for a grammar, have the next process forked, compile the grammar and send the outcome. It is compiled in a
    thread whose stack is no larger than the stack of the thread that will use it.
    """
    _, asked_files, _, _ = socket.recv_fds(server, 1, 1)
    if not asked_files:
        return
    asked = socket.socket(fileno=asked_files[0])
    os.write(taken, b"t")  # in vain where no more processes are forked: then nobody is answered
    server.close()
    os.close(taken)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():  # the parent answers if the child overflows its stack, and can say nothing itself
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (-signal.SIGSEGV, -signal.SIGBUS):
            asked.sendall(json.dumps({"refused": _OVERFLOWS}).encode() + b"\n")
        return
    asked.sendall(os.getpid().to_bytes(8, "little"))
    request = bytearray()
    while part := asked.recv(1 << 20):
        request += part
    _limit(most_s, most_bytes)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_say, args=(vocabulary, asked, *json.loads(request)))
    thread.start()
    thread.join()


def _limit(most_s: float, most_bytes: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, most_s)  # SIGPROF ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    num_bytes, _ = _memory()
    if num_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = num_bytes + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _memory() -> tuple[int, int]:
    """Bytes of address space that this process has: all, and of data. Zeros on systems without /proc, where only time
    is limited.
    """
    try:
        with open("/proc/self/statm", encoding="utf-8") as file:
            pages = [int(number) for number in file.read().split()]
    except OSError:
        return 0, 0
    return pages[0] * resource.getpagesize(), pages[5] * resource.getpagesize()


def _say(vocabulary: Any, asked: socket.socket, kind: str, text: str) -> None:
    _, before = _memory()
    try:
        form = written(kind, text)
        check_forced_text(start_of(vocabulary, form))
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, after = _memory()
        seconds, num_bytes = used.ru_utime + used.ru_stime, max(after - before, 0)
        said: dict[str, Any] = {"written": form, "seconds": seconds, "num_bytes": num_bytes}
    except MemoryError:
        os._exit(1)
    except RecursionError:
        said = {"refused": TOO_DEEP}
    except BaseException as error:  # the GBNF converter's, llguidance's, and a panic, which is no Exception
        said = {"refused": reason(str(error))}
    asked.sendall(json.dumps(said).encode() + b"\n")
