"""`specdec run`: generate, with or without speculation, and say how it went."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.drafter_settings import parse_drafter
from commands.options import (
    INPUT,
    OUTPUT,
    RUNTIME,
    SAMPLING,
    BadWords,
    BlockReuse,
    CheckLossless,
    CustomDrafter,
    DraftEngineDir,
    DraftTargetModelConfig,
    EndId,
    EngineDir,
    FreeGpuMemoryFraction,
    FrequencyPenalty,
    Json,
    MaxTokensInCache,
    MinP,
    NgramConfig,
    NoRepeatNgramSize,
    NumBeams,
    PresencePenalty,
    Quiet,
    RepetitionPenalty,
    StopWords,
    Temperature,
    TokenizerDir,
    TopK,
    TopP,
    UsePySession,
    check_lossless_flags,
    check_orchestrator_flags,
    sampling_params,
)
from commands.output import Output, check_output_files, speedup_line
from commands.prompts import Prompt, read_prompts
from runtime.errors import SpecDecError, UsageError

if TYPE_CHECKING:
    from commands.session import Generation, Session
    from runtime.request import Request


def run(
    engine_dir: EngineDir = Path("engine_outputs"),
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
    draft_target_model_config: DraftTargetModelConfig = None,
    draft_engine_dir: DraftEngineDir = None,
    drafter: CustomDrafter = None,
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
    kv_cache_enable_block_reuse: BlockReuse = True,
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
    check_lossless: CheckLossless = False,
    num_beams: NumBeams = 1,
    use_py_session: UsePySession = False,
    model_dir: Annotated[str | None, typer.Option(hidden=True)] = None,
    spec_decode_algo: Annotated[str | None, typer.Option(hidden=True)] = None,
    spec_decode_max_draft_len: Annotated[int | None, typer.Option(hidden=True)] = None,
    max_matching_ngram_size: Annotated[int | None, typer.Option(hidden=True)] = None,
    disable_kv_cache_reuse: Annotated[bool, typer.Option("--disable-kv-cache-reuse", hidden=True)] = False,
    disable_overlap_scheduler: Annotated[bool, typer.Option("--disable-overlap-scheduler", hidden=True)] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate from prompts in orchestrator mode (V1), speculating with a drafter if one is given.

    Greedy unless sampling is asked for. Greedy output is exactly what the model generates without speculation, and so
    is sampled output with the same seed; with `use_logits` sampled output has the same distribution.
    """
    leader_flags = (model_dir, spec_decode_algo, spec_decode_max_draft_len, max_matching_ngram_size)
    if any(flag is not None for flag in leader_flags) or disable_kv_cache_reuse or disable_overlap_scheduler:
        raise UsageError(
            "leader mode (V2: --model-dir, --spec-decode-algo, --spec-decode-max-draft-len …) is not in this version",
            hint="build an engine and give `--engine-dir` and `--ngram-config [4,2,[0]]`",
        )
    drafter_settings = parse_drafter(ngram_config, draft_target_model_config, draft_engine_dir, drafter)
    check_orchestrator_flags(block_reuse=kv_cache_enable_block_reuse, num_beams=num_beams, py_session=use_py_session)
    if streaming and json:
        raise UsageError("`--streaming` and `--json` both want stdout", hint="choose one")
    check_lossless_flags(check_lossless=check_lossless, has_drafter=drafter_settings is not None)
    logits_npy = _logits_path(output_logits_npy) if output_generation_logits or output_logits_npy is not None else None
    outputs = [path for path in (output_csv, output_npy, logits_npy) if path is not None]
    check_output_files(outputs, [path for path in (engine_dir, draft_engine_dir, input_file) if path is not None])
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

    from commands.lossless import fail_unless_lossless
    from commands.output_files import write_ids, write_logits
    from commands.run_output import StreamPrinter, make_document, make_labels, requests_table, show_outputs, time_line
    from commands.session import SessionSettings, open_session
    from runtime.engine import KVCacheConfig

    output = Output(json, quiet)
    if num_return_sequences > 1 and sampling.is_greedy:
        output.warning(
            f"greedy outputs of one prompt are all the same: `--num-return-sequences {num_return_sequences}`"
        )
    prompts = read_prompts(input_text or [], input_file)
    settings = SessionSettings(
        engine_dir,
        tokenizer_dir,
        drafter_settings,
        sampling,
        KVCacheConfig(kv_cache_enable_block_reuse, max_tokens_in_paged_kv_cache, kv_cache_free_gpu_memory_fraction),
        end_id,
        stop_words or [],
        bad_words or [],
    )
    with open_session(settings) as session:
        if input_file is not None and input_file.suffix.lower() == ".npy" and session.end_ids:
            # Again, now that it is known what the rows of an array are padded with.
            prompts = read_prompts([], input_file, pad_id=min(session.end_ids))
        requests = [
            replace(
                request, id=request.id * num_return_sequences + i, return_index=i, keep_logits=logits_npy is not None
            )
            for request in _make_requests(session, prompts, max_input_length, max_output_len, output)
            for i in range(num_return_sequences)
        ]
        prompts = [prompt for prompt in prompts for _ in range(num_return_sequences)]
        labels = make_labels(len(requests), num_return_sequences)
        if check_lossless:
            session.warm_up(requests)  # or the first of the two runs would pay for the first step
        printer = StreamPrinter(session, output, streaming_interval, labels) if streaming else None
        generation = session.run(requests, speculate=True, on_tokens=printer)
        if not streaming:
            show_outputs(session, prompts, generation, labels, output)
        output.result(requests_table(generation, labels))
        output.result(time_line(generation.total(session.max_draft_len)))
        write_ids(generation.sequences, min(session.end_ids, default=0), output_csv, output_npy)
        if logits_npy is not None:
            write_logits(generation.sequences, logits_npy)
            output.result(f"logits written: {logits_npy}")
        comparison = _compare_with_no_drafter(session, requests, generation, output) if check_lossless else {}
        document = make_document(session, prompts, generation, max_input_length, max_output_len)
        output.document(document | {"speedup": None, "checks": {}} | comparison)
    if check_lossless:
        fail_unless_lossless(comparison["checks"])


