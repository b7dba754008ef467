"""Leader mode's flags (V2): TensorRT-LLM's quickstart_advanced.py names a model and an algorithm."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from commands.options.drafter_flags import LeaderDrafterFlags, chooses_drafter, leader_settings, users_of
from commands.options.engine_flags import DraftOutputOptions, ModelEngineOptions
from commands.options.expand import given_flags
from commands.options.settings import without_ambient
from commands.options.speculation_flags import LeaderFlags, SpeculationOptions, algorithms, parse_algorithm
from commands.options.speculative_config import parse_speculative_config
from commands.output.help import LEADER, MODEL, as_flag, option
from commands.output.output import warn
from runtime.core.params import Mode
from runtime.drafters.specs import DRAFTERS
from runtime.util.errors import UsageError

_IN_AUTO = " and ".join(spec.description.title for spec in DRAFTERS.values() if spec.is_in_auto)
_IN_AUTO_OF_MANY = " and ".join(spec.description.title for spec in DRAFTERS.values() if spec.is_in_auto_of_many)


ModelDir = Annotated[
    str | None,
    option(
        MODEL,
        "Model: directory, GGUF file, hub id or `demo`; its engine is cached.",
        envvar=["SPECDEC_MODEL_DIR", "SPECDEC_MODEL"],
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """A model in the place of an engine, for commands that have no leader mode of their own."""

    model_dir: ModelDir = None
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)
    draft_output: DraftOutputOptions = field(default_factory=DraftOutputOptions)

    def fitting(self) -> "ModelOptions":
        """The same options; if no model is named, without the values that variables and the home file give for a
        model's engine.
        """
        if self.model_dir is not None:
            return self
        return replace(self, engines=without_ambient(self.engines), draft_output=without_ambient(self.draft_output))

    def check(self, engine_dir: Path | None) -> None:
        """UsageError for both a model and an engine, or for settings of a build if no engine is built."""
        _refuse_both("--model-dir", self.model_dir, "--engine-dir", engine_dir)
        self.engines.check()
        if self.model_dir is None:
            _refuse_settings(self.engines, self.draft_output)


@dataclass(frozen=True)
class LeaderOptions:
    """Models, drafters, and features to turn off; None if not given."""

    model_dir: ModelDir = None
    spec_decode_algo: Annotated[
        str | None,
        option(
            LEADER,
            f"Drafter: {', '.join(algorithms())}; AUTO: {_IN_AUTO}, in `serve` and `batch` "
            f"{_IN_AUTO_OF_MANY} too, and the draft model or head if given; none: no drafter.",
            shown="no drafter",
            check=parse_algorithm,
            metavar="NAME",
        ),
    ] = None
    drafters: LeaderDrafterFlags = field(default_factory=LeaderDrafterFlags)
    disable_kv_cache_reuse: Annotated[
        bool, option(LEADER, "Do not reuse keys and values of earlier prompts.", "--disable-kv-cache-reuse")
    ] = False
    disable_overlap_scheduler: Annotated[
        bool, option(LEADER, "Accepted without effect (docs/leader-mode.md).", "--disable-overlap-scheduler")
    ] = False
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)
    draft_output: DraftOutputOptions = field(default_factory=DraftOutputOptions)
    mode: Annotated[
        Mode | None,
        option(
            LEADER,
            "The loop: orchestrator (V1, one group of requests after the other) or leader (V2, continuous batching).",
            shown="leader if a model is named, or a flag of this panel is given",
            metavar="NAME",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        option(
            LEADER,
            "The drafter as vLLM and TensorRT-LLM's YAML have it: an object with `method`, `num_speculative_tokens`, …",
            shown="no drafter",
            check=parse_speculative_config,
            metavar="JSON",
        ),
    ] = None

    def with_config(self, options: SpeculationOptions) -> "LeaderOptions":
        """The same options with flags in place of `--speculative-config`. UsageError if another flag says how to draft
        too, such as `--draft-len-mode`.
        """
        if self.speculative_config is None:
            return self
        if given := [*given_flags(options), *self.drafting_flags]:
            raise UsageError(
                f"`{given[0]}` and `--speculative-config` both say how to draft: {self.speculative_config}",
                hint="leave one of the two out",
            )
        named = parse_speculative_config(self.speculative_config)
        algorithm = named.pop("spec_decode_algo", None)
        flags: Any = self.drafters
        return replace(self, speculative_config=None, spec_decode_algo=algorithm, drafters=replace(flags, **named))

    def fitting(self) -> "LeaderOptions":
        """`ModelOptions.fitting`, unless a draft model's engine is made by these flags."""
        if self._draft_models:
            return self
        models = self.models.fitting()
        return replace(self, engines=models.engines, draft_output=models.draft_output)

    @property
    def models(self) -> ModelOptions:
        return ModelOptions(self.model_dir, self.engines, self.draft_output)

    @property
    def are_given(self) -> bool:
        """True if there are flags that imply leader mode."""
        return bool(given_flags(replace(self, mode=None)))

    @property
    def loop(self) -> Mode:
        return self.mode or ("leader" if self.are_given else "orchestrator")

    @property
    def drafting_flags(self) -> list[str]:
        """The given flags that say how to draft, such as `--spec-decode-max-draft-len`."""
        return [*(["--spec-decode-algo"] if self.spec_decode_algo is not None else []), *given_flags(self.drafters)]

    @property
    def _given(self) -> dict[str, Any]:
        """Settings of drafters, by their flags' Python names."""
        return {name: value for name, value in vars(self.drafters).items() if value is not None}

    @property
    def _draft_models(self) -> list[str]:
        return [value for name, value in self._given.items() if leader_settings()[name].is_path]

    @property
    def paths(self) -> list[Path]:
        """Paths to read, if the models are given as directories."""
        return [Path(model) for model in (self.model_dir, *self._draft_models) if model]

    def flags(self, engine_dir: Path | None, options: SpeculationOptions, *, answers_many: bool = False) -> LeaderFlags:
        """Drafting flags. UsageError for both a model and an engine in one place, for formats that do not fit together,
        or for settings of a build if no engine is built. `answers_many` as in `LeaderFlags`.
        """
        _refuse_both("--model-dir", self.model_dir, "--engine-dir", engine_dir)
        self.engines.check()
        for name, model in self._given.items():
            setting = leader_settings()[name]
            if setting.flag is not None:
                _refuse_both(as_flag(name), model, as_flag(setting.flag), getattr(options.flags, setting.flag))
        if self.model_dir is None and not self._draft_models:
            _refuse_settings(self.engines)
        if self.model_dir is None:
            _refuse_settings(self.draft_output)
        return self.drafting(options, answers_many=answers_many)

    def drafting(self, options: SpeculationOptions, *, answers_many: bool = False) -> LeaderFlags:
        """Drafting flags, without the checks of `flags`."""
        return LeaderFlags(
            self._given,
            self.spec_decode_algo or self._assumed_algorithm(options),
            drafts_by_copy=self.engines.copy is not None,
            sends_what_pays=options.draft_len_mode != "fixed" and self.mode != "orchestrator",
            model_dir=self.model_dir,
            answers_many=answers_many,
        )

    def _assumed_algorithm(self, options: SpeculationOptions) -> str | None:
        """The drafter that the flags imply: the only one that takes a flag that is given. TensorRT-LLM's README gives
        an n-gram's size without an algorithm.
        """
        users = {flag: users_of(flag) for flag in self._given}
        own = {flag: specs[0].description.algorithm for flag, specs in users.items() if len(specs) == 1}
        if len({*own.values()}) != 1 or options.drafters is not None or chooses_drafter(options.flags):
            return None
        flag, algorithm = next(iter(own.items()))
        warn(f"`{as_flag(flag)}` without `--spec-decode-algo`: {algorithm} is assumed")
        return algorithm


def check_has_drafter(options: SpeculationOptions, leader: LeaderOptions) -> None:
    """UsageError for flags that are of use to a drafter only, if none of them chooses a drafter. Reads no model."""
    leader = leader.with_config(options)
    if options.find_profile(leader.drafting_flags, None) is None:
        options.check_has_drafter(leader.drafting(options))


def _refuse_both(flag: str, model: str | None, engine_flag: str, engine: Path | None) -> None:
    if model is not None and engine is not None:
        raise UsageError(f"`{flag}` and `{engine_flag}` cannot be given together: {model}", hint="choose one")


def _refuse_settings(*groups: ModelEngineOptions | DraftOutputOptions) -> None:
    """UsageError for settings of a build, if no engine is made from a model."""
    for flag, value in [one for group in groups for one in given_flags(group).items()]:
        raise UsageError(
            f"`{flag}` is for engines made of `--model-dir`" + (f": {value}" if value is not True else ""),
            hint="leave it out, or give `--model-dir`; an engine directory is as `specdec build` made it",
        )
