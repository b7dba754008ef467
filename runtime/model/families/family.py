"""A family of models: all that specdec knows of it beside its config class and its model class in transformers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.model.replaced import Replaced


@dataclass(frozen=True)
class Refusal:
    """A value of config.json that the family's models are not run with."""

    key: str
    allowed: Collection[Any]
    """The values that are run; every other value is refused."""
    words: str
    """The reason, in the error: `words: model_type`."""


@dataclass(frozen=True)
class Family:
    """A family of models, by the `model_type` of its config.json. A family without a row has nothing special."""

    model_type: str

    # Keys of config.json
    also_called: Collection[str] = ()
    """Model types that are published with code of their own, which computes what this type of transformers does."""
    same_on_text: Mapping[str, Any] = field(default_factory=dict)
    """Values, `model_type` among them, by which a config of this language model inside another is that of a model by
    itself: on text, where positions in time, height and width are one, both compute the same."""
    reads: Collection[str] = ()
    """Keys that transformers' code reads by `getattr`, so that no field of the config's class names them, and keys from
    earlier versions of the family whose meaning a field with another name has."""
    ignores: Collection[str] = ()
    """Fields of the config's class that transformers' model does not compute with, whatever they say."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Keys in published configs that say what the code always does, each with that value."""
    refusals: tuple[Refusal, ...] = ()
    rope_theta_within: str | None = None
    """The config inside the config that alone has `rope_theta`."""
    key_of_positions: str | None = None
    """The key with the number of positions that the model has biases for."""
    longrope_changes_scale_alone: bool = False
    """True if `longrope` keeps its first set of factors in long sequences, and changes their scale."""

    # Layers
    layer_types: Collection[str] = ()
    """Types of layers beside attention, those with a state among them, that the family may have (`layer_types` of the
    config). Only such families have layers with a state."""
    hands_over: bool = False
    """True if attention gets a step's paged inputs although transformers' class does not say that it takes any."""

    # Classes of transformers
    causal_class: str | None = None
    """The text model, or the causal language model (`...ForCausalLM`), that transformers does not list as one."""
    experts_class: str | None = None
    """Experts that compute as transformers' interface for them could, and that transformers does not offer it."""
    weights_as: str | None = None
    """The model type for which transformers says how weights lie in files, in pieces, where it does not for this."""
    is_published_alone: bool = False
    """True if files have the language model by itself too, with the names inside of layers that `weights_as` has."""
    replaced: Mapping[str, type[Replaced]] = field(default_factory=dict)
    """Classes of the model's modules, by name, and the class that stands for each."""
    linear_classes: Collection[str] = ()
    """Linear layers that differ from torch's in the order of a product's sum alone."""
