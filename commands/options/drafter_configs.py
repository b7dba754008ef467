"""The lists that name a drafter, such as `--ngram-config "[10,2,[0]]"`: read, and written as `tune` recommends."""

import ast
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.options.lookups import LookupOptions
from runtime.drafters.settings import (
    CustomDrafter,
    DraftTargetDrafter,
    LookupDrafter,
    NgramDrafter,
    OneDrafter,
    OwnDrafter,
    SelfDrafter,
    SuffixDrafter,
    drafter_names,
    each_drafter,
)
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.tuning.candidates import Candidate

NGRAM_FORM = "[max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]] or 10,2"
SUFFIX_FORM = "[max_draft_len, device_list], such as [10,[0]] or 10"
DRAFT_TARGET_FORM = "[draft_len, draft_device_list, target_device_list, use_logits], such as [4,[0],[0],False] or 4"
SELF_DRAFT_FORM = "[draft_len, device_list, use_logits], such as [8,[0],False] or 8"
_FIRST_DEVICE = "[0] is the first device"
Devices = tuple[int, ...] | None
"""One for each rank of an engine; None: its first ones."""


def parse_ngram_config(text: str, lookups: LookupOptions, flag: str = "--ngram-config") -> tuple[NgramDrafter, Devices]:
    """Parse `[max_draft_len, max_matching_ngram_size, device_list]`; UsageError says which part is wrong."""
    max_draft_len, max_matching_ngram_size, devices = _parse_list(flag, text, (None,), 3, NGRAM_FORM)
    max_draft_len = _positive(flag, "max_draft_len", max_draft_len, NGRAM_FORM)
    max_size = _positive(flag, "max_matching_ngram_size", max_matching_ngram_size, NGRAM_FORM)
    return lookups.ngram_drafter(max_draft_len, max_size), _device_ids(flag, "device_list", devices)


def parse_suffix_config(
    text: str, lookups: LookupOptions, flag: str = "--suffix-config"
) -> tuple[SuffixDrafter, Devices]:
    """Parse `[max_draft_len, device_list]`; UsageError says which part is wrong."""
    max_draft_len, devices = _parse_list(flag, text, (None,), 2, SUFFIX_FORM)
    max_draft_len = _positive(flag, "max_draft_len", max_draft_len, SUFFIX_FORM)
    return lookups.suffix_drafter(max_draft_len), _device_ids(flag, "device_list", devices)


def parse_draft_target_model_config(text: str, draft_model: str | Path | None) -> tuple[DraftTargetDrafter, Devices]:
    """Parse `[draft_len, draft_device_list, target_device_list, use_logits]`; UsageError says which part is wrong."""
    flag = "--draft-target-model-config"
    draft_len, draft_devices, target_devices, use_logits = _parse_list(
        flag, text, (None, None, False), 4, DRAFT_TARGET_FORM
    )
    _check_use_logits(flag, use_logits, DRAFT_TARGET_FORM)
    max_draft_len = _positive(flag, "draft_len", draft_len, DRAFT_TARGET_FORM)
    draft_device_ids = _device_ids(flag, "draft_device_list", draft_devices)
    device_ids = _device_ids(flag, "target_device_list", target_devices)
    if draft_model is None:
        raise UsageError(
            f"`{flag}` needs the draft model's engine: {text}",
            hint="`--draft-engine-dir` names it; `specdec build` makes it from the draft model's checkpoint",
        )
    return DraftTargetDrafter(draft_model, max_draft_len, use_logits, draft_device_ids), device_ids


def parse_self_draft_config(text: str) -> tuple[SelfDrafter, Devices]:
    """Parse `[draft_len, device_list, use_logits]`; UsageError says which part is wrong."""
    flag = "--self-draft-config"
    draft_len, devices, use_logits = _parse_list(flag, text, (None, False), 3, SELF_DRAFT_FORM)
    _check_use_logits(flag, use_logits, SELF_DRAFT_FORM)
    max_draft_len = _positive(flag, "draft_len", draft_len, SELF_DRAFT_FORM)
    return SelfDrafter(max_draft_len, use_logits), _device_ids(flag, "device_list", devices)


