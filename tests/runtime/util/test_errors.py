"""Errors: a traceback shows the hint too, wherever the error was raised."""

import pickle
import traceback

from runtime.util.errors import SpecDecError, UsageError


def test_a_traceback_ends_with_the_hint() -> None:
    error = UsageError("`LLM` has no argument of this name: max_len", hint="perhaps `max_seq_len`")
    lines = ["runtime.util.errors.UsageError: `LLM` has no argument of this name: max_len\n"]
    for one in (error, pickle.loads(pickle.dumps(error))):  # as it comes from another process
        assert traceback.format_exception_only(one) == [*lines, "hint: perhaps `max_seq_len`\n"]
        assert str(one) == one.message
    assert traceback.format_exception_only(SpecDecError("no")) == ["runtime.util.errors.SpecDecError: no\n"]
