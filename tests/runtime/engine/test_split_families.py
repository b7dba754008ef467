"""Families of transformers' that are split answer with Hugging Face's tokens, each as small as
scripts/tools/families.py makes it."""

from pathlib import Path

import pytest
from ranks_as_threads import split_engine

from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.scheduler import generate
from scripts.tools import families

SPLIT = [
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "granite", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama",
    "llama4", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text",
    "ministral", "ministral3", "mistral", "mistral4", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
]  # fmt: skip


def outputs(engine: Engine, *, ngram: bool) -> list[list[int]]:
    requests = [Request(i, tuple(one), families.NUM_NEW_TOKENS) for i, one in enumerate(families.prompts())]
    drafter = NgramLookup(2) if ngram else None
    found = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, families.MAX_DRAFT_LEN)}
    return [found[i] for i in range(len(requests))]


# One of each kind: layers that are one in the checkpoint, low rank, experts, states. Norms, windows and K/V heads that
# repeat are those of other tests' ranks.
ALWAYS = {("qwen3_next", 2)}


@pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")
@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        pytest.param(family, tp_size, marks=() if (family, tp_size) in ALWAYS else pytest.mark.slow)
        for family in SPLIT
        for tp_size in (2, 4)
        if (family, tp_size) != ("mimo_v2_flash", 4)  # 4 devices divide the K/V heads of some of its layers
    ],
)
def test_tokens_are_hugging_faces(family: str, tp_size: int, tmp_path: Path) -> None:
    expected = families.save_telling_model(family, families.small_config(family), tmp_path / "model")
    assert expected is not None
    with split_engine(tmp_path / "model", tmp_path, tp_size) as engine:
        for ngram in (False, True):
            assert outputs(engine, ngram=ngram) == expected
