"""The flags of the K/V cache."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from commands.options.shared import KV_CACHE
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.engine import KVCacheConfig


@dataclass(frozen=True)
class KVCacheOptions:
    """How large the K/V cache is, and whether what it holds is found again.

    Leader mode has a flag of its own not to find it: `disable_reuse`.
    """

    kv_cache_enable_block_reuse: Annotated[
        bool,
        typer.Option(
            "--kv-cache-enable-block-reuse",
            help="Find K/V computed before. Orchestrator mode needs it.",
            rich_help_panel=KV_CACHE,
            show_default="on",
        ),
    ] = False
    no_kv_cache_enable_block_reuse: Annotated[bool, typer.Option("--no-kv-cache-enable-block-reuse", hidden=True)] = (
        False
    )
    kv_cache_free_gpu_memory_fraction: Annotated[
        float,
        typer.Option(help="Share of free GPU memory for the K/V cache.", min=0.0, max=1.0, rich_help_panel=KV_CACHE),
    ] = 0.9
    max_tokens_in_paged_kv_cache: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the K/V cache in tokens.",
            rich_help_panel=KV_CACHE,
            show_default="CPU: max_batch_size x max_seq_len",
        ),
    ] = None

    def config(self) -> "KVCacheConfig":
        from runtime.engine import KVCacheConfig

        return KVCacheConfig(
            not self.no_kv_cache_enable_block_reuse,
            self.max_tokens_in_paged_kv_cache,
            self.kv_cache_free_gpu_memory_fraction,
        )

    def fitting(self, *, is_leader: bool, disable_reuse: bool = False) -> "KVCacheOptions":
        """With what leader mode's flag says too.

        UsageError for no block reuse in orchestrator mode, and in leader mode for a yes and a no.
        """
        if not is_leader and self.no_kv_cache_enable_block_reuse:
            raise UsageError(
                "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`", hint="leave the flag out"
            )
        if not is_leader and disable_reuse:
            raise UsageError(
                "orchestrator mode needs block reuse: `--disable-kv-cache-reuse`",
                hint="leave the flag out, or `--mode leader`",
            )
        if self.kv_cache_enable_block_reuse and (self.no_kv_cache_enable_block_reuse or disable_reuse):
            flag = "no-kv-cache-enable-block-reuse" if self.no_kv_cache_enable_block_reuse else "disable-kv-cache-reuse"
            raise UsageError(
                f"`--kv-cache-enable-block-reuse` and `--{flag}` cannot be given together", hint="choose one"
            )
        return replace(self, no_kv_cache_enable_block_reuse=self.no_kv_cache_enable_block_reuse or disable_reuse)
