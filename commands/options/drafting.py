"""What the speculation flags say: which drafters, how long their drafts are, and on which devices."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from runtime.errors import UsageError

_NGRAM_FORM = "[max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]]"
_SUFFIX_FORM = "[max_draft_len, device_list], such as [10,[0]]"
_DRAFT_TARGET_FORM = "[draft_len, draft_device_list, target_device_list, use_logits], such as [4,[0],[0],False]"
_FIRST_DEVICE = "[0] is the first device"

NgramRanking = Literal["oldest", "leftmost", "recent", "frequent"]
NgramPoolKind = Literal["private", "public"]
DraftLenMode = Literal["fixed", "auto"]
DrafterName = Literal["ngram", "suffix", "draft-target", "custom"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
_FLAGS: dict[DrafterName, str] = {
    "ngram": "--ngram-config",
    "suffix": "--suffix-config",
    "draft-target": "--draft-target-model-config",
    "custom": "--drafter",
}


@dataclass(frozen=True)
class NgramOptions:
    """What else n-gram lookup can be told; None where nothing was given."""

    ranking: NgramRanking | None = None
    min_matching_ngram_size: int | None = None
    pool: NgramPoolKind | None = None
    corpus: Path | None = None

    def values(self) -> dict[str, object]:
        """Flags by name."""
        return {
            "--ngram-ranking": self.ranking,
            "--min-matching-ngram-size": self.min_matching_ngram_size,
            "--ngram-pool": self.pool,
            "--ngram-corpus": self.corpus,
        }

    def check(self, names: Sequence[DrafterName], hint: str) -> None:
        """UsageError for an option that none of the drafters has."""
        for flag, value in self.values().items():
            users = ("ngram", "suffix") if flag == "--ngram-pool" else ("ngram",)
            if value is not None and not set(users) & set(names):
                what = " or suffix matching" if "suffix" in users else ""
                raise UsageError(f"`{flag}` is for n-gram lookup{what}: {value}", hint=hint)


NO_OPTIONS = NgramOptions()


@dataclass(frozen=True)
class DrafterFlags:
    """What a command's flags say of drafters; None where nothing was given."""

    ngram_config: str | None = None
    suffix_config: str | None = None
    draft_target_model_config: str | None = None
    draft_engine_dir: Path | None = None
    drafter: str | None = None
    drafters: str | None = None
    ngram: NgramOptions = NO_OPTIONS

    def given(self) -> dict[str, object]:
        """Flags by name, with their values."""
        values = {
            "--ngram-config": self.ngram_config,
            **self.ngram.values(),
            "--suffix-config": self.suffix_config,
            "--draft-target-model-config": self.draft_target_model_config,
            "--draft-engine-dir": self.draft_engine_dir,
            "--drafter": self.drafter,
            "--drafters": self.drafters,
        }
        return {flag: value for flag, value in values.items() if value is not None}


@dataclass(frozen=True)
class NgramSettings:
    """`--ngram-config`, parsed, with the options of n-gram lookup."""

    max_draft_len: int
    max_matching_ngram_size: int
    device_id: int
    min_matching_ngram_size: int = 1
    ranking: NgramRanking = "oldest"
    pool: NgramPoolKind = "private"
    corpus: Path | None = None

    def with_options(self, options: NgramOptions) -> "NgramSettings":
        """UsageError if the smallest pattern is longer than the longest."""
        min_size = options.min_matching_ngram_size or self.min_matching_ngram_size
        if min_size > self.max_matching_ngram_size:
            raise UsageError(
                f"`--min-matching-ngram-size` exceeds the longest, {self.max_matching_ngram_size}: {min_size}",
                hint="lower it, or look up longer n-grams (max_matching_ngram_size)",
            )
        ranking, pool = options.ranking or self.ranking, options.pool or self.pool
        return replace(self, min_matching_ngram_size=min_size, ranking=ranking, pool=pool, corpus=options.corpus)


@dataclass(frozen=True)
class SuffixSettings:
    """`--suffix-config`, parsed, with `--ngram-pool`."""

    max_draft_len: int
    device_id: int
    pool: NgramPoolKind = "private"

    def with_options(self, options: NgramOptions) -> "SuffixSettings":
        return replace(self, pool=options.pool or self.pool)


@dataclass(frozen=True)
class DraftTargetSettings:
    """`--draft-target-model-config`, parsed, with `--draft-engine-dir`. `device_id` is the target's."""

    max_draft_len: int
    draft_device_id: int
    device_id: int
    use_logits: bool
    draft_engine_dir: Path


