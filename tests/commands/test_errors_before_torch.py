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
from command_line import Result
from sentences import Said
from shared import once
from waiting import HANG_S

HEAVY = ("torch", "transformers", "datasets")
MAIN = f"""
import contextlib, functools, io, json, sys
import typer.main
from specdec_cli.app import main
typer.main.get_command = functools.cache(typer.main.get_command)  # made anew by every call

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
SUMMARIZE = "summarize --engine-dir engine --test-engine --dataset articles.jsonl "
TUNE = "tune --engine-dir engine --input-text a "
CASES: dict[str, str] = {
    "run --engine-dir none --input-text a": "none",
    "check weights.bin model": "weights.bin",
    "regress model --traces weights.bin": "weights.bin",
    "train model --output-dir out --traces notes.txt --parallel model": "notes.txt",
    "tune --engine-dir engine --traces notes.txt": "notes.txt",
    "drafters model --traces notes.txt": "notes.txt",
    "run --engine-dir model --input-text a": "model",
    "run --model-dir ./none --input-text a": "./none",
    "run --model-dir engine --input-text a": "engine",
    LEADER + "--draft-model-dir ./none --spec-decode-algo DRAFT_TARGET": "./none",
    LEADER + "--max-output-len 256": "256",
    "summarize --model-dir model --test-engine --max-seq-len 64 --output-len 64": "64",
    RUN + "--tokenizer-dir none": "none",
    RUN + "--ngram-config 4,2 --ngram-corpus none": "none",
    RUN + "--ngram-config 11,2": "11",
    RUN + "--draft-engine-dir none --draft-target-model-config 4": "none",
    RUN + "--profile notes.txt": "notes.txt",
    RUN + "--output-csv none/out.csv": "none/out.csv",
    "run --engine-dir engine --input-file empty": "empty",
    "batch model -i notes.txt -o out.jsonl": "notes.txt",
    "chat --engine-dir none": "none",
    "summarize --model-dir ./none --test-engine": "./none",
    "summarize --engine-dir engine --test-engine --dataset none.jsonl": "none.jsonl",
    SUMMARIZE + "--test-hf --hf-model-dir ./none": "./none",
    SUMMARIZE + "--output-dir notes.txt/out": "notes.txt/out",
    SUMMARIZE + "--text-column body": "`body`",
    "build --checkpoint-dir model --output-dir out": "model",
    "build --checkpoint-dir ckpt --output-dir /dev/null/out": "/dev/null/out",
    "build --checkpoint-dir ckpt --output-dir out --max-draft-len 257": "257",
    "convert --model-dir ./none --output-dir out": "./none",
    "convert --model-dir model --output-dir /dev/null/out": "/dev/null/out",
    "compare notes.txt notes.txt": "notes.txt",
    "tune --traces none": "none",
    TUNE + "--output none/profile.json": "none/profile.json",
    "corpus create --output out.corpus --tokenizer-dir model --text none.txt": "none.txt",
    "corpus merge --output out.corpus none notes.txt": "none",
    "corpus stats none": "none",
    "doctor --engine-dir none": "none",
    "verify none": "none",
    "verify bad-engine": "bad-engine",
    "verify bad-ckpt": "bad-ckpt",
    "verify traces.jsonl": "traces.jsonl",
}
"""Value that the error of each command line quotes."""

Outcome = tuple[int, str, list[str]]


@pytest.fixture(scope="module")
def outcomes(
    process_environment: dict[str, str], shared: Path, llama_dir: Path, llama_checkpoint_dir: Path,
    llama_engine_dir: Path, articles: Path,
) -> dict[str, Outcome]:  # fmt: skip
    """Exit code of each command line, what was on stderr, and which heavy modules were there."""

    def run_all(directory: Path) -> None:
        directory.mkdir()
        for name, source in (("model", llama_dir), ("ckpt", llama_checkpoint_dir), ("engine", llama_engine_dir)):
            shutil.copytree(source, directory / name)
        shutil.copytree(llama_engine_dir, directory / "bad-engine")
        shutil.copytree(llama_checkpoint_dir, directory / "bad-ckpt")
        (directory / "bad-engine" / "rank0.safetensors").write_bytes(b"")
        (directory / "bad-engine" / "tokenizer.json").unlink()
        (directory / "bad-ckpt" / "tokenizer.json").unlink()
        (directory / "traces.jsonl").write_text("{}")
        shutil.copy(articles, directory)
        (directory / "empty").mkdir()
        (directory / "notes.txt").write_text("Nothing of the kind.")
        shutil.copy(llama_dir / "model.safetensors", directory / "weights.bin")
        done = subprocess.run(
            [sys.executable, "-c", MAIN],
            input=json.dumps([shlex.split(line) for line in CASES]),
            env=process_environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=directory, capture_output=True, encoding="utf-8", timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (directory / "outcomes.json").write_text(done.stdout)

    found: list[Outcome] = json.loads((once(shared / "wrong", run_all) / "outcomes.json").read_text())
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("line", CASES)
def test_error_comes_before_torch_is_imported(line: str, outcomes: dict[str, Outcome], said: Said) -> None:
    exit_code, message, heavy = outcomes[line]
    assert exit_code in (1, 2)
    said(Result(exit_code, "", message, line.split()[0]), CASES[line])
    assert heavy == []
