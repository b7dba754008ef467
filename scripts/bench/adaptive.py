"""Is `--draft-len-mode auto` ever slower than no drafter? The demo target on prompts it never learned, by category.

Every prompt is answered greedily without a drafter, with drafts of a fixed length and with `auto`, in turns, `--runs`
times, each with an empty cache; of each the fastest run counts. Ratios are of wall times added up over a category.

    python -m scripts.bench.adaptive ../shared/data [--num-prompts 40] [--runs 5] [--work-dir DIR]
"""

import argparse
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.bundle import read_engine_config
from runtime.checkpoint.config import BuildConfig
from runtime.checkpoint.costs import CostModel
from runtime.checkpoint.resolve import resolve_model
from runtime.core.request import Request
from runtime.core.stats import LoopTimes, RequestStats, sum_stats
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.engine.engine import Engine, resolve_device
from runtime.loop.scheduler import generate
from runtime.text.text import find_end_ids, load_tokenizer

DRAFT_LEN, MAX_INPUT_LEN, OUTPUT_LEN = 10, 900, 100


def read_prompts(data: Path, num_prompts: int) -> dict[str, list[str]]:
    """Texts by category: HumanEval's, GSM8K's, and the tasks of Spec-Bench."""
    prompts: dict[str, list[str]] = defaultdict(list)
    with gzip.open(data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        prompts["humaneval"] = [json.loads(line)["prompt"] for line in file]
    for line in (data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        prompts["gsm8k"].append(json.loads(line)["question"])
    for line in (data / "spec_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompts[row["category"]].append(row["turns"][0])
    return {category: texts[:num_prompts] for category, texts in prompts.items()}


def make_engine(work_dir: Path) -> Path:
    engine_dir, device = work_dir / "engine", resolve_device("cpu", 0)
    if not engine_dir.exists():
        convert(resolve_model("demo"), work_dir / "ckpt", None, replace=True, progress=lambda *_: None)
        build = BuildConfig("aot", 4, MAX_INPUT_LEN, 1024 + DRAFT_LEN, DRAFT_LEN, 32, "draft_tokens_external")
        build_engine(work_dir / "ckpt", engine_dir, build, device, replace=False, phase=lambda _: None)
    return engine_dir


@dataclass
class System:
    """One way to draft; its drafters live through a category, one for each run."""

    make: Callable[[], Drafter | None]
    drafters: list[Drafter | None] = field(default_factory=list)
    wall_s: float = 0.0
    stats: list[RequestStats] = field(default_factory=list)

    def answer(self, engine: Engine, request: Request, run: int) -> tuple[float, list[int]]:
        """Seconds, and the tokens."""
        if run == len(self.drafters):
            self.drafters.append(self.make())
        engine.clear_cache()
        times = LoopTimes()
        *_, (sequence, _) = generate(engine, [request], self.drafters[run], DRAFT_LEN, times)
        if run == 0:
            self.stats.append(sequence.stats)
        return times.wall_s, sequence.tokens


def answer_all(engine: Engine, systems: list[System], requests: list[Request], runs: int) -> None:
    for request in requests:
        answers = [[system.answer(engine, request, run) for system in systems] for run in range(runs)]
        if len({tuple(tokens) for row in answers for _, tokens in row}) != 1:
            raise SystemExit(f"outputs differ between drafters: prompt {request.id}")
        for i, system in enumerate(systems):
            system.wall_s += min(row[i][0] for row in answers)


def table_row(category: str, none: System, fixed: System, auto: System) -> str:
    counts = [sum_stats(system.stats).counts(DRAFT_LEN) for system in (fixed, auto)]
    speedups = [f"{none.wall_s / system.wall_s:.2f}" for system in (fixed, auto)]
    rates = " / ".join(f"{c['tokens_per_step']:.2f}" for c in counts)
    accepted = " / ".join(f"{c['draft_acceptance_rate'] or 0.0:.2f}" for c in counts)
    return f"| {' | '.join([category, str(len(none.stats)), *speedups, rates, accepted])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="directory with humaneval, gsm8k and spec_bench")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each category")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work-dir", type=Path, help="keeps the engine for the next run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        engine_dir = make_engine(arguments.work_dir or Path(temporary))
        config = read_engine_config(engine_dir)
        tokenizer = load_tokenizer(engine_dir, config.pretrained_config)
        end_ids = find_end_ids(engine_dir, config.pretrained_config, tokenizer)
        costs = CostModel(config.step_costs, config.host_s)
        print("| category | prompts | speedup, fixed | speedup, auto | tokens per step | acceptance rate |")
        print("|---|---|---|---|---|---|")
        with Engine.open(engine_dir) as engine:
            for category, texts in read_prompts(arguments.data, arguments.num_prompts).items():
                prompts = [tuple(tokenizer(text)["input_ids"][-MAX_INPUT_LEN:]) for text in texts]
                requests = [Request(i, prompt, OUTPUT_LEN, end_ids) for i, prompt in enumerate(prompts)]
                none, fixed = System(lambda: None), System(SuffixLookup)
                auto = System(lambda: AdaptiveDrafter(SuffixLookup(), costs.iteration_s))
                answer_all(engine, [none, fixed, auto], requests, arguments.runs)
                print(table_row(category, none, fixed, auto), flush=True)


if __name__ == "__main__":
    main()
