"""Numbers in hints for requests that are too long: a request by the hint fits, and the next longer does not."""

from dataclasses import replace

import pytest

from runtime.checkpoint.config import BuildConfig
from runtime.core.limits import check_lengths
from runtime.core.request import Request
from runtime.util.errors import SpecDecError

POSITIONS = 24
BUILD = BuildConfig("none", 1, 10, 16, 0, 16, "none")


def error_of(num_prompt: int, num_output: int, build: BuildConfig = BUILD) -> SpecDecError | None:
    try:
        check_lengths(Request(0, (5,) * num_prompt, num_output), build, lambda: POSITIONS)
    except SpecDecError as error:
        return error
    return None


@pytest.mark.parametrize("num_output", [1, 6, 7, 14])
@pytest.mark.parametrize("num_prompt", [2, 10, 11, 23, 24, 40])
def test_a_hint_names_numbers_that_fit(num_prompt: int, num_output: int) -> None:
    error = error_of(num_prompt, num_output)
    if error is None:
        assert num_prompt <= BUILD.max_input_len and num_prompt + num_output <= BUILD.max_request_len
    elif error.values["field"] == "prompt":
        fits, needed = int(str(error.values["fits"])), error.values.get("num_needed")
        assert f" {fits} tokens" in str(error.hint)
        assert error_of(fits, num_output) is None and error_of(fits + 1, num_output) is not None
        assert (needed is None) == (num_prompt >= POSITIONS)
        if needed is not None:
            larger = replace(BUILD, max_input_len=num_prompt, max_seq_len=int(str(needed)))
            assert error_of(num_prompt, min(num_output, POSITIONS - num_prompt), larger) is None
    else:
        room = BUILD.max_request_len - num_prompt
        assert f"`max_tokens` to {room}" in str(error.hint)
        assert error_of(num_prompt, room) is None and error_of(num_prompt, room + 1) is not None
