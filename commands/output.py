"""Where output goes: results on stdout, everything else on stderr.

With `--json` stdout gets one document and nothing more; with `--quiet` only the bare result. Progress is shown on a
terminal only.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from commands.options.panels import OUTPUT
from commands.tables.fitting import fitted
from runtime.errors import SpecDecError, UsageError


@dataclass(frozen=True)
class Output:
    """How one command talks; a group of options of all commands."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=OUTPUT)] = (
        False
    )
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.", rich_help_panel=OUTPUT)] = False

    @property
    def human(self) -> bool:
        return not (self.json or self.quiet)

    def result(self, renderable: object) -> None:
        """Something people asked for, on stdout; nothing with `--json` or `--quiet`."""
        if not self.human:
            return
        console = stdout()
        if isinstance(renderable, Table):
            console.print(fitted(renderable, console))
        else:
            console.print(renderable, soft_wrap=True)

    def text(self, text: str, end: str = "\n") -> None:
        """Generated text, on stdout, to the letter."""
        if not self.json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def document(self, data: dict[str, Any]) -> None:
        if self.json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def warning(self, message: str) -> None:
        warn(message)

    @contextmanager
    def phases(self) -> Iterator[Callable[[str], None]]:
        """A spinner that names the current phase; without a terminal a line with its time after each."""
        console = stderr()
        if not self.human:
            yield lambda name: None
            return
        if not console.is_terminal:
            current: list[tuple[str, float]] = []

            def end_phase() -> None:
                for name, start in current:
                    console.print(f"{time.perf_counter() - start:6.1f} s  {name}")
                current.clear()

            def begin_phase(name: str) -> None:
                end_phase()
                current.append((name, time.perf_counter()))

            yield begin_phase
            end_phase()
            return
        with console.status("starting") as status:
            yield lambda name: status.update(name)

    @contextmanager
    def byte_progress(self, description: str) -> Iterator[Callable[[int, int], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=stderr(), transient=True, disable=not self._shows_progress()) as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=stderr(), transient=True, disable=not self._shows_progress()) as progress:
            task = progress.add_task(description, total=total)
            yield lambda: progress.advance(task)

    def _shows_progress(self) -> bool:
        return self.human and stderr().is_terminal


def stdout() -> Console:
    # A pipe has no width; wide enough for every table of ours.
    return _console(stderr=False, width=None if sys.stdout.isatty() else 120)


def stderr() -> Console:
    return _console(stderr=True, width=None)


def _console(*, stderr: bool, width: int | None) -> Console:
    # Without markup: users' paths and values hold brackets, which are to be printed and not read.
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def warn(message: str) -> None:
    _say("warning:", "yellow", message)


def fail(message: str, hint: str | None) -> None:
    _say("error:", "red", message)
    if hint:
        _say("hint:", "cyan", hint)


def _say(label: str, style: str, message: str) -> None:
    stderr().print(Text.assemble((label, style), " ", message), soft_wrap=True)


def check_output_files(outputs: list[Path], inputs: list[Path], new_dir: Path | None = None) -> None:
    """SpecDecError unless each file can be written, and neither takes the place of another nor of an input.

    What is in `new_dir`, a directory that is going to be made, cannot be tried yet.
    """
    resolved = [path.resolve() for path in outputs]
    for path, place in zip(outputs, resolved, strict=True):
        if resolved.count(place) > 1:
            raise UsageError(f"two outputs have the same file: {path}", hint="give each a name of its own")
        for taken in inputs:
            if taken.resolve() in place.parents or (taken.is_file() and taken.resolve() == place):
                raise UsageError(f"the output would replace what is read: {path}", hint="choose another path")
        if new_dir is None or place.parent != new_dir.resolve():
            check_output_file(path)


def check_output_file(path: Path) -> None:
    """SpecDecError unless a file can be written at `path`, found out before the work. Leaves no trace."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise SpecDecError(f"cannot write the file ({error.strerror}): {path}", hint="choose another path") from None
    if not existed:
        path.unlink()


def check_new_directory(path: Path) -> None:
    """SpecDecError unless `path` is a directory, or can be made, that files can be written in. Leaves no trace."""
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise SpecDecError(
            f"cannot write into the directory ({error.strerror}): {path}", hint="choose another"
        ) from None


def number(value: float | None, digits: int = 2) -> str:
    """For tables; a dash where there was nothing to measure."""
    return "-" if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def speedup_line(speedup: float) -> str:
    """The ratio of wall times, and in words where speculation does not pay."""
    verdict = "" if speedup >= 0.995 else " — slower than no drafter"
    return f"speedup over no drafter: {speedup:.2f}x{verdict}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
