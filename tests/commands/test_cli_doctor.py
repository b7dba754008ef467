"""`specdec doctor`: faults planted in real engines and settings are diagnosed by name, healthy ones raise no alarm."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from command_line import Result, Specdec, assert_valid, edit_json
from html_pages import assert_needs_nothing_else
from sentences import Said
from waiting import HANG_S

from commands.doctor.work import REMEDIES
from runtime.measure.diagnosis.diagnose import DIAGNOSES
from runtime.measure.diagnosis.observe import examine_machine

NGRAM = ["--ngram-config", "[4,2,[0]]"]
NOISY = {"steps_slower_than_built", "memory_slower_than_built", "busy_machine"}
"""Diagnoses that another process of the machine that tests run on may cause for a while."""


@pytest.fixture
def engine_dir(llama_uncompiled_dir: Path) -> Iterator[Path]:
    """The engine; threads and cores of this process are put back."""
    num_threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    yield llama_uncompiled_dir
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, affinity)


@contextmanager
def busy(number: int, core: int) -> Iterator[None]:
    """Run processes that compute and do nothing else, on one core."""
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    end = f"end = time.monotonic() + {10 * HANG_S}"  # of whoever is forgotten
    code = f"{pin}import time; {end}\nprint(flush=True)\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def found_in(result: Result) -> set[str]:
    document = json.loads(result.stdout)
    assert_valid("doctor", document)
    found = {one["name"] for one in document["diagnoses"] if one["status"] == "found"}
    assert document["is_healthy"] == (not found) == (result.exit_code == 0)
    return found


# A fault of the engine, and faults of drafters. Tests of each judgement are in tests/runtime/measure.


@pytest.mark.usefixtures("work_clock")
def test_an_engine_of_a_faster_processor_is_diagnosed(engine_dir: Path, specdec: Specdec, tmp_path: Path) -> None:
    engine = shutil.copytree(engine_dir, tmp_path / "engine")
    costs = json.loads((engine / "config.json").read_text())["step_costs"]
    edit_json(engine / "config.json", step_costs=[cost | {"seconds": 1e-9} for cost in costs])
    found = found_in(specdec("doctor", "--engine-dir", engine, "--max-output-len", 8, "--json"))
    assert "steps_slower_than_built" in found <= NOISY


@pytest.mark.usefixtures("work_clock")
def test_a_drafter_that_mixes_up_blocks_is_diagnosed(engine_dir: Path, specdec: Specdec) -> None:
    arguments = ["--engine-dir", engine_dir, "--drafter", "custom_drafters:MixesUpBlocks", "--max-output-len", 16]
    found = found_in(specdec("doctor", *arguments, "--json"))
    assert "speculation_changes_output" in found <= {"speculation_changes_output", "drafter_never_used", *NOISY}


def test_weights_that_do_not_stay_what_they_were_are_diagnosed(engine_dir: Path, specdec_fork: Specdec) -> None:
    """Runs in a process of its own: no model of it is what it was."""
    arguments = ["--engine-dir", engine_dir, "--drafter", "custom_drafters:DamagesWeights", "--json"]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = specdec_fork("doctor", *arguments, environment={"PYTHONPATH": paths})
    assert "output_not_repeatable" in found_in(result), result.stderr


@pytest.mark.usefixtures("engine_dir")  # which frees the core again
def test_others_that_compute_on_the_only_core_are_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with busy(3, core):
        assert examine_machine(None, 0).cpu_share < 0.4  # which `busy_machine` judges


def test_every_diagnosis_has_a_remedy_and_is_documented() -> None:
    names = [diagnosis.__name__ for diagnosis in DIAGNOSES]
    assert list(REMEDIES) == names
    chapter = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| `{name}` |" not in chapter] == []


SUMS = {"num_sent": "num_draft_tokens", "num_accepted": "num_accepted_draft_tokens"} | {
    "num_new_tokens": "num_generated_tokens"
}
EXPLAINED = {
    "fixed": [*NGRAM, "--draft-len-mode", "fixed"],
    "automatic": [*NGRAM, "--draft-len-mode", "auto"],
    "two": [*NGRAM, "--suffix-config", "[4,[0]]", "--drafters", "ngram,suffix", "--draft-len-mode", "fixed"],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explained_steps_add_up_to_the_answer(name: str, engine_dir: Path, specdec: Specdec) -> None:
    """The sums of the steps are the answer's counts, which with fixed lengths are those of `run`."""
    asked = ["--engine-dir", engine_dir, *EXPLAINED[name], "--input-text", "the ball " * 8, "--json"]
    found = specdec("doctor", *asked, "--max-output-len", 40, "--explain").document
    assert_valid("doctor", found)
    steps, total = found["explanation"]["steps"], found["explanation"]["total"]
    assert len(steps) == total["num_steps"] and sum(step["num_sent"] > 0 for step in steps) == total["num_spec_steps"]
    for key, count in SUMS.items():
        assert sum(step[key] for step in steps) == total[count], key
    assert 10 < total["num_generated_tokens"] <= 40 and found["diagnoses"] == []
    assert [step["context_len"] - steps[0]["context_len"] for step in steps[1:]] == [
        sum(step["num_new_tokens"] for step in steps[:i]) for i in range(1, len(steps))
    ]
    for step in steps:
        longest = max((offer["num_tokens"] for offer in step["offers"]), default=0)
        assert step["num_sent"] <= longest and step["reason"]
        assert (step["reason"] == "sent whole") == (step["num_sent"] == longest > 0)
        assert longest == 0 or (step["promised"] is not None) == (name == "automatic")
        assert longest == 0 or step["price"] is not None
    drafters = {offer["drafter"] for step in steps for offer in step["offers"]}
    assert drafters == ({"ngram", "suffix"} if name == "two" else {"ngram"})
    if name != "automatic":
        ran = specdec("run", *asked, "--max-output-len", 40).document["total"]
        assert {key: ran[key] for key in total if key in ran} == {
            key: value for key, value in total.items() if key in ran
        }


