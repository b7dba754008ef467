"""Number of functions that are called, Python's and C's: what a step costs, on any machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], None]) -> int:
    number = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number
