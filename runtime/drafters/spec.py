"""Description of a drafter: its settings, the list that chooses it, its names. `runtime.drafters.specs` has all
drafters.

Flags, lists, documents, schemas, labels, `tune`'s candidates and profiles are made from these descriptions. Nothing
here imports torch: a drafter's algorithm is imported when it is opened.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from runtime.drafters.lists import ListForm, TextForm
from runtime.util.errors import UsageError

if TYPE_CHECKING:
    from runtime.drafters.heads.head_config import HeadConfig
    from runtime.drafters.opened import OpenDrafter, Opener

NgramRanking = Literal["oldest", "leftmost", "recent", "frequent"]
PoolKind = Literal["private", "owner", "public"]
DraftLenMode = Literal["fixed", "auto"]
"""`auto` cuts each draft to the length that is expected to save time, which may be 0; `fixed` sends the whole draft."""


@dataclass(frozen=True)
class LeaderFlag:
    """A flag of leader mode (V2), by its Python name. Every drafter whose settings name the flag takes it."""

    name: str
    help: str
    shown: str | None = None
    """Default in `--help`, if it is not the field's."""
    at_most: int | None = None


@dataclass(frozen=True)
class Setting:
    """Description of a field besides its type and default, as `Annotated` metadata. Flags are Python names."""

    help: str = ""
    flag: str | None = None
    """Name of a flag for this setting alone. Drafters that name the same flag share it."""
    leader: LeaderFlag | None = None
    leader_default: int | None = None
    """Default in leader mode, if it is not the field's own."""
    leader_fixed: int | None = None
    """Default in leader mode if lengths are fixed; None for TensorRT-LLM's."""
    at_least: int | None = None
    hint: str = "to draft nothing, leave the drafter out"
    """Remedy for a value that is not allowed."""
    is_path: bool = False
    key: str | None = None
    """Key in documents, if it is not the field's name."""

    @property
    def leader_flag(self) -> str | None:
        """Name of the flag of leader mode."""
        return None if self.leader is None else self.leader.name

    def has_flag(self, flag: str) -> bool:
        """True if this flag, of either mode, gives the setting."""
        return flag in (self.flag, self.leader_flag)

    @property
    def names_model(self) -> bool:
        """True if the setting names the model that drafts, by a flag of either mode."""
        return self.is_path and self.leader is not None


def fields_of(spec: "DrafterSpec | type[DrafterSpec]") -> "tuple[dataclasses.Field[Any], ...]":
    """Fields of a spec: every spec is a dataclass."""
    return dataclasses.fields(spec)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Description:
    """Names of a drafter, and the flag that chooses it. Flags are written as Python names."""

    name: str
    """Name in lists of drafters and in documents."""
    title: str
    """Name in sentences and reports."""
    help: str
    flag: str
    form: ListForm | TextForm
    algorithm: str | None = None
    """Name in leader mode (V2); None for a drafter that leader mode cannot name."""
    note: str = ""
    """Text after the form in the flag's help."""
    is_tuned: bool = True
    """True if `tune` and profiles know it."""
    label: str | None = None
    """Name in tables, if it is not the title."""


def with_first_devices(record: dict[str, Any], first: Callable[[Any], Any]) -> dict[str, Any]:
    """A document's record with `device_id`, the first device, before each list `device_ids`."""
    found = {}
    for name, value in record.items():
        if name.endswith("device_ids"):
            found[name.removesuffix("s")] = first(value)
        found[name] = value
    return found


DRAFTERS: dict[str, "type[DrafterSpec]"] = {}
"""Every drafter that the command line can choose, by name."""


