"""Earlier outputs and corpora by owner, found over HTTP by their drafts: counts of tokens, which no load changes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from serving_models import PROMPT, TOOL_TEMPLATE, MakeServed, Served
from test_serving_metrics import samples

from commands.serve import corpora
from commands.serve.flags import ServerOptions
from runtime.drafters.specs import NgramDrafter, SuffixDrafter
from runtime.engine.engine import KVCacheConfig
from runtime.text.corpus import write_corpus
from runtime.text.text import encode_text, tokenizer_digest
from runtime.util.errors import SpecDecError, UsageError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The little dog lost the ball."}]
GREEDY = {"temperature": 0, "max_tokens": 24}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": GREEDY | {"prompt": PROMPT},
    "/v1/chat/completions": GREEDY | {"messages": MESSAGES},
    "/v1/responses": {"temperature": 0, "max_output_tokens": 24, "input": MESSAGES, "store": False},
    "/v1/messages": GREEDY | {"system": "Be brief.", "messages": MESSAGES[1:]},
}
POOLED = SuffixDrafter(8, "owner")


def num_drafted(served: Served, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, int]:
    """Drafted tokens of a request, and those of them that were accepted."""
    totals = served.model.loop.totals
    before = totals.num_draft_tokens, totals.num_accepted_tokens
    response = served.client.post(path, json=body, headers=by(key))
    assert response.status_code == 200, response.text
    return totals.num_draft_tokens - before[0], totals.num_accepted_tokens - before[1]


def by(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("drafter", [POOLED, NgramDrafter(8, 2, pool="owner")], ids=["suffix", "ngram"])
def test_an_owner_is_drafted_its_own_outputs_and_nobody_elses(make_served: MakeServed, drafter: Any) -> None:
    """Owners by `cache_salt` in every protocol, and by API keys. A new owner is drafted for as the first one was."""
    served = make_served(drafter)
    for path, body in ROUTES.items():
        own = body | {"speculative": {"suffix_config": 8}}
        for asked in (body, own):
            salts = [{"cache_salt": f"{name} {path} {'speculative' in asked}"} for name in ("first", "mine", "yours")]
            first, mine, again, yours = (num_drafted(served, path, asked | salts[i]) for i in (0, 1, 1, 2))
            assert mine == yours == first, path
            assert again[1] > first[1], path
    served = make_served(drafter, api_key="one,two")
    (path, body), *_ = ROUTES.items()
    first, others = num_drafted(served, path, body, "one"), num_drafted(served, path, body, "two")
    salted = num_drafted(served, path, body | {"cache_salt": "x"}, "one")
    assert first == others == salted
    assert num_drafted(served, path, body, "one")[1] > first[1]


def test_outputs_are_learned_by_scope_and_outlive_the_server(
    make_served: MakeServed, chat_tokenizer_dir: Path, tmp_path: Path
) -> None:
    """A call is in the pool of the tool that it names; metrics count pools by kind; a restarted server drafts them."""
    shutil.copytree(chat_tokenizer_dir, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("find", "paint")
    ]
    called = ['<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>']
    asked = GREEDY | {"messages": MESSAGES, "tools": tools, "guided_choice": called, "max_tokens": 60}
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["dog"]}}}}
    for is_first in (True, False):
        kv_cache = KVCacheConfig(disk_dir=tmp_path / "kv")
        served = make_served(POOLED, tmp_path / "tokenizer", kv_cache=kv_cache, api_key="one,two")
        num_accepted = num_drafted(served, "/v1/completions", ROUTES["/v1/completions"], "one")[1]
        if is_first:
            of_first = num_accepted
            num_drafted(served, "/v1/chat/completions", asked, "one")
            num_drafted(served, "/v1/completions", ROUTES["/v1/completions"] | schema, "one")
        else:
            assert num_accepted > of_first
            assert num_drafted(served, "/v1/completions", ROUTES["/v1/completions"], "two")[1] == of_first
        told = samples_of(served)
        expected = {"tool": 1, "schema": 2, "system": 1, "owner": 1 if is_first else 2}
        for kind, number in expected.items():
            assert told[f"specdec:num_poolsscope={kind}"] == number
            assert told[f"specdec:num_pool_tokensscope={kind}"] > 0
        assert "key" not in str([name for name in told if "pool" in name])
        served.llm.engine.flush_disk()
    files = list((tmp_path / "kv").iterdir())
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    assert all(b"find" not in file.read_bytes() for file in files)  # of scopes there are digests


def samples_of(served: Served) -> dict[str, float]:
    served.client.headers.update(by("one"))
    try:
        return samples(served)
    finally:
        del served.client.headers["authorization"]


def whole_words(tokenizer: Any) -> list[int]:
    """Tokens whose texts, one behind the other, are read as the same tokens again."""
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    found = [token for token, text in texts.items() if text[:1] == " " and text[1:].isalpha() and len(text) > 2]
    return [token for token in found if encode_text(tokenizer, texts[token]) == [token]][:100]


@pytest.mark.parametrize("drafter", [None, SuffixDrafter(8), NgramDrafter(8, 2)], ids=["none", "suffix", "ngram"])
def test_a_corpus_drafts_for_requests_of_its_owner_that_name_it(
    make_served: MakeServed, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's routes: a text that the model will write is drafted whole, where a request names it."""
    served = make_served(drafter, api_key="one,two")
    words = whole_words(served.model.tokenizer)
    path, body = "/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "allowed_token_ids": words}

    def call(route: str, key: str = "one", **sent: Any) -> tuple[int, Any]:
        response = served.client.post(f"/{route}_external_corpus", json=sent, headers=by(key))
        return response.status_code, response.json()

    def named(*names: str, key: str = "one") -> Any:
        asked = body | {"speculative": {"corpus": names[0] if len(names) == 1 else list(names)}}
        response = served.client.post(path, json=asked, headers=by(key))
        return response.status_code, response.json()

    def num_tokens(key: str = "one") -> Any:
        return served.client.get("/list_external_corpora", headers=by(key)).json()["corpus_token_counts"]

    plain = served.client.post(path, json=body, headers=by("one")).json()
    text = PROMPT + plain["choices"][0]["text"]
    status, added = call("add", corpus_id="story", documents=["Something else.", text])
    assert status == 200 and added["success"] and added["corpus_id"] == "story"
    assert num_tokens() == {"story": added["loaded_token_count"]} and num_tokens("two") == {}
    call("add", corpus_id="other", documents=["A red ball."])
    for names in (["story"], ["other", "story"]):
        status, found = named(*names)
        assert status == 200 and found["choices"] == plain["choices"]
        before, after = (one["metrics"]["speculative_decoding"] for one in (plain, found))
        assert after["tokens_per_step"] > max(before["tokens_per_step"], 4)
    monkeypatch.setattr(corpora, "MOST_TOKENS_OF_CLIENT", added["loaded_token_count"] + 5)
    failures = {
        "of another key": named("story", key="two"),
        "no corpus": named("novel"),
        "removed by another key": call("remove", "two", corpus_id="story"),
        "a name twice": call("add", corpus_id="story", documents=["A"]),
        "too large": call("add", corpus_id="long", documents=["A red ball. " * 9]),
        "too large with what has another salt": call(
            "add", corpus_id="long", cache_salt="x", documents=["A red ball."]
        ),
        "no documents": call("add", corpus_id="none"),
        "a name of control characters": call("add", corpus_id="a\x1b[31m", documents=["A"]),
        "a file": call("add", corpus_id="file", file_path="/etc/passwd"),
        "nothing": call("add", corpus_id="empty", documents=[]),
    }
    for case, (status, answer) in failures.items():
        assert status == 400 and answer["error"]["message"], case
    assert call("remove", corpus_id="story")[1]["success"]
    assert named("story")[0] == named("other", "story")[0] == 400 and list(num_tokens()) == ["other"]


