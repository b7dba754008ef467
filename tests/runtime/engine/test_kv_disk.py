"""K/V on disk: restored is what computing again gives, to the bit, and nothing else is ever given out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common_fixtures import MakeEngineDir
from tiny import make_model

from runtime.core.request import Request, Sequence
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import scheduler

PROMPT = [(7 * i * i + 3 * i) % 29 + 3 for i in range(45)]
NEXT = [9, 4, 11, 23, 5]


def answer(engine: Engine, prompt: list[int], num_tokens: int = 12, salt: str | None = None) -> Sequence:
    request = Request(0, tuple(prompt), num_tokens, keep_logits=True, cache_salt=salt)
    *_, (sequence, _) = scheduler.generate(engine, [request])
    return sequence


def opened(engine_dir: Path, disk: Path, **settings: Any) -> Engine:
    return Engine.open(engine_dir, kv_cache=KVCacheConfig(disk_dir=disk, **settings))


def same_bits(one: Sequence, other: Sequence) -> bool:
    return one.tokens == other.tokens and torch.equal(torch.stack(one.logits), torch.stack(other.logits))


# Dense, a window, sinks, MLA, convolutions, recurrent states, states alone, shared K/V, chunks, one attention for
# several layers.
FAMILIES = (
    *("llama", "gemma3", "gpt-oss", "deepseek-v3", "lfm2", "qwen3.5", "mamba2", "llama4", "zamba2", "jamba"),
    "kimi-linear",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_conversation_goes_on_as_in_memory(
    family: str, make_engine_dir: MakeEngineDir, tmp_path: Path
) -> None:
    """What memory gives is an independent source: the tests of the cache say that it is what computing gives."""
    engine_dir = make_engine_dir(make_model(family))
    with opened(engine_dir, tmp_path / "kv") as engine:
        first = answer(engine, PROMPT)
        with engine.without_disk():
            in_memory = answer(engine, first.tokens + NEXT)
        assert engine.prompt_tokens.num_on_disk == 0
    with opened(engine_dir, tmp_path / "kv") as engine:
        restored = answer(engine, first.tokens + NEXT)
        assert engine.prompt_tokens.num_on_disk == in_memory.stats.num_reused_tokens > len(PROMPT)
    assert restored.stats.num_reused_tokens == in_memory.stats.num_reused_tokens
    assert same_bits(restored, in_memory)
    with Engine.open(engine_dir) as engine:
        assert answer(engine, first.tokens + NEXT).tokens == restored.tokens
