"""Checks that need no torch come before it is imported: a wrong path does not cost seconds.

All command lines are given to one process, one after the other, which says what it had imported by each error.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

HEAVY = ("torch", "transformers", "datasets")
MAIN = f"""
import contextlib, io, json, sys
from specdec_cli.app import main

found = []
for arguments in json.load(sys.stdin):
    sys.argv = ["specdec", *arguments]
    errors, code = io.StringIO(), 0
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as exit:
            code = exit.code or 0
    found.append([code, errors.getvalue(), [name for name in {HEAVY} if name in sys.modules]])
json.dump(found, sys.stdout)
"""

RUN = "run --engine-dir engine --input-text a "
LEADER = "run --model-dir model --input-text a "
CHAT = "chat --engine-dir engine "
SUMMARIZE = "summarize --engine-dir engine --test-engine --dataset articles.jsonl "
TUNE = "tune --engine-dir engine --input-text a "
CREATE = "corpus create --output out.corpus --tokenizer-dir model --text notes.txt "
CASES = {
    "run --engine-dir none --input-text a": "engine directory does not exist: none",
    "run --engine-dir model --input-text a": "not an engine directory: model",
    "run --engine-dir notes.txt --input-text a": "engine directory is not a directory: notes.txt",
    "run --model-dir ./none --input-text a": "model directory does not exist: ./none",
    "run --model-dir notes.txt --input-text a": "model is a file, not a directory: notes.txt",
    "run --model-dir empty --input-text a": "file is missing: empty/config.json",
    "run --model-dir engine --input-text a": "directory that specdec wrote",
    LEADER + "--draft-model-dir ./none --spec-decode-algo DRAFT_TARGET": "draft engine: model directory does not exist",
    RUN + "--tokenizer-dir none": "tokenizer directory does not exist: none",
    RUN + "--ngram-config 4,2 --ngram-corpus none": "there is no such corpus: none",
    RUN + "--ngram-config 11,2": "at most 10 tokens, and the drafter's are of up to: 11",
    RUN + "--ngram-config 4,2,3,4": "does not have 2 to 3 entries",
    RUN + "--draft-engine-dir none --draft-target-model-config 4": "draft engine: engine directory does not exist",
    RUN + "--profile none": "cannot read the file (No such file or directory): none",
    RUN + "--profile notes.txt": "not JSON at line 1",
    RUN + "--output-csv none/out.csv": "cannot write the file",
    RUN + "--temperature -1": "temperature must be at least 0",
    "run --engine-dir engine --input-file none.txt": "cannot read the file (No such file or directory): none.txt",
    "run --engine-dir engine --input-file empty": "unknown kind of input file: empty",
    "chat --engine-dir none": "engine directory does not exist: none",
    "chat --model-dir ./none": "model directory does not exist: ./none",
    CHAT + "--tokenizer-dir none": "tokenizer directory does not exist: none",
    CHAT + "--ngram-config 4,2 --ngram-corpus none": "there is no such corpus: none",
    "summarize --engine-dir none --test-engine": "engine directory does not exist: none",
    "summarize --model-dir ./none --test-engine": "model directory does not exist: ./none",
    "summarize --engine-dir engine --test-engine --dataset none.jsonl": "cannot read the file",
    "summarize --engine-dir engine --test-engine --dataset none.parquet": "no such dataset file: none.parquet",
    SUMMARIZE + "--tokenizer-dir none": "tokenizer directory does not exist: none",
    SUMMARIZE + "--test-hf --hf-model-dir ./none": "model directory does not exist: ./none",
    SUMMARIZE + "--output-dir notes.txt/out": "cannot write into the directory",
    SUMMARIZE + "--batch-size 5": "exceeds the engine's max_batch_size 4: 5",
    SUMMARIZE + "--text-column body": "no column `body`",
    "build --checkpoint-dir none --output-dir out": "checkpoint directory does not exist: none",
    "build --checkpoint-dir model --output-dir out": "is a Hugging Face model, not a checkpoint",
    "build --checkpoint-dir ckpt --output-dir engine": "output directory is not empty: engine",
    "build --checkpoint-dir ckpt --output-dir /dev/null/out": "/dev/null/out",
    "build --checkpoint-dir ckpt --output-dir out --max-draft-len 257": "`--max-draft-len` must be at most 256",
    "convert --model-dir ./none --output-dir out": "model directory does not exist: ./none",
    "convert --model-dir empty --output-dir out": "file is missing: empty/config.json",
    "convert --model-dir model --output-dir notes.txt": "output directory is not a directory: notes.txt",
    "convert --model-dir model --output-dir /dev/null/out": "/dev/null/out",
    "compare none a.json": "cannot read the file (No such file or directory): none",
    "compare notes.txt notes.txt": "not JSON at line 1",
    "tune --engine-dir none --input-text a": "engine directory does not exist: none",
    "tune --engine-dir engine --input-file none.txt": "cannot read the file (No such file or directory): none.txt",
    "tune --traces none": "cannot read the file (No such file or directory): none",
    TUNE + "--tokenizer-dir none": "tokenizer directory does not exist: none",
    TUNE + "--output none/profile.json": "cannot write the file",
    TUNE + "--ngram-config 4,2 --ngram-corpus none": "there is no such corpus: none",
    "corpus create --output out.corpus --tokenizer-dir none --text notes.txt": "directory does not exist: none",
    "corpus create --output out.corpus --tokenizer-dir model --text none.txt": "cannot read the file",
    "corpus create --output out.corpus --tokenizer-dir model --traces none": "cannot read the file",
    "corpus merge --output out.corpus none notes.txt": "there is no such corpus: none",
    "corpus stats none": "there is no such corpus: none",
    "corpus stats notes.txt": "not a corpus",
    "doctor --engine-dir none": "engine directory does not exist: none",
    "doctor --engine-dir engine --input-file none.txt": "cannot read the file",
    "doctor --engine-dir engine --tokenizer-dir none": "tokenizer directory does not exist: none",
    "doctor --engine-dir engine --profile none": "cannot read the file",
    "verify none": "there is no such file or directory: none",
    "verify notes.txt": "neither a corpus, a profile nor traces",
    "verify empty": "file is missing: empty/config.json",
    "verify bad-engine": "2 files are not what was written, such as `rank0.safetensors` (changed): bad-engine",
    "verify bad-ckpt": "1 file is not what was written, such as `tokenizer.json` (missing): bad-ckpt",
    "verify traces.jsonl": "1 file is not what was written, such as `traces.jsonl` (damaged): traces.jsonl",
}
# So much the instrument sees: an error that needs the tokenizer comes after torch.
LATE = "run --engine-dir engine --input-text a --end-id 300"

Outcome = tuple[int, str, list[str]]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, process_environment: dict[str, str], shared: Path, llama_dir: Path,
    llama_checkpoint_dir: Path, llama_uncompiled_dir: Path, articles: Path,
) -> dict[str, Outcome]:  # fmt: skip
    """Exit code of each command line, what was on stderr, and which heavy modules were there."""

    def run_all() -> list[Outcome]:
        directory = tmp_path_factory.mktemp("wrong")
        for name, source in (("model", llama_dir), ("ckpt", llama_checkpoint_dir), ("engine", llama_uncompiled_dir)):
            shutil.copytree(source, directory / name)
        shutil.copytree(llama_uncompiled_dir, directory / "bad-engine")
        shutil.copytree(llama_checkpoint_dir, directory / "bad-ckpt")
        (directory / "bad-engine" / "rank0.safetensors").write_bytes(b"")
        (directory / "bad-engine" / "tokenizer.json").unlink()
        (directory / "bad-ckpt" / "tokenizer.json").unlink()
        (directory / "traces.jsonl").write_text("{}")
        shutil.copy(articles, directory)
        (directory / "empty").mkdir()
        (directory / "notes.txt").write_text("Nothing of the kind.")
        done = subprocess.run(
            [sys.executable, "-c", MAIN],
            input=json.dumps([shlex.split(line) for line in (*CASES, LATE)]),
            env=process_environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=directory,
            capture_output=True,
            encoding="utf-8",
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stderr
        found: list[Outcome] = json.loads(done.stdout)
        return found

    return dict(zip((*CASES, LATE), run_all(), strict=True))


@pytest.mark.parametrize("line", CASES)
def test_error_comes_before_torch_is_imported(line: str, outcomes: dict[str, Outcome]) -> None:
    exit_code, message, heavy = outcomes[line]
    assert exit_code in (1, 2)
    assert CASES[line] in " ".join(message.split())
    assert heavy == []


def test_what_needs_the_tokenizer_comes_after_it(outcomes: dict[str, Outcome]) -> None:
    exit_code, message, heavy = outcomes[LATE]
    assert exit_code == 1
    assert "vocabulary of 300: 300" in message
    assert "torch" in heavy
