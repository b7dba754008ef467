"""`compare`: what it says of documents whose difference is known, because the documents were made from one."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import NGRAM, PROMPTS, Result, Specdec, assert_valid, each
from html_pages import Page, assert_needs_nothing_else, assert_says_what_the_document_says
from sentences import Said
from shared import once

Document = dict[str, Any]
Compare = Callable[..., Document]
RUN = [*each("--input-text", [*PROMPTS, "A dog", "A girl", "The park"]), "--max-output-len", 24, "--end-id", 0]


@pytest.fixture
def run_document(specdec: Specdec, llama_engine_dir: Path) -> Callable[..., Document]:
    return lambda *arguments: specdec("run", "--engine-dir", llama_engine_dir, *arguments, "--json").document


@pytest.fixture
def summary_document(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, shared: Path) -> Document:
    """Report of 20 samples in two categories."""

    def make(path: Path) -> None:
        rows = [
            {"category": "ab"[i % 2], "article": f"The dog {i} had a ball.", "highlights": "A ball."} for i in range(20)
        ]
        dataset = tmp_path / "rows.jsonl"
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["--engine-dir", llama_engine_dir, "--dataset", dataset, "--test-engine"]
        result = specdec("summarize", *arguments, "--ngram-config", NGRAM, "--output-len", 8, "--json")
        path.write_text(json.dumps(result.document))

    document: Document = json.loads(once(shared / "summary.json", make).read_text())
    return document


@pytest.fixture
def compare(specdec: Specdec, tmp_path: Path) -> Compare:
    """`compare(a, b)`: the document of `specdec compare` of two documents."""

    def call(a: Document, b: Document) -> Document:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, document in zip(paths, (a, b), strict=True):
            path.write_text(json.dumps(document))
        compared = specdec("compare", *paths, "--json").document
        assert_valid("compare", compared)
        return compared

    return call


def verdicts(compared: Document) -> dict[str, str]:
    return {name: metric["verdict"] for name, metric in compared["metrics"].items()}


def with_times(document: Document, factor: Callable[[int], float], *, systems: tuple[str, ...]) -> Document:
    """The same, with the times of request i times `factor(i)`, and totals to match."""
    changed = copy.deepcopy(document)
    for i, request in enumerate(changed["requests"]):
        for key in ("ttft_s", "tpot_s", "latency_s"):
            request["stats"][key] *= factor(i) if "engine" in systems else 1
        for system in systems:
            request["wall_s"][system] *= factor(i)
    for system in systems:
        record = changed["systems"][system]
        for key in ("median_ttft_s", "median_tpot_s", "mean_latency_s"):
            record[key] *= factor(0)
    return changed


def test_a_document_is_the_same_as_itself(compare: Compare, summary_document: Document) -> None:
    compared = compare(summary_document, summary_document)
    assert compared["settings"] == []
    assert compared["requests"] == {
        "num_a": 20, "num_b": 20, "num_same_prompt": 20, "num_identical_outputs": 20, "paired": True,
    }  # fmt: skip
    assert compared["control"]["ratio"] == 1
    assert set(verdicts(compared).values()) == {"same", "within noise", "unknown"}
    for metric in compared["metrics"].values():
        assert metric["difference"] == 0 and metric["ratio"] in (1, None)
        assert (metric["verdict"] == "unknown") == (metric["reason"] == "one value each")


def test_metrics_are_those_of_the_documents(compare: Compare, summary_document: Document) -> None:
    metrics = compare(summary_document, summary_document)["metrics"]
    total, system = summary_document["total"], summary_document["systems"]["engine"]
    for name in ("tokens_per_step", "draft_acceptance_rate", "output_tokens_per_second", "target_time_per_step_s"):
        assert metrics[name]["a"] == total[name]
    assert metrics["tpot_s"]["b"] == system["median_tpot_s"]
    assert metrics["latency_s"]["b"] == system["mean_latency_s"]
    assert metrics["rougeLsum"]["a"] == summary_document["rouge"]["engine"]["rougeLsum"]
    assert metrics["speedup"]["a"] == summary_document["speedup"]


def test_counts_of_greedy_outputs_differ_exactly(
    compare: Compare, run_document: Callable[..., Document], said: Said
) -> None:
    a, b = (run_document(*RUN, *drafter) for drafter in ([], ["--ngram-config", NGRAM]))
    compared = compare(a, b)
    assert compared["requests"]["num_identical_outputs"] == len(a["requests"])
    drafter = {"name": "drafter", "a": None, "b": "n-gram lookup 4,2"}
    assert compared["settings"] == [drafter], "one change is one row"
    metrics = compared["metrics"]
    assert (metrics["num_generated_tokens"]["verdict"], metrics["num_generated_tokens"]["method"]) == ("same", "exact")
    steps = metrics["num_steps"]
    assert (steps["verdict"], steps["method"]) == ("different", "exact")
    assert steps["difference"] == b["total"]["num_steps"] - a["total"]["num_steps"] < 0
    rate = metrics["draft_acceptance_rate"]
    assert (rate["a"], rate["verdict"]) == (None, "unknown")
    said(rate["reason"])


def test_faster_requests_are_told_from_a_faster_machine(compare: Compare, summary_document: Document) -> None:
    """The same change of every time is the machine's; of the engine with its drafter alone it is the drafter's."""
    times = ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_second")
    noisy = lambda i: 0.7 + 0.002 * (i % 5)  # noqa: E731
    engine_only = compare(summary_document, with_times(summary_document, noisy, systems=("engine",)))
    assert {verdicts(engine_only)[name] for name in times} == {"different"}
    assert engine_only["metrics"]["tpot_s"]["ratio"] == pytest.approx(0.7)
    assert engine_only["metrics"]["tpot_s"]["interval"]["ratio"] == pytest.approx(0.704, abs=0.004)
    assert verdicts(engine_only)["speedup"] == "different"
    everything = ("engine", "engine_no_drafter")
    machine = compare(summary_document, with_times(summary_document, noisy, systems=everything))
    assert machine["control"]["ratio"] == pytest.approx(0.704, abs=0.004)
    assert {verdicts(machine)[name] for name in times} == {"within noise"}
    assert machine["metrics"]["tpot_s"]["reason"] == "as the control"
    assert verdicts(machine)["speedup"] == "within noise"


def test_an_engine_of_another_build_is_no_control(compare: Compare, summary_document: Document) -> None:
    other = with_times(summary_document, lambda i: 0.5, systems=("engine", "engine_no_drafter"))
    other["engine"]["dtype"] = "bfloat16"
    compared = compare(summary_document, other)
    assert compared["control"] is None
    assert verdicts(compared)["tpot_s"] == "different"
    assert [s for s in compared["settings"] if s["name"] == "engine.dtype"] == [
        {"name": "engine.dtype", "a": "float32", "b": "bfloat16"}
    ]


def test_one_change_is_one_row(specdec: Specdec, compare: Compare, summary_document: Document, tmp_path: Path) -> None:
    a, b = copy.deepcopy(summary_document), copy.deepcopy(summary_document)
    a["engine"] |= {"model": "m", "engine_dir": "cache/m-1", "bits": "32"}
    b["engine"] |= {
        "model": "m", "engine_dir": "cache/m-2", "bits": "8",
        "quantization": {"quant_algo": "W8A16", "group_size": 64, "source": "rounded"},
    }  # fmt: skip
    b["settings"] |= {"drafters": ["suffix"], "ngram_config": None}
    b["settings"]["suffix_config"] = {"max_draft_len": 10, "pool": "private", "device_id": 0, "device_ids": [0]}
    settings = {one["name"]: (one["a"], one["b"]) for one in compare(a, b)["settings"]}
    assert list(settings) == ["engine.quantization", "drafter"]
    assert settings["drafter"] == ("n-gram lookup 4,2", "suffix matching 10")
    shown = specdec("compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert "quant_algo W8A16, group_size 64" in shown and shown.count("engine.") == 1


def test_one_slow_request_is_noise(compare: Compare, summary_document: Document) -> None:
    slow = with_times(summary_document, lambda i: 50.0 if i == 0 else 1 + 0.01 * (-1) ** i, systems=("engine",))
    compared = compare(summary_document, slow)
    assert compared["metrics"]["tpot_s"]["ratio"] == pytest.approx(50)
    assert verdicts(compared)["tpot_s"] == "within noise"


def test_requests_that_ran_together_are_one_observation(
    compare: Compare, run_document: Callable[..., Document], said: Said
) -> None:
    """Eight requests in batches of four tell no more of time than two."""
    a = run_document(*RUN)
    metric = compare(a, a)["metrics"]["tpot_s"]
    assert metric["num_observations"] == [2, 2]
    assert metric["verdict"] == "unknown"
    said(metric["reason"], "2", "6")
    a["engine"]["build_config"]["max_batch_size"] = 1
    assert compare(a, a)["metrics"]["tpot_s"]["num_observations"] == [8, 8]
    said(compare(a, a)["metrics"]["latency_s"]["reason"])


def test_nothing_can_be_said_of_one_request(
    compare: Compare, run_document: Callable[..., Document], said: Said
) -> None:
    one = run_document("--input-text", "One day", "--max-output-len", 5, "--end-id", 0)
    compared = compare(one, one)
    assert verdicts(compared)["tpot_s"] == "unknown"
    said(compared["metrics"]["tpot_s"]["reason"], "1", "6")
    assert verdicts(compared)["tokens_per_step"] == "same"


def test_other_requests_are_two_groups(compare: Compare, summary_document: Document) -> None:
    other = with_times(summary_document, lambda i: 3.0, systems=("engine",))
    for request in other["requests"]:
        request["prompt_ids"] = [1, *request["prompt_ids"]]
    compared = compare(summary_document, other)
    assert compared["requests"]["num_same_prompt"] == 0 and not compared["requests"]["paired"]
    assert compared["control"] is None
    assert compared["metrics"]["tpot_s"]["method"] == "unpaired"
    assert compared["metrics"]["tokens_per_step"]["method"] == "unpaired"  # other prompts: luck again
    assert verdicts(compared)["tokens_per_step"] == "within noise"


def test_sampled_outputs_that_differ_are_compared_as_draws(
    compare: Compare, run_document: Callable[..., Document]
) -> None:
    a, b = (run_document(*RUN, "--ngram-config", NGRAM, "--temperature", 2, "--random-seed", seed) for seed in (1, 2))
    compared = compare(a, b)
    assert compared["requests"]["num_identical_outputs"] == 0
    assert compared["metrics"]["tokens_per_step"]["method"] == "paired"
    assert compared["metrics"]["tokens_per_step"]["num_observations"] == [8, 8]
    same = compare(a, a)
    assert same["metrics"]["tokens_per_step"]["method"] == "exact"


def test_prompts_that_come_twice_are_paired_in_order(compare: Compare, run_document: Callable[..., Document]) -> None:
    a = run_document(*each("--input-text", ["One day"] * 2), "--temperature", 2, "--num-return-sequences", 2)
    b = copy.deepcopy(a)
    b["requests"][3]["output_ids"] = [5]
    requests = compare(a, b)["requests"]
    assert (requests["num_same_prompt"], requests["num_identical_outputs"], requests["paired"]) == (4, 3, True)


def test_people_read_the_same(specdec: Specdec, summary_document: Document, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(summary_document))
    faster = with_times(summary_document, lambda i: 0.5 + 0.01 * (i % 3), systems=("engine",))
    faster["settings"]["ngram_config"]["max_draft_len"] = 3
    b.write_text(json.dumps(faster))
    result = specdec("compare", a, b, "--report", tmp_path / "page.html")
    assert result.exit_code == 0 and result.stderr == ""
    html = (tmp_path / "page.html").read_text()
    assert_needs_nothing_else(html)
    page, compared = Page(html), specdec("compare", a, b, "--json").document
    assert_says_what_the_document_says(page, compared)
    assert {"/metrics/speedup/ratio", "/metrics/tpot_s/interval/low", "/requests/num_same_prompt"} <= set(page.data)
    assert "A a.json and B b.json: in B tokens/s" in page.text and "The machine was as fast in both" in page.text
    assert (
        page.text.count("within the noise") == html.count("within the noise") and "ngram_config.max_draft_len" in html
    )
    for words in (
        "Settings that differ", "ngram_config.max_draft_len", "requests: the same 20; 20 of 20 outputs", "the same",
        "different", "cannot be said (one value each)", "control: the engine without a drafter took 1.000 times",
    ):  # fmt: skip
        assert words in result.stdout, words
    assert specdec("compare", a, b, "--quiet").stdout == ""


def without(key: str) -> Callable[[Document], object]:
    return lambda document: {k: v for k, v in document.items() if k != key}


def with_request(**changes: object) -> Callable[[Document], object]:
    return lambda document: document | {"requests": [document["requests"][0] | changes]}


def with_total(**changes: object) -> Callable[[Document], object]:
    return lambda document: document | {"total": document["total"] | changes}


def with_logit_bias(value: object) -> Callable[[Document], object]:
    def change(document: Document) -> object:
        settings = document["settings"]
        return document | {"settings": settings | {"sampling": settings["sampling"] | {"logit_bias": value}}}

    return change


def test_documents_of_two_commands_are_one_error(
    specdec: Specdec, run_document: Callable[..., Document], summary_document: Document, tmp_path: Path, said: Said
) -> None:
    paths = [tmp_path / "run.json", tmp_path / "summary.json"]
    for path, document in zip(paths, (run_document("--input-text", "A"), summary_document), strict=True):
        path.write_text(json.dumps(document))
    result = specdec("compare", *paths)
    assert result.exit_code == 1
    said(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [d], ""),
        (without("schema_version"), ""),
        (lambda d: d | {"command": "compare"}, "`compare`"),
        (lambda d: d | {"schema_version": 99}, "99; 2"),
        (without("settings"), "$; 'settings'"),
        (with_request(output_ids="x"), "$.requests[0].output_ids; 'x'"),
        (lambda d: d | {"total": d["total"] | {"num_steps": -3}}, "$.total.num_steps; -3"),
        (with_logit_bias([[]]), "$.settings.sampling.logit_bias"),
        (with_total(tokens_per_step=float("inf")), "should be a finite number"),
        (with_total(tokens_per_step=10**400), "should be a finite number"),
    ],
)
def test_what_is_no_document_is_one_error(
    specdec: Specdec, run_document: Callable[..., Document], tmp_path: Path,
    change: Callable[[Document], object], message: str, said: Said,
) -> None:  # fmt: skip
    document = run_document("--input-text", "One day", "--max-output-len", 3)
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(document))
    bad.write_text(json.dumps(change(document)))
    result: Result = specdec("compare", good, bad)
    assert (result.exit_code, result.stdout) == (1, "")
    said(result, "bad.json", *message.split("; "))
    assert result.stderr.startswith("error: ") and "hint: " in result.stderr
