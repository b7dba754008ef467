"""specdec and its peers on a machine that does other work too: how much longer a token takes beside busy processes.

The systems are those of bench/peers.py, without drafters, and take turns on one prompt. Foreign processes do nothing
but spin; `--beside-itself` adds a second specdec that generates all the time, as a `summarize` in another shell does.
A slowdown is the time per token beside them over that on the machine as it was found, both medians of one run.

    taskset -c 0,1 python -m scripts.bench.busy --threads 2 [--foreign 0,1,2,4] [--beside-itself] [--work-dir DIR]
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench import peers as bench_peers
from scripts.bench.peers import Worker

VARIANTS = {"specdec": "none-v1"}  # of the others `none`
SPINS = "while True: pass"


@contextmanager
def foreign_processes(count: int) -> Iterator[None]:
    """Run processes that spin meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", SPINS]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def generating(worker: Worker, job: dict[str, Any]) -> Iterator[None]:
    """A worker that answers one job after the other meanwhile."""
    ends = threading.Event()

    def generate() -> None:
        while not ends.is_set():
            worker.measure(job)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def measure(workers: list[Worker], prompt: list[int], output_len: int, runs: int) -> dict[str, dict[str, float]]:
    """Median seconds of the first token and of each other one, by system."""
    answers: dict[str, list[dict[str, Any]]] = {worker.system: [] for worker in workers}
    for run in range(runs + 1):
        for worker in workers:
            job = {"variant": VARIANTS.get(worker.system, "none"), "prompt": prompt, "max_new_tokens": output_len}
            answer = worker.measure(job)
            if run:  # the first is a warm-up
                answers[worker.system].append(answer)
    return {
        system: {name: median(answer[name] for answer in own) for name in ("ttft_s", "tpot_s")}
        for system, own in answers.items()
    }


def table(rows: list[tuple[str, dict[str, dict[str, float]]]]) -> Iterator[str]:
    """A Markdown table: milliseconds, slowdowns over the first row, and each peer's time per token over specdec's."""
    _, quiet = rows[0]
    peers = [system for system in quiet if system != "specdec"]
    cells = ["load", *(f"{system}, TPOT" for system in quiet), *(f"{peer} ÷ specdec" for peer in peers), "TTFT"]
    yield f"| {' | '.join(cells)} |"
    yield "|---" * len(cells) + "|"
    for beside, times in rows:
        cells = [beside]
        for system, own in times.items():
            slowdown = own["tpot_s"] / quiet[system]["tpot_s"]
            cells.append(f"{own['tpot_s'] * 1e3:.1f} ms ({slowdown:.2f}x)")
        cells += [f"{times[peer]['tpot_s'] / times['specdec']['tpot_s']:.2f}" for peer in peers]
        cells.append(", ".join(f"{system} {own['ttft_s'] * 1e3:.0f} ms" for system, own in times.items()))
        yield f"| {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=bench_peers.MODELS, default="101m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--foreign", default="0,1,2,4", help="numbers of foreign processes; the first is compared with")
    parser.add_argument("--beside-itself", action="store_true", help="a row beside another specdec, too")
    parser.add_argument("--threads", type=bench_peers.positive, default=2)
    parser.add_argument("--prompt-len", type=bench_peers.positive, default=900)
    parser.add_argument("--output-len", type=bench_peers.positive, default=64)
    parser.add_argument("--runs", type=bench_peers.positive, default=3, help="after a warm-up")
    bench_peers.add_python_flags(parser)
    parser.add_argument("--peers", type=bench_peers.names_among(bench_peers.PEERS), default=["openvino"])
    parser.add_argument("--work-dir", type=Path, help="keeps models and engines; remove it when specdec has changed")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    pythons, _, skipped = bench_peers.find_peers(arguments)
    machine = bench_peers.describe_machine()
    print(f"{machine['cpu']}, {arguments.threads} threads, {arguments.model}, {arguments.dtype}\n")
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        work_dir = (arguments.work_dir or Path(temporary)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        num_tokens = arguments.prompt_len + arguments.output_len + bench_peers.NGRAM_DRAFT_LEN
        settings = bench_peers.prepare(arguments.model, arguments.dtype, work_dir, num_tokens, arguments.threads)
        sets = bench_peers.load_prompts(arguments.model, Path(settings["model_dir"]), 1, arguments.prompt_len)
        prompt = next(iter(sets.values()))[0]
        started = bench_peers.plan_workers(settings, pythons, work_dir)
        other = Worker("specdec", Path(sys.executable), settings) if arguments.beside_itself else None
        for worker in [*started, *([other] if other else [])]:
            stack.callback(worker.stop)
            worker.wait_until_ready()
        workers = [w for w in started if VARIANTS.get(w.system, "none") in w.variants]
        rows = []
        for count in map(int, arguments.foreign.split(",")):
            with foreign_processes(count):
                rows.append((f"{count} foreign", measure(workers, prompt, arguments.output_len, arguments.runs)))
        if other:
            with generating(other, {"variant": "none-v1", "prompt": prompt, "max_new_tokens": arguments.output_len}):
                rows.append(("another specdec", measure(workers, prompt, arguments.output_len, arguments.runs)))
        print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
