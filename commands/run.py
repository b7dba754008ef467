"""`specdec run`: generate, with or without speculation, and say how it went."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.inputs.prompts import Prompt, read_prompts
from commands.options.drafting import DrafterFlags, NgramOptions, parse_drafter
from commands.options.leader import LeaderFlags, ModelFlags
from commands.options.shared import (
    INPUT,
    OUTPUT,
    RUNTIME,
    SAMPLING,
    BadWords,
    BlockReuse,
    CheckLossless,
    CustomDrafter,
    DisableKvCacheReuse,
    DisableOverlapScheduler,
    DraftEngineDir,
    Drafters,
    DraftLenModeOption,
    DraftModelDir,
    DraftTargetModelConfig,
    EndId,
    FreeGpuMemoryFraction,
    FrequencyPenalty,
    Json,
    MaxBatchSize,
    MaxMatchingNgramSize,
    MaxNumTokens,
    MaxSeqLen,
    MaxTokensInCache,
    MinMatchingNgramSize,
    MinP,
    ModelDir,
    ModelDtype,
    NgramConfig,
    NgramCorpus,
    NgramPoolOption,
    NgramRankingOption,
    NoBlockReuse,
    NoCache,
    NoRepeatNgramSize,
    NumBeams,
    OutputTraces,
    PresencePenalty,
    ProfileOption,
    Quiet,
    RepetitionPenalty,
    Report,
    SpecDecodeAlgo,
    SpecDecodeMaxDraftLen,
    Stats,
    StopWords,
    SuffixConfig,
    Temperature,
    TokenizerDir,
    TopK,
    TopP,
    UsePySession,
    check_drafter_flags,
    check_orchestrator_flags,
    check_profile_flags,
    sampling_params,
)
from commands.output import Output, check_output_files, speedup_line
from runtime.errors import SpecDecError, UsageError

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.session import Generation, Session


def run(
    engine_dir: Annotated[
        Path | None,
        typer.Option(help="Engine directory made by `build`.", rich_help_panel=INPUT, show_default="engine_outputs"),
    ] = None,
    input_text: Annotated[
        list[str] | None, typer.Option(help="Prompt; repeatable.", rich_help_panel=INPUT, show_default=False)
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: .txt (one a line), .jsonl (`prompt` or `prompt_ids`), .csv or .npy (token ids).",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    max_input_length: Annotated[
        int | None,
        typer.Option(min=1, help="Keep this many last tokens of a prompt.", rich_help_panel=INPUT, show_default="all"),
    ] = None,
    tokenizer_dir: TokenizerDir = None,
    max_output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate.", rich_help_panel=RUNTIME)] = 128,
    end_id: EndId = None,
    stop_words: StopWords = None,
    ngram_config: NgramConfig = None,
    ngram_ranking: NgramRankingOption = None,
    min_matching_ngram_size: MinMatchingNgramSize = None,
    ngram_pool: NgramPoolOption = None,
    ngram_corpus: NgramCorpus = None,
    suffix_config: SuffixConfig = None,
    draft_len_mode: DraftLenModeOption = None,
    profile: ProfileOption = None,
    draft_target_model_config: DraftTargetModelConfig = None,
    draft_engine_dir: DraftEngineDir = None,
    drafter: CustomDrafter = None,
    drafters: Drafters = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    no_repeat_ngram_size: NoRepeatNgramSize = None,
    bad_words: BadWords = None,
    random_seed: Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=SAMPLING)] = 0,
    num_return_sequences: Annotated[
        int, typer.Option(min=1, help="Outputs for each prompt.", rich_help_panel=SAMPLING)
    ] = 1,
    max_num_tokens: MaxNumTokens = None,
    kv_cache_enable_block_reuse: BlockReuse = False,
    no_kv_cache_enable_block_reuse: NoBlockReuse = False,
    kv_cache_free_gpu_memory_fraction: FreeGpuMemoryFraction = 0.9,
    max_tokens_in_paged_kv_cache: MaxTokensInCache = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Print text as it is generated.", rich_help_panel=OUTPUT)
    ] = False,
    streaming_interval: Annotated[
        int, typer.Option(min=1, help="Steps between two prints.", rich_help_panel=OUTPUT)
    ] = 5,
    output_csv: Annotated[
        Path | None,
        typer.Option(
            help="Write prompt and output ids, padded with the end id.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = None,
    output_npy: Annotated[
        Path | None, typer.Option(help="The same as int32 array.", rich_help_panel=OUTPUT, show_default=False)
    ] = None,
    output_generation_logits: Annotated[
        bool,
        typer.Option(
            "--output-generation-logits",
            help="Write the target's float32 logits of every generated token, to `logits_generation.npy` if no other "
            "name is given.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    output_logits_npy: Annotated[
        Path | None,
        typer.Option(
            help="The same to this name with `_generation` put in, as in TensorRT-LLM.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    output_traces: OutputTraces = None,
    check_lossless: CheckLossless = False,
    stats: Stats = "summary",
    show_tokens: Annotated[
        bool,
        typer.Option(
            "--show-tokens", help="Mark accepted, recovered and bonus tokens in the outputs.", rich_help_panel=OUTPUT
        ),
    ] = False,
    report: Report = None,
    num_beams: NumBeams = 1,
    use_py_session: UsePySession = False,
    model_dir: ModelDir = None,
    spec_decode_algo: SpecDecodeAlgo = None,
    spec_decode_max_draft_len: SpecDecodeMaxDraftLen = None,
    max_matching_ngram_size: MaxMatchingNgramSize = None,
    draft_model_dir: DraftModelDir = None,
    disable_kv_cache_reuse: DisableKvCacheReuse = False,
    disable_overlap_scheduler: DisableOverlapScheduler = False,
    dtype: ModelDtype = None,
    max_batch_size: MaxBatchSize = None,
    max_seq_len: MaxSeqLen = None,
    no_cache: NoCache = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate from prompts, speculating with a drafter if one is given.

    In orchestrator mode (V1) unless flags of leader mode (V2) are given: then requests join and leave a running batch.

    Greedy unless sampling is asked for. Greedy output is exactly what the model generates without speculation, and so
    is sampled output with the same seed; with `use_logits` sampled output has the same distribution.
    """
    models = ModelFlags(model_dir, draft_model_dir, dtype, max_batch_size, max_seq_len, no_cache)
    leader = LeaderFlags(
        spec_decode_algo,
        spec_decode_max_draft_len,
        max_matching_ngram_size,
        disable_kv_cache_reuse,
        disable_overlap_scheduler,
    )
    is_leader = models.are_given or leader.are_given
    flags = DrafterFlags(
        ngram_config,
        suffix_config,
        draft_target_model_config,
        draft_engine_dir,
        drafter,
        drafters,
        NgramOptions(ngram_ranking, min_matching_ngram_size, ngram_pool, ngram_corpus),
    )
    check_profile_flags(
        profile,
        model_dir,
        {
            **flags.given(),
            "--draft-len-mode": draft_len_mode,
            **leader.drafting(),
            "--draft-model-dir": draft_model_dir,
        },
    )
    if is_leader:
        _refuse_orchestrator_flags(ngram_config, suffix_config, draft_target_model_config)
        models.check(engine_dir, draft_engine_dir)
        draft_dir = Path(draft_model_dir) if draft_model_dir is not None else draft_engine_dir
        drafter_settings = leader.drafter_settings(draft_dir, drafter, drafters, flags.ngram)
    else:
        drafter_settings = parse_drafter(flags)
    check_orchestrator_flags(
        block_reuse=is_leader or not no_kv_cache_enable_block_reuse, num_beams=num_beams, py_session=use_py_session
    )
    _check_block_reuse(kv_cache_enable_block_reuse, no_kv_cache_enable_block_reuse, disable_kv_cache_reuse)
    engine_dir = engine_dir or Path("engine_outputs")
    if streaming and json:
        raise UsageError("`--streaming` and `--json` both want stdout", hint="choose one")
    _check_show_tokens(show_tokens=show_tokens, streaming=streaming, json=json, quiet=quiet)
    if profile is not None:
        from runtime.tuning.profile import profile_for

        tuned = profile_for(profile, engine_dir)
        drafter_settings, draft_len_mode = tuned.drafter, tuned.draft_len_mode
    check_drafter_flags(
        check_lossless=check_lossless, draft_len_mode=draft_len_mode, has_drafter=drafter_settings is not None
    )
    logits_npy = _logits_path(output_logits_npy) if output_generation_logits or output_logits_npy is not None else None
    outputs = [path for path in (output_csv, output_npy, logits_npy, output_traces, report) if path is not None]
    inputs = (
        engine_dir,
        draft_engine_dir,
        tokenizer_dir,
        input_file,
        ngram_corpus,
        profile,
        *(Path(m) for m in (model_dir, draft_model_dir) if m),
    )
    check_output_files(outputs, [path for path in inputs if path is not None])
    sampling = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        random_seed=random_seed,
    )

    from runtime.drafters.opening import check_corpus_files
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS, KVCacheConfig
    from runtime.engine_cache import engines_of_models
    from runtime.session import SessionSettings, open_session

    output = Output(json, quiet)
    if num_return_sequences > 1 and sampling.is_greedy:
        output.warning(
            f"greedy outputs of one prompt are all the same: `--num-return-sequences {num_return_sequences}`"
        )
    job = _Job(
        prompts=read_prompts(input_text or [], input_file),
        input_file=input_file,
        max_input_length=max_input_length,
        max_output_len=max_output_len,
        num_return_sequences=num_return_sequences,
        streaming_interval=streaming_interval if streaming else None,
        output_csv=output_csv,
        output_npy=output_npy,
        logits_npy=logits_npy,
        output_traces=output_traces,
        check_lossless=check_lossless,
        stats=stats,
        show_tokens=show_tokens,
        report=report,
    )
    check_corpus_files(drafter_settings)  # before engines are built
    with ExitStack() as stack:
        engines = stack.enter_context(engines_of_models(models, engine_dir, drafter_settings, output))
        settings = SessionSettings(
            engines.engine_dir,
            tokenizer_dir,
            engines.drafter,
            sampling,
            KVCacheConfig(
                not (no_kv_cache_enable_block_reuse or disable_kv_cache_reuse),
                max_tokens_in_paged_kv_cache,
                kv_cache_free_gpu_memory_fraction,
            ),
            end_id,
            stop_words or [],
            bad_words or [],
            "leader" if is_leader else "orchestrator",
            max_num_tokens or DEFAULT_MAX_NUM_TOKENS,
            draft_len_mode or "fixed",
            profile,
        )
        _answer(stack.enter_context(open_session(settings)), job, output)


