"""`--report`: the page is parsed again, and says what the JSON says, refers to nothing, and escapes everything."""

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from command_line import NGRAM, PROMPTS, Specdec, each
from html_pages import Page, assert_needs_nothing_else, assert_says_what_the_document_says, visible

Document = dict[str, Any]
ARGUMENTS = ["--ngram-config", NGRAM, *each("--input-text", PROMPTS), "--max-output-len", 30, "--end-id", 0]


@pytest.fixture
def reported(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path) -> Callable[..., tuple[Document, Page]]:
    """`reported("run", …)`: the document and the page of one and the same run."""

    def call(command: str, *arguments: object) -> tuple[Document, Page]:
        path = tmp_path / "report.html"
        result = specdec(command, "--engine-dir", llama_engine_dir, *arguments, "--json", "--report", path)
        document, html = result.document, path.read_text(encoding="utf-8")
        assert_needs_nothing_else(html)
        return document, Page(html)

    return call


Reported = Callable[..., tuple[Document, Page]]


def test_page_of_a_run_says_what_its_json_says(reported: Reported) -> None:
    document, page = reported("run", *ARGUMENTS, "--check-lossless", "--stats", "summary")
    assert_says_what_the_document_says(page, document)
    for pointer in (
        "/speedup", "/total/tokens_per_step", "/total/draft_acceptance_rate", "/total/output_tokens_per_second",
        "/total/target_time_s", "/total/draft_time_per_step_s", "/total/host_time_s", "/checks/lossless/num_identical",
        "/requests/0/stats/tokens_per_step", f"/requests/{len(PROMPTS) - 1}/stats/tpot_s",
    ):  # fmt: skip
        assert pointer in page.data, pointer
    titles = re.findall(r"<title>(\d+) accepted: ([\d,]+) of", page.html)
    assert [int(count.replace(",", "")) for _, count in titles] == document["total"]["acceptance_histogram"]
    rates = re.findall(r"<title>position \d+: (\S+)(?: %)? of ([\d,]+) drafts that reach it", page.html)
    expected = document["total"]["acceptance_rate_per_position"]
    nums = document["total"]["num_drafts_per_position"]
    assert rates == [
        ("-" if rate is None else f"{rate * 100:.1f}", f"{num:,}") for rate, num in zip(expected, nums, strict=True)
    ]
    faint = re.findall(r'<g( class="faint")?><title>position', page.html)
    assert [bool(one) for one in faint] == [num < 20 for num in nums]
    over_time = [tuple(map(int, m)) for m in re.findall(r"<title>steps \d+–\d+: (\d+) tokens ÷ (\d+) steps", page.html)]
    total = document["total"]
    assert tuple(map(sum, zip(*over_time, strict=True))) == (total["num_generated_tokens"], total["num_steps"])


def test_a_page_begins_with_the_model_its_bits_the_date_and_the_machine(
    specdec: Specdec, llama_dir: Path, tmp_path: Path
) -> None:
    path, model = tmp_path / "report.html", tmp_path / "my-model"
    model.symlink_to(llama_dir)
    how = ["--quantization", "int8", "--compiler", "none", "--max-output-len", 2]
    document = specdec("run", model, "a b", *how, "--report", path, "--json").document
    page = path.read_text()
    assert "<h1>my-model (8 bits), no drafter: 1 request</h1>" in page
    made = re.findall(r'<p class="made">(.*)</p>', page)[0]
    date, machine = document["date"], document["machine"]
    assert made == f"my-model (8 bits) · llama · W8A16 weights · {document['engine']['dtype']} · " + (
        f"{date[:10]} {date[11:16]} UTC · {machine}"
    )
    age = datetime.now(UTC) - datetime.fromisoformat(date)
    assert timedelta() <= age < timedelta(days=1)
    assert machine.endswith(" cores" if len(os.sched_getaffinity(0)) > 1 else " core")


def test_page_of_a_summary_says_what_its_json_says(reported: Reported, llama_dir: Path, articles: Path) -> None:
    tests = ["--test-engine", "--test-hf", "--hf-model-dir", llama_dir, "--ngram-config", NGRAM, "--output-len", 20]
    document, page = reported("summarize", "--dataset", articles, *tests)
    assert_says_what_the_document_says(page, document)
    for system in document["systems"]:
        for key in ("rouge/rougeL", "median_tpot_s", "total/output_tokens_per_second"):
            assert f"/systems/{system}/{key}" in page.data
    for category in document["categories"]:
        for key in ("num_samples", "tokens_per_step", "rouge/engine/rouge1", "median_tpot_s/engine", "speedup"):
            assert f"/categories/{category}/{key}" in page.data
    assert "/speedup_over_hf" in page.data and "/checks/identical_to_no_drafter/num_identical" in page.data


def test_outputs_are_marked_as_the_counts_say(reported: Reported) -> None:
    document, page = reported("run", *ARGUMENTS)
    legend = dict(re.findall(r'<span class="t (\w+)">\w+</span> [^<]*: (\d+)</li>', page.html))
    total = document["total"]
    assert int(legend["accepted"]) == total["num_accepted_draft_tokens"] > 0
    assert sum(map(int, legend.values())) == total["num_generated_tokens"]
    outputs = re.findall(r'<h4>Output</h4><p class="text ">(.*?)</p>', page.html, re.DOTALL)
    texts = [Page(f"<p>{output.replace('<b></b>', '')}</p>").text for output in outputs]
    assert texts == [visible(request["output_text"]) for request in document["requests"]]


HOSTILE = "<script>alert(1)</script><img src=x onerror=y> & \"quotes\" 'and' </p></details></style> \x1b[31m\x00 <!--"


def test_everything_is_escaped(reported: Reported, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": HOSTILE}))
    document, page = reported("run", "--input-file", prompts, "--max-output-len", 5, "--stop-words", "<b>&</b>")
    assert visible(HOSTILE) in page.text
    assert '["<b>&</b>"]' in page.text
    assert_says_what_the_document_says(page, document)


def test_nothing_measured_is_a_dash_with_the_reason(reported: Reported) -> None:
    document, page = reported("run", "--input-text", "One day", "--max-output-len", 1, "--end-id", 0)
    assert document["total"]["draft_acceptance_rate"] is None
    reasons = re.findall(r'<span class="none" title="([^"]*)">–</span>', page.html)
    assert {"not measured", "nothing was drafted", "one token"} <= set(reasons)
    assert "nothing was drafted: no acceptance to show" in page.text
    assert "there is no drafter to compare" in page.text and "not checked" in page.text
    assert "By category" not in page.text
    assert_says_what_the_document_says(page, document)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_can_be_read_in_light_and_dark() -> None:
    """WCAG 2's contrast of 4.5 to 1 of every text on what is behind it."""
    style = files("commands").joinpath("output/html/report.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 3  # light, dark, print
    backgrounds = {
        "ink": ("page", "card", "accepted", "recovered", "bonus"),
        "soft": ("page", "card"),
        "accent": ("card",),
        "bad": ("card",),
    }
    for scheme in schemes[:2]:
        for text, behind in backgrounds.items():
            for background in behind:
                dark, light = sorted([luminance(scheme[text]), luminance(scheme[background])])
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, background)
