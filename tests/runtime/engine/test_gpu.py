"""Engines on a GPU, against Hugging Face. Skipped where there is none."""

from pathlib import Path

import pytest
import torch

from runtime.core.request import Request
from runtime.engine.engine import Engine
from scripts.tools import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

KINDS = [
    *("llama", "gpt2", "phi3", "stablelm", "gemma2", "gemma3_text", "gpt_oss", "mimo_v2_flash", "llama4_text"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_5_text", "qwen3_next", "olmo_hybrid"),
    *("nemotron_h", "bamba", "granitemoehybrid", "falcon_h1"),
]
"""One of each kind of attention, of mixture and of recurrent state."""


@pytest.mark.parametrize("family", KINDS)
def test_family_has_hugging_face_s_tokens(family: str, tmp_path: Path) -> None:
    outcome = families.try_family(family, tmp_path, torch.device("cuda"))
    assert (outcome.verdict, outcome.why) == ("equal", "")


def test_closed_engine_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    families.save_telling_model("llama", families.small_config("llama"), tmp_path / "model")
    families.make_engine(tmp_path / "model", tmp_path, torch.device("cuda")).close()
    sizes = []
    for _ in range(2):
        with Engine.open(tmp_path / "engine") as engine:
            engine.check_request(Request(0, (3, 4, 5), 4))
            sizes.append(engine.num_cache_tokens)
    assert sizes[1] > 0.9 * sizes[0]
