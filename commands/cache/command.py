"""`specdec list`, `pull`, `rm`, `cache list` and `cache prune`: models, the engines made from them, and the disk space
they take.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from commands.options.expand import expand_groups
from commands.output.help import RUNTIME, option
from commands.output.output import Output
from runtime.util.cache import SIZES, size_in_bytes
from runtime.util.errors import UsageError


@dataclass(frozen=True)
class StoreOptions:
    """Flags for the keys and values on disk."""

    kv_cache_dir: Annotated[
        Path | None,
        option(RUNTIME, "Directory of keys and values.", shown="what `chat --continue` keeps", metavar="DIR"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """The flag of `cache prune` that says how many bytes may stay."""

    max_size: Annotated[
        str,
        option(
            RUNTIME,
            "Total size of engines, or of keys and values: bytes, or 500M, 20G (decimal), 20GiB (binary).",
            metavar="SIZE",
        ),
    ]
    kv_cache_dir: Annotated[
        Path | None,
        option(
            RUNTIME,
            "Remove keys and values from this directory instead, those used longest ago first.",
            shown="engines are removed",
            metavar="DIR",
        ),
    ] = None
    dry_run: Annotated[bool, option(RUNTIME, "List what would be removed, and remove nothing.", "--dry-run")] = False


@expand_groups
def list_engines(store: StoreOptions, output: Output) -> None:
    """Show the engines in the cache: size, time of last use, and whether a process is using the engine. Also show the
    keys and values that are kept on disk.
    """
    from commands.cache.document import cache_list_document, show_cache, show_store
    from commands.cache.store import kept_in
    from runtime.checkpoint.cached_engines import cached_engines, other_bytes
    from runtime.util.cache import KV_CACHE, cache_dir
    from runtime.util.files import unique_bytes

    usual = cache_dir() / KV_CACHE
    kept = kept_in(store.kv_cache_dir or usual, is_named=store.kv_cache_dir is not None)
    engines, others = cached_engines(), other_bytes() - unique_bytes([usual])
    show_cache(engines, others, output)
    if kept is not None:
        show_store(kept, output)
    output.document(cache_list_document(engines, others, kept))


@expand_groups
def list_models(output: Output) -> None:
    """Show the models that have engines, and the models that were downloaded from the hub: format, size, last use.

    When all engines together take more than SPECDEC_CACHE_SIZE (50G), the least recently used are removed.
    """
    from commands.cache.models import list_document, models_of, show_models
    from runtime.checkpoint.cached_engines import cached_engines
    from runtime.checkpoint.hub import local_models

    models, downloaded = models_of(cached_engines()), local_models()
    show_models(models, downloaded, output)
    output.document(list_document(models, downloaded))


_NAMED = typer.Argument(metavar="MODEL", help="Hub id, such as `OWNER/NAME` or `OWNER/NAME:Q4_K_M`.")


@expand_groups
def pull(model: Annotated[str, _NAMED], output: Output) -> None:
    """Download a model from the hub, or resume a download that broke off.

    `OWNER/NAME:Q4_K_M` is the GGUF file of this format, with all its parts. `run` and the other commands download a
    model when they need it; `pull` does so beforehand.
    """
    from commands.cache.hub import show_pulled
    from runtime.checkpoint.resolve import files_of_model, resolve_model

    path = resolve_model(model)
    show_pulled(model, path, files_of_model(path), output)


@expand_groups
def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model as `specdec list` names it.")], output: Output
) -> None:
    """Remove a model: its downloaded files, and the engines that were made from it.

    Engines in use stay. Files that specdec did not download stay too.
    """
    from commands.cache.hub import remove_model

    remove_model(model, output)


@expand_groups
def prune(options: PruneOptions, output: Output) -> None:
    """Remove engines from the cache, the least recently used first. Engines in use stay.

    A removed engine is built again when a command needs it.
    """
    max_bytes = parse_size(options.max_size)
    if options.kv_cache_dir is not None:
        return _prune_store(options, options.kv_cache_dir, max_bytes, output)

    from commands.cache.document import cache_prune_document, show_pruned
    from runtime.checkpoint.cached_engines import cached_engines, engines_bytes, engines_to_prune
    from runtime.checkpoint.cached_engines import prune as prune_engines

    engines = cached_engines()
    whole = engines_bytes(engines)
    chosen = engines_to_prune(engines, max_bytes)
    removed = chosen if options.dry_run else prune_engines(chosen)
    left = engines_bytes(one for one in engines if one not in removed)
    show_pruned(removed, whole - left, left, options.dry_run, output)
    if left > max_bytes:
        num_used = sum(engine not in removed for engine in engines)
        output.warning(f"{num_used} left, because in use; together they take more than `--max-size`: {left:,} bytes")
    output.document(cache_prune_document(removed, left, options.dry_run))


def _prune_store(options: PruneOptions, directory: Path, max_bytes: int, output: Output) -> None:
    from commands.cache.document import cache_prune_document, show_pruned_store
    from commands.cache.store import prune_store

    freed, left = prune_store(directory, max_bytes, is_dry_run=options.dry_run)
    show_pruned_store(freed, left, options.dry_run, output)
    output.document(cache_prune_document([], left, options.dry_run))


def parse_size(text: str) -> int:
    """Number of bytes that a text such as `20G` stands for; UsageError if it is no size."""
    size = size_in_bytes(text)
    if size is None:
        raise UsageError(f"`--max-size` is no size: {text}", hint=f"write {SIZES}")
    return size
