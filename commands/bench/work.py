"""Work of `bench` once its prompts are read: sends them, and shows what came."""

from functools import partial

import typer

from commands.bench.command import BenchPrompts, BenchResults, BenchServer, BenchTraffic
from commands.bench.contents import Content
from commands.bench.report import bench_document, show, write_bench_report
from commands.output import Output
from runtime.benchmark.client import Client
from runtime.benchmark.load_generator import Load, LoadResult, arrival_times, run_load
from runtime.errors import SpecDecError


def benchmark(
    server: BenchServer,
    prompts: BenchPrompts,
    contents: list[Content],
    traffic: BenchTraffic,
    results: BenchResults,
    output: Output,
) -> None:
    """SpecDecError if the server answers nothing at all; requests that fail among others are counted and named.

    After Ctrl-C exit 130, with what had been answered.
    """
    load = Load(
        server.endpoint,
        server.model,
        contents,
        traffic.output_len,
        arrival_times(len(contents), traffic.request_rate, traffic.seed),
        traffic.concurrency,
        traffic.extra,
        traffic.num_warmups,
    )
    client = partial(Client, server.base_url, server.api_key, server.timeout)
    with output.progress("Requests", len(contents)) as advance:
        result = run_load(client, load, advance)
    is_interrupted = len(result.answers) < len(contents)
    if is_interrupted:
        output.warning(f"interrupted: {len(result.answers)} of {len(contents)} requests had been answered")
    _check(result, output)
    document = bench_document(result, server, prompts, traffic, results)
    show(document, output)
    if results.report is not None:
        write_bench_report(results.report, document)
    output.document(document.as_json())
    if is_interrupted:
        raise typer.Exit(130)


def _check(result: LoadResult, output: Output) -> None:
    """Warn of requests that failed, and of tokens not counted by the server."""
    errors = [answer.error for answer in result.answers if answer.error is not None]
    if len(errors) == len(result.answers):
        raise SpecDecError(f"every request failed, the first with: {errors[0]}", hint="see what the server prints")
    if errors:
        output.warning(f"{len(errors)} of {len(result.answers)} requests failed, the first with: {errors[0]}")
    good = [answer for answer in result.answers if answer.error is None]
    if any(answer.num_output_tokens is None for answer in good):
        output.warning("the server sends no usage: chunks are counted as tokens, and prompts as none")
    elif any(answer.num_prompt_tokens is None for answer in good):
        output.warning("the server does not count the tokens of prompts: they are counted as none")
