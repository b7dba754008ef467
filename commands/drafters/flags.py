"""Flags of `specdec drafters`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from commands.options.engine_flags import ModelEngineOptions
from commands.options.model_word import ModelWord, named_by
from commands.options.shared import InputFile
from commands.output.help import INPUT, RUNTIME, SPECULATION, option
from runtime.util.errors import UsageError


@dataclass(frozen=True)
class DraftersInputs:
    """The model, and a sample of its requests."""

    named: ModelWord = None
    model_dir: Annotated[str | None, option(INPUT, "The same as MODEL.", "--model-dir", metavar="MODEL")] = None
    traces: Annotated[
        Path | None, option(INPUT, "Prompts with outputs, as written by `--output-traces`.", metavar="FILE.jsonl")
    ] = None
    input_text: Annotated[
        list[str] | None, option(INPUT, "Prompt; repeatable.", shown="4 shipped articles, cut to what fits")
    ] = None
    input_file: InputFile = None
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)

    def with_model(self) -> "DraftersInputs":
        """The same inputs with the model as `model_dir`. UsageError for no model, for two models, or for
        two samples.
        """
        named_by(self.named, self.model_dir, None)
        if (model := self.named or self.model_dir) is None:
            raise UsageError("no model is given", hint="`specdec drafters demo`")
        if self.traces is not None and (self.input_text or self.input_file):
            raise UsageError(
                f"`--traces` has prompts and outputs, and prompts are given too: {self.traces}",
                hint="leave one of the two out",
            )
        self.engines.check()
        return replace(self, named=None, model_dir=model)


@dataclass(frozen=True)
class DraftersOptions:
    """Drafters to try, and the size of the sample."""

    draft_model_dir: Annotated[
        list[str] | None,
        option(
            SPECULATION,
            "Draft model or trained head to try as well; repeatable.",
            shown="what lies beside the model and fits it",
            metavar="MODEL",
        ),
    ] = None
    num_prompts: Annotated[int, option(RUNTIME, "Most requests of the sample to run.", min=1)] = 8
    max_output_len: Annotated[int, option(RUNTIME, "Tokens to generate from a prompt.", min=2)] = 64
    measure: Annotated[
        bool,
        option(RUNTIME, "Also time each of them in turn, and compare with what was predicted.", "--measure"),
    ] = False
