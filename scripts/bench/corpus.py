"""Gain of n-gram lookup by a corpus of other answers, and time of a lookup in a large one.

python -m scripts.bench.corpus traces.jsonl [--num-tokens 1000000]

Traces (as `--output-traces` writes them) are replayed without a model. Blocks of 40 lines go into two corpora in turn,
and each trace is replayed with the corpus that it is not in, so that no prompt or answer is found in itself, nor the
first turn of a conversation in the second.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from runtime.core.stats import sum_stats
from runtime.drafters.chain import FirstOf
from runtime.drafters.ngram import CorpusLookup, NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.measure.tuning.replay import replay
from runtime.text.corpus import Corpus, write_corpus
from runtime.text.trace_lines import Trace
from runtime.text.traces import read_traces

BLOCK = 40  # lines
MAX_SIZE, DRAFT_LEN = 3, 10


def write(path: Path, documents: list[list[int]]) -> Corpus:
    vocab_size = 1 + max(max(document) for document in documents)
    write_corpus(path, documents, vocab_size=vocab_size, tokenizer_digest="", replace=True)
    return Corpus.open(path)


def as_document(trace: Trace) -> list[int]:
    return [*trace.prompt_tokens, *trace.output_tokens]


def spliced(documents: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The documents, and more made of pieces of 3 to 30 tokens of them."""
    rng, result = random.Random(0), list(documents)
    total = sum(map(len, documents))
    while total < num_tokens:
        new: list[int] = []
        while len(new) < 600:
            source = rng.choice(documents)
            start = rng.randrange(len(source))
            new += source[start : start + rng.randrange(3, 30)]
        result.append(new)
        total += len(new)
    return result


def tokens_per_step(traces: list[Trace], corpora: list[Corpus] | None) -> str:
    """Replay with n-gram lookup, and with the corpus that a block of traces is not in."""
    stats = []
    for start in range(0, len(traces), BLOCK):
        drafter: Drafter = NgramLookup(MAX_SIZE)
        if corpora is not None:
            drafter = FirstOf([drafter, CorpusLookup(corpora[(start // BLOCK + 1) % 2], MAX_SIZE)])
        stats += replay(traces[start : start + BLOCK], drafter, DRAFT_LEN)
    total = sum_stats(stats)
    share = total.num_accepted_draft_tokens / total.num_draft_tokens
    return (
        f"{total.num_generated_tokens / total.num_steps:.4f} tokens per step "
        f"({total.num_accepted_draft_tokens:,} of {total.num_draft_tokens:,} accepted, {100 * share:.1f} %)"
    )


def times(corpus: Corpus, traces: list[Trace], max_size: int) -> str:
    """Every third prefix of the answers, in microseconds."""
    match_times, draft_times = [], []
    for trace in traces:
        tokens = as_document(trace)
        for end in range(len(trace.prompt_tokens), len(tokens), 3):
            start = time.perf_counter()
            match = corpus.longest_match(tokens[end - max_size : end], max_size)
            match_times.append(time.perf_counter() - start)
            if match is not None:
                corpus.continuation(match, DRAFT_LEN)
            draft_times.append(time.perf_counter() - start)
    return ", ".join(
        f"{name}: median {1e6 * statistics.median(values):.0f} µs, 99th percentile "
        f"{1e6 * statistics.quantiles(values, n=100)[98]:.0f} µs"
        for name, values in (("longest match", match_times), (f"with the draft of {DRAFT_LEN}", draft_times))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", type=Path)
    parser.add_argument("--num-tokens", type=int, default=1_000_000)
    arguments = parser.parse_args()
    traces = read_traces(arguments.traces, None)
    folds = [[t for i, t in enumerate(traces) if i // BLOCK % 2 == fold] for fold in (0, 1)]
    with tempfile.TemporaryDirectory() as directory:
        corpora = [write(Path(directory) / f"{i}", [as_document(t) for t in fold]) for i, fold in enumerate(folds)]
        print(f"{len(traces)} traces, corpora of {' and '.join(f'{c.info.num_tokens:,}' for c in corpora)} tokens")
        print(f"n-gram lookup [{DRAFT_LEN},{MAX_SIZE}]: {tokens_per_step(traces, None)}")
        print(f"n-gram lookup, then the corpus of the others: {tokens_per_step(traces, corpora)}")
        documents = spliced([as_document(trace) for trace in folds[0]], arguments.num_tokens)
        start = time.perf_counter()
        large = write(Path(directory) / "large", documents)
        print(f"corpus of {large.info.num_tokens:,} tokens: {time.perf_counter() - start:.1f} s to make")
        for max_size in (2, 3, 8, 16):
            print(f"  n-grams of up to {max_size}: {times(large, folds[1][::3], max_size)}")


if __name__ == "__main__":
    main()
