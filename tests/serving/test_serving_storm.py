"""A share of scripts/campaigns/serve_storm.py, on the tiny model; that it notices what is wrong is tried too."""

import asyncio
from collections.abc import Callable

import pytest
from serving_models import Listening

from runtime.drafters.specs import NgramDrafter
from scripts.campaigns.serve_storm import Outcome, cache_usage, expected_of, make_bodies, storm, wait_until_idle


def test_a_storm_leaves_nothing_behind(make_listening: Callable[..., Listening]) -> None:
    listening = make_listening(NgramDrafter(4, 2), max_queue_len=40)

    async def run() -> tuple[Outcome, float]:
        outcome = await storm(listening.port, make_bodies(12, 40, 1), 90, 16, 3)
        await wait_until_idle(listening.port)
        return outcome, await cache_usage(listening.port)

    outcome, usage = asyncio.run(run())
    assert outcome.failures == []
    assert outcome.num_cancelled > 3 and outcome.num_right > 12 and outcome.num_by_status[400] > 3
    assert set(outcome.num_by_status) <= {200, 400, 503}
    assert usage == 0
    loop, engine = listening.model.loop, listening.model.llm.engine
    assert "error" not in loop.totals.num_finished
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    assert loop._router._own == {} and not loop.unfinished()


def test_a_wrong_answer_is_noticed(make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    listening = make_listening()

    async def wrong(port: int, bodies: list[dict[str, object]]) -> list[list[str]]:
        return [[*texts[:-1], texts[-1] + "?"] for texts in await expected_of(port, bodies)]

    monkeypatch.setattr("scripts.campaigns.serve_storm.expected_of", wrong)
    outcome = asyncio.run(storm(listening.port, make_bodies(3, 5, 1), 20, 4, 3))
    assert outcome.failures and outcome.num_right == 0
