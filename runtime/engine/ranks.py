"""Rank 0 of an engine that is split: its step, which the other ranks' processes compute with it.

They get the tensors of a batch, and change their K/V as rank 0 does. Drafting, sampling and accounting are rank 0's
alone.
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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.checkpoint.bundle import LIBRARY
from runtime.checkpoint.config import Compiler, Dtype, EngineConfig, LayerShape, Mapping, Quantization, StateShape
from runtime.compiler.compilation import StepFunction, logits_of
from runtime.core.kv_cache import BlockCopy
from runtime.core.states import StateCopy
from runtime.engine.devices import cores_of, pin, usable_cores
from runtime.engine.load import StepKind, open_step
from runtime.kernels.groups import COPY_BLOCK, COPY_SLOT, POOL, RankGroup, Rendezvous, join, of_batch, send, way_of
from runtime.kernels.memory import zeros, zeros_in
from runtime.kernels.ops import load_kernels
from runtime.util.errors import SpecDecError
from runtime.util.processes import Processes, shared_memory

Made = TypeVar("Made")
_SETTLES_S = 20e-6
_lock = threading.Lock()
_here = threading.local()
_open: set["Place"] = set()


class Place:
    """CPU cores of an engine's rank 0: a thread that calls its step is kept on the cores of its first device.

    One process is rank 0 of all its engines, so it moves from one engine's device to another's. When the last engine
    has closed, it has all cores again.
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
        """End the placement. It may be called again; the cores cannot be taken after it."""
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
    compiler: Compiler
    pretrained_config: dict[str, Any]
    dtype: Dtype
    quantization: Quantization | None
    layers: tuple[LayerShape, ...]
    """K/V shapes of the layers in a rank."""
    tp_size: int
    hidden_states: tuple[int, ...] = ()
    """Hidden states that the step returns; only with a single rank (`BuildConfig`)."""
    states: tuple[StateShape, ...] = ()
    max_draft_len: int = 0

    @classmethod
    def of(cls, config: EngineConfig, directory: Path) -> "RankedModel":
        build, tp_size = config.build_config, config.mapping.tp_size
        kind = config.pretrained_config, config.dtype, config.quantization
        states = config.states, build.max_draft_len
        return cls(directory, build.compiler, *kind, config.layers, tp_size, build.hidden_states, *states)


def open_ranks(model: RankedModel, device: torch.device, device_ids: Seq[int]) -> StepFunction:
    """The step of an engine's directory: this process's own, or, with several ranks, a `RankedStep`."""
    mapping = Mapping(model.tp_size, model.tp_size)
    kind = StepKind(model.compiler, model.pretrained_config, model.dtype, model.quantization, model.hidden_states)
    open_own = partial(open_step, kind, model.directory, device, mapping)
    if model.tp_size == 1:
        return open_own()
    return RankedStep(model, device, device_ids, open_own)


class RankedStep:
    """The step of all ranks. It may be called from any thread, one call at a time; `close` ends the other ranks."""

    def __init__(
        self, model: RankedModel, device: torch.device, device_ids: Seq[int], open_own: Callable[[], StepFunction]
    ) -> None:
        cores = cores_of(device_ids) if device.type == "cpu" else [[] for _ in device_ids]
        way = way_of(model.compiler, device.type)
        if way == "shared":
            load_kernels(model.directory / LIBRARY)
        self._pool: weakref.ref[Tensor] | None = None
        self._num_sent, self._num_done = 0, list[Tensor]()
        self._files = [shared_memory(0) for _ in device_ids[1:]] if device.type == "cpu" else []
        rendezvous = Rendezvous(way, model.tp_size)
        try:
            self._group = join(rendezvous.way, rendezvous.number, 0, model.tp_size, rendezvous.store)
            jobs = _jobs(model, rendezvous, cores, rank_devices(device.type, device_ids))
            files: Seq[int | None] = self._files or [None] * len(jobs)
            jobs = [job | {"memory": file} for job, file in zip(jobs, files, strict=True)]
            try:
                self._processes = Processes(jobs, (*rendezvous.files, *self._files), self._group.stop)
            except BaseException:
                self._group.leave()
                _close_all(self._files)
                raise
            self._place = Place(cores[0]) if cores[0] else None
            self._close = weakref.finalize(self, _close, self._processes, self._group, self._place, self._files)
            try:
                self._take_place()
                self.own = open_own()
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

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy a block in the other ranks' pools like `KVPool.copy_block`."""
        self._copy(COPY_BLOCK, copy)

    def copy_slot(self, copy: StateCopy) -> None:
        """Copy a slot in the other ranks' pools like `runtime.core.states.copy_slot`."""
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

    def _copy(self, kind: int, copy: BlockCopy | StateCopy) -> None:
        if self._pool is not None:  # or there is nothing yet to copy
            try:
                self._send((kind, copy.source, copy.destination))
            except OSError:
                self._processes.raise_failure()
                raise

    @property
    def failure(self) -> SpecDecError | None:
        """The reason why no step can be computed any more; None while steps can be computed."""
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
        """The logits, after the GPU has computed them. If another rank has ended meanwhile, they are wrong, and an
        error is raised.
        """
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


def rank_devices(device_type: str, device_ids: Seq[int]) -> list[str]:
    """torch's names of the ranks' devices. On a processor all ranks have the same name, and differ by their cores."""
    return [device_type if device_type == "cpu" else f"{device_type}:{device_id}" for device_id in device_ids]


def _jobs(model: RankedModel, rendezvous: Rendezvous, cores: Seq[Seq[int]], devices: Seq[str]) -> list[dict[str, Any]]:
    said = dataclasses.asdict(model) | {
        "directory": str(model.directory.resolve()),
        "way": rendezvous.way,
        "meeting": rendezvous.number,
    }
    return [said | {"rank": rank, "cores": cores[rank], "device": devices[rank]} for rank in range(1, model.tp_size)]


def _close(processes: Processes, group: RankGroup, place: Place | None, files: list[int]) -> None:
    group.stop()
    processes.close()
    group.leave()
    _close_all(files)
    if place is not None:
        place.leave()


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
