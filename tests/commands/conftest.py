"""The command line called in this process and as a process of its own, and a dataset for `summarize`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Result, Specdec

from specdec_cli.app import main


@pytest.fixture
def specdec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Specdec]:
    """`specdec("run", "--engine-dir", path, …)`: `main` called in this process with these arguments."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["specdec", *map(str, arguments)])
        capfd.readouterr()
        exit_code: Any = 0
        try:
            main()
        except SystemExit as error:
            exit_code = error.code or 0
        captured = capfd.readouterr()
        return Result(exit_code, captured.out, captured.err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def process_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def specdec_process(process_environment: dict[str, str]) -> Specdec:
    """The same in a process of its own; `environment=` adds variables."""

    def call(*arguments: object, environment: dict[str, str] | None = None) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "specdec_cli", *map(str, arguments)],
            env=process_environment | (environment or {}),
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call


ARTICLES = [
    {"id": "a1", "category": "dogs", "article": "The little dog had a red ball.", "highlights": "A dog and a ball."},
    {"id": "a2", "category": "girls", "article": "A little girl found the ball.", "highlights": "A girl found it."},
    {"id": "a3", "category": "dogs", "article": "The dog lost it in the park.", "highlights": "Lost in the park."},
    {"id": "a4", "category": "girls", "article": "One day the girl had a dog.", "highlights": "A girl and a dog."},
    {"id": "a5", "category": "dogs", "article": "The dog looked under the bed.", "highlights": "The dog looked."},
]


@pytest.fixture(scope="session")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five short articles in two categories, as .jsonl."""
    path = tmp_path_factory.mktemp("data") / "articles.jsonl"
    path.write_text("".join(json.dumps(article) + "\n" for article in ARTICLES))
    return path
