"""`specdec build`, its flags: a checkpoint becomes an engine bundle."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from commands.options.engine_flags import BuildEngineOptions, DraftOutputOptions
from commands.options.expand import expand_groups
from commands.options.shared import USUAL_CHECKPOINT, USUAL_ENGINE, CompareActivations, Force, check_has_more_bits
from commands.output.help import INPUT, KV_CACHE, OUTPUT, RUNTIME, SPECULATION, option
from commands.output.output import Output, check_new_directory, check_readable
from runtime.builder.engine_options import EngineOptions, build_config_of
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint, check_hidden_states, check_self_draft, open_checkpoint
from runtime.checkpoint.config import (
    MAX_SEQ_LEN,
    MAX_TOKENS_PER_BLOCK,
    USUAL_MAX_DRAFT_LEN,
    USUAL_TOKENS_PER_BLOCK,
    BuildConfig,
    CheckpointConfig,
    Compiler,
    SelfDraft,
    SpeculativeDecodingMode,
    usual_max_seq_len,
)
from runtime.drafters.heads.head_config import HeadConfig, read_head, states_of_heads
from runtime.util.errors import UsageError
from runtime.util.files import check_output_directory, check_output_is_not_input, directory_bytes

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Source and limits of a build. Where the longest sequence is None, it is the model's."""

    checkpoint_dir: Annotated[Path, option(INPUT, "Checkpoint made by `convert`.")] = Path(USUAL_CHECKPOINT)
    output_dir: Annotated[Path, option(OUTPUT, "Engine directory to write.")] = Path(USUAL_ENGINE)
    engine: BuildEngineOptions = field(default_factory=BuildEngineOptions)
    max_input_len: Annotated[
        int | None,
        option(
            RUNTIME,
            "Most tokens in a prompt.",
            shown="max_seq_len - 1: room for one token of output",
            min=1,
            max=MAX_SEQ_LEN,
        ),
    ] = None
    self_draft_group_size: Annotated[
        int | None,
        option(
            SPECULATION,
            "Inputs that share a scale in the self-draft copy's layers; -1 for one scale per output.",
            shown="64",
            min=-1,
        ),
    ] = None
    draft_model_dir: Annotated[
        Path | None,
        option(
            SPECULATION,
            "Trained head that will draft with this engine. The engine then hands out the hidden states that the "
            "head reads.",
        ),
    ] = None
    draft_output: DraftOutputOptions = field(default_factory=DraftOutputOptions)
    speculative_decoding_mode: Annotated[
        SpeculativeDecodingMode | None,
        option(
            SPECULATION,
            "Source of drafts: none or draft_tokens_external.",
            shown="draft_tokens_external with a draft length",
            metavar="NAME",
        ),
    ] = None
    use_paged_context_fmha: Annotated[
        Literal["enable", "disable"], option(KV_CACHE, "Let attention read the paged K/V cache; drafts need it.")
    ] = "enable"
    tokens_per_block: Annotated[
        int, option(KV_CACHE, "Tokens in a K/V block; a power of two.", min=1, max=MAX_TOKENS_PER_BLOCK)
    ] = USUAL_TOKENS_PER_BLOCK
    device: Annotated[
        Literal["auto", "cpu", "cuda"], option(RUNTIME, "Device of the engine; `auto` is a GPU if there is one.")
    ] = "auto"
    workers: Annotated[
        int,
        option(
            RUNTIME,
            "Number of build processes for a model split over devices; each holds one rank's weights.",
            min=1,
            max=MAX_WORKERS,
        ),
    ] = 1
    quality_text: Annotated[
        Path | None,
        option(
            INPUT,
            "Text on which the quantized model is compared with the original: 2,000 tokens.",
            shown="the demo's articles for the demo",
        ),
    ] = None
    compare_activations: CompareActivations = False
    force: Force = False

    def config(
        self, max_seq_len: int, compiler: Compiler, hidden_states: tuple[int, ...] = (), ids: Sequence[int] = ()
    ) -> BuildConfig:
        """Build config for prompts and outputs of at most `max_seq_len` tokens together, to which the longest draft is
        added.
        """
        usual = build_config_of(self.options, compiler, max_seq_len, hidden_states)
        return replace(
            usual,
            max_input_len=self.max_input_len or usual.max_input_len,
            tokens_per_block=self.tokens_per_block,
            self_draft=self.copy,
            draft_output=self.draft_output.settings.output(ids),
        )

    @property
    def options(self) -> EngineOptions:
        """The options that are given, and the longest draft."""
        return self.engine.options | {"max_draft_len": self.longest_draft}

    @property
    def longest_draft(self) -> int:
        """`--max-draft-len`, or its default."""
        if (given := self.engine.options.get("max_draft_len")) is not None:
            return given
        is_without = self.speculative_decoding_mode == "none" or self.use_paged_context_fmha == "disable"
        return 0 if is_without else USUAL_MAX_DRAFT_LEN

    @property
    def copy(self) -> SelfDraft | None:
        """Quantization of the self-draft copy."""
        qformat, group_size = self.engine.options.get("self_draft"), self.self_draft_group_size or 64
        return None if qformat is None else SelfDraft(qformat, None if group_size == -1 else group_size)

    @property
    def heads(self) -> list[HeadConfig]:
        """The trained head that will draft, if a flag names it; SpecDecError if the directory is not a head."""
        return [] if self.draft_model_dir is None else [read_head(self.draft_model_dir)]

    def hidden_states_of(self, checkpoint: CheckpointConfig) -> tuple[int, ...]:
        """Hidden states that the head reads; SpecDecError if the head, or the self-draft copy, does not
        fit the model.
        """
        check_self_draft(checkpoint, self.copy)
        heads, config = self.heads, checkpoint.pretrained_config
        for head in heads:
            head.check_target(config, config.get("vocab_size"))
        hidden_states = states_of_heads(heads, config)
        check_hidden_states(checkpoint, hidden_states)
        return hidden_states

    def check(self) -> None:
        """UsageError for settings of drafts that contradict each other, or a block size that is not allowed."""
        self.engine.check()
        if self.speculative_decoding_mode == "draft_tokens_external" and self.engine.max_draft_len == 0:
            raise UsageError(
                "`--speculative-decoding-mode draft_tokens_external` needs a draft length: --max-draft-len 0",
                hint="`--max-draft-len 10` allows drafts of up to 10 tokens",
            )
        if self.longest_draft > 0 and self.speculative_decoding_mode == "none":
            raise UsageError(
                f"`--max-draft-len {self.longest_draft}` needs another mode: --speculative-decoding-mode none",
                hint="leave the mode out, or `--speculative-decoding-mode draft_tokens_external`",
            )
        if self.longest_draft > 0 and self.use_paged_context_fmha == "disable":
            raise UsageError(
                "drafts need attention over the paged K/V cache: --use-paged-context-fmha disable",
                hint="`--use-paged-context-fmha enable`",
            )
        if self.copy is not None and self.longest_draft == 0:
            raise UsageError(
                f"`--self-draft` needs a draft length: {self.copy.qformat}",
                hint="`--max-draft-len 8` allows drafts of up to 8 tokens",
            )
        if self.draft_model_dir is not None and self.longest_draft == 0:
            raise UsageError(
                f"`--draft-model-dir` needs a draft length: {self.draft_model_dir}",
                hint="`--max-draft-len 4` allows drafts of up to 4 tokens",
            )
        self.draft_output.settings.check(self.heads, has_copy=self.copy is not None)
        if self.self_draft_group_size is not None and self.copy is None:
            raise UsageError(
                "`--self-draft-group-size` is for the copy that drafts, which needs `--self-draft`: "
                f"{self.self_draft_group_size}",
                hint="`--self-draft int4` puts a copy into the engine",
            )
        if self.self_draft_group_size == 0:
            raise UsageError("a group has at least one input: --self-draft-group-size 0", hint="64 is the default")
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise UsageError(
                f"`--tokens-per-block` must be a power of two: {self.tokens_per_block}",
                hint="`--tokens-per-block 32` is the default",
            )


