"""A family of models: everything that specdec knows of it beyond transformers' config class and model class."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.model.replaced import Replaced


@dataclass(frozen=True)
class Refusal:
    """A value of config.json with which the family's models are refused."""

    key: str
    allowed: Collection[Any]
    """The values that are accepted; every other value is refused."""
    words: str
    """The reason, which stands in the error: `words: model_type`."""


@dataclass(frozen=True)
class Family:
    """A family of models, by the `model_type` of its config.json. A family without a row has nothing special."""

    model_type: str

    # Keys of config.json
    also_called: Collection[str] = ()
    """Model types that are published with code of their own, which computes the same as this type in transformers."""
    same_on_text: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values that change the config of this language model inside a multimodal model into the config of the
    model alone; `model_type` is among them. On text, where positions in time, height and width are equal, both compute
    the same.
    """
    reads: Collection[str] = ()
    """Keys that transformers' code reads by `getattr`, so that the config's class has no field for them, and keys of
    earlier versions that a field with another name has replaced.
    """
    ignores: Collection[str] = ()
    """Fields of the config's class that transformers' model ignores, whatever their values."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Keys in published configs that state what the code does in any case, each with the value for it."""
    refusals: tuple[Refusal, ...] = ()
    rope_theta_within: str | None = None
    """Name of the inner config that alone has `rope_theta`."""
    key_of_positions: str | None = None
    """Key with the number of positions for which the model has attention biases."""
    longrope_changes_scale_alone: bool = False
    """True if `longrope` keeps its first set of factors in long sequences and changes only their scale."""

    # Layers
    layer_types: Collection[str] = ()
    """Types of layers beside attention that the family may have (`layer_types` of the config), including those with a
    state. Only such families have layers with a state.
    """
    hands_over: bool = False
    """True if attention gets a step's paged inputs although transformers' class declares no parameter for them."""

    # Classes of transformers
    causal_class: str | None = None
    """The text model or causal model (`...ForCausalLM`) that transformers does not list as a causal model."""
    experts_class: str | None = None
    """Name of a class of experts that computes like transformers' interface for experts without being registered."""
    weights_as: str | None = None
    """Model type whose mapping of weights in files transformers has, for a family without a mapping of its own."""
    is_published_alone: bool = False
    """True if files may also have the language model alone, with the names inside layers that `weights_as` has."""
    replaced: Mapping[str, type[Replaced]] = field(default_factory=dict)
    """Classes of the model's modules by name, and the class that replaces each."""
    linear_classes: Collection[str] = ()
    """Linear layers that differ from torch's only in the order in which a product is summed."""
