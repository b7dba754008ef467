"""What a step frees is there for the next one: the system does not take it back."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from runtime.compiler.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():  # three quarters of 24 MB at a time
    layers = [torch.ones(1_500_000) for _ in range(4)]
    return [layers.pop().sum() for _ in range(4)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def num_faults(what: str, **environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM, what]
    return int(subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="no glibc")
def test_what_is_freed_is_kept_unless_the_environment_says_otherwise() -> None:
    num_pages = 10 * 4 * 1_500_000 * 4 // 4096
    assert num_faults("kept") < num_pages / 100
    told = num_faults("kept", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert told > num_pages / 2
