"""Replaces the classes of a model's modules with those of its family (`runtime.model.families`)."""

from functools import cache

from torch import nn
from transformers import PreTrainedModel

from runtime.model.families.registry import are_linear, replacement_of
from runtime.model.replaced import Replaced


def place_modules(model: PreTrainedModel) -> None:
    """Replace the classes of the model's modules. Without paged inputs they compute as transformers' classes do."""
    for name, module in model.named_modules():
        if is_linear(module):
            module.__class__ = nn.Linear
        ours = replacement_of(type(module).__name__)
        if ours is None or isinstance(module, ours) or not ours.fits(module):
            continue
        module.model_config = model.config
        module.__class__ = _placed(type(module), ours)  # type: ignore[arg-type]
        module.prepare(name, model)


def is_linear(module: nn.Module) -> bool:
    """True for torch's linear layers, and for classes that only sum a product in another order, such as Falcon's."""
    return are_linear(type(module).__name__)


@cache
def _placed(module_class: type[nn.Module], ours: type[Replaced]) -> type[nn.Module]:
    return type(module_class.__name__, (ours, module_class), {})
