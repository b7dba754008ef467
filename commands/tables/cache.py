"""What `cache list` and `cache prune` print."""

from datetime import datetime

from rich.table import Table

from commands.output import Output, megabytes
from runtime.cache import cache_dir
from runtime.cached_engines import CachedEngine


def show_cache(engines: list[CachedEngine], others: int, output: Output) -> None:
    table = Table("engine", "size", "used last", "in use", title=str(cache_dir()))
    table.columns[1].justify = "right"
    for engine in engines:
        table.add_row(engine.path.name, megabytes(engine.num_bytes), _date(engine), "yes" if engine.is_used else "")
    if engines:
        output.result(table)
    size = megabytes(sum(engine.num_bytes for engine in engines))
    output.result(f"{_number(engines)}, {size}; kernels, digests and others {megabytes(others)}: {cache_dir()}")


def show_pruned(removed: list[CachedEngine], left: int, is_dry_run: bool, output: Output) -> None:
    for engine in removed:
        output.result(f"{engine.path.name}  {megabytes(engine.num_bytes)}, used last {_date(engine)}")
    done = "would be removed" if is_dry_run else "removed"
    size = megabytes(sum(engine.num_bytes for engine in removed))
    output.result(f"{_number(removed)} {done}, {size}; {megabytes(left)} of engines left")


def _date(engine: CachedEngine) -> str:
    return f"{datetime.fromtimestamp(engine.used_s):%Y-%m-%d %H:%M}"


def _number(engines: list[CachedEngine]) -> str:
    return "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
