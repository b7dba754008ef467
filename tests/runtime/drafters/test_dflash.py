"""Heads that draft a block in one pass: DFlash, DSpark and P-EAGLE."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import (
    Block,
    block_drafts,
    block_outputs,
    hidden_states,
    make_block,
    make_eagle,
    peagle_drafts,
    save_block,
    save_eagle,
    some,
)
from strength import draws
from test_eagle import DRAFT_LEN, SMALL, answer, drafter, expected, make_requests
from tiny import make_model
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from runtime.checkpoint.config import DraftOutput
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.heads.head_config import kind_of_head, read_head
from runtime.drafters.heads.head_model import _layers_of
from runtime.engine.engine import Engine
from runtime.loop.opening import warn_of_short_blocks
from runtime.util.errors import SpecDecError, SpecDecWarning

STATES, SIZE = (1, 3, 5), 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def head(model: PreTrainedModel) -> Block:
    return make_block(model)


@pytest.fixture(scope="module")
def head_dir(head: Block, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_block(head, tmp_path_factory.mktemp("head"), "z-lab")


@pytest.fixture(scope="module")
def engine_dir(model: PreTrainedModel, head_dir: Path, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(model, hidden_states=STATES, head_dir=head_dir)
    return directory


class States:
    """Hidden states of beginnings of texts, the longest computed once."""

    def __init__(self, model: PreTrainedModel, numbers: tuple[int, ...]) -> None:
        self.model, self.numbers, self.known = model, numbers, list[tuple[list[int], Tensor]]()

    def __call__(self, tokens: list[int]) -> Tensor:
        found = next((states for text, states in self.known if text[: len(tokens)] == tokens), None)
        if found is None:
            found = hidden_states(self.model, tokens, self.numbers)
            self.known.append((tokens, found))
        return found[: len(tokens)]


def check_drafts(seen: list[tuple[list[int], list[int]]], head: Block, model: PreTrainedModel, least: int) -> None:
    """DSpark's block is as long as it was trained; at the end of an output as the sequence has room for."""
    states_of, num_decided = States(model, head.states), 0
    for tokens, draft in some(seen):
        states, shortest = states_of(tokens[:-1]), len(draft) + (not head.anchor)
        sizes = range(shortest, head.size + 1) if len(draft) < DRAFT_LEN else (head.size,)
        of_sizes = [block_drafts(head, model, tokens, n, states) for n in (sizes if head.markov else (shortest,))]
        is_tie = min(gap for _, _, gap in of_sizes) < 1e-4
        assert is_tie or draft in [found[: len(draft)] for found, _, _ in of_sizes], tokens
        num_decided += 0 if is_tie else len(draft)
    assert num_decided >= least / draws(1, 3)


# Name -> (how the head is made, how it is saved). A plain DFlash stands in the contract, a compiled DSpark below.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash, windows": ({"windows": (6, None, 6), "states": (0, 6)}, "dflash"),
    "DFlash, vocabulary of its own": ({"draft_vocab": 20}, "dflash"),
    "DSpark": ({"markov": "vanilla", "anchor": True, "own_output": True, "confidence": True}, "DeepSpec"),
    "DSpark, behind the anchor": ({"markov": "vanilla", "draft_vocab": 20, "confidence": True}, "dspark"),
    "DSpark, gated": ({"markov": "gated", "anchor": True}, "dspark"),
    "DSpark without a Markov head": ({"anchor": True, "confidence": True}, "dspark"),
}
OFTEN = ("DFlash, windows", "DSpark, behind the anchor")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in OFTEN else pytest.mark.slow) for form in FORMS]
)
def test_drafts_are_the_formulas(form: str, model: PreTrainedModel, tmp_path: Path, make_engine_dir: Any) -> None:
    settings, saved_as = FORMS[form]
    head = make_block(model, **settings)
    directory = save_block(head, tmp_path, saved_as)
    assert kind_of_head(directory) == "dflash"
    engine_dir = make_engine_dir(model, hidden_states=head.states, head_dir=directory)
    with Engine.open(engine_dir, **SMALL) as engine:
        dflash = drafter(engine, directory)
        assert answer(engine, "leader", make_requests(), dflash) == expected(model)
        check_drafts(dflash.seen, head, model, 80)


def test_the_formula_is_transformers(model: PreTrainedModel) -> None:
    """The only class of this kind there, with the names of its own checkpoint, and eager attention."""
    head, tokens = make_block(model), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-6, layer_types=["full_attention"] * 2, target_layer_ids=[0, 2, 4],
        rope_parameters={"rope_type": "default", "rope_theta": head.theta}, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = MuseGlimmerAssistantModel(config).double()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): one for name, one in head.tensors.items()})
    states = hidden_states(model, tokens[:-1], head.states)
    block = model.get_input_embeddings().weight.double()[[tokens[-1], *[head.mask] * (SIZE - 1)]]
    with torch.no_grad():
        output = theirs(noise_embeds=block[None], context_hidden_states=states[None], use_cache=False)
        ours = block_outputs(head, model, tokens, SIZE, states)
    torch.testing.assert_close(output.last_hidden_state[0], ours, atol=1e-6, rtol=1e-6)