@pytest.mark.parametrize("arguments", [["--input-text", "a", "--input-text", "b", *NGRAM], ["--input-text", "a"]])
def test_one_prompt_with_a_drafter_is_explained(
    arguments: list[str], engine_dir: Path, specdec: Specdec, said: Said
) -> None:
    result = specdec("doctor", "--engine-dir", engine_dir, *arguments, "--explain")
    assert result.exit_code != 0
    said(result)


@pytest.mark.usefixtures("work_clock")
def test_healthy_settings_raise_no_alarm(engine_dir: Path, specdec: Specdec) -> None:
    two = [*NGRAM, "--min-matching-ngram-size", 2, "--suffix-config", "[4,[0]]", "--drafters", "ngram,suffix"]
    assert found_in(specdec("doctor", "--engine-dir", engine_dir, *two, "--json")) <= NOISY


def test_without_a_drafter_nothing_is_said_of_one(engine_dir: Path, specdec: Specdec) -> None:
    arguments = ["doctor", "--engine-dir", engine_dir, "--max-output-len", 4]
    result = specdec(*arguments)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "draft" in line.lower()]
    assert lines == ["no drafter is given: `--spec-decode-algo SUFFIX` has one looked at too"]
    assert "between two runs: 0 of 4" in result.stdout
    assert "between two runs without the drafter: 0 of 4" in specdec(*arguments, *NGRAM).stdout


def test_findings_are_shown_with_number_and_remedy(engine_dir: Path, specdec: Specdec, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    without_reuse = ["--engine-dir", engine_dir, "--mode", "leader", "--no-kv-cache-enable-block-reuse"]
    without_reuse += ["--max-output-len", 4]
    result = specdec("doctor", *without_reuse, "--report", path)
    assert result.exit_code == 1 and "error" not in result.stderr
    lines = result.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("FOUND  reuse never hits: "))
    assert "0 of" in lines[place]
    assert lines[place + 1].strip() == REMEDIES["reuse_never_hits"]
    assert result.stdout.count("reuse never hits") == 1  # said once
    assert not any(name in line for name in REMEDIES for line in lines)
    html = path.read_text()
    assert_needs_nothing_else(html)
    assert re.search(rf"<h1>{engine_dir.name} \(32 bits\): \d findings?</h1>", html)
    finding = re.search(r'<section class="card finding"><h3>reuse never hits</h3><p>(.*?)</p>(.*?)</section>', html)
    assert finding is not None and "0 of" in finding[1] and "<code>--max-tokens-in-paged-kv-cache</code>" in finding[2]
    named = specdec("doctor", *without_reuse, "--quiet").stdout.split()
    assert {"reuse_never_hits"} <= set(named) <= {"reuse_never_hits", *NOISY}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--engine-dir", "ENGINE", "--draft-len-mode", "auto"], 2, "`--draft-len-mode auto`"),
        (["--engine-dir", "ENGINE", "--input-text", "dog " * 200], 1, "max_input_len; 96"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[object], exit_code: int, message: str, engine_dir: Path, specdec: Specdec, said: Said
) -> None:
    result = specdec("doctor", *[engine_dir if one == "ENGINE" else one for one in arguments])
    assert result.exit_code == exit_code
    assert "Traceback" not in result.stderr
    said(result, *message.split("; "))
    assert result.stdout == ""
