"""The page of `bench` is parsed again: it says what the JSON says, refers to nothing, and holds no script."""

import json
import re
from pathlib import Path

import pytest
from command_line import Specdec
from html_pages import Page, assert_needs_nothing_else, at
from openai_server import DONE, Asked, Reply, as_json, event, failure, running

from commands.bench.work import BenchDocument, bench_page

RECORD = {
    "num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "acceptance_rate": 0.5,
    "accepted_per_position": [2, 1, 0],
    "drafted_per_position": [2, 2, 1],
    "tokens_per_step": 2.0,
}  # fmt: skip


FACTS = {"bits": "4", "dtype": "bfloat16", "machine": "A <b>, 2 cores", "drafter": "suffix matching"}


def answer(asked: Asked) -> Reply:
    if asked.path == "/v1/models":
        return as_json({"data": [{"id": "m<b>", "specdec": FACTS | {"max_draft_len": 10}}]})
    if asked.method == "GET":
        return failure(404, "nothing here")
    if len(asked.body["prompt"]) % 7 == 0:
        return failure(503, "queue <full>")
    texts = [{"choices": [{"text": "x", "finish_reason": "length" if i == 2 else None}]} for i in range(3)]
    usage = {"prompt_tokens": 9, "completion_tokens": 6}
    last = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": RECORD}}
    return Reply([*((0.01, event(text)) for text in texts), (0.0, event(last)), (0.0, DONE)])


def test_the_page_of_a_benchmark_says_what_its_json_says(specdec: Specdec, tmp_path: Path) -> None:
    path, prompts = tmp_path / "bench.html", tmp_path / "prompts.txt"
    prompts.write_text("".join("p" * i + "\n" for i in range(1, 15)))
    with running(answer) as server:
        arguments = ["--base-url", server.url, "--input-file", prompts, "--goodput", "ttft:5000", "e2el:9000"]
        result = specdec("bench", *arguments, "--json", "--report", path)
    document, html = result.document, path.read_text(encoding="utf-8")
    assert_needs_nothing_else(html)
    page = Page(html)
    for pointer, (value, shown) in page.data.items():
        assert json.loads(value) == at(document, pointer), pointer
        number = float(re.sub(r"[^\d.]", "", shown))
        scale = 1000 if pointer.startswith(("/ttfts", "/latencies")) else 1
        assert number == pytest.approx(json.loads(value) * scale, abs=0.06), (pointer, shown)
    for pointer in (
        "/output_throughput", "/request_throughput", "/request_goodput", "/tokens_per_step", "/median_ttft_ms",
        "/p99_itl_ms", "/spec_decode_acceptance_rate", "/ttfts/13", "/latencies/0", "/output_lens/2", "/start_times/6",
    ):  # fmt: skip
        assert (pointer in page.data) == (pointer != "/ttfts/13"), pointer  # the 14th failed
    assert "2 of 14" in page.text and page.text.count("queue <full>") == 2 and "m<b>" in page.text
    assert document["failed"] == 2 and document["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.0]
    assert document["spec_decode_acceptance_rate_per_position"] == [1.0, 0.5, 0.0]
    assert document["spec_decode_num_drafts_per_position"] == [24, 24, 12]
    assert "from second 0" in html and "position 3: 0.0 % of 12 drafts that reach it" in html
    told = "m&lt;b&gt; \\(4 bits\\) · bfloat16 · suffix matching · server: A &lt;b&gt;, 2 cores"
    assert re.search(rf'<p class="made">{told} · \d{{4}}-\d\d-\d\d \d\d:\d\d UTC · .+ cores?</p>', html)
    assert document["server"] == FACTS
    seconds = re.findall(r"[\d.]+ to [\d.]+ (\w+): ", html)
    assert set(seconds) == {"ms"}
    slow = document | {"latencies": [i * 0.25 for i in range(14)]}
    slow = {key: value for key, value in slow.items() if not key.startswith("spec_decode_acceptance_rate_per")}
    html = bench_page(BenchDocument.model_validate_json(json.dumps(slow)))
    assert_needs_nothing_else(html)
    names = re.findall(r'text-anchor="middle">([\d.]+) s</text>', html)
    assert "1.6" in names and len(names) > 4, names
    assert "the server does not tell how many drafts reach each position" in html
