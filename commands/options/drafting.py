"""The flags of drafters: which there are, how long their drafts are, and on which devices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from commands.options.drafter_configs import (
    DRAFT_TARGET_FORM,
    NGRAM_FORM,
    SELF_DRAFT_FORM,
    SUFFIX_FORM,
    Devices,
    parse_custom_drafter,
    parse_draft_target_model_config,
    parse_ngram_config,
    parse_self_draft_config,
    parse_suffix_config,
)
from commands.options.drafting_models import ModelDrafterOptions
from commands.options.expand import given_flags
from commands.options.lookups import LookupOptions
from commands.options.panels import SPECULATION
from runtime.drafters.settings import (
    ChainDrafter,
    DrafterName,
    DrafterSettings,
    DraftLenMode,
    OneDrafter,
)
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.bundle import Bundle

DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
FLAGS: dict[DrafterName, str] = {
    "ngram": "--ngram-config",
    "suffix": "--suffix-config",
    "draft-target": "--draft-target-model-config",
    "self": "--self-draft-config",
    "custom": "--drafter",
}


Drafters = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help=f"Several drafters, of which each sequence gets the draft that is worth most: {', '.join(DRAFTER_NAMES)}, "
        "each with its own flag; `auto` takes all that are given.",
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class DraftingOptions:
    """How to draft; None where nothing was given."""

    lookups: LookupOptions = field(default_factory=LookupOptions)
    models: ModelDrafterOptions = field(default_factory=ModelDrafterOptions)
    draft_len_mode: Annotated[
        DraftLenMode | None,
        typer.Option(
            metavar="[fixed|auto]",
            help="`auto` sends of each draft what pays: by what steps cost, measured by `build`, and by how often "
            "drafts were right so far; nothing, where nothing pays. `fixed` sends all of it.",
            rich_help_panel=SPECULATION,
            show_default="auto in leader mode, fixed in orchestrator mode",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draft as `specdec tune` recommends for this engine, or not at all; in place of all flags that choose "
            "a drafter.",
            rich_help_panel=SPECULATION,
            show_default=False,
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:NAME",
            help="Draft by what a function of your own returns: module:factory; the current directory is searched too.",
            rich_help_panel=SPECULATION,
            show_default="no drafter",
        ),
    ] = None
    drafters: Drafters = None

    @property
    def paths(self) -> list[Path]:
        """What is read."""
        return [
            path for path in (self.models.draft_engine_dir, self.lookups.ngram_corpus, self.profile) if path is not None
        ]

    def check_profile(self, leader_flags: Iterable[str] = (), model_dir: str | None = None) -> None:
        """UsageError for a profile beside flags that choose a drafter, or for an engine yet to be made of a model.

        `leader_flags` are those of leader mode that choose one.
        """
        if self.profile is None:
            return
        given = [*given_flags(replace(self, profile=None)), *leader_flags]
        if given:
            raise UsageError(
                f"`{given[0]}` and `--profile` both say how to draft: {self.profile}",
                hint="leave one of the two out",
            )
        if model_dir is not None:
            raise UsageError(
                f"a profile needs `--engine-dir`, and cannot be given with `--model-dir`: {self.profile}",
                hint="name the engine that was tuned, or give the drafter by its flags",
            )


@dataclass(frozen=True)
class Named:
    """A drafter that flags name, None for none, and the devices that they give the target, None for its first ones."""

    drafter: DrafterSettings | None
    device_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Drafting:
    """How to draft: as the flags say, or the profile."""

    named: Named
    draft_len_mode: DraftLenMode | None
    """None: `default_draft_len_mode`."""
    profile: Path | None
    bundle: "Bundle | None" = None
    """The engine's, where the profile was held against it."""


def choose_drafting(options: DraftingOptions, named: Named, engine_dir: Path, *, check_lossless: bool) -> Drafting:
    """`named`, what the flags name, or what the profile has for this engine.

    SpecDecError for a profile that cannot be used, UsageError for what needs a drafter where there is none.
    """
    drafting = Drafting(named, options.draft_len_mode, options.profile)
    if options.profile is not None:
        from runtime.bundle import read_bundle
        from runtime.tuning.profile import profile_for

        bundle = read_bundle(engine_dir)
        tuned = profile_for(options.profile, bundle)
        drafting = Drafting(Named(tuned.drafter), tuned.draft_len_mode, options.profile, bundle)
    check_drafter(drafting, check_lossless=check_lossless)
    return drafting


def check_drafter(drafting: Drafting, *, check_lossless: bool) -> None:
    """UsageError for what needs a drafter where there is none."""
    if drafting.named.drafter is not None:
        return
    if drafting.draft_len_mode == "auto":
        raise UsageError(
            "`--draft-len-mode auto` needs a drafter: there is none", hint="`--suffix-config [10,[0]]` is one"
        )
    if check_lossless:
        raise UsageError(
            "`--check-lossless` compares a drafter with none, and there is no drafter",
            hint="`--ngram-config [10,2,[0]]` is one",
        )


