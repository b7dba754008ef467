"""`specdec bench`, its flags: load on an OpenAI-compatible server, ours or another's, and what it made of it."""

from commands.bench.flags import BenchPrompts, BenchResults, BenchServer, BenchTraffic
from commands.options.expand import expand_groups
from commands.output.output import Output, check_output_files


@expand_groups
def bench(
    server: BenchServer, prompts: BenchPrompts, traffic: BenchTraffic, results: BenchResults, output: Output
) -> None:
    """Measure a running server: time to the first token, time per token, throughput, and tokens per step.

    Any server with OpenAI's HTTP interface. The JSON has the keys of `vllm bench serve`.
    """
    server.check()
    traffic.check()
    results.check()
    prompts.check()
    check_output_files([results.report] if results.report else [], prompts.paths)
    contents = prompts.contents(server.endpoint, traffic.seed)

    from commands.bench.work import benchmark

    benchmark(server, prompts, contents, traffic, results, output)
