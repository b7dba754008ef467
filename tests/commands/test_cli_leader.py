"""Leader mode (V2) from the command line: the same tokens as orchestrator mode and Hugging Face, whatever the flags."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PROMPTS, Result, Specdec, assert_valid, each, ids_of, texts_of
from forked import Forks
from gate import Gate
from sentences import Said
from tiny import hf_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waiting import wait_until

NUM_TOKENS = 16
NINE = [*PROMPTS, *(f"{prompt} and" for prompt in PROMPTS[:4])]
Leader = Callable[..., Result]


@pytest.fixture
def leader(specdec: Specdec, llama_engine_dir: Path) -> Leader:
    """`leader(prompts, …)`: `specdec run` in leader mode on the uncompiled engine of batch 4."""

    def call(prompts: list[str], *arguments: object) -> Result:
        texts = each("--input-text", prompts)
        # Whole drafts, whatever steps took when the engine was built.
        common = ["--max-output-len", NUM_TOKENS, "--draft-len-mode", "fixed"]
        return specdec("run", "--engine-dir", llama_engine_dir, *texts, *common, *arguments)

    return call


@pytest.fixture
def algorithm(draft_engine_dir: Path) -> dict[str, list[object]]:
    return {
        "none": ["--disable-overlap-scheduler"],
        "ngram": ["--spec-decode-algo", "NGRAM", "--spec-decode-max-draft-len", 4, "--max-matching-ngram-size", 2],
        "draft model": ["--spec-decode-algo", "DRAFT_TARGET", "--draft-engine-dir", draft_engine_dir],
    }


@pytest.mark.parametrize("reuse", [[], ["--disable-kv-cache-reuse"]], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("drafter", ["none", "draft model"])
def test_v2_gives_hugging_faces_tokens(
    drafter: str, reuse: list[str], leader: Leader, algorithm: dict[str, list[object]],
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    document = leader(NINE, *algorithm[drafter], *reuse, "--end-id", 299, "--json").document
    assert_valid("run", document)
    assert ids_of(document) == [hf_greedy(llama, tokenizer(p)["input_ids"], NUM_TOKENS, 299) for p in NINE]
    assert document["settings"]["mode"] == "leader"
    assert document["settings"]["block_reuse"] is not bool(reuse)
    assert (document["total"]["num_draft_tokens"] > 0) == (drafter != "none")


@pytest.mark.parametrize("max_num_tokens", [5, 512])
@pytest.mark.parametrize("flags", [[], ["--spec-decode-algo", "NGRAM"]], ids=["V1", "V2"])
def test_prompts_computed_in_pieces_give_the_same_tokens(max_num_tokens: int, flags: list[str], leader: Leader) -> None:
    document = leader(NINE, *flags, "--max-num-tokens", max_num_tokens, "--json").document
    assert document["settings"]["max_num_tokens"] == max_num_tokens
    assert ids_of(document) == ids_of(leader(NINE, "--json").document)


@pytest.mark.parametrize("stops", [[], ["--stop-words"]], ids=["no stop word", "stop word"])
def test_streamed_pieces_make_up_each_text_and_come_interleaved(
    stops: list[str], leader: Leader, algorithm: dict[str, list[object]]
) -> None:
    """The stop word is out of the middle of an output and has several tokens, so that pieces end inside it."""
    whole = texts_of(leader(NINE, *algorithm["ngram"], "--json").document)
    flags = [*algorithm["ngram"], *(word for flag in stops for word in (flag, whole[0][8:14]))]
    expected = texts_of(leader(NINE, *flags, "--json").document)
    assert (expected[0] == whole[0]) == (not stops)
    result = leader(NINE, *flags, "--streaming", "--streaming-interval", 3, "--quiet")
    pieces = re.findall(r"\[Text (\d)\] (.*?)\n(?=\[Text \d\] |\Z)", result.stdout, flags=re.DOTALL)
    shown = ["".join(piece for number, piece in pieces if int(number) == i) for i in range(len(NINE))]
    assert shown == expected
    order = [int(number) for number, _ in pieces]
    assert order != sorted(order), "texts came one after the other"
    assert order.index(0) < order.index(8), "later requests wait for room"


INTERRUPTED_DRAFTER = """
from runtime.core.request import Draft
class Interrupting:
    def propose(self, sequences, max_draft_len):
        if any(s.request.id >= {after} for s in sequences):
            raise KeyboardInterrupt
        return [Draft([])] * len(sequences)
    def forget(self, request_id):
        pass
