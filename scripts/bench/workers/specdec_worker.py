"""The worker of specdec: one opened engine, in both modes, with and without drafters, as its settings name them.

The cache is emptied before every prompt: block reuse would find the prompt of the run before.
"""

import dataclasses
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Request
from runtime.drafters.specs import (
    AnySpec,
    NgramDrafter,
    SelfDrafter,
    SuffixDrafter,
)
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM
from runtime.loop.session import Session
from scripts.bench.workers.worker import Job, Variant, by_clock, serve

DRAFTERS: dict[str, Callable[..., AnySpec]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "self": SelfDrafter,
}


def open_session(llm: LLM, mode: Any, drafter: list[Any] | None, draft_len_mode: Any) -> Session:
    """`drafter`: its name and its arguments."""
    settings = drafter and DRAFTERS[drafter[0]](*drafter[1:])
    return dataclasses.replace(llm.session(settings, draft_len_mode), mode=mode)


def sampling_of(job: Job) -> SamplingConfig:
    if job.sampling is None:
        return GREEDY
    return SamplingConfig(**dataclasses.asdict(job.sampling), random_seed=job.seed)


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    """`settings["drafting"]`: the mode, the drafter and how long its drafts are, of each variant."""
    torch.set_num_threads(settings["num_threads"])
    kv_cache = KVCacheConfig(max_tokens=settings["max_cache_tokens"])
    llm = LLM(settings["engine_dir"], kv_cache=kv_cache)
    ids = count()

    def variant(session: Session) -> Variant:
        def generate(job: Job, arrived: Any) -> list[int]:
            session.clear_cache()
            session.clear_pools()
            request = Request(
                next(ids), tuple(job.prompt), job.max_new_tokens, frozenset(job.end_ids), sampling=sampling_of(job)
            )
            output_ids: list[int] = []
            num_steps, step_s = -1, 0.0
            for _, new_tokens in session.steps([request]):
                arrived()
                output_ids += new_tokens
                num_steps += 1
                step_s = step_s or llm.engine.step_time_s
            told["target_s"] = (llm.engine.step_time_s - step_s) / max(num_steps, 1)
            return output_ids

        return generate

    compiler = llm.bundle.config.build_config.compiler
    note = f"compiler {compiler}, K/V cache of {kv_cache.max_tokens} tokens"
    return {name: variant(open_session(llm, *one)) for name, one in settings["drafting"].items()}, note


told: dict[str, float] = {}
"""Seconds of a compiled step after the first token, of the last job."""

if __name__ == "__main__":
    serve(load, lambda variant, job: by_clock(variant, job) | told)
