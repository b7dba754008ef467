"""Ray's workers: actors that each open the model once, and answer the requests that they are sent.

If a worker dies, its requests are sent to another worker, and a new worker is started in its place. A single process
sends all requests and writes all results, so each result is written once, even if two workers made it.
"""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import RayActorError, RayError

from commands.batch.answering import model_digest
from commands.batch.dispatch import Crew, NotAnswered, check_same_bits
from commands.options.engine_choice import EngineChoice
from commands.options.sessions import engines_made
from commands.options.shared import ClusterOptions
from commands.output.output import Output, warn
from runtime.builder.engine_cache import engine_of_checkpoint
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import BuildConfig
from runtime.proof.records import Fingerprint
from runtime.util.errors import SpecDecError

_DEFAULT_NUM_WORKERS = 2
_MAX_DEATHS = 3
"""Deaths of workers, for each worker that was asked for, that are tolerated without a result between them."""


class Model(Protocol):
    """A model that a worker has opened."""

    @property
    def window(self) -> int:
        """Number of requests that the model takes at a time."""
        ...

    @property
    def fingerprint(self) -> Fingerprint:
        """The engine's fingerprint. Workers with different fingerprints do not share a batch."""
        ...

    @property
    def failure(self) -> SpecDecError | None:
        """The reason why the model no longer answers, such as a rank that has ended; None while it answers."""
        ...

    async def answer(self, request: Any) -> Any:
        """Answer a request; returns an outcome with the field `worker`, or NotAnswered."""
        ...


class Job(Protocol):
    """Settings with which a worker opens its engine."""

    @property
    def choice(self) -> EngineChoice: ...

    def with_choice(self, choice: EngineChoice) -> "Job": ...

    def opened(self) -> AbstractContextManager[Model]: ...


@dataclass(frozen=True)
class WorkerJob:
    """Settings of a worker. A worker that cannot see the engine's directory builds an engine from `checkpoint_dir`."""

    job: Job
    checkpoint_dir: Path | None

    def everywhere(self) -> "WorkerJob":
        """The same settings with absolute paths."""
        choice = self.job.choice
        choice = replace(
            choice,
            engine_dir=choice.engine_dir.absolute(),
            tokenizer_dir=None if choice.tokenizer_dir is None else choice.tokenizer_dir.absolute(),
            bundle=None,
        )
        checkpoint_dir = None if self.checkpoint_dir is None else self.checkpoint_dir.absolute()
        return replace(self, job=self.job.with_choice(choice), checkpoint_dir=checkpoint_dir)


@dataclass(frozen=True)
class Opened:
    """Report of a worker that has opened the model, or cannot."""

    worker: str
    window: int = 0
    fingerprint: Fingerprint | None = None
    error: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Ended:
    """Report of a worker whose model has failed, instead of an outcome."""

    why: str


