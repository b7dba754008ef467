"""The flags of Ray's workers, which `batch` and `summarize` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from commands.options.shared import CLUSTER
from runtime.errors import SpecDecError, UsageError


@dataclass(frozen=True)
class ClusterOptions:
    """Ray's workers."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Use Ray workers: `local` starts Ray here; or an address, or `auto`.",
            rich_help_panel=CLUSTER,
            show_default=False,
        ),
    ] = None
    num_workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers, each with an engine of its own.", rich_help_panel=CLUSTER, show_default="2"),
    ] = None
    cpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores of a worker.", rich_help_panel=CLUSTER, show_default="an equal share of what there is"
        ),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of the engine's model, from which machines that cannot open the engine build their own.",
            rich_help_panel=CLUSTER,
            show_default=False,
        ),
    ] = None

    def check(self) -> None:
        """UsageError for what needs Ray, without it; SpecDecError if it is not installed."""
        if self.ray is None:
            flags = {
                "--num-workers": self.num_workers,
                "--cpus-per-worker": self.cpus_per_worker,
                "--checkpoint-dir": self.checkpoint_dir,
            }
            for flag, value in flags.items():
                if value is not None:
                    raise UsageError(f"`{flag}` is for Ray's workers: {value}", hint="`--ray local` starts Ray here")
            return
        try:
            import ray  # noqa: F401
        except ImportError:
            raise SpecDecError(
                "`--ray` needs a package that is not installed: ray", hint="pip install 'specdec-cli[ray]'"
            ) from None
