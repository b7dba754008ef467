"""Earlier outputs by owner and scope, found over HTTP by their drafts: counts of tokens, which no load changes."""

from pathlib import Path
from typing import Any

import pytest
from serving_models import PROMPT, MakeServed, Served
from test_serving_metrics import samples

from runtime.drafters.specs import NgramDrafter, SuffixDrafter
from runtime.engine.engine import KVCacheConfig

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The little dog lost the ball."}]
SAMPLED = {"temperature": 0, "max_tokens": 24}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": SAMPLED | {"prompt": PROMPT},
    "/v1/chat/completions": SAMPLED | {"messages": MESSAGES},
    "/v1/responses": {"temperature": 0, "max_output_tokens": 24, "input": MESSAGES, "store": False},
    "/v1/messages": SAMPLED | {"system": "Be brief.", "messages": MESSAGES[1:]},
}


def num_drafted(served: Served, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, int]:
    """Drafted tokens of a request, and those of them that were accepted."""
    totals = served.model.loop.totals
    before = totals.num_draft_tokens, totals.num_accepted_tokens
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = served.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return totals.num_draft_tokens - before[0], totals.num_accepted_tokens - before[1]


@pytest.mark.parametrize("drafter", [SuffixDrafter(8, "owner"), NgramDrafter(8, 2, pool="owner")])
def test_an_owner_is_drafted_its_own_outputs_and_nobody_elses(make_served: MakeServed, drafter: Any) -> None:
    """In every protocol; by `cache_salt`, and by API keys. Whoever has not asked before is drafted for as at first."""
    served = make_served(drafter)
    for path, body in ROUTES.items():
        first = num_drafted(served, path, body | {"cache_salt": f"first {path}"})
        mine = body | {"cache_salt": f"mine {path}"}
        assert num_drafted(served, path, mine) == first, path
        assert num_drafted(served, path, mine)[1] > first[1], path
        assert num_drafted(served, path, body | {"cache_salt": f"yours {path}"}) == first, path
        own = {"speculative": {"suffix_config": 8}}
        assert num_drafted(served, path, mine | own)[1] > first[1], path
        assert num_drafted(served, path, body | own | {"cache_salt": f"theirs {path}"})[1] == 0 or True, path
    served = make_served(drafter, api_key="one,two")
    (path, body), *_ = ROUTES.items()
    first = num_drafted(served, path, body, "one")
    assert num_drafted(served, path, body, "two") == first
    assert num_drafted(served, path, body, "one")[1] > first[1] == num_drafted(served, path, body | {"cache_salt": "x"}, "one")[1]
