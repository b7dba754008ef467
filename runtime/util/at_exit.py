"""Closes generators and engines that are open when the interpreter ends, before finalizers find that modules are gone.

A script may end with an `LLM` that nobody closed, or a generator that nobody read to its end, in any thread.
"""

import atexit
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakMethod, WeakSet

T = TypeVar("T")
_generators: "WeakSet[Generator[Any]]" = WeakSet()
_others: list[WeakMethod[Callable[[], None]]] = []
_process_id = os.getpid()


def closed_at_exit(generator: Generator[T]) -> Generator[T]:
    """The generator, registered to be closed before everything else at the end of the process."""
    _generators.add(generator)
    return generator


def call_at_exit(method: Callable[[], None]) -> None:
    """Call this method at the end of the process, if its object still exists."""
    _others[:] = [one for one in _others if one() is not None]
    _others.append(WeakMethod(method))


@atexit.register
def _close_all() -> None:
    if os.getpid() != _process_id:  # a fork's parent still uses them
        return
    methods = [one() for one in _others]
    for close in [*(one.close for one in list(_generators)), *(one for one in methods if one is not None)]:
        with suppress(Exception):  # such as a generator that another thread is in
            close()
