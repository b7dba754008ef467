"""A family of transformers' that is split answers with Hugging Face's tokens."""

from pathlib import Path

import pytest
from ranks_as_threads import split_engine

from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.scheduler import generate
from scripts.tools import families


def outputs(engine: Engine, *, ngram: bool) -> list[list[int]]:
    requests = [Request(i, tuple(one), families.NUM_NEW_TOKENS) for i, one in enumerate(families.prompts())]
    drafter = NgramLookup(2) if ngram else None
    found = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, families.MAX_DRAFT_LEN)}
    return [found[i] for i in range(len(requests))]


@pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")
def test_tokens_are_hugging_faces(tmp_path: Path) -> None:
    """Layers that are one in the checkpoint, experts and states; `scripts.tools.families` tries every family so."""
    expected = families.save_telling_model("qwen3_next", families.small_config("qwen3_next"), tmp_path / "model")
    assert expected is not None
    with split_engine(tmp_path / "model", tmp_path, 2) as engine:
        for ngram in (False, True):
            assert outputs(engine, ngram=ngram) == expected
