"""Of transformers' families those that are split answer with Hugging Face's tokens, each as small as
scripts/families.py makes it."""

from pathlib import Path

import families
import pytest
from ranks_as_threads import split_engine

from runtime.drafters.ngram import NgramLookup
from runtime.engine import Engine
from runtime.leader import generate
from runtime.request import Request

EXPERTS = ()


def outputs(engine: Engine, *, ngram: bool) -> list[list[int]]:
    requests = [Request(i, tuple(one), families.NUM_NEW_TOKENS) for i, one in enumerate(families.prompts())]
    drafter = NgramLookup(2) if ngram else None
    found = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, families.MAX_DRAFT_LEN)}
    return [found[i] for i in range(len(requests))]


@pytest.mark.filterwarnings("ignore::runtime.errors.SpecDecWarning")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("family", EXPERTS)
def test_tokens_are_hugging_faces(family: str, tp_size: int, tmp_path: Path) -> None:
    expected = families.save_telling_model(family, families.small_config(family), tmp_path / "model")
    assert expected is not None
    with split_engine(tmp_path / "model", tmp_path, tp_size) as engine:
        for ngram in (False, True):
            assert outputs(engine, ngram=ngram) == expected
