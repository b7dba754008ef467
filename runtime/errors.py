"""Errors a user can cause; `specdec_cli.app` turns them into one message, a hint and an exit code."""


class SpecDecError(Exception):
    """Something the user's files, machine or settings make impossible (exit code 1).

    `message` says what is wrong and ends with the value; `hint` says what to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecDecError):
    """A command line that is wrong whatever the files hold (exit code 2)."""
