"""Signals while the command's modules are imported: no work has begun, so the process ends without a traceback.

Importing this module sets the handlers, and `restore` takes them back once `specdec_cli.app` is imported: `main` sets
handlers of its own, and other programs that import `app` keep theirs.
"""

import os
import signal

_before: dict[int, object] = {}


def _end(signal_number: int, frame: object) -> None:
    if signal_number == signal.SIGINT:
        os.write(2, b"interrupted\n")
    os._exit(128 + signal_number)


def restore() -> None:
    """Set the handlers that were there before the import."""
    for signal_number, handler in _before.items():
        signal.signal(signal_number, handler)  # type: ignore[arg-type]  # as `signal.signal` returned it
    _before.clear()


try:
    for _number in (signal.SIGINT, signal.SIGTERM):
        _before[_number] = signal.signal(_number, _end)
except ValueError:  # in another thread than the main one no handler can be set
    pass
