"""Leader mode (V2) from the command line: the same tokens as orchestrator mode and Hugging Face, whatever the flags."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PROMPTS, Result, Specdec, assert_valid, each, texts_of
from forked import Forks
from gate import Gate
from sentences import Said
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


@pytest.mark.parametrize("stops", [[], ["--stop-words"]], ids=["no stop word", "stop word"])
def test_streamed_pieces_make_up_each_text_and_come_interleaved(stops: list[str], leader: Leader) -> None:
    """The stop word is out of the middle of an output and has several tokens, so that pieces end inside it."""
    ngram = ["--spec-decode-algo", "NGRAM", "--spec-decode-max-draft-len", 4, "--max-matching-ngram-size", 2]
    whole = texts_of(leader(NINE, *ngram, "--json").document)
    flags = [*ngram, *(word for flag in stops for word in (flag, whole[0][8:14]))]
    expected = texts_of(leader(NINE, *flags, "--json").document)
    assert (expected[0] == whole[0]) == (not stops)
    result = leader(NINE, *flags, "--streaming", "--streaming-interval", 3, "--quiet")
    pieces = re.findall(r"\[Text (\d)\] (.*?)\n(?=\[Text \d\] |\Z)", result.stdout, flags=re.DOTALL)
    shown = ["".join(piece for number, piece in pieces if int(number) == i) for i in range(len(NINE))]
    assert shown == expected
    order = [int(number) for number, _ in pieces]
    assert order != sorted(order), "texts came one after the other"
    assert order.index(0) < order.index(8), "later requests wait for room"


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
