"""The flags of Ray's workers, which `batch` and `summarize` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.shared import CLUSTER, option
from runtime.errors import SpecDecError, UsageError


@dataclass(frozen=True)
class ClusterOptions:
    """Ray's workers."""

    ray: Annotated[
        str | None,
        option(CLUSTER, "Use Ray workers: `local` starts Ray here; or an address, or `auto`.", metavar="ADDRESS"),
    ] = None
    num_workers: Annotated[
        int | None, option(CLUSTER, "Workers, each with an engine of its own.", shown="2", min=1)
    ] = None
    cpus_per_worker: Annotated[
        int | None, option(CLUSTER, "Cores of a worker.", shown="an equal share of what there is", min=1)
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        option(
            CLUSTER,
            "Checkpoint of the engine's model, from which machines that cannot open the engine build their own.",
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
