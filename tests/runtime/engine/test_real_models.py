"""Real models' greedy outputs are the same with every kind of lookup: the shipped demo target, and stories260k."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lookups import MAKE_DRAFTER
from shared import shared_engine
from tiny import hf_greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.checkpoint.resolve import resolve_model
from runtime.core.request import Request
from runtime.engine.engine import Engine
from runtime.loop import orchestrator, scheduler

ARTICLES = Path(__file__).parents[3] / "runtime/demo/articles.jsonl"
NUM_NEW_TOKENS = 60
LOOPS: dict[str, Any] = {"orchestrator": orchestrator, "leader": scheduler}


def open_engine(model_dir: Path, engines_dir: Path) -> Engine:
    return Engine.open(shared_engine(engines_dir, model_dir, dtype="float32", max_input_len=128, max_seq_len=256))


@pytest.fixture(scope="module")
def demo(shared: Path) -> Iterator[tuple[Engine, list[Request], dict[int, list[int]]]]:
    """The demo target, three prompts made of token ids that come again and again, and Hugging Face's answers."""
    model_dir = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (30 + 10 * i,), generator=generator).tolist() for i in range(3)]
    requests = [Request(i, tuple(prompt), NUM_NEW_TOKENS) for i, prompt in enumerate(prompts)]
    expected = {i: hf_greedy(model, prompt, NUM_NEW_TOKENS) for i, prompt in enumerate(prompts)}
    with open_engine(model_dir, shared / "engines") as engine:
        yield engine, requests, expected


@pytest.mark.parametrize(
    ("loop", "drafter"), [("orchestrator", "oldest"), pytest.param("leader", "suffix", marks=pytest.mark.slow)]
)
def test_trained_layers_with_states_copy_what_they_are_given(loop: str, drafter: str, shared: Path) -> None:
    """Articles whose summaries are nearly all copied: most drafts are accepted, and rolled back where they are not."""
    model_dir = resolve_model("demo-hybrid")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    articles = [json.loads(line) for line in ARTICLES.read_text(encoding="utf-8").splitlines()]
    chosen = sorted((one["article"] for one in articles if one["category"] == "digest"), key=len)[:2]
    requests = [
        Request(i, tuple(tokenizer(f"{article} TL;DR:")["input_ids"]), NUM_NEW_TOKENS)
        for i, article in enumerate(chosen)
    ]
    longest = max(len(request.prompt_tokens) for request in requests)
    build = {"dtype": "float32", "max_input_len": longest, "max_seq_len": longest + NUM_NEW_TOKENS + 10}
    with Engine.open(shared_engine(shared / "engines", model_dir, **build)) as engine:
        steps = LOOPS[loop].generate(engine, requests, MAKE_DRAFTER[drafter](), 10)
        sequences = [sequence for sequence, _ in steps if sequence.finish_reason]
    for sequence in sequences:
        assert sequence.output_tokens == hf_greedy(model, list(sequence.request.prompt_tokens), NUM_NEW_TOKENS)
    num_drafted, num_accepted = (
        sum(getattr(sequence.stats, name) for sequence in sequences)
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert num_accepted >= len(requests) * NUM_NEW_TOKENS // 3 and num_accepted < num_drafted
