"""Fixtures for every test: tiny models, engines made from them, and one thread for torch."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from byte_tokenizers import trained_on
from clocks import WorkClock, install
from filelock import FileLock
from forked import Forks, opened_forks, python
from gate import Gate
from shared import MakeEngineDir, once, shared_dir, shared_engine
from tiny import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from commands.options.expand import CURRENT_COMMAND
from runtime.builder import engine_cache
from runtime.builder.convert import convert
from runtime.checkpoint.config import SelfDraft
from runtime.core import block_store
from runtime.engine import rank_processes
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.kernels.library import compile_kernels
from runtime.loop import step_costs
from runtime.util.cache import cache_dir, make_cache_dir
from runtime.util.files import write_file

torch.set_num_threads(1)
torch.set_num_interop_threads(1)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of this test run have in common: see `once`."""
    return shared_dir(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(shared: Path) -> None:
    """One for this test run: what is compiled for one test is found by the others."""
    before = cache_dir()
    os.environ["XDG_CONFIG_HOME"] = str(shared / "config")  # without the settings of who runs the tests
    os.environ["SPECDEC_CACHE_DIR"] = str(shared / "cache")
    with FileLock(shared / "cache.lock"):
        make_cache_dir()
        for kernels in before.glob("kernels-*.so"):  # compiled by the installation
            if not (to := cache_dir() / kernels.name).exists():
                write_file(to, kernels.read_bytes())


@pytest.fixture(scope="session", autouse=True)
def few_steps_measured() -> Iterator[dict[str, Any]]:
    """Measure steps of two batch sizes and one context, in one pass; gives the sizes that are measured otherwise. More
    of them make costs exact on a busy machine, and no test depends on the time.
    """
    few: dict[str, Any] = {"_MAX_PASSES": 1, "_BATCH_SIZES": (1, 4), "_CONTEXT_LENS": (64,), "_COPIED_BYTES": 1 << 20}
    before = {name: getattr(step_costs, name) for name in few}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in few.items():
            patch.setattr(step_costs, name, value)
        yield before


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Write files without `fsync`: other processes see them whole, and no test cuts the power. For the lock of
    keys and values on disk, which SQLite holds while it waits for the disk, tests wait as long as it takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # `fstat` too fails for a number that is no open file
        patch.setattr(block_store, "_BUSY_S", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Typer makes all commands anew in every call of `main`: a process calls it once, and these tests thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def sources_read_once() -> Iterator[None]:
    """The sources stay as they are: each command that makes an engine would read them all for the engine's place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_cache, "digests_of_build_code", cache(engine_cache.digests_of_build_code))
        yield


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Gate at which engines of this process stand still that have the drafter `gate:Waits`."""
    made = Gate(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    """Clock by which time is taken in this process until the end of the test."""
    return install(monkeypatch)


@pytest.fixture(scope="session")
def forks(shared: Path, cache_of_its_own: None) -> Iterator[Forks]:
    """Processes of Python that need not import torch anew: `forks.run("run", …)`, `forks.run(program=…)`."""
    with opened_forks(shared / "forks") as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def ranks_begin_as_forks(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have other ranks, and processes that share a build, be forks too where there are some: imports take seconds."""
    program = str(python(tmp_path_factory.mktemp("bin") / "python", shared / "forks"))
    rank_processes._PYTHON = program
    multiprocessing.set_executable(program)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """Seed torch: numbers without a generator do not depend on the tests before, which chance deals to workers.

    `torch.manual_seed` keeps the stack of each call for every kind of device that is not used yet, which takes longer
    than many a test.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def no_command_yet() -> Iterator[None]:
    """Reset the command: a hint in one test does not speak of what another called in this process."""
    token = CURRENT_COMMAND.set(None)
    yield
    CURRENT_COMMAND.reset(token)


@pytest.fixture(scope="session")
def kernels(shared: Path, cache_of_its_own: None) -> Path:
    """The compiled kernels' library, which is in the cache from now on."""
    march = os.environ.get("SPECDEC_TEST_MARCH", "native")
    return once(shared / "kernels", partial(compile_kernels, march=march))


@pytest.fixture(scope="session")
def make_engine_dir(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, request: pytest.FixtureRequest
) -> MakeEngineDir:
    """`make_engine_dir(model, **build)`: the engine directory of a model; `build` as for `build_tiny`.

    An engine of the same weights and settings is there already: nobody may change one.
    """

    def make(model: PreTrainedModel, **build: Any) -> Path:
        model_dir = tmp_path_factory.mktemp("model")
        model.save_pretrained(model_dir)
        if build.get("compiler", "none") != "none":
            request.getfixturevalue("kernels")
        return shared_engine(shared / "engines", model_dir, **build)

    return make


@pytest.fixture
def make_engine(make_engine_dir: MakeEngineDir) -> Iterator[MakeEngine]:
    """`make_engine(model, kv_cache, **build)`: an opened engine, closed after the test."""
    engines: list[Engine] = []

    def make(model: PreTrainedModel, kv_cache: KVCacheConfig | None = None, **build: Any) -> Engine:
        engines.append(Engine.open(make_engine_dir(model, **build), kv_cache=kv_cache))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


_TEXT = (
    "Once upon a time there was a little dog. The little dog had a red ball. One day the dog lost the ball. "
    "The dog looked for the ball in the park, and the dog looked for the ball under the bed. "
    "Then a little girl found the red ball and gave the ball to the little dog."
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """About 300 tokens, of a few sentences."""
    return trained_on(_TEXT, 300)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face model directory: a tiny random Llama with `tokenizer` beside it."""
    directory = tmp_path_factory.mktemp("llama") / "model"
    model = make_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def llama(llama_dir: Path) -> PreTrainedModel:
    """Hugging Face's own model of `llama_dir`, float32 and eager."""
    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def llama_checkpoint_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama") / "checkpoint"
    convert(llama_dir, directory, None, replace=False, progress=lambda done, total: None)
    return directory


@pytest.fixture(scope="session")
def llama_uncompiled_dir(llama_dir: Path, shared: Path) -> Path:
    """Engine directory of `llama_dir` with compiler none, and what its steps cost."""
    return shared_engine(shared / "engines", llama_dir, measure_costs=True)


@pytest.fixture(scope="session")
def llama_engine_dir(llama_dir: Path, shared: Path, kernels: Path) -> Path:
    """Engine directory of `llama_dir`, compiled ahead of time (half a minute, once), and what its steps cost."""
    return shared_engine(shared / "engines", llama_dir, compiler="aot", measure_costs=True)


@pytest.fixture(scope="session")
def self_draft_engine_dir(llama_dir: Path, shared: Path, kernels: Path) -> Path:
    """The same with a copy in 4 bits that drafts."""
    build: dict[str, Any] = {"compiler": "aot", "measure_costs": True, "self_draft": SelfDraft("int4")}
    return shared_engine(shared / "engines", llama_dir, **build)


@pytest.fixture(scope="session")
def split_engine_dir(make_engine_dir: MakeEngineDir) -> Path:
    """Engine directory of `make_model("llama")` on two ranks, compiled ahead of time, and what its steps cost."""
    return make_engine_dir(make_model("llama"), tp_size=2, compiler="aot", measure_costs=True)
