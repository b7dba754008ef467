"""Threads that share an engine take turns at it, in the order in which they come, a step at a time.

While requests are being answered, an engine, its K/V cache and its drafters are used only inside a turn. So each
generation has steps of its own, and gets the tokens that it would get alone. Between its steps a generation may hold
blocks that another needs: `take_room` decides which of the two is continued.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from runtime.util.errors import SpecDecWarning

_WAIT_S, _LAST_STEP_S = 0.001, 5.0
T = TypeVar("T")
_IDLE_S = 0.05
"""Seconds after which a generation that nobody has asked for a step no longer keeps others waiting for its blocks."""


class Holder(Protocol):
    """A generation that keeps blocks between its steps."""

    @property
    def holds_room(self) -> bool: ...

    @property
    def asked_s(self) -> float:
        """Time of the last request for a step, by `time.monotonic`; infinity while a thread waits for a step."""
        ...

    def give_back(self) -> None:
        """Give back all blocks; the generation can be continued later from its tokens."""
        ...


class ThreadTurns:
    """The turns at an engine."""

    def __init__(self) -> None:
        # `_now` goes to the thread that holds `_next`: a thread that has just had a turn cannot overtake it.
        self._next, self._now = threading.Lock(), threading.RLock()
        self._left: deque[Callable[[], None]] = deque()
        self._holders: list[Holder] = []
        """Generations that may hold blocks, the oldest first."""
        self._num_inside = 0
        """Number of turns inside the taken turn: a drafter may generate with its target."""
        self._has_ended = False

    @property
    def is_mine(self) -> bool:
        """True inside a turn of this thread."""
        return bool(self._now._is_owned())  # type: ignore[attr-defined]

    def take(self, work: Callable[[], T]) -> T:
        """Call `work` when it is this thread's turn (inside a turn, at once), and return its result. Ctrl-C may come at
        any point, and leaves no turn taken.
        """
        if self.is_mine:
            self._num_inside += 1
            try:
                return work()
            finally:
                self._num_inside -= 1
        try:
            with self._next:
                self._now.acquire()
            self._do_what_was_left()
            result = work()
        except BaseException:
            if self.is_mine:
                self._now.release()
            raise
        self._now.release()
        return result

    def take_with_room(self, work: Callable[[], T | None]) -> T:
        """Repeat `take` while `work` returns None, since it finds no room beside other generations."""
        while (result := self.take(work)) is None:
            time.sleep(_WAIT_S)
        return result

    def do_or_leave(self, work: Callable[[], None]) -> None:
        """Call `work` now, or, if a turn is taken, before the next turn; for work that must not wait. A generator is
        closed when it is collected: in any thread, in the middle of anything that the thread does.
        """
        is_free = False
        try:
            is_free = not self.is_mine and self._now.acquire(blocking=False)
            if is_free:
                work()
            else:
                self._left.append(work)
        finally:
            if is_free:
                self._now.release()

    def _do_what_was_left(self) -> None:
        while self._left:
            try:
                self._left.popleft()()
            except Exception as error:  # it belongs to another thread's generation, which has ended
                warnings.warn(f"a generation that was left could not be ended: {error}", SpecDecWarning, stacklevel=2)

    def end(self) -> bool:
        """Take the last turn: others wait for the process to end. False if a turn does not end within 5 s."""
        self._has_ended = self.is_mine or self._now.acquire(timeout=_LAST_STEP_S)
        return self._has_ended

    def wait_if_ended(self) -> None:
        """Wait forever if the interpreter is ending, so that nothing more is computed and no error is raised."""
        if self._has_ended and not self.is_mine:
            threading.Event().wait()

    def enter(self, holder: Holder) -> None:
        """Count a generation among those that may hold blocks, until it leaves. Must be called inside a turn."""
        if holder not in self._holders:
            self._holders.append(holder)

    def leave(self, holder: Holder) -> None:
        if holder in self._holders:
            self._holders.remove(holder)

    def take_room(self, asking: Holder | None) -> bool | None:
        """Have another generation give back its blocks: one that nobody asks for steps, or one younger than `asking`.

        A generation that has not entered, or None, is the youngest. Returns False if the other generations are to be
        continued first. Returns None if no others hold blocks, or if this turn is inside another, for which they would
        wait.
        """
        others = [one for one in self._holders if one is not asking and one.holds_room]
        if not others or self._num_inside:
            return None
        younger = self._holders[self._holders.index(asking) + 1 :] if asking in self._holders else []
        idle_since_s = time.monotonic() - _IDLE_S
        for one in reversed(others):
            if one in younger or one.asked_s < idle_since_s:
                one.give_back()
                return True
        return False
