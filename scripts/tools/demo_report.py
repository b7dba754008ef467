"""Scores of the demo's models on the held-out articles, and the files that say so.

Independent of the toolkit: greedy generation is transformers' own in float32, ROUGE is the rouge_score
package, and tokens per step come from replaying prompt lookup over the greedy output.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from scripts.tools.demo_corpus import first_sentence, prompt_text

OUTPUT_LEN, MAX_NGRAM, DRAFT_LEN, BATCH_SIZE = 100, 2, 10, 22
METRICS = ["rouge1", "rouge2", "rougeL"]

Article = dict[str, str]


def read_articles(path: Path) -> list[Article]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluate(target_dir: Path, draft_dir: Path | None, articles: list[Article]) -> dict[str, Any]:
    """Figures per category: ROUGE and tokens per step of the target; NLL of it, and of the draft model, if any."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    target, draft = load_model(target_dir), None if draft_dir is None else load_model(draft_dir)
    outputs = generate_all(target, tokenizer, articles)
    texts = {key: str(tokenizer.decode(row, skip_special_tokens=True)) for key, row in outputs.items()}
    figures: dict[str, Any] = {
        "outputs": texts,
        "output_len": OUTPUT_LEN,
        "max_matching_ngram_size": MAX_NGRAM,
        "max_draft_len": DRAFT_LEN,
        "rouge_score": version("rouge_score"),
    }
    for category in ("digest", "describe"):
        chosen = [article for article in articles if article["category"] == category]
        figures[category] = {
            "num_articles": len(chosen),
            **rouge([texts[article["id"]] for article in chosen], chosen),
            **lookup_figures([(prompt_ids(a, tokenizer), outputs[a["id"]]) for a in chosen]),
            "target_nll": reference_nll(target, tokenizer, chosen),
            "baseline": rouge([first_sentence_baseline(article["article"]) for article in chosen], chosen),
        }
        if draft is not None:
            figures[category]["draft_model_agreement"] = agreement(draft, tokenizer, chosen, outputs)
            figures[category]["draft_nll"] = reference_nll(draft, tokenizer, chosen)
    return figures


