"""Real models' greedy outputs are the same with every kind of lookup: the shipped demo target, and stories260k."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lookups import MAKE_DRAFTER
from shared import shared_engine
from tiny import hf_greedy
from transformers import AutoModelForCausalLM

from runtime import orchestrator, scheduler
from runtime.engine import Engine
from runtime.files import read_json
from runtime.models import resolve_model
from runtime.request import Request, Sequence

STORIES_DIR = Path(__file__).parents[2] / "../shared/data/stories260k"
NUM_NEW_TOKENS = 60
LOOPS: dict[str, Any] = {"orchestrator": orchestrator, "leader": scheduler}


def open_engine(model_dir: Path, engines_dir: Path) -> Engine:
    return Engine.open(shared_engine(engines_dir, model_dir, dtype="float32", max_input_len=128, max_seq_len=256))


def outputs(steps: Iterable[tuple[Sequence, list[int]]]) -> dict[int, list[int]]:
    return {s.request.id: s.output_tokens for s, _ in steps if s.finish_reason is not None}


@pytest.fixture(scope="module")
def demo(shared: Path) -> Iterator[tuple[Engine, list[Request], dict[int, list[int]]]]:
    """The demo target, five prompts made of token ids that come again and again, and Hugging Face's answers."""
    model_dir = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (30 + 10 * i,), generator=generator).tolist() for i in range(5)]
    requests = [Request(i, tuple(prompt), NUM_NEW_TOKENS) for i, prompt in enumerate(prompts)]
    expected = {i: hf_greedy(model, prompt, NUM_NEW_TOKENS) for i, prompt in enumerate(prompts)}
    with open_engine(model_dir, shared / "engines") as engine:
        yield engine, requests, expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", MAKE_DRAFTER)
def test_demo_answers_as_hugging_face_does(
    drafter: str, loop: str, demo: tuple[Engine, list[Request], dict[int, list[int]]]
) -> None:
    engine, requests, expected = demo
    assert outputs(LOOPS[loop].generate(engine, requests, MAKE_DRAFTER[drafter](), 10)) == expected


@pytest.fixture(scope="module")
def stories(shared: Path) -> Iterator[Engine]:
    with open_engine(STORIES_DIR, shared / "engines") as engine:
        yield engine


@pytest.mark.skipif(not STORIES_DIR.is_dir(), reason="shared data stories260k is absent")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", MAKE_DRAFTER)
def test_stories260k_equals_its_reference(drafter: str, loop: str, stories: Engine) -> None:
    reference = read_json(STORIES_DIR / "reference.json")
    requests = [Request(i, tuple(reference["prompt_ids"]), len(reference["greedy_ids"])) for i in range(3)]
    generated = outputs(LOOPS[loop].generate(stories, requests, MAKE_DRAFTER[drafter](), 10))
    assert generated == dict.fromkeys(range(3), reference["greedy_ids"])
