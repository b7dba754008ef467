"""Does drafting ever lose by default? Automatic draft lengths beside no drafter: by kind of text, and many at once.

Spec-Bench's prompts, by the model's chat template if it has one, are answered greedily and sampled: first one by one,
of each kind for itself, then all kinds together, so many at once: as soon as one has its tokens the next takes its
place, and what counts is the time for a token while all places are taken. Each prompt or mixture is answered without a
drafter and with each drafter in turn, after a turn that does not count and leaves its K/V in the cache, so that
generating is what is timed. A drafter's state is that of its kind and run. Ratios are of times added up: time without
drafter ÷ with.

    python -m scripts.bench.automatic MODEL DATA [--drafters suffix,both] [--only one|many] [--num-prompts 4] [--runs 2]
"""

import argparse
import json
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import runtime  # before torch, as commands do: it tells OpenMP how long to wait  # noqa: F401

# isort: split
from runtime.checkpoint.bundle import is_engine_dir
from runtime.core.params import SamplingParams
from runtime.core.request import Request, Sequence
from runtime.drafters.specs import AnySpec, ChainDrafter, NgramDrafter, SuffixDrafter
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.llm import LLM, EngineOptions
from runtime.loop.scheduler import Scheduler
from runtime.loop.session import Session
from runtime.text.chat import has_chat_template
from runtime.util.errors import SpecDecError

KINDS = {"translation": "translation", "summarization": "summarization", "qa": "qa", "rag": "rag"} | {
    "math_reasoning": "maths"
}
"""Spec-Bench's categories; all others are chats."""
DRAFTERS: dict[str, AnySpec] = {
    "ngram": NgramDrafter(),
    "suffix": SuffixDrafter(),
    "both": ChainDrafter([NgramDrafter(), SuffixDrafter()]),
}
TimeSeconds = Callable[[Session, list[Request]], float]
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}


