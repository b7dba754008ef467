"""Leader mode's flags (V2): TensorRT-LLM's quickstart_advanced.py names a model and an algorithm."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from commands.options.drafter_configs import Devices
from commands.options.drafting import (
    DRAFTER_NAMES,
    FLAGS,
    DraftingOptions,
    Named,
    chain,
    chosen_names,
    given_configs,
    is_auto,
    parse_config,
    parse_drafter,
)
from commands.options.expand import given_flags
from commands.options.panels import LEADER
from commands.output import warn
from runtime.config import MAX_BATCH_SIZE, MAX_DRAFT_LEN, Compiler
from runtime.drafters.settings import DrafterName, DraftTargetDrafter, OneDrafter, SelfDrafter
from runtime.errors import UsageError

if TYPE_CHECKING:
    from commands.engines import Models

Loop = Literal["orchestrator", "leader"]
_ALGORITHMS: dict[str, DrafterName] = {
    "NGRAM": "ngram",
    "SUFFIX": "suffix",
    "DRAFT_TARGET": "draft-target",
    "SELF": "self",
}
_AUTO = "AUTO"
"""All lookups together, and the models that are given."""
_DEFAULT_DRAFT_LEN, _DEFAULT_NGRAM_SIZE = 4, 2
_LONGEST_LOOKUP = 10
"""Of lookups that send what pays, where no length is given."""
_DEFAULT_MAX_BATCH_SIZE = 4


@dataclass(frozen=True)
class ModelEngineOptions:
    """What engines are made of models for; None where nothing was given."""

    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"] | None,
        typer.Option(
            metavar="NAME",
            help="Dtype of `--model-dir`'s engine: auto, float32, float16 or bfloat16.",
            rich_help_panel=LEADER,
            show_default="auto",
        ),
    ] = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BATCH_SIZE,
            help="Sequences per step of `--model-dir`'s engine.",
            rich_help_panel=LEADER,
            show_default="4",
        ),
    ] = None
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens in prompt and output together of `--model-dir`'s engine.",
            rich_help_panel=LEADER,
            show_default="the model's positions, at most 4,096",
        ),
    ] = None
    self_draft: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(
            metavar="NAME",
            help="How the copy is rounded by which `--model-dir`'s model drafts for itself: int8 or int4.",
            rich_help_panel=LEADER,
            show_default="int4 if it is to draft",
        ),
    ] = None
    compiler: Annotated[
        Compiler | None,
        typer.Option(
            metavar="NAME",
            help="How `--model-dir`'s engine is compiled: aot, torch-compile or none.",
            rich_help_panel=LEADER,
            show_default="aot; on a GPU none, unless packages run there",
        ),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Build `--model-dir`'s engine anew and keep nothing.", rich_help_panel=LEADER),
    ] = False


ModelDir = Annotated[
    str | None,
    typer.Option(
        help="Model: directory, GGUF file, hub id or `demo`; its engine is kept.",
        rich_help_panel=LEADER,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """A model in the place of an engine, for commands that have no leader mode of their own."""

    model_dir: ModelDir = None
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)

    def models(self) -> "Models":
        return _models(self.model_dir, self.engines)

    def check(self, engine_dir: Path | None) -> None:
        """UsageError for a model and an engine, or for settings of an engine that is not to be built."""
        _refuse_both("--model-dir", self.model_dir, "--engine-dir", engine_dir)
        if self.model_dir is None:
            _refuse_settings(self.engines)


@dataclass(frozen=True)
class LeaderOptions:
    """Models, how to draft, and what to leave out; None where nothing was given."""

    model_dir: ModelDir = None
    spec_decode_algo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How to draft: NGRAM, SUFFIX, DRAFT_TARGET or SELF, or AUTO: what pays, of both lookups.",
            rich_help_panel=LEADER,
            show_default="no drafter",
        ),
    ] = None
    spec_decode_max_draft_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DRAFT_LEN,
            help="Tokens in a draft, at most.",
            rich_help_panel=LEADER,
            show_default="4; 10 of lookups, unless lengths are fixed",
        ),
    ] = None
    max_matching_ngram_size: Annotated[
        int | None, typer.Option(min=1, help="Longest tail looked up.", rich_help_panel=LEADER, show_default="2")
    ] = None
    draft_model_dir: Annotated[
        str | None,
        typer.Option(help="The draft model, as for `--model-dir`.", rich_help_panel=LEADER, show_default=False),
    ] = None
    disable_kv_cache_reuse: Annotated[
        bool,
        typer.Option("--disable-kv-cache-reuse", help="Do not find K/V computed before.", rich_help_panel=LEADER),
    ] = False
    disable_overlap_scheduler: Annotated[
        bool,
        typer.Option(
            "--disable-overlap-scheduler",
            help="Accepted: nothing overlaps (docs/leader-mode.md).",
            rich_help_panel=LEADER,
        ),
    ] = False
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)
    mode: Annotated[
        Loop | None,
        typer.Option(
            metavar="NAME",
            help="The loop: orchestrator (V1, one group of requests after the other) or leader (V2, requests join and "
            "leave).",
            rich_help_panel=LEADER,
            show_default="leader if a flag of this panel is given",
        ),
    ] = None

    @property
    def are_given(self) -> bool:
        """Whether there are flags by which leader mode is meant."""
        return bool(given_flags(replace(self, mode=None)))

    @property
    def loop(self) -> Loop:
        return self.mode or ("leader" if self.are_given else "orchestrator")

    @property
    def drafting_flags(self) -> list[str]:
        """Those that choose a drafter."""
        values = {
            "--spec-decode-algo": self.spec_decode_algo,
            "--spec-decode-max-draft-len": self.spec_decode_max_draft_len,
            "--max-matching-ngram-size": self.max_matching_ngram_size,
            "--draft-model-dir": self.draft_model_dir,
        }
        return [flag for flag, value in values.items() if value is not None]

    @property
    def paths(self) -> list[Path]:
        """What is read, where the models are given as directories."""
        return [Path(model) for model in (self.model_dir, self.draft_model_dir) if model]

    def models(self) -> "Models":
        return _models(self.model_dir, self.engines)

    def check(self, engine_dir: Path | None, drafting: DraftingOptions) -> None:
        """UsageError for flags of orchestrator mode, for a model and an engine in one place, or for settings of an
        engine that is not to be built."""
        _refuse_both("--model-dir", self.model_dir, "--engine-dir", engine_dir)
        _refuse_both("--draft-model-dir", self.draft_model_dir, "--draft-engine-dir", drafting.models.draft_engine_dir)
        if self.model_dir is None and self.draft_model_dir is None:
            _refuse_settings(self.engines)

    def drafter_of_either_mode(self, engine_dir: Path | None, drafting: DraftingOptions) -> Named:
        """The drafter that the flags of the one mode or the other name; UsageError for those that do not fit."""
        drafting.check_profile(self.drafting_flags, self.model_dir)
        if self.loop == "orchestrator" and not self.are_given:
            return parse_drafter(drafting)
        self.check(engine_dir, drafting)
        return self.named(drafting)

    def named(self, drafting: DraftingOptions) -> Named:
        """The drafter the flags ask for, by flags of either mode; UsageError for two of them without an order, for two
        spellings of one, or for half of one."""
        configs = given_configs(drafting)
        names = self._drafter_names(drafting, configs)
        if self.spec_decode_max_draft_len is not None and all(name in configs and name != "custom" for name in names):
            raise UsageError(
                f"`--spec-decode-max-draft-len` needs `--spec-decode-algo`: {self.spec_decode_max_draft_len}",
                hint="`--spec-decode-algo NGRAM` is one; `--ngram-config` has its own numbers",
            )
        if self.max_matching_ngram_size is not None and ("ngram" not in names or "ngram" in configs):
            raise UsageError(
                f"`--max-matching-ngram-size` is for `--spec-decode-algo NGRAM`: {self.max_matching_ngram_size}",
                hint="`--spec-decode-algo NGRAM`; `--ngram-config` has its own numbers",
            )
        drafting.lookups.check_used(names, "`--spec-decode-algo NGRAM`")
        draft_model = self._draft_model(drafting)
        if draft_model is not None and "draft-target" not in names:
            raise UsageError(
                f"a draft model needs `--spec-decode-algo DRAFT_TARGET`: {draft_model}", hint="or leave the model out"
            )
        return chain([self._one_drafter(name, configs.get(name), drafting) for name in names])

    def _draft_model(self, drafting: DraftingOptions) -> str | Path | None:
        """The draft model's name, or its engine's directory."""
        return drafting.models.draft_engine_dir if self.draft_model_dir is None else self.draft_model_dir

    def _one_drafter(
        self, name: DrafterName, config: str | None, drafting: DraftingOptions
    ) -> tuple[OneDrafter, Devices]:
        """A drafter by its own flag, or else by those of leader mode; and the target's devices."""
        draft_model = self._draft_model(drafting)
        if config is not None:
            drafter, devices = parse_config(name, config, drafting, draft_model)
            if name == "custom" and self.spec_decode_max_draft_len is not None:
                drafter = replace(drafter, max_draft_len=self.spec_decode_max_draft_len)
            return drafter, devices
        max_draft_len = self.spec_decode_max_draft_len or _DEFAULT_DRAFT_LEN
        sends_what_pays = drafting.draft_len_mode != "fixed" and self.mode != "orchestrator"
        longest_lookup = self.spec_decode_max_draft_len or (_LONGEST_LOOKUP if sends_what_pays else _DEFAULT_DRAFT_LEN)
        match name:
            case "ngram":
                max_size = self.max_matching_ngram_size or _DEFAULT_NGRAM_SIZE
                return drafting.lookups.ngram_drafter(longest_lookup, max_size), None
            case "suffix":
                return drafting.lookups.suffix_drafter(longest_lookup), None
            case "draft-target":
                if draft_model is None:
                    raise UsageError(
                        "`--spec-decode-algo DRAFT_TARGET` needs a draft model",
                        hint="`--draft-model-dir` names one, or `--draft-engine-dir` its engine",
                    )
                return DraftTargetDrafter(draft_model, max_draft_len), None
            case "self":
                return SelfDrafter(max_draft_len), None
            case "custom":
                raise UsageError(
                    "`--drafters` names custom, which needs `--drafter`", hint="its form is module:factory"
                )

    def _drafter_names(self, drafting: DraftingOptions, configs: Collection[DrafterName]) -> list[DrafterName]:
        """The drafters asked for."""
        if drafting.drafters is not None:
            if self.spec_decode_algo is not None:
                raise UsageError(
                    f"`--spec-decode-algo` and `--drafters` cannot be given together: {self.spec_decode_algo}",
                    hint="`--drafters` names the algorithms",
                )
            if is_auto(drafting.drafters):
                return self._all_names(drafting, configs)
            return chosen_names(list(configs), drafting.drafters)
        algorithm = self._algorithm(configs)
        if algorithm is None:
            only_a_model = not configs and self._draft_model(drafting) is not None
            return ["draft-target"] if only_a_model else chosen_names(list(configs), None)
        if configs:
            flag = FLAGS[next(iter(configs))]
            raise UsageError(f"`--spec-decode-algo` and `{flag}` cannot be given together", hint="choose one drafter")
        return self._all_names(drafting, ()) if algorithm == _AUTO else [_ALGORITHMS[algorithm]]

    def _all_names(self, drafting: DraftingOptions, configs: Collection[DrafterName]) -> list[DrafterName]:
        """The drafters that are given, or else the lookups; the draft model, and the copy, where there is one."""
        names = {*(configs or ("ngram", "suffix"))}
        if self._draft_model(drafting) is not None:
            names.add("draft-target")
        if self.engines.self_draft is not None:
            names.add("self")
        return [name for name in DRAFTER_NAMES if name in names]

    def _algorithm(self, configs: Collection[DrafterName]) -> str | None:
        if self.spec_decode_algo is None:
            if self.max_matching_ngram_size is None or configs:
                return None
            # TensorRT-LLM's README leaves the algorithm out of this very command.
            warn("`--max-matching-ngram-size` without `--spec-decode-algo`: NGRAM is assumed")
            return "NGRAM"
        algorithm = self.spec_decode_algo.upper().replace("-", "_")
        if algorithm not in (*_ALGORITHMS, _AUTO):
            raise UsageError(
                f"`--spec-decode-algo` names no algorithm of specdec's: {self.spec_decode_algo}",
                hint=f"there are {', '.join((*_ALGORITHMS, _AUTO))}; without the flag nothing is drafted",
            )
        return algorithm


def _models(model_dir: str | None, engines: ModelEngineOptions) -> "Models":
    from commands.engines import Models

    return Models(
        model_dir,
        None if engines.dtype == "auto" else engines.dtype,
        engines.max_batch_size or _DEFAULT_MAX_BATCH_SIZE,
        engines.max_seq_len,
        use_cache=not engines.no_cache,
        self_draft=engines.self_draft,
        compiler=engines.compiler,
    )


def _refuse_both(flag: str, model: str | None, engine_flag: str, engine: Path | None) -> None:
    if model is not None and engine is not None:
        raise UsageError(f"`{flag}` and `{engine_flag}` cannot be given together: {model}", hint="choose one")


def _refuse_settings(engines: ModelEngineOptions) -> None:
    """UsageError for settings of an engine where none is made of a model."""
    for flag, value in given_flags(engines).items():
        raise UsageError(
            f"`{flag}` is for engines made of `--model-dir`" + (f": {value}" if value is not True else ""),
            hint="leave it out, or give `--model-dir`; an engine directory is as `specdec build` made it",
        )
