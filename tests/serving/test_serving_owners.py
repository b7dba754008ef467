"""Keys and values by owner, found over HTTP: who asked what is told to nobody else, and a restart forgets nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from serving_models import PROMPT, MakeServed, Served
from test_serving_metrics import samples

from commands.serve.warm import warm
from runtime.core.block_store import BlockStore
from runtime.drafters.specs import AnswerDrafter
from runtime.engine.engine import KVCacheConfig
from runtime.util.errors import SpecDecError

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "The little dog lost the red ball in the park."}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 2, "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


def num_cached(served: Served, path: str, body: dict[str, Any], key: str | None = None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = served.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_owner_finds_what_it_asked_and_nothing_else(place: str, make_served: MakeServed, tmp_path: Path) -> None:
    """Owners by `cache_salt` in all protocols, and by their API keys; of completions on the disk too.

    What is found is the prompt but for its last token, which is computed for its logits.
    """
    served = make_served(None, kv_cache=KVCacheConfig(disk_dir=tmp_path if place == "disk" else None))
    engine = served.llm.engine
    for path, body in ROUTES.items() if place == "memory" else [*ROUTES.items()][:1]:
        engine.clear_cache()
        if place == "disk":
            engine.flush_disk()
            BlockStore(tmp_path).prune(0)

        def found(**salt: str) -> int:
            engine.flush_disk()
            if place == "disk":
                engine.clear_cache()
            return num_cached(served, path, body | salt)  # noqa: B023  # it is called in this turn

        before = engine.prompt_tokens
        assert found(cache_salt="mine") == 0
        own, none, other = found(cache_salt="mine"), found(), found(cache_salt="yours")
        counts = engine.prompt_tokens
        num_tokens = (counts.num_computed - before.num_computed) // 3
        in_memory, on_disk = counts.num_in_memory - before.num_in_memory, counts.num_on_disk - before.num_on_disk
        assert (in_memory, on_disk) == ((own, 0) if place == "memory" else (0, own))
        assert own == num_tokens - 1 > 8, path
        assert none == other == 0, path
    if place == "disk":
        return
    assert served.post("/v1/completions", prompt="a", cache_salt="").status_code == 400
    served = make_served(None, api_key="one,two")
    (path, body), *_ = ROUTES.items()
    assert num_cached(served, path, body, "one") == num_cached(served, path, body, "two") == 0
    assert num_cached(served, path, body, "one") == num_cached(served, path, body, "two") > 0
    assert num_cached(served, path, body | {"cache_salt": "x"}, "one") == 0


def test_a_client_drafts_its_own_answers_and_no_other_clients(make_served: MakeServed) -> None:
    """Counts of drafted tokens, which a client could measure as time, by key and `cache_salt`."""
    served = make_served(AnswerDrafter(10), api_key="one,two")

    def num_drafted(key: str, **body: Any) -> int:
        before = served.model.loop.totals.num_draft_tokens
        asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | body
        response = served.client.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return served.model.loop.totals.num_draft_tokens - before

    for key, body in (("one", {}), ("two", {}), ("one", {"cache_salt": "x"})):
        assert num_drafted(key, **body) == 0 < num_drafted(key, **body)
    assert num_drafted("one", speculative=False) == 0


@pytest.mark.parametrize("keys", [[], ["one", "two"]], ids=["all", "each key"])
def test_warm_prompts_are_found_at_once_and_after_a_restart(
    make_served: MakeServed, keys: list[str], tmp_path: Path
) -> None:
    lines = [
        {"prompt": PROMPT},
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none", "max_tokens": 100},
        {"custom_id": "a line of a batch", "body": {"prompt": PROMPT[:20], "cache_salt": "mine"}},
    ]
    path = tmp_path / "warm.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [("/v1/completions", lines[0] | {"max_tokens": 2}), ("/v1/chat/completions", lines[1] | {"max_tokens": 2})]
    for is_first in (True, False):
        kv_cache = KVCacheConfig(disk_dir=tmp_path / "kv")
        served = make_served(None, kv_cache=kv_cache, api_key=",".join(keys) or None)
        told = warm(served.model, path, [key.encode() for key in keys])
        counts = served.llm.engine.prompt_tokens
        assert told.endswith(
            f"{counts.num_in_memory + counts.num_on_disk:,} were found and {counts.num_computed:,} computed"
        )
        assert (counts.num_on_disk > counts.num_computed) == (not is_first)
        for key in keys or [None]:
            for route, body in asked:
                assert num_cached(served, route, body, key) > 8
        if not keys:
            now, found = served.llm.engine.prompt_tokens, samples(served)
            for name in ("in_memory", "on_disk", "computed"):
                assert found[f"specdec:prompt_tokens_{name}_total"] == getattr(now, f"num_{name}")
        served.llm.engine.flush_disk()
    path.write_text('{"messages": 3}\n')
    with pytest.raises(SpecDecError) as raised:
        warm(served.model, path, [])
    assert f"line 1 of {path}" in raised.value.message and raised.value.hint
