"""`specdec summarize`: ROUGE, acceptance and speed on a dataset, beside Hugging Face's `generate`.

The engine answers every batch twice, with the drafter and without, one after the other and each with an empty K/V
cache: `speedup` compares those two.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.inputs.dataset import DEMO, EvalTask, Sample, load_samples, summarization_prompt
from commands.inputs.prompts import Prompt
from commands.options.drafting import DrafterFlags, DrafterSettings, NgramOptions, parse_drafter
from commands.options.shared import (
    INPUT,
    OUTPUT,
    RUNTIME,
    SAMPLING,
    BadWords,
    BlockReuse,
    CheckLossless,
    CustomDrafter,
    DraftEngineDir,
    Drafters,
    DraftLenModeOption,
    DraftTargetModelConfig,
    EndId,
    EngineDir,
    FreeGpuMemoryFraction,
    FrequencyPenalty,
    Json,
    MaxTokensInCache,
    MinMatchingNgramSize,
    MinP,
    NgramConfig,
    NgramCorpus,
    NgramPoolOption,
    NgramRankingOption,
    NoBlockReuse,
    NoRepeatNgramSize,
    NumBeams,
    OutputTraces,
    PresencePenalty,
    ProfileOption,
    Quiet,
    RepetitionPenalty,
    Report,
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
from commands.output import Output, check_new_directory, check_output_files
from runtime.errors import SpecDecError, UsageError

OUTPUT_DIR_FILES = ("engine.out", "hf.out", "summary.json")

if TYPE_CHECKING:
    from runtime.evaluation.systems import SystemRun
    from runtime.session import Session


def summarize(
    engine_dir: EngineDir = Path("engine_outputs"),
    hf_model_dir: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face model to compare with: directory, hub id or shipped name.", rich_help_panel=INPUT
        ),
    ] = None,
    tokenizer_dir: TokenizerDir = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="`demo`, a hub id such as ccdv/cnn_dailymail, or a .jsonl, .csv or .parquet file.",
            rich_help_panel=INPUT,
        ),
    ] = DEMO,
    dataset_dir: Annotated[
        Path | None,
        typer.Option(help="Local directory that holds the dataset.", rich_help_panel=INPUT, show_default=False),
    ] = None,
    eval_task: Annotated[
        EvalTask,
        typer.Option(
            help="What the dataset asks for.", rich_help_panel=INPUT, metavar="[summarize|code_completion|question]"
        ),
    ] = "summarize",
    max_input_length: Annotated[
        int, typer.Option(min=1, help="Keep this many last tokens of a prompt.", rich_help_panel=INPUT)
    ] = 923,
    test_engine: Annotated[
        bool, typer.Option("--test-engine", help="Run the engine.", rich_help_panel=RUNTIME)
    ] = False,
    test_hf: Annotated[bool, typer.Option("--test-hf", help="Run Hugging Face.", rich_help_panel=RUNTIME)] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples answered together.", rich_help_panel=RUNTIME)] = 1,
    max_ite: Annotated[int, typer.Option(min=1, help="Batches to run.", rich_help_panel=RUNTIME)] = 20,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate.", rich_help_panel=RUNTIME)] = 100,
    random_seed: Annotated[
        int, typer.Option(help="Order of the dataset, and seed of sampling.", rich_help_panel=SAMPLING)
    ] = 0,
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
    kv_cache_enable_block_reuse: BlockReuse = False,
    no_kv_cache_enable_block_reuse: NoBlockReuse = False,
    kv_cache_free_gpu_memory_fraction: FreeGpuMemoryFraction = 0.9,
    max_tokens_in_paged_kv_cache: MaxTokensInCache = None,
    check_accuracy: Annotated[
        bool,
        typer.Option(
            "--check-accuracy", help="Exit 1 if the engine's ROUGE-1 is below the threshold.", rich_help_panel=OUTPUT
        ),
    ] = False,
    rouge1_threshold: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="ROUGE-1 x 100 to reach.", rich_help_panel=OUTPUT)
    ] = 15.0,
    check_lossless: CheckLossless = False,
    stats: Stats = "summary",
    report: Report = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Write outputs (engine.out, hf.out) and summary.json here.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = None,
    output_traces: OutputTraces = None,
    num_beams: NumBeams = 1,
    use_py_session: UsePySession = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure quality and speed on a dataset: ROUGE, acceptance, latency and throughput, by category.

    The first sample is a warm-up and is run once more. Greedy unless sampling is asked for.
    """
    flags = DrafterFlags(
        ngram_config,
        suffix_config,
        draft_target_model_config,
        draft_engine_dir,
        drafter,
        drafters,
        NgramOptions(ngram_ranking, min_matching_ngram_size, ngram_pool, ngram_corpus),
    )
    check_profile_flags(profile, None, {**flags.given(), "--draft-len-mode": draft_len_mode})
    drafter_settings: DrafterSettings | None = parse_drafter(flags)
    check_orchestrator_flags(
        block_reuse=not no_kv_cache_enable_block_reuse, num_beams=num_beams, py_session=use_py_session
    )
    if not (test_engine or test_hf):
        raise UsageError("nothing to test", hint="`--test-engine`, `--test-hf` or both")
    if test_hf and hf_model_dir is None:
        raise UsageError(
            "`--test-hf` needs `--hf-model-dir`", hint="`--hf-model-dir` names the model the engine was made from"
        )
    if check_accuracy and not test_engine:
        raise UsageError("`--check-accuracy` checks the engine", hint="`--test-engine`")
    if check_lossless and not test_engine:
        raise UsageError("`--check-lossless` checks the engine", hint="`--test-engine`")
    if profile is not None:
        from runtime.tuning.profile import profile_for

        tuned = profile_for(profile, engine_dir)
        drafter_settings, draft_len_mode = tuned.drafter, tuned.draft_len_mode
    check_drafter_flags(
        check_lossless=check_lossless, draft_len_mode=draft_len_mode, has_drafter=drafter_settings is not None
    )
    if output_traces is not None and not test_engine:
        raise UsageError("`--output-traces` writes the engine's outputs", hint="`--test-engine`")
    inputs = (engine_dir, draft_engine_dir, tokenizer_dir, dataset_dir, Path(dataset), ngram_corpus, profile)
    _check_output_files([output_traces, report], output_dir, [path for path in inputs if path is not None])
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
    samples = load_samples(
        dataset, eval_task=eval_task, dataset_dir=dataset_dir, max_samples=max_ite * batch_size, seed=random_seed
    )
    if check_accuracy and all(sample.reference is None for sample in samples):
        raise SpecDecError(
            f"`--check-accuracy` compares outputs with references, and there are none: {dataset}",
            hint="leave the flag out, or add a column `reference`",
        )
    if output_dir is not None:
        check_new_directory(output_dir)

    from commands.html.report import write_report
    from commands.inputs.traces import write_traces
    from commands.tables.summarize import accuracy_check, show_summary, summary_document, write_outputs
    from runtime.engine import KVCacheConfig
    from runtime.evaluation.lossless import NUM_PREFIXES, check_outputs, fail_unless_lossless
    from runtime.evaluation.steps import session_pieces
    from runtime.evaluation.systems import HuggingFace, evaluate_engine, evaluate_hf
    from runtime.models import resolve_model
    from runtime.session import SessionSettings, open_session

    output = Output(json, quiet)
    hf_dir = resolve_model(hf_model_dir) if hf_model_dir is not None and test_hf else None
    session_settings = SessionSettings(
        engine_dir,
        tokenizer_dir,
        drafter_settings,
        sampling,
        KVCacheConfig(True, max_tokens_in_paged_kv_cache, kv_cache_free_gpu_memory_fraction),
        end_id,
        stop_words or [],
        bad_words or [],
        draft_len_mode=draft_len_mode or "fixed",
        profile=profile,
    )
    with open_session(session_settings) as session:
        if batch_size > session.engine.max_batch_size:
            raise SpecDecError(
                f"`--batch-size` exceeds the engine's max_batch_size {session.engine.max_batch_size}: {batch_size}",
                hint="lower it, or build with a larger `--max-batch-size`",
            )
        if batch_size > 1:
            samples = _by_category(samples)
        prompts = _encode(session, samples, eval_task, max_input_length, output)
        batches = _batches(samples, prompts, batch_size)
        runs: list[SystemRun] = []
        if test_engine:
            with output.progress("engine", len(batches)) as advance:
                runs += evaluate_engine(session, batches, output_len, advance)
        if hf_dir is not None:
            hugging_face = HuggingFace.load(hf_dir, session)
            with output.progress("Hugging Face", len(batches)) as advance:
                runs.append(evaluate_hf(hugging_face, batches, output_len, advance))
        settings = {
            **session.settings_record(),
            "dataset": dataset,
            "eval_task": eval_task,
            "batch_size": batch_size,
            "output_len": output_len,
            "max_input_length": max_input_length,
            "num_samples": len(samples),
            "random_seed": random_seed,
            "hf_model_dir": hf_model_dir,
        }
        document = summary_document(session, samples, prompts, runs, settings, per_step=stats == "detailed")
        if check_accuracy:
            document["checks"]["accuracy"] = accuracy_check(document, rouge1_threshold)
        if check_lossless:
            with output.progress("lossless check", NUM_PREFIXES) as advance:
                document["checks"]["lossless"] = check_outputs(session, runs[0].sequences, runs[1].sequences, advance)
        if output_dir is not None:
            write_outputs(output_dir, session, runs, document)
        if output_traces is not None:
            write_traces(output_traces, zip(runs[0].sequences, [s.category for s in samples], strict=True))
        show_summary(document, samples, runs, stats, output)
        output.document(document)
        if report is not None:
            write_report(report, document, session_pieces(session, runs[0].sequences) or [None] * len(samples))
            output.result(f"report written: {report}")
    fail_unless_lossless(document["checks"])
    accuracy = document["checks"].get("accuracy")
    if accuracy is not None and not accuracy["passed"]:
        raise SpecDecError(
            f"ROUGE-1 is below the threshold {rouge1_threshold:g}: {accuracy['rouge1']:.2f}",
            hint="look at the outputs, or set `--rouge1-threshold`",
        )


