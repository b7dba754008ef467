"""Hides the lines that a Rust library writes when it panics: the error that follows says what went wrong.

Rust writes these lines to file descriptor 2, and no setting of the library or of Python stops that. So while a command
calls such a library, descriptor 2 is another file. Its content is passed on afterwards, without the panic.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

_STDERR = 2
_PANIC = re.compile(rb"\n?thread '[^\n]*' (?:\(\d+\) )?panicked at .*", re.DOTALL)
_lock = Lock()


class _Held:
    """Number of blocks that threads are in, and descriptors: of real standard error, and of the file in its place."""

    is_command = False
    num_blocks = 0
    own, held = -1, -1


def hold_panics() -> None:
    """Hold panics back in this process from now on. Not for a user's process: a child started by another thread
    meanwhile would inherit the replaced file.
    """
    _Held.is_command = hasattr(os, "memfd_create")


@contextmanager
def panics_held() -> Iterator[None]:
    """Pass on at the block's end what it wrote to standard error, except a Rust library's panic."""
    with _lock:
        is_held = _Held.is_command and (_Held.num_blocks > 0 or _begin())
        _Held.num_blocks += is_held
    try:
        yield
    finally:
        with _lock:
            _Held.num_blocks -= is_held
            if is_held and not _Held.num_blocks:
                _end()


def _begin() -> bool:
    """Replace descriptor 2; False if no more files can be opened."""
    with suppress(OSError):
        sys.stderr.flush()
        own = os.dup(_STDERR)
        try:
            held = os.memfd_create("stderr")
            os.dup2(held, _STDERR)
        except OSError:
            os.close(own)
            raise
        _Held.own, _Held.held = own, held
        return True
    return False


def _end() -> None:
    with suppress(OSError):
        sys.stderr.flush()
    os.dup2(_Held.own, _STDERR)
    os.close(_Held.own)
    with os.fdopen(_Held.held, "rb") as held, suppress(OSError):
        held.seek(0)
        if said := _PANIC.sub(b"", held.read()):
            os.write(_STDERR, said)
