"""Figures of docs/proof.md: what checks and regress take and find.

python -m scripts.bench.proof times --model MODEL          check ÷ generate, one answer after the other
python -m scripts.bench.proof edits --model demo           1,000 edited answers of 10,000: found at their place?
python -m scripts.bench.proof faults --model demo          20 faults in single tensors of weights: told?
python -m scripts.bench.proof regress --model M --old M    old answers of another engine: time against generating
python -m scripts.bench.proof predict --model demo         predicted ÷ measured, for engines whose tables are given

A model is what `LLM` takes, and `101m` the Llama of random weights of `scripts.bench.llamas`.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint.costs import CostModel
from runtime.core.request import Request, Sequence
from runtime.llm import LLM
from runtime.loop.step_costs import measure_host, measure_steps
from runtime.measure.tuning.search import Cost, Replayer, Search
from runtime.proof.receipts import Read, receipt_of
from runtime.proof.records import Receipt
from runtime.proof.regress import Compared, Comparison, OldAnswer
from runtime.text.traces import read_traces
from scripts.bench.llamas import LLAMA_101M, save_random_llama
from specdec_cli import SamplingParams

ROOT = Path(__file__).parents[2]
_KINDS = ("another token", "swapped pair", "one more", "one less", "seed", "temperature", "stop")


@contextmanager
def opened(model: str, **engine: Any) -> Iterator[LLM]:
    with tempfile.TemporaryDirectory() as directory:
        if model == "101m":
            model = str(Path(directory) / "101m")
            save_random_llama(Path(model), "bfloat16", LLAMA_101M)
        with LLM(model, **engine) as llm:
            yield llm


def requests_of(llm: LLM, num: int, max_tokens: int, params: dict[str, Any], prompt_len: int = 32) -> list[Request]:
    """Prompts of random ids, of one length."""
    draw, vocab_size = random.Random(0), llm.bundle.config.vocab_size
    requests = []
    for i in range(num):
        one = SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True, **params)
        prompt = [draw.randrange(vocab_size) for _ in range(prompt_len)]
        requests.append(llm.request_of(one).with_prompt(i, prompt))
    return requests


def answers(llm: LLM, requests: list[Request]) -> tuple[list[Sequence], float]:
    """Finished sequences without a drafter, from an empty cache, and the seconds that they took."""
    llm.engine.clear_cache()
    start = time.perf_counter()
    sequences = llm.session().run(requests).sequences
    return sequences, time.perf_counter() - start


def receipts_of(llm: LLM, sequences: list[Sequence]) -> list[Read]:
    return [Read(str(i), receipt_of(one, llm.fingerprint)) for i, one in enumerate(sequences)]


def times(llm: LLM, runs: int) -> None:
    """Medians of check ÷ generate, one answer after the other; at last for four answers to one prompt of 400 tokens."""
    for params in ({"temperature": 0}, {"temperature": 0.8}):
        for max_tokens in (128, 512):
            ratio_of(llm, requests_of(llm, 1, max_tokens, params), runs)
    (template,) = requests_of(llm, 1, 128, {"temperature": 0.8}, 400)
    ratio_of(llm, [template.with_prompt(i, template.prompt_tokens, i) for i in range(4)], runs)


def ratio_of(llm: LLM, requests: list[Request], runs: int) -> None:
    ratios, seconds = [], []
    for _ in range(runs):
        llm.engine.clear_cache()
        start = time.perf_counter()
        sequences = [llm.session().run([request]).sequences[0] for request in requests]
        generating = time.perf_counter() - start
        llm.engine.clear_cache()
        reads, start = receipts_of(llm, sequences), time.perf_counter()
        findings = list(llm.checker().check(reads))
        checking = time.perf_counter() - start
        ratios.append(checking / generating)
        seconds.append([round(generating, 3), round(checking, 3)])
    of = {"answers": len(requests), "prompt": len(requests[0].prompt_tokens), "tokens": requests[0].max_new_tokens}
    told = of | {"temperature": requests[0].sampling.temperature, "ratio": round(statistics.median(ratios), 3)}
    print(json.dumps(told | {"seconds": seconds} | dict(Counter(one.verdict for one in findings))), flush=True)


def edited(receipt: Receipt, kind: str, draw: random.Random, vocab_size: int) -> Receipt:
    output, sampling = list(receipt.output_ids or ()), receipt.sampling
    place = draw.randrange(len(output) - 1)
    other = (output[place] + draw.randrange(1, vocab_size)) % vocab_size
    match kind:
        case "another token":
            output[place] = other
        case "swapped pair":
            output[place : place + 2] = reversed(output[place : place + 2])
        case "one more":
            output.append(other)
        case "one less":
            output.pop()
        case "seed":
            return replace(receipt, sampling=replace(sampling, random_seed=sampling.random_seed + 10**6))
        case "temperature":
            return replace(
                receipt,
                sampling=replace(sampling, temperature=sampling.temperature + 0.5 if sampling.temperature else 1.0),
            )
        case "stop":
            return replace(receipt, end_ids=(output[place],))
    return replace(receipt, output_ids=tuple(output))


def edits(llm: LLM, num_untouched: int, num_edited: int) -> None:
    """An edit that changes no token of what the engine answers is another edit's turn."""
    greedy, sampled = {"temperature": 0}, {"temperature": 1.0, "top_p": 0.95}
    requests = requests_of(llm, num_untouched // 2, 12, greedy, 8) + requests_of(
        llm, num_untouched // 2, 12, sampled, 9
    )
    requests = [replace(one, id=i) for i, one in enumerate(requests)]
    reads = receipts_of(llm, answers(llm, requests)[0])
    start = time.perf_counter()
    verdicts = Counter(one.verdict for one in llm.checker().check(reads))
    print("untouched:", dict(verdicts), f"{time.perf_counter() - start:.1f} s", flush=True)
    draw, checker, vocab_size = random.Random(1), llm.checker(), llm.bundle.config.vocab_size
    pool: list[tuple[str, Receipt]] = []
    for i, read in enumerate(reads[:: max(len(reads) // (2 * num_edited), 1)]):
        assert read.receipt is not None
        pool.append((_KINDS[i % len(_KINDS)], edited(read.receipt, _KINDS[i % len(_KINDS)], draw, vocab_size)))
    draw.shuffle(pool)
    own = llm.session().run([replace(checker.request(one), id=i) for i, (_, one) in enumerate(pool)]).sequences
    changed = []
    for (kind, receipt), sequence in zip(pool, own, strict=True):
        told, truth = list(receipt.output_ids or ()), sequence.output_tokens
        if told != truth:
            longest = max(len(told), len(truth))
            place = next(i for i in range(longest) if told[i : i + 1] != truth[i : i + 1])
            changed.append((kind, receipt, place))
    print(f"edits that change nothing, and are left out: {len(pool) - len(changed)}", flush=True)
    changed = changed[:num_edited]
    found: Counter[str] = Counter()
    for (kind, _, place), finding in zip(changed, checker.check(Read("", one) for _, one, _ in changed), strict=True):
        found[kind] += finding.verdict == "wrong" and finding.place == place
    print("found at their place:", dict(found), "of", dict(Counter(kind for kind, *_ in changed)), flush=True)


def faults(llm: LLM, num: int) -> None:
    """Each time one number of one tensor is changed, in an engine that is copied and opened as if it were sound."""
    reads = receipts_of(llm, answers(llm, requests_of(llm, 20, 64, {"temperature": 0}))[0])
    reads += receipts_of(llm, answers(llm, requests_of(llm, 20, 64, {"temperature": 1.0}, 33))[0])
    draw, told, wrong = random.Random(0), 0, []
    weights = load_file(llm.bundle.directory / "rank0.safetensors")
    names = sorted(name for name, one in weights.items() if one.is_floating_point() and one.numel() > 1000)
    for name in draw.sample(names, min(num, len(names))):
        changed = dict(weights)
        changed[name] = changed[name].clone()
        rows = changed[name].flatten()
        rows[draw.randrange(rows.numel())] += 4 * float(rows.float().std())
        step = faulty_step(llm, changed)
        findings = list(step.checker().check(reads))
        told += findings[0].relation == "faulty"
        wrong.append(sum(not one.passed for one in findings))
        step.close()
    print(f"faults: {len(wrong)}, told by the fingerprint: {told}, wrong answers of {len(reads)}: {wrong}", flush=True)


def faulty_step(llm: LLM, weights: dict[str, torch.Tensor]) -> LLM:
    """The engine with other weights, whose records of files say that they are its own."""
    from runtime.checkpoint.checksums import config_digest, record_files
    from runtime.checkpoint.config import as_json

    directory = Path(tempfile.mkdtemp()) / "engine"
    shutil.copytree(llm.bundle.directory, directory)
    save_file(weights, directory / "rank0.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["files"] = [as_json(record) for record in record_files(directory)]
    config["config_digest"] = config_digest(config)
    (directory / "config.json").write_text(json.dumps(config))
    return LLM(directory)


def regress(new: LLM, old: LLM, num: int, max_tokens: int) -> None:
    requests = requests_of(old, num, max_tokens, {"temperature": 0})
    sequences, _ = answers(old, requests)
    olds = [OldAnswer(str(i), one.request.prompt_tokens, tuple(one.output_tokens)) for i, one in enumerate(sequences)]
    again, generate_s = answers(new, requests)
    places = []
    for one, sequence in zip(olds, again, strict=True):
        pairs = enumerate(zip(one.output, sequence.output_tokens, strict=True))
        places.append(next((i for i, (a, b) in pairs if a != b), None))
    for until_change in (False, True):
        asked = [Compared.of(one, one.request(lambda receipt: requests[0], frozenset())) for one in olds]
        comparison = Comparison(new.engine, until_change=until_change)
        new.engine.clear_cache()
        start = time.perf_counter()
        compared = list(comparison.compare(asked))
        seconds = time.perf_counter() - start
        told = {
            "until change": until_change,
            "diverged": sum(one.has_diverged for one in compared),
            "of": len(compared),
            "same list": places == [one.place for one in compared],
            "tokens compared": sum(comparison.positions.num),
            "regress_s": seconds,
            "generate_s": generate_s,
            "ratio": round(seconds / generate_s, 3),
        }
        print(json.dumps(told), flush=True)


def predicted_and_measured(llm: LLM, traces: Path, threads: int) -> None:
    """Times that the engine's cost table predicts for lookups from another engine's outputs, beside their times here.

    `traces` are recorded by the first engine that is asked, and replayed for all.
    """
    torch.set_num_threads(threads)
    requests = requests_of_prompts(llm)
    if not traces.exists():
        sequences = llm.session().run(requests).sequences
        rows = ({"prompt_ids": one.request.prompt_tokens, "output_ids": one.output_tokens} for one in sequences)
        traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs = CostModel(measure_steps(llm.engine, 4.0), measure_host(llm.engine))
    search = Search(Replayer(read_traces(traces, llm.tokenizer), 1, Cost(costs, 512)), 10)
    search.run(lambda number=1, note="": None)
    ranked = sorted(search.replayed, key=lambda one: one.rank)
    tried = (search.replayed[0], ranked[0], ranked[len(ranked) // 2])
    ratios = []
    for one in tried:
        seconds = []
        for _ in range(3):
            llm.engine.clear_cache()
            session = llm.session_of(one.candidate)
            start = time.perf_counter()
            sequences = [session.run([request]).sequences[0] for request in requests]
            seconds.append(time.perf_counter() - start)
        num_tokens = sum(len(sequence.output_tokens) for sequence in sequences)
        num_replayed = one.total.num_generated_tokens
        ratios.append((one.rank / num_replayed) / (min(seconds) / num_tokens))
    told = {"threads": threads, "dtype": llm.fingerprint.dtype, "quantization": llm.fingerprint.quantization}
    by_name = {
        f"{one.candidate.label}, {one.candidate.max_draft_len}, {one.candidate.draft_len_mode}": round(ratio, 2)
        for one, ratio in zip(tried, ratios, strict=True)
    }
    speedups = [round(ratios[0] / ratio, 2) for ratio in ratios[1:]]
    print(json.dumps(told | {"predicted ÷ measured": by_name, "of the speedups": speedups}), flush=True)


def requests_of_prompts(llm: LLM) -> list[Request]:
    """Greedy requests for the demo's articles, of 64 tokens."""
    lines = (ROOT / "runtime" / "demo" / "articles.jsonl").read_text().splitlines()[:12]
    params = llm.request_of(SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    texts = [json.loads(line)["article"] for line in lines]
    return [params.with_prompt(i, llm.encode(text, 900)[0]) for i, text in enumerate(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["times", "edits", "faults", "regress", "predict"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--old")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num", type=int, default=10_000, help="untouched answers; of regress the answers")
    parser.add_argument("--num-edited", type=int, default=1_000)
    parser.add_argument("--max-batch-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quantization", help="of the engine whose speed is predicted")
    parser.add_argument("--traces", type=Path, default=Path("traces.jsonl"), help="recorded once, for all predictions")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, on a machine that others use too")
    given = parser.parse_args()
    if given.processor_time:
        vars(time)["perf_counter"] = time.process_time
    with opened(given.model, max_batch_size=given.max_batch_size, quantization=given.quantization) as llm:
        print(
            given.model,
            llm.fingerprint.name,
            llm.fingerprint.dtype,
            llm.fingerprint.quantization,
            torch.get_num_threads(),
        )
        if given.what == "times":
            times(llm, given.runs)
        elif given.what == "edits":
            edits(llm, given.num, given.num_edited)
        elif given.what == "faults":
            faults(llm, 20)
        elif given.what == "predict":
            predicted_and_measured(llm, given.traces, given.threads)
        else:
            with opened(given.old or given.model, max_batch_size=given.max_batch_size) as old:
                regress(llm, old, given.num, given.max_tokens)


if __name__ == "__main__":
    main()
