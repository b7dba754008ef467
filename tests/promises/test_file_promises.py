"""Promises of weights on their way from a model's files into a step, whatever lies in the files.

- conversion: each tensor once, as the file that the index names has it; the dtype is that of most numbers; progress
  ends at its total
- quantization: integers are the nearest for the scales that are stored; columns come back in their own order
- splits: all ranks' pieces are the whole, in their order; the sum of what they compute is what one computes
- memory: a weight is there while anybody reads it; what is put together of many is in the order of their numbers
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from runtime.builder.convert import convert
from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.quant.quantize import quantize_weight
from runtime.checkpoint.quant.weight import QuantizedWeight
from runtime.checkpoint.source import is_computed, predicts_further, read_tensors
from runtime.model import weights as weights_module
from runtime.model.tp_layers import Split, Splitting
from runtime.model.weights import absent_weights, present

# --- conversion ---


def write_shards(directory: Path, shards: list[dict[str, Tensor]], weight_map: dict[str, int]) -> None:
    directory.mkdir(exist_ok=True)
    for i, tensors in enumerate(shards):
        save_file(tensors, directory / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for name, i in weight_map.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@given(held=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=6), data=st.data())
def test_each_tensor_is_there_once_as_the_index_has_it(
    held: list[set[int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`held` are the shards that hold each tensor, of other numbers in each."""
    directory = tmp_path_factory.mktemp("shards")
    weight_map = {f"t{i}": data.draw(st.sampled_from(sorted(shards))) for i, shards in enumerate(held)}
    shards: list[dict[str, Tensor]] = [{"of no use": torch.zeros(1)} for _ in range(3)]
    for i, holders in enumerate(held):
        for shard in holders:
            shards[shard][f"t{i}"] = torch.full((2,), 10.0 * i + shard)
    write_shards(directory, shards, weight_map)
    found = read_tensors(directory)
    assert sorted(tensor.name for tensor in found) == sorted(weight_map)
    for tensor in found:
        assert tensor.file.name == f"model-{weight_map[tensor.name]}.safetensors"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_progress_ends_at_its_total_and_never_goes_back(tp_size: int, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    told: list[tuple[int, int]] = []
    convert(
        tmp_path / "model",
        tmp_path / "out",
        None,
        replace=False,
        progress=lambda *one: told.append(one),
        tp_size=tp_size,
    )
    num_bytes = sum(
        tensor.nbytes for path in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(path).values()
    )
    assert {total for _, total in told} == {num_bytes}
    assert told[0][0] == 0 and told[-1][0] == num_bytes and told == sorted(told)


@pytest.mark.parametrize("large", ["float32", "bfloat16"])
def test_dtype_is_that_of_most_numbers(large: str, tmp_path: Path) -> None:
    """The embeddings and the output layer are most of them, and all other tensors are of the other dtype."""
    small = "bfloat16" if large == "float32" else "float32"
    make_model("llama", vocab_size=4000).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sized = {name: getattr(torch, large if one.numel() > 50_000 else small) for name, one in tensors.items()}
    assert list(sized.values()).count(getattr(torch, large)) < len(sized) / 2
    save_file({name: one.to(sized[name]) for name, one in tensors.items()}, tmp_path / "model.safetensors")
    config = convert(tmp_path, tmp_path / "out", None, replace=False, progress=lambda done, total: None)
    assert config.dtype == large


@pytest.mark.parametrize("name", ["h.0.attn.bias", "layers.3.attention.bias"])
@given(shape=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_biases_are_no_masks(name: str, shape: list[int]) -> None:
    assert is_computed(name, tuple(shape)) == (len(shape) == 4)
    assert is_computed("layers.3.rotary_emb.inv_freq", tuple(shape))


@given(num_layers=st.integers(1, 5), num_further=st.integers(0, 3), layer=st.integers(0, 9))
def test_layers_beyond_the_models_own_predict_further(num_layers: int, num_further: int, layer: int) -> None:
    config = {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_further}
    own, further = range(num_layers), range(num_layers, num_layers + num_further)
    assert predicts_further(f"model.layers.{layer}.mlp.weight", config) == (layer in further)
    assert layer not in own or not predicts_further(f"model.layers.{layer}.mlp.weight", config)


# --- quantization ---


@pytest.mark.parametrize("qformat", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [16, 48])
@pytest.mark.parametrize("seed", range(2))
def test_integers_are_the_nearest_for_the_stored_scales(qformat: Any, group_size: int, seed: int) -> None:
    weight = torch.randn(12, 48, generator=torch.Generator().manual_seed(seed)) ** 3
    quantized = quantize_weight(weight, QuantConfig(qformat=qformat, group_size=group_size), group_size)
    lowest, highest = (-8, 7) if qformat == "int4" else (-127, 127)
    scales = quantized.scales.float().repeat_interleave(group_size, 1)
    expected = (weight / scales.where(scales != 0, 1)).round().clamp(lowest, highest)
    assert torch.equal(quantized.integers().float(), expected)
    error = (quantized.dequantize() - weight).abs()
    clipped = (weight / scales).round().ne(expected)
    assert bool((error <= scales.abs() / 2 + 1e-6)[~clipped].all())


@given(order=st.permutations(range(16)), seed=st.integers(0, 99))
def test_columns_come_back_in_their_own_order(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(-127, 128, (3, 16), generator=generator, dtype=torch.int8)
    weight = QuantizedWeight(stored, torch.ones(3, 1), order=torch.tensor(order, dtype=torch.int32)).dequantize()
    for place, column in enumerate(order):
        assert torch.equal(weight[:, column], stored[:, place].float())


# --- splits ---


@given(groups=st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (4, 1), (6, 3), (6, 2)]), seed=st.integers(0, 99))
@pytest.mark.parametrize("kind", ["outputs", "inputs"])
def test_pieces_are_the_whole_and_compute_what_it_computes(kind: Any, groups: tuple[int, int], seed: int) -> None:
    tp_size, num_pieces = groups
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(12, 24, generator=generator), torch.randn(12, generator=generator)
    split = Splitting(tp_size, {"layer": Split(kind, num_pieces)})
    pieces = [split.piece("layer.weight", weight, rank) for rank in range(tp_size)]
    biases = [split.piece("layer.bias", bias, rank) for rank in range(tp_size)]
    for rank, piece in enumerate(pieces):
        assert tuple(piece.shape) == split.form("layer.weight", tuple(weight.shape))
        assert torch.equal(piece, pieces[rank // (tp_size // num_pieces) * (tp_size // num_pieces)])  # neighbours'
    distinct = pieces[:: tp_size // num_pieces]
    assert torch.equal(torch.cat(distinct, 0 if kind == "outputs" else 1), weight)
    assert torch.equal(split.join("layer.weight", pieces), weight) and torch.equal(
        split.join("layer.bias", biases), bias
    )
    x = torch.randn(5, 24, generator=generator)
    whole = torch.nn.functional.linear(x, weight, bias)
    if kind == "outputs":
        own = zip(distinct, biases[:: tp_size // num_pieces], strict=True)
        made = torch.cat([torch.nn.functional.linear(x, one, its) for one, its in own], -1)
    else:  # what each computes of its inputs is added up, and then the bias, which each has
        assert all(torch.equal(one, bias) for one in biases)
        made = sum(
            torch.nn.functional.linear(part, one) for part, one in zip(x.chunk(num_pieces, -1), distinct, strict=True)
        )
        made = made + bias
    torch.testing.assert_close(made, whole)


# --- memory ---


def test_a_weight_is_there_while_anybody_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_KEPT_BYTES", 0)
    values = torch.arange(1.0, 3_000_001.0)
    save_file({"a": values, "b": values + 1}, tmp_path / "weights.safetensors")
    weights = absent_weights(tmp_path / "weights.safetensors")
    with present(weights["a"]):
        with present(weights["a"], weights["b"]):
            assert torch.equal(weights["b"], values + 1)
        assert torch.equal(weights["a"], values), "another reader's end took it away"
    assert not weights["a"].any()


def test_experts_are_put_together_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Twelve, of which number 10 comes before number 2 as a text."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Qwen3MoeConfig(vocab_size=64, intermediate_size=32, moe_intermediate_size=16, num_experts=12, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    own = {name: one for name, one in model.state_dict().items() if ".experts." in name}
    assert own and all(one.shape[0] == 12 for one in own.values())
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert any("experts.10." in name for name in saved), "transformers saves experts one by one"
    convert(tmp_path / "model", tmp_path / "out", None, replace=False, progress=lambda done, total: None)
    converted = load_file(tmp_path / "out" / "rank0.safetensors")
    for name, weight in own.items():
        assert torch.equal(converted[name], weight), name
