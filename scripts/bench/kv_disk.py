"""Time to the first token after a restart, with keys and values on disk, and what writing them costs other requests.

python -m scripts.bench.kv_disk smollm2.gguf --tokens 2000 8000

A prompt is computed by one engine and read by another, which is opened after the first was closed. Then an answer of
400 tokens is timed, token by token, while prompts of 500 tokens come and go beside it, with K/V on disk and without, in
turns. Last a turn of a conversation, in one process and continued by another.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from runtime.core.params import SamplingParams
from runtime.core.request import Request, Sequence
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM
from runtime.loop.scheduler import Scheduler

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def prompt_of(llm: LLM, num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, llm.bundle.config.vocab_size) for _ in range(num_tokens)]


def ttft(llm: LLM, prompt: list[int]) -> float:
    (result,) = llm.generate(prompt, ONE)
    seconds = result.outputs[0].stats.ttft_s
    assert seconds is not None
    return seconds


def gap_beside_others(llm: LLM, seed: int) -> float:
    """Mean seconds between two tokens of an answer, while other prompts are computed and released."""
    scheduler = Scheduler(llm.engine, max_draft_len=0)
    prompts = iter(range(1, 10**6))
    watched = Sequence.start(Request(0, tuple(prompt_of(llm, 100, seed)), 120))
    scheduler.add(watched)
    start = None
    while watched.finish_reason is None:
        if len(scheduler.running) < 2 and not scheduler.waiting:
            number = next(prompts)
            scheduler.add(Sequence.start(Request(number, tuple(prompt_of(llm, 300, seed * 1000 + number)), 20)))
        scheduler.step()
        if start is None and watched.num_generated:
            start = time.perf_counter()
    end = time.perf_counter()
    scheduler.release_all()
    assert start is not None
    return (end - start) / (watched.num_generated - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2000, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kv_cache = KVCacheConfig(disk_dir=Path(directory) / "kv", max_tokens=max([*given.tokens, 8000]) + 512)

        def opened() -> LLM:
            return LLM(given.model, max_seq_len=max([*given.tokens, 8000]) + 64, kv_cache=kv_cache)

        computed, restored = {}, {}
        opened().close()  # it may build an engine, or compile kernels for the next one
        with opened() as llm:
            llm.generate(prompt_of(llm, 64, 99), ONE)
            for num_tokens in given.tokens:
                computed[num_tokens] = ttft(llm, prompt_of(llm, num_tokens, num_tokens))
                llm.engine.flush_disk()
        with opened() as llm:
            llm.generate(prompt_of(llm, 64, 98), ONE)
            for num_tokens in given.tokens:
                restored[num_tokens] = ttft(llm, prompt_of(llm, num_tokens, num_tokens))
        for num_tokens in given.tokens:
            ratio = restored[num_tokens] / computed[num_tokens]
            print(
                f"{num_tokens} tokens: computed {computed[num_tokens]:.3f} s, restored {restored[num_tokens]:.3f} s, "
                f"{ratio:.3f}",
                flush=True,
            )
        with opened() as llm:
            gaps: dict[bool, list[float]] = {True: [], False: []}
            for i in range(2 * given.rounds):
                with_disk = i % 2 == 0
                llm.engine.clear_cache()
                if with_disk:
                    gaps[True].append(gap_beside_others(llm, 100 + i))
                    llm.engine.flush_disk()
                else:
                    with llm.engine.without_disk():
                        gaps[False].append(gap_beside_others(llm, 100 + i))
            own, without = statistics.median(gaps[True]), statistics.median(gaps[False])
            print(
                f"tokens of an answer beside others: {1e3 * own:.2f} ms, without disk {1e3 * without:.2f} ms, "
                f"{own / without:.3f}; all {gaps}",
                flush=True,
            )
            first = llm.generate(prompt_of(llm, 1000, 7), SamplingParams(max_tokens=20, temperature=0.0))[0]
            said = [*first.prompt_token_ids, *first.outputs[0].token_ids, *prompt_of(llm, 30, 8)]
            llm.engine.flush_disk()
            with llm.engine.without_disk():
                in_process = ttft(llm, said)
        with opened() as llm:
            llm.generate(prompt_of(llm, 64, 97), ONE)
            continued = ttft(llm, said)
        print(f"a turn: continued {continued:.3f} s, in one process {in_process:.3f} s, {continued / in_process:.2f}")


if __name__ == "__main__":
    main()
