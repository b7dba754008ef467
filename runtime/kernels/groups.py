"""The ranks that compute a step together: over memory that they share, or by torch.distributed.

Kernels share memory (`runtime/kernels/csrc/collectives.cpp`). If a step runs without kernels, its ranks send each other
their parts, by gloo between processors and by nccl between GPUs. A group belongs to a thread: `use` sets the thread
that computes. Rank 0 tells the other ranks what to compute by messages on a pipe, which are not answered: lists of
whole numbers, each after its length.
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
"""Kinds of messages. STEP: a batch to compute. POOL: a new K/V pool, with numbers of blocks, tokens per block and slots
for states, and 1 if rank 0 has the same memory. COPY_BLOCK, COPY_SLOT: a block or a slot to copy to another.
"""
_HERE = "127.0.0.1"
_WAITS = timedelta(days=1)  # long: a rank that ends is noticed at once, and one that computes is waited for
_keys = itertools.count(1)
_here = threading.local()


def way_of(compiler: Compiler, device_type: str) -> Way:
    """Way in which ranks exchange data: NCCL on GPUs, shared memory if a step uses kernels, otherwise Gloo."""
    if device_type == "cuda":
        return "nccl"
    return "shared" if uses_kernels(compiler, device_type) else "gloo"


class Rendezvous:
    """Meeting point of the ranks of a machine: a file that they inherit, or a port. All ranks know it by `number`."""

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
        """Have this thread compute with the group. If all ranks must join first, wait until they have."""

    def stop(self) -> None:
        """Abort waits for a rank whose process has ended: they raise RuntimeError."""

    def leave(self) -> None: ...


def join(way: Way, number: int, rank: int, tp_size: int, store: TCPStore | None = None) -> RankGroup:
    """Join the group at the meeting point with this number; the process that made the meeting point gives its store."""
    return _Memory(number, rank, tp_size) if way == "shared" else _Distributed(way, number, rank, tp_size, store)


class _Memory:
    """A group of the kernels', known by a number in this process."""

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
    """A group of torch's. It is joined in a thread of its own, so that waiting can end if another rank has ended."""

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
        except Exception as error:  # raised by `use`
            self._error = error

    def use(self) -> None:
        self._joining.join()
        if self._error is not None:
            raise self._error
        _here.group = self

    def stop(self) -> None:
        if self._way == "nccl" and self._group is not None:
            self._group.abort()  # not for gloo, whose connections end with the ended process

    def leave(self) -> None:
        if getattr(_here, "group", None) is self:
            _here.group = None
        if self._group is not None:
            with suppress(RuntimeError):  # raised by aborted operations
                self._group.shutdown()
            self._group = None

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, [ranks, *x]. It is sent as bytes, which each backend accepts for every dtype."""
        parts = x.new_empty(self.size, *x.shape)
        if not x.numel():
            return parts
        rows = list(parts.view(self.size, -1).view(torch.uint8))
        self._group.allgather([rows], [x.contiguous().view(-1).view(torch.uint8)]).wait()
        return parts


def _backend(way: Way, store: TCPStore, rank: int, tp_size: int) -> Any:
    """torch's backend, made outside the default group, since a process joins a group for each of its engines."""
    if way == "nccl":
        backend: Any = dist.ProcessGroupNCCL
        options = backend.Options()
    else:
        backend = dist.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname=_HERE)]  # not the address of the machine's name
    options._timeout = _WAITS
    return backend(store, rank, tp_size, options)


def distributed_group() -> _Distributed:
    """The process group that this thread uses."""
    group: _Distributed | None = getattr(_here, "group", None)
    if group is None:
        raise RuntimeError("no ranks compute together in this thread")
    return group


def send(pipe: int, *parts: Seq[int] | Tensor) -> None:
    """Send a message; OSError if the reader has closed the pipe."""
    flat = [np.asarray(part, dtype=np.int64).ravel() for part in parts]
    numbers = np.concatenate([np.array([sum(map(len, flat))], dtype=np.int64), *flat])
    left = memoryview(numbers.tobytes())
    while left:
        left = left[os.write(pipe, left) :]


def receive(pipe: BinaryIO) -> Tensor | None:
    """The next message, int64; None if the writer has closed the pipe."""
    length = pipe.read(8)
    if len(length) < 8:
        return None
    num_bytes = 8 * int.from_bytes(length, "little")
    data = bytearray(pipe.read(num_bytes))
    return torch.frombuffer(data, dtype=torch.int64) if len(data) == num_bytes else None


def of_batch(tensors: Seq[Tensor]) -> list[Seq[int] | Tensor]:
    """A batch's tensors as a message: B, Q, N and T first, and slots of states last if there are any."""
    (B, Q), N, T = tensors[0].shape, tensors[3].shape[1], tensors[4].shape[0]
    return [(STEP, B, Q, N, T), *(tensor.cpu() for tensor in tensors)]


def to_batch(message: Tensor, device: torch.device) -> list[Tensor]:
    B, Q, N, T = message[1:5].tolist()
    sizes = [B * Q, B * Q, B * Q, B * N, T]
    flat = message[5:].to(device).split_with_sizes([*sizes, B] if len(message) > 5 + sum(sizes) else sizes)
    return [*(part.view(B, Q) for part in flat[:3]), flat[3].view(B, N), *flat[4:]]