def _compare_with_no_drafter(
    session: "Session", requests: list["Request"], generation: "Generation", output: Output
) -> dict[str, Any]:
    """Generate again without a drafter; the `speedup` and `checks` of the document, shown too."""
    from commands.lossless import NUM_PREFIXES, check_outputs, lossless_lines

    baseline = session.run_without_drafter(requests)
    speedup = generation.work.speedup_over(baseline.work)
    with output.progress("lossless check", NUM_PREFIXES) as advance:
        check = check_outputs(session, generation.sequences, baseline.sequences, advance)
    for line in (speedup_line(speedup), *lossless_lines(check)):
        output.result(line)
    return {"speedup": speedup, "checks": {"lossless": check}}


def _logits_path(path: Path | None) -> Path:
    """TensorRT-LLM's run.py writes `--output_logits_npy x.npy` to x_generation.npy."""
    path = Path("logits.npy") if path is None else path
    if path.name in ("", "..") or path.is_dir():
        raise SpecDecError(f"cannot write the file (Is a directory): {path}", hint="choose another path")
    return path.with_name(f"{path.stem}_generation.npy")


def _make_requests(
    session: "Session", prompts: list[Prompt], max_input_length: int | None, max_output_len: int, output: Output
) -> list["Request"]:
    from commands.text import encode

    requests, num_truncated = [], 0
    for i, prompt in enumerate(prompts):
        tokens, truncated = encode(prompt, session.tokenizer, max_input_length)
        requests.append(session.request(i, tokens, max_output_len))
        num_truncated += truncated
    if num_truncated:
        output.warning(f"prompts cut to their last {max_input_length} tokens: {num_truncated}")
    return requests