def _check_output_files(outputs: list[Path | None], output_dir: Path | None, inputs: list[Path]) -> None:
    """SpecDecError unless each can be written; `--output-dir` has files of its own, and may be going to be made."""
    given = [path for path in outputs if path is not None]
    for path in given:
        if output_dir is not None and path.resolve() in [(output_dir / name).resolve() for name in OUTPUT_DIR_FILES]:
            raise UsageError(f"two outputs have the same file: {path}", hint="give each a name of its own")
    check_output_files(given, inputs, new_dir=None if output_dir is None or output_dir.exists() else output_dir)


def _by_category(samples: list[Sample]) -> list[Sample]:
    """The samples of the category that comes first, then those of the next; otherwise in order."""
    order = {category: i for i, category in enumerate(dict.fromkeys(sample.category for sample in samples))}
    return sorted(samples, key=lambda sample: order[sample.category])


def _batches(samples: list[Sample], prompts: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Prompts answered together; all of one category, because a batch's time cannot be divided between two."""
    batches: list[list[list[int]]] = []
    previous = None
    for sample, prompt in zip(samples, prompts, strict=True):
        if not batches or len(batches[-1]) == batch_size or sample.category != previous:
            batches.append([])
        batches[-1].append(prompt)
        previous = sample.category
    return batches


def _encode(
    session: "Session", samples: list[Sample], eval_task: EvalTask, max_input_length: int, output: Output
) -> list[list[int]]:
    """Token ids of each sample's prompt; those cut to their last tokens are counted."""
    from runtime.text import encode

    prompts, num_truncated = [], 0
    for sample in samples:
        text = summarization_prompt(sample.text) if eval_task == "summarize" else sample.text
        tokens, truncated = encode(Prompt(text, None), session.tokenizer, max_input_length)
        prompts.append(tokens)
        num_truncated += truncated
    if num_truncated:
        output.warning(f"prompts cut to their last {max_input_length} tokens: {num_truncated} of {len(prompts)}")
    return prompts