def test_corpora_of_the_server_are_everybodys(make_served: MakeServed, served: Served, tmp_path: Path) -> None:
    tokenizer, path = served.model.tokenizer, tmp_path / "a.corpus"
    settings: dict[str, Any] = {"vocab_size": served.llm.bundle.config.vocab_size, "replace": True}
    write_corpus(path, [[1, 2, 3]], tokenizer_digest=tokenizer_digest(tokenizer), **settings)
    opened = make_served(None, corpus=[f"manual={path}"])
    assert opened.client.get("/list_external_corpora").json()["corpus_token_counts"] == {"manual": 3}
    assert opened.post("/v1/completions", prompt=PROMPT, speculative={"corpus": "manual"}).status_code == 200
    assert opened.post("/add_external_corpus", corpus_id="manual", documents=["A"]).status_code == 400
    assert opened.post("/remove_external_corpus", corpus_id="manual").status_code == 400
    write_corpus(path, [[1, 2, 3]], tokenizer_digest="another", **settings)
    with pytest.raises(SpecDecError, match="another tokenizer"):
        make_served(None, corpus=[f"manual={path}"])
    for given in ("manual", "=x", "a="):
        with pytest.raises(UsageError, match="NAME=FILE"):
            _ = ServerOptions(corpus=[given]).corpora
    with pytest.raises(UsageError, match="twice"):
        _ = ServerOptions(corpus=[f"a={path}", f"a={path}"]).corpora