def load_model(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def prompt_ids(article: Article, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(prompt_text(article["article"]))["input_ids"])


@torch.inference_mode()
def generate_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, articles: list[Article]
) -> dict[str, list[int]]:
    """Greedy output tokens of each article by its id, the end token included where it was reached."""
    tokenizer.padding_side = "left"
    by_length = sorted(articles, key=lambda article: len(article["article"]))
    outputs: dict[str, list[int]] = {}
    for start in range(0, len(by_length), BATCH_SIZE):
        batch = by_length[start : start + BATCH_SIZE]
        inputs = tokenizer([prompt_text(a["article"]) for a in batch], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        generated = model.generate(**inputs, max_new_tokens=OUTPUT_LEN, do_sample=False)  # type: ignore[operator]  # a mixin's method, untyped
        for article, row in zip(batch, generated[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            outputs[article["id"]] = up_to_end(row, tokenizer.eos_token_id)
    return outputs


def up_to_end(tokens: list[int], end_id: int) -> list[int]:
    """The tokens up to the first end token, which is kept."""
    return tokens[: tokens.index(end_id) + 1] if end_id in tokens else tokens


def rouge(predictions: list[str], articles: list[Article]) -> dict[str, float]:
    """Mean F-measure times 100 of each metric."""
    scorer = RougeScorer(METRICS)
    references = [article["highlights"] for article in articles]
    scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
    return {metric: 100 * sum(score[metric].fmeasure for score in scores) / len(scores) for metric in METRICS}


def first_sentence_baseline(article: str) -> str:
    """The article's first sentence; its first line where that is code."""
    sentence = first_sentence(article)
    return sentence if sentence.endswith(".") else article.split("\n")[0]


def lookup_figures(rows: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Generated tokens, steps (the context step included) and tokens per step of prompt lookup."""
    num_tokens = sum(len(output) for _, output in rows)
    num_steps = sum(replay_steps(prompt, output) for prompt, output in rows)
    return {"num_tokens": num_tokens, "num_steps": num_steps, "tokens_per_step": num_tokens / num_steps}


def replay_steps(prompt: list[int], output: list[int]) -> int:
    """Target steps of prompt lookup until a known greedy output is there; the context step yields a token."""
    num_steps, num_done = 1, 1
    while num_done < len(output):
        draft = lookup(prompt + output[:num_done])
        pairs = zip(draft, output[num_done:], strict=False)
        num_done += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_steps += 1
    return num_steps


def lookup(tokens: list[int]) -> list[int]:
    """The `DRAFT_LEN` tokens after the earliest occurrence of the last 2 tokens, or else of the last.

    `lookup([5, 6, 7, 8, ..., 5, 6])` is `[7, 8, ...]`; one with fewer tokens after it is passed over.
    """
    for size in range(MAX_NGRAM, 0, -1):
        for i in range(len(tokens) - size - DRAFT_LEN + 1):
            if tokens[i : i + size] == tokens[-size:]:
                return tokens[i + size : i + size + DRAFT_LEN]
    return []


@torch.inference_mode()
def reference_nll(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, articles: list[Article]) -> float:
    """Mean negative log-likelihood in nats of a reference token given the prompt, end token included."""
    losses: list[torch.Tensor] = []
    for article in articles:
        prompt = prompt_ids(article, tokenizer)
        reference = tokenizer.encode(" " + article["highlights"], add_special_tokens=False)
        reference.append(tokenizer.eos_token_id)
        logits = model(torch.tensor([prompt + reference])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(reference), reduction="none"))
    return torch.cat(losses).mean().item()


@torch.inference_mode()
def agreement(
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    articles: list[Article],
    outputs: dict[str, list[int]],
) -> float:
    """Share of the target's greedy tokens that are also the draft model's argmax after the same tokens."""
    hits: list[torch.Tensor] = []
    for article in articles:
        prompt, output = prompt_ids(article, tokenizer), outputs[article["id"]]
        logits = draft(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        hits.append(logits.argmax(-1) == torch.tensor(output))
    return torch.cat(hits).float().mean().item()


CARD = """\
# specdec demo: {name} model

{role}
A {family} of {num_parameters:,} parameters ({num_layers} layers, {width} wide, vocabulary {vocab_size}), trained
from scratch by `scripts/tools/train_demo.py` to write two kinds of summaries of Python documentation:

- `digest`: the article is 2 to 5 documented functions or classes; the summary names each with its first
  sentence. Nearly all of it can be copied.
- `describe`: the article is a docstring without its first sentence, or a function's code; the summary is that
  sentence. Little of it can be copied.

It knows nothing else: it is meant for trying speculative decoding on any machine. The prompt is the article
followed by ` TL;DR:`; the summary follows after a space. It was trained on rows of up to
{max_row_tokens:,} tokens.

## Training

| | |
|---|---|
{training}

## Evaluation

On {num_articles} held-out articles (`articles.jsonl`): no item of a held-out module stands in the training
data, compared by normalised name with first sentence, by docstring, and by code. Weights as shipped, computed
in float32.

{evaluation}

## Source of the text

Docstrings and code of the Python standard library and of the packages listed in `NOTICE`.
"""

ROLES = {
    "target": "The demo's target: the model whose output speculative decoding reproduces.",
    "draft": "The demo's draft model: it drafts for the demo's target, whose tokenizer it shares.",
    "hybrid": "A target whose layers have recurrent states, of the demo's size, with its tokenizer.",
}


def model_card(name: str, training: dict[str, Any], figures: dict[str, Any] | None) -> str:
    """The model's README; without figures it says that the model was not evaluated."""
    rows = [f"| {key.replace('_', ' ')} | {value} |" for key, value in training["table"].items()]
    table = "\n".join(draft_rows(figures) if name == "draft" else target_rows(figures)) if figures else ""
    return CARD.format(
        name=name,
        role=ROLES[name],
        training="\n".join(rows),
        evaluation=table or "Not evaluated: an unfinished checkpoint.",
        num_articles=training["num_articles"],
        **training["shape"],
    )


def target_rows(figures: dict[str, Any]) -> Iterator[str]:
    """A table of the target's figures per category."""
    digest, describe = figures["digest"], figures["describe"]
    yield "| | digest | describe |\n|---|---|---|"
    for metric, label in zip(METRICS, ("ROUGE-1", "ROUGE-2", "ROUGE-L"), strict=True):
        yield f"| {label} | {digest[metric]:.1f} | {describe[metric]:.1f} |"
    for metric, label in zip(METRICS, ("ROUGE-1", "ROUGE-2", "ROUGE-L"), strict=True):
        baseline = (digest["baseline"][metric], describe["baseline"][metric])
        yield f"| {label} of the article's first sentence | {baseline[0]:.1f} | {baseline[1]:.1f} |"
    for key, label in (
        ("tokens_per_step", "tokens per step"),
        ("target_nll", "NLL per reference token (nats)"),
    ):
        yield f"| {label} | {digest[key]:.2f} | {describe[key]:.2f} |"
    yield f"| articles | {digest['num_articles']} | {describe['num_articles']} |"
    counts = [f"{figures[c]['num_tokens']} / {figures[c]['num_steps']}" for c in ("digest", "describe")]
    yield f"| generated tokens / steps | {counts[0]} | {counts[1]} |"
    yield (
        f"\nGreedy, at most {figures['output_len']} tokens; ROUGE: mean F-measure of rouge_score"
        f" {figures['rouge_score']} without stemming. Tokens per step: prompt lookup with at most"
        f" {figures['max_matching_ngram_size']}-grams and {figures['max_draft_len']} draft tokens, replayed"
        " over the greedy output; the context step and the end token are counted."
    )


def draft_rows(figures: dict[str, Any]) -> Iterator[str]:
    """A table of the draft model's figures per category, beside the target's."""
    yield "| | digest | describe |\n|---|---|---|"
    for key, label in (("draft_nll", "draft model"), ("target_nll", "target")):
        values = [f"{figures[category][key]:.2f}" for category in ("digest", "describe")]
        yield f"| NLL per reference token (nats), {label} | {values[0]} | {values[1]} |"
    shares = [f"{100 * figures[category]['draft_model_agreement']:.1f} %" for category in ("digest", "describe")]
    yield f"| the target's greedy tokens that are the draft model's argmax | {shares[0]} | {shares[1]} |"