@dataclass(frozen=True)
class _Job:
    """What to answer, and what to write of it."""

    prompts: list[Prompt]
    input_file: Path | None
    max_input_length: int | None
    max_output_len: int
    num_return_sequences: int
    streaming_interval: int | None
    output_csv: Path | None
    output_npy: Path | None
    logits_npy: Path | None
    output_traces: Path | None
    check_lossless: bool
    stats: str
    show_tokens: bool
    report: Path | None


def _answer(session: "Session", job: _Job, output: Output) -> None:
    """Generate, show and write; exit 1 if a check fails, 130 after Ctrl-C, with what had finished."""
    from commands.documents.arrays import write_ids, write_logits
    from commands.html.report import write_report
    from commands.inputs.traces import write_traces
    from commands.tables.run import StreamPrinter, make_document, make_labels, show_outputs, show_stats
    from runtime.evaluation.lossless import fail_unless_lossless
    from runtime.evaluation.steps import session_pieces
    from runtime.session import Interrupted

    prompts, requests = _make_requests(session, job, output)
    labels = make_labels(len(requests), job.num_return_sequences)
    if job.check_lossless:
        session.warm_up(requests)  # or the first of the two runs would pay for the first step
    interval = job.streaming_interval
    printer = StreamPrinter(session, output, interval, labels) if interval is not None else None
    try:
        generation = session.run(requests, speculate=True, on_tokens=printer)
    except Interrupted as interrupted:
        generation = interrupted.finished
        output.warning(f"interrupted: {len(generation.sequences)} of {len(requests)} requests had finished")
    num_unfinished = len(requests) - len(generation.sequences)
    if printer is None:
        show_outputs(session, prompts, generation, labels, output, show_tokens=job.show_tokens)
    if generation.sequences:
        show_stats(generation, labels, session.max_draft_len, job.stats, output)
        write_ids(generation.sequences, min(session.end_ids, default=0), job.output_csv, job.output_npy)
        if job.logits_npy is not None:
            write_logits(generation.sequences, job.logits_npy)
            output.result(f"logits written: {job.logits_npy}")
        if job.output_traces is not None:
            write_traces(job.output_traces, [(s, prompts[s.request.id].category) for s in generation.sequences])
    comparison = {}
    if job.check_lossless:
        comparison = _compare_unless_interrupted(session, requests, generation, job, output)
    is_detailed = job.stats == "detailed"
    document = make_document(
        session, prompts, generation, job.max_input_length, job.max_output_len, per_step=is_detailed
    )
    document |= {"num_unfinished_requests": num_unfinished, "speedup": None, "checks": {}} | comparison
    output.document(document)
    if job.report is not None:
        write_report(job.report, document, session_pieces(session, generation.sequences))
        output.result(f"report written: {job.report}")
    if num_unfinished or (job.check_lossless and not comparison):
        raise typer.Exit(130)
    if comparison:
        fail_unless_lossless(comparison["checks"])


