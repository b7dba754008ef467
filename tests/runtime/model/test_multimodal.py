"""The language model inside a model of several kinds of input answers texts as the whole model does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build_tiny, hf_greedy, repetitive_prompt
from transformers import AutoModelForImageTextToText, Gemma3Config, LlavaConfig, Mistral3Config, PreTrainedModel

from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate

TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "head_dim": 8,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CONFIGS = {
    "gemma3": lambda: Gemma3Config(
        text_config=TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=VISION | {"model_type": "siglip_vision_model"},
        image_token_index=31, boi_token_index=30, eoi_token_index=29, mm_tokens_per_image=4,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8}, image_token_index=31,
    ),
    "llava": lambda: LlavaConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=VISION | {"model_type": "clip_vision_model"},
        image_token_index=31,
    ),
}  # fmt: skip


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(CONFIGS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval().float()


@pytest.mark.parametrize("kind", ["gemma3", "llava", pytest.param("mistral3", marks=pytest.mark.slow)])
def test_texts_are_answered_as_by_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "model")
    with Engine.open(build_tiny(tmp_path / "model", tmp_path)) as engine:
        prompts = [[t % 28 for t in repetitive_prompt(seed, 30)] for seed in range(3)]
        requests = [Request(i, tuple(prompt), 20) for i, prompt in enumerate(prompts)]
        for drafter in (None, NgramLookup(2)):
            outputs = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, 5)}
            assert [outputs[i] for i in range(3)] == [hf_greedy(model, prompt, 20) for prompt in prompts]
