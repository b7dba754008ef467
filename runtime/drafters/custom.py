"""The user's own drafter: imported, checked, and wrapped so that an error in it is reported as the user's."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.core.request import Draft, Sequence
from runtime.drafters.protocol import Drafter, DraftFunction
from runtime.util.errors import SpecDecError

_NUM_SHOWN = 10
"""Most names of a module that an error lists."""


def load_custom_drafter(module_name: str, factory_name: str) -> "GuardedDrafter":
    """Call the user's factory; SpecDecError if it cannot be imported, fails, or returns no drafter."""
    name = f"{module_name}:{factory_name}"
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise SpecDecError(
            f"cannot import the drafter's module ({type(error).__name__}: {error}): {module_name}",
            hint="it is looked for in the current directory and where Python finds packages",
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        shown = ", ".join([*known[:_NUM_SHOWN], *(["…"] if len(known) > _NUM_SHOWN else [])]) or "nothing"
        raise SpecDecError(
            f"the module has no function or class of this name to make a drafter: {name}", hint=f"it has: {shown}"
        )
    return guarded_drafter(name, _guarded(name, factory))


def guarded_drafter(name: str, drafter: Any) -> "GuardedDrafter":
    """Wrap the user's drafter, an object or a function. SpecDecError for any other object."""
    if isinstance(drafter, type):
        raise SpecDecError(
            f"`{name}` is a class, not a drafter: {drafter.__name__}",
            hint=f"make an object of the class: {drafter.__name__}()",
        )
    missing = [method for method in ("propose", "forget") if not callable(getattr(drafter, method, None))]
    if missing == ["propose", "forget"] and callable(drafter):
        return GuardedDrafter(name, _FunctionDrafter(drafter))
    if missing:
        raise SpecDecError(
            f"`{name}` is not a drafter, it lacks `{'` and `'.join(missing)}`: {type(drafter).__name__}",
            hint="a drafter has `propose(sequences, max_draft_len)` and `forget(request_id)`",
        )
    return GuardedDrafter(name, drafter)


class _FunctionDrafter:
    """Drafter made from a function of a sequence's tokens and the maximum draft length."""

    def __init__(self, function: DraftFunction) -> None:
        self._function = function

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(list(self._function(list(s.tokens), max_draft_len))[:max_draft_len]) for s in sequences]

    def forget(self, request_id: int) -> None:
        """Do nothing: a function keeps nothing between requests."""


class GuardedDrafter:
    """The user's drafter. Its errors are reported under its name, SpecDecError for changed tokens of a sequence among
    them. `has_given_probs` is True once it has returned probabilities.
    """

    def __init__(self, name: str, drafter: Drafter) -> None:
        self._name, self._drafter = name, drafter
        self.has_given_probs = False

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        before = [list(sequence.tokens) for sequence in sequences]
        drafts: list[Draft] = _guarded(self._name, self._drafter.propose, sequences, max_draft_len)
        for sequence, tokens in zip(sequences, before, strict=True):
            if sequence.tokens != tokens:
                raise SpecDecError(
                    f"the drafter `{self._name}` changed the tokens of {sequence.request.name}",
                    hint="work on a copy: `tokens = list(sequence.tokens)`",
                )
        if isinstance(drafts, list):
            self.has_given_probs |= any(getattr(draft, "probs", None) is not None for draft in drafts)
        return drafts

    def forget(self, request_id: int) -> None:
        _guarded(self._name, self._drafter.forget, request_id)


def _guarded(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except SpecDecError:
        raise
    except (Exception, SystemExit) as error:  # a user's code
        raise SpecDecError(
            f"the drafter `{name}` failed: {type(error).__name__}: {error}",
            hint="the traceback shows where",
            code="drafter_failed",
        ) from error
