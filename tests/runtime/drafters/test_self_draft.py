"""A model that drafts for itself changes no token, computes no prompt twice, and leaves no K/V of its copy to anybody.

Compared with Hugging Face's greedy output in float32, and with the engine's own output without drafts, bit by bit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import outputs, run
from tiny import hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel

from runtime.checkpoint.config import DraftOutput, SelfDraft
from runtime.core.batch import generation_row
from runtime.core.params import SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.drafters.draft_target import SelfDraftModel
from runtime.engine.draft_vocab import among_all
from runtime.engine.engine import Engine

NUM_NEW_TOKENS = 16
DRAFT_LEN = 5
PROMPTS = [tuple(repetitive_prompt(i, 6 + 5 * i)) for i in range(5)]
GREEDY = SamplingConfig()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def engine_dir(model: PreTrainedModel, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(model, self_draft=SelfDraft("int4"), compiler="aot")
    return directory


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir) as opened:
        yield opened


@pytest.fixture(params=["int4"])
def uncompiled(request: pytest.FixtureRequest, model: PreTrainedModel, make_engine: Any) -> Engine:
    """An engine whose copy's weights can be seen and changed."""
    made: Engine = make_engine(model, self_draft=SelfDraft(request.param))
    return made


def make_requests(sampling: SamplingConfig = GREEDY, **settings: Any) -> list[Request]:
    settings = {"max_new_tokens": NUM_NEW_TOKENS} | settings
    return [Request(i, prompt, sampling=sampling, **settings) for i, prompt in enumerate(PROMPTS)]


def answer(engine: Engine, requests: list[Request], drafter: Any) -> list[Sequence]:
    return run(engine, "leader", requests, drafter, DRAFT_LEN)


def num_drafted(sequences: list[Sequence]) -> int:
    return sum(sequence.stats.num_draft_tokens for sequence in sequences)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("mixtral", marks=pytest.mark.slow), "gpt2"])
def test_families(family: str, make_engine: Any) -> None:
    """Sliding windows, norms of their own, experts in one piece, which stay as they are, transposed weights."""
    model = make_model(family)
    engine: Engine = make_engine(model, self_draft=SelfDraft("int8", 16))
    sequences = answer(engine, make_requests()[::2], SelfDraftModel(engine, use_logits=False))
    assert outputs(sequences) == [hf_greedy(model, list(prompt), NUM_NEW_TOKENS) for prompt in PROMPTS[::2]]
    assert sum(sequence.stats.num_accepted_draft_tokens for sequence in sequences) > 0


IDS = tuple(i for i in range(32) if i % 4)


def test_output_layer_of_its_own(model: PreTrainedModel, make_engine: Any) -> None:
    """Logits are those of the copy with the target's output layer, of the ids that it drafts; of others it has none."""
    copies = {"self_draft": SelfDraft("int8")}
    engine: Engine = make_engine(model, **copies, draft_output=DraftOutput("int8", len(IDS)), draft_ids=IDS)
    sequences = answer(engine, make_requests(), SelfDraftModel(engine, use_logits=False))
    assert outputs(sequences) == [hf_greedy(model, list(prompt), NUM_NEW_TOKENS) for prompt in PROMPTS]
    assert sum(sequence.stats.num_accepted_draft_tokens for sequence in sequences) > 0
    found = []
    for one in (engine, make_engine(model, **copies)):
        one.clear_cache()
        sequence = Sequence.start(make_requests()[2])
        assert one.admit(sequence)
        one.compute_context(sequence, len(sequence.tokens) - 1)
        (logits,) = one.step([generation_row(sequence, [3, 4])], by_copy=True)
        found.append(among_all(logits, one.draft_ids, 32))
        one.release(sequence)
    others = [i for i in range(32) if i not in IDS]
    assert bool((found[0][:, others] == -torch.inf).all())
    atol = 0.03 * float(found[1].abs().max())
    torch.testing.assert_close(found[0][:, list(IDS)], found[1][:, list(IDS)], atol=atol, rtol=0)


def test_output_of_16_bits_is_that_without_drafts(model: PreTrainedModel, make_engine: Any) -> None:
    engine = make_engine(model, dtype="bfloat16", self_draft=SelfDraft("int4"))
    drafted = answer(engine, make_requests(), SelfDraftModel(engine, use_logits=False))
    engine.clear_cache()
    assert outputs(drafted) == outputs(answer(engine, make_requests(), None))
    assert sum(sequence.stats.num_accepted_draft_tokens for sequence in drafted) > 0


