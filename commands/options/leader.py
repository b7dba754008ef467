"""Leader mode's flags (V2), as given: TensorRT-LLM's quickstart_advanced.py names a model and an algorithm."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from commands.options.drafting import (
    NO_OPTIONS,
    DrafterName,
    DrafterSettings,
    DraftTargetSettings,
    NgramOptions,
    NgramSettings,
    OneDrafterSettings,
    SuffixSettings,
    chain,
    check_all_named,
    parse_custom_drafter,
    parse_drafter_names,
)
from commands.output import warn
from runtime.config import Dtype
from runtime.errors import UsageError

_ALGORITHMS: dict[str, DrafterName] = {"NGRAM": "ngram", "SUFFIX": "suffix", "DRAFT_TARGET": "draft-target"}
_DEFAULT_DRAFT_LEN, _DEFAULT_NGRAM_SIZE = 4, 2
_DEFAULT_MAX_BATCH_SIZE = 4


@dataclass(frozen=True)
class ModelFlags:
    """Models to make engines of, and what for; None where nothing was given."""

    model_dir: str | None
    draft_model_dir: str | None
    dtype: Literal["auto"] | Dtype | None
    max_batch_size: int | None
    max_seq_len: int | None
    no_cache: bool

    @property
    def are_given(self) -> bool:
        return any(value not in (None, False) for value in vars(self).values())

    def check(self, engine_dir: Path | None, draft_engine_dir: Path | None) -> None:
        """UsageError for a model and an engine in one place, or for settings of an engine that is not to be built."""
        for flag, model, engine_flag, engine in (
            ("--model-dir", self.model_dir, "--engine-dir", engine_dir),
            ("--draft-model-dir", self.draft_model_dir, "--draft-engine-dir", draft_engine_dir),
        ):
            if model is not None and engine is not None:
                raise UsageError(f"`{flag}` and `{engine_flag}` cannot be given together: {model}", hint="choose one")
        if self.model_dir is None and self.draft_model_dir is None and self.are_given:
            given = {
                "--dtype": self.dtype,
                "--max-batch-size": self.max_batch_size,
                "--max-seq-len": self.max_seq_len,
                "--no-cache": self.no_cache or None,
            }
            flag, value = next((flag, value) for flag, value in given.items() if value is not None)
            raise UsageError(
                f"`{flag}` is for engines made of `--model-dir`" + (f": {value}" if value is not True else ""),
                hint="leave it out, or give `--model-dir`; an engine directory is as `specdec build` made it",
            )

    @property
    def batch_size(self) -> int:
        return self.max_batch_size or _DEFAULT_MAX_BATCH_SIZE


@dataclass(frozen=True)
class LeaderFlags:
    """How to draft, and what to leave out; None where nothing was given."""

    algorithm: str | None
    max_draft_len: int | None
    max_matching_ngram_size: int | None
    disable_kv_cache_reuse: bool
    disable_overlap_scheduler: bool

    @property
    def are_given(self) -> bool:
        return any(value not in (None, False) for value in vars(self).values())

    def drafting(self) -> dict[str, object]:
        """The flags that choose a drafter, by name."""
        return {
            "--spec-decode-algo": self.algorithm,
            "--spec-decode-max-draft-len": self.max_draft_len,
            "--max-matching-ngram-size": self.max_matching_ngram_size,
        }

    def drafter_settings(
        self,
        draft_dir: Path | None,
        custom: str | None,
        drafters: str | None = None,
        ngram_options: NgramOptions = NO_OPTIONS,
    ) -> DrafterSettings | None:
        """The drafter the flags ask for; UsageError for two of them without an order, or half of one.

        `draft_dir` is the draft model's or its engine's, `custom` is `--drafter`.
        """
        names = self._drafter_names(custom, drafters)
        if self.max_draft_len is not None and not names:
            raise UsageError(
                f"`--spec-decode-max-draft-len` needs a drafter: {self.max_draft_len}",
                hint="`--spec-decode-algo NGRAM` is one",
            )
        if self.max_matching_ngram_size is not None and "ngram" not in names:
            raise UsageError(
                f"`--max-matching-ngram-size` is for n-gram lookup: {self.max_matching_ngram_size}",
                hint="`--spec-decode-algo NGRAM`",
            )
        ngram_options.check(names, "`--spec-decode-algo NGRAM`")
        if draft_dir is not None and "draft-target" not in names:
            raise UsageError(
                f"a draft model needs `--spec-decode-algo DRAFT_TARGET`: {draft_dir}", hint="or leave the model out"
            )
        return chain([self._one_drafter(name, draft_dir, custom, ngram_options) for name in names])

    def _one_drafter(
        self, name: DrafterName, draft_dir: Path | None, custom: str | None, ngram_options: NgramOptions
    ) -> OneDrafterSettings:
        max_draft_len = self.max_draft_len or _DEFAULT_DRAFT_LEN
        match name:
            case "ngram":
                max_size = self.max_matching_ngram_size or _DEFAULT_NGRAM_SIZE
                return NgramSettings(max_draft_len, max_size, device_id=0).with_options(ngram_options)
            case "suffix":
                return SuffixSettings(max_draft_len, device_id=0).with_options(ngram_options)
            case "draft-target":
                if draft_dir is None:
                    raise UsageError(
                        "`--spec-decode-algo DRAFT_TARGET` needs a draft model",
                        hint="`--draft-model-dir` names one, or `--draft-engine-dir` its engine",
                    )
                return DraftTargetSettings(max_draft_len, 0, 0, use_logits=False, draft_engine_dir=draft_dir)
            case "custom":
                if custom is None:
                    raise UsageError(
                        "`--drafters` names custom, which needs `--drafter`", hint="its form is module:factory"
                    )
                return replace(parse_custom_drafter(custom), max_draft_len=self.max_draft_len)

    def _drafter_names(self, custom: str | None, drafters: str | None) -> list[DrafterName]:
        """The drafters asked for, in order."""
        if drafters is None:
            algorithm = self._algorithm(custom)
            if algorithm is not None:
                return [_ALGORITHMS[algorithm]]
            return [] if custom is None else ["custom"]
        if self.algorithm is not None:
            raise UsageError(
                f"`--spec-decode-algo` and `--drafters` cannot be given together: {self.algorithm}",
                hint="`--drafters` names the algorithms in order",
            )
        names = parse_drafter_names(drafters)
        check_all_named(names, [] if custom is None else [("custom", "--drafter")], drafters)
        return names

    def _algorithm(self, custom: str | None) -> str | None:
        if self.algorithm is None:
            if self.max_matching_ngram_size is None or custom is not None:
                return None
            # TensorRT-LLM's README leaves the algorithm out of this very command.
            warn("`--max-matching-ngram-size` without `--spec-decode-algo`: NGRAM is assumed")
            return "NGRAM"
        algorithm = self.algorithm.upper().replace("-", "_")
        if algorithm not in _ALGORITHMS:
            raise UsageError(
                f"`--spec-decode-algo` names no algorithm of specdec's: {self.algorithm}",
                hint=f"there are {', '.join(_ALGORITHMS)}; without the flag nothing is drafted",
            )
        if custom is not None:
            raise UsageError("`--spec-decode-algo` and `--drafter` cannot be given together", hint="choose one drafter")
        return algorithm
