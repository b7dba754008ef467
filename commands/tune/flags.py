"""Flags of `specdec tune`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from commands.options.leader_flags import ModelOptions
from commands.options.model_word import ModelWord, named_by
from commands.options.shared import CompareActivations, EndId, InputFile, Report, TokenizerDir
from commands.options.speculation_flags import Drafters
from commands.output.help import INPUT, OUTPUT, RUNTIME, SPECULATION, option
from runtime.drafters.speculation import Speculation
from runtime.util.errors import UsageError

DEFAULT_OUTPUT_LEN, DEFAULT_LIVE_PROMPTS = 128, 8


@dataclass(frozen=True)
class TuneInputs:
    """Inputs of `tune`: traces, or prompts."""

    named: ModelWord = None
    engine_dir: Annotated[
        Path | None, option(INPUT, "Engine to tune for; without one, or a model, traces are replayed.")
    ] = None
    model: ModelOptions = field(default_factory=ModelOptions)
    traces: Annotated[Path | None, option(INPUT, "Prompts with outputs, as written by `--output-traces`.")] = None
    input_text: Annotated[
        list[str] | None, option(INPUT, "Prompt to tune for, answered first without a drafter; repeatable.")
    ] = None
    input_file: InputFile = None
    tokenizer_dir: TokenizerDir = None

    def with_model(self) -> "TuneInputs":
        """The same inputs with the model or engine that the first word names. UsageError if a flag names another."""
        model_dir, engine_dir = named_by(self.named, self.model.model_dir, self.engine_dir)
        model = replace(self.model, model_dir=model_dir).fitting()
        return replace(self, named=None, engine_dir=engine_dir, model=model)

    @property
    def has_engine(self) -> bool:
        return self.engine_dir is not None or self.model.model_dir is not None

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        paths = (self.engine_dir, self.traces, self.input_file, self.tokenizer_dir)
        return [path for path in paths if path is not None]


@dataclass(frozen=True)
class TuneOptions:
    """Settings of the search, and the output file; None where no value was given."""

    max_output_len: Annotated[
        int | None, option(RUNTIME, "Tokens to generate from a prompt.", shown=str(DEFAULT_OUTPUT_LEN), min=1)
    ] = None
    end_id: EndId = None
    batch_size: Annotated[int | None, option(RUNTIME, "Requests answered together.", shown="1", min=1)] = None
    num_live_prompts: Annotated[
        int | None,
        option(
            RUNTIME, "Number of requests on which the best settings are timed.", shown=str(DEFAULT_LIVE_PROMPTS), min=1
        ),
    ] = None
    draft_model_dir: Annotated[
        str | None,
        option(
            SPECULATION,
            "A draft model or trained head to try as well: a directory, GGUF file or hub id.",
            shown="the MTP head of `--model-dir`, if it has one",
        ),
    ] = None
    max_draft_len: Annotated[
        int | None,
        option(SPECULATION, "Longest draft to try.", shown="10, or the engine's or the drafter's if shorter", min=1),
    ] = None
    drafters: Drafters = None
    compare_activations: CompareActivations = False
    output: Annotated[
        Path | None,
        option(OUTPUT, "Write the recommendation, for `--profile` of other commands.", metavar="PROFILE.json"),
    ] = None
    save: Annotated[
        bool,
        option(
            OUTPUT,
            "Make the recommendation the model's default: `run`, `chat`, `serve` and the others draft so unless a flag "
            "says how.",
            "--save",
        ),
    ] = False
    report: Report = None

    def check(self, inputs: TuneInputs, named: Speculation) -> None:
        """UsageError if there are no requests or no candidates to tune for, or for options that have no effect with the
        inputs.
        """
        inputs.model.check(inputs.engine_dir)
        if self.save and inputs.model.model_dir is None:
            raise UsageError(
                "`--save` makes a default of a model, and none is given",
                hint="`specdec tune MODEL --save`; an engine's profile is a file, by `--output`",
            )
        if self.compare_activations and inputs.model.model_dir is None:
            raise UsageError(
                "`--compare-activations` builds engines of a model, and none is given",
                hint="`specdec tune MODEL --compare-activations`; `specdec build` has the flag for a checkpoint",
            )
        if not inputs.has_engine:
            self._check_without_engine(inputs.traces)
            if named and named.lookup is None:
                raise UsageError(
                    "a model, or several drafters, cannot be replayed: `--engine-dir` is missing",
                    hint="give `--engine-dir`; without an engine `tune` can replay a single lookup only",
                )
        if inputs.traces is not None:
            given = {
                "--input-text": inputs.input_text,
                "--input-file": inputs.input_file,
                "--max-output-len": self.max_output_len,
            }
            _refuse("cannot be given with `--traces`, which has prompts and outputs", given, "leave one of the two out")
        elif not inputs.input_text and inputs.input_file is None:
            raise UsageError(
                "nothing to tune on",
                hint="`--traces` has recorded outputs, `--input-file` and `--input-text` have prompts",
            )
        longest = named.max_draft_len
        if longest and self.max_draft_len is not None and self.max_draft_len > longest:
            raise UsageError(
                f"`--max-draft-len` exceeds the drafter's own, {longest}: {self.max_draft_len}",
                hint="lower it, or raise the drafter's",
            )

    def _check_without_engine(self, traces: Path | None) -> None:
        given = {
            "--output": self.output,
            "--batch-size": self.batch_size,
            "--num-live-prompts": self.num_live_prompts,
            "--end-id": self.end_id,
            "--draft-model-dir": self.draft_model_dir,
        }
        hint = "name the engine, or leave the flag out: recorded outputs alone are counted, not timed"
        _refuse("needs `--engine-dir`", given, hint)
        if traces is None:
            raise UsageError("nothing to tune for", hint="`--engine-dir` names an engine, `--traces` recorded outputs")


def _refuse(reason: str, given: Mapping[str, object], hint: str) -> None:
    """UsageError with this reason for the first of the flags that was given."""
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"`{flag}` {reason}: {value}", hint=hint)