def test_the_copy_computes_no_prompt(engine: Engine) -> None:
    """One token of each sequence at a time: the last one, and its own drafts. The first step has no draft."""
    sizes: list[tuple[int, int]] = []
    copy_step = engine._copy_step
    assert copy_step is not None

    def watched(input_ids: Tensor, *others: Any) -> Tensor:
        sizes.append((input_ids.shape[0], input_ids.shape[1]))
        return copy_step(input_ids, *others)

    engine._copy_step = watched
    sequences = answer(engine, make_requests(), SelfDraftModel(engine, use_logits=False))
    assert {num_tokens for _, num_tokens in sizes} == {1}
    assert max(batch_size for batch_size, _ in sizes) == engine.max_batch_size
    assert sum(batch_size for batch_size, _ in sizes) == num_drafted(sequences)


def test_nothing_of_the_copys_is_found_again(engine: Engine, model: PreTrainedModel) -> None:
    """The next request continues what the first has generated: all of it is found, and none of it is quantized."""
    (first,) = answer(engine, make_requests()[:1], SelfDraftModel(engine, use_logits=False))
    engine_plain = outputs(answer(engine, [Request(1, tuple(first.tokens), NUM_NEW_TOKENS)], None))
    assert engine_plain == [hf_greedy(model, first.tokens, NUM_NEW_TOKENS)]
    blocks = _published(engine)
    engine.clear_cache()
    answer(engine, [Request(2, PROMPTS[0], NUM_NEW_TOKENS)], None)
    for tokens, (keys, values) in _published(engine).items():
        if tokens in blocks:
            torch.testing.assert_close(blocks[tokens], (keys, values), rtol=1e-5, atol=1e-5)
    assert set(_published(engine)) & set(blocks)


@pytest.mark.parametrize("poisoned", ["weights", "keys and values"])
def test_a_copy_of_nan_changes_nothing(poisoned: str, uncompiled: Engine, model: PreTrainedModel) -> None:
    engine = uncompiled
    copy_step: Any = engine._copy_step
    if poisoned == "weights":
        for name, buffer in copy_step.named_buffers():
            if name.endswith("scales"):
                buffer.fill_(torch.nan)
    else:

        def poisoning(input_ids: Tensor, positions: Tensor, slots: Tensor, *others: Any) -> Tensor:
            logits: Tensor = copy_step(input_ids, positions, slots, *others)
            block_size = engine._pool.keys[0].shape[3]
            for keys in engine._pool.keys:
                keys.permute(0, 3, 1, 2)[slots.flatten() // block_size, slots.flatten() % block_size] = torch.nan
            return logits

        engine._copy_step = poisoning
    sequences = answer(engine, make_requests(), SelfDraftModel(engine, use_logits=False))
    assert outputs(sequences) == [hf_greedy(model, list(prompt), NUM_NEW_TOKENS) for prompt in PROMPTS]
    assert (num_drafted(sequences) > 0) == (poisoned != "weights")


@pytest.mark.parametrize("uncompiled", ["int4", "int8"], indirect=True)
def test_copys_weights_are_quantized_as_a_conversion_quantizes_them(uncompiled: Engine, model: PreTrainedModel) -> None:
    from runtime.checkpoint.config import QuantConfig
    from runtime.checkpoint.quant.quantize import quantize_weight
    from runtime.model.quantized import QuantizedLinear

    copied: Any = uncompiled._copy_step
    self_draft = uncompiled.config.build_config.self_draft
    assert self_draft is not None
    layers = {n: m for n, m in copied.model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 14  # seven of each of two layers, and not the one that computes logits
    for name, layer in layers.items():
        weight = model.get_submodule(name).weight
        size = min(16 if weight.shape[1] == 48 else 32, 64)
        expected = quantize_weight(weight.detach(), QuantConfig(self_draft.qformat), size)
        assert torch.equal(layer.values, expected.values) and torch.equal(layer.scales, expected.scales)
    target: Any = uncompiled._step
    assert copied.model.get_output_embeddings().weight is target.model.get_output_embeddings().weight


def _published(engine: Engine) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
    """The first layer's and last layer's K/V of full blocks, by all tokens up to their ends."""
    nodes = engine._blocks._nodes
    block_of = {node.id: block for block, node in nodes.items()}
    found = {}
    for block, node in nodes.items():
        tokens, parent = node.tokens, node.parent
        while parent in block_of:
            tokens, parent = (*nodes[block_of[parent]].tokens, *tokens), nodes[block_of[parent]].parent
        if len(node.tokens) == engine._blocks.block_size:
            pools = engine._pool
            found[tokens] = (
                torch.stack([keys[block] for keys in pools.keys]).clone(),
                torch.stack([values[block] for values in pools.values]).clone(),
            )
    return found
