"""The shipped head drafts for `serve`, whose answers are as without it."""

import json
from pathlib import Path
from typing import Any

import pytest
from serving_models import opened
from starlette.testclient import TestClient

from runtime.builder.engine_cache import EngineSettings, engine_of_model
from runtime.drafters.heads.head_config import read_head
from runtime.drafters.specs import EagleDrafter

ARTICLES = Path(__file__).parents[2] / "runtime/demo/articles.jsonl"


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    states = read_head("demo-head").hidden_states_of(6)
    with engine_of_model("demo", EngineSettings(hidden_states=states, compiler="none")) as directory:
        return directory


def test_answers_are_the_same_and_drafts_accepted(engine_dir: Path) -> None:
    article = json.loads(ARTICLES.read_text(encoding="utf-8").splitlines()[0])["article"]
    body = {"prompt": f"{article} TL;DR:", "max_tokens": 40, "temperature": 0}

    def answer(drafter: Any) -> tuple[str, str]:
        with opened(engine_dir, None, drafter) as (_, app), TestClient(app) as client:
            return client.post("/v1/completions", json=body).json()["choices"][0]["text"], client.get("/metrics").text

    plain, _ = answer(None)
    drafted, metrics = answer(EagleDrafter("demo-head", 4))
    assert drafted == plain
    counts = [line for line in metrics.splitlines() if "spec_decode_num_accepted_tokens_total{" in line]
    assert float(counts[0].split()[-1]) > 0, metrics
