"""Gain of self-drafting for a large model: the demo's drafts, at what another engine's steps cost.

Random weights say nothing of acceptance, and the demo's steps are so cheap that drafts by its copy do not pay. So the
demo answers its articles, and each step that it takes after a prompt, its copy's too, is priced at what a step of as
many tokens took when the other engine was built. Draft lengths and chains go by those prices too. Outputs must be those
without a drafter.

    python -m scripts.bench.self_draft DEMO_ENGINE PRICES_ENGINE [--num-articles 40] [--output-len 64]

Both engines are built with `--self-draft`, the first for drafts of 10 (`--max-draft-len 10`). Prints a Markdown table:
times as fast as without a drafter, and tokens for each of the target's steps, by what is asked for.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

from torch import Tensor

from commands.inputs.dataset import load_samples, summarization_prompt
from runtime.checkpoint.bundle import read_bundle, read_engine_config
from runtime.checkpoint.costs import CostModel
from runtime.core.batch import Row
from runtime.core.request import Request
from runtime.drafters.opened import OpenDrafter
from runtime.drafters.specs import AnySpec, ChainDrafter, NgramDrafter, SelfDrafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.compatibility import TargetIdentity
from runtime.loop.opening import Opening, open_drafter
from runtime.loop.orchestrator import generate
from runtime.text.text import find_end_ids, load_tokenizer

NGRAM = NgramDrafter(10, 2)
DRAFTERS: dict[str, tuple[AnySpec, bool]] = {  # and whether draft lengths are chosen
    "the copy, drafts of 4": (SelfDrafter(4), False),
    "the copy, drafts of 8": (SelfDrafter(8), False),
    "the copy, up to 8, auto": (SelfDrafter(8), True),
    "n-gram, `[10,2]`": (NGRAM, False),
    "n-gram, `[10,2]`, auto": (NGRAM, True),
    "n-gram in front of the copy, 8": (ChainDrafter([NGRAM, SelfDrafter(8)]), False),
    "n-gram in front of the copy, 8, auto": (ChainDrafter([NGRAM, SelfDrafter(8)]), True),
}


class PricedEngine(Engine):
    """An engine whose steps have another's prices."""

    def use_prices_of(self, directory: Path) -> None:
        other = read_engine_config(directory)
        names = ("step_costs", "self_draft_costs", "host_s")
        self.config = dataclasses.replace(self.config, **{name: getattr(other, name) for name in names})
        self.costs = CostModel(other.step_costs, other.host_s)
        self._copy_costs = CostModel(other.self_draft_costs, other.host_s)
        self.seconds = 0.0

    def _forward(self, rows: Seq[Row], *, by_copy: bool = False) -> Tensor:
        costs = self._copy_costs if by_copy else self.costs
        for row in rows:
            if len(row.tokens) == row.num_logits:  # no prompt
                self.seconds += costs.iteration_s(1, row.start, len(row.tokens) - 1)
        return super()._forward(rows, by_copy=by_copy)


@dataclasses.dataclass
class Answers:
    """Answers to one kind of question, by one drafter."""

    outputs: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0


def answer(
    engine: PricedEngine, questions: Iterable[tuple[str, Request]], opened: OpenDrafter | None = None
) -> dict[str, Answers]:
    """One question after the other, each from an empty cache."""
    drafter, draft_len = (opened.drafter, opened.max_draft_len) if opened else (None, None)
    answers: dict[str, Answers] = {}
    for kind, request in questions:
        engine.clear_cache()
        engine.seconds = 0.0
        *_, (sequence, _) = generate(engine, [request], drafter, draft_len)
        mine = answers.setdefault(kind, Answers())
        mine.outputs.append(tuple(sequence.tokens))
        mine.seconds += engine.seconds
        mine.num_tokens += sequence.stats.num_generated_tokens
        mine.num_steps += sequence.stats.num_steps
    return answers


def answer_by(engine: PricedEngine, questions: Iterable[tuple[str, Request]], name: str) -> dict[str, Answers]:
    settings, chooses_lengths = DRAFTERS[name]
    costs = engine.costs if chooses_lengths else None
    assert engine.directory is not None
    target = TargetIdentity(read_bundle(engine.directory), engine.directory, None)
    opening = Opening(engine, costs, KVCacheConfig(), lambda model: Path(model), target)
    with open_drafter(settings, opening) as opened:
        return answer(engine, questions, opened)


def read_questions(engine_dir: Path, num_articles: int, output_len: int) -> list[tuple[str, Request]]:
    """(kind, request) of each."""
    config = read_engine_config(engine_dir)
    tokenizer = load_tokenizer(engine_dir, config.pretrained_config)
    end_ids = find_end_ids(engine_dir, config.pretrained_config, tokenizer)
    samples = load_samples("demo", eval_task="summarize", dataset_dir=None, max_samples=num_articles, seed=0)
    texts = [summarization_prompt(sample.text) for sample in samples]
    return [
        (str(sample.category), Request(i, tuple(tokenizer(text)["input_ids"]), output_len, end_ids))
        for i, (sample, text) in enumerate(zip(samples, texts, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("demo_engine", type=Path)
    parser.add_argument("prices_engine", type=Path)
    parser.add_argument("--num-articles", type=int, default=40)
    parser.add_argument("--output-len", type=int, default=64)
    arguments = parser.parse_args()
    with PricedEngine.open(arguments.demo_engine) as engine:
        engine.use_prices_of(arguments.prices_engine)
        questions = read_questions(arguments.demo_engine, arguments.num_articles, arguments.output_len)
        alone = answer(engine, questions)
        print(f"| | {' | '.join(f'{kind}: times as fast | tokens per step' for kind in alone)} |")
        print("|---" * (1 + 2 * len(alone)) + "|")
        for name in DRAFTERS:
            answers = answer_by(engine, questions, name)
            cells = []
            for kind, one in answers.items():
                if one.outputs != alone[kind].outputs:
                    raise SystemExit(f"outputs differ from those without a drafter: {name}, {kind}")
                cells += [f"{alone[kind].seconds / one.seconds:.2f}", f"{one.num_tokens / one.num_steps:.1f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
