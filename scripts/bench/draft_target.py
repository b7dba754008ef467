"""Draft-Target-Model speculation on the demo pair, beside n-gram lookup and no drafter, and why it wins or loses.

Every held-out article is answered greedily by each system in turn, in one run, each with an empty cache. Then the
terms of the cost model are measured: with T(m) the time of a target step of m tokens, c the time of a draft token
and h what a step costs beyond compiled code, both in units of T(1), E tokens per step and draft length g,

    speedup = E / (g c + T(g + 1) / T(1) + h)        (Leviathan et al., arXiv 2211.17192, with a measured T)

so speculation pays below c = (E - T(g + 1) / T(1) - h) / g.

    python -m scripts.bench.draft_target [--max-samples 220] [--dtype float32] [--work-dir DIR]
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from commands.inputs.dataset import load_samples, summarization_prompt
from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig
from runtime.checkpoint.resolve import resolve_model
from runtime.core.batch import Row, pack
from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes, RequestStats, sum_stats
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.text.text import find_end_ids, load_tokenizer
from scripts.bench.step import alternate

DRAFT_LEN, CONTEXT, OUTPUT_LEN = 4, 300, 100


@dataclass
class System:
    """One way to answer, and what was counted on the way, by category."""

    name: str
    drafter: Drafter | None
    max_draft_len: int
    times: dict[str, LoopTimes] = field(default_factory=dict)
    stats: dict[str, list[RequestStats]] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)

    def answer(self, engine: Engine, request: Request, category: str) -> None:
        times = self.times.setdefault(category, LoopTimes())
        *_, (sequence, _) = generate(engine, [request], self.drafter, self.max_draft_len, times)
        self.stats.setdefault(category, []).append(sequence.stats)
        self.outputs.append(sequence.output_tokens)

    def wall_s(self, categories: list[str]) -> float:
        return sum(self.times[category].wall_s for category in categories)

    def total(self, categories: list[str]) -> RequestStats:
        return sum_stats(stats for category in categories for stats in self.stats[category])


def make_engine(name: str, max_draft_len: int, dtype: str, work_dir: Path) -> Path:
    engine_dir = work_dir / f"engine-{name}-{dtype}"
    if not engine_dir.exists():
        checkpoint_dir = work_dir / f"ckpt-{name}-{dtype}"
        convert(resolve_model(name), checkpoint_dir, dtype, replace=True, progress=lambda *_: None)  # type: ignore[arg-type]
        mode = "draft_tokens_external" if max_draft_len else "none"
        build = BuildConfig("aot", 4, 1024, 1536 + max_draft_len, max_draft_len, 32, mode)
        build_engine(checkpoint_dir, engine_dir, build, torch.device("cpu"), replace=False, phase=lambda _: None)
    return engine_dir


def step_of(engine: Engine, num_tokens: int) -> Callable[[], object]:
    """The compiled step alone, after CONTEXT tokens."""
    blocks = list(range(1, 1 + -(-(CONTEXT + num_tokens) // 32)))
    batch = pack([Row([5] * num_tokens, CONTEXT, blocks, num_tokens)], 32, engine.device)

    def call() -> None:
        with torch.inference_mode():
            engine._step(*batch.tensors(), *engine._pool.tensors())

    return call


def print_systems(systems: list[System]) -> None:
    all_categories = list(systems[0].times)
    print("| | samples | tokens per step | accepted / drafted | acceptance rate | wall time | speedup |")
    print("|---|---|---|---|---|---|---|")
    for categories in (all_categories, *([category] for category in all_categories)):
        for system in systems:
            total, wall_s = system.total(categories), system.wall_s(categories)
            counts = total.counts(system.max_draft_len)
            rate = counts["draft_acceptance_rate"]
            print(
                f"| {system.name}, {' and '.join(categories)} | {sum(len(system.stats[c]) for c in categories)} "
                f"| {counts['tokens_per_step']:.2f} "
                f"| {total.num_accepted_draft_tokens:,} / {total.num_draft_tokens:,} "
                f"| {'-' if rate is None else f'{rate:.3f}'} | {wall_s:.2f} s "
                f"| {systems[0].wall_s(categories) / wall_s:.2f} |"
            )
    for system in systems[1:]:
        same = sum(a == b for a, b in zip(system.outputs, systems[0].outputs, strict=True))
        print(f"\n{system.name}: {same} of {len(system.outputs)} outputs token for token those without a drafter")


def drafting(drafter: DraftModel) -> Callable[[], object]:
    """A proposal of DRAFT_LEN tokens after some CONTEXT tokens, the one before accepted whole."""
    sequence = Sequence.start(Request(-1, (5,) * CONTEXT, 1000))

    def call() -> None:
        (draft,) = drafter.propose([sequence], DRAFT_LEN)
        sequence.tokens += [*draft.tokens, 7]

    return call


def print_costs(target: Engine, system: System) -> None:
    """The terms in the generation phase; the formula leaves prompts out."""
    drafter, categories = system.drafter, list(system.times)
    assert isinstance(drafter, DraftModel)
    calls = {
        "target 1": step_of(target, 1),
        "target 5": step_of(target, DRAFT_LEN + 1),
        "draft 1": step_of(drafter.engine, 1),
        "draft": drafting(drafter),
    }
    ms = alternate(calls, 150)
    drafter.forget(-1)
    total, times = system.total(categories), LoopTimes()
    for category in categories:
        times.add(system.times[category])
    unit, draft_token, host = ms["target 1"], ms["draft"] / DRAFT_LEN, times.host_time_s / times.num_iterations * 1e3
    c, v, h = draft_token / unit, ms["target 5"] / unit, host / unit
    num_drafted, tokens_per_step = (
        total.num_draft_tokens / total.num_steps,
        total.num_generated_tokens / total.num_steps,
    )
    print(f"\n| cost term, context {CONTEXT} | ms | in target steps |\n|---|---|---|")
    print(f"| target step, 1 token | {unit:.2f} | 1 |")
    print(f"| target step, {DRAFT_LEN + 1} tokens | {ms['target 5']:.2f} | {v:.2f} |")
    print(f"| draft step, 1 token | {ms['draft 1']:.2f} | {ms['draft 1'] / unit:.2f} |")
    print(f"| a draft token, all told (c) | {draft_token:.2f} | {c:.2f} |")
    print(f"| host, a step (h) | {host:.2f} | {h:.2f} |")
    print(f"\ntokens per step {tokens_per_step:.2f}, draft tokens per step {num_drafted:.2f}")
    print(f"speedup by the formula: {tokens_per_step / (num_drafted * c + v + h):.2f}")
    print(f"pays below c = {(tokens_per_step - v - h) / num_drafted:.2f}")
    sizes = {name: _num_parameters(name) / 1e6 for name in ("demo", "demo-draft")}
    print(f"parameters: target {sizes['demo']:.1f} M, draft {sizes['demo-draft']:.1f} M")


def _num_parameters(name: str) -> int:
    from safetensors import safe_open

    with safe_open(next(resolve_model(name).glob("*.safetensors")), "pt") as weights:
        return sum(weights.get_tensor(key).numel() for key in weights.keys())  # noqa: SIM118  # not a dict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-samples", type=int, default=220)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--work-dir", type=Path, help="keeps the engines for the next run")
    arguments = parser.parse_args()
    samples = load_samples("demo", eval_task="summarize", dataset_dir=None, max_samples=arguments.max_samples, seed=0)
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = arguments.work_dir or Path(temporary)
        work_dir.mkdir(parents=True, exist_ok=True)
        target_dir = make_engine("demo", 10, arguments.dtype, work_dir)
        draft_dir = make_engine("demo-draft", 0, arguments.dtype, work_dir)
        with Engine.open(target_dir) as target, Engine.open(draft_dir) as draft:
            config = target.config
            tokenizer = load_tokenizer(target_dir, config.pretrained_config)
            end_ids = find_end_ids(target_dir, config.pretrained_config, tokenizer)
            draft_target = System(
                f"draft model [{DRAFT_LEN}]", DraftModel(draft, config.vocab_size, use_logits=False), DRAFT_LEN
            )
            systems = [
                System("no drafter", None, 0),
                System("n-gram [4,2]", NgramLookup(2), 4),
                System("n-gram [10,2]", NgramLookup(2), 10),
                draft_target,
            ]
            for i, sample in enumerate([samples[0], *samples]):
                tokens = tokenizer(summarization_prompt(sample.text))["input_ids"][-923:]
                request = Request(i, tuple(tokens), OUTPUT_LEN, end_ids)
                for system in systems:
                    target.clear_cache()
                    draft.clear_cache()
                    system.answer(target, request, str(sample.category))
                if i == 0:  # the first is a warm-up
                    for system in systems:
                        system.times, system.stats, system.outputs = {}, {}, []
            print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}\n")
            print_systems(systems)
            print_costs(target, draft_target)


if __name__ == "__main__":
    main()
