"""Faults of one layer are told: the engine's fingerprint is another one, and a check says of every receipt that one of
the two engines is faulty, also where no token has changed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from shared import MakeEngineDir
from tiny import make_model, repetitive_prompt
from torch import Tensor

from runtime.proof.fingerprint import fingerprint_of
from specdec_cli import LLM, SamplingParams

Fault = Callable[[Any], None]
"""Changes a layer of the model in place."""


def change_weight(place: str, change: Callable[[Tensor], Tensor], layer: Any) -> None:
    weight = layer.get_parameter(place)
    weight.copy_(change(weight.clone()))


def in_bits(bits: int, weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def first_negated(weight: Tensor) -> Tensor:
    weight[0] *= -1
    return weight


def heads_exchanged(weight: Tensor) -> Tensor:
    """[heads x 8, hidden size] weights whose first two heads change places."""
    return torch.cat([weight[8:16], weight[:8], weight[16:]])


def change_number(place: str, change: Callable[[Any], Any], layer: Any) -> None:
    module, _, name = place.rpartition(".")
    owner = layer.get_submodule(module)
    setattr(owner, name, change(getattr(owner, name)))


def change_output(place: str, change: Callable[[Any], Any], layer: Any) -> None:
    layer.get_submodule(place).register_forward_hook(lambda module, given, output: change(output))


def change_attention(change: Callable[[Any], dict[str, Any]], layer: Any) -> None:
    """Other keyword arguments of the layer's attention, from those that it is given."""
    layer.self_attn.register_forward_pre_hook(
        lambda module, args, given: (args, given | change(given)), with_kwargs=True
    )


def rope(frequency: float, pairs: bool, given: Any) -> dict[str, Any]:
    """Cosines and sines, [1, tokens, 8], of other angles; or for pairs of neighbours in the place of halves."""
    angles = given["paged"].positions.reshape(1, -1, 1) * frequency ** (-torch.arange(4) / 4)
    angles = angles.repeat_interleave(2, -1) if pairs else torch.cat([angles, angles], -1)
    return {"position_embeddings": (angles.cos(), angles.sin())}


def sees_one_more(given: Any) -> dict[str, Any]:
    return {"paged": replace(given["paged"], positions=given["paged"].positions + 1, masks={})}


def gate_and_up_exchanged(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def left_out(layer: Any) -> None:
    layer.register_forward_hook(lambda module, given, output: given[0])


def one_more(number: int, weight: Tensor) -> Tensor:
    weight.view(-1)[number] *= 1.01
    return weight


FAULTS: dict[str, Fault] = {
    "weights in 8 bits": partial(change_weight, "mlp.down_proj.weight", partial(in_bits, 8)),
    "weights in 4 bits": partial(change_weight, "self_attn.v_proj.weight", partial(in_bits, 4)),
    "weights in bfloat16": partial(change_weight, "mlp.up_proj.weight", Tensor.bfloat16),
    "one number": partial(change_weight, "self_attn.o_proj.weight", partial(one_more, 77)),
    "a sign": partial(change_weight, "self_attn.k_proj.weight", first_negated),
    "inputs exchanged": partial(change_weight, "mlp.down_proj.weight", partial(torch.roll, shifts=1, dims=1)),
    "query heads exchanged": partial(change_weight, "self_attn.q_proj.weight", heads_exchanged),
    "key heads exchanged": partial(change_weight, "self_attn.k_proj.weight", heads_exchanged),
    "value heads exchanged": partial(change_weight, "self_attn.v_proj.weight", heads_exchanged),
    "a bias left out": partial(change_weight, "self_attn.q_proj.bias", torch.zeros_like),
    "a norm's weight left out": partial(change_weight, "post_attention_layernorm.weight", torch.ones_like),
    "a norm's epsilon": partial(change_number, "input_layernorm.variance_epsilon", lambda one: 10 * one),
    "attention's scale": partial(change_number, "self_attn.scaling", lambda one: 1.01 * one),
    "another activation": partial(change_number, "mlp.act_fn", lambda one: torch.nn.GELU()),
    "rope's theta": partial(change_attention, partial(rope, 10_100.0, False)),
    "rope in pairs": partial(change_attention, partial(rope, 10_000.0, True)),
    "a mask that shows one more": partial(change_attention, sees_one_more),
    "a window": partial(change_attention, lambda given: {"sliding_window": 16}),
    "an output's scale": partial(change_output, "mlp", lambda output: 0.999 * output),
    "values in bfloat16": partial(change_output, "self_attn.v_proj", lambda output: output.bfloat16().float()),
    "gate and up exchanged": gate_and_up_exchanged,
    "a layer left out": left_out,
}


@pytest.fixture(scope="module")
def answered(make_engine_dir: MakeEngineDir) -> Iterator[tuple[LLM, list[dict[str, Any]]]]:
    """An engine in Python's own operations, and receipts of its answers."""
    params = [SamplingParams(temperature=one, seed=1, max_tokens=8, receipt=True) for one in (0.0, 1.0)]
    with LLM(make_engine_dir(make_model("llama"))) as llm:
        prompts = [repetitive_prompt(seed, 9) for seed in range(2)]
        yield llm, [one.receipt or {} for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_one_layer_are_told(
    fault: str, answered: tuple[LLM, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, receipts = answered
    assert {one.relation for one in llm.check_receipts(receipts)} == {"same"}
    step = copy.deepcopy(llm.engine.target_step)
    with torch.no_grad():
        FAULTS[fault](step.model.model.layers[1])
    monkeypatch.setattr(llm.engine, "_step", step)
    found = fingerprint_of(llm.engine, llm.tokenizer)
    assert found == replace(llm.fingerprint, logits=found.logits) and found.logits != llm.fingerprint.logits
    monkeypatch.setitem(llm.__dict__, "fingerprint", found)
    assert {one.relation for one in llm.check_receipts(receipts)} == {"faulty"}
