"""`batch` and `summarize` with Ray: the same whoever works, and whoever dies. Skipped where Ray is absent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import Result, Specdec, assert_valid, draft_model
from gate import Gate
from shared import shared_engine
from test_cli_batch import openai, requests, results, texts, write
from waiting import HANG_S, wait_until

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from commands.batch.answering import Job, failed_outcome  # noqa: E402
from commands.batch.dispatch import answer_all  # noqa: E402
from commands.batch.flags import BatchDefaults  # noqa: E402
from commands.batch.lines import look_through  # noqa: E402
from commands.batch.ray_workers import Opened, RayCrew, Worker, WorkerJob, connected  # noqa: E402
from commands.options.engine_choice import EngineChoice  # noqa: E402
from runtime.drafters.speculation import NO_SPECULATION  # noqa: E402
from runtime.util.errors import SpecDecError  # noqa: E402

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
def alone(tmp_path_factory: pytest.TempPathFactory, llama_uncompiled_dir: Path, process_environment: Any) -> bytes:
    """The results of one process without Ray."""
    directory = tmp_path_factory.mktemp("alone")
    write(directory / "requests.jsonl", requests(40))
    result = run(directory, llama_uncompiled_dir, process_environment)
    assert result.exit_code == 0, result.stderr
    return (directory / "results.jsonl").read_bytes()


def test_two_local_workers_write_the_same_bytes(
    alone: bytes, llama_uncompiled_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "requests.jsonl", requests(40))
    flags = ["--ray", "local", "--num-workers", 2, "--ngram-config", "4,2", "--ngram-pool", "public", "--json"]
    document = run(tmp_path, llama_uncompiled_dir, process_environment, *flags).document
    assert sum(document["workers"].values()) == 40 and document["num_draft_tokens"] > 0
    assert (tmp_path / "results.jsonl").read_bytes() == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "results.jsonl"]


def test_lost_machines_cost_nothing_but_time(
    cluster: Any, llama_uncompiled_dir: Path, tmp_path: Path, alone: bytes
) -> None:
    """One worker is killed and one machine taken away while they work; each request is answered once."""
    job = job_of(llama_uncompiled_dir)
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


def test_workers_with_other_bits_share_no_batch(
    cluster: Any, llama_uncompiled_dir: Path, tmp_path: Path, alone: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker is a machine with bits of its own here: the second is refused, or works with a warning."""

    class OtherBits(Worker):
        def open(self, *given: Any) -> Opened:
            opened = Worker.open(self, *given)
            assert opened.fingerprint is not None
            return replace(opened, fingerprint=replace(opened.fingerprint, logits=opened.worker))

    monkeypatch.setattr("commands.batch.ray_workers.Worker", OtherBits)
    job = job_of(llama_uncompiled_dir)
    requests_file = look_through(write(tmp_path / "requests.jsonl", requests(40)), job.digest())
    with connected(cluster.address):
        crew = RayCrew(WorkerJob(job, None), 2, 1)
        opened = [crew._arrived.get(timeout=HANG_S) for _ in range(2)]
        assert crew._take(opened[0]) == []
        with pytest.raises(SpecDecError, match="workers give different bits"):
            crew._take(opened[1])
        del crew, opened
        mixed = RayCrew(WorkerJob(job, None), 2, 1, allow_mixed=True)
        answers = answer_all(mixed, requests_file.read(requests_file.places), failed_outcome)
        assert sorted(outcome.line for outcome in answers) == sorted(alone.splitlines())


@pytest.fixture(scope="module")
def split_engine_dir(llama_dir: Path, shared: Path, kernels: Path) -> Path:
    """Engine of two ranks."""
    return shared_engine(shared / "engines", llama_dir, tp_size=2)


def rank_of(worker: str) -> int:
    """The process of a worker's rank 1."""
    (rank,) = (one for one in psutil.Process(int(worker.rpartition(":")[2])).children() if one.cmdline())
    assert "parallel.worker" in " ".join(rank.cmdline())
    return rank.pid