def _compare_unless_interrupted(
    session: "Session", requests: list["Request"], generation: "Generation", job: _Job, output: Output
) -> dict[str, Any]:
    """`_compare_with_no_drafter`; empty, with a warning, after Ctrl-C before it or in it."""
    if len(generation.sequences) == len(requests):
        with suppress(KeyboardInterrupt):
            return _compare_with_no_drafter(session, requests, generation, job, output)
    output.warning("lossless check left out: the run was interrupted")
    return {}


def _compare_with_no_drafter(
    session: "Session", requests: list["Request"], generation: "Generation", job: _Job, output: Output
) -> dict[str, Any]:
    """Generate again without a drafter; the `speedup` and `checks` of the document, shown too."""
    from runtime.evaluation.lossless import NUM_PREFIXES, check_outputs, lossless_lines

    baseline = session.run_without_drafter(requests)
    speedup = generation.work.speedup_over(baseline.work)
    with output.progress("lossless check", NUM_PREFIXES) as advance:
        check = check_outputs(session, generation.sequences, baseline.sequences, advance)
    if job.stats != "none":
        output.result(speedup_line(speedup))
    for line in lossless_lines(check):
        output.result(line)
    return {"speedup": speedup, "checks": {"lossless": check}}


def _check_block_reuse(enable: bool, no_enable: bool, disable: bool) -> None:
    """UsageError for a yes and a no; each mode has a flag to say no."""
    if enable and (no_enable or disable):
        no = "--no-kv-cache-enable-block-reuse" if no_enable else "--disable-kv-cache-reuse"
        raise UsageError(f"`--kv-cache-enable-block-reuse` and `{no}` cannot be given together", hint="choose one")


