"""Many threads ask one `LLM`, in all ways at once: each gets what it gets alone.

python -m scripts.campaigns.llm_threads [--runs 20] [--threads 8] [--requests 200] [--model demo]

Threads change places every microsecond. Requests are of every kind (`KINDS`): texts and lists, sampled by seed, with
drafters, forms, penalties, stop words and cut prompts; by `generate`, `stream` and `session`, and streams that are left
in the middle, or read to their end only when everything else is done. Outputs, their reasons and their counts are
compared with those of one thread. The `LLM` changes its mode from run to run; in the end all blocks are free. Exit 1
if one of these is not so.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from runtime.core.generation import Output, Piece
from runtime.core.params import Mode, SamplingParams
from runtime.drafters.specs import ChainDrafter, DraftTargetDrafter, NgramDrafter, SuffixDrafter
from runtime.llm import LLM

Ask = Callable[[LLM, int], Any]
_NUM_PROMPTS = 5
_TOKENS = 6
_SWITCH_S = 1e-6
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}


def _prompt(number: int) -> str:
    return f"def f{number % _NUM_PROMPTS}(a, b):\n    return a" + " + b" * (number % _NUM_PROMPTS * 4)


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": _TOKENS, "temperature": 0} | values)


def _of(output: Output, *, counts_drafts: bool) -> Any:
    stats = output.stats
    steps = (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) if counts_drafts else ()
    best = None if output.logprobs is None else [one.top[0][0] for one in output.logprobs]
    return output.text, output.token_ids, output.finish_reason, output.index, stats.num_generated_tokens, steps, best


def _generate(drafter: Any = None, *, counts_drafts: bool = True, **values: Any) -> Ask:
    def ask(llm: LLM, number: int) -> Any:
        (result,) = llm.generate(_prompt(number), _params(**values), drafter=drafter, draft_len_mode="fixed")
        return [_of(output, counts_drafts=counts_drafts) for output in result.outputs]

    return ask


def _list(llm: LLM, number: int) -> Any:
    results = llm.generate([_prompt(number), _prompt(number + 1)], [_params(), _params(temperature=1, seed=number)])
    return [(result.prompt, _of(result.outputs[0], counts_drafts=True)) for result in results]


def _pieces(pieces: Iterator[Piece]) -> Any:
    found = list(pieces)
    tokens = [token for piece in found for token in piece.token_ids]
    return "".join(map(str, found)), tokens, found[-1].finish_reason


def _stream(llm: LLM, number: int) -> Any:
    return _pieces(llm.stream(_prompt(number), _params(temperature=0.9, seed=number), drafter=NgramDrafter()))


def _left(llm: LLM, number: int) -> Any:
    """Two pieces of a stream that is let go of then."""
    pieces = llm.stream(_prompt(number), _params(max_tokens=40))
    return [(str(piece), piece.token_ids) for piece in islice(pieces, 2)]


def _session(llm: LLM, number: int) -> Any:
    session = llm.session(NgramDrafter(), "fixed")
    request = llm.request_of(_params()).with_prompt(0, llm.encode(_prompt(number))[0])
    generation = session.run([request])
    (sequence,) = generation.sequences
    assert sequence.request is request
    assert generation.times.num_iterations >= sequence.stats.num_steps
    return sequence.output_tokens, sequence.stats.num_draft_tokens


KINDS: dict[str, Ask] = {
    "greedy": _generate(),
    "list": _list,
    "sampled": _generate(temperature=0.8, top_p=0.9, seed=5, n=2),
    "n-grams": _generate(NgramDrafter()),
    "public pool": _generate(NgramDrafter(pool="public"), counts_drafts=False),
    "suffixes": _generate(SuffixDrafter(), temperature=0.5, seed=3),
    "draft model": _generate(DraftTargetDrafter("demo-draft")),
    "chain": _generate(ChainDrafter([NgramDrafter(), SuffixDrafter()]), counts_drafts=False),
    "form": _generate(NgramDrafter(), json_schema=_SCHEMA, max_tokens=30),
    "choice": _generate(choice=["alpha", "beta"], temperature=1, seed=1),
    "penalties": _generate(repetition_penalty=1.3, presence_penalty=0.5, bad_words=["return"]),
    "stop word": _generate(stop="b", max_tokens=20),
    "cut": _generate(truncate_prompt_tokens=7),
    "log-probabilities": _generate(logprobs=2),
    "stream": _stream,
    "left stream": _left,
    "session": _session,
}


@contextmanager
def switched_often() -> Iterator[None]:
    """Let threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def expected(llm: LLM) -> dict[tuple[str, int], Any]:
    """Answers that each request gets in one thread."""
    return {(name, i): ask(llm, i) for name, ask in KINDS.items() for i in range(_NUM_PROMPTS)}


def faults_of(llm: LLM, alone: dict[tuple[str, int], Any], num_threads: int, num_requests: int) -> list[str]:
    """Differences and errors of `num_threads` threads that ask `num_requests` requests each, at once."""
    faults: list[str] = []
    kinds = list(dict.fromkeys(name for name, _ in alone))
    barrier = threading.Barrier(num_threads)

    def ask_all(thread: int) -> None:
        barrier.wait()
        kept = llm.stream(_prompt(thread), _params(max_tokens=40))
        began = next(kept)  # and is read when all others are done
        for i in range(num_requests):
            name, number = kinds[(thread * 7 + i) % len(kinds)], (thread + i // len(kinds)) % _NUM_PROMPTS
            try:
                if (found := KINDS[name](llm, number)) != alone[name, number]:
                    faults.append(f"{name} {number}: {found} instead of {alone[name, number]}")
            except Exception as error:
                faults.append(f"{name} {number}: {type(error).__name__}: {error}")
        rest = [began, *kept]
        (output,) = llm.generate(_prompt(thread), _params(max_tokens=40))
        if [i for piece in rest for i in piece.token_ids] != output.token_ids:
            faults.append(f"a stream that was kept: {rest} instead of {output.token_ids}")

    threads = [threading.Thread(target=ask_all, args=(number,), daemon=True) for number in range(num_threads)]
    with switched_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if llm.engine.cache_usage:
        faults.append(f"blocks that nobody has are not free: {llm.engine.cache_usage:.1%}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200, help="of each thread")
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    num_faults = 0
    for run in range(arguments.runs):
        mode: Mode = "orchestrator" if run % 2 else "leader"
        with LLM(arguments.model, mode=mode) as llm:
            alone, start = expected(llm), time.perf_counter()
            faults = faults_of(llm, alone, arguments.threads, arguments.requests)
        num_faults += len(faults)
        asked = arguments.threads * arguments.requests
        print(
            f"run {run}, {mode}: {asked} requests, {time.perf_counter() - start:.1f} s, {len(faults)} faults",
            flush=True,
        )
        for fault in faults[:3]:
            print(f"  {fault[:300]}", flush=True)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
