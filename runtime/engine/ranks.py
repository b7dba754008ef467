"""Rank 0 of an engine that is split: its step, which the other ranks' processes compute with it.

The other ranks get each batch's tensors, and change their K/V as rank 0 does. Rank 0 alone drafts and samples.
"""

import dataclasses
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.checkpoint.bundle import LIBRARY
from runtime.checkpoint.config import CheckpointConfig, EngineConfig, Mapping, StepShape, as_json
from runtime.compiler.package import StepFunction, logits_of
from runtime.core.kv_cache import PoolCopy
from runtime.engine.devices import cores_of, pin, usable_cores
from runtime.engine.load import StepKind, open_step
from runtime.engine.rank_processes import RankProcesses
from runtime.kernels.groups import COPY_BLOCK, COPY_SLOT, POOL, RankGroup, Rendezvous, join, of_batch, send, way_of
from runtime.kernels.memory import zeros, zeros_in
from runtime.kernels.ops import load_kernels
from runtime.util.errors import SpecDecError
from runtime.util.processes import shared_memory

Made = TypeVar("Made")
_SETTLES_S = 20e-6
_lock = threading.Lock()
_here = threading.local()
_open: set["Place"] = set()


class Place:
    """CPU cores of an engine's rank 0: a thread that calls the engine's step is kept on the cores of its first device.

    One process is rank 0 of all its engines, so a thread moves from one engine's device to another's. The thread that
    closes the last engine has all cores again.
    """

    def __init__(self, cores: Seq[int]) -> None:
        self._cores = cores
        with _lock:
            self._threads: int = next(iter(_open))._threads if _open else torch.get_num_threads()
            _open.add(self)

    def take(self) -> None:
        """Keep this thread, and threads that it starts, on the cores."""
        if getattr(_here, "place", None) is not self:
            pin(self._cores)
            torch.set_num_threads(min(self._threads, len(self._cores)))
            _here.place = self

    def leave(self) -> None:
        """End the placement. It may be called again, but `take` must not be called after it."""
        with _lock:
            is_last = _open == {self}
            _open.discard(self)
        if is_last:
            pin(usable_cores())
            torch.set_num_threads(self._threads)
            _here.place = None


@dataclasses.dataclass(frozen=True)
class RankedModel:
    """The model as a rank opens it."""

    directory: Path
    kind: StepKind
    shape: StepShape
    """Shape of a rank's step."""
    tp_size: int

    @classmethod
    def of(cls, directory: Path, config: CheckpointConfig | EngineConfig, shape: StepShape) -> "RankedModel":
        build, said = shape.build_config, (config.pretrained_config, config.dtype, config.quantization)
        return cls(directory, StepKind(build.compiler, *said, build.hidden_states), shape, config.mapping.tp_size)


def open_ranks(model: RankedModel, device: torch.device, device_ids: Seq[int]) -> StepFunction:
    """The step of an engine's directory: this process's own, or, with several ranks, a `RankedStep`."""
    if model.tp_size == 1:
        return open_step(model.kind, model.directory, device)
    return RankedStep(model, device, device_ids)


