"""Launch under `torchrun`: the same command in several processes, of which the first is the command.

An engine that is split starts its other ranks itself, and pins each to its device, so the others have nothing to do.
"""

import os

from runtime.errors import SpecDecError


def is_spare() -> bool:
    """True if this process is one of torchrun's beyond the first. SpecDecError if they span several machines."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    num_processes, num_here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if num_processes > num_here:
        raise SpecDecError(
            f"the ranks of an engine are on one machine, and torchrun has {num_processes // num_here}",
            hint="`torchrun --nnodes 1`; `specdec batch --ray` has many machines answer",
        )
    if num_processes > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # torchrun's, for processes that all compute
    return os.environ["RANK"] != "0"
