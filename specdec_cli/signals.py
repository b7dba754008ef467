"""Signals while the command's modules are imported: nothing has begun, and the process ends without a traceback.

Importing this module sets the handlers, and `restore` takes them back once `specdec_cli.app` is imported: `main` sets
handlers of its own, and other programs that import `app` keep theirs.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

_before: dict[int, Any] = {}


def _end(signal_number: int, frame: FrameType | None) -> None:
    if signal_number == signal.SIGINT:
        os.write(2, b"interrupted\n")
    os._exit(128 + signal_number)


def restore() -> None:
    """Set the handlers that were there before the import."""
    for signal_number, handler in _before.items():
        signal.signal(signal_number, handler)
    _before.clear()


if threading.current_thread() is threading.main_thread():
    _before |= {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
