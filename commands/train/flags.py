"""Flags of `specdec train`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from commands.options.engine_flags import ModelEngineOptions
from commands.options.model_word import named_by
from commands.output.help import INPUT, OUTPUT, RUNTIME, option
from runtime.util.errors import SpecDecError, UsageError

NEW_LEARNING_RATE, FURTHER_LEARNING_RATE = 1e-3, 1e-4


NUM_UNROLLED_STEPS, NUM_DEPTHS = 3, 8


@dataclass(frozen=True, kw_only=True)
class TrainInputs:
    """The target, its answers or prompts, and the head to begin with."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The target: directory, GGUF file, hub id or `demo`. It is not changed.",
            show_default=False,
        ),
    ] = None
    model_dir: Annotated[str | None, option(INPUT, "The same as `MODEL`, by a flag.")] = None
    draft_model_dir: Annotated[
        Path | None,
        option(
            INPUT,
            "EAGLE-3 head to train further, or the model's own directory for the MTP head that it has.",
            shown="a new one, which is weak",
        ),
    ] = None
    parallel: Annotated[
        str | None,
        option(
            INPUT,
            "Small model to adapt instead, so that it drafts several tokens in one pass (PARD): directory, GGUF file, "
            "hub id or `demo-draft`, with the target's tokenizer.",
            metavar="MODEL",
            shown="none",
        ),
    ] = None
    traces: Annotated[
        list[Path] | None, option(INPUT, "Answers of the target, as written by `--output-traces`. Repeatable.")
    ] = None
    input_file: Annotated[
        Path | None,
        option(
            INPUT,
            "Prompts in a file, as `run` takes it. The target answers them first, and the head learns from the "
            "answers.",
        ),
    ] = None
    held_out_traces: Annotated[
        Path | None, option(INPUT, "Answers to measure on, and not to learn from.", shown="one in ten of the others")
    ] = None
    max_output_len: Annotated[
        int, option(RUNTIME, "Most tokens in an answer to a prompt of `--input-file`.", min=3)
    ] = 256
    apply_chat_template: Annotated[
        bool, option(INPUT, "Send each prompt as a user's message of a chat.", "--apply-chat-template")
    ] = False

    def named(self) -> "TrainInputs":
        """The same inputs with the model that the first word names. UsageError if no model is named, or two models
        are.
        """
        named_by(self.model, self.model_dir, None)
        model_dir = self.model or self.model_dir
        if model_dir is None:
            raise UsageError(
                "no model to train for is given", hint="name it first, as in `specdec train demo`, or by `--model-dir`"
            )
        return replace(self, model=None, model_dir=model_dir)

    @property
    def target(self) -> str:
        """The target model, after `named`."""
        assert self.model_dir is not None
        return self.model_dir

    @property
    def paths(self) -> list[Path]:
        """Files to read."""
        files = [*(self.traces or []), self.input_file, self.held_out_traces]
        return [path for path in files if path is not None]


@dataclass(frozen=True)
class TrainOptions:
    """Length and settings of the training; None where the default depends on other settings."""

    num_epochs: Annotated[int, option(RUNTIME, "Number of passes over the texts.", min=1)] = 3
    learning_rate: Annotated[
        float | None,
        option(
            RUNTIME,
            "The highest learning rate.",
            shown=f"{NEW_LEARNING_RATE:g}; {FURTHER_LEARNING_RATE:g} of a given head or model",
        ),
    ] = None
    num_unrolled_steps: Annotated[
        int | None,
        option(
            RUNTIME,
            "Number of tokens that the head drafts in a row while it learns.",
            shown=f"{NUM_UNROLLED_STEPS}; an MTP head of several layers, one each; {NUM_DEPTHS} with `--parallel`",
            min=1,
            max=16,
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        option(
            RUNTIME,
            "Number of token ids that the head drafts: the ids that are most frequent in the answers.",
            shown="8,192; a given head's",
            min=2,
        ),
    ] = None
    batch_tokens: Annotated[int, option(RUNTIME, "Tokens of an optimizer step.", min=64)] = 2048
    max_text_len: Annotated[
        int, option(RUNTIME, "Read at most this many tokens of a prompt and its answer together.", min=16)
    ] = 1024
    learn_prompts: Annotated[
        bool,
        option(
            RUNTIME,
            "Learn from the tokens of prompts as well as answers; useful if there are few answers.",
            "--learn-prompts",
        ),
    ] = False
    random_seed: Annotated[int, option(RUNTIME, "Seed of the weights and of the texts' order.")] = 0


@dataclass(frozen=True, kw_only=True)
class TrainResults:
    """Directories that are written."""

    output_dir: Annotated[
        Path,
        option(
            OUTPUT,
            "Directory to write the head to: an EAGLE-3 head in the format of vLLM's speculators, an MTP head in "
            "its model's, a parallel draft model in transformers'.",
        ),
    ]
    work_dir: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Directory for hidden states and checkpoints, from which the same command resumes. A directory that "
            "you name is kept.",
            shown="the output's name and .training, removed in the end",
        ),
    ] = None
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)

    @property
    def working_dir(self) -> Path:
        return self.work_dir or self.output_dir.with_name(f"{self.output_dir.name}.training")

    def check(self) -> None:
        """SpecDecError unless the head's directory is new or empty, and the working directory is another directory, or
        new.
        """
        path = self.output_dir
        if path.exists() and not path.is_dir():
            raise SpecDecError(f"output directory is a file: {path}", hint="choose another name")
        if path.exists() and any(path.iterdir()):
            raise SpecDecError(f"output directory is not empty: {path}", hint="choose another, or remove it")
        if self.working_dir.exists() and not self.working_dir.is_dir():
            raise SpecDecError(f"the working directory is a file: {self.working_dir}", hint="choose another name")
        if self.working_dir.resolve() == path.resolve():
            raise UsageError(f"`--work-dir` and `--output-dir` are the same: {path}", hint="name two directories")
