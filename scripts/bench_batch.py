"""What Ray costs `batch`, and what more workers bring. Needs Ray (the extra `ray`).

python scripts/bench_batch.py overhead               time per request of workers that answer nothing
python scripts/bench_batch.py workers --num 200      2 workers of one core each against one process of two, on the demo
python scripts/bench_batch.py nodes --num 400 --engine-dir ENGINE    8 nodes, as Ray sees them, of which 2 are lost
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_NODES, NUM_LOST = 8, 2
DIGEST = 'class Counter{}:\n    """Counts how often each word occurs."""\n\n    def add(self, word): ...\n TL;DR:'


def write_requests(path: Path, num: int, prompt: str) -> None:
    """Greedy ones, each a little different."""
    rows = [
        {"custom_id": str(i), "prompt": prompt.format(i), "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def batch(directory: Path, threads: int, *flags: object) -> dict[str, Any]:
    """The document of one call, whose results are `directory`'s."""
    (directory / "results.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "specdec_cli", "batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [*command, *map(str, flags)], cwd=directory, env=environment, stdout=subprocess.PIPE, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure_overhead(num: int) -> None:
    from commands.batching import cluster
    from commands.batching.answering import Outcome
    from commands.batching.dispatch import answer_all
    from commands.batching.lines import BatchRequest

    class Idle:
        """Opens nothing, and answers at once with a line of the usual length."""

        def open(self, *given: Any) -> cluster.Opened:
            return cluster.Opened(8)

        async def answer(self, request: BatchRequest) -> Outcome:
            return Outcome(request.id, b"x" * 600)

    cluster.Worker = Idle  # type: ignore[misc, assignment]

    class Crew(cluster.RayCrew):
        def __init__(self) -> None:
            self._num_workers, self._num_cpus, self._on_gpu, self._num_deaths = 2, 1, False, 0
            self._given = (None,) * 5  # type: ignore[assignment]
            self._members = [self._begin() for _ in range(2)]

    requests = [BatchRequest(str(i), str(i), "POST", "/v1/completions", {"prompt": "x" * 400}) for i in range(num)]
    with cluster.connected("local"):
        crew = Crew()
        while crew.num_free < 16:
            crew.receive()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            assert sum(1 for _ in answer_all(crew, iter(requests))) == num
            times.append((time.perf_counter() - start) / num)
    print(f"{statistics.median(times) * 1e3:.2f} ms per request ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})")


def measure_workers(num: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_requests(directory / "requests.jsonl", num, DIGEST)
        model = ("--model-dir", "demo", "--ngram-config", "10,2")
        found: dict[str, list[float]] = {"one process of two cores": [], "two workers of one core": []}
        for _ in range(2):
            one = batch(directory, 2, *model)
            bytes_of_one = (directory / "results.jsonl").read_bytes()
            two = batch(directory, 1, *model, "--ray", "local", "--num-workers", 2, "--cpus-per-worker", 1)
            assert (directory / "results.jsonl").read_bytes() == bytes_of_one
            # Workers open one after the other on a busy machine: the clock runs from the first request on.
            for document, rates in zip((one, two), found.values(), strict=True):
                rates.append(document["num_generated_tokens"] / document["wall_s"])
                print({key: document[key] for key in ("wall_s", "output_tokens_per_second", "workers")}, flush=True)
        one_rate, two_rate = map(max, found.values())
        print(f"{num} requests: {one_rate:.0f} and {two_rate:.0f} tokens/s, {two_rate / one_rate:.2f}; same bytes")


def measure_nodes(num: int, engine_dir: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(NUM_NODES)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_requests(directory / "requests.jsonl", num, "def f{}(")
        batch(directory, 1, "--engine-dir", engine_dir)
        expected = (directory / "results.jsonl").read_bytes()
        (directory / "results.jsonl").unlink()
        command = [sys.executable, "-m", "specdec_cli", "batch", "-i", "requests.jsonl", "-o", "results.jsonl"]
        flags = ["--engine-dir", str(engine_dir), "--ray", cluster.address, "--num-workers", str(NUM_NODES), "--json"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen([*command, *flags], cwd=directory, env=environment, stdout=subprocess.PIPE)
        partial = directory / "results.jsonl.partial"
        for i in range(NUM_LOST):
            while not (partial.exists() and partial.read_bytes().count(b"\n") > (i + 1) * num // 4):
                assert process.poll() is None
                time.sleep(0.01)
            cluster.remove_node(nodes[i])
        out, _ = process.communicate()
        document = json.loads(out)
        assert (directory / "results.jsonl").read_bytes() == expected
        print(f"{num} requests, {NUM_LOST} of {NUM_NODES} nodes lost, {document['wall_s']:.1f} s; same bytes")
        print(document["workers"])
    cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "workers", "nodes"])
    parser.add_argument("--num", type=int, default=400, help="requests")
    parser.add_argument("--engine-dir", type=Path, help="for nodes: an engine, such as one without a compiler")
    arguments = parser.parse_args()
    match arguments.what:
        case "overhead":
            measure_overhead(arguments.num)
        case "workers":
            measure_workers(arguments.num)
        case "nodes":
            measure_nodes(arguments.num, arguments.engine_dir)


if __name__ == "__main__":
    main()
