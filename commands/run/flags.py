"""Flags of `specdec run`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.options.sampling_flags import ConversationOptions, GenerationOptions
from commands.options.shared import CheckLossless, OutputTraces, ReceiptIds, Receipts, Report, Stats
from commands.output.help import INPUT, OUTPUT, RUNTIME, SAMPLING, option
from commands.output.output import Output, check_output_files, check_report, note
from runtime.core.params import SamplingParams
from runtime.util.errors import SpecDecError, UsageError

DEFAULT_OUTPUT_LEN, MAX_NUM_RETURN_SEQUENCES = 128, 1024
EXAMPLE_PROMPT = "Born in north-east France, Soyer trained as a"


@dataclass(frozen=True)
class RunInputs:
    """Prompts, and how they become requests."""

    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; `-` reads standard input.", show_default=False)
    ] = None
    input_text: Annotated[list[str] | None, option(INPUT, "Prompt; repeatable.")] = None
    input_file: Annotated[
        Path | None,
        option(
            INPUT,
            "Prompts: .txt (one a line), .jsonl (`prompt`, `prompt_ids` or `messages`), .csv or .npy (token "
            "ids); `-` is standard input, one a line.",
        ),
    ] = None
    max_input_length: Annotated[
        int | None, option(INPUT, "Cut longer prompts at the beginning, to this many tokens.", shown="all", min=1)
    ] = None
    apply_chat_template: Annotated[
        bool,
        option(
            INPUT,
            "Send each prompt as a user's message, in the form of the model's chat template.",
            "--apply-chat-template",
        ),
    ] = False
    conversation: ConversationOptions = field(default_factory=ConversationOptions)

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        return [] if self.input_file is None else [self.input_file]

    def with_example(self) -> "RunInputs":
        """The same inputs with TensorRT-LLM's example prompt if no prompt is given; a note says so."""
        if self.texts or self.input_file is not None:
            return self
        note(f'no prompt is given: an example is answered, "{EXAMPLE_PROMPT}"')
        return replace(self, prompt=[EXAMPLE_PROMPT])

    @property
    def texts(self) -> list[str]:
        """The prompts that are arguments, then the prompts of `--input-text`."""
        return [*(self.prompt or []), *(self.input_text or [])]


@dataclass(frozen=True)
class RunGeneration:
    """Flags for the number of tokens and the method of generation."""

    max_output_len: Annotated[
        int | None,
        option(RUNTIME, "Tokens to generate.", shown=f"{DEFAULT_OUTPUT_LEN}; in a chat as many as fit", min=1),
    ] = None
    common: GenerationOptions = field(default_factory=GenerationOptions)
    random_seed: Annotated[int, option(SAMPLING, "Seed of sampling.")] = 0
    num_return_sequences: Annotated[
        int, option(SAMPLING, "Outputs per prompt.", min=1, max=MAX_NUM_RETURN_SEQUENCES)
    ] = 1

    def for_chat(self, defaults: Mapping[str, Any]) -> "RunGeneration":
        """The same flags with the model's own sampling, as `SamplingOptions.for_chat` fills it in."""
        return replace(self, common=replace(self.common, sampling=self.common.sampling.for_chat(defaults)))

    def params(self, logprobs: int | None, usual_len: int | None = DEFAULT_OUTPUT_LEN) -> SamplingParams:
        """Sampling parameters for every prompt. Without `--max-output-len` outputs have up to `usual_len` tokens; None
        for as many as fit.
        """
        max_tokens = usual_len if self.max_output_len is None else self.max_output_len
        return self.common.params(
            n=self.num_return_sequences, seed=self.random_seed, max_tokens=max_tokens, logprobs=logprobs
        )


@dataclass(frozen=True)
class RunResults:
    """Outputs and checks of `run`."""

    streaming: Annotated[bool, option(OUTPUT, "Print text as it is generated.", "--streaming")] = False
    streaming_interval: Annotated[int | None, option(OUTPUT, "Steps between prints.", shown="5", min=1)] = None
    output_csv: Annotated[Path | None, option(OUTPUT, "Write prompt and output ids, padded with the end id.")] = None
    output_npy: Annotated[Path | None, option(OUTPUT, "Write prompt and output ids as a NumPy array of int32.")] = None
    output_generation_logits: Annotated[
        bool,
        option(
            RUNTIME,
            "Write the target's float32 logits of every generated token, by default to `logits_generation.npy`.",
            "--output-generation-logits",
        ),
    ] = False
    output_logits_npy: Annotated[
        Path | None,
        option(OUTPUT, "Write these logits to a file of this name with `_generation` inserted, as TensorRT-LLM does."),
    ] = None
    logprobs: Annotated[
        int | None,
        option(
            OUTPUT,
            "In `--json`, write the log-probability of each generated token, and of this many most likely tokens.",
            min=0,
        ),
    ] = None
    output_traces: OutputTraces = None
    receipts: Receipts = None
    receipt_ids: ReceiptIds = None
    check_lossless: CheckLossless = False
    stats: Stats = "summary"
    show_tokens: Annotated[
        bool, option(OUTPUT, "Mark accepted, recovered and bonus tokens in the outputs.", "--show-tokens")
    ] = False
    report: Report = None

    @property
    def logits_file(self) -> Path | None:
        """File for logits, `x_generation.npy` for `--output_logits_npy x.npy`, as in TensorRT-LLM's run.py."""
        if not self.output_generation_logits and self.output_logits_npy is None:
            return None
        path = self.output_logits_npy or Path("logits.npy")
        return path.with_name(f"{path.stem}_generation.npy")

    def check(self, output: Output) -> None:
        """UsageError for a flag without the flag that it needs, for two outputs on stdout, and for `--show-tokens`
        where no text is shown to people.
        """
        if self.receipt_ids is not None and self.receipts is None:
            raise UsageError(f"`--receipt-ids` is for receipts: {self.receipt_ids}", hint="give `--receipts` too")
        if self.logprobs is not None and not output.json:
            raise UsageError(f"`--logprobs` is for the JSON document: {self.logprobs}", hint="give `--json` too")
        if self.streaming_interval is not None and not self.streaming:
            raise UsageError(
                f"`--streaming-interval` needs `--streaming`: {self.streaming_interval}", hint="give both or neither"
            )
        if self.streaming and output.json:
            raise UsageError("`--streaming` and `--json` both want stdout", hint="choose one")
        if self.show_tokens and self.streaming:
            raise UsageError(
                "`--show-tokens` marks whole outputs, and `--streaming` prints them as they come", hint="choose one"
            )
        if self.show_tokens and not output.human:
            wanted = "JSON" if output.json else "the result only"
            raise UsageError(
                f"`--show-tokens` marks outputs for people, and stdout is to have {wanted}",
                hint="`--json --stats detailed` has the counts of each step, from which the marks follow",
            )

    def check_files(self, inputs: list[Path]) -> None:
        """SpecDecError unless all output files can be written without replacing an input."""
        check_report(self.report)
        logits = self.output_logits_npy
        if logits is not None and (logits.name in ("", "..") or logits.is_dir()):
            raise SpecDecError(f"cannot write the file (Is a directory): {logits}", hint="choose another path")
        outputs = (self.output_csv, self.output_npy, self.logits_file, self.output_traces, self.receipts, self.report)
        check_output_files([path for path in outputs if path is not None], inputs)
