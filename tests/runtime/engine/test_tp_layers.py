"""Ranks hold all of a model, bit for bit, and a model that cannot be split is refused by name."""

from pathlib import Path

import pytest
import torch
from quantized import save_gptq
from safetensors.torch import load_file, save_file
from sentences import Said
from tiny import FAMILIES, build_tiny, make_config, make_model
from torch import Tensor

from runtime.builder.convert import convert
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.config import Mapping, QuantConfig
from runtime.model.model import split_config
from runtime.util.errors import SpecDecError, SpecDecWarning

REFUSED = {"gpt2", "opt", "mamba"}  # they have no plan
AS_IT_MAY_BE = ("lfm2",)  # transformers has a plan for its embeddings since 5.24
KEPT_WHOLE = {"gemma3", "qwen2-moe"}  # its embeddings; its shared expert, of which the plan says nothing
WEIGHTS = "rank0.safetensors"
RENAMED = {"embed_out.weight": "lm_head.weight", ".block_sparse_moe.": ".mlp."}
"""Names that GPT-NeoX's and Mixtral's files have for what their models call otherwise."""
AS_IT_IS = QuantConfig()


def converted(
    model_dir: Path, output_dir: Path, tp_size: int, precision: QuantConfig = AS_IT_IS
) -> list[dict[str, Tensor]]:
    """The tensors of each rank."""
    convert(model_dir, output_dir, None, replace=False, progress=lambda *_: None, precision=precision, tp_size=tp_size)
    return [load_file(output_dir / f"rank{rank}.safetensors") for rank in range(tp_size)]


def own_name(name: str) -> str:
    for found, own in RENAMED.items():
        name = name.replace(found, own)
    return name


def put_together(name: str, whole: Tensor, pieces: list[Tensor]) -> bool:
    """True if the pieces are the tensor: all of them the same, or its parts in order, some of them more than once."""
    if whole.dtype == torch.float8_e4m3fn:  # torch compares none
        whole, pieces = whole.view(torch.int8), [piece.view(torch.int8) for piece in pieces]
    if all(torch.equal(piece, whole) for piece in pieces):
        return True
    assert all(piece.numel() < whole.numel() for piece in pieces), name
    for dimension in range(whole.dim()):
        for repeats in (1, 2):
            distinct = pieces[::repeats]
            same = all(torch.equal(pieces[i], distinct[i // repeats]) for i in range(len(pieces)))
            if same and sum(piece.shape[dimension] for piece in distinct) == whole.shape[dimension]:
                return torch.equal(torch.cat(distinct, dimension), whole)
    return False


@pytest.mark.filterwarnings("ignore::runtime.util.errors.SpecDecWarning")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in {*REFUSED, *AS_IT_MAY_BE}])
def test_the_ranks_pieces_are_the_model(family: str, tp_size: int, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    (whole,) = converted(tmp_path / "model", tmp_path / "one", 1)
    whole = {own_name(name): tensor for name, tensor in whole.items() if ".experts." not in name}
    ranks = converted(tmp_path / "model", tmp_path / "split", tp_size)
    assert open_checkpoint(tmp_path / "split").mapping == Mapping(tp_size, tp_size)
    for name, tensor in whole.items():
        assert put_together(name, tensor, [rank[name] for rank in ranks]), name
    assert all({name for name in rank if ".experts." not in name} == set(whole) for rank in ranks)
    num_bytes = [sum(tensor.nbytes for tensor in rank.values()) for rank in ranks]
    assert len(set(num_bytes)) == 1
    if tp_size == 2 and family not in KEPT_WHOLE:
        assert num_bytes[0] <= 0.55 * sum(tensor.nbytes for tensor in load_file(tmp_path / "one" / WEIGHTS).values())


@pytest.mark.parametrize(("family", "tp_size"), [("mixtral", 4), ("qwen2-moe", 2)])
def test_of_experts_each_rank_has_a_piece_of_every_one(family: str, tp_size: int, tmp_path: Path) -> None:
    """Packed tensors, gate before up, are split in both; files have every expert by itself, the model all in one."""
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(tmp_path / "model" / "model.safetensors")
    for rank, tensors in enumerate(converted(tmp_path / "model", tmp_path / "split", tp_size)):
        for layer in range(2):
            name, experts = f"model.layers.{layer}.mlp.experts", model.model.layers[layer].mlp.experts
            size = experts.down_proj.shape[2] // tp_size
            own = slice(rank * size, (rank + 1) * size)
            gate, up = experts.gate_up_proj.chunk(2, dim=1)
            wanted = torch.cat([gate[:, own], up[:, own]], dim=1)
            assert torch.equal(tensors[f"{name}.gate_up_proj"], wanted)
            assert torch.equal(tensors[f"{name}.down_proj"], experts.down_proj[:, :, own])


def test_an_expert_that_is_missing_is_told(tmp_path: Path, said: Said) -> None:
    make_model("mixtral").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if ".experts.2.w1" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path, {"format": "pt"})
    with pytest.raises(SpecDecError) as raised:
        converted(tmp_path / "model", tmp_path / "split", 2)
    said(raised, "experts.gate_up_proj")
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(
    ("family", "overrides", "tp_size", "precision", "words"),
    [
        ("gpt2", {}, 2, AS_IT_IS, "no plan; gpt2"),
        ("mamba", {}, 2, AS_IT_IS, "no plan; mamba"),
        ("llama", {}, 3, AS_IT_IS, "3; 4; llama"),
        ("llama", {"intermediate_size": 50}, 4, AS_IT_IS, "4; 50; `model.layers.0.mlp.gate_proj`"),
        ("llama", {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 3}, 2, AS_IT_IS, "2; 3"),
        ("llama", {}, 2, QuantConfig("int8", 16), "2; 3"),  # three groups of 48 inputs
    ],
    ids=["no plan", "no plan, states", "heads", "outputs", "K/V heads", "groups"],
)
def test_what_cannot_be_divided_is_refused(
    family: str, overrides: dict[str, int], tp_size: int, precision: QuantConfig, words: str, tmp_path: Path, said: Said
) -> None:
    make_model(family, **overrides).save_pretrained(tmp_path / "model")
    with pytest.raises(SpecDecError) as raised:
        converted(tmp_path / "model", tmp_path / "split", tp_size, precision)
    said(raised, *words.split("; "))
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"layers.*.mlp": "sequence_parallel"}, "sequence_parallel; llama"),
        ("mixtral", {"layers.*.mlp.experts.down_proj": "replicate"}, "experts; replicate; mixtral"),
        ("mixtral", {"layers.*.self_attn.o_proj.weight": "packed_rowwise"}, "packed_rowwise; mixtral"),
    ],
)
def test_a_plan_of_another_kind_is_refused_by_name(
    family: str, changes: dict[str, str], words: str, said: Said
) -> None:
    config = make_config(family)
    config.base_model_tp_plan = config.base_model_tp_plan | changes
    with pytest.raises(SpecDecError) as raised:
        split_config(config, 2)
    said(raised, *words.split("; "))


