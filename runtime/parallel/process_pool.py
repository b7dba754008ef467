"""Work in pieces that several processes do at once; none of them outlives the one that asks."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection
from threading import Thread
from typing import TypeVar

from runtime.errors import SpecDecError

Piece = TypeVar("Piece")
Done = TypeVar("Done")


def do_at_once(work: Callable[[Piece], Done], pieces: Seq[Piece], num_processes: int) -> list[Done]:
    """Apply `work` to each piece, in order: here, one after the other, unless there are several processes.

    `work` and what it takes and returns are sent, so it is a function of a module. What it raises is raised.
    SpecDecError if a process ends.
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
            "a process that was to do a part of the work has ended", hint="memory may have run out: have fewer at once"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _do_share(pipe: Connection, work: Callable[[Piece], Done], pieces: Seq[Piece]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by who asks
    Thread(target=_end_with_who_asks, daemon=True).start()
    try:
        pipe.send([work(piece) for piece in pieces])
    except Exception as error:
        pipe.send(error)


def _end_with_who_asks() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