def test_lengths_are_those_of_its_confidence(model: PreTrainedModel, tmp_path: Path, make_engine: Any) -> None:
    """Chances that the head predicts stand in for those of its likeliest tokens."""
    head = make_block(model, **FORMS["DSpark"][0])
    directory = save_block(head, tmp_path, "DeepSpec")
    engine = make_engine(model, hidden_states=head.states, head_dir=directory)
    spark = drafter(engine, directory)
    seen: list[float | None] = []

    class Told(ConfidenceStop):
        def draft_token(self, draft_state: Any, logits: Tensor, sure: float | None = None) -> None:
            seen.append(sure)
            super().draft_token(draft_state, logits, sure)

    spark.confidence_stop = Told(lambda size, context, length: 1 + 0.2 * length, lambda *_: 0.1, at_once=True)
    assert answer(engine, "leader", make_requests()[:1], spark) == expected(model)[:1]
    lengths = {len(draft) for _, draft in spark.seen}
    assert len(lengths) > 1 and None not in seen
    tokens = spark.seen[0][0]
    chances = block_drafts(head, model, tokens, head.size, hidden_states(model, tokens[:-1], head.states))[1]
    first = seen[: len(spark.seen[0][1])]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(chances[: len(first)]), atol=1e-4, rtol=0)


def test_ids_that_are_chosen_for_drafts(model: PreTrainedModel, tmp_path: Path, make_engine: Any) -> None:
    """Drafts are as if the head was published with these ids alone, of its output layer or its target's."""
    settings, saved_as = FORMS["DSpark"]
    ids, head = tuple(i for i in range(32) if i % 3), make_block(model, **settings)
    directory = save_block(head, tmp_path, saved_as)
    build = {"draft_output": DraftOutput(None, len(ids)), "draft_ids": ids, "head_dir": directory}
    engine = make_engine(model, hidden_states=head.states, compiler="aot", **build)
    dflash = drafter(engine, directory)
    assert answer(engine, "leader", make_requests(), dflash) == expected(model)
    own = torch.tensor(ids)
    output = head.tensors.get("lm_head.weight", model.get_output_embeddings().weight.detach())  # type: ignore[no-untyped-call]
    cut = {"lm_head.weight": output[own], "d2t": own - torch.arange(len(own))}
    if head.markov:
        cut["markov_head.markov_w2.weight"] = head.tensors["markov_head.markov_w2.weight"][own]
    check_drafts(dflash.seen, replace(head, tensors=head.tensors | cut), model, 80)


def test_parallel_eagle(model: PreTrainedModel, tmp_path: Path, make_engine: Any) -> None:
    eagle = make_eagle(model, num_layers=2, draft_vocab=20)
    eagle.tensors["mask_hidden"] = torch.randn(1, 1, 3 * 32, generator=torch.Generator().manual_seed(5))
    changes = {"speculators_model_type": "peagle", "mask_token_id": 30}
    directory = save_eagle(eagle, tmp_path, "speculators", **changes)
    assert kind_of_head(directory) == "eagle3"
    assert read_head(directory).kind == "eagle3"
    engine = make_engine(model, hidden_states=eagle.states)
    parallel = drafter(engine, directory)
    assert answer(engine, "leader", make_requests(), parallel) == expected(model)
    assert sum(len(draft) for _, draft in parallel.seen) >= 80
    states_of = States(model, eagle.states)
    for tokens, draft in some(parallel.seen):
        assert draft == peagle_drafts(eagle, 30, model, tokens, len(draft), states_of(tokens[:-1])), tokens


# Name -> (changes of its config, what is said). What all heads are refused for stands in `test_eagle.py`.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_target_layers": 36}, "of 36, and the target has 6 layers"),
    "ids": ({"dflash_config": {"mask_token_id": 31, "target_layer_ids": [0, 6]}}, "target has 6 layers"),
    "no ids": ({"dflash_config": {"mask_token_id": 31}}, "not a list of layers"),
    "no mask": (
        {"dflash_config": {"target_layer_ids": [0, 2, 4]}},
        "mask_token_id` must be a whole number: None",
    ),
    "mask outside": (
        {"dflash_config": {"mask_token_id": 32, "target_layer_ids": [0, 2, 4]}},
        "vocabulary of 32: 32",
    ),
    "block of none": ({"block_size": 0}, "block_size` must be a whole number of at least 1: 0"),
    "block of one": ({"block_size": 1}, "leaves no slot to draft: 1"),
    "Domino": ({"projector_type": "domino"}, "with Domino's correction are not supported"),
    "recurrent": ({"markov_head_type": "rnn"}, "a Markov head of the type 'rnn' are not supported"),
}


def test_bad_heads_are_one_sentence(engine_dir: Path, head: Block, tmp_path: Path) -> None:
    with Engine.open(engine_dir) as engine:
        for case, (config, said) in BAD.items():
            directory = save_block(head, tmp_path / case, "z-lab", **config)
            with pytest.raises(SpecDecError) as error:
                drafter(engine, directory)
            assert said in error.value.message and "\n" not in error.value.message
            assert error.value.hint and not engine._heads


def test_layers_are_made_without_memory(head_dir: Path) -> None:
    """Transformers makes embeddings with them, which the head takes from its target: a gigabyte beside 8 B."""
    assert all(one.is_meta for one in _layers_of(read_head(head_dir)).parameters())


def test_an_engine_with_too_little_room_is_warned_about(model: PreTrainedModel, tmp_path: Path) -> None:
    head = read_head(save_block(make_block(model, markov="vanilla"), tmp_path, "dspark"))
    with pytest.warns(SpecDecWarning, match="blocks of fewer than 4 tokens, and the engine takes drafts of 3"):
        warn_of_short_blocks(head, 3)
    with warnings.catch_warnings(action="error"):
        warn_of_short_blocks(head, 4)


def test_an_engine_that_was_built_for_another_head(model: PreTrainedModel, head_dir: Path, make_engine: Any) -> None:
    engine = make_engine(model, hidden_states=STATES)
    with pytest.raises(SpecDecError, match="its target's output layer, and the engine was built without it"):
        drafter(engine, head_dir)