def test_no_head_reads_a_split_model(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(SpecDecError, match="split over devices has no trained drafter: tp_size 2"):
        build_tiny(tmp_path / "model", tmp_path, tp_size=2, hidden_states=(1,))


def test_what_stays_whole_is_said(tmp_path: Path, said: Said) -> None:
    make_model("llama", vocab_size=33).save_pretrained(tmp_path / "model")
    with pytest.warns(SpecDecWarning) as warned:
        ranks = converted(tmp_path / "model", tmp_path / "split", 2)
    said(warned, "2")
    assert ranks[1]["lm_head.weight"].shape[0] == 33


@pytest.mark.parametrize(
    ("family", "precision"), [("qwen2-moe", QuantConfig("int4", 8)), ("llama", QuantConfig("fp8", None))]
)
def test_quantized_weights_are_split_with_their_scales(family: str, precision: QuantConfig, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    (whole,) = converted(tmp_path / "model", tmp_path / "one", 1, precision)
    ranks = converted(tmp_path / "model", tmp_path / "split", 2, precision)
    for name, tensor in whole.items():
        if ".experts." in name:  # which stay as they are, and are another test's
            continue
        assert put_together(name, tensor, [rank[name] for rank in ranks]), name
    values = "model.layers.0.self_attn.o_proj.weight_values"
    assert ranks[0][values].numel() * 2 == whole[values].numel()


def test_orders_are_not_cut_through(tmp_path: Path, said: Said) -> None:
    save_gptq(tmp_path / "ordered", 4, 32, desc_act=True)
    with pytest.raises(SpecDecError) as raised:
        converted(tmp_path / "ordered", tmp_path / "split", 2)
    said(raised, "model.layers.0")
