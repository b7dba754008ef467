"""Time to the first token after a restart, with keys and values on disk, and what writing them costs other requests.

python -m scripts.bench.kv_disk smollm2.gguf --tokens 2000 8000
python -m scripts.bench.kv_disk smollm2.gguf --only cost --turns 60

A prompt is computed by one engine and read by another, which is opened after the first was closed. A turn of a
conversation is timed in one process, and continued by another.

The cost to others: an answer is generated in turns of 60 steps. In half of the turns, drawn at random, 500 tokens of
another sequence are written to disk meanwhile (`write`), or read from it (`read`). Two turns beside each other make a
pair; the median of the pairs' ratios has a 95 % interval from 2,000 resampled sets of pairs. `thread` is the same of
the decoding thread's processor time, which other processes disturb less.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.core.block_store import BlockStore
from runtime.core.params import SamplingParams
from runtime.core.request import Request, Sequence
from runtime.engine.engine import KVCacheConfig
from runtime.llm import LLM
from runtime.loop.pieces import PieceSizes
from runtime.loop.scheduler import Scheduler

ONE = SamplingParams(max_tokens=1, temperature=0.0)
NUM_STEPS, NUM_OTHERS = 60, 500
PARTS = ("ttft", "cost", "turn")


@dataclass(frozen=True)
class Turn:
    """Times of the steps of a turn: on the wall, of this thread's processor, and of the longest step."""

    wall_s: float
    thread_s: float
    longest_s: float


def prompt_of(llm: LLM, num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, llm.bundle.config.vocab_size) for _ in range(num_tokens)]


def ttft(llm: LLM, prompt: list[int]) -> float:
    (result,) = llm.generate(prompt, ONE)
    seconds = result.outputs[0].stats.ttft_s
    assert seconds is not None
    return seconds


class Watched:
    """An answer that goes on for as long as it is watched, and others beside it."""

    def __init__(self, llm: LLM, directory: Path) -> None:
        self.engine, self._directory = llm.engine, directory
        self._prompt = tuple(prompt_of(llm, 100, 1))
        self._others = Request(1, tuple(prompt_of(llm, NUM_OTHERS, 2)), 1)
        self._scheduler = Scheduler(self.engine, max_draft_len=0, pieces=PieceSizes(self.engine.max_num_tokens, 0.0))
        self.compute_others()

    def compute_others(self) -> None:
        """Compute the other sequence, so that it is in memory and on disk."""
        self.engine.clear_cache()
        others = Scheduler(self.engine, max_draft_len=0)
        others.add(Sequence.start(self._others))
        while others.has_work:
            others.step()
        self.engine.flush_disk()

    def _begin(self) -> None:
        """An answer of the same length in every turn, at its first token."""
        self._scheduler.release_all()
        watched = Sequence.start(Request(0, self._prompt, NUM_STEPS + 20))
        self._scheduler.add(watched)
        while watched.num_generated < 5:
            self._scheduler.step()

    def _steps(self) -> Turn:
        start, thread_start, longest = time.perf_counter(), time.thread_time(), 0.0
        for _ in range(NUM_STEPS):
            before = time.perf_counter()
            self._scheduler.step()
            longest = max(longest, time.perf_counter() - before)
        return Turn(time.perf_counter() - start, time.thread_time() - thread_start, longest)

    def write(self, *, is_done: bool) -> Turn:
        """A turn while what another sequence computed is written; or is not written."""
        self._begin()
        BlockStore(self._directory).prune(0)
        other = Sequence.start(self._others)
        if is_done:
            self.engine.admit(other)
            self.engine.release(other)
            return self._steps()
        with self.engine.without_disk():
            self.engine.admit(other)
            self.engine.release(other)
            return self._steps()

    def read(self, *, is_done: bool) -> Turn:
        """A turn in which another sequence is read from disk, and is answered by one token; or is found in memory."""
        if is_done:
            self.engine.clear_cache()
        self._begin()
        self._scheduler.add(Sequence.start(self._others))
        return self._steps()


def cost(turn: Callable[..., Turn], num_pairs: int, settle: Callable[[], None]) -> str:
    rng = random.Random(0)
    pairs = list[tuple[Turn, Turn]]()
    for _ in range(num_pairs):
        pair = dict[bool, Turn]()
        for is_done in rng.sample([True, False], 2):
            pair[is_done] = turn(is_done=is_done)
            settle()
        pairs.append((pair[True], pair[False]))
    wall = [one.wall_s / other.wall_s for one, other in pairs]
    thread = [one.thread_s / other.thread_s for one, other in pairs]
    steps = [1e3 * statistics.median(turn.wall_s for turn in turns) / NUM_STEPS for turns in zip(*pairs, strict=True)]
    longest = [1e3 * statistics.median(turn.longest_s for turn in turns) for turns in zip(*pairs, strict=True)]
    return (
        f"{num_pairs} pairs: wall {_with_interval(wall, rng)}, thread {_with_interval(thread, rng)}; "
        f"a step {steps[0]:.2f} ms, else {steps[1]:.2f}; the longest {longest[0]:.1f} ms, else {longest[1]:.1f}"
    )


def _with_interval(ratios: list[float], rng: random.Random) -> str:
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} [{medians[50]:.3f}, {medians[1949]:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2000, 8000])
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--turns", type=int, default=40, help="pairs of turns")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        longest = max([*given.tokens, 2000]) if "ttft" in given.only else 2000
        kv_cache = KVCacheConfig(disk_dir=Path(directory) / "kv", max_tokens=longest + 1024)

        def opened() -> LLM:
            return LLM(given.model, max_seq_len=longest + 64, kv_cache=kv_cache)

        opened().close()  # it may build an engine, or compile kernels for the next one
        if "ttft" in given.only:
            compare_ttft(opened, given.tokens)
        if "cost" in given.only:
            with opened() as llm:
                watched = Watched(llm, Path(directory) / "kv")
                print(f"write, {cost(watched.write, given.turns, llm.engine.flush_disk)}", flush=True)
                watched.compute_others()
                print(f"read, {cost(watched.read, given.turns, llm.engine.flush_disk)}", flush=True)
        if "turn" in given.only:
            compare_turns(opened)


def compare_ttft(opened: Callable[[], LLM], lengths: list[int]) -> None:
    computed, restored = {}, {}
    with opened() as llm:
        llm.generate(prompt_of(llm, 64, 99), ONE)
        for num_tokens in lengths:
            computed[num_tokens] = ttft(llm, prompt_of(llm, num_tokens, num_tokens))
            llm.engine.flush_disk()
    with opened() as llm:
        llm.generate(prompt_of(llm, 64, 98), ONE)
        for num_tokens in lengths:
            restored[num_tokens] = ttft(llm, prompt_of(llm, num_tokens, num_tokens))
    for num_tokens in lengths:
        ratio = restored[num_tokens] / computed[num_tokens]
        print(
            f"{num_tokens} tokens: computed {computed[num_tokens]:.3f} s, restored {restored[num_tokens]:.3f} s, "
            f"{ratio:.3f}",
            flush=True,
        )


def compare_turns(opened: Callable[[], LLM]) -> None:
    with opened() as llm:
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
