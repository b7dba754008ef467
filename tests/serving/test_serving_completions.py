"""Completions: the texts are those of the Python API, however they are asked for."""

from typing import Any

import pytest
from serving_models import PROMPT, MakeServed, Served

from runtime.core.params import SamplingParams
from runtime.llm import LLM

PROMPTS = [PROMPT, "Once upon a time", "the ball the ball the ball the ball"]
SAMPLED = {"temperature": 0.9, "seed": 11, "max_tokens": 30, "ignore_eos": True}


def expected(served: Served, prompt: Any, **params: Any) -> list[Any]:
    """The Python API's outputs without a drafter, before the server's loop used the engine or after."""
    return served.llm.generate(prompt, SamplingParams(**params))


@pytest.mark.parametrize("params", [{"temperature": 0, "max_tokens": 30, "ignore_eos": True}, SAMPLED])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_the_python_api_says(served: Served, prompt: str, params: dict[str, Any]) -> None:
    (output,) = expected(served, prompt, **params)
    found = served.complete(prompt=prompt, **params)
    assert found["choices"][0]["text"] == output.text
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 30 == len(output.token_ids)
    assert found["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert found["usage"]["total_tokens"] == 30 + len(output.prompt_token_ids)


@pytest.mark.parametrize("extra", [{"return_token_kinds": True}, {"logprobs": 1}])
@pytest.mark.parametrize("sampling", [{"temperature": 0, "max_tokens": 40, "ignore_eos": True}, SAMPLED])
def test_a_stream_joins_to_the_whole(served: Served, sampling: dict[str, Any], extra: dict[str, Any]) -> None:
    whole = served.complete(**sampling)
    chunks = served.stream(prompt=PROMPT, **sampling, **extra)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_kinds_of_tokens_join_to_the_chunks_and_count_as_the_metrics_do(served: Served) -> None:
    body = {"prompt": PROMPTS[2], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    chunks = served.stream(**body, return_token_kinds=True, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    for choice in choices:
        assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    kinds = [token["kind"] for choice in choices for token in choice["tokens"]]
    assert len(kinds) == 40
    speculation = chunks[-1]["metrics"]["speculative_decoding"]
    assert kinds.count("accepted") == speculation["num_accepted_tokens"] > 0
    assert chunks[-1]["choices"] == []
    details = chunks[-1]["usage"]["completion_tokens_details"]  # nothing was predicted by the request
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    assert speculation["acceptance_rate"] == speculation["num_accepted_tokens"] / speculation["num_draft_tokens"]
    assert sum(speculation["accepted_per_position"]) == speculation["num_accepted_tokens"]
    num_steps = kinds.count("plain") + speculation["num_drafts"]
    assert speculation["tokens_per_step"] == pytest.approx(40 / num_steps)


def test_a_prediction_is_counted_and_changes_no_text(served: Served) -> None:
    """OpenAI's counts are of tokens drafted from it, and of no others; the server's own drafter goes on beside it."""
    body = {"prompt": PROMPTS[2], "temperature": 1, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    without = served.complete(**body)
    text = without["choices"][0]["text"]
    num_steps = {}
    for name, content in {"right": text, "half": text[: len(text) // 2], "wrong": "No, no. " * 9}.items():
        found = served.complete(**body, prediction={"type": "content", "content": content})
        assert found["choices"] == without["choices"]
        details, speculation = found["usage"]["completion_tokens_details"], found["metrics"]["speculative_decoding"]
        num_accepted, num_rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert num_accepted <= speculation["num_accepted_tokens"]
        assert num_accepted + num_rejected <= speculation["num_draft_tokens"]
        assert (num_accepted > 0) == (name != "wrong") and (name == "right" or num_rejected > 0)
        num_steps[name] = 40 / speculation["tokens_per_step"]
    own = without["usage"]["completion_tokens_details"]
    assert own["accepted_prediction_tokens"] == own["rejected_prediction_tokens"] == 0
    assert num_steps["right"] < num_steps["half"] < num_steps["wrong"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_receipts_are_exact_and_come_with_the_last_chunk(served: Served, path: str) -> None:
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**asked, "temperature": 1.1, "seed": 3, "n": 2, "max_tokens": 12, "stop": ["ball"], "receipt": True}
    whole = served.post(path, **body).json()
    chunks = [choice for chunk in served.stream(path, **body) for choice in chunk["choices"]]
    last = {choice["index"]: choice["receipt"] for choice in chunks if "receipt" in choice}
    receipts = [choice["receipt"] for choice in whole["choices"]]
    assert [last[0], last[1]] == receipts and len(chunks) >= 2
    assert all(choice["finish_reason"] for choice in chunks if "receipt" in choice)
    assert whole["system_fingerprint"] == f"fp_{receipts[0]['fingerprint']['logits']}"
    with LLM(served.llm.bundle.directory, tokenizer=served.llm.tokenizer_dir) as llm:
        findings = llm.check_receipts(receipts)
    assert [one.verdict for one in findings] == ["exact", "exact"]


def test_prompts_are_texts_or_ids_one_or_several(served: Served) -> None:
    ids = [served.llm.encode(prompt)[0] for prompt in PROMPTS]
    texts = [choice["text"] for choice in served.complete(prompt=PROMPTS)["choices"]]
    assert texts == [served.complete(prompt=prompt)["choices"][0]["text"] for prompt in PROMPTS]
    assert [choice["text"] for choice in served.complete(prompt=ids)["choices"]] == texts
    assert served.complete(prompt=ids[1])["choices"][0]["text"] == texts[1]
    found = served.complete(prompt=PROMPTS, n=2)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_n_samples_differ_and_come_again_with_the_seed(served: Served) -> None:
    body = SAMPLED | {"n": 3, "prompt": PROMPT}
    texts = [choice["text"] for choice in served.complete(**body)["choices"]]
    (result,) = expected(served, PROMPT, n=3, **SAMPLED)
    assert texts == [output.text for output in result.outputs]
    assert len(set(texts)) == 3
    streamed = [""] * 3
    for chunk in served.stream(**body):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


FLAT: dict[str, Any] = {"temperature": 100.0, "max_tokens": 24, "ignore_eos": True}
"""Settings with which each of 300 tokens is about as likely: two samples are the same once in 10^50 runs."""


def test_samples_without_a_seed_are_not_the_same(served: Served) -> None:
    assert len({served.complete(**FLAT)["choices"][0]["text"] for _ in range(3)}) == 3
    twice = served.complete(prompt=[PROMPT, PROMPT], **FLAT)["choices"]
    assert twice[0]["text"] != twice[1]["text"]


def test_a_client_that_says_nothing_gets_samples_of_16_tokens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, submitted = served.model.loop, list[Any]()
    submit = loop.submit
    monkeypatch.setattr(loop, "submit", lambda asked, *who: [submitted.extend(asked), submit(asked, *who)][1])
    response = served.post("/v1/completions", prompt=PROMPT, max_tokens=None, ignore_eos=True, foreign_field=7)
    assert response.json()["usage"]["completion_tokens"] == 16
    assert [one.request.sampling.temperature for one in submitted] == [1.0]


@pytest.mark.parametrize("stop", ["</s>", ["never there", "</s>"]])
def test_a_special_token_that_is_named_as_a_stop_word_is_one(served: Served, stop: Any) -> None:
    """lm-eval sends the name of the tokenizer's end token."""
    forced = {"logit_bias": {str(served.model.tokenizer.eos_token_id): 100}, "ignore_eos": True, "max_tokens": 5}
    assert served.complete(**forced)["usage"]["completion_tokens"] == 5
    found = served.complete(**forced, stop=stop)
    assert (found["choices"][0]["finish_reason"], found["choices"][0]["text"]) == ("stop", "")
    assert found["usage"]["completion_tokens"] == 1


def test_logprobs_are_the_models_own(served: Served) -> None:
    (output,) = expected(served, PROMPT, temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    logprobs = served.complete(max_tokens=8, ignore_eos=True, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([one.logprob for one in output.logprobs], abs=1e-6)
    assert all(value < 0 for value in logprobs["token_logprobs"])
    for found, one in zip(logprobs["top_logprobs"], output.logprobs, strict=True):
        assert max(found.values()) == pytest.approx(max(value for _, value in one.top), abs=1e-6)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 8
    streamed = [
        chunk["choices"][0]["logprobs"]
        for chunk in served.stream(prompt=PROMPT, temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    ]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for one in streamed for value in one[name]] == logprobs[name]


def test_a_prompt_is_echoed(served: Served) -> None:
    plain = served.complete(max_tokens=6)["choices"][0]["text"]
    assert served.complete(max_tokens=6, echo=True)["choices"][0]["text"] == PROMPT + plain
    chunks = served.stream(prompt=PROMPT, temperature=0, max_tokens=6, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + plain
    nothing = served.complete(max_tokens=0, echo=True)
    assert nothing["choices"][0]["text"] == PROMPT
    assert nothing["usage"]["completion_tokens"] == 0


def test_speculation_changes_no_text_and_can_be_switched_off(served: Served) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[2], "max_tokens": 40, "ignore_eos": True}
    found = {
        name: served.complete(**body, speculative=speculative)
        for name, speculative in {
            "default": None,
            "on": True,
            "off": False,
            "ngram": {"ngram_config": [7, 3]},
            "as text": {"ngram_config": "[7,3,[0]]"},
            "suffix": {"suffix_config": 5},
            "short": {"draft_len": 1},
        }.items()
    }
    assert len({one["choices"][0]["text"] for one in found.values()}) == 1
    drafted = {name: one["metrics"]["speculative_decoding"] for name, one in found.items()}
    assert drafted["off"]["num_draft_tokens"] == 0 and drafted["off"]["acceptance_rate"] is None
    assert drafted["off"]["tokens_per_step"] == 1
    assert drafted["default"] == drafted["on"] and drafted["ngram"] == drafted["as text"]
    longest = {name: len(one["accepted_per_position"]) for name, one in drafted.items()}
    assert longest == {"default": 4, "on": 4, "off": 0, "ngram": 7, "as text": 7, "suffix": 5, "short": 1}


def test_a_server_without_a_drafter_says_so(make_served: MakeServed) -> None:
    served = make_served(None)
    assert served.post("/v1/completions", prompt=PROMPT, speculative=True).status_code == 400
    assert served.post("/v1/completions", prompt=PROMPT, speculative={"draft_len": 2}).status_code == 400
    own = served.complete(prompt=PROMPTS[2], max_tokens=30, ignore_eos=True, speculative={"ngram_config": "4,2"})
    assert own["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
