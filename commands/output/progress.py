"""Progress on stderr: bars that move on a terminal. Elsewhere a plain line says every ten seconds how much is done, and
a phase that takes longer is named once before it ends.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

INTERVAL_S = 10.0
_REFRESHES_PER_S = 4  # drawing takes time from the measured work


class Advance(Protocol):
    """Function to call with the number of further items done, and, if some items take long, with a remark on all of
    them.
    """

    def __call__(self, count: int = 1, said: str = "") -> None: ...


@contextmanager
def counting(console: Console, description: str, total: int, num_done: int = 0) -> Iterator[Advance]:
    """Progress of items done one after the other, `num_done` of them before. If remarks come, it also shows the time
    that the rest takes at this pace.
    """
    done, remark, start = num_done, "", time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}{task.fields[said]}"),
        TimeElapsedColumn(),
    )

    def rest() -> str:
        if not remark:
            return ""
        each_s = (time.perf_counter() - start) / max(done - num_done, 1)
        return f"{remark}, {timedelta(seconds=round(each_s * (total - done)))} left"

    def line() -> str:
        return f"{_seconds_since(start)}  {description}: {', '.join(filter(None, (f'{done:,}/{total:,}', rest())))}"

    with _bar(console, line, columns) as bar:
        task = bar.add_task(description, total=total, completed=num_done, said="")

        def advance(count: int = 1, said: str = "") -> None:
            nonlocal done, remark
            done, remark = done + count, said
            bar.update(task, advance=count, said=f"  {rest()}" if remark else "")

        yield advance


@contextmanager
def bytes_done(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress in bytes: the function takes the bytes done and the bytes in all."""
    done, total, start = 0, 0, time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )

    def line() -> str:
        return f"{_seconds_since(start)}  {description}: {done / 1e6:,.1f}/{total / 1e6:,.1f} MB"

    with _bar(console, line, columns) as bar:
        task = bar.add_task(description, total=None)

        def update(now_done: int, now_total: int) -> None:
            nonlocal done, total
            done, total = now_done, now_total
            bar.update(task, completed=done, total=total)

        yield update


@contextmanager
def phases(console: Console) -> Iterator[Callable[[str], None]]:
    """Progress through phases of unknown length, each shown with its time."""
    current, named, start = "", "", time.perf_counter()
    columns = (
        SpinnerColumn("line", finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )

    def line() -> str | None:
        nonlocal named
        is_new, named = current != named, current
        return f"{_seconds_since(start)}  {current} …" if is_new else None

    with _bar(console, line, columns) as bar:

        def end() -> None:
            for task in bar.tasks:
                bar.update(task.id, total=1, completed=1)
            if current and not _is_drawn(console):
                console.print(f"{_seconds_since(start)}  {current}")

        def begin(name: str) -> None:
            nonlocal current, start
            end()
            current, start = name, time.perf_counter()
            bar.add_task(name, total=None)

        yield begin
        end()


@contextmanager
def _bar(console: Console, line: Callable[[], str | None], columns: tuple[ProgressColumn, ...]) -> Iterator[Progress]:
    """A bar that is drawn on a terminal and removed at the end. Elsewhere `line` is called every ten seconds, and its
    text is printed if it gives any.
    """

    def say() -> None:
        if (text := line()) is not None:
            console.print(text, soft_wrap=True)

    is_drawn = _is_drawn(console)
    bar = Progress(*columns, console=console, transient=True, disable=not is_drawn, refresh_per_second=_REFRESHES_PER_S)
    with bar:
        if is_drawn:
            yield bar
        else:
            with _every_interval(say):
                yield bar


def _is_drawn(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def _every_interval(say: Callable[[], None]) -> Iterator[None]:
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(INTERVAL_S):
            say()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _seconds_since(start: float) -> str:
    return f"{time.perf_counter() - start:6.1f} s"
