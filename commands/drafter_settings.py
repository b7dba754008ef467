"""What the speculation flags say: which drafter, how long its drafts are, and on which devices."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UsageError

_NGRAM_FORM = "[max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]]"
_DRAFT_TARGET_FORM = "[draft_len, draft_device_list, target_device_list, use_logits], such as [4,[0],[0],False]"
_FIRST_DEVICE = "[0] is the first device"


@dataclass(frozen=True)
class NgramSettings:
    """`--ngram-config`, parsed."""

    max_draft_len: int
    max_matching_ngram_size: int
    device_id: int


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


DrafterSettings = NgramSettings | DraftTargetSettings | CustomSettings


def parse_drafter(
    ngram_config: str | None,
    draft_target_model_config: str | None,
    draft_engine_dir: Path | None,
    drafter: str | None,
) -> DrafterSettings | None:
    """The drafter the flags ask for, None for none; UsageError for two of them, or half of one."""
    given = [
        flag
        for flag, value in (
            ("--ngram-config", ngram_config),
            ("--draft-target-model-config", draft_target_model_config),
            ("--drafter", drafter),
        )
        if value is not None
    ]
    if len(given) > 1:
        flags = " and ".join(f"`{flag}`" for flag in given)
        raise UsageError(f"{flags} cannot be given together", hint="choose one drafter")
    if draft_engine_dir is not None and draft_target_model_config is None:
        raise UsageError(
            f"`--draft-engine-dir` needs `--draft-target-model-config`: {draft_engine_dir}",
            hint=f"the form of `--draft-target-model-config` is {_DRAFT_TARGET_FORM}",
        )
    if ngram_config is not None:
        return parse_ngram_config(ngram_config)
    if draft_target_model_config is not None:
        return parse_draft_target_model_config(draft_target_model_config, draft_engine_dir)
    return parse_custom_drafter(drafter) if drafter is not None else None


def parse_ngram_config(text: str) -> NgramSettings:
    """Parse `[max_draft_len, max_matching_ngram_size, device_list]`; UsageError says which part is wrong."""
    flag = "--ngram-config"
    max_draft_len, max_matching_ngram_size, devices = _parse_list(flag, text, 3, _NGRAM_FORM)
    return NgramSettings(
        max_draft_len=_positive(flag, "max_draft_len", max_draft_len, _NGRAM_FORM),
        max_matching_ngram_size=_positive(flag, "max_matching_ngram_size", max_matching_ngram_size, _NGRAM_FORM),
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
