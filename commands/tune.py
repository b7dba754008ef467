"""`specdec tune`: find the drafter and the draft length for an engine and its requests, or say that none pays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from commands.inputs.prompts import read_prompts
from commands.options.drafting import NgramOptions
from commands.options.shared import (
    INPUT,
    OUTPUT,
    RUNTIME,
    SPECULATION,
    EndId,
    Json,
    MinMatchingNgramSize,
    NgramConfig,
    NgramCorpus,
    NgramPoolOption,
    NgramRankingOption,
    Quiet,
    SuffixConfig,
    TokenizerDir,
)
from commands.output import Output, check_output_files
from runtime.errors import UsageError
from runtime.tuning.candidates import named_drafter

_DEFAULT_OUTPUT_LEN, _DEFAULT_LIVE_PROMPTS = 128, 8


def tune(
    engine_dir: Annotated[
        Path | None,
        typer.Option(
            help="Engine to tune for; without one traces are replayed, and nothing is timed.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Prompts with outputs, as `--output-traces` writes them.", rich_help_panel=INPUT, show_default=False
        ),
    ] = None,
    input_text: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt, which the engine answers without a drafter first; repeatable.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(help="Prompts in a file, as `run` takes it.", rich_help_panel=INPUT, show_default=False),
    ] = None,
    tokenizer_dir: TokenizerDir = None,
    max_output_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to generate from a prompt.",
            rich_help_panel=RUNTIME,
            show_default=str(_DEFAULT_OUTPUT_LEN),
        ),
    ] = None,
    end_id: EndId = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Requests answered together.", rich_help_panel=RUNTIME, show_default="1"),
    ] = None,
    num_live_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that the best candidates are timed on.",
            rich_help_panel=RUNTIME,
            show_default=str(_DEFAULT_LIVE_PROMPTS),
        ),
    ] = None,
    max_draft_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest draft to try.",
            rich_help_panel=SPECULATION,
            show_default="10, or the engine's or the drafter's if shorter",
        ),
    ] = None,
    ngram_config: NgramConfig = None,
    ngram_ranking: NgramRankingOption = None,
    min_matching_ngram_size: MinMatchingNgramSize = None,
    ngram_pool: NgramPoolOption = None,
    ngram_corpus: NgramCorpus = None,
    suffix_config: SuffixConfig = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE.json",
            help="Write what is recommended, for `run --profile` and `summarize --profile`.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the drafter and the draft length that pay.

    Replays what was generated through many drafters, which needs no model. With an engine it predicts from what its
    steps cost how long each would take, times the best three and no drafter, and recommends the fastest. Greedy.
    Flags that name a drafter tune that one only.
    """
    named = named_drafter(
        ngram_config, suffix_config, NgramOptions(ngram_ranking, min_matching_ngram_size, ngram_pool, ngram_corpus)
    )
    if engine_dir is None:
        _refuse(
            "needs `--engine-dir`",
            {
                "--output": output,
                "--batch-size": batch_size,
                "--num-live-prompts": num_live_prompts,
                "--end-id": end_id,
            },
            "name the engine, or leave the flag out: recorded outputs alone are counted, not timed",
        )
        if traces is None:
            raise UsageError(
                "nothing to tune for", hint="`--engine-dir` names an engine, `--traces` what one has generated"
            )
    if traces is not None:
        given = {"--input-text": input_text, "--input-file": input_file, "--max-output-len": max_output_len}
        _refuse("cannot be given with `--traces`, which has prompts and outputs", given, "leave one of the two out")
    if named is not None and max_draft_len is not None and max_draft_len > named.max_draft_len:
        raise UsageError(
            f"`--max-draft-len` exceeds the drafter's own, {named.max_draft_len}: {max_draft_len}",
            hint="lower it, or raise the drafter's",
        )
    if traces is None and not input_text and input_file is None:
        raise UsageError(
            "nothing to tune on", hint="`--traces` has recorded outputs, `--input-file` and `--input-text` have prompts"
        )
    prompts = read_prompts(input_text or [], input_file) if traces is None else []
    if output is not None:
        inputs = (engine_dir, traces, input_file, ngram_corpus, tokenizer_dir)
        check_output_files([output], [path for path in inputs if path is not None])

    from commands.tuning_job import Job, tune_engine, tune_traces

    job = Job(
        traces=traces,
        prompts=prompts,
        input_file=input_file,
        tokenizer_dir=tokenizer_dir,
        max_output_len=max_output_len or _DEFAULT_OUTPUT_LEN,
        end_id=end_id,
        batch_size=batch_size or 1,
        num_live_prompts=num_live_prompts or _DEFAULT_LIVE_PROMPTS,
        max_draft_len=max_draft_len,
        named=named,
        tries_public=ngram_pool == "public",
        profile=output,
    )
    if engine_dir is None:
        tune_traces(job, Output(json, quiet))
    else:
        tune_engine(engine_dir, job, Output(json, quiet))


def _refuse(reason: str, given: Mapping[str, object], hint: str) -> None:
    """UsageError for the first of these flags that was given."""
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"`{flag}` {reason}: {value}", hint=hint)
