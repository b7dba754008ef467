"""Time of file checks when an engine and its tokenizer are opened again: with the checks and without, in turns.

python -m scripts.bench.open ENGINE_DIR [--num-openings 40]

By processor time. It may be no more than 3 % (median).
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.tokenizer import SAVED
from runtime.engine.engine import Engine
from runtime.text.text import tokenizer_of_engine
from runtime.util.files import read_json

CHECKS = (
    "runtime.checkpoint.bundle.check_config",
    "runtime.checkpoint.bundle.check_sizes",
    "runtime.checkpoint.bundle.check_contents",
    "runtime.engine.engine.check_shape",
)
"""Besides: whether the engine was replaced meanwhile, and whether the tokenizer was saved of the files beside it."""


@contextlib.contextmanager
def without_checks(engine_dir: Path) -> Iterator[None]:
    files = read_json(engine_dir / SAVED)["files"] if (engine_dir / SAVED).is_file() else ""
    with contextlib.ExitStack() as stack:
        for name in CHECKS:
            stack.enter_context(mock.patch(name, lambda *_: None))
        stack.enter_context(mock.patch("runtime.engine.engine.unchanged_while_opened", contextlib.nullcontext))
        stack.enter_context(mock.patch("runtime.checkpoint.tokenizer._files_digest", lambda _: files))
        yield


def open_engine(engine_dir: Path) -> None:
    bundle = read_bundle(engine_dir)
    tokenizer_of_engine(bundle)
    Engine.of_bundle(bundle).close()


def share_of_checks(engine_dir: Path, num_openings: int) -> str:
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(num_openings + 1):
        for is_checked in (True, False):
            with contextlib.nullcontext() if is_checked else without_checks(engine_dir):
                start = time.process_time()
                open_engine(engine_dir)
                times[is_checked].append(time.process_time() - start)
    checked, unchecked = (1e3 * statistics.median(times[key][1:]) for key in (True, False))  # the first is not again
    return f"{checked:.2f} ms, {unchecked:.2f} ms without checks: {100 * (checked - unchecked) / checked:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--num-openings", type=int, default=40)
    given = parser.parse_args()
    print(share_of_checks(given.engine_dir, given.num_openings))


if __name__ == "__main__":
    main()
