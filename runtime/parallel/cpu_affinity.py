"""Placement of rank 0: whatever thread calls a split engine's step is kept to the cores of its first device.

One process is rank 0 of all engines, so it goes from one's device to another's; when the last has closed, it has all
cores back.
"""

import threading
from collections.abc import Sequence as Seq

import torch

from runtime.parallel.devices import pin, usable_cores

_lock = threading.Lock()
_here = threading.local()


class Place:
    """CPU placement of one engine's rank 0."""

    def __init__(self, cores: Seq[int]) -> None:
        self._cores = cores
        with _lock:
            self._threads: int = next(iter(_open))._threads if _open else torch.get_num_threads()
            _open.add(self)

    def take(self) -> None:
        """Keep this thread, and those that it begins, to the cores."""
        if getattr(_here, "place", None) is not self:
            pin(self._cores)
            torch.set_num_threads(min(self._threads, len(self._cores)))
            _here.place = self

    def leave(self) -> None:
        """Left, it can be left again, and not be taken any more."""
        with _lock:
            is_last = _open == {self}
            _open.discard(self)
        if is_last:
            pin(usable_cores())
            torch.set_num_threads(self._threads)
            _here.place = None


_open: set[Place] = set()
