"""Kernels share their work with threads of their own: in any thread, after a fork, for several callers, at exit."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked import Forks
from torch import Tensor

from runtime.kernels.ops import load_kernels

THREADS = 3


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels(kernels: Path) -> None:
    load_kernels(kernels)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Layer:
    """A linear layer's input, packed weight, and output as torch computes it; by the tests' own thread, and once."""

    x: Tensor
    packed: Tensor
    expected: Tensor

    @property
    def is_right(self) -> bool:
        output = torch.ops.specdec.linear(self.x, self.packed, None, 999, 0)
        return bool((output - self.expected).abs().max() < 1e-4)


@pytest.fixture(scope="module")
def layers(loaded_kernels: None) -> list[Layer]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(999, 64, generator=generator) for _ in range(20)]
    inputs = [torch.randn(5, 64, generator=generator) for _ in range(20)]
    return [Layer(x, torch.ops.specdec.pack_linear(w), x @ w.T) for x, w in zip(inputs, weights, strict=True)]


def are_right(layers: list[Layer]) -> bool:
    return all(layer.is_right for layer in layers)


def num_threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_callers_do_not_know_of_each_other(layers: list[Layer]) -> None:
    wrong: list[Layer] = []

    def call() -> None:
        torch.set_num_threads(THREADS)  # is each thread's own
        wrong.extend(layer for layer in layers * 10 if not layer.is_right)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def run_program(forks: Forks, kernels: Path, program: str) -> str:
    """Output of a process of its own that has the kernels and a linear layer, `work()`. It must end well."""
    beginning = f"""
import os, sys, threading, time, torch
torch.ops.load_library({str(kernels)!r})
torch.set_num_threads({THREADS})
x, packed = torch.ones(5, 64), torch.ops.specdec.pack_linear(torch.ones(999, 64))
def work():
    torch.set_num_threads({THREADS})
    for _ in range(1000):
        torch.ops.specdec.linear(x, packed, None, 999, 0)
def num_threads():
    return len(os.listdir("/proc/self/task"))
"""
    result = forks.run(program=beginning + program)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def exit_code_of_child(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_and_its_parent_go_on(layers: list[Layer]) -> None:
    """The child computes loops and products of torch's too, which its parent has shared among threads."""
    many = torch.ones(300_000)
    assert are_right(layers)
    assert float(many.exp().sum()) > 0  # in OpenMP's threads
    for _ in range(3):
        assert exit_code_of_child(lambda: are_right(layers) and float(many.exp().sum()) > 0) == 0
        assert are_right(layers)


def test_a_childs_tasks_are_shared_again(layers: list[Layer]) -> None:
    def work() -> bool:
        before = num_threads_of_this_process()
        torch.ops.specdec.keep_openmp_alone(True)
        torch.ops.specdec.keep_openmp_alone(False)
        return are_right(layers) and (before, num_threads_of_this_process()) == (1, THREADS)

    assert are_right(layers)
    assert exit_code_of_child(work) == 0
    assert exit_code_of_child(lambda: exit_code_of_child(work) == 0) == 0


@pytest.mark.parametrize(
    "ending",
    ["work()", pytest.param("work(); sys.exit(0)", marks=pytest.mark.slow), "threading.Thread(target=work).start()"],
)
def test_a_process_ends_while_helpers_wait(ending: str, forks: Forks, kernels: Path) -> None:
    assert run_program(forks, kernels, ending) == ""


def test_torchs_loops_are_computed_alone_and_kernels_are_not(layers: list[Layer]) -> None:
    """And the number of threads is what it was before, whatever happens twice."""
    for was_alone in (False, True):
        assert torch.ops.specdec.keep_openmp_alone(True) == was_alone
        assert torch.get_num_threads() == 1
        assert are_right(layers)
    for was_alone in (True, False):
        assert torch.ops.specdec.keep_openmp_alone(False) == was_alone
        assert torch.get_num_threads() == THREADS


def test_every_thread_takes_tiny_numbers_for_zero_where_the_caller_does() -> None:
    x = torch.full((1, 2), 1e-20)
    packed = torch.ops.specdec.pack_linear(torch.full((4096, 2), 1e-20))  # products of 1e-40 are no normal numbers
    for flushes in (True, False):
        torch.set_flush_denormal(flushes)
        try:
            outputs = torch.cat([torch.ops.specdec.linear(x, packed, None, 4096, 0) for _ in range(200)])
            assert set((outputs.view(torch.int32) == 0).flatten().tolist()) == {flushes}
        finally:
            torch.set_flush_denormal(False)
