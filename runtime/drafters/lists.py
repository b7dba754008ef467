"""TensorRT-LLM's flags of orchestrator mode (V1), `--ngram-config [10,2,[0]]`: parsed into the settings that leader
mode's flags (V2) set one by one, and written from them.

After `parse` a drafter has the same settings, whichever mode's flags gave them.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from runtime.checkpoint.config import MAX_DRAFT_LEN
from runtime.util.errors import UsageError

Devices = tuple[int, ...] | None
"""Device numbers, such as `(0, 1)`, one for each rank of an engine; None for the first devices."""


@dataclass(frozen=True)
class Parsed:
    """Settings from a list or text: `[10,2,[0]]` gives a max_draft_len of 10, a max_matching_ngram_size of 2 and device
    0 for the target. `text` is the value as it was written.
    """

    text: str
    values: Mapping[str, Any]
    devices: Devices = None


@dataclass(frozen=True)
class Entry:
    """An entry in the form of a list. `field` is the setting's name; None for the entry with the target's devices."""

    name: str
    field: str | None = None
    kind: Literal["count", "devices", "bool"] = "devices"

    def parse(self, value: Any, flag: str, form: str) -> Any:
        """The entry's value; UsageError for a value of another kind, or for a draft of more than `MAX_DRAFT_LEN`."""
        match self.kind:
            case "count":
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise UsageError(
                        f"{self.name} in `{flag}` must be a whole number of at least 1: {value!r}",
                        hint=f"its form is {form}",
                    )
                if self.field == "max_draft_len" and value > MAX_DRAFT_LEN:
                    raise UsageError(
                        f"{self.name} in `{flag}` must be at most {MAX_DRAFT_LEN}: {value}", hint="lower it"
                    )
            case "bool":
                if not isinstance(value, bool):
                    raise UsageError(
                        f"{self.name} in `{flag}` must be True or False: {value!r}", hint=f"its form is {form}"
                    )
            case "devices":
                return None if value is None else self._device_ids(value, flag)
        return value

    def _device_ids(self, value: Any, flag: str) -> tuple[int, ...]:
        hint = "[0] is the first device"
        if not isinstance(value, list | tuple) or not value:
            raise UsageError(f"{self.name} in `{flag}` must name a device: {value!r}", hint=hint)
        if not all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in value):
            raise UsageError(f"{self.name} in `{flag}` must hold device numbers: {value!r}", hint=hint)
        return tuple(value)


@dataclass(frozen=True)
class ListForm:
    """TensorRT-LLM's way to choose a drafter (V1): a list such as `[10,2,[0]]`, with or without brackets. Entries left
    out at the end have their defaults.
    """

    entries: tuple[Entry, ...]
    examples: tuple[str, ...]
    metavar: ClassVar[str] = "LIST"

    @property
    def least(self) -> int:
        """Number of entries that cannot be left out."""
        return sum(entry.kind == "count" for entry in self.entries)

    @property
    def names(self) -> str:
        return f"[{', '.join(entry.name for entry in self.entries)}]"

    def __str__(self) -> str:
        return f"{self.names}, such as {' or '.join(self.examples)}"

    @property
    def example(self) -> str:
        return self.examples[0]

    @property
    def help(self) -> str:
        return f"{self.names}, such as {self.example}."

    def parse(self, text: str, flag: str) -> Parsed:
        """Parse `[10,2,[0]]`, or `10,2` without brackets and devices, also with JSON's `true`, `false` and `null`.
        UsageError for another text, or for an entry with a wrong value.
        """
        try:
            values = ast.literal_eval(_JSON_WORD.sub(lambda found: _OF_JSON[found[0].lower()], text.strip()))
            values = [values] if isinstance(values, int) else values
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise UsageError(f"`{flag}` is not a list: {text}", hint=f"its form is {self}") from None
        least, most = self.least, len(self.entries)
        if not isinstance(values, list | tuple) or not least <= len(values) <= most:
            raise UsageError(f"`{flag}` does not have {least} to {most} entries: {text}", hint=f"its form is {self}")
        given = [*values, *(False if entry.kind == "bool" else None for entry in self.entries[len(values) :])]
        parsed = [entry.parse(value, flag, str(self)) for entry, value in zip(self.entries, given, strict=True)]
        fields = {entry.field: value for entry, value in zip(self.entries, parsed, strict=True) if entry.field}
        devices = next(value for entry, value in zip(self.entries, parsed, strict=True) if entry.field is None)
        return Parsed(text, fields, devices)

    def write(self, drafter: object, target_devices: tuple[int, ...]) -> str:
        """The list that chooses the drafter. The target's devices are left out at the end if they are the first."""
        values = [getattr(drafter, entry.field) if entry.field else target_devices for entry in self.entries]
        if self.entries[-1].field is None and values[-1] == tuple(range(len(values[-1]))):
            values.pop()
        return f"[{','.join(_written(value) for value in values)}]"


_OF_JSON = {"true": "True", "false": "False", "null": "None", "none": "None"}
_JSON_WORD = re.compile(rf"\b({'|'.join(_OF_JSON)})\b", re.IGNORECASE)


def _written(value: Any) -> str:
    if value is None:
        return "[0]"
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class TextForm:
    """A text of two settings with a colon between them, such as `module:factory`."""

    fields: tuple[str, str]
    example: str
    metavar: ClassVar[str] = "NAME:NAME"

    def __str__(self) -> str:
        return ":".join(self.fields)

    @property
    def help(self) -> str:
        return f"{self}; the current directory is searched too."

    def parse(self, text: str, flag: str) -> Parsed:
        """Parse `module:factory`; UsageError for a text that lacks one of the two parts."""
        first, colon, second = text.partition(":")
        if not (first and colon and second):
            raise UsageError(
                f"`{flag}` is not of the form {self}: {text}", hint=f"`{flag} {self.example}` is an example"
            )
        return Parsed(text, dict(zip(self.fields, (first, second), strict=True)))

    def write(self, drafter: object, target_devices: tuple[int, ...]) -> str:
        return ":".join(str(getattr(drafter, field)) for field in self.fields)