def _check_show_tokens(*, show_tokens: bool, streaming: bool, json: bool, quiet: bool) -> None:
    """UsageError where marked outputs are not what stdout is to have."""
    if show_tokens and streaming:
        raise UsageError(
            "`--show-tokens` marks whole outputs, and `--streaming` prints them as they come", hint="choose one"
        )
    if show_tokens and (json or quiet):
        raise UsageError(
            f"`--show-tokens` marks outputs for people, and stdout is to have {'JSON' if json else 'the result only'}",
            hint="`--json --stats detailed` has the counts of each step, from which the marks follow",
        )


def _logits_path(path: Path | None) -> Path:
    """TensorRT-LLM's run.py writes `--output_logits_npy x.npy` to x_generation.npy."""
    path = Path("logits.npy") if path is None else path
    if path.name in ("", "..") or path.is_dir():
        raise SpecDecError(f"cannot write the file (Is a directory): {path}", hint="choose another path")
    return path.with_name(f"{path.stem}_generation.npy")


def _make_requests(session: "Session", job: _Job, output: Output) -> tuple[list[Prompt], list["Request"]]:
    """The requests, num_return_sequences of each prompt, and the prompt of each."""
    from runtime.text import encode

    prompts = job.prompts
    if job.input_file is not None and job.input_file.suffix.lower() == ".npy" and session.end_ids:
        # Again, now that it is known what the rows of an array are padded with.
        prompts = read_prompts([], job.input_file, pad_id=min(session.end_ids))
    prompts = [prompt for prompt in prompts for _ in range(job.num_return_sequences)]
    requests, num_truncated = [], 0
    for i, prompt in enumerate(prompts):
        tokens, truncated = encode(prompt, session.tokenizer, job.max_input_length)
        return_index = i % job.num_return_sequences
        request = session.request(i, tokens, job.max_output_len)
        requests.append(replace(request, return_index=return_index, keep_logits=job.logits_npy is not None))
        num_truncated += truncated and return_index == 0
    if num_truncated:
        output.warning(f"prompts cut to their last {job.max_input_length} tokens: {num_truncated}")
    return prompts, requests


def _refuse_orchestrator_flags(
    ngram_config: str | None, suffix_config: str | None, draft_target_model_config: str | None
) -> None:
    """UsageError for a drafter of orchestrator mode among flags of leader mode."""
    for flag, value, algorithm in (
        ("--ngram-config", ngram_config, "NGRAM"),
        ("--suffix-config", suffix_config, "SUFFIX"),
        ("--draft-target-model-config", draft_target_model_config, "DRAFT_TARGET"),
    ):
        if value is not None:
            raise UsageError(
                f"`{flag}` is for orchestrator mode (V1) and cannot be given with flags of leader mode (V2): {value}",
                hint=f"`--spec-decode-algo {algorithm} --spec-decode-max-draft-len 4` is leader mode's form; "
                "or build an engine, and give it by `--engine-dir`",
            )
