"""An engine whose ranks are threads of this process, so that many can be tried."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from tiny import make_build
from torch import Tensor

from runtime.builder.convert import convert
from runtime.checkpoint.config import EngineConfig, LogitsCheck
from runtime.core.kv_cache import KVPool
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.engine.load import current_environment
from runtime.kernels.groups import RankGroup, Rendezvous, Way, join
from runtime.model.attention import KERNEL, PAGED
from runtime.model.model import ModelKind, Step, load_model, probe_config, split_config
from runtime.model.pretrained import parse_pretrained_config

Done = TypeVar("Done")
CPU = torch.device("cpu")
WAYS: tuple[Way, ...] = ("shared", "gloo")


class Threads:
    """One for each rank of a group, which computes with it."""

    def __init__(self, way: Way, tp_size: int) -> None:
        self._meeting = Rendezvous(way, tp_size)
        number, store = self._meeting.number, self._meeting.store
        self._groups: list[RankGroup] = [
            join(way, number, rank, tp_size, None if rank else store) for rank in range(tp_size)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in range(tp_size)]
        self.do(lambda rank: self._groups[rank].use())

    def do(self, work: Callable[[int], Done]) -> list[Done]:
        """Results that each rank's thread makes of its number."""
        begun = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [one.result() for one in begun]

    def close(self) -> None:
        for group in self._groups:
            group.stop()
        for thread in self._threads:
            thread.shutdown()
        for group in self._groups:
            group.leave()
        self._meeting.close()


def together(way: Way, tp_size: int, work: Callable[[int], Done]) -> list[Done]:
    with ExitStack() as stack:
        threads = Threads(way, tp_size)
        stack.callback(threads.close)
        return threads.do(work)


@contextmanager
def split_engine(model_dir: Path, work_dir: Path, tp_size: int, way: Way = "gloo") -> Iterator[Engine]:
    """Engine of a model's files; K/V are not found again, as only rank 0 would copy them."""
    checkpoint = work_dir / "checkpoint"
    config = convert(model_dir, checkpoint, "float32", replace=True, progress=lambda *_: None, tp_size=tp_size)
    pretrained = parse_pretrained_config(config.pretrained_config, "config.json")
    splitting = split_config(pretrained, tp_size)
    shapes = probe_config(pretrained, splitting)
    kind = ModelKind(pretrained, torch.float32, KERNEL if way == "shared" else PAGED, splitting=splitting)
    steps = [Step(load_model(kind, checkpoint / f"rank{rank}.safetensors")) for rank in range(tp_size)]
    threads = Threads(way, tp_size)
    pools: dict[int, tuple[KVPool, list[Tensor]]] = {}

    def step(*inputs: Any) -> Tensor:
        batch, (keys, _, *states) = inputs[:5], inputs[5:]
        num_blocks, _, _, block_size = keys[0].shape

        @torch.inference_mode()
        def compute(rank: int) -> Tensor:
            if rank not in pools:
                pool = KVPool(shapes.layers, num_blocks, block_size, torch.float32, CPU)
                pools[rank] = pool, [torch.zeros_like(one) for one in states[1]] if states else []
            pool, slots = pools[rank]
            return steps[rank](*batch, *pool.tensors, *([states[0], slots] if states else []))

        logits = threads.do(compute)
        assert all(torch.equal(one, logits[0]) for one in logits)
        return logits[0]

    of_engine = EngineConfig(
        pretrained_config=config.pretrained_config,
        dtype="float32",
        build_config=make_build(max_draft_len=6, max_input_len=349, max_seq_len=384),
        layers=shapes.layers,
        states=shapes.states,
        vocab_size=pretrained.vocab_size,
        environment=current_environment(CPU),
        logits_check=LogitsCheck(0, 0, 0),
        weights_digest="",
    )
    try:
        with Engine(of_engine, step, CPU, KVCacheConfig(block_reuse=False)) as engine:
            yield engine
    finally:
        threads.close()
