"""Speculative decoding for Hugging Face models: the names that Python users import.

They are loaded when they are first asked for, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.drafters import specs as _specs
from runtime.drafters.specs import *  # noqa: F403  # every drafter that is described there

if TYPE_CHECKING:
    from runtime.engine import KVCacheConfig as KVCacheConfig
    from runtime.errors import SpecDecError as SpecDecError
    from runtime.errors import SpecDecWarning as SpecDecWarning
    from runtime.errors import UsageError as UsageError
    from runtime.evaluation.checks import DistributionCheck as DistributionCheck
    from runtime.evaluation.checks import TokenCheck as TokenCheck
    from runtime.generation import Output as Output
    from runtime.generation import Piece as Piece
    from runtime.llm import LLM as LLM
    from runtime.params import SamplingParams as SamplingParams
    from runtime.request import Draft as Draft
    from runtime.request import Sequence as Sequence
    from runtime.stats import TokenLogprobs as TokenLogprobs
    from runtime.tuning.profile import profile_for as profile_for

_HOMES = {
    "runtime.engine": ("KVCacheConfig",),
    "runtime.errors": ("SpecDecError", "SpecDecWarning", "UsageError"),
    "runtime.evaluation.checks": ("DistributionCheck", "TokenCheck"),
    "runtime.llm": ("LLM",),
    "runtime.generation": ("Output", "Piece"),
    "runtime.params": ("SamplingParams",),
    "runtime.request": ("Draft", "Sequence"),
    "runtime.stats": ("TokenLogprobs",),
    "runtime.tuning.profile": ("profile_for",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF, *_specs.__all__]


def __getattr__(name: str) -> Any:
    """PEP 562: import a public name from where it lives."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
