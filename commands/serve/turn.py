"""Turns of the threads that read requests: they compute in Python, and together would delay the model's steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock, get_ident

_MOST_TEMPLATES = 4
"""Chat templates that are rendered at once, beside the thread that has its turn."""


class Turn:
    """Lets one thread at a time work on a body. A thread gives its turn to others while it waits for a grammar, and
    while it renders a chat template, which may loop for seconds.
    """

    def __init__(self) -> None:
        self._lock, self._templates = Lock(), BoundedSemaphore(_MOST_TEMPLATES)
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let other threads work within the block, if it is this thread's turn."""
        if self._owner != get_ident():
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Give up the turn, as `left` does, while a chat template is rendered; waits if a few are being rendered
        already.
        """
        with self.left(), self._templates:
            yield
