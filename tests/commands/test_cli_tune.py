"""`specdec tune`: what it counts is what a live run counts, what it recommends is what it measured, and its errors."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Specdec, assert_valid, edit_json, tree
from html_pages import Page, assert_needs_nothing_else, assert_says_what_the_document_says
from sentences import Said
from shared import once
from test_cli_errors import assert_one_clear_error
from tiny import repetitive_prompt
from transformers import PreTrainedTokenizerFast

from commands.tune.work import _spread
from runtime.core.generation import Generation
from runtime.core.stats import LoopTimes
from runtime.drafters.specs import NgramDrafter
from runtime.measure.tuning.live import Confirmation, Confirmed, Measured
from runtime.measure.tuning.search import LoopSeconds, fixed

SPEC_BENCH = Path(__file__).parents[1] / "data" / "traces.jsonl"
OUTPUT_LEN = 40


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that repeat themselves, in two categories."""
    rows = [{"prompt_ids": repetitive_prompt(i, 30 + 7 * i), "category": "ab"[i % 2]} for i in range(5)]
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def engine_dir(llama_engine_dir: Path) -> Path:
    return llama_engine_dir


@pytest.fixture(scope="module")
def tuned(specdec_fork: Specdec, engine_dir: Path, prompts: Path, shared: Path) -> tuple[dict[str, Any], Path]:
    """The document of a tuned engine and its profile."""

    def make(directory: Path) -> None:
        directory.mkdir()
        files = ["--output", directory / "tuned.json", "--report", directory / "page.html"]
        arguments = ["--input-file", prompts, "--max-output-len", OUTPUT_LEN, *files]
        document = specdec_fork("tune", "--engine-dir", engine_dir, *arguments, "--json").document
        (directory / "document.json").write_text(json.dumps(document))

    directory = once(shared / "tuned", make)
    return json.loads((directory / "document.json").read_text()), directory / "tuned.json"


def run_with(specdec: Specdec, engine_dir: Path, prompts: Path, flags: str) -> dict[str, Any]:
    arguments = ["--engine-dir", engine_dir, "--input-file", prompts, "--max-output-len", OUTPUT_LEN, "--json"]
    return specdec("run", *arguments, *shlex.split(flags)).document


def of(document: dict[str, Any], flags: str) -> dict[str, Any]:
    return next(candidate for candidate in document["candidates"] if candidate["flags"] == flags)


@pytest.mark.one_in(2)
def test_counts_are_those_of_live_runs(
    specdec: Specdec, engine_dir: Path, prompts: Path, tuned: tuple[dict[str, Any], Path]
) -> None:
    """One request at a time, as `tune` times them: a run answers together what fits a batch, which `auto` notices."""
    document, _ = tuned
    assert_valid("tune", document)
    assert len(document["candidates"]) > 20
    for candidate in document["candidates"]:
        if candidate["draft_len_mode"] == "auto":
            continue
        total = run_with(specdec, engine_dir, prompts, candidate["flags"])["total"]
        for key, value in candidate["total"].items():
            if key != "num_reused_tokens":
                assert value == total[key], (candidate["flags"], key)
    for timed in document["timed"]:
        same = {key: value for key, value in timed["measured"].items() if key != "num_reused_tokens"}
        assert same == {key: timed["replayed"][key] for key in same}


def test_the_profile_makes_run_draft_as_recommended(
    specdec: Specdec, engine_dir: Path, prompts: Path, tuned: tuple[dict[str, Any], Path]
) -> None:
    document, profile = tuned
    recommended, written = document["recommended"], json.loads(profile.read_text())
    drafter = written["drafter"] and written["drafter"] | {"device_id": 0}  # a profile leaves the device to the flags
    assert (drafter, written["draft_len_mode"]) == (recommended["drafter"], recommended["draft_len_mode"])
    assert recommended["flags"] in {timed["flags"] for timed in document["timed"]}
    by_profile = run_with(specdec, engine_dir, prompts, f"--profile {profile}")
    by_flags = run_with(specdec, engine_dir, prompts, recommended["flags"])
    assert {**by_profile["settings"], "profile": None} == by_flags["settings"]
    for key in ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert by_profile["total"][key] == by_flags["total"][key]


