"""Choice of the tests that are run, and their settings. Fixtures are in `common_fixtures.py`, for who runs them."""

import gc
import os
import shlex
from collections.abc import Generator

# Set before torch is imported: with tiny tensors, threads that wait for each other are the whole run time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# What only calls the kernels is compiled in three quarters of the time, and computes the same.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"

from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings
from strength import register_profiles
from waiting import HANG_S, wait_until, with_an_end

from runtime.util.collector import collect_rarely

pytest_plugins = ("sentences",)
_QUICK_DRAFTERS = "adaptive chain drafter_protocol meter ngram pool predicted_outputs suffix"
_QUICK_CORE = "batch kv_cache stats verify"
QUICK = {
    *(f"runtime/drafters/test_{name}.py" for name in _QUICK_DRAFTERS.split()),
    *(f"runtime/core/test_{name}.py" for name in _QUICK_CORE.split()),
    "runtime/engine/test_engine.py",
    "commands/documents/test_schemas.py",
}
"""The tests of the core. Those of them that compile nothing are `quick`."""
WAITING = {
    *("commands/test_engine_cache.py", "commands/test_errors_before_torch.py", "runtime/drafters/test_plugins.py"),
    *("serving/test_serving_launch.py", "test_gpu_check.py", "test_sentences.py"),
}
_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="try property tests at full strength, and run slow tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a variation that is run with `--slow` only")
    config.addinivalue_line("markers", "one_in(n): of its variations about one in n is run, all with `--slow`")
    register_profiles()
    settings.load_profile("slow" if config.getoption("--slow") else "default")
    collect_rarely()
    config.stash[_STDERR] = os.dup(2)  # which is not captured yet
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("common_fixtures")  # takes seconds, and who has workers runs no test


def _with_an_end(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test its limit: with `--slow`, which tries a hundred times as much, a hundred times as long."""
    limit_s = HANG_S * (100 if item.config.getoption("--slow") else 1)
    with with_an_end(item.nodeid, item.config.stash[_STDERR], limit_s):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _with_an_end(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _with_an_end(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _with_an_end(item))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have workers begin as forks of the process that the tests' are forks of: one imports what takes seconds."""
    from forked import Forks, python

    directory = config._tmp_path_factory.getbasetemp() / "forks"  # type: ignore[attr-defined]
    forks = Forks(directory)
    config.add_cleanup(forks.end)
    for spec in specs:
        spec.python = shlex.quote(str(python(directory / "python", directory)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
    # What waits for the walk of the documentation comes first: one worker has it then, and the other takes the rest.
    # Then what waits for processes or a download, so that no worker waits for it alone at the end.
    items.sort(key=lambda item: ("walk" not in getattr(item, "fixturenames", ()), _place(item.path) not in WAITING))
    if not config.getoption("--slow"):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def pytest_collection_finish() -> None:
    """Freeze all objects that exist now, such as torch's modules, so that garbage collection leaves them out. Then wait
    for the kernels, if `scripts/test.sh` runs while the kernels are compiled.
    """
    gc.collect()
    gc.freeze()
    if awaited := os.environ.get("TESTS_WAIT_FOR"):
        wait_until(Path(awaited).exists)


def is_slow(item: pytest.Item) -> bool:
    """True for the same variations, whatever the order: a digest of their names decides."""
    one_in = item.get_closest_marker("one_in")
    left_out = one_in is not None and crc32(item.nodeid.encode()) % one_in.args[0] != 0
    return left_out or item.get_closest_marker("slow") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of what is not quick where that is left out."""
    is_test = collection_path.suffix == ".py"
    return True if config.option.markexpr == "quick" and is_test and _place(collection_path) not in QUICK else None


def is_quick(item: pytest.Item) -> bool:
    compiles = "kernels" in getattr(item, "fixturenames", ()) or "aot" in item.name or "compiled" in item.name
    return _place(item.path) in QUICK and not compiles


@cache
def _place(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()
