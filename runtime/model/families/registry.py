"""All families of models that have something special, by model type: every file in this folder with `FAMILIES`."""

import pkgutil
from importlib import import_module

from runtime.model import families
from runtime.model.families.family import Family
from runtime.model.replaced import Replaced
from runtime.util.errors import SpecDecError

_families: dict[str, Family] = {}
_replaced: dict[str, type[Replaced]] = {}


def register(family: Family) -> None:
    """Register a family; SpecDecError if its model type is taken, or one of its classes already has a replacement."""
    if family.model_type in _families:
        raise SpecDecError(
            f"a family of this model type is there already: {family.model_type}", hint="give it another `model_type`"
        )
    for name, ours in family.replaced.items():
        if _replaced.get(name, ours) is not ours:
            raise SpecDecError(
                f"two families have a replacement for the same class of transformers: {name}",
                hint="give the module another class",
            )
    _families[family.model_type] = family
    _replaced.update(family.replaced)


def unregister(model_type: str) -> None:
    """Forget a family that `register` added."""
    del _families[model_type]
    _replaced.clear()
    for family in _families.values():
        _replaced.update(family.replaced)


def family_of(model_type: str) -> Family:
    """The family for a model type; a family without anything special if none is registered."""
    return _families.get(model_type) or Family(model_type)


def published_type(model_type: str) -> str:
    """transformers' model type for models published as `model_type`: `qwen2` for `mimo`."""
    return next((name for name, one in _families.items() if model_type in one.also_called), model_type)


def replacement_of(class_name: str) -> type[Replaced] | None:
    """The class that replaces a class of transformers' modules; None if no family has a replacement."""
    return _replaced.get(class_name)


def are_linear(class_name: str) -> bool:
    """True for a class that a family declares to be a plain linear layer like torch's."""
    return any(class_name in family.linear_classes for family in _families.values())


for _module in sorted(pkgutil.iter_modules(families.__path__)):
    if _module.name not in ("family", "registry"):
        for _family in import_module(f"{families.__name__}.{_module.name}").FAMILIES:
            register(_family)
