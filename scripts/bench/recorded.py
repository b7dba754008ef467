"""Lookups in front of an EAGLE-3 head whose accepted lengths others recorded, replayed without a model.

A line is a record of https://github.com/SpecDecode-Bench/simulator (data/llama3.1-8B): `prompt_token_ids`,
`generated_token_ids`, and in `acc_eagle.acc_len` for each position the tokens that a step beginning there yields, the
target's own included. By them a head drafts that is right as often as theirs was; lookups and chain are ours.
`--all` counts records too whose lists are not equally long, those of two runs whose texts parted: each is cut to the
shorter.

    python -m scripts.bench.recorded combined_sharegpt.jsonl combined_cnn.jsonl ... [--all]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.core.request import Draft, Sequence
from runtime.drafters.chain import BestOf, DraftingModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.measure.tuning.replay import replay
from runtime.text.trace_lines import Trace
from runtime.util.errors import SpecDecError

LOOKUP_DRAFT_LEN, HEAD_DRAFT_LEN, LEAST_MATCH = 10, 3, 4
_WRONG = 2**31 - 2
"""A token that no output contains."""
_VOCAB_SIZE = 2**31  # ids are not checked


@dataclass(frozen=True)
class Record:
    trace: Trace
    lens: tuple[int, ...]
    """Tokens that a step with the head's draft yields, for each position of the output."""


class RecordedHead:
    """Drafts up to three tokens, of which as many are right as were recorded. It skips the prompt's step, as theirs."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._draft(sequence, min(max_draft_len, HEAD_DRAFT_LEN)) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        pass

    def _draft(self, sequence: Sequence, draft_len: int) -> Draft:
        record, start = self.records[sequence.request.id], sequence.num_generated
        if start == 0:
            return Draft([])
        num_right = min(record.lens[start] - 1, draft_len)
        right = [*record.trace.output_tokens[start : start + num_right]]
        return Draft(right + [_WRONG] * (draft_len - len(right))).cut(sequence.max_draft_len)


class FromLongMatches:
    """The lookup's draft where its match has at least four tokens, and the head's elsewhere."""

    def __init__(self, lookup: Drafter, head: Drafter) -> None:
        self.lookup, self.head = lookup, head

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        found, drafted = (one.propose(sequences, max_draft_len) for one in (self.lookup, self.head))
        return [
            left if left.tokens and left.match_len >= LEAST_MATCH else right
            for left, right in zip(found, drafted, strict=True)
        ]

    def forget(self, request_id: int) -> None:
        self.lookup.forget(request_id)


def chain(lookup: Drafter, head: Drafter) -> BestOf:
    """Make the chain of `--drafters ngram,eagle`, where a step's time does not depend on its draft."""
    model = DraftingModel(head, HEAD_DRAFT_LEN, lambda batch_size, context_len: 0.0)
    return BestOf([lookup], [model], lambda batch_size, context_len, draft_len: 1.0, _VOCAB_SIZE)


def ngram() -> NgramLookup:
    return NgramLookup(8, ranking="recent")


DRAFTERS: dict[str, Callable[[Drafter], Drafter]] = {
    "EAGLE-3": lambda head: head,
    "n-gram": lambda _: ngram(),
    "n-gram if match >= 4, else EAGLE-3": lambda head: FromLongMatches(ngram(), head),
    "our chain `ngram,eagle`": lambda head: chain(ngram(), head),
    "our chain `suffix,eagle`": lambda head: chain(SuffixLookup(), head),
}


def read_records(path: Path) -> list[Record]:
    """SpecDecError if a line is no such record."""
    records = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            trace = Trace(tuple(one["prompt_token_ids"]), tuple(one["generated_token_ids"]))
            records.append(Record(trace, tuple(one["acc_eagle"]["acc_len"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecDecError(
            f"cannot read recorded lengths ({type(error).__name__}: {error}): {path}",
            hint="data/llama3.1-8B/combined_*.jsonl of github.com/SpecDecode-Bench/simulator",
        ) from error
    return records


def usable(records: list[Record], *, takes_all: bool) -> list[Record]:
    """Records whose lengths are those of their text; with `takes_all` the common beginning of the others' lists too."""
    if not takes_all:
        return [one for one in records if len(one.lens) == len(one.trace.output_tokens)]
    cut = []
    for one in records:
        shorter = min(len(one.lens), len(one.trace.output_tokens))
        cut.append(Record(Trace(one.trace.prompt_tokens, one.trace.output_tokens[:shorter]), one.lens[:shorter]))
    return cut


def tokens_per_step(records: list[Record], make: Callable[[Drafter], Drafter]) -> float:
    stats = replay([one.trace for one in records], make(RecordedHead(records)), LOOKUP_DRAFT_LEN)
    return sum(one.num_generated_tokens for one in stats) / sum(one.num_steps for one in stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="combined_*.jsonl")
    parser.add_argument("--all", action="store_true", help="records too whose text and lengths are of two runs")
    arguments = parser.parse_args()
    columns = ["records", "used", "tokens", *DRAFTERS]
    print(f"| {' | '.join(['', *columns])} |\n|{'---|' * (len(columns) + 1)}")
    together: list[Record] = []
    try:
        for path in arguments.files:
            records = read_records(path)
            used = usable(records, takes_all=arguments.all)
            together += used
            print_row(path.stem.removeprefix("combined_"), len(records), used)
    except SpecDecError as error:
        parser.exit(1, f"error: {error.message}\nhint: {error.hint}\n")
    print_row("all", len(together), together)


def print_row(name: str, num_records: int, used: list[Record]) -> None:
    figures = [f"{tokens_per_step(used, make):.2f}" if used else "-" for make in DRAFTERS.values()]
    num_tokens = sum(len(one.trace.output_tokens) for one in used)
    print(f"| {' | '.join([name, str(num_records), str(len(used)), str(num_tokens), *figures])} |", flush=True)


if __name__ == "__main__":
    main()