def test_the_page_says_what_the_document_says(tuned: tuple[dict[str, Any], Path]) -> None:
    document, profile = tuned
    html = (profile.parent / "page.html").read_text()
    assert_needs_nothing_else(html)
    page = Page(html)
    assert_says_what_the_document_says(page, document)
    best = document["recommended"]["flags"]
    place = next(i for i, one in enumerate(document["timed"]) if one["flags"] == best)
    assert f"/timed/{place}/measured_speedup" in page.data and "/candidates/0/predicted_s" in page.data
    assert re.search(r"specdec run --engine-dir \S+ --profile \S+tuned\.json", page.text) and "(32 bits)" in page.text
    bars = [
        float(width) for width in re.findall(r'<span class="(?:predicted|measured)" style="width:([\d.]+)%">', html)
    ]
    seconds = [one[key] for one in document["timed"] for key in ("predicted_s", "measured_s") if one[key] is not None]
    assert bars == pytest.approx([100 * one / max(seconds) for one in seconds], abs=0.01)


def test_speedups_and_ratio_follow_from_times(tuned: tuple[dict[str, Any], Path]) -> None:
    document, _ = tuned
    none = document["timed"][0]
    assert none["drafter"] is None and none["predicted_s"] == pytest.approx(none["measured_s"])
    for timed in document["timed"]:
        by_batch = [sorted(times) for times in zip(*timed["batches_s"], strict=True)]
        middle = [(times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2 for times in by_batch]
        assert timed["measured_s"] == pytest.approx(sum(middle))
        assert timed["measured_speedup"] == pytest.approx(none["measured_s"] / timed["measured_s"])
        assert timed["predicted_speedup"] == pytest.approx(none["predicted_s"] / timed["predicted_s"])
        assert timed["ratio"] == pytest.approx(timed["predicted_s"] / timed["measured_s"])
    best = [c["flags"] for c in document["candidates"] if c["drafter"]][:3]
    assert [timed["flags"] for timed in document["timed"]] == ["", *best]
    seconds = [candidate["predicted_s"] for candidate in document["candidates"]]
    assert seconds == sorted(seconds)


def test_where_none_is_recommended_the_gain_in_each_batch_is_said() -> None:
    """2 s against 1.6 s in one batch, and 2.5 s in another."""
    nothing_generated = Generation([], LoopTimes())
    measured = [
        Measured(fixed(*drafters), [[LoopSeconds(0.5, s - 0.5)] for s in seconds], nothing_generated)
        for drafters, seconds in (([], (2.0, 2.0, 2.0)), ([NgramDrafter(4, 2)], (1.6, 2.5, 1.9)))
    ]
    confirmation = Confirmation([Confirmed(one, 2.0 / one.seconds) for one in measured], LoopSeconds(1, 1))
    assert not confirmation.recommended.candidate
    assert "1.05x, in single batches 0.80x to 1.25x" in _spread(confirmation)


def test_without_an_engine_traces_are_counted(specdec: Specdec) -> None:
    """The recorded figures are those of `tests/runtime/measure/test_replay.py`'s own count, by `replay_batches`."""
    from runtime.core.stats import sum_stats
    from runtime.drafters.ngram import NgramLookup
    from runtime.measure.tuning.replay import replay_batches
    from runtime.text.traces import read_traces

    arguments = ["--traces", SPEC_BENCH, "--ngram-config", "[10,3,[0]]", "--ngram-ranking", "leftmost"]
    document = specdec("tune", *arguments, "--json").document
    assert_valid("tune", document)
    assert (document["timed"], document["factors"], document["recommended"]) == (None, None, None)
    lengths = [c["drafter"]["max_draft_len"] for c in document["candidates"] if c["drafter"]]
    assert sorted(lengths) == [1, 2, 3, 4, 6, 8, 10]
    for candidate in document["candidates"]:
        if candidate["drafter"]:
            max_draft_len = candidate["drafter"]["max_draft_len"]
            lookup = NgramLookup(3, ranking="leftmost")
            expected = replay_batches(read_traces(SPEC_BENCH, None), lookup, max_draft_len).stats
            assert candidate["total"] == sum_stats(expected).counts(max_draft_len)
    shown = specdec("tune", *arguments).stdout
    assert f"{document['candidates'][0]['total']['tokens_per_step']:.3f}" in shown


def test_what_models_draft_is_run_with_each_length(
    specdec: Specdec, self_draft_engine_dir: Path, tmp_path: Path
) -> None:
    """No record tells it. The counts are those of `run` with the flags, one prompt at a time."""
    flags, lengths = ["--ngram-config", "[5,2,[0]]", "--self-draft-config", "2", "--drafters", "auto"], {(5, 1), (5, 2)}
    arguments = ["--engine-dir", self_draft_engine_dir, "--input-text", "The dog lost the ball. The dog"]
    arguments += ["--max-output-len", 6, "--json"]
    profile = tmp_path / "tuned.json"
    result = specdec("tune", *arguments, *flags, "--num-live-prompts", 1, "--output", profile)
    assert "warning: one request was timed, too few" in result.stderr
    document = result.document
    assert_valid("tune", document)
    assert [one["drafter"] for one in document["candidates"]] == [None], "no lookup is tried where another is named"
    tried = {(lengths_of(one["drafter"]), one["draft_len_mode"]) for one in document["tried"]}
    assert tried == {(one, "fixed") for one in lengths} | {(max(lengths), "auto")}
    for one in document["tried"]:
        assert (",".join(names_of(one["drafter"])), one["num_requests"]) == ("ngram,self", 1)
    fixed = [one for one in document["tried"] if one["draft_len_mode"] == "fixed"]  # others draft by what steps take
    one = next(one for one in fixed if lengths_of(one["drafter"]) == max(lengths))
    total = specdec("run", *arguments, *shlex.split(one["flags"])).document["total"]
    assert {key: total[key] for key in COUNTS} == {key: one["measured"][key] for key in COUNTS}
    fastest = sorted(document["tried"], key=lambda one: one["measured_s"])[:3]
    assert [one["flags"] for one in document["timed"]] == ["", *(one["flags"] for one in fastest)]
    for one in document["timed"][1:]:
        assert (one["replayed"], one["predicted_s"], one["ratio"]) == (None, None, None)
    assert json.loads(profile.read_text())["figures"]["measured_speedup"] >= 1.0


COUNTS = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def each_of(drafter: dict[str, Any]) -> list[dict[str, Any]]:
    return drafter.get("drafters", [drafter])


def lengths_of(drafter: dict[str, Any]) -> tuple[int, ...]:
    return tuple(one["max_draft_len"] for one in each_of(drafter))


def names_of(drafter: dict[str, Any]) -> list[str]:
    return [one["name"] for one in each_of(drafter)]


def test_an_engines_copy_is_tried_beside_the_lookups(specdec: Specdec, self_draft_engine_dir: Path) -> None:
    """The copy is tried by itself, and with the best of the lookups."""
    arguments = ["--engine-dir", self_draft_engine_dir, "--input-text", "The dog lost the ball. The dog"]
    arguments += ["--max-output-len", 4, "--num-live-prompts", 1]
    shown = specdec("tune", *arguments, "--self-draft-config", 1).stdout
    assert "Run once on 1 requests" in shown and "own copy" in shown and "Replayed" not in shown
    arguments += ["--max-draft-len", 2]
    document = specdec("tune", *arguments, "--json").document
    assert_valid("tune", document)
    names = [names_of(one["drafter"]) for one in document["tried"]]
    assert names[:3] == [["self"]] * 3
    best = next(one["drafter"] for one in document["candidates"] if one["drafter"])
    assert [one["drafter"]["drafters"][0] for one in document["tried"][3:]] == [best] * 2
    assert len(document["timed"]) == 1 + 3 + 3


def test_traces_of_another_model_or_too_long_are_a_warning(
    specdec: Specdec, engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    rows = [{"prompt_ids": repetitive_prompt(i, 20 if i else 97), "output_ids": [3 + i] * 10} for i in range(3)]
    result = specdec("tune", "--engine-dir", engine_dir, "--traces", write_lines(tmp_path / "t.jsonl", rows), "--json")
    assert result.document["num_traces"] == 2
    said(result, "1", "3", "2")


TUNE = "tune --engine-dir engine "
BAD_LINES = '{"prompt_ids": [5], "output_ids": [6]}\n'
# In a directory with `engine`, `t.jsonl` (traces) and `p.jsonl` (prompts).
MISTAKES: list[tuple[str, int, tuple[str, ...], Callable[[Path], Any] | None]] = [
    ("tune", 2, ("nothing to tune for", "`--engine-dir`"), None),
    (TUNE, 2, ("nothing to tune on",), None),
    (TUNE + "--traces t.jsonl --input-file p.jsonl", 2, ("`--input-file` cannot be given with `--traces`",), None),
    ("tune --traces t.jsonl --output x.json", 2, ("`--output` needs `--engine-dir`: x.json",), None),
    ("tune --traces t.jsonl --max-draft-len 99999999999", 2, ("drafts of more than 1000 tokens", "99999999999"), None),
    ("tune --traces t.jsonl --suffix-config [2000,[0]]", 2, ("`--suffix-config`", "256", "2000"), None),
    ("tune --traces t.jsonl --suffix-config [4,[0]] --max-draft-len 5", 2, ("exceeds the drafter's own, 4: 5",), None),
    ("tune --traces t.jsonl", 1, ("line 2 of t.jsonl needs either `output` or `output_ids`", "['prompt_ids']"),
     lambda d: (d / "t.jsonl").write_text(BAD_LINES + '{"prompt_ids": [5]}\n')),
    ("tune --traces t.jsonl --tokenizer-dir tok", 1, ("line 1 of t.jsonl has an id outside", "300: 300"),
     lambda d: (d / "t.jsonl").write_text('{"prompt_ids": [5], "output_ids": [300]}')),
    ("tune --traces t.jsonl --self-draft-config 4", 2, ("cannot be replayed", "`--engine-dir`"), None),
    (TUNE + "--traces t.jsonl --self-draft-config 4", 1, ("no copy of its model", "--self-draft int4"), None),
    (TUNE + "--traces t.jsonl --draft-target-model-config 4 --draft-engine-dir x", 1, ("draft engine", "x"), None),
    (TUNE + "--traces t.jsonl --draft-model-dir a --suffix-config 4", 2,
     ("no drafter takes `--draft-model-dir`: a", "`--drafters draft-target`"), None),
    (TUNE + "--traces t.jsonl --draft-model-dir demo-head --suffix-config 4", 2,
     ("`--drafters eagle` chooses a drafter that does",), None),
    (TUNE + "--traces t.jsonl", 1, ("the engine's step costs are unknown", "`specdec build`"),
     lambda d: edit_json(d / "engine" / "config.json", step_costs=[])),
]  # fmt: skip


@pytest.mark.parametrize(("command", "exit_code", "words", "change"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistake_is_one_clear_error_and_leaves_nothing(
    command: str, exit_code: int, words: tuple[str, ...], change: Callable[[Path], Any] | None, specdec: Specdec,
    engine_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(engine_dir, "engine")
    shutil.copy(prompts, "p.jsonl")
    tokenizer.save_pretrained("tok")
    Path("t.jsonl").write_text(BAD_LINES)
    if change:
        change(tmp_path)
    before = tree(tmp_path)
    assert_one_clear_error(specdec(*shlex.split(command)), exit_code, words)
    assert tree(tmp_path) == before