def make():
    return Interrupting()
"""


@pytest.mark.parametrize("mode", [["--disable-overlap-scheduler"], []], ids=["V2", "V1"])
def test_interrupted_run_gives_what_had_finished(
    mode: list[str], leader: Leader, current_directory: Path, tmp_path: Path, said: Said
) -> None:
    """Request 4 starts when one of the first four has ended."""
    expected = ids_of(leader(NINE, "--json").document)
    (current_directory / "own.py").write_text(INTERRUPTED_DRAFTER.format(after=4))
    files = ["--output-csv", tmp_path / "ids.csv", "--report", tmp_path / "report.html"]
    result = leader(NINE, *mode, "--drafter", "own:make", "--json", *files)
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert_valid("run", document)
    num_finished = len(document["requests"])
    assert num_finished > 0
    assert document["num_unfinished_requests"] == len(NINE) - num_finished
    said(result, num_finished, "9")
    assert all(ids in expected for ids in ids_of(document))
    assert (tmp_path / "ids.csv").exists()
    assert f"{num_finished} of 9 requests had finished" in (tmp_path / "report.html").read_text(encoding="utf-8")


DRAFTER_INTERRUPTED_LATER = """
import torch
from runtime.core.request import Draft
class Interrupting:
    def __init__(self):
        self.answered = set()
    def propose(self, sequences, max_draft_len):
        if len(self.answered) == 9:
            raise KeyboardInterrupt
        return [Draft([5], torch.eye(300, dtype=torch.float64)[5:6])] * len(sequences)
    def forget(self, request_id):
        self.answered.add(request_id)
def make():
    return Interrupting()
"""


def test_check_that_is_interrupted_leaves_the_outputs(
    leader: Leader, current_directory: Path, tmp_path: Path, said: Said
) -> None:
    """The distribution check drafts again, when all nine requests have been answered."""
    (current_directory / "own.py").write_text(DRAFTER_INTERRUPTED_LATER)
    page = tmp_path / "report.html"
    flags = ["--drafter", "own:make", "--temperature", 1, "--end-id", 0, "--check-lossless", "--json", "--report", page]
    result = leader(NINE, *flags)
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert_valid("run", document)
    assert len(document["requests"]) == len(NINE) and document["num_unfinished_requests"] == 0
    assert document["checks"] == {} and document["speedup"] is None
    said(result)
    assert page.exists()


def test_ctrl_c_ends_a_process_with_what_had_finished(
    forks: Forks, llama_engine_dir: Path, process_environment: dict[str, str], tmp_path: Path, said: Said
) -> None:
    """While four of nine requests have finished, and four others are on their way."""
    gate = Gate(tmp_path, num_steps=70)
    texts = each("--input-text", NINE)
    flags = ["--disable-kv-cache-reuse", "--end-id", 299, "--max-output-len", 60, "--streaming", "--quiet"]
    flags += ["--drafter", "gate:Waits", "--mode", "leader", "--draft-len-mode", "fixed"]
    environment = process_environment | gate.environment | {"PYTHONUNBUFFERED": "1"}
    process = forks.start("run", "--engine-dir", llama_engine_dir, *texts, *flags, environment=environment)
    wait_until(lambda: gate.is_reached)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate()
    assert process.returncode == 130, errors
    said(next(line for line in errors.splitlines() if "interrupted" in line), "4", "9")
    assert "[Text 4]" in shown and "[Text 8]" not in shown
    assert "Traceback" not in errors
