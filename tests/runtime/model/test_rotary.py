"""Rotary factors of every kind, and indices of keys: a token's are Hugging Face's for its sequence by itself."""

from pathlib import Path
from typing import Any

import pytest
from sentences import Said
from tiny import hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.core.request import Request
from runtime.drafters.ngram import NgramLookup
from runtime.loop.orchestrator import generate
from runtime.model.causal_heads import has_causal_class
from runtime.util.errors import SpecDecError
from scripts.tools import families

LIMIT = 64  # positions that the scaled models were trained with
HALF_DIM = 4
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 6.0, 9.0, 12.0], "factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"factor": 4.0},
}


INDEXED = {
    "deepseek_v32": {},  # an index in each layer
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},  # in every other one
    "glm5_next_text": {},  # of pools of keys, beside layers with a state and four residual streams
}


def indexed_model(family: str) -> PreTrainedModel:
    assert has_causal_class(family)  # ours, of one
    config = families.small_config(family)
    config.update(INDEXED[family] | {"index_topk": LIMIT})
    return families.random_model(family, config, 0.3, 0.3)


def scaled_model(kind: str) -> PreTrainedModel:
    rope = ROPES[kind] | {"rope_type": kind, "rope_theta": 100.0, "original_max_position_embeddings": LIMIT}
    assert all(len(rope.get(name, [0] * HALF_DIM)) == HALF_DIM for name in ("short_factor", "long_factor"))
    family = "phi3" if kind == "longrope" else "llama"
    own = {"original_max_position_embeddings": LIMIT} if kind == "longrope" else {}
    return make_model(family, rope_parameters=rope, num_hidden_layers=1, **own)


def positions_of(kind: str) -> int:
    return 256 if kind in ROPES and kind != "longrope" else LIMIT


@pytest.mark.one_in(4)
@pytest.mark.parametrize("compiler", ["none", pytest.param("aot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*ROPES, *INDEXED])
def test_output_is_hugging_faces_whatever_stands_beside_it(kind: str, compiler: str, make_engine: Any) -> None:
    """Prompts of several lengths in one batch, with drafts, one of them up to the last position."""
    model, positions = indexed_model(kind) if kind in INDEXED else scaled_model(kind), positions_of(kind)
    size = model.config.vocab_size
    prompts = [repetitive_prompt(i, length, size) for i, length in enumerate((9, 30, positions - 24))]
    expected = [hf_greedy(model, prompt, 24) for prompt in prompts]
    lengths = {"max_input_len": positions - 24, "max_seq_len": positions + 10}
    engine = make_engine(model, compiler=compiler, **lengths)
    requests = [Request(i, tuple(prompt), 24) for i, prompt in enumerate(prompts)]
    for drafter in (None, NgramLookup(2)):
        outputs = {s.request.id: s.output_tokens for s, _ in generate(engine, requests, drafter, 10)}
        assert [outputs[i] for i in range(len(prompts))] == expected


def test_positions_at_which_the_factors_change_are_refused_by_number(make_engine: Any, said: Said) -> None:
    """`dynamic` changes them beyond the positions that the model has, `longrope` where its training ended.

    And those at which an index would choose among keys.
    """
    for kind in ("longrope", "dynamic"):
        positions = positions_of(kind)
        why = "before its longrope factors change" if kind == "longrope" else "the model has"
        with pytest.raises(SpecDecError) as error:
            make_engine(scaled_model(kind), max_input_len=9, max_seq_len=positions + 1 + 10)
        said(error, positions, why, positions + 1)
    with pytest.raises(SpecDecError) as error:
        make_engine(indexed_model("deepseek_v32"), max_input_len=9, max_seq_len=LIMIT + 1 + 10)
    said(error, LIMIT, "index", LIMIT + 1)


def test_hugging_faces_factors_do_change_there(tmp_path: Path) -> None:
    """A refused length is worth refusing: past the limit the first tokens of a text have other logits."""
    from tiny import eager_logits

    for kind in ("longrope", "dynamic"):
        positions = positions_of(kind)
        tokens = repetitive_prompt(3, positions + 1)
        whole, short = (eager_logits(scaled_model(kind), tokens[:n]) for n in (positions + 1, positions))
        assert (whole[:20] - short[:20]).abs().max() > 1e-2
    for family in INDEXED:
        model, tokens = indexed_model(family), repetitive_prompt(3, LIMIT + 4, families.VOCAB_SIZE)
        narrow = eager_logits(model, tokens)
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 2 * LIMIT
        differs = (eager_logits(model, tokens) - narrow).abs().amax(-1) > 1e-2
        assert differs.any() and not differs[:LIMIT].any()