class RankedStep:
    """The step of all ranks. It may be called from any thread, one call at a time; `close` ends the other ranks."""

    def __init__(self, model: RankedModel, device: torch.device, device_ids: Seq[int]) -> None:
        cores = cores_of(device_ids) if device.type == "cpu" else [[] for _ in device_ids]
        way = way_of(model.kind.compiler, device.type)
        if way == "shared":
            load_kernels(model.directory / LIBRARY)
        self._pool: weakref.ref[Tensor] | None = None
        self._num_sent, self._num_done = 0, list[Tensor]()
        self._files = [shared_memory(0) for _ in device_ids[1:]] if device.type == "cpu" else []
        rendezvous = Rendezvous(way, model.tp_size)
        try:
            self._group = join(rendezvous.way, rendezvous.number, 0, model.tp_size, rendezvous.store)
            # All ranks of a CPU have the same torch device, and differ by their cores.
            devices = ["cpu" if device.type == "cpu" else f"cuda:{device_id}" for device_id in device_ids]
            jobs = _jobs(model, rendezvous, cores, devices, self._files)
            try:
                self._processes = RankProcesses(jobs, (*rendezvous.files, *self._files), self._group.stop)
            except BaseException:
                self._group.leave()
                _close_all(self._files)
                raise
            self._place = Place(cores[0]) if cores[0] else None
            self._close = weakref.finalize(self, _close, self._processes, self._group, self._place, self._files)
            try:
                self._take_place()
                self.own = open_step(model.kind, model.directory, device, Mapping(model.tp_size, model.tp_size))
                self._processes.wait_until_ready()
            except BaseException:
                self.close()
                raise
        finally:
            rendezvous.close()

    def __call__(self, *inputs: Any) -> Tensor:
        """Run a step like `Step.forward`. SpecDecError if a rank has ended; then all ranks have ended."""
        batch, (keys, _, *states) = inputs[:5], inputs[5:]
        self._take_place()
        try:
            with _uninterrupted():
                self._follow(keys, len(states[1][0]) if states else 0)
                self._send(*of_batch([*batch, *states[:1]]))
                self._group.use()
                return self._settled(logits_of(self.own(*inputs)))
        except KeyboardInterrupt:  # the step is over
            raise
        except BaseException as error:
            if isinstance(error, OSError | RuntimeError):
                self._processes.raise_failure()
            self.close()  # the others wait in the middle of a step
            raise

    def copy_block(self, copy: PoolCopy) -> None:
        """Copy a block in the other ranks' pools like `KVPool.copy_block`."""
        self._copy(COPY_BLOCK, copy)

    def copy_slot(self, copy: PoolCopy) -> None:
        """Copy a slot in the other ranks' pools like `PoolCopy.make`."""
        self._copy(COPY_SLOT, copy)

    def share(self, keys: list[Tensor], num_slots: int, make: Callable[[], Made]) -> list[Made]:
        """Call `make`, which makes K/V and states by `zeros`, for each other rank, in memory that the rank uses too.

        Call `settle` before this memory is read or written. On a GPU, whose memory is not shared, `make` is not called.
        """
        made = list[Made]()
        for file in self._files:
            with zeros_in(file):
                self._num_done.append(zeros((1,), torch.int64, torch.device("cpu")))
                made.append(make())
        self._follow(keys, num_slots)
        return made

    def settle(self) -> bool:
        """Wait until the other ranks have done everything that they were sent; False if a rank has ended."""
        while any(int(num_done) < self._num_sent for num_done in self._num_done):
            if self.failure is not None:
                return False
            time.sleep(_SETTLES_S)
        return True

    def _copy(self, kind: int, copy: PoolCopy) -> None:
        if self._pool is not None:  # otherwise the other ranks have no K/V yet
            try:
                self._send((kind, copy.source, copy.destination))
            except OSError:
                self._processes.raise_failure()
                raise

    @property
    def failure(self) -> SpecDecError | None:
        """The error of steps from now on, such as a rank that has ended; None while steps can be computed."""
        if self._processes.failure is not None or self._close.alive:
            return self._processes.failure
        return SpecDecError("the engine's other ranks have ended", hint="open the engine again")

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._processes.pids

    def close(self) -> None:
        """End the other ranks. It may be called again."""
        self._close()

    def _take_place(self) -> None:
        if self._place is not None:
            self._place.take()

    def _settled(self, logits: Tensor) -> Tensor:
        """The logits, once the GPU has computed them. Raises the failure if another rank has ended meanwhile."""
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
            if self._processes.failure is not None:
                raise self._processes.failure
        return logits

    def _send(self, *parts: Seq[int] | Tensor) -> None:
        if (failure := self.failure) is not None:
            raise failure
        for pipe in self._processes.pipes():
            send(pipe, *parts)
        self._num_sent += 1

    def _follow(self, keys: list[Tensor], num_slots: int) -> None:
        """Have the other ranks make a K/V pool like this one, and slots for states, once for each pool."""
        if self._pool is None or self._pool() is not keys[0]:
            self._send((POOL, keys[0].shape[0], keys[0].shape[3], num_slots, bool(self._num_done)))
            self._pool = weakref.ref(keys[0])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of a step: in the middle of it other ranks would wait for this one."""
    answer = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(answer):
        yield  # no interrupts here
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
    if came:
        answer(*came[0])


def _jobs(
    model: RankedModel, rendezvous: Rendezvous, cores: Seq[Seq[int]], devices: Seq[str], files: list[int]
) -> list[dict[str, Any]]:
    """Jobs of the other ranks for `runtime.engine.rank_worker`. `files` has each rank's memory; none on GPUs."""
    said = as_json(model) | {
        "directory": str(model.directory.resolve()),
        "way": rendezvous.way,
        "meeting": rendezvous.number,
    }
    memory: Seq[int | None] = files or [None] * (model.tp_size - 1)
    return [
        said | {"rank": rank, "cores": cores[rank], "device": devices[rank], "memory": memory[rank - 1]}
        for rank in range(1, model.tp_size)
    ]


def _close(processes: RankProcesses, group: RankGroup, place: Place | None, files: list[int]) -> None:
    group.stop()
    processes.close()
    group.leave()
    _close_all(files)
    if place is not None:
        place.leave()


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
