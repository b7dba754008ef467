"""Configs of checkpoints as published: each runs as Hugging Face does, or is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published import PUBLISHED, RUN, STDS, load_hugging_face, seed_of, shrunk, write_model, write_random
from sentences import Said
from tiny import build_tiny, hf_greedy, repetitive_prompt, run_convert

from runtime.checkpoint.config import QuantConfig
from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.util.errors import SpecDecError

NUM_NEW_TOKENS = 24
LIMIT, PROMPT_LEN = 24, 90


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_taken_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shrunk(published.config)))
    with pytest.raises(SpecDecError) as error:
        run_convert(tmp_path / "model", tmp_path / "out")
    # What is taken lacks nothing but the weights.
    assert error.value.message.startswith(published.refused or "file is missing: ")
    assert "\n" not in f"{error.value.message}{error.value.hint}"


def check_equal(config: dict[str, Any], prompt: list[int], name: str, work_dir: Path) -> None:
    """Greedy tokens of the built engine, with drafts, are Hugging Face's, which quantizes no activations."""
    expected = write_model(config, work_dir / "model", seed_of(name), prompt=prompt, num_new_tokens=NUM_NEW_TOKENS)
    lengths = {"max_input_len": len(prompt), "max_seq_len": len(prompt) + NUM_NEW_TOKENS + 10}
    precision = QuantConfig(activations="float")
    engine_dir = build_tiny(work_dir / "model", work_dir / "built", dtype="float32", precision=precision, **lengths)
    request = Request(0, tuple(prompt), NUM_NEW_TOKENS)
    with Engine.open(engine_dir) as engine:
        (answer,) = (s.output_tokens for s, _ in generate(engine, [request], NgramLookup(2), 10) if s.finish_reason)
    assert answer == expected


def limit_of(name: str) -> int:
    return PROMPT_LEN + NUM_NEW_TOKENS + 20 if "longrope" in json.dumps(PUBLISHED[name].config) else LIMIT


# Those of other forms are in `test_families.py`, `test_registry.py`, and Qwen3-Next's in `test_split_families.py`.
GREEDY = "Step-3.5-Flash"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == GREEDY else pytest.mark.slow) for name in RUN])
def test_greedy_tokens_are_hugging_faces(name: str, tmp_path: Path) -> None:
    """Past every window, and past the positions that a rope was scaled from; of `longrope` up to them."""
    config = shrunk(PUBLISHED[name].config, limit=limit_of(name))
    check_equal(config, repetitive_prompt(1, PROMPT_LEN, 400), name, tmp_path)


@pytest.mark.slow  # `test_float64_decides_where_transformers_rounds_float32` has a smaller one
@pytest.mark.parametrize("stds", [(0.3, 0.03), (0.15, 0.15)], ids=str)
def test_a_right_engine_is_not_refused_for_what_transformers_rounds_in_float32(
    stds: tuple[float, float], tmp_path: Path
) -> None:
    """Gemma 4 E2B makes 1e-4 and more of float32's last bit with some weights; they were refused."""
    config = shrunk(PUBLISHED["gemma-4-E2B-it"].config, limit=LIMIT, vocab_size=512)
    write_random(config, tmp_path / "model", 1, stds)
    assert build_tiny(tmp_path / "model", tmp_path / "built", dtype="float32").is_dir()


@pytest.mark.parametrize("prompt_len", [LIMIT - 10, pytest.param(LIMIT + 10, marks=pytest.mark.slow)])
def test_phi_moe_goes_past_the_positions_of_its_longrope(prompt_len: int, tmp_path: Path) -> None:
    """Hugging Face's keeps its factors there, and as published their scale too."""
    config = shrunk(PUBLISHED["Phi-3.5-MoE-instruct"].config, limit=LIMIT)
    check_equal(config, repetitive_prompt(1, prompt_len, 400), "Phi-3.5-MoE-instruct", tmp_path)


def test_positions_past_a_longrope_of_two_scales_are_refused_by_number(tmp_path: Path, said: Said) -> None:
    """Hugging Face's scale changes there, of keys computed before too. `test_rotary.py` has factors that change."""
    config = shrunk(PUBLISHED["Phi-3.5-MoE-instruct"].config)
    config["rope_scaling"]["long_mscale"] = 1.5
    write_random(config, tmp_path / "model", 0, STDS[0])
    with pytest.raises(SpecDecError) as raised:
        build_tiny(tmp_path / "model", tmp_path / "built", max_input_len=9, max_seq_len=4107)
    said(raised, "4096", "4097")


def test_the_sample_differs_from_transformers_defaults(tmp_path: Path) -> None:
    """Hugging Face's model of a published config is not that of the class's own rope: the tests above could tell."""
    config = shrunk(PUBLISHED["Llama-3.2-1B-Instruct"].config, limit=LIMIT, vocab_size=512)
    prompt = repetitive_prompt(1, PROMPT_LEN, 400)
    expected = write_model(config, tmp_path / "model", 0, prompt=prompt, num_new_tokens=NUM_NEW_TOKENS)
    del config["rope_scaling"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert hf_greedy(load_hugging_face(tmp_path / "model"), prompt, NUM_NEW_TOKENS) != expected
    assert torch.get_default_dtype() == torch.float32
