"""Memory that a step frees is there for the next one. A build takes little more than its engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_model

from runtime.kernels.memory import zeros

# Each in a fork of a process that has imported torch.
PROGRAM = """
import ctypes, json, os, resource, sys, torch
from runtime.kernels.memory import keep_freed_memory
torch.set_num_threads(1)
for what, environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
os.environ.update(environment)
for parameter in (-1, -3):  # glibc gives all of it back, where by itself it does by how its heap happens to lie
    ctypes.CDLL(None).mallopt(parameter, 1 << 17)
if what == "kept":
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no glibc")
def test_what_is_freed_is_kept_unless_the_environment_says_otherwise() -> None:
    cases = [("not kept", {}), ("kept", {}), ("kept", {"MALLOC_TRIM_THRESHOLD_": "131072"})]
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    not_kept, kept, told_otherwise = map(int, done.stdout.split())
    assert min(not_kept, told_otherwise) > NUM_PAGES / 2
    # A step's memory may be had anew once, as its heap happens to lie: a tenth.
    assert kept < NUM_PAGES / 6


BUILD = """
import sys, torch
from pathlib import Path
from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig
torch.set_num_threads(1)
model_dir, work_dir = Path(sys.argv[1]), Path(sys.argv[2])
def memory(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))
build = BuildConfig("aot", 2, 20, 50, 5, 16, "draft_tokens_external")
before = memory("VmRSS")
convert(model_dir, work_dir / "checkpoint", None, replace=False, progress=lambda *_: None)
build_engine(work_dir / "checkpoint", work_dir / "engine", build, torch.device("cpu"), replace=False,
             phase=lambda name: None, effort=BuildEffort(measure_costs=False))
print(memory("VmHWM") - before)
"""
OVERHEAD_BYTES = 250 << 20
"""Memory of an export and of the libraries that it needs, and what stays of the weights that were read."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_build_takes_little_more_memory_than_its_weights(kernels: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 11, "initializer_range": 0.05}
    model = make_model("llama", **sizes)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes > 135e6
    model.save_pretrained(tmp_path / "model")
    del model
    command = [sys.executable, "-c", BUILD, str(tmp_path / "model"), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 1.3 * num_bytes + OVERHEAD_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_the_first_bytes_of_many_pools_take_little_memory() -> None:
    """30 pages of 4 KB, not of 2 MB, which would be 60 MB where the system has them."""
    pools = [zeros((6 << 20,), torch.uint8, torch.device("cpu")) for _ in range(30)]
    before = resident_bytes()
    for pool in pools:
        pool[:100] = 1
    assert resident_bytes() - before < 30 << 16
    for pool in pools:
        assert "nh" in flags_at(pool.data_ptr()) and "hg" in flags_at(pool.data_ptr() + (5 << 20))


def flags_at(address: int) -> list[str]:
    """Linux's flags of a mapping of this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, _, end = line.split()[0].partition("-")
        if end and int(begin, 16) <= address < int(end, 16):
            return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]
    raise AssertionError("it is not mapped")