@dataclass(frozen=True)
class CustomSettings:
    """`--drafter module:factory`. Without a length drafts may be as long as the engine takes; device 0 runs it."""

    module: str
    factory: str
    max_draft_len: int | None = None
    device_id: int = 0


OneDrafterSettings = NgramSettings | SuffixSettings | DraftTargetSettings | CustomSettings
_NAMES: dict[type[OneDrafterSettings], DrafterName] = {
    NgramSettings: "ngram",
    SuffixSettings: "suffix",
    DraftTargetSettings: "draft-target",
    CustomSettings: "custom",
}


@dataclass(frozen=True)
class ChainSettings:
    """`--drafters`: each is asked where those before it have no proposal."""

    drafters: tuple[OneDrafterSettings, ...]

    @property
    def max_draft_len(self) -> int | None:
        """Of the drafter with the longest drafts."""
        lengths = [settings.max_draft_len for settings in self.drafters]
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    @property
    def device_id(self) -> int:
        return self.drafters[0].device_id


DrafterSettings = OneDrafterSettings | ChainSettings


def each_drafter(settings: DrafterSettings | None) -> tuple[OneDrafterSettings, ...]:
    """The settings of every drafter, in the order they are asked."""
    if settings is None:
        return ()
    return settings.drafters if isinstance(settings, ChainSettings) else (settings,)


def drafter_names(settings: DrafterSettings | None) -> list[DrafterName]:
    return [_NAMES[type(drafter)] for drafter in each_drafter(settings)]


def chain(drafters: Sequence[OneDrafterSettings]) -> DrafterSettings | None:
    """Several in one; UsageError if they do not agree where the target runs."""
    if len(drafters) < 2:
        return drafters[0] if drafters else None
    device_ids = list(dict.fromkeys(drafter.device_id for drafter in drafters))
    if len(device_ids) > 1:
        raise UsageError(
            f"the drafters name different devices for the target: {device_ids}", hint="name the same device in each"
        )
    return ChainSettings(tuple(drafters))


def parse_drafter(flags: DrafterFlags) -> DrafterSettings | None:
    """The drafter the flags ask for, None for none; UsageError for two of them without an order, or half of one."""
    configs: dict[DrafterName, str | None] = {
        "ngram": flags.ngram_config,
        "suffix": flags.suffix_config,
        "draft-target": flags.draft_target_model_config,
        "custom": flags.drafter,
    }
    given = [name for name, text in configs.items() if text is not None]
    if len(given) > 1 and flags.drafters is None:
        raise UsageError(
            f"{' and '.join(f'`{_FLAGS[name]}`' for name in given)} cannot be given together",
            hint=f"choose one drafter, or say in which order to ask them: `--drafters {','.join(given)}`",
        )
    names = given if flags.drafters is None else parse_drafter_names(flags.drafters)
    for name in names:
        if name not in given:
            raise UsageError(
                f"`--drafters` names {name}, which needs `{_FLAGS[name]}`: {flags.drafters}", hint=_form(name)
            )
    check_all_named(names, [(name, _FLAGS[name]) for name in given], flags.drafters)
    flags.ngram.check(names, f"`--ngram-config` chooses it; its form is {_NGRAM_FORM}")
    if flags.draft_engine_dir is not None and flags.draft_target_model_config is None:
        raise UsageError(
            f"`--draft-engine-dir` needs `--draft-target-model-config`: {flags.draft_engine_dir}",
            hint=f"the form of `--draft-target-model-config` is {_DRAFT_TARGET_FORM}",
        )
    parsers: dict[DrafterName, Callable[[str], OneDrafterSettings]] = {
        "ngram": lambda text: parse_ngram_config(text).with_options(flags.ngram),
        "suffix": lambda text: parse_suffix_config(text).with_options(flags.ngram),
        "draft-target": lambda text: parse_draft_target_model_config(text, flags.draft_engine_dir),
        "custom": parse_custom_drafter,
    }
    return chain([parsers[name](configs[name] or "") for name in names])


def parse_drafter_names(text: str) -> list[DrafterName]:
    """Parse `--drafters ngram,draft-target`; UsageError for a name that is unknown or comes twice."""
    names: list[DrafterName] = []
    for word in text.split(","):
        name = next((name for name in DRAFTER_NAMES if name == word.strip().lower().replace("_", "-")), None)
        if name is None:
            raise UsageError(
                f"`--drafters` names no drafter of specdec's: {word.strip() or repr(text)}",
                hint=f"there are {', '.join(DRAFTER_NAMES)}; commas stand between them",
            )
        if name in names:
            raise UsageError(f"`--drafters` names {name} twice: {text}", hint="each is asked once")
        names.append(name)
    return names


