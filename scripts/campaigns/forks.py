"""Commands in forks of this process, which has imported what they import: that takes longer than they do."""

import atexit
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path


def import_all() -> None:
    """Import for all forks, once, what commands import. They must have one thread: others do not come along."""
    import torch
    from transformers import AutoTokenizer  # noqa: F401

    import commands.batch.work
    import commands.output.html.report  # noqa: F401
    import runtime.builder.build
    import runtime.builder.convert
    import runtime.llm
    import runtime.measure.tuning.tune  # noqa: F401

    torch.set_num_threads(1)


def start(
    arguments: Sequence[object], directory: Path, stderr: int, *, prepare: Callable[[], object] = lambda: None
) -> int:
    """The process id of `specdec` with these arguments in a directory. `prepare` is called in the fork, before."""
    sys.stdout.flush()
    sys.stderr.flush()
    process_id = os.fork()
    if not process_id:
        _become(arguments, directory, stderr, prepare)
    return process_id


def _become(arguments: Sequence[object], directory: Path, stderr: int, prepare: Callable[[], object]) -> None:
    """Ends as a process of the command does, and never returns. What this one has to do at its end is not done."""
    code = 70
    try:
        atexit._clear()
        os.chdir(directory)
        os.environ["COLUMNS"] = "1000"
        os.dup2(stderr, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = TextIOWrapper(os.fdopen(1, "wb")), TextIOWrapper(os.fdopen(2, "wb"))
        sys.argv = ["specdec", *map(str, arguments)]
        prepare()
        from specdec_cli.app import main

        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(code)


def use_directories(cache: Path, temporary: Path) -> None:
    """Set a fork's cache and directory of temporary files."""
    os.environ["SPECDEC_CACHE_DIR"] = str(cache)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