def parse_custom_drafter(text: str) -> CustomDrafter:
    """Parse `package.module:factory`."""
    module, colon, factory = text.partition(":")
    if not (module and colon and factory):
        raise UsageError(
            f"`--drafter` is not of the form module:factory: {text}", hint="`--drafter my_drafters:make` is an example"
        )
    return CustomDrafter(module, factory)


def _parse_list(flag: str, text: str, defaults: tuple[Any, ...], length: int, form: str) -> list[Any]:
    """The entries, brackets or not; those that are left out at the end are `defaults`."""
    try:
        values = ast.literal_eval(text.strip())
        values = [values] if isinstance(values, int) else values
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UsageError(f"`{flag}` is not a list: {text}", hint=f"its form is {form}") from None
    least = length - len(defaults)
    if not isinstance(values, list | tuple) or not least <= len(values) <= length:
        count = f"{least} to {length}" if defaults else f"{length}"
        raise UsageError(f"`{flag}` does not have {count} entries: {text}", hint=f"its form is {form}")
    return [*values, *defaults[len(values) - least :]]


def _positive(flag: str, name: str, value: Any, form: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{name} in `{flag}` must be a whole number of at least 1: {value!r}", hint=f"its form is {form}"
        )
    return value


def _check_use_logits(flag: str, value: Any, form: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"use_logits in `{flag}` must be True or False: {value!r}", hint=f"its form is {form}")


def _device_ids(flag: str, name: str, value: Any) -> Devices:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise UsageError(f"{name} in `{flag}` must name a device: {value!r}", hint=_FIRST_DEVICE)
    if not all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in value):
        raise UsageError(f"{name} in `{flag}` must hold device numbers: {value!r}", hint=_FIRST_DEVICE)
    return tuple(value)


def candidate_flags(candidate: "Candidate", device_ids: tuple[int, ...]) -> str:
    """What `run` is told to generate in this way, with the target on these devices."""
    drafters = each_drafter(candidate.drafter)
    flags = [flag for one in drafters for flag in _flags(one, device_ids)]
    if any(isinstance(one, LookupDrafter) and one.pool == "public" for one in drafters):
        flags.append("--ngram-pool public")
    if len(drafters) > 1:
        flags.append(f"--drafters {','.join(drafter_names(candidate.drafter))}")
    if candidate.draft_len_mode == "auto":
        flags.append("--draft-len-mode auto")
    return " ".join(flags)


def _flags(drafter: OneDrafter, device_ids: tuple[int, ...]) -> list[str]:
    """A drafter's own. A target on its first devices needs no list of them."""
    target = _list(device_ids)
    devices = "" if device_ids == tuple(range(len(device_ids))) else f",{target}"
    match drafter:
        case SuffixDrafter():
            return [f"--suffix-config '[{drafter.max_draft_len}{devices}]'"]
        case NgramDrafter():
            flags = [f"--ngram-config '[{drafter.max_draft_len},{drafter.max_matching_ngram_size}{devices}]'"]
            if drafter.ranking != "oldest":
                flags.append(f"--ngram-ranking {drafter.ranking}")
            if drafter.min_matching_ngram_size > 1:
                flags.append(f"--min-matching-ngram-size {drafter.min_matching_ngram_size}")
            if drafter.corpus is not None:
                flags.append(f"--ngram-corpus {shlex.quote(str(drafter.corpus))}")
            return flags
        case DraftTargetDrafter():
            numbers = f"{drafter.max_draft_len},{_list(drafter.device_ids or (0,))},{target},{drafter.use_logits}"
            model = shlex.quote(str(drafter.model))
            return [f"--draft-engine-dir {model}", f"--draft-target-model-config '[{numbers}]'"]
        case SelfDrafter():
            return [f"--self-draft-config '[{drafter.max_draft_len},{target},{drafter.use_logits}]'"]
        case CustomDrafter() | OwnDrafter():
            raise AssertionError("`tune` tries no drafter of somebody's own")


def _list(device_ids: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, device_ids))}]"