class Worker:
    """The Ray actor: opens the model and answers requests."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._model: Model | None = None
        self._name = f"{socket.gethostname()}:{os.getpid()}"

    def open(self, work: WorkerJob, wanted: str, build: BuildConfig, directory: str, num_cpus: int) -> Opened:
        """Open the model. `wanted` is the digest that the model must have. `directory` is the directory in which the
        command was called: Python files of drafters may lie there.
        """
        if os.path.isdir(directory):
            os.chdir(directory)
        torch.set_num_threads(num_cpus)
        try:
            self._model = self._stack.enter_context(open_anywhere(work, wanted, build))
        except SpecDecError as error:
            return Opened(self._name, error=f"{error.message} (on {socket.gethostname()})", hint=error.hint)
        return Opened(self._name, self._model.window, self._model.fingerprint)

    async def answer(self, request: Any) -> Any:
        assert self._model is not None
        try:
            outcome = await self._model.answer(request)
        except SpecDecError:
            if self._model.failure is None:
                raise
        if (failure := self._model.failure) is not None:
            return Ended(failure.message)
        return outcome if isinstance(outcome, NotAnswered) else replace(outcome, worker=self._name)


@contextmanager
def open_anywhere(work: WorkerJob, wanted: str, build: BuildConfig) -> Iterator[Model]:
    """Open the model with the engine that is there. If there is no engine, or only an engine for another processor, an
    engine is built first, from the model or the checkpoint. SpecDecError if neither is named, or if the model differs.
    """
    job = work.job
    with ExitStack() as stack:
        if job.choice.model_dir is not None:
            made = stack.enter_context(engines_made(job.choice, Output(quiet=True)))
            model = stack.enter_context(_open_same(job, made.engine_dir, wanted))
        else:
            try:
                model = stack.enter_context(_open_same(job, job.choice.engine_dir, wanted))
            except SpecDecError as error:
                if work.checkpoint_dir is None or error.code not in ("no_engine", "other_environment"):
                    raise
                engine_dir = stack.enter_context(engine_of_checkpoint(work.checkpoint_dir, build))
                model = stack.enter_context(_open_same(job, engine_dir, wanted))
        yield model


@contextmanager
def _open_same(job: Job, engine_dir: Path, wanted: str) -> Iterator[Model]:
    if model_digest(engine_dir, job.choice.tokenizer_dir) != wanted:
        raise SpecDecError(
            f"this machine's model differs from the model that the work began with: {engine_dir}",
            hint="put the same model on every machine",
        )
    with job.with_choice(replace(job.choice, engine_dir=engine_dir)).opened() as model:
        yield model


@dataclass(frozen=True)
class _Arrived:
    """Result of a call to a worker: the answer of a request, or, if `request_id` is None, the opening of the model."""

    member: "_Member"
    request_id: str | None
    result: Future[Any]


@dataclass(eq=False)
class _Member:
    """A worker, and the requests that it has been sent."""

    actor: Any
    worker: str = ""
    window: int = 0
    sent: set[str] = field(default_factory=set)
    """Ids of the requests that the worker has been sent."""

    @property
    def num_free(self) -> int:
        return self.window - len(self.sent)


class RayCrew:
    """The workers of a Ray cluster; workers may join and leave."""

    def __init__(self, work: WorkerJob, num_workers: int, num_cpus: int, *, allow_mixed: bool = False) -> None:
        """The workers of `work`. If `allow_mixed` is True, engines of workers may give different bits, so that a result
        depends on the worker that made it.
        """
        self._num_workers, self._num_cpus, self._allow_mixed = num_workers, num_cpus, allow_mixed
        self._fingerprint: Fingerprint | None = None
        """Fingerprint of the first worker."""
        session = work.job.choice
        config = read_bundle(session.engine_dir).config
        self._on_gpu = config.environment.device == "cuda"
        wanted = model_digest(session.engine_dir, session.tokenizer_dir)
        self._given = (ray.put(work.everywhere()), wanted, config.build_config, os.getcwd(), num_cpus)
        self._num_deaths = 0
        self._arrived: SimpleQueue[_Arrived] = SimpleQueue()
        self._members = [self._begin() for _ in range(num_workers)]

    @property
    def num_free(self) -> int:
        return sum(member.num_free for member in self._members)

    def wait_until_one_is_open(self) -> None:
        """Wait for the first worker that has opened the model. SpecDecError if none can open it."""
        while not self.num_free:
            self.receive()

    def send(self, request: Any) -> None:
        member = max(self._members, key=lambda one: one.num_free)
        member.sent.add(request.id)
        self._expect(member, request.id, member.actor.answer.remote(request))

    def receive(self) -> list[Any]:
        arrived = [self._arrived.get()]
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        return [outcome for one in arrived for outcome in self._take(one)]

    def _begin(self) -> _Member:
        options = {"num_cpus": self._num_cpus, "num_gpus": int(self._on_gpu)}
        member = _Member(ray.remote(Worker).options(**options).remote())
        self._expect(member, None, member.actor.open.remote(*self._given))
        return member

    def _expect(self, member: _Member, request_id: str | None, ref: Any) -> None:
        """Have Ray call back when the result of `ref` is there; `ray.wait` takes longer the more there are."""
        ref.future().add_done_callback(lambda result: self._arrived.put(_Arrived(member, request_id, result)))

    def _take(self, arrived: _Arrived) -> list[Any]:
        """Take the result of a call to a worker. If the worker died, all requests that it had been sent are lost."""
        member = arrived.member
        if member not in self._members:
            return []
        try:
            result = arrived.result.result()
        except RayActorError:
            return self._replace(member, "died")
        if isinstance(result, Ended):
            ray.kill(member.actor)
            return self._replace(member, f"has no engine any more ({result.why})")
        if arrived.request_id is None:
            self._let_in(member, result)
            return []
        member.sent.remove(arrived.request_id)
        self._num_deaths = 0
        return [result]

    def _let_in(self, member: _Member, opened: Opened) -> None:
        if opened.error is None:
            if self._fingerprint is not None and opened.fingerprint is not None:
                check_same_bits(opened.worker, opened.fingerprint, self._fingerprint, allow_mixed=self._allow_mixed)
            self._fingerprint = self._fingerprint or opened.fingerprint
            member.worker, member.window = opened.worker, opened.window
            return
        self._members.remove(member)
        if not self._members:
            raise SpecDecError(f"no worker could open the model: {opened.error}", hint=opened.hint)
        warn(f"a worker could not open the model: {opened.error}")

    def _replace(self, member: _Member, how: str) -> list[NotAnswered]:
        self._num_deaths += 1
        if self._num_deaths > _MAX_DEATHS * self._num_workers:
            raise SpecDecError(
                f"workers die one after the other, and nothing is answered: {self._num_deaths}",
                hint="Ray's logs say why; perhaps there is too little memory for this many workers",
            )
        which = f"with {len(member.sent)} requests, which are asked again: {member.worker}"
        warn(f"a worker {how} {which if member.worker else 'before it had opened the model'}")
        self._members.remove(member)
        self._members.append(self._begin())
        failure = "the worker died each time that it was asked"
        return [NotAnswered(lost, failure, is_lost=True) for lost in member.sent]


@contextmanager
def ray_crew(work: WorkerJob, options: ClusterOptions, num_requests: int) -> Iterator[Crew[Any, Any]]:
    """Workers, at least one of which has opened the model. SpecDecError if none can open it, or if the cluster cannot
    be reached. A local cluster ends with the block.
    """
    num_workers = min(options.num_workers or _DEFAULT_NUM_WORKERS, num_requests)
    assert options.ray is not None
    with connected(options.ray):
        num_cpus = options.cpus_per_worker or _equal_share(num_workers)
        _check_room(num_cpus)
        crew = RayCrew(work, num_workers, num_cpus, allow_mixed=options.allow_mixed)
        crew.wait_until_one_is_open()
        yield crew


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to Ray within the block. Ray prints nothing to stdout, and sends no usage reports unless a variable turns
    them on. SpecDecError if no cluster can be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        _connect(address)
        try:
            yield
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    try:
        has_dashboard = False if address == "local" else None  # for a cluster that runs Ray refuses the option
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=has_dashboard)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecDecError(
            f"no Ray cluster could be reached ({first_line}): {address}",
            hint="`local` starts one here; `ray status` says whether there is one",
        ) from None


def _equal_share(num_workers: int) -> int:
    """Number of cores for each worker: an equal share of the cluster's cores, at most as many as the smallest machine
    has.
    """
    cpus = _cpus_of_machines()
    return max(int(min(sum(cpus) / num_workers, min(cpus))), 1)


def _check_room(num_cpus: int) -> None:
    most = max(_cpus_of_machines())
    if num_cpus > most:
        raise SpecDecError(
            f"no machine of the cluster has enough cores for a worker, the largest has {most:g}: {num_cpus}",
            hint="lower `--cpus-per-worker`",
        )


def _cpus_of_machines() -> list[float]:
    found = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return [cpus for cpus in found if cpus] or [1]
