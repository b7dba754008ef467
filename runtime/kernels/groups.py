"""The ranks that compute a step together: over memory that they share, or by torch.distributed.

Kernels share memory (`runtime/kernels/csrc/collectives.cpp`). Where a step runs without them its ranks send each other
their parts, by gloo between processors and by nccl between GPUs. A group is a thread's: `use` says which one computes.

What to compute rank 0 tells the others by messages, of which nothing is answered: lists of whole numbers on a pipe,
each after its length.
"""

import itertools
import os
import threading
from collections.abc import Sequence as Seq
from contextlib import suppress
from datetime import timedelta
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which does not say that it exports it

from runtime.checkpoint.bundle import uses_kernels
from runtime.checkpoint.config import Compiler
from runtime.util.processes import shared_memory

Way = Literal["shared", "gloo", "nccl"]
STEP, POOL, COPY_BLOCK, COPY_SLOT = range(4)
"""A batch to compute; a new K/V pool, with numbers of blocks, tokens per block and slots for states, and 1 if rank 0
has the same memory; a block, or a slot, to copy to another."""
_HERE = "127.0.0.1"
_WAITS = timedelta(days=1)  # an ended rank is noticed at once, and a computing one is waited for
_keys = itertools.count(1)
_here = threading.local()


def way_of(compiler: Compiler, device_type: str) -> Way:
    """Exchange of data between ranks: by NCCL on GPUs, by shared memory where a step uses kernels, else by Gloo."""
    if device_type == "cuda":
        return "nccl"
    return "shared" if uses_kernels(compiler, device_type) else "gloo"


class Rendezvous:
    """Meeting place of the ranks of one machine: a file that they inherit, or a port. `number` is its name for all of
    them.
    """

    def __init__(self, way: Way, tp_size: int) -> None:
        self.way = way
        self.store: TCPStore | None = None
        if way == "shared":
            self.number = shared_memory(torch.ops.specdec.shared_bytes(tp_size))
        else:
            self.store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=_WAITS)
            self.number = self.store.port

    @property
    def files(self) -> tuple[int, ...]:
        """Files that a process must inherit."""
        return (self.number,) if self.way == "shared" else ()

    def close(self) -> None:
        """Close the files, after all ranks have joined."""
        for file in self.files:
            os.close(file)


class RankGroup(Protocol):
    """One rank's end of a group."""

    def use(self) -> None:
        """Have this thread compute with it; once the others have joined, if that takes them all."""

    def stop(self) -> None:
        """After another rank's process has ended, abort waits for it: RuntimeError there."""

    def leave(self) -> None: ...


def join(rendezvous: Rendezvous, rank: int, tp_size: int) -> RankGroup:
    """Rank 0's end."""
    return _join(rendezvous.way, rendezvous.number, rank, tp_size, rendezvous.store)


def join_by_number(way: Way, number: int, rank: int, tp_size: int) -> RankGroup:
    """Join as a rank in another process than the one that made the meeting."""
    return _join(way, number, rank, tp_size, None)


def _join(way: Way, number: int, rank: int, tp_size: int, store: TCPStore | None) -> RankGroup:
    return _Memory(number, rank, tp_size) if way == "shared" else _Distributed(way, number, rank, tp_size, store)


class _Memory:
    """The kernels' groups, each by a number of this process."""

    def __init__(self, file: int, rank: int, tp_size: int) -> None:
        self._key = next(_keys)
        torch.ops.specdec.join_group(self._key, file, rank, tp_size)

    def use(self) -> None:
        torch.ops.specdec.use_group(self._key)

    def stop(self) -> None:
        torch.ops.specdec.stop_group(self._key)

    def leave(self) -> None:
        torch.ops.specdec.leave_group(self._key)


class _Distributed:
    """A group of torch's. It is joined in a thread of its own, so that waiting ends if another rank has."""

    def __init__(self, way: Way, port: int, rank: int, tp_size: int, store: TCPStore | None) -> None:
        self.rank, self.size, self._way = rank, tp_size, way
        self._group: Any = None
        self._error: Exception | None = None
        self._joining = threading.Thread(target=self._join, args=(way, port, store), name="join", daemon=True)
        self._joining.start()

    def _join(self, way: Way, port: int, store: TCPStore | None) -> None:
        try:
            store = store or TCPStore(_HERE, port, is_master=False, timeout=_WAITS)
            self._group = _backend(way, store, self.rank, self.size)
        except Exception as error:  # raised by who uses the group
            self._error = error

    def use(self) -> None:
        self._joining.join()
        if self._error is not None:
            raise self._error
        _here.group = self

    def stop(self) -> None:
        if self._way == "nccl" and self._group is not None:
            self._group.abort()  # gloo's connections end with the process

    def leave(self) -> None:
        if getattr(_here, "group", None) is self:
            _here.group = None
        if self._group is not None:
            with suppress(RuntimeError):  # of what was aborted
                self._group.shutdown()
            self._group = None

    def gather(self, x: Tensor) -> Tensor:
        """(ranks, *x): every rank's x. As bytes, which each backend takes of every dtype."""
        parts = x.new_empty(self.size, *x.shape)
        if not x.numel():
            return parts
        rows = list(parts.view(self.size, -1).view(torch.uint8))
        self._group.allgather([rows], [x.contiguous().view(-1).view(torch.uint8)]).wait()
        return parts


def _backend(way: Way, store: TCPStore, rank: int, tp_size: int) -> Any:
    """torch's backend outside the default group: a process joins one group for each of its engines."""
    if way == "nccl":
        backend: Any = dist.ProcessGroupNCCL
        options = backend.Options()
    else:
        backend = dist.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=_HERE)]  # otherwise what the machine's name leads to
    options._timeout = _WAITS
    return backend(store, rank, tp_size, options)


def distributed_group() -> _Distributed:
    """Process group of this thread."""
    group: _Distributed | None = getattr(_here, "group", None)
    if group is None:
        raise RuntimeError("no ranks compute together in this thread")
    return group


def send(pipe: int, *parts: Seq[int] | Tensor) -> None:
    """Raises OSError if the reader has closed."""
    flat = [np.asarray(part, dtype=np.int64).ravel() for part in parts]
    numbers = np.concatenate([np.array([sum(map(len, flat))], dtype=np.int64), *flat])
    left = memoryview(numbers.tobytes())
    while left:
        left = left[os.write(pipe, left) :]


def receive(pipe: BinaryIO) -> Tensor | None:
    """The next message, int64; None when there will be no more."""
    length = pipe.read(8)
    if len(length) < 8:
        return None
    num_bytes = 8 * int.from_bytes(length, "little")
    data = bytearray(pipe.read(num_bytes))
    return torch.frombuffer(data, dtype=torch.int64) if len(data) == num_bytes else None


def of_batch(tensors: Seq[Tensor]) -> list[Seq[int] | Tensor]:
    """A batch's tensors as a message, slots of states last if it has any: B, Q, N and T before them."""
    (B, Q), N, T = tensors[0].shape, tensors[3].shape[1], tensors[4].shape[0]
    return [(STEP, B, Q, N, T), *(tensor.cpu() for tensor in tensors)]


def to_batch(message: Tensor, device: torch.device) -> list[Tensor]:
    B, Q, N, T = message[1:5].tolist()
    sizes = [B * Q, B * Q, B * Q, B * N, T]
    flat = message[5:].to(device).split_with_sizes([*sizes, B] if len(message) > 5 + sum(sizes) else sizes)
    return [*(part.view(B, Q) for part in flat[:3]), flat[3].view(B, N), *flat[4:]]
