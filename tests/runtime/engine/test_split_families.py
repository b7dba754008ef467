"""A family of transformers' that is split answers with Hugging Face's tokens."""

from pathlib import Path

import pytest
from ranks_as_threads import split_engine

from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.loop.scheduler import generate
from scripts.tools import families


@pytest.mark.slow  # `test_tp_layers.py` compares each piece, `test_ranks.py` the tokens of a Llama
@pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")
def test_tokens_are_hugging_faces(tmp_path: Path) -> None:
    """Layers that are one in the checkpoint, experts and states; `scripts.tools.families` tries every family so."""
    expected = families.save_telling_model("qwen3_next", families.small_config("qwen3_next"), tmp_path / "model")
    assert expected is not None
    requests = [Request(i, tuple(one), families.NUM_NEW_TOKENS) for i, one in enumerate(families.prompts())]
    with split_engine(tmp_path / "model", tmp_path, 2) as engine:
        steps = generate(engine, requests, NgramLookup(2), families.MAX_DRAFT_LEN)
        found = {sequence.request.id: sequence.output_tokens for sequence, _ in steps}
    assert [found[i] for i in range(len(requests))] == expected
