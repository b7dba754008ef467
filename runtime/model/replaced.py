"""Base classes for modules that replace transformers' own, if these compute in a way that a step cannot.

`runtime.model.placing` gives a model's module the class that its family names. Without a step's paged inputs, or with
another attention function, a replaced module computes as transformers' class does.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.model.attention import KERNEL, PAGED, PROBE, PagedInputs


class Replaced(nn.Module):
    """Base of our classes; a module gets a class that inherits from ours first and transformers' second."""

    model_config: Any

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """False if this version of transformers needs no replacement of the module."""
        return True

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        """Prepare the module called `name` in the model after it has got its new class."""


class OwnForward(Replaced):
    """A module whose `computed` takes the place of its forward in a model with our attention."""

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        if attends_by_ours(self.model_config):
            return self.computed(*arguments, **kwargs)
        return super().forward(*arguments, **kwargs)

    @abstractmethod
    def computed(self, *arguments: Any, **kwargs: Any) -> Any:
        """The output that transformers' forward has for these arguments."""


def layer_in(name: str) -> int:
    """Number of the layer in a module's name: 3 for `model.layers.3.self_attn`."""
    return next(int(part) for part in name.split(".") if part.isdecimal())


class NumberedLayer(Replaced):
    """A module with keys, values or a state, to which transformers may not have given its layer's number."""

    layer_idx: int

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        if getattr(self, "layer_idx", -1) in (-1, None):
            self.layer_idx = layer_in(name)


class EqualPositions(Replaced):
    """Rotary positions in time, height and width. Their frequencies are not mixed: for text all three are equal."""

    def recomposition_frequencies(self, frequencies: Tensor) -> Tensor:
        """Frequencies [B, T, 2 D] from `frequencies` [3, B, T, D]."""
        return torch.cat((frequencies[0], frequencies[0]), dim=-1)


class RotaryOfPairs(OwnForward):
    """A rope with cosines and sines [1, tokens, head_dim / 2, 2] in place of complex numbers."""

    inv_freq: Tensor
    attention_scaling: float
    heads_dim: int
    """Index of the heads' dimension in queries and keys."""

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        replace_function(own_module(self), "apply_rotary_emb", partial(_rotating_pairs, self.heads_dim))

    @torch.no_grad()
    def computed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