@expand_groups
def build(options: BuildOptions, output: Output) -> None:
    """Build a compiled engine from a checkpoint, and check its logits against transformers before writing it.

    The engine takes drafts of up to 10 tokens, and prompts of any length that leaves room for one token of output.
    """
    options.check()
    check_output_directory(options.output_dir, replace=options.force)
    check_new_directory(options.output_dir)
    checkpoint = open_checkpoint(options.checkpoint_dir)
    if options.compare_activations:
        check_has_more_bits(checkpoint.quantization)
    hidden_states = options.hidden_states_of(checkpoint)
    if options.quality_text is not None:
        check_readable([options.quality_text])
    check_output_is_not_input(options.output_dir, options.checkpoint_dir)

    from commands.build.document import BuildDocument, built_table
    from runtime.builder.build import BuildEffort, build_engine, positions_of
    from runtime.builder.choosing import compiler_for, without_kernels
    from runtime.builder.draft_ids import choose_drafts, warn_of_missing_ends
    from runtime.builder.quality import demo_text, measure_quality, quality_text, record_quality
    from runtime.engine.engine import resolve_device
    from runtime.measure.activations import compare_at_build

    checkpoint_dir, output_dir = options.checkpoint_dir, options.output_dir
    opened = OpenedCheckpoint(checkpoint_dir, checkpoint)
    drafts = choose_drafts(options.draft_output.settings, options.heads, opened)
    warn_of_missing_ends(drafts, opened)
    text = quality_text(checkpoint, options.quality_text)
    target = resolve_device(options.device, 0)
    max_seq_len = options.engine.max_seq_len or usual_max_seq_len(positions_of(opened))
    compiler = compiler_for(target, options.engine.compiler)
    if options.engine.compiler is None:
        compiler = without_kernels(compiler)
    settings = options.config(max_seq_len, compiler, hidden_states, drafts.ids)
    start, phase_times = time.perf_counter(), _PhaseTimes()
    with output.phases() as show:

        def phase(name: str) -> None:
            phase_times.begin(name.partition(" (")[0])
            show(name)

        effort = BuildEffort(
            num_workers=options.workers, drafts=drafts, takes_torch_compile=options.engine.compiler is None
        )
        config = build_engine(
            checkpoint_dir, output_dir, settings, target, replace=options.force, phase=phase, effort=effort
        )
        if text is not None:
            phase("comparing with the unquantized model")
            config = record_quality(output_dir, config, measure_quality(checkpoint_dir, *text))
        in_eight_bits = None
        if options.compare_activations:
            compared_on = demo_text() if text is None else text[0]
            in_eight_bits = compare_at_build(opened, output_dir, settings, compared_on, phase)
    phase_times.end()
    elapsed, size = time.perf_counter() - start, directory_bytes(output_dir)
    if config.compiler_note:
        output.warning(f"built with `--compiler torch-compile`: the model {config.compiler_note}")
    output.result(built_table(config, output_dir, size, elapsed, phase_times.seconds))
    if in_eight_bits is not None:
        output.result(f"`convert --activations int8`: {in_eight_bits}")
    document = BuildDocument(
        engine_dir=str(output_dir),
        engine=config,
        size_bytes=size,
        build_time_s=elapsed,
        phase_times_s=phase_times.seconds,
        in_eight_bits=in_eight_bits,
    )
    output.document(document.as_json())


class _PhaseTimes:
    """Seconds per phase, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._start = name, time.perf_counter()

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._start
