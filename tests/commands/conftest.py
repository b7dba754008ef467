"""The command line called in this process and as a process of its own, draft models, and a dataset for `summarize`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from byte_tokenizers import trained_on
from command_line import PROMPT, Result, Specdec
from draft_models import WITHOUT_DRAFTS, MakeDraftEngineDir, with_noise
from forked import Forks
from heads import copy_with_mtp, make_assistant, make_block, make_eagle, save_block, save_eagle
from shared import shared_engine
from tiny import make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waiting import HANG_S

import specdec_cli.app
from specdec_cli.app import main


def command_of(arguments: tuple[object, ...]) -> str:
    group: Any = typer.main.get_command(specdec_cli.app.app)
    return next((str(argument) for argument in arguments if str(argument) in group.commands), "specdec")


@pytest.fixture
def specdec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Specdec]:
    """`specdec("run", "--engine-dir", path, …)`: `main` called in this process with these arguments."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # what `main` sets is taken back with it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    facts: list[str | None] = []
    report = specdec_cli.app._report
    monkeypatch.setattr(specdec_cli.app, "_report", lambda e: (facts.append(getattr(e, "code", None)), report(e))[1])
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
        return Result(exit_code, captured.out, captured.err, command_of(arguments), facts.pop() if facts else None)

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
            timeout=HANG_S,
        )
        return Result(done.returncode, done.stdout, done.stderr, command_of(arguments))

    return call


@pytest.fixture(scope="session")
def specdec_fork(forks: Forks, process_environment: dict[str, str]) -> Specdec:
    """The same in a fork that need not import torch: for what is not about how a process begins."""

    def call(*arguments: object, environment: dict[str, str] | None = None) -> Result:
        done = forks.run(*arguments, environment=process_environment | (environment or {}))
        return Result(done.returncode, done.stdout, done.stderr, command_of(arguments))

    return call


@pytest.fixture
def run(specdec: Specdec, llama_engine_dir: Path) -> Callable[..., Result]:
    """`run(…)`: `specdec run` with the uncompiled engine, no end id, and `PROMPT` unless prompts are given."""

    def call(*arguments: object) -> Result:
        given = {str(argument).partition("=")[0] for argument in arguments}
        prompt = [] if given & {"--input-text", "--input-file"} else ["--input-text", PROMPT]
        engine = [] if "--engine-dir" in given else ["--engine-dir", llama_engine_dir]
        return specdec("run", *engine, *prompt, *arguments)

    return call


@pytest.fixture(scope="session")
def make_draft_engine_dir(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, kernels: Path, tokenizer: PreTrainedTokenizerFast
) -> MakeDraftEngineDir:
    """`make_draft_engine_dir(model, tokenizer, **build)`: an engine that takes no drafts, made once. Uncompiled.

    The tokenizer is the target's unless another is given, or None for an engine without one.
    """

    def make(
        model: PreTrainedModel, own_tokenizer: PreTrainedTokenizerFast | None = tokenizer, **build: object
    ) -> Path:
        model_dir = tmp_path_factory.mktemp("draft") / "model"
        model.save_pretrained(model_dir)
        if own_tokenizer is not None:
            own_tokenizer.save_pretrained(model_dir)
        return shared_engine(shared / "engines", model_dir, **(WITHOUT_DRAFTS | build))

    return make


@pytest.fixture(scope="session")
def draft_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A draft model that the target agrees with in about every third token."""
    return make_draft_engine_dir(with_noise(make_model("llama", vocab_size=len(tokenizer)), 0.01), compiler="aot")


@pytest.fixture(scope="session")
def pard_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A parallel draft model whose first drafted tokens are `draft_engine_dir`'s."""
    model = with_noise(make_model("llama", vocab_size=len(tokenizer), pard_token=299), 0.01)
    return make_draft_engine_dir(model, max_draft_len=4, speculative_decoding_mode="draft_tokens_external")


@pytest.fixture(scope="session")
def head_dirs(
    llama_dir: Path, llama: PreTrainedModel, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An engine of `llama_dir` for a head, and the head, with random weights."""
    head = make_eagle(llama, states=(0, 1, 1), draft_vocab=200)
    head_dir = save_eagle(head, tmp_path_factory.mktemp("head"), "speculators")
    return shared_engine(shared / "engines", llama_dir, measure_costs=True, hidden_states=head.states), head_dir


@pytest.fixture(scope="session")
def block_dir(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DSpark head for the engine of `head_dirs`, with random weights."""
    block = make_block(llama, states=(0, 1, 1), draft_vocab=200, mask=299, markov="vanilla", anchor=True)
    return save_block(block, tmp_path_factory.mktemp("block"), "dspark")


@pytest.fixture(scope="session")
def mtp_dirs(
    llama_dir: Path, llama: PreTrainedModel, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An engine of `llama_dir` for an MTP head, and the model with the head."""
    with_head = copy_with_mtp(llama_dir, tmp_path_factory.mktemp("mtp") / "model")
    states = (llama.config.num_hidden_layers,)
    return shared_engine(shared / "engines", with_head, measure_costs=True, hidden_states=states), with_head


@pytest.fixture(scope="session")
def assistant_dirs(
    tokenizer: PreTrainedTokenizerFast, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, PreTrainedModel]:
    """An engine of a tiny Gemma 4 for an assistant, the assistant, and the target."""
    directory = tmp_path_factory.mktemp("assistant")
    target = make_model("gemma4-moe", vocab_size=len(tokenizer))
    target.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    made = make_assistant(target, directory / "assistant", num_centroids=20)
    states = (target.config.num_hidden_layers,)
    return shared_engine(shared / "engines", directory / "model", hidden_states=states), made, target


@pytest.fixture(scope="session")
def equal_draft_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A draft model with the target's weights: an engine of its own."""
    return make_draft_engine_dir(make_model("llama", vocab_size=len(tokenizer)))


@pytest.fixture(scope="session")
def bare_draft_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The target's weights and no tokenizer."""
    return make_draft_engine_dir(make_model("llama", vocab_size=len(tokenizer)), None)


@pytest.fixture(scope="session")
def other_tokenizer() -> PreTrainedTokenizerFast:
    """280 tokens, of other sentences."""
    return trained_on("Quick zebras jump over lazy foxes. Quick foxes jump over lazy zebras.", 280)


@pytest.fixture
def current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, from which modules may be imported; they and their path are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


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
