"""Prompts to train the demo's head on: articles of the kinds that the demo was trained on.

They are of the standard library, and of those packages of `train_demo_corpus.txt` that DIR has in the versions listed.

    python -m scripts.tools.demo_head_prompts --output prompts.jsonl [--corpus-dir DIR] [--num-prompts 3000] [--seed 0]
    specdec train --model-dir demo --input-file prompts.jsonl --output-dir runtime/demo/head …

Items of the held-out articles are left out, by their first sentences, so that what is measured on those articles is
measured on text that the head has not seen. `runtime/demo/head/README.md` has the command that made the shipped head.
"""

import argparse
import json
import random
from importlib.metadata import distributions
from pathlib import Path

from scripts.tools.demo_corpus import (
    Item,
    Package,
    corpus_files,
    describable,
    make_describe,
    make_digest,
    module_items,
    normalised_name,
    prompt_text,
    read_packages,
)

ARTICLES = Path("runtime/demo/articles.jsonl")
CORPUS_LIST = Path(__file__).with_name("train_demo_corpus.txt")


def held_out_sentences(articles: Path) -> set[str]:
    """First sentences of all items that a held-out article is made of."""
    found: set[str] = set()
    for line in articles.read_text(encoding="utf-8").splitlines():
        for reference in json.loads(line)["highlights"].split("\n"):
            found |= {reference, reference.partition(": ")[2]}
    return found - {""}


def packages_in(corpus_dir: Path) -> list[Package]:
    """Packages of the pinned list that are installed there in their versions."""
    found = {normalised_name(one): one.version for one in distributions(path=[str(corpus_dir)])}
    return [one for one in read_packages(CORPUS_LIST) if found.get(one.name) == one.version]


def read_modules(corpus_dir: Path | None, held_out: set[str]) -> list[list[Item]]:
    """Items of each module, the held-out ones left out."""
    packages = [] if corpus_dir is None else packages_in(corpus_dir)
    modules = []
    for package, module, path in corpus_files(corpus_dir or Path(), packages):
        items = [item for item in module_items(f"{package} {module}", path) if item.sentence not in held_out]
        if len(items) >= 2:
            modules.append(items)
    return modules


def make_prompts(modules: list[list[Item]], num_prompts: int, seed: int) -> list[dict[str, str]]:
    """Two in five digests, the others descriptions, each once."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    pool = [item for items in modules for item in items if describable(item)]
    while len(found) < num_prompts:
        is_digest = len(found) % 5 < 2
        pair = make_digest(rng.choice(modules), rng, min_items=1) if is_digest else make_describe(rng.choice(pool), rng)
        found.setdefault(prompt_text(pair.article), pair.category)
    return [{"prompt": prompt, "category": category} for prompt, category in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--corpus-dir", type=Path, help="where packages of the demo's corpus are installed")
    parser.add_argument("--num-prompts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    modules = read_modules(arguments.corpus_dir, held_out_sentences(ARTICLES))
    prompts = make_prompts(modules, arguments.num_prompts, arguments.seed)
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    arguments.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(prompts)} prompts of {len(modules)} modules: {arguments.output}")


if __name__ == "__main__":
    main()
