"""The cost model gives back what was measured, and straight lines between; the measured table fits the engine."""

import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import MakeEngineDir
from tiny import make_build, make_model
from waiting import HANG_S

from runtime.builder.build import build_engine
from runtime.checkpoint.bundle import read_engine_config
from runtime.checkpoint.config import StepCost
from runtime.checkpoint.costs import CostModel, MeasuredCosts, keep_costs
from runtime.core.batch import Row
from runtime.engine.engine import Engine
from runtime.loop import step_costs
from runtime.loop.step_costs import cache_for_measuring, measure_steps, time_cell
from runtime.measure.tuning.elsewhere import read_costs
from runtime.util.errors import SpecDecError

TABLE = [
    StepCost(batch_size, context_len, num_tokens, 1e-3 * (batch_size * (2 + num_tokens) + context_len / 100))
    for batch_size in (1, 2, 4)
    for context_len in (64, 512, 2048)
    for num_tokens in (1, 2, 3, 5, 11)
]


@pytest.fixture(autouse=True)
def all_steps_measured(few_steps_measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BATCH_SIZES", "_CONTEXT_LENS"):
        monkeypatch.setattr(step_costs, name, few_steps_measured[name])


def test_another_machine_may_have_measured_them_later(tmp_path: Path) -> None:
    """Then they lie beside the engine that `run` made there."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text('{"step_costs": []}')
    with pytest.raises(SpecDecError, match="no step costs"):
        read_costs(tmp_path / "demo")
    keep_costs(tmp_path / "demo", MeasuredCosts(tuple(TABLE), 1e-3))
    for given_path in (tmp_path / "demo", tmp_path / "demo" / "config.json"):
        model, _ = read_costs(given_path)
        assert model.iteration_s(2, 64, 4) == CostModel(TABLE, 1e-3).iteration_s(2, 64, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(64, 5000), st.integers(1, 40))
def test_between_and_beyond_it_is_linear(batch_size: int, context_len: int, num_tokens: int) -> None:
    expected = 1e-3 * (batch_size * (2 + num_tokens) + context_len / 100)
    assert CostModel(TABLE, 0.0).step_s(batch_size, context_len, num_tokens) == pytest.approx(expected)


def test_price_that_jumps_with_the_tokens_of_all_rows_jumps_in_larger_batches_too() -> None:
    """Steps of 64 tokens and more take 20 ms more: 16 rows of 5 tokens are there, though 4 and 8 rows of 5 are not."""

    def seconds(batch_size: int, num_tokens: int) -> float:
        num_in_all = batch_size * num_tokens
        return 1e-3 * (2 + batch_size + num_in_all + 20 * (num_in_all > 64))

    table = [StepCost(b, 64, n, seconds(b, n)) for b in (1, 2, 4, 8) for n in range(1, 12)]
    model = CostModel(table, 0.0)
    for num_tokens in (1, 2, 4, 5, 8):
        assert model.step_s(16, 64, num_tokens) == pytest.approx(seconds(16, num_tokens), rel=0.15)


def test_busy_moment_does_not_make_drafts_look_free() -> None:
    """Gemma 3 270M in bfloat16, as measured: the step of one token took 13 ms, but for that moment."""
    seconds = {(64, 1): 21.5, (64, 11): 23.8, (512, 1): 13.0, (512, 11): 14.5, (64, 2): 13.6, (64, 7): 12.4}
    model = CostModel([StepCost(1, context, tokens, ms / 1e3) for (context, tokens), ms in seconds.items()], 0.0)
    assert model.step_s(1, 64, 1) == pytest.approx(12.4e-3)
    assert model.step_s(1, 64, 11) == model.step_s(1, 512, 11) == pytest.approx(14.5e-3)


@given(st.integers(1, 11))
def test_lines_are_those_of_numpy(num_tokens: int) -> None:
    seconds = {1: 0.010, 2: 0.0103, 5: 0.014, 11: 0.030}
    model = CostModel([StepCost(1, 100, n, s) for n, s in seconds.items()], 0.0)
    assert model.step_s(1, 7, num_tokens) == pytest.approx(np.interp(num_tokens, list(seconds), list(seconds.values())))


def test_chunks_of_prompts_are_looked_up_where_they_were_measured() -> None:
    """After 512 tokens only steps of 1 and 2 were: the line through these two says nothing about 300."""
    chunks = [StepCost(1, context_len, n, n / 1000) for context_len in (0, 2048) for n in (1, 2, 512)]
    steps = [StepCost(1, 512, 1, 0.001), StepCost(1, 512, 2, 0.0015)]
    model = CostModel([*chunks, *steps], 0.0)
    assert model.step_s(1, 512, 300) == pytest.approx(0.3, rel=1e-2)
    assert model.step_s(1, 512, 2) == pytest.approx(0.0015)


def test_line_through_noise_never_gives_steps_for_nothing() -> None:
    model = CostModel([StepCost(1, 512, 1, 0.008), StepCost(1, 2048, 1, 0.040)], 0.0)
    assert model.step_s(1, 1, 1) == pytest.approx(0.004)


def test_all_draft_lengths_are_measured_and_never_beyond_the_model(llama_engine_dir: Path) -> None:
    with Engine.open(llama_engine_dir) as engine:
        costs = measure_steps(engine, max_s=math.inf)
        assert measure_steps(engine, math.inf, costs) == costs, "what is known is not measured again"
    build = engine.config.build_config
    short = {(c.batch_size, c.num_tokens) for c in costs if c.num_tokens <= build.max_draft_len + 1}
    batch_sizes = {1, 2, build.max_batch_size}
    assert short == {(b, n) for b in batch_sizes for n in range(1, build.max_draft_len + 2)}
    assert all(0 < c.seconds < HANG_S for c in costs)
    assert max(c.context_len + c.num_tokens for c in costs) <= build.max_request_len
    assert len({(c.batch_size, c.context_len, c.num_tokens) for c in costs}) == len(costs)


def test_without_time_the_shortest_and_the_longest_row_are_measured(llama_engine_dir: Path) -> None:
    with Engine.open(llama_engine_dir) as engine:
        costs = measure_steps(engine, max_s=0.0)
        longest = engine.max_draft_len + 1
    assert [(c.batch_size, c.num_tokens) for c in costs] == [(1, 1), (1, longest)]
    assert CostModel(costs, 0.0).step_s(1, 64, longest) == costs[1].seconds


def test_measured_tokens_choose_experts_of_their_own(
    make_engine_dir: MakeEngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a row differ, and so do their experts, as transformers' router chooses them. A seed draws the
    tokens, because five tokens may happen to have the same three experts.
    """
    monkeypatch.setattr(step_costs, "_ANY", Random(0))
    model, rows, time_step = make_model("qwen3-moe"), [], Engine.time_step

    def keep(engine: Engine, measured: list[Row]) -> float:
        rows.extend(measured)
        return time_step(engine, measured)

    with Engine.open(make_engine_dir(model)) as engine:
        monkeypatch.setattr(Engine, "time_step", lambda engine, rows, by_copy: keep(engine, rows))
        time_cell(engine, 2, 16, 5)
    with torch.no_grad():
        logits = [model(torch.tensor([row.tokens]), output_router_logits=True).router_logits[0] for row in rows]
    num_chosen = [
        len(one.topk(model.config.num_experts_per_tok).indices.unique()) for one in (*logits, torch.cat(logits))
    ]
    assert min(num_chosen) > model.config.num_experts_per_tok and num_chosen[2] >= max(num_chosen)


def test_build_measures(llama_engine_dir: Path) -> None:
    config = read_engine_config(llama_engine_dir)
    assert config.step_costs and 0 < config.host_s < HANG_S and config.machine is not None


def test_a_build_measures_with_little_memory() -> None:
    """Four sequences of 2,048 tokens of 128 KB would take 1 GB; one of them is measured, or four of 512 tokens."""
    build = make_build(max_batch_size=4, max_input_len=1000, max_seq_len=4000, tokens_per_block=32)
    num_tokens = cache_for_measuring(build, block_bytes=32 * (128 << 10)).max_tokens
    assert num_tokens is not None and 2048 < num_tokens <= 2304
    assert cache_for_measuring(build, block_bytes=1 << 40).max_tokens == 96, "the first step is measured all the same"


def test_engine_is_built_where_there_is_no_memory_to_measure_it(
    llama_checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.engine.engine._free_memory", lambda device: 1000)
    build_engine(
        llama_checkpoint_dir,
        tmp_path / "engine",
        make_build(),
        torch.device("cpu"),
        replace=False,
        phase=lambda _: None,
    )
    assert read_engine_config(tmp_path / "engine").step_costs == ()
