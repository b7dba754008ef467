"""A clock that goes on with the work that engines do: what it measures is the same on any machine."""

import time

import pytest

from runtime.core.batch import Row
from runtime.engine.engine import Engine

_TICK_S = 1e-6  # of each look at it, so that whoever waits for it gets on


class WorkClock:
    """Stands in for `time.perf_counter`. A step takes a millisecond for each layer, and more for its tokens."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += _TICK_S
        return self.now

    @staticmethod
    def step_s(num_layers: int, num_tokens: int) -> float:
        return 1e-3 * num_layers * (1 + 0.05 * num_tokens)


def install(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    """Sets the clock for all engines of this process."""
    clock, forward = WorkClock(), Engine._forward

    def timed(engine: Engine, rows: list[Row], *, by_copy: bool = False) -> object:
        before = engine.step_time_s, engine.copy_time_s
        logits = forward(engine, rows, by_copy=by_copy)
        num_layers = engine.config.pretrained_config["num_hidden_layers"]
        step_s = clock.step_s(num_layers, sum(len(row.tokens) for row in rows))
        clock.now += step_s
        engine.step_time_s, engine.copy_time_s = before
        if by_copy:
            engine.copy_time_s += step_s
        else:
            engine.step_time_s += step_s
        return logits

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Engine, "_forward", timed)
    return clock
