"""A rank's model: it has a piece of each split weight, and all ranks together compute the whole model's result."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.kernels.collectives import all_reduce, gather_columns, own_columns, own_embeddings
from runtime.model.tp_layers import Split, Splitting
from runtime.util.errors import SpecDecError


@dataclass(frozen=True)
class Ranks:
    """The ranks that compute a layer together."""

    tp_size: int
    shares_memory: bool
    """True if the ranks' collectives are the kernels', and not torch.distributed's."""


class SummedLinear(nn.Module):
    """A linear layer with a part of the inputs: the ranks' outputs are added up, and then the bias is added."""

    def __init__(self, layer: nn.Module, bias: nn.Parameter | None, ranks: Ranks, *, has_all_inputs: bool) -> None:
        super().__init__()
        self.layer, self.bias, self.ranks, self.has_all_inputs = layer, bias, ranks, has_all_inputs

    def forward(self, x: Tensor) -> Tensor:
        tp_size, shares_memory = self.ranks.tp_size, self.ranks.shares_memory
        own = own_columns(x, tp_size, shares_memory=shares_memory) if self.has_all_inputs else x
        outputs = all_reduce(self.layer(own), shares_memory=shares_memory)
        return outputs if self.bias is None else outputs + self.bias


class GatheredLinear(nn.Module):
    """A linear layer with a part of the outputs, which returns the outputs of all ranks."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks

    @property
    def weight(self) -> Tensor:
        """This rank's weight; some models ask for the weight's dtype (Hunyuan 4)."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return gather_columns(self.layer(x), self.ranks.tp_size, shares_memory=self.ranks.shares_memory)


class SplitEmbedding(nn.Module):
    """Embeddings for a part of the vocabulary: a token's embedding is on one rank, and the other ranks add zeros."""

    def __init__(self, weight: nn.Parameter, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.ranks = weight, ranks

    def forward(self, ids: Tensor) -> Tensor:
        shares_memory = self.ranks.shares_memory
        return all_reduce(own_embeddings(ids, self.weight, shares_memory=shares_memory), shares_memory=shares_memory)


def placeholders_of_pieces(
    state_dict: dict[str, Tensor], splitting: Splitting, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Take a rank's pieces of split weights out of its tensors, and return them by name. Zeros with the whole shapes,
    which take no memory, stand in their place while the model is loaded. SpecDecError for a piece of another shape.
    """
    pieces = {name: state_dict.pop(name) for name in list(state_dict) if splitting.is_cut(name)}
    for name, piece in pieces.items():
        wanted = shapes.get(name)
        if wanted is None or splitting.form(name, wanted) != tuple(piece.shape):
            raise SpecDecError(
                f"a piece of a weight is {list(piece.shape)}, which is not its share for {splitting.tp_size} devices "
                f"of {list(wanted or ())}: {name}",
                hint="convert the model again",
                code="checkpoint",
            )
        state_dict[name] = torch.zeros((), dtype=dtype).expand(wanted)
    return pieces


def place_pieces(model: PreTrainedModel, splitting: Splitting, pieces: dict[str, Tensor] | None = None) -> None:
    """Put pieces in place of the split weights; without `pieces`, empty tensors in the pieces' shapes."""
    placed: dict[int, nn.Parameter] = {}  # by the replaced parameter: some are shared
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if not splitting.is_cut(name):
            continue
        if id(parameter) not in placed:
            if pieces is None:
                piece = parameter.new_empty(splitting.form(name, tuple(parameter.shape)))
            else:
                shared = (name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter)
                piece = next(pieces[one] for one in shared if one in pieces)
            placed[id(parameter)] = nn.Parameter(piece, requires_grad=False)
        layer_name, _, part = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        setattr(layer, part, placed[id(parameter)])
        if part == "weight" and isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = placed[id(parameter)].shape


def compute_together(model: PreTrainedModel, splitting: Splitting, *, shares_memory: bool) -> None:
    """Replace split layers by layers that add up or collect the ranks' outputs."""
    ranks = Ranks(splitting.tp_size, shares_memory)
    for name, split in splitting.layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _together(model.get_submodule(name), split, ranks))


def _summed(ranks: Ranks, experts: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
    return all_reduce(outputs, shares_memory=ranks.shares_memory)


def _together(layer: nn.Module, split: Split, ranks: Ranks) -> nn.Module:
    match split.kind:
        case "outputs" | "heads":
            return layer
        case "gathered_outputs":
            return GatheredLinear(layer, ranks)
        case "vocabulary":
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            return SplitEmbedding(weight, ranks)
        case "experts":  # the module stays, since other code reads its attributes
            layer.register_forward_hook(partial(_summed, ranks))
            return layer
        case "inputs" | "own_inputs":
            bias = layer.bias
            assert bias is None or isinstance(bias, nn.Parameter)
            layer.bias = None  # type: ignore[assignment]
            return SummedLinear(layer, bias, ranks, has_all_inputs=split.kind == "own_inputs")