class DrafterSpec(ABC):
    """Settings of a drafter: a frozen dataclass. A class with a `description` of its own is a drafter that the command
    line can choose.
    """

    description: ClassVar[Description]
    is_model: ClassVar[bool] = False
    """True if its drafts cost steps of a model."""
    is_lookup: ClassVar[bool] = False
    """True if recorded outputs suffice to find its drafts."""
    is_in_auto: ClassVar[bool] = False
    """True for the lookup that AUTO takes if no lookup is named: it finds what other lookups find."""
    is_in_auto_of_many: ClassVar[bool] = False
    """True for a drafter that AUTO takes in commands that answer many requests (`serve`, `batch`)."""
    comes_first: ClassVar[bool] = False
    """True for a drafter that is asked before others; these draft if it knows nothing (`AnswersFirst`)."""
    reads_states: ClassVar[bool] = False
    """True if the target's engine must be built to give hidden states."""
    needs_copy: ClassVar[bool] = False
    """True if the target's engine must have a self-draft copy."""

    def __init_subclass__(cls) -> None:
        """Register a class with a `description` under its name. UsageError if another class has the name."""
        if "description" not in vars(cls):
            return
        name = cls.description.name
        known = DRAFTERS.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(
                f"there is a drafter of this name already, {known.__module__}:{known.__qualname__}: {name}",
                hint="give it another name",
            )
        DRAFTERS[name] = cls  # of a dataclass with slots Python makes a second class

    def __post_init__(self) -> None:
        for name, setting in self.settings().items():
            least, value = setting.at_least, getattr(self, name)
            if least is not None and value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}: {value}", hint=setting.hint)

    @property
    @abstractmethod
    def max_draft_len(self) -> int | None:
        """Maximum length of a draft; None for as long as the engine takes."""

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def draws_by_probs(self) -> bool:
        """True if its drafts affect sampled tokens, by rejection sampling, as far as is known."""
        return bool(getattr(self, "use_logits", False))

    @property
    def may_draw_by_probs(self) -> bool:
        """True if its drafts affect sampled tokens, or if that is unknown."""
        return self.draws_by_probs

    @property
    def draft_model(self) -> str | Path | None:
        """The draft model, by its name or its engine's directory; None for other drafters."""
        return None

    @property
    def num_masks(self) -> int | None:
        """Number of mask tokens behind a sequence, if one pass drafts all tokens; None for other drafters."""
        return None

    def with_own_devices(self) -> "DrafterSpec":
        """A copy with the draft model's devices written out, if they are left to the default."""
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts in the order in which they are asked: n-gram lookup in a text, then in a corpus."""
        return (self.name,)

    def of_target(self, model: str | Path | None) -> "DrafterSpec":
        """A copy that knows the target. `model` is the name or directory from which an `LLM` was made; None if that was
        an engine's directory.
        """
        return self

    def with_draft_model(self, engine_dir: Path) -> "DrafterSpec":
        """A copy with this engine as its draft model; the spec itself if it has no draft model."""
        return self

    def read_heads(self) -> "list[HeadConfig]":
        """Configs of its heads, for which the target's engine must be built; SpecDecError if a head cannot be read."""
        return []

    @classmethod
    def reads(cls, model: str | Path) -> bool:
        """True if `model`, which a setting names (`models`), is of the kind that this drafter drafts with."""
        return True

    @classmethod
    def is_in_model(cls, model: str | Path | None) -> bool:
        """True if the target's own files contain the drafter, such as an MTP head."""
        return False

    @property
    def corpora(self) -> tuple[Path, ...]:
        """The corpora that it searches."""
        return ()

    @property
    def label(self) -> str:
        """Label for tables, which distinguishes this drafter from others of its kind."""
        return self.description.label or self.description.title

    @classmethod
    def grid(cls, max_draft_len: int) -> "list[DrafterSpec]":
        """Candidates that `tune` replays; only lookups have any."""
        return []

    @classmethod
    @cache
    def settings(cls) -> dict[str, Setting]:
        """The drafter's settings by its fields' names."""
        found = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            metadata = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Setting)]
            found[name] = metadata[0] if metadata else Setting()
        return {field.name: found[field.name] for field in fields_of(cls)}

    @classmethod
    def models(cls) -> dict[str, Setting]:
        """Settings that name models. A command line must give them, unless the target is the model (`is_in_model`)."""
        return {name: setting for name, setting in cls.settings().items() if setting.names_model}

    def record(self, device_ids: tuple[int, ...]) -> Any:
        """The settings as a record for documents, with the target's devices; a text for a `TextForm`."""
        form = self.description.form
        if isinstance(form, TextForm):
            return form.write(self, device_ids)
        record = {setting.key or name: getattr(self, name) for name, setting in self.settings().items()}
        record = {key: str(value) if isinstance(value, Path) else value for key, value in record.items()}
        return with_first_devices(record | {"device_ids": device_ids}, lambda devices: (devices or (0,))[0])

    @abstractmethod
    def open(self, opening: "Opener") -> "OpenDrafter":
        """Open the drafter; SpecDecError if that is impossible."""
