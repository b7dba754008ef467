"""State that transformers keeps for the whole process: its messages, and the lock that lets only one thread at a time
make a model, or build or open an engine.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR
from threading import RLock
from typing import Any

# While transformers makes a model, or torch compiles a model, they replace functions and defaults for all threads, and
# put the former ones back at the end. A second thread would put back the first one's replacements, or import half a
# module. A thread that takes a file lock too takes this lock first.
MODEL_INIT_LOCK = RLock()
if hasattr(os, "register_at_fork"):  # in a fork, the thread that held the lock does not exist and cannot release it
    os.register_at_fork(after_in_child=MODEL_INIT_LOCK._at_fork_reinit)  # type: ignore[attr-defined]

_MAKERS = ("from_pretrained", "_from_config")
_MARK = "_takes_specdecs_lock"
_LONGEST_WAIT_S = 60.0


def lock_transformers() -> None:
    """Have transformers take MODEL_INIT_LOCK itself when it makes models, so that users' own threads need not.

    During a `from_pretrained`, transformers replaces a method of all its models and torch's default dtype. Two calls
    that overlap would restore each other's replacements, and from then on every model with tied embeddings would be
    incomplete. A call that has begun already is waited for, a minute at most.
    """
    from transformers import PreTrainedModel

    with MODEL_INIT_LOCK:
        if hasattr(PreTrainedModel.from_pretrained, _MARK):
            return
        end_s = time.monotonic() + _LONGEST_WAIT_S
        while PreTrainedModel.tie_weights.__name__ != "tie_weights" and time.monotonic() < end_s:
            time.sleep(0.01)
        for name in _MAKERS:
            setattr(PreTrainedModel, name, classmethod(_locked(getattr(PreTrainedModel, name).__func__)))


def _locked(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def locked(*arguments: Any, **options: Any) -> Any:
        with MODEL_INIT_LOCK:
            return make(*arguments, **options)

    setattr(locked, _MARK, True)
    return locked


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, tables and advice to publishers; specdec reports what matters itself."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if is_louder := verbosity < ERROR:  # to set a level takes a millisecond, and most calls are within another
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_louder:
            logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
