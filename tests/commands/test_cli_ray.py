"""`batch` and `summarize` with Ray: the same whoever works, and whoever dies. Skipped where Ray is absent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Result
from test_cli_batch import requests, write
from waiting import HANG_S

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from commands.batch.answering import Job, failed_outcome  # noqa: E402
from commands.batch.dispatch import answer_all  # noqa: E402
from commands.batch.flags import BatchDefaults  # noqa: E402
from commands.batch.lines import look_through  # noqa: E402
from commands.batch.ray_workers import RayCrew, WorkerJob, connected  # noqa: E402
from commands.options.engine_choice import EngineChoice  # noqa: E402
from runtime.drafters.speculation import NO_SPECULATION  # noqa: E402

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ROOT = Path(__file__).parents[2]
NUM_NODES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Machines of one core each, as Ray sees them; the first has none, and nobody works there."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(NUM_NODES):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def job_of(engine_dir: Path) -> Job:
    return Job(EngineChoice(engine_dir, speculation=NO_SPECULATION, mode="leader"), ("engine",), BatchDefaults())


def run(directory: Path, engine_dir: Path, environment: dict[str, str], *others: object) -> Result:
    """Run it in a process of its own: Ray has one driver in a process."""
    command = ["batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--engine-dir", engine_dir, *others]
    done = subprocess.run(
        [sys.executable, "-m", "specdec_cli", *map(str, command)],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_S,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, llama_engine_dir: Path, process_environment: Any) -> bytes:
    """The results of one process without Ray."""
    directory = tmp_path_factory.mktemp("alone")
    write(directory / "requests.jsonl", requests(40))
    result = run(directory, llama_engine_dir, process_environment)
    assert result.exit_code == 0, result.stderr
    return (directory / "results.jsonl").read_bytes()


def test_two_local_workers_write_the_same_bytes(
    alone: bytes, llama_engine_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "requests.jsonl", requests(40))
    flags = ["--ray", "local", "--num-workers", 2, "--ngram-config", "4,2", "--ngram-pool", "public", "--json"]
    flags += ["--draft-len-mode", "fixed"]  # automatic lengths follow from times
    document = run(tmp_path, llama_engine_dir, process_environment, *flags).document
    assert sum(document["workers"].values()) == 40 and document["num_draft_tokens"] > 0
    assert (tmp_path / "results.jsonl").read_bytes() == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "results.jsonl"]


def test_lost_machines_cost_nothing_but_time(
    cluster: Any, llama_engine_dir: Path, tmp_path: Path, alone: bytes
) -> None:
    """One worker is killed and one machine taken away while they work; each request is answered once."""
    job = job_of(llama_engine_dir)
    requests_file = look_through(write(tmp_path / "requests.jsonl", requests(40)), job.digest())
    lines, workers = [], set()
    with connected(cluster.address):
        crew = RayCrew(WorkerJob(job, None), NUM_NODES, 1)
        asked = requests_file.read(requests_file.places)
        for number, outcome in enumerate(answer_all(crew, asked, failed_outcome)):
            lines.append(outcome.line)
            workers.add(outcome.worker)
            if number == 3:
                os.kill(int(outcome.worker.rpartition(":")[2]), signal.SIGKILL)
            if number == 8:
                cluster.remove_node(cluster.list_all_nodes()[-1])
    cluster.add_node(num_cpus=1)
    assert sorted(lines) == sorted(alone.splitlines()) and len(workers) > 1
