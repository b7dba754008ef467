"""The functions that are called, and their number: what a step costs, on any machine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], None]) -> int:
    """Calls of Python's functions and of C's."""
    number = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    with _profiled(count):
        work()
    return number


def calls_within(folder: Path, work: Callable[[], object]) -> list[tuple[Path, str, Path]]:
    """(caller's file, function, its file) of each call of a function that is written in the folder, in their order.
    A caller in other folders, such as torch's, is left out: the caller is then the last function of this folder.
    """
    calls: list[tuple[Path, str, Path]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or frame.f_code.co_name.startswith("<"):  # a list comprehension is no function of ours
            return
        path, caller = Path(frame.f_code.co_filename), frame.f_back
        if path.is_relative_to(folder):
            while caller is not None and not Path(caller.f_code.co_filename).is_relative_to(folder):
                caller = caller.f_back
            if caller is not None:
                calls.append((Path(caller.f_code.co_filename), frame.f_code.co_qualname, path))

    with _profiled(note):
        work()
    return calls


@contextmanager
def _profiled(notice: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(before)
