"""Speculative decoding for Hugging Face models: the names that Python users import.

They are loaded when they are first asked for, so that the command line starts without torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing's, whose import takes time before `specdec_cli.signals` can set its handlers
if TYPE_CHECKING:
    from runtime.drafters.specs import *  # noqa: F403
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
_DRAFTERS = "runtime.drafters.specs"
"""Module of every drafter's class: its own list of names is the list of drafters."""


def __getattr__(name: str) -> object:
    """PEP 562: import a public name from where it lives."""
    if name == "__all__":
        return _public_names()
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name[:1].isupper() and name in import_module(_DRAFTERS).__all__:  # not for each module of this package
        return getattr(import_module(_DRAFTERS), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_public_names()])


def _public_names() -> list[str]:
    return [*_HOME_OF, *import_module(_DRAFTERS).__all__]
