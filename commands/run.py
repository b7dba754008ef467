"""`specdec run`: generate, with or without speculation, and say how it went."""

import io
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from commands.options import (
    INPUT,
    OUTPUT,
    RUNTIME,
    BlockReuse,
    DraftEngineDir,
    DraftTargetModelConfig,
    EndId,
    EngineDir,
    FreeGpuMemoryFraction,
    Json,
    MaxTokensInCache,
    NgramConfig,
    NumBeams,
    Quiet,
    StopWords,
    TokenizerDir,
    UsePySession,
    check_orchestrator_flags,
    parse_drafter,
)
from commands.output import Output, check_output_file, milliseconds, number, percent
from commands.prompts import Prompt, read_prompts
from runtime.errors import SpecDecError, UsageError

if TYPE_CHECKING:
    from commands.session import Generation, Session
    from runtime.request import Sequence


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
    num_beams: NumBeams = 1,
    use_py_session: UsePySession = False,
    model_dir: Annotated[str | None, typer.Option(hidden=True)] = None,
    spec_decode_algo: Annotated[str | None, typer.Option(hidden=True)] = None,
    spec_decode_max_draft_len: Annotated[int | None, typer.Option(hidden=True)] = None,
    max_matching_ngram_size: Annotated[int | None, typer.Option(hidden=True)] = None,
    disable_kv_cache_reuse: Annotated[bool, typer.Option("--disable-kv-cache-reuse", hidden=True)] = False,
    disable_overlap_scheduler: Annotated[bool, typer.Option("--disable-overlap-scheduler", hidden=True)] = False,
    output_generation_logits: Annotated[bool, typer.Option("--output-generation-logits", hidden=True)] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate from prompts in orchestrator mode (V1), speculating with `--ngram-config`.

    Output is greedy: exactly the tokens the model generates without speculation.
    """
    leader_flags = (model_dir, spec_decode_algo, spec_decode_max_draft_len, max_matching_ngram_size)
    if any(flag is not None for flag in leader_flags) or disable_kv_cache_reuse or disable_overlap_scheduler:
        raise UsageError(
            "leader mode (V2: --model-dir, --spec-decode-algo, --spec-decode-max-draft-len …) is not in this version",
            hint="build an engine and give `--engine-dir` and `--ngram-config [4,2,[0]]`",
        )
    ngram = parse_drafter(ngram_config, draft_target_model_config, draft_engine_dir)
    check_orchestrator_flags(block_reuse=kv_cache_enable_block_reuse, num_beams=num_beams, py_session=use_py_session)
    if output_generation_logits:
        raise UsageError(
            "generation logits are not in this version: --output-generation-logits", hint="leave the flag out"
        )
    if streaming and json:
        raise UsageError("`--streaming` and `--json` both want stdout", hint="choose one")
    for path in (output_csv, output_npy):
        if path is not None:
            check_output_file(path)

    from commands.session import open_session
    from runtime.engine import KVCacheConfig

    output = Output(json, quiet)
    prompts = read_prompts(input_text or [], input_file)
    kv_cache = KVCacheConfig(
        kv_cache_enable_block_reuse, max_tokens_in_paged_kv_cache, kv_cache_free_gpu_memory_fraction
    )
    with open_session(engine_dir, tokenizer_dir, ngram, kv_cache, end_id, stop_words or []) as session:
        if input_file is not None and input_file.suffix.lower() == ".npy" and session.end_ids:
            # Again, now that it is known what the rows of an array are padded with.
            prompts = read_prompts([], input_file, pad_id=min(session.end_ids))
        requests = _make_requests(session, prompts, max_input_length, max_output_len, output)
        printer = _StreamPrinter(session, output, streaming_interval, len(requests)) if streaming else None
        generation = session.run(requests, speculate=True, on_tokens=printer)
        _show(session, prompts, generation, output, streamed=streaming)
        _write_ids(session, generation.sequences, output_csv, output_npy)
        output.document(_document(session, prompts, generation, max_input_length, max_output_len))


def _make_requests(
    session: "Session", prompts: list[Prompt], max_input_length: int | None, max_output_len: int, output: Output
) -> list[Any]:
    from commands.text import encode

    requests, num_truncated = [], 0
    for i, prompt in enumerate(prompts):
        tokens, truncated = encode(prompt, session.tokenizer, max_input_length)
        requests.append(session.request(i, tokens, max_output_len))
        num_truncated += truncated
    if num_truncated:
        output.warning(f"prompts cut to their last {max_input_length} tokens: {num_truncated}")
    return requests


class _StreamPrinter:
    """Prints new text every `interval` steps of a request; several requests each with their number in front."""

    def __init__(self, session: "Session", output: Output, interval: int, num_requests: int) -> None:
        from commands.text import TextStream

        if session.tokenizer is None:
            raise SpecDecError(
                "streaming needs a tokenizer, and the engine has none", hint="`--tokenizer-dir` names one"
            )
        tokenizer = session.tokenizer
        self._streams = [TextStream(tokenizer, session.stop_words) for _ in range(num_requests)]
        self._output, self._interval = output, interval

    def __call__(self, sequence: "Sequence", new_tokens: list[int]) -> None:
        finished = sequence.finish_reason is not None
        if not finished and sequence.stats.num_steps % self._interval:
            return
        piece = self._streams[sequence.request.id].next_piece(sequence.output_tokens, finished=finished)
        if len(self._streams) == 1:
            self._output.text(piece, end="\n" if finished else "")
        elif piece:
            self._output.text(f"[Text {sequence.request.id}] {piece}")


def _show(
    session: "Session", prompts: list[Prompt], generation: "Generation", output: Output, *, streamed: bool
) -> None:
    from commands.text import output_text

    for prompt, sequence in zip(prompts, generation.sequences, strict=True):
        text = output_text(session.tokenizer, sequence.output_tokens, session.stop_words)
        if text is None:
            text = " ".join(map(str, sequence.output_tokens))
        if streamed:
            continue
        if output.quiet:
            output.text(text)
        elif output.human:
            shown = prompt.text if prompt.text is not None else f"{len(prompt.ids or ())} token ids"
            output.text(f'Input [Text {sequence.request.id}]: "{shown}"')
            output.text(f'Output [Text {sequence.request.id}]: "{text}"')
    output.result(_table(generation))
    output.result(_time_line(generation.total(session.max_draft_len)))


def _table(generation: "Generation") -> Table:
    table = Table()
    for column in ("Request", "Tokens", "Steps", "Tokens/step", "Accepted", "Rate", "TTFT", "TPOT", "End"):
        table.add_column(column, justify="left" if column in ("Request", "End") else "right", no_wrap=True)
    for sequence in generation.sequences:
        stats, record = sequence.stats, sequence.stats.as_dict(0)
        table.add_row(
            f"Text {sequence.request.id}",
            str(stats.num_generated_tokens),
            str(stats.num_steps),
            number(record["tokens_per_step"]),
            f"{stats.num_accepted_draft_tokens}/{stats.num_draft_tokens}",
            percent(record["draft_acceptance_rate"]),
            milliseconds(stats.ttft_s),
            milliseconds(stats.tpot_s),
            str(sequence.finish_reason),
        )
    return table


def _time_line(total: dict[str, Any]) -> str:
    target, drafting, host = (
        percent(total[f"{part}_time_s"] / total["wall_s"]) for part in ("target", "draft", "host")
    )
    return (
        f"{total['num_generated_tokens']} tokens in {total['wall_s']:.2f} s: "
        f"{number(total['output_tokens_per_second'], 1)} tokens/s (target {target}, drafting {drafting}, host {host})"
    )


def _write_ids(session: "Session", sequences: list["Sequence"], csv: Path | None, npy: Path | None) -> None:
    """Rows of prompt and output ids, padded with the end id to the longest, as TensorRT-LLM's run.py writes them."""
    if csv is None and npy is None:
        return
    import numpy as np

    from runtime.files import write_file

    pad = min(session.end_ids, default=0)
    longest = max(len(sequence.tokens) for sequence in sequences)
    rows = np.array([s.tokens + [pad] * (longest - len(s.tokens)) for s in sequences], dtype=np.int32)
    for path, save in ((csv, partial(np.savetxt, fmt="%d", delimiter=",")), (npy, np.save)):
        if path is not None:
            file = io.BytesIO()  # numpy does not notice that a disk is full
            save(file, rows)
            write_file(path, file.getvalue())


def _document(
    session: "Session",
    prompts: list[Prompt],
    generation: "Generation",
    max_input_length: int | None,
    max_output_len: int,
) -> dict[str, Any]:
    from commands.text import output_text

    return {
        "requests": [
            {
                "prompt": prompt.text,
                "prompt_ids": list(sequence.request.prompt_tokens),
                "output_ids": sequence.output_tokens,
                "output_text": output_text(session.tokenizer, sequence.output_tokens, session.stop_words),
                "finish_reason": sequence.finish_reason,
                "stats": sequence.stats.as_dict(session.max_draft_len),
            }
            for prompt, sequence in zip(prompts, generation.sequences, strict=True)
        ],
        "total": generation.total(session.max_draft_len),
        "settings": {
            **session.settings_record(),
            "max_input_length": max_input_length,
            "max_output_len": max_output_len,
        },
        "engine": session.engine_record(),
    }
