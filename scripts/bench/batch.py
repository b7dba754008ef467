"""Cost of Ray for `batch`, and gain by more workers. Needs Ray (the extra `ray`).

python -m scripts.bench.batch overhead               time per request of workers that answer nothing: of 2, and of 1,000
python -m scripts.bench.batch files --num 100000     time and memory per request of the files of requests and results
python -m scripts.bench.batch workers --num 200      2 workers of one core each against one process of two, on the demo
python -m scripts.bench.batch nodes --num 400 --engine-dir ENGINE    8 nodes, as Ray sees them, of which 2 are lost
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
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
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, *map(str, flags)], cwd=directory, env=environment, stdout=subprocess.PIPE, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure_overhead(num: int) -> None:
    from commands.batch import ray_workers
    from commands.batch.answering import Outcome, failed_outcome
    from commands.batch.dispatch import answer_all
    from commands.batch.lines import BatchRequest

    class Idle:
        """Opens nothing, and answers at once with a line of the usual length."""

        def open(self, *given: Any) -> ray_workers.Opened:
            return ray_workers.Opened("idle", 8)

        async def answer(self, request: BatchRequest) -> Outcome:
            return Outcome(request.id, b"x" * 600)

    ray_workers.Worker = Idle  # type: ignore[misc, assignment]

    class Crew(ray_workers.RayCrew):
        """Two processes; of more workers each has several windows, so that the command does what it does for many."""

        def __init__(self, num_workers: int) -> None:
            self._num_workers, self._num_cpus, self._on_gpu, self._num_deaths = num_workers, 1, False, 0
            self._given = (None,) * 5  # type: ignore[assignment]
            self._arrived = SimpleQueue()
            self._members = [self._begin() for _ in range(2)]
            while not all(member.window for member in self._members):
                self.receive()
            self._members = [replace(self._members[i % 2], sent=set()) for i in range(num_workers)]

    requests = [BatchRequest(str(i), str(i), "POST", "/v1/completions", {"prompt": "x" * 400}) for i in range(num)]
    for num_workers in (2, 1000):
        times, own_times = [], []
        with ray_workers.connected("local"):
            crew = Crew(num_workers)
            for _ in range(5):
                start, own_start = time.perf_counter(), time.process_time()
                assert sum(1 for _ in answer_all(crew, iter(requests), failed_outcome)) == num
                times.append((time.perf_counter() - start) / num * 1e3)
                own_times.append((time.process_time() - own_start) / num * 1e3)
        print(f"{num_workers} workers: {statistics.median(times):.2f} ms per request ({min(times):.2f} to", end=" ")
        print(f"{max(times):.2f}), of the command's own {statistics.median(own_times):.2f}", flush=True)


def measure_files(num: int) -> None:
    """Time the command's own work per request without Ray: in memory, and with results of 600 bytes on this disk."""
    from commands.batch.lines import look_through, open_results

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_requests(directory / "requests.jsonl", num, DIGEST)
        before, start = _resident_bytes(), time.perf_counter()
        places = look_through(directory / "requests.jsonl", "job").places
        looked = time.perf_counter()
        with open_results(directory / "results.jsonl", places) as results:
            for place in places:
                results.append(place.id, b"x" * 600)
            appended, num_bytes = time.perf_counter(), _resident_bytes() - before
            results.finish()
            finished = time.perf_counter()
    for what, seconds in (("look", looked - start), ("append", appended - looked), ("order", finished - appended)):
        print(f"{what}: {seconds / num * 1e6:.1f} µs per request")
    print(f"memory: {num_bytes / num:.0f} bytes per request")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
            # From the first request on: what opening took stands apart.
            for document, rates in zip((one, two), found.values(), strict=True):
                rates.append(document["output_tokens_per_second"])
                keys = ("opening_s", "wall_s", "output_tokens_per_second", "workers")
                print({key: document[key] for key in keys}, flush=True)
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
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
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
    parser.add_argument("what", choices=["overhead", "files", "workers", "nodes"])
    parser.add_argument("--num", type=int, default=400, help="requests")
    parser.add_argument("--engine-dir", type=Path, help="for nodes: an engine, such as one without a compiler")
    arguments = parser.parse_args()
    match arguments.what:
        case "overhead":
            measure_overhead(arguments.num)
        case "files":
            measure_files(arguments.num)
        case "workers":
            measure_workers(arguments.num)
        case "nodes":
            measure_nodes(arguments.num, arguments.engine_dir)


if __name__ == "__main__":
    main()
