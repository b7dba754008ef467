"""Torch's OpenMP threads stay asleep while an engine generates: they would wait for work on the cores that it needs."""

import signal
from pathlib import Path

import pytest
import torch

from runtime.core.request import Request, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken
from runtime.core.verify import verify_all
from runtime.engine.engine import Engine
from runtime.kernels.ops import load_kernels, openmp_alone
from runtime.loop import orchestrator


def test_what_is_around_a_step_is_computed_by_its_thread(
    llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def watched(*arguments: object) -> list[VerifyResult | NoValidToken]:
        numbers.append(torch.get_num_threads())
        return verify_all(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("runtime.loop.step.verify_all", watched)
    commit = Sequence.commit

    def watched_commit(self: Sequence, *arguments: object) -> list[int]:
        numbers.append(torch.get_num_threads())
        return commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Sequence, "commit", watched_commit)
    torch.set_num_threads(3)
    try:
        with Engine.open(llama_engine_dir) as engine:
            for _ in orchestrator.generate(engine, [Request(0, (5, 6, 7), 2)]):
                assert torch.get_num_threads() == 3  # whoever reads what is generated has torch's threads
        with pytest.raises(KeyError), openmp_alone():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert numbers == [1] * 4


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
def test_ctrl_c_leaves_torch_its_threads(
    alone: bool, is_before: bool, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before or behind the first call that takes them, or that gives them back; and a next step too."""
    load_kernels(kernels)
    keep_alone, num_signals = torch.ops.specdec.keep_openmp_alone, 0

    def interrupted(now: bool) -> bool:
        nonlocal num_signals
        comes, num_signals = now == alone and not num_signals, num_signals + (now == alone)
        if comes and is_before:
            signal.raise_signal(signal.SIGINT)
        was_alone: bool = keep_alone(now)
        if comes:
            signal.raise_signal(signal.SIGINT)
        return was_alone

    torch.set_num_threads(3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch.ops.specdec, "keep_openmp_alone", interrupted)
            with pytest.raises(KeyboardInterrupt), openmp_alone():
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with openmp_alone():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        signal.signal(signal.SIGINT, before)
        keep_alone(False)
        torch.set_num_threads(1)
