"""Errors that a user can cause, and warnings. They state facts; commands add the flag to change.

`specdec_cli.app` turns errors into one message, a hint and an exit code, and warnings into one line.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


class SpecDecError(Exception):
    """The user's files, machine or settings make something impossible (exit code 1).

    `message` says what is wrong and ends with the value; `hint` says what to do. `code` identifies the error for a
    caller with a better hint, such as the command line, which names its own flags and fills in `values`. The value
    `field` names the field of a request (`runtime.core.params`) that is wrong; a server passes it on to its client.
    """

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.values = values
        if hint is not None:
            self.add_note(f"hint: {hint}")  # tracebacks end with it


class UsageError(SpecDecError):
    """A setting that is wrong whatever the files contain (exit code 2)."""


class RequestError(SpecDecError):
    """A request that cannot be continued, with its name. The other requests were answered."""


@contextmanager
def draft_engine_errors() -> Iterator[None]:
    """Add to errors raised within the block that they are about the draft engine."""
    try:
        yield
    except SpecDecError as error:
        code = "no_draft_engine" if error.code == "no_engine" else error.code
        raise type(error)(f"draft engine: {error.message}", hint=error.hint, code=code, **error.values) from error


@contextmanager
def errors_about(given: str, made: str) -> Iterator[None]:
    """Within the block, an error that names a path below `made` names the same path below `given`, the user's directory
    or file; `given` itself if it has no such file.
    """

    def named(match: re.Match[str]) -> str:
        same = given + match[0].removeprefix(made)
        return same if os.path.exists(same) else given

    try:
        yield
    except SpecDecError as error:
        message = re.sub(rf"{re.escape(made)}[\w./-]*", named, error.message)
        if message == error.message:
            raise
        raise type(error)(message, hint=error.hint, code=error.code, **error.values) from error


class SpecDecWarning(UserWarning):
    """A warning: something worth knowing that stops nothing."""
