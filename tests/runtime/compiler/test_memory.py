"""What a step frees is there for the next one: the system does not take it back."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, torch
from runtime.compiler.memory import keep_freed_memory
torch.set_num_threads(1)
for parameter in (-1, -3):  # glibc gives all of it back, where by itself it does by how its heap happens to lie
    ctypes.CDLL(None).mallopt(parameter, 1 << 17)
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    layers = [torch.ones(1_500_000) for _ in range(4)]
    while layers:
        layers.pop()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""
NUM_PAGES = 10 * 4 * 1_500_000 * 4 // 4096


def num_faults(what: str, **environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM, what]
    return int(subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="no glibc")
def test_what_is_freed_is_kept_unless_the_environment_says_otherwise() -> None:
    assert num_faults("not kept") > NUM_PAGES / 2
    # A step's memory may be had anew once, as its heap happens to lie: a tenth.
    assert num_faults("kept") < NUM_PAGES / 6
    assert num_faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > NUM_PAGES / 2