def _rotating_pairs(heads_dim: int, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A rotation that takes cosines and sines, too."""

    def apply_rotary_emb(query: Tensor, key: Tensor, factors: Tensor) -> Any:
        if factors.is_complex():
            return theirs(query, key, factors)
        return tuple(_rotated(one, factors.unsqueeze(heads_dim)) for one in (query, key))

    return apply_rotary_emb


def _rotated(heads: Tensor, factors: Tensor) -> Tensor:
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    (first, second), (cos, sin) = ((one[..., 0], one[..., 1]) for one in (pairs, factors))
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(3).type_as(heads)


class Layer(Replaced):
    """A layer that passes the step's paged inputs on to its attention or mixer."""

    mixing = "self_attn"

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        with handed([self.get_submodule(self.mixing)], taken_from(kwargs)):
            return super().forward(*arguments, **kwargs)


class Attends(Replaced):
    """Attention that gets the step's paged inputs from its model (`OwnAttentionModel`), and knows config and layer."""

    config: Any
    layer_idx: int

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        self.config, self.layer_idx = model.config, layer_in(name)


class OwnAttention(Attends):
    """Attention through transformers' interface, in place of a method that computes attention by itself."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return hasattr(module, "_attn")  # GPT-J's and CodeGen's lack it since transformers 5.24

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        with handed([self], taken_from(kwargs), "_attn"):
            return super().forward(*arguments, **kwargs)

    def _attn(
        self,
        query: Tensor,  # (1, H, B x Q, D), as key and value
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **taken: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not taken:
            attended: tuple[Tensor, Tensor] = super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
            return attended
        window = self.config.window_size if getattr(self, "attention_type", None) == "local" else None
        if window is not None:  # only GPT-Neo's own mask, `bias`, has the window
            own = self.bias[:, :, : key.shape[2], : key.shape[2]]  # type: ignore[index]
            attention_mask = None if "paged" in taken else attention_mask.masked_fill(~own, -torch.inf)  # type: ignore[union-attr]
        divisor: Any = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", 1.0)  # GPT-Neo has neither
        output, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self,
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attention_mask,
            scaling=1.0 / float(divisor),
            sliding_window=window,
            **taken,
        )
        return output.transpose(1, 2), None


class Biased(Attends):
    """Attention through transformers' interface in which a score falls with each token between query and key, by the
    head's slope (ALiBi, arXiv 2108.12409).
    """

    slopes: Tensor  # (H,) float32

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        super().prepare(name, model)
        self.register_buffer("slopes", self.slopes_of_heads(model.device), persistent=False)

    @abstractmethod
    def slopes_of_heads(self, device: torch.device) -> Tensor:
        """Slopes of the heads, float32 [heads]."""

    def attended(
        self, heads: Sequence[Tensor], attention_mask: Tensor | None, scaling: float, taken: dict[str, Any]
    ) -> Tensor:
        """Outputs [1, B x Q, H x D] from queries, keys and values, [1, H, B x Q, D] each."""
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output: Tensor = attend(self, *heads, attention_mask, scaling=scaling, slopes=self.slopes, **taken)[0]
        return output.flatten(2)


def replace_function(module: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(theirs)` in the place of a function of transformers' module, once."""
    theirs = getattr(module, name)
    if not hasattr(theirs, "replaces"):
        ours = wraps(theirs)(around(theirs))
        ours.replaces = theirs  # type: ignore[attr-defined]
        setattr(module, name, ours)


def own_module(module: nn.Module) -> Any:
    """The Python module of transformers that defines the class of a replaced module."""
    return sys.modules[type(module).__bases__[1].__module__]


class OwnAttentionModel(Replaced):
    """A model that hands the paged inputs to its attention modules, since its layers take no keywords."""

    _can_set_attn_implementation_cached_value = True  # otherwise transformers looks in the module's code

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        attention = [module for module in self.modules() if isinstance(module, Attends)]
        with handed(attention, taken_from(kwargs) if attention else {}):
            return super().forward(*arguments, **kwargs)


def taken_from(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the inputs of our attention out of a model's keywords, if there are any: a step's paged inputs, or the
    reference's quantizer (`runtime.builder.reference`).
    """
    taken = {name: kwargs.pop(name, None) for name in ("paged", "quantize_kv")}
    return {name: value for name, value in taken.items() if value is not None}


@contextmanager
def handed(modules: Iterable[nn.Module], taken: dict[str, Any], method: str = "forward") -> Iterator[None]:
    """Within the block, add the keywords `taken` to calls of a method of these modules. Afterwards the previous
    attribute is put back: `torch.compile` does not understand that an attribute is deleted.
    """
    before = [(module, getattr(module, method)) for module in modules] if taken else []
    for module, function in before:
        setattr(module, method, partial(function, **taken))
    try:
        yield
    finally:
        for module, function in before:
            setattr(module, method, function)


def attends_by_ours(config: Any) -> bool:
    return config._attn_implementation in (KERNEL, PAGED, PROBE)


class Indexer(OwnForward):
    """An index that chooses all keys: sequences are limited to the number of keys that the index may choose."""

    def computed(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Tensor:
        return hidden_states.new_zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)


class Indexed(Replaced):
    """Attention to the keys that an index chooses, which are all keys (`Indexer`), so that its mask stays causal."""

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("paged"), PagedInputs) and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = kwargs["hidden_states"].new_zeros(1, 1, 1, 1)  # for the index to look at
        return super().forward(*arguments, **kwargs)

    def build_attention_mask_from_topk(self, **kwargs: Any) -> Tensor | None:
        if attends_by_ours(self.model_config):
            return None
        mask: Tensor = super().build_attention_mask_from_topk(**kwargs)  # type: ignore[misc]
        return mask
