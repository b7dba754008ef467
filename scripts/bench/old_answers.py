"""Tokens a step where the same questions come again, and what old answers cost where nothing comes again.

python -m scripts.bench.old_answers smollm2.gguf ../shared/data/spec_bench/question.jsonl

Fifty questions of Spec-Bench are asked twice at temperature 0.7 by the same seed, then twice greedily. Then five of the
fifty are replaced by other questions, and then each question has a tenth of its words replaced. Last, other questions
are asked with lookups and old answers, and with lookups alone, in turns.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from runtime.core.params import SamplingParams
from runtime.drafters.specs import AnswerDrafter, ChainDrafter, SuffixDrafter
from runtime.llm import LLM
from runtime.text.chat import TemplateInputs

LOOKUPS = SuffixDrafter(10)
BOTH = ChainDrafter([LOOKUPS, AnswerDrafter(10)])
MOST_CHARACTERS = 900
PARTS = ["sampled", "same", "changed", "nothing"]


def read_questions(path: Path) -> list[str]:
    questions = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
    return [question for question in questions if len(question) < MOST_CHARACTERS]


def exchange(question: str, words: list[str], rng: random.Random) -> str:
    """The question with other words in the place of a tenth of its words, at least one."""
    own = question.split()
    for i in rng.sample(range(len(own)), max(round(len(own) / 10), 1)):
        own[i] = rng.choice(words)
    return " ".join(own)


class Asked:
    """Questions asked of one model, in the mode of draft lengths that is given."""

    def __init__(self, llm: LLM, mode: Any, num_tokens: int) -> None:
        self.llm, self.mode, self.num_tokens = llm, mode, num_tokens

    def ask(self, questions: list[str], drafter: Any, **sampling: Any) -> tuple[float, float]:
        """(tokens a step, seconds) of all questions."""
        encode = self.llm.chat_template.encode
        prompts = [encode([{"role": "user", "content": text}], TemplateInputs()) for text in questions]
        params = SamplingParams(max_tokens=self.num_tokens, **({"temperature": 0.0} | sampling))
        start = time.perf_counter()
        results = self.llm.generate(prompts, params, drafter=drafter, draft_len_mode=self.mode)
        seconds = time.perf_counter() - start
        stats = [result.outputs[0].stats for result in results]
        return sum(one.num_generated_tokens for one in stats) / sum(one.num_steps for one in stats), seconds

    def forget(self, drafter: Any) -> None:
        self.llm.session(drafter, self.mode).clear_pools()
        self.llm.engine.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("parts", nargs="*", help=f"which of these, else all: {', '.join(PARTS)}")
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--mode", choices=["auto", "fixed"], default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing, where nothing comes again")
    given = parser.parse_args()
    given.parts = given.parts or PARTS
    found = read_questions(given.questions)
    every = len(found) // given.number
    questions, others = found[::every][: given.number], found[1::every][: given.number]
    words, rng = sorted({word for question in found for word in question.split()}), random.Random(1)
    with LLM(given.model, max_batch_size=given.batch, max_seq_len=1024) as llm:
        asked = Asked(llm, given.mode, given.tokens)

        def tell(what: str, questions: list[str], **sampling: Any) -> None:
            print(f"{what}: {asked.ask(questions, BOTH, **sampling)[0]:.2f} tokens a step", flush=True)

        if "sampled" in given.parts:
            for what in ("temperature 0.7", "again"):
                tell(what, questions, temperature=0.7, seed=3)
            asked.forget(BOTH)
        if {"same", "changed"} & {*given.parts}:
            tell("first", questions)
        if "same" in given.parts:
            tell("again", questions)
        if "changed" in given.parts:
            num_new = len(questions) // 10
            tell("a tenth of the questions others", [*others[:num_new], *questions[num_new:]])
            tell("a tenth of each question's words others", [exchange(one, words, rng) for one in questions])
        if "nothing" in given.parts:
            compare(asked, others, given.rounds)


def compare(asked: Asked, questions: list[str], rounds: int) -> None:
    """Print how fast questions that do not come again are answered, with old answers and without, in turns."""
    ratios = []
    for i in range(rounds):
        seconds = {}
        for drafter in (BOTH, LOOKUPS) if i % 2 else (LOOKUPS, BOTH):
            asked.forget(drafter)
            seconds[drafter] = asked.ask(questions, drafter)[1]
        ratios.append(seconds[LOOKUPS] / seconds[BOTH])
    print(f"nothing again: {statistics.median(ratios):.3f} times as fast as lookups alone, of {ratios}", flush=True)


if __name__ == "__main__":
    main()