def read_prompts(data: Path, num_prompts: int) -> dict[str, list[str]]:
    """First turns by kind, taken from all over a kind."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (data / "spec_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[KINDS.get(row["category"], "chat")].append(row["turns"][0])
    return {kind: texts[:: -(-len(texts) // num_prompts)][:num_prompts] for kind, texts in found.items()}


class Bench:
    """A model, what it is asked, and how much of it."""

    def __init__(self, llm: LLM, arguments: argparse.Namespace) -> None:
        self.llm, self.num_tokens, self.runs = llm, arguments.num_tokens, arguments.runs
        self.drafters: list[str] = arguments.drafters.split(",")
        self.sizes = [int(size) for size in arguments.at_once.split(",")]
        self.prompts = {
            kind: [self._encode(text) for text in texts]
            for kind, texts in read_prompts(arguments.data, arguments.num_prompts).items()
        }

    def _encode(self, text: str) -> list[int]:
        build = self.llm.bundle.config.build_config
        most = min(build.max_input_len, build.max_request_len - self.num_tokens)
        if self.llm.tokenizer is None:  # random weights: words become ids, the same word the same id
            size = self.llm.bundle.config.vocab_size
            return [random.Random(word).randrange(size) for word in text.split()][-most:]
        if has_chat_template(self.llm.tokenizer_dir):
            return self.llm.chat_template.encode([{"role": "user", "content": text}])[-most:]
        return self.llm.encode(text)[0][-most:]

    def ratios(
        self, groups: list[list[list[int]]], sampling: str, time_s: TimeSeconds
    ) -> tuple[dict[str, float], float]:
        """Time without drafter ÷ with each, and the milliseconds of a token without. `time_s` times a group."""
        params = replace(SAMPLING[sampling], max_tokens=self.num_tokens)
        template = self.llm.request_of(params)
        seconds: dict[str, float] = defaultdict(float)
        for run in range(self.runs):
            with ExitStack() as stack:
                sessions = {
                    name: self.llm.open_session(Speculation.of(DRAFTERS[name], "auto"), stack) for name in self.drafters
                }
                sessions = {"none": self.llm.open_session(NO_SPECULATION, stack)} | sessions
                for i, group in enumerate(groups):
                    requests = [template.with_prompt(j, prompt, 0) for j, prompt in enumerate(group)]
                    sessions["none"].run([replace(request, max_new_tokens=1) for request in requests])
                    # Each is first as often as the others: whoever is finds the caches of the prompts' computation.
                    first = (run + i) % len(sessions)
                    for name in [*sessions][first:] + [*sessions][:first]:
                        seconds[name] += time_s(sessions[name], requests)
            self.llm.engine.clear_cache()
        return {name: seconds["none"] / seconds[name] for name in self.drafters}, seconds["none"] / self.runs * 1e3

    def one_by_one(self) -> Iterator[str]:
        for sampling in SAMPLING:
            found = []
            for kind, prompts in self.prompts.items():
                ratios, ms = self.ratios([[prompt] for prompt in prompts], sampling, _token_s)
                found.append(ratios)
                yield _row(f"{kind}, {sampling}", ms / len(prompts), ratios)
            means = {name: prod(ratios[name] for ratios in found) ** (1 / len(found)) for name in self.drafters}
            yield _row(f"all, {sampling} (geometric mean)", None, means)

    def at_once(self) -> Iterator[str]:
        mixed = [prompt for prompts in zip(*self.prompts.values(), strict=False) for prompt in prompts]
        random.Random(0).shuffle(mixed)
        for sampling in SAMPLING:
            for size in (1, 2, 4, 8, 16):
                if size in self.sizes and size <= self.llm.engine.max_batch_size:
                    group = [mixed[i % len(mixed)] for i in range(max(3 * size, 12))]
                    ratios, ms = self.ratios([group], sampling, partial(_token_s, num_at_once=size))
                    yield _row(f"{size} at once, {sampling}", ms, ratios)


def _token_s(session: Session, requests: list[Request], num_at_once: int = 1) -> float:
    """Seconds for a token while `num_at_once` requests run, or fewer only before the first step."""
    drafter = session.opened.drafter if session.opened is not None else None
    leader = Scheduler(session.engine, drafter, session.max_draft_len)
    waiting = deque(Sequence.start(request) for request in requests)
    num_tokens, start = 0, time.perf_counter()
    while True:
        while waiting and len(leader.running) + len(leader.waiting) < num_at_once:
            leader.add(waiting.popleft())
        stepped = leader.step()
        num_tokens += sum(len(new_tokens) for _, new_tokens in stepped)
        if not waiting and any(sequence.finish_reason for sequence, _ in stepped):
            break  # places become free now
    seconds = time.perf_counter() - start
    leader.release_all()
    return seconds / num_tokens


def _row(what: str, ms: float | None, ratios: dict[str, float]) -> str:
    cells = ["-" if ms is None else f"{ms:.2f}", *(f"{ratio:.3f}" for ratio in ratios.values())]
    return f"| {what} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory, GGUF file, shipped name, or an engine's directory")
    parser.add_argument("data", type=Path, help="directory with spec_bench")
    parser.add_argument("--drafters", default="suffix,both", help=f"of {', '.join(DRAFTERS)}")
    parser.add_argument("--only", choices=["one", "many"], help="one by one, or many at once")
    parser.add_argument("--at-once", default="1,2,4,8,16", help="how many")
    parser.add_argument("--num-prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--num-tokens", type=int, default=256, help="of each output, at most")
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := set(arguments.drafters.split(",")) - set(DRAFTERS):
        raise SpecDecError(f"no such drafter: {', '.join(sorted(unknown))}", hint=f"there are {', '.join(DRAFTERS)}")
    of_model: EngineOptions = {} if is_engine_dir(Path(arguments.model)) else {"max_batch_size": 16}
    with LLM(arguments.model, **of_model) as llm:
        bench = Bench(llm, arguments)
        print(f"| what | ms a token, no drafter | {' | '.join(f'none ÷ {name}' for name in bench.drafters)} |")
        print("|---" * (2 + len(bench.drafters)) + "|")
        for rows in (bench.one_by_one, bench.at_once):
            if arguments.only in (None, {"one_by_one": "one", "at_once": "many"}[rows.__name__]):
                for row in rows():
                    print(row, flush=True)


if __name__ == "__main__":
    main()