def check_all_named(
    names: Sequence[DrafterName], given: Sequence[tuple[DrafterName, str]], drafters: str | None
) -> None:
    """UsageError for a drafter with flags of its own that `--drafters` leaves out."""
    for name, flag in given:
        if name not in names:
            raise UsageError(
                f"`{flag}` is given, and `--drafters` does not name {name}: {drafters}",
                hint=f"`--drafters {','.join([*names, name])}`, or leave the flag out",
            )


def _form(name: DrafterName) -> str:
    forms = {"ngram": _NGRAM_FORM, "suffix": _SUFFIX_FORM, "draft-target": _DRAFT_TARGET_FORM}
    return f"the form of `{_FLAGS[name]}` is {forms.get(name, 'module:factory')}"


def parse_ngram_config(text: str) -> NgramSettings:
    """Parse `[max_draft_len, max_matching_ngram_size, device_list]`; UsageError says which part is wrong."""
    flag = "--ngram-config"
    max_draft_len, max_matching_ngram_size, devices = _parse_list(flag, text, 3, _NGRAM_FORM)
    return NgramSettings(
        max_draft_len=_positive(flag, "max_draft_len", max_draft_len, _NGRAM_FORM),
        max_matching_ngram_size=_positive(flag, "max_matching_ngram_size", max_matching_ngram_size, _NGRAM_FORM),
        device_id=_single_device(flag, "device_list", devices),
    )


def parse_suffix_config(text: str) -> SuffixSettings:
    """Parse `[max_draft_len, device_list]`; UsageError says which part is wrong."""
    flag = "--suffix-config"
    max_draft_len, devices = _parse_list(flag, text, 2, _SUFFIX_FORM)
    return SuffixSettings(
        max_draft_len=_positive(flag, "max_draft_len", max_draft_len, _SUFFIX_FORM),
        device_id=_single_device(flag, "device_list", devices),
    )


def parse_draft_target_model_config(text: str, draft_engine_dir: Path | None) -> DraftTargetSettings:
    """Parse `[draft_len, draft_device_list, target_device_list, use_logits]`; UsageError says which part is wrong."""
    flag = "--draft-target-model-config"
    draft_len, draft_devices, target_devices, use_logits = _parse_list(flag, text, 4, _DRAFT_TARGET_FORM)
    if not isinstance(use_logits, bool):
        raise UsageError(
            f"use_logits in `{flag}` must be True or False: {use_logits!r}", hint=f"its form is {_DRAFT_TARGET_FORM}"
        )
    settings = {
        "max_draft_len": _positive(flag, "draft_len", draft_len, _DRAFT_TARGET_FORM),
        "draft_device_id": _single_device(flag, "draft_device_list", draft_devices),
        "device_id": _single_device(flag, "target_device_list", target_devices),
    }
    if draft_engine_dir is None:
        raise UsageError(
            f"`{flag}` needs the draft model's engine: {text}",
            hint="`--draft-engine-dir` names it; `specdec build` makes it from the draft model's checkpoint",
        )
    return DraftTargetSettings(**settings, use_logits=use_logits, draft_engine_dir=draft_engine_dir)


def parse_custom_drafter(text: str) -> CustomSettings:
    """Parse `package.module:factory`."""
    module, colon, factory = text.partition(":")
    if not (module and colon and factory):
        raise UsageError(
            f"`--drafter` is not of the form module:factory: {text}", hint="`--drafter my_drafters:make` is an example"
        )
    return CustomSettings(module, factory)


def _parse_list(flag: str, text: str, length: int, form: str) -> list[Any]:
    try:
        values = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UsageError(f"`{flag}` is not a list: {text}", hint=f"its form is {form}") from None
    if not isinstance(values, list | tuple) or len(values) != length:
        raise UsageError(f"`{flag}` does not have {length} entries: {text}", hint=f"its form is {form}")
    return list(values)


def _positive(flag: str, name: str, value: Any, form: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{name} in `{flag}` must be a whole number of at least 1: {value!r}", hint=f"its form is {form}"
        )
    return value


def _single_device(flag: str, name: str, value: Any) -> int:
    if not isinstance(value, list | tuple) or not value:
        raise UsageError(f"{name} in `{flag}` must name a device: {value!r}", hint=_FIRST_DEVICE)
    if not all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in value):
        raise UsageError(f"{name} in `{flag}` must hold device numbers: {value!r}", hint=_FIRST_DEVICE)
    if len(value) > 1:
        raise UsageError(
            f"{name} in `{flag}` names more than one device, and engines have one rank: {value!r}",
            hint=_FIRST_DEVICE,
        )
    return int(value[0])
