"""The worker of specdec: one opened engine, V1 and V2 loops, with and without drafters.

The cache is emptied before every prompt: block reuse would find the prompt of the run before.
"""

from itertools import count
from pathlib import Path
from typing import Any

import runtime  # before torch, as commands do: it tells OpenMP how long to wait  # noqa: F401

# isort: split
import torch
from peers.worker import Variant, serve

from runtime import leader, orchestrator
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.engine import Engine, KVCacheConfig
from runtime.request import Request


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    torch.set_num_threads(settings["num_threads"])
    kv_cache = KVCacheConfig(max_tokens=settings["max_cache_tokens"])
    engine = Engine.open(Path(settings["engine_dir"]), kv_cache=kv_cache)
    systems: dict[str, tuple[Any, Any, int]] = {
        "none-v1": (orchestrator.generate, None, 0),
        "none-v2": (leader.generate, None, 0),
        "ngram-v1": (orchestrator.generate, NgramLookup(settings["ngram_size"]), settings["ngram_draft_len"]),
        "ngram-v2": (leader.generate, NgramLookup(settings["ngram_size"]), settings["ngram_draft_len"]),
    }
    engines = [engine]
    if settings["draft_engine_dir"]:
        engines.append(Engine.open(Path(settings["draft_engine_dir"]), kv_cache=kv_cache))
        drafter = DraftModel(engines[1], engine.config.vocab_size, use_logits=False)
        systems["draft-target"] = (orchestrator.generate, drafter, settings["draft_model_draft_len"])
    ids = count()

    def variant(loop: Any, drafter: Any, max_draft_len: int) -> Variant:
        def generate(prompt: list[int], max_new_tokens: int, arrived: Any) -> list[int]:
            for each in engines:
                each.clear_cache()
            request = Request(next(ids), tuple(prompt), max_new_tokens)
            output_ids: list[int] = []
            for _, new_tokens in loop(engine, [request], drafter, max_draft_len):
                arrived()
                output_ids += new_tokens
            return output_ids

        return generate

    note = f"compiler {engine.config.build_config.compiler}, K/V cache of {kv_cache.max_tokens} tokens"
    return {name: variant(*system) for name, system in systems.items()}, note


if __name__ == "__main__":
    serve(load)
