"""Tokens per step of the demo with its trained head, on its held-out articles: drafts of fixed lengths, greedy.

Those of docs/trained-drafters.md.

    python -m scripts.bench.demo_head [HEAD_DIR]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from scripts.tools.demo_report import OUTPUT_LEN, prompt_ids, read_articles
from specdec_cli import LLM, ChainDrafter, EagleDrafter, NgramDrafter, SamplingParams

ARTICLES = Path("runtime/demo/articles.jsonl")
TOKENIZER = Path("runtime/demo/target")


def drafters(head: str) -> Iterator[tuple[str, NgramDrafter | EagleDrafter | ChainDrafter]]:
    lookup = NgramDrafter(10, 2)
    yield "n-gram lookup, [10,2]", lookup
    for draft_len in range(1, 6):
        yield f"the head, drafts of {draft_len}", EagleDrafter(head, draft_len)
    yield "lookup, then the head, drafts of 4", ChainDrafter([lookup, EagleDrafter(head, 4)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", nargs="?", default="demo-head")
    head = parser.parse_args().head
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    llm = LLM("demo", head=head, dtype="bfloat16")
    greedy = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN)
    articles = read_articles(ARTICLES)
    for category in ("describe", "digest"):
        prompts = [prompt_ids(one, tokenizer) for one in articles if one["category"] == category]
        for name, drafter in drafters(head):
            outputs = llm.generate(prompts, greedy, drafter=drafter, draft_len_mode="fixed")
            num_tokens = sum(len(one.token_ids) for one in outputs)
            num_steps = sum(one.stats.num_steps for one in outputs)
            print(f"{category}: {name}: {num_tokens:,} tokens in {num_steps:,} steps, {num_tokens / num_steps:.2f}")


if __name__ == "__main__":
    main()
