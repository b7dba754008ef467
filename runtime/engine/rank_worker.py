"""The process of a rank other than 0, which computes the batches that rank 0 sends.

It ends with rank 0's process, however that ends: a pipe that only rank 0 can write to is closed then.
"""

import json
import os
import sys
import threading
from typing import Any

from runtime.util.collector import collect_rarely


def main() -> None:
    """Open the engine that the first line of standard input names, then compute the batches that follow."""
    collect_rarely()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with, args=(job["life"],), daemon=True).start()
    if job["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job["cores"])  # before torch, which counts them
    with os.fdopen(job["status"], "w") as status:
        try:
            _compute(job, status)
        except Exception as error:
            print(json.dumps(_words(error)), file=status, flush=True)
            sys.exit(1)


def _words(error: Exception) -> dict[str, Any]:
    from runtime.util.errors import SpecDecError

    if isinstance(error, SpecDecError):
        return {"message": error.message, "hint": error.hint}
    return {"message": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


def _end_with(life: int) -> None:
    os.read(life, 1)
    os._exit(0)


def _compute(job: dict[str, Any], status: Any) -> None:
    from contextlib import nullcontext
    from pathlib import Path

    import torch

    from runtime.checkpoint.config import Mapping, StepShape, parse
    from runtime.core.kv_cache import KVPool, PoolCopy, kv_dtype
    from runtime.core.states import num_rolled_back, state_pools
    from runtime.engine.load import StepKind, open_step
    from runtime.kernels.groups import COPY_BLOCK, COPY_SLOT, POOL, join, receive, to_batch
    from runtime.kernels.memory import zeros, zeros_in
    from runtime.kernels.ops import flush_denormals

    device = torch.device(job["device"])
    if job["cores"]:
        torch.set_num_threads(min(torch.get_num_threads(), len(job["cores"])))
    mapping = Mapping(job["tp_size"], job["tp_size"], job["rank"])
    kind, shape = parse(StepKind, job["kind"], "kind"), parse(StepShape, job["shape"], "shape")
    step = open_step(kind, Path(job["directory"]), device, mapping)
    join(job["way"], job["meeting"], mapping.rank, mapping.tp_size).use()
    num_back, dtype = num_rolled_back(shape.build_config.max_draft_len), getattr(torch, shape.dtype)
    kept_as = kv_dtype(shape.dtype, shape.kv_cache)
    flush_denormals()
    print("{}", file=status, flush=True)
    pool: KVPool | None = None
    slots: list[torch.Tensor] = []
    num_done = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        while (message := receive(sys.stdin.buffer)) is not None:
            asked = int(message[0])
            if asked == POOL:
                pool, slots = None, []  # before there are others
                with zeros_in(job["memory"]) if message[4] else nullcontext():
                    num_done = zeros((1,), torch.int64, torch.device("cpu"))
                    pool = KVPool(shape.layers, int(message[1]), int(message[2]), kept_as, device)
                    slots = state_pools(shape.states, int(message[3]), num_back, dtype, device)
            elif asked == COPY_BLOCK:
                assert pool is not None
                pool.copy_block(PoolCopy(int(message[1]), int(message[2])))
            elif asked == COPY_SLOT:
                PoolCopy(int(message[1]), int(message[2])).make(slots)
            else:
                assert pool is not None
                *batch, last = to_batch(message, device)
                step(*batch, *((*pool.tensors, last, slots) if slots else (last, *pool.tensors)))
            num_done += 1