def test_a_rank_that_ends_costs_its_worker(
    cluster: Any, split_engine_dir: Path, process_environment: dict[str, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Another is begun, what it had is asked again, and no rank is left."""
    write(tmp_path / "requests.jsonl", requests(40))
    assert run(tmp_path, split_engine_dir, process_environment).exit_code == 0
    job = job_of(split_engine_dir)
    requests_file = look_through(tmp_path / "requests.jsonl", job.digest())
    lines, ranks = [], set()
    with connected(cluster.address):
        crew = RayCrew(WorkerJob(job, None), 1, 1)
        for number, outcome in enumerate(answer_all(crew, requests_file.read(requests_file.places), failed_outcome)):
            lines.append(outcome.line)
            if number in (3, 20):
                ranks.add(rank_of(outcome.worker))
            if number == 3:
                os.kill(next(iter(ranks)), signal.SIGKILL)
    assert sorted(lines) == sorted((tmp_path / "results.jsonl").read_bytes().splitlines())
    assert len(ranks) == 2
    assert "a worker has no engine any more (rank 1 of 2 has ended: SIGKILL) with" in capsys.readouterr().err


def test_a_request_that_kills_its_workers_is_told(
    cluster: Any, llama_uncompiled_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    """And the others are answered."""
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom runtime.core.request import Draft\n\n\n"
        "def propose(tokens, max_draft_len):\n"
        "    if tokens[:2] == [7, 7]:\n        os.kill(os.getpid(), 9)\n    return []\n\n\n"
        "class Deadly:\n"
        "    def propose(self, sequences, max_draft_len):\n"
        "        return [Draft(propose(one.tokens, max_draft_len)) for one in sequences]\n\n"
        "    def forget(self, request_id): ...\n"
    )
    rows = [openai(f"{i}", prompt=[7, 7, 9] if i == 2 else [5, 6, i], max_tokens=4) for i in range(10)]
    write(tmp_path / "requests.jsonl", rows)
    flags = ["--ray", cluster.address, "--num-workers", 2, "--drafter", "deadly:Deadly"]
    result = run(tmp_path, llama_uncompiled_dir, process_environment, *flags)
    assert result.exit_code == 0, result.stderr
    found = results(tmp_path / "results.jsonl")
    assert [row["custom_id"] for row in found if row["error"]] == ["2"]
    assert "the worker died" in found[2]["error"]["message"]
    assert all(texts(row) for row in found if not row["error"])


def test_killed_driver_goes_on_with_another_number_of_workers(
    cluster: Any, llama_uncompiled_dir: Path, process_environment: dict[str, str], tmp_path: Path
) -> None:
    """The workers stand still before they are done, each in a step by which it has answered some.

    All runs have the same drafter: results may depend on one of a user's own, and their ids do.
    """
    write(tmp_path / "requests.jsonl", requests(40))
    partial, gate = tmp_path / "results.jsonl.partial", Gate(tmp_path, num_steps=20)
    (tmp_path / "held.py").write_text(
        f"import os, sys\nos.environ.update({gate.environment!r})\n"
        f"sys.path.append({str(ROOT / 'tests')!r})\nfrom gate import Waits\n"
    )
    command = ["batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--engine-dir", str(llama_uncompiled_dir)]
    # Automatic lengths do not ask a drafter at every step.
    flags = ["--drafter", "held:Waits", "--draft-len-mode", "fixed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", *command, *flags, "--ray", cluster.address],
        cwd=tmp_path,
        env=process_environment | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: process.poll() is not None or (partial.exists() and partial.stat().st_size))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    gate.open()
    workers = ["--ray", cluster.address, "--num-workers", 1]
    for others in (workers, ["-o", "alone.jsonl"]):
        result = run(tmp_path, llama_uncompiled_dir, process_environment, *flags, *others)
        assert result.exit_code == 0, result.stderr
    assert (tmp_path / "results.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


COUNTS = ("num_generated_tokens", "num_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")


@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_summarize_counts_and_scores_as_one_process_does(
    mode: str, cluster: Any, specdec: Specdec, llama_uncompiled_dir: Path, draft_engine_dir: Path, articles: Path
) -> None:
    """Stop words and sampling too, whose requests cannot be sent whole. Automatic lengths follow the clock of each."""
    flags: list[object] = {
        "orchestrator": [*draft_model(draft_engine_dir), "--stop-words", "as"],
        "leader": ["--spec-decode-algo", "NGRAM", "--draft-len-mode", "fixed", "--temperature", 0.8, "--top-p", 0.9],
    }[mode]
    where = ["--engine-dir", llama_uncompiled_dir, "--dataset", articles, "--batch-size", 2, "--output-len", 16]
    checks = ["--check-lossless", "--check-accuracy", "--rouge1-threshold", 0, "--json"]
    arguments = ["summarize", *where, "--test-engine", *flags, *checks]
    alone = specdec(*arguments).document
    shared = specdec(*arguments, "--ray", cluster.address, "--num-workers", 2).document
    assert_valid("summarize", shared)
    assert sum(shared["workers"].values()) == 5 and alone["workers"] == {}
    assert shared["rouge"] == alone["rouge"] and shared["checks"] == alone["checks"]
    for ours, others in zip(shared["requests"], alone["requests"], strict=True):
        assert ours["outputs"] == others["outputs"] and ours["output_text"] == others["output_text"]
    for ours, others in zip(shared["systems"].values(), alone["systems"].values(), strict=True):
        assert [ours["total"][key] for key in COUNTS] == [others["total"][key] for key in COUNTS]
    assert shared["total"]["num_draft_tokens"] > 0 and shared["total"]["wall_s"] > 0


DEADLY = """
import os
from pathlib import Path
from runtime.core.request import Draft


class Deadly:
    def propose(self, sequences, max_draft_len):
        if any(one.request.id == 2 for one in sequences) and not Path("spared").exists():
            Path("spared").touch()
            os.kill(os.getpid(), 9)
        return [Draft([7, 8]) for _ in sequences]

    def forget(self, request_id): ...
"""


@pytest.mark.parametrize("is_spared", [True, False])
def test_summarize_asks_again_what_a_killed_worker_had(
    is_spared: bool, cluster: Any, specdec: Specdec, llama_uncompiled_dir: Path, articles: Path, current_directory: Path
) -> None:
    """The third sample kills the worker that has it: once, or each time, and then it is named."""
    text = DEADLY if is_spared else DEADLY.replace('Path("spared").touch()', "")
    (current_directory / "deadly.py").write_text(text)
    where = ["--engine-dir", llama_uncompiled_dir, "--dataset", articles, "--output-len", 8, "--max-ite", 4]
    arguments = ["summarize", *where, "--test-engine", "--drafter", "deadly:Deadly", "--json"]
    on_ray = specdec(*arguments, "--ray", cluster.address, "--num-workers", 2)
    if not is_spared:
        assert on_ray.exit_code == 1 and on_ray.stdout == ""
        assert "error: the worker died each time that it was asked: sample 3" in on_ray.stderr
        return
    alone = specdec(*arguments).document
    assert [one["outputs"] for one in on_ray.document["requests"]] == [one["outputs"] for one in alone["requests"]]
    assert on_ray.document["total"]["num_draft_tokens"] == alone["total"]["num_draft_tokens"] > 0
    assert on_ray.stderr.count("warning: a worker died with ") == 1
