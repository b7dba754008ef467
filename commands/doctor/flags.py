"""Flags of `specdec doctor`."""

from dataclasses import dataclass, field
from typing import Annotated

from commands.options.engine_choice import EngineDir
from commands.options.leader_flags import ModelOptions
from commands.options.shared import InputFile, TokenizerDir
from commands.output.help import INPUT, RUNTIME, option
from runtime.core.params import Mode


@dataclass(frozen=True)
class DoctorInputs:
    """The engine, and what it is asked."""

    engine_dir: EngineDir = None
    model: ModelOptions = field(default_factory=ModelOptions)
    input_text: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Prompt; repeatable. Real prompts are the most informative.",
            shown="4 shipped articles, cut to what fits",
        ),
    ] = None
    input_file: InputFile = None
    tokenizer_dir: TokenizerDir = None


@dataclass(frozen=True)
class DoctorOptions:
    """Settings for answering the prompts."""

    max_output_len: Annotated[int, option(RUNTIME, "Tokens to generate from a prompt.", min=1)] = 64
    mode: Annotated[
        Mode, option(RUNTIME, "The loop: orchestrator (V1) or leader (V2), as for `run`.", metavar="NAME")
    ] = "orchestrator"
