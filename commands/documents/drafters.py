"""Drafters in documents: records made of their descriptions (`runtime/drafters/specs.py`)."""

from functools import reduce
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, Field, create_model

from commands.documents.records import Record, absent
from commands.options.drafter_flags import config_flag
from runtime.config import Count
from runtime.drafters.spec import Devices, DrafterSpec, Setting, TextForm, with_first_devices
from runtime.drafters.specs import DRAFTERS

DeviceIds = tuple[Count, ...]


def _type_of(hint: Any, setting: Setting) -> Any:
    """The type of a setting in JSON."""
    is_optional = NoneType in get_args(hint)
    if setting.is_path:
        return str | None if is_optional else str
    if hint == Devices:
        return DeviceIds | None
    return hint if setting.at_least is None else Annotated[hint, Field(ge=setting.at_least)]


def _fields_of(spec: type[DrafterSpec]) -> dict[str, Any]:
    """The type of each of its settings."""
    hints = get_type_hints(spec)
    return {name: _type_of(hints[name], setting) for name, setting in spec.settings().items()}


def _described(spec: type[DrafterSpec], types: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record, each with the help of its setting."""
    helps = {setting.key or name: setting.help for name, setting in spec.settings().items()}
    return {key: (kind, Field(description=helps.get(key) or None)) for key, kind in types.items()}


def _chosen_record(spec: type[DrafterSpec]) -> Any:
    """The type of `DrafterSpec.record`."""
    if isinstance(spec.description.form, TextForm):
        return str
    fields, settings = _fields_of(spec), spec.settings()
    types = {settings[name].key or name: kind for name, kind in fields.items()} | {"device_ids": DeviceIds}
    types = with_first_devices(types, lambda _: Count)
    # Without its lists of devices it is a document's of before models were split.
    split = {key: (kind, absent("one for each rank")) for key, kind in types.items() if key.endswith("device_ids")}
    return create_model(f"Chosen{spec.__name__}", __base__=Record, **_described(spec, types) | split)


def _tuned_record(spec: type[DrafterSpec]) -> Any:
    """The type of what `tune` says of it: its name, its settings, and the first of its devices, or of the target's."""
    types = {"name": Literal[spec.description.name], **_fields_of(spec), "device_id": Count}
    return create_model(f"Tuned{spec.__name__}", __base__=Record, **_described(spec, types))


def _each_once(names: list[str]) -> list[str]:
    assert len({*names}) == len(names), "a drafter is named twice"
    return names


if TYPE_CHECKING:
    DrafterNames = list[str]
    OneDrafter = dict[str, Any]
    ChosenDrafters = Record
else:
    DrafterNames = Annotated[
        list[Literal[tuple(DRAFTERS)]],
        AfterValidator(_each_once),
        Field(
            description="in the order they are asked; empty without a drafter", json_schema_extra={"uniqueItems": True}
        ),
    ]
    OneDrafter = reduce(or_, [_tuned_record(spec) for spec in DRAFTERS.values() if spec.description.is_tuned])
    ChosenDrafters = create_model(
        "ChosenDrafters",
        __base__=Record,
        drafters=(DrafterNames, Field()),
        **{
            spec.description.flag: (
                _chosen_record(spec) | None,
                absent(f"{config_flag(spec)}; null where it is not used; missing where there was none yet"),
            )
            for spec in DRAFTERS.values()
        },
    )


class Chain(Record):
    """Several drafters: each sequence gets the draft that is worth most."""

    name: Literal["chain"]
    drafters: list[OneDrafter] = Field(min_length=1)


TunedDrafter = Annotated[OneDrafter | Chain, Field(discriminator="name")] | None
"""None: no drafter."""
