"""Settings behind the numbers of a document: the engines, the drafter, and sampling."""

import dataclasses
import math
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, Field, create_model

from commands.output.documents.records import Record, Token, absent
from commands.output.help import config_flag
from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.config import (
    Arithmetic,
    Between,
    BuildConfig,
    Count,
    Dtype,
    Environment,
    LogitsCheck,
    Quality,
    Quantization,
    Size,
)
from runtime.checkpoint.generation_config import ANY_NUMBER
from runtime.core.params import FIELDS, GrammarKind, Mode, SamplingConfig, SamplingParams
from runtime.drafters.lists import Devices, TextForm
from runtime.drafters.spec import DrafterSpec, DraftLenMode, Setting, with_first_devices
from runtime.drafters.specs import DRAFTERS

if TYPE_CHECKING:  # `compare` needs no torch
    from runtime.llm import LLM
    from runtime.loop.session import Session

Word = Annotated[str, Field(min_length=1)]


DeviceIds = tuple[Count, ...]


def _type_of(hint: Any, setting: Setting) -> Any:
    """The type of a setting in JSON."""
    is_optional = NoneType in get_args(hint)
    if setting.is_path:
        return str | None if is_optional and not setting.names_model else str
    if hint == Devices:
        return DeviceIds | None
    return hint if setting.at_least is None else Annotated[hint, Field(ge=setting.at_least)]


def _fields_of(spec: type[DrafterSpec]) -> dict[str, Any]:
    """The JSON type of each of the drafter's settings."""
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
    # Documents from before models could be split have no lists of devices.
    split = {key: (kind, absent("one for each rank")) for key, kind in types.items() if key.endswith("device_ids")}
    return create_model(f"Chosen{spec.__name__}", __base__=Record, **_described(spec, types) | split)


def _tuned_record(spec: type[DrafterSpec]) -> Any:
    """The type of a drafter in `tune`'s document: its name, its settings, and the number of its first device, or of the
    target's.
    """
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
    """Several drafters: each sequence gets the draft that promises most."""

    name: Literal["chain"]
    drafters: list[OneDrafter] = Field(min_length=1)


TunedDrafter = Annotated[OneDrafter | Chain, Field(discriminator="name")] | None
"""None: no drafter."""


class EngineRecord(Record):
    """The engine that made the numbers: the values of its config.json that the numbers may depend on."""

    engine_dir: str
    model_type: str
    dtype: Dtype
    build_config: BuildConfig
    environment: Environment
    logits_check: LogitsCheck
    compiler_note: str | None = Field(description="why the default compiler is not `aot`: operations that it lacks")
    arithmetic: Arithmetic | None = Field(description="of the kernels for linear layers; null where they are not used")
    batch_invariant: bool = Field(description="whether a token's logits are the same bits whatever else is in its step")
    quantization: Quantization | None = absent("null where linear layers are not quantized")
    quality: Quality | None = absent("quantization error on a fixed text")
    model: str | None = absent("the model that the engine was made of, as it was named; null where an engine was named")
    bits: str = absent("of a weight of the linear layers: `16`, `4`, or `4 and 8` where layers differ")

    @classmethod
    def of(cls, bundle: Bundle) -> "EngineRecord":
        config = bundle.config
        chosen = {name: getattr(config, name) for name in cls.model_fields if hasattr(config, name)}
        model_type = config.pretrained_config["model_type"]
        return cls(engine_dir=str(bundle.directory), model_type=model_type, model=bundle.model, **chosen)


class OutputGrammar(Record):
    """Form of an output."""

    kind: GrammarKind
    text: str = Field(description="of `choice` a JSON list")


def grammar_record(params: SamplingParams) -> dict[str, OutputGrammar]:
    """`{"grammar": ...}` for parameters that ask for a form, such as a JSON schema; `{}` for other parameters."""
    grammar = params.output_grammar
    if grammar is None:
        return {}
    assert grammar.kind != "lark"  # no parameter
    return {"grammar": OutputGrammar(kind=grammar.kind, text=grammar.text)}


def _sampling_fields() -> dict[str, Any]:
    """A key for each field of `SamplingConfig`, with the range of its `RequestField`; bad words as they were given."""
    described = {field.config or name: field for name, (_, field) in FIELDS.items()}
    hints, record = get_type_hints(SamplingConfig), dict[str, Any]()
    for one in dataclasses.fields(SamplingConfig):
        field, kind = described[one.name], hints[one.name]
        if kind in (int, float) and field.range != ANY_NUMBER:
            least, most = field.range.least, field.range.most
            bound = Field(gt=least, le=most) if field.range.is_open and most == math.inf else Between(least, most)
            kind = Annotated[kind, bound]
        special = {
            "bad_words": (list[Word], Field(description="as given")),
            "logit_bias": (tuple[tuple[Token, float], ...], ()),
            "allowed_token_ids": (tuple[Token, ...] | None, None),
        }
        default = ... if field.in_every_document else one.default
        record[one.name] = special.get(one.name, (kind, default))
    return record


if TYPE_CHECKING:

    class Sampling(Record):
        """Sampling settings; top_k 1 or temperature 0 is greedy."""

        def __init__(self, **values: Any) -> None: ...
else:
    Sampling = create_model(
        "Sampling",
        __base__=Record,
        __doc__="Sampling settings; top_k 1 or temperature 0 is greedy.",
        **_sampling_fields(),
        grammar=(OutputGrammar | None, absent("form of outputs; missing without one")),
    )


class SessionSettings(ChosenDrafters):
    """Settings common to `run` and `summarize`."""

    sampling: Sampling
    end_ids: list[Token]
    stop_words: list[Word]
    draft_len_mode: DraftLenMode = Field(description="--draft-len-mode")
    profile: str | None = Field(description="--profile, which the drafter's settings are from")
    mode: Mode
    block_reuse: bool
    max_num_tokens: Size


@dataclass(frozen=True)
class Setup:
    """A session, and the settings that all its requests have. `profile` is the file that the drafter's settings come
    from.
    """

    llm: "LLM"
    session: "Session"
    params: SamplingParams
    profile: Path | None = None

    @property
    def engine(self) -> EngineRecord:
        return EngineRecord.of(self.llm.bundle)

    @property
    def draft_engine(self) -> EngineRecord | None:
        draft_engine = self.session.draft_engine
        models = [one.draft_model for one in self.session.speculation if one.draft_model is not None]
        return EngineRecord.of(Bundle(Path(models[0]), draft_engine.config)) if draft_engine and models else None

    def settings(self) -> dict[str, Any]:
        """The fields of `SessionSettings`."""
        speculation = self.session.speculation
        records = {one.description.flag: one.record(self.llm.device_ids) for one in speculation}
        request = self.llm.request_of(self.params)
        sampling = dataclasses.asdict(request.sampling) | {"bad_words": list(self.params.bad_words or ())}
        sampling |= grammar_record(self.params)
        return {
            "drafters": speculation.names,
            **{spec.description.flag: records.get(spec.description.flag) for spec in DRAFTERS.values()},
            "sampling": Sampling(**sampling),
            "end_ids": sorted(request.end_ids),
            "stop_words": list(self.params.stop_words),
            "draft_len_mode": speculation.draft_len_mode,
            "profile": None if self.profile is None else str(self.profile),
            "mode": self.session.mode,
            "block_reuse": self.llm.engine.block_reuse,
            "max_num_tokens": self.llm.engine.max_num_tokens,
        }
