"""Memory that runs out is one sentence, which names the limit that was met."""

import errno
import re
import resource
import subprocess
import sys

import pytest
import torch
from waiting import HANG_S

from runtime.util.out_of_memory import LEAST_ADDRESSES, is_out_of_memory, out_of_memory


def run_within(num_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of so much address space."""
    return subprocess.run(
        [sys.executable, "-m", "specdec_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes)),
    )


def test_address_space_without_room_for_torch_is_told_before_it_is_imported() -> None:
    ended = run_within(LEAST_ADDRESSES - 1, "run", "--model-dir", "demo", "hello")
    assert ended.returncode == 1
    assert re.fullmatch(
        r"error: there is not enough memory for torch: `ulimit -v` limits .*, and more than 796.9 MB are needed\n"
        r"hint: raise it, to `ulimit -v \d+` or more, or lift it: `ulimit -v unlimited`\n",
        ended.stderr,
    )


def test_error_of_torch_says_how_much_was_asked_for() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(10**15, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    said = out_of_memory(error.value)
    assert "for 1,000,000,000.0 MB more" in said.message
    assert "free on this machine" in said.message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_led_to_another_error_is_told(error: Exception) -> None:
    wrapped = ValueError("the model is damaged")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)
    assert "not enough memory" in out_of_memory(wrapped).message


def test_memory_of_a_gpu_has_a_hint_of_its_own() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 1 GiB")
    said = out_of_memory(error)
    assert "2,147.5 MB more on the GPU" in said.message
    assert "ulimit" not in str(said.hint)


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "x"), RuntimeError("shape mismatch")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
