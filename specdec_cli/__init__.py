"""Speculative decoding for Hugging Face models: the names that Python users import.

They are loaded when they are first asked for, so that the command line starts without torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing's, whose import takes time before `specdec_cli.signals` can set its handlers
if TYPE_CHECKING:
    from runtime.builder.profile import profile_for as profile_for
    from runtime.core.generation import Output as Output
    from runtime.core.generation import Piece as Piece
    from runtime.core.generation import RequestOutput as RequestOutput
    from runtime.core.params import SamplingParams as SamplingParams
    from runtime.core.request import Draft as Draft
    from runtime.core.request import Sequence as Sequence
    from runtime.core.stats import TokenLogprobs as TokenLogprobs
    from runtime.drafters.specs import *  # noqa: F403
    from runtime.engine.engine import KVCacheConfig as KVCacheConfig
    from runtime.llm import LLM as LLM
    from runtime.llm import AsyncLLM as AsyncLLM
    from runtime.loop.lossless.results import DistributionCheck as DistributionCheck
    from runtime.loop.lossless.results import TokenCheck as TokenCheck
    from runtime.util.errors import SpecDecError as SpecDecError
    from runtime.util.errors import SpecDecWarning as SpecDecWarning
    from runtime.util.errors import UsageError as UsageError

_HOMES = {
    "runtime.engine.engine": ("KVCacheConfig",),
    "runtime.util.errors": ("SpecDecError", "SpecDecWarning", "UsageError"),
    "runtime.loop.lossless.results": ("DistributionCheck", "TokenCheck"),
    "runtime.llm": ("LLM", "AsyncLLM"),
    "runtime.core.generation": ("Output", "Piece", "RequestOutput"),
    "runtime.core.params": ("SamplingParams",),
    "runtime.core.request": ("Draft", "Sequence"),
    "runtime.core.stats": ("TokenLogprobs",),
    "runtime.builder.profile": ("profile_for",),
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
