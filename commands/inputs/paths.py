"""Files that a command line names are looked at before torch is imported, which takes seconds."""

import os
from pathlib import Path

from runtime.errors import SpecDecError


def check_readable(paths: list[Path]) -> None:
    """SpecDecError for one that is no file or cannot be read. Nothing is read: a pipe gives what it holds once."""
    for path in paths:
        reason = None
        if not path.exists():
            reason = "No such file or directory"
        elif path.is_dir():
            reason = "Is a directory"
        elif not os.access(path, os.R_OK):
            reason = "Permission denied"
        if reason is not None:
            raise SpecDecError(f"cannot read the file ({reason}): {path}", hint="check the path")