def parse_drafter(options: DraftingOptions) -> Named:
    """The drafter the flags ask for; UsageError for two of them without an order, or half of one."""
    configs = given_configs(options)
    names = chosen_names(list(configs), options.drafters)
    for name in names:
        if name not in configs:
            raise UsageError(
                f"`--drafters` names {name}, which needs `{FLAGS[name]}`: {options.drafters}", hint=_form(name)
            )
    options.lookups.check_used(names, f"`--ngram-config` chooses it; its form is {NGRAM_FORM}")
    if options.models.draft_engine_dir is not None and "draft-target" not in configs:
        raise UsageError(
            f"`--draft-engine-dir` needs `--draft-target-model-config`: {options.models.draft_engine_dir}",
            hint=f"the form of `--draft-target-model-config` is {DRAFT_TARGET_FORM}",
        )
    return chain([parse_config(name, configs[name], options, options.models.draft_engine_dir) for name in names])


def given_configs(options: DraftingOptions) -> dict[DrafterName, str]:
    """The drafters that have a flag of their own here, and what it says."""
    texts: dict[DrafterName, str | None] = {
        "ngram": options.lookups.ngram_config,
        "suffix": options.lookups.suffix_config,
        "draft-target": options.models.draft_target_model_config,
        "self": options.models.self_draft_config,
        "custom": options.drafter,
    }
    return {name: text for name, text in texts.items() if text is not None}


def chosen_names(given: list[DrafterName], drafters: str | None) -> list[DrafterName]:
    """The drafters to use: the one that is given, or those that `--drafters` names, which may be more."""
    if drafters is None:
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(f'`{FLAGS[name]}`' for name in given)} cannot be given together",
                hint="choose one drafter, or have the best of their drafts sent: `--drafters auto`",
            )
        return given
    if is_auto(drafters):
        if not given:
            raise UsageError(
                "`--drafters auto` chooses among the drafters that are given, and there is none",
                hint="`--ngram-config [10,2,[0]] --suffix-config [10,[0]]` are two",
            )
        return given
    names = parse_drafter_names(drafters)
    for name in given:
        if name not in names:
            raise UsageError(
                f"`{FLAGS[name]}` is given, and `--drafters` does not name {name}: {drafters}",
                hint=f"`--drafters {','.join([*names, name])}`, or leave the flag out",
            )
    return names


def parse_config(
    name: DrafterName, text: str, options: DraftingOptions, draft_model: str | Path | None
) -> tuple[OneDrafter, Devices]:
    """What a drafter's own flag says: the drafter, and the target's devices."""
    match name:
        case "ngram":
            return parse_ngram_config(text, options.lookups)
        case "suffix":
            return parse_suffix_config(text, options.lookups)
        case "draft-target":
            return parse_draft_target_model_config(text, draft_model)
        case "self":
            return parse_self_draft_config(text)
        case "custom":
            return parse_custom_drafter(text), None


def chain(drafters: Sequence[tuple[OneDrafter, Devices]]) -> Named:
    """Drafters, each with the target's devices, as one; UsageError if they do not agree where the target runs."""
    named = list(dict.fromkeys(devices for _, devices in drafters if devices is not None))
    if len(named) > 1:
        raise UsageError(
            f"the drafters name different devices for the target: {', '.join(str(list(one)) for one in named)}",
            hint="name the same devices in each",
        )
    settings = [drafter for drafter, _ in drafters]
    if not settings:
        return Named(None)
    return Named(settings[0] if len(settings) == 1 else ChainDrafter(settings), named[0] if named else None)


def is_auto(drafters: str) -> bool:
    """Whether `--drafters` asks for all that are given."""
    return drafters.strip().lower() == "auto"


def parse_drafter_names(text: str) -> list[DrafterName]:
    """Parse `--drafters ngram,draft-target`; UsageError for a name that is unknown or comes twice."""
    names: list[DrafterName] = []
    for word in text.split(","):
        name = next((name for name in DRAFTER_NAMES if name == word.strip().lower().replace("_", "-")), None)
        if name is None:
            raise UsageError(
                f"`--drafters` names no drafter of specdec's: {word.strip() or repr(text)}",
                hint=f"there are {', '.join(DRAFTER_NAMES)}, with commas between them, and auto",
            )
        if name in names:
            raise UsageError(f"`--drafters` names {name} twice: {text}", hint="name each once")
        names.append(name)
    return names


def _form(name: DrafterName) -> str:
    forms = {"ngram": NGRAM_FORM, "suffix": SUFFIX_FORM, "draft-target": DRAFT_TARGET_FORM, "self": SELF_DRAFT_FORM}
    return f"the form of `{FLAGS[name]}` is {forms.get(name, 'module:factory')}"
