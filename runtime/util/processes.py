"""Processes that share a task and end with the process that asked for it; and what other processes need: Python's
import paths, and shared memory, which has no name, so that none is left behind.
"""

import multiprocessing
import os
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection
from typing import TypeVar

from runtime.util.errors import SpecDecError


def paths_of_child() -> str:
    """PYTHONPATH with this process's import paths, Python's own library first: a user's `types.py` beside the script
    must not replace Python's.
    """
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    return os.pathsep.join(sorted((os.path.abspath(path) for path in sys.path), key=lambda path: path not in own))


def shared_memory(num_bytes: int) -> int:
    """A nameless file of zeros, as a descriptor, which the caller closes."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("specdec", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, num_bytes)
    return file


Piece = TypeVar("Piece")
Done = TypeVar("Done")


def do_at_once(work: Callable[[Piece], Done], pieces: Seq[Piece], num_processes: int) -> list[Done]:
    """Apply `work` to each piece, in this process or in several at once; returns the results in order.

    `work`, its arguments and its results are sent to other processes, so it must be a module's function. Its exceptions
    are raised here. SpecDecError if a process ends.
    """
    num_processes = min(num_processes, len(pieces))
    if num_processes == 1:
        return [work(piece) for piece in pieces]
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    begun = []
    try:
        for i in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_do_share, args=(theirs, work, pieces[i::num_processes]), daemon=True)
            begun.append((process, ours))
            process.start()
            theirs.close()  # so that its end is noticed
        shares: list[list[Done]] = [_receive(ours) for _, ours in begun]
    finally:
        for process, ours in begun:
            if process.pid is not None:
                process.kill()
                process.join()
            ours.close()
    return [shares[i % num_processes][i // num_processes] for i in range(len(pieces))]


def _receive(pipe: Connection) -> list[Done]:
    try:
        answer: list[Done] | Exception = pipe.recv()
    except EOFError:
        raise SpecDecError(
            "a process that was to do a part of the work has ended",
            hint="memory may have run out: have fewer processes at once",
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _do_share(pipe: Connection, work: Callable[[Piece], Done], pieces: Seq[Piece]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks answers Ctrl-C
    threading.Thread(target=_end_with_who_asks, daemon=True).start()
    try:
        pipe.send([work(piece) for piece in pieces])
    except Exception as error:
        pipe.send(error)


def _end_with_who_asks() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
