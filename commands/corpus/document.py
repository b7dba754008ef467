"""Output of the `corpus` commands: a corpus, and its n-grams."""

from typing import Annotated, Any

from pydantic import Field
from rich.table import Table

from commands.output.documents.records import Record, absent
from commands.output.output import Output, megabytes
from runtime.checkpoint.config import Count, Size
from runtime.text.corpus import CORPUS_FORMAT_VERSION, Corpus, NgramCounts


class NgramRecord(Record):
    """The n-grams of one size."""

    ngram_size: Size
    num_occurrences: Size
    num_distinct: Size
    num_repeated: Count = Field(description="of the distinct ones, those that occur more than once")
    mean_occurrences: Annotated[float, Field(ge=1)]


class CorpusDocument(Record):
    """Document of `specdec corpus create`, `merge` and `stats` with `--json`."""

    corpus: str
    format_version: Annotated[int, Field(ge=CORPUS_FORMAT_VERSION, le=CORPUS_FORMAT_VERSION)]
    num_documents: Size
    num_tokens: Size
    vocab_size: Size
    tokenizer_digest: str = Field(pattern="^[0-9a-f]{64}$")
    size_bytes: Size
    ngrams: Annotated[list[NgramRecord], Field(min_length=1, max_length=4)] = absent("of sizes 1 to 4, in stats")


def ngram_record(counts: NgramCounts) -> NgramRecord:
    return NgramRecord(**vars(counts), mean_occurrences=counts.num_occurrences / counts.num_distinct)


def corpus_document(corpus: Corpus, ngrams: list[NgramRecord] | None = None) -> dict[str, Any]:
    """The document for a corpus. `ngrams` are the counts that `stats` adds."""
    info = corpus.info
    document = CorpusDocument(
        corpus=str(corpus.path),
        format_version=info.format_version,
        num_documents=info.num_documents,
        num_tokens=info.num_tokens,
        vocab_size=info.vocab_size,
        tokenizer_digest=info.tokenizer_digest,
        size_bytes=corpus.num_bytes,
        **({} if ngrams is None else {"ngrams": ngrams}),
    )
    return document.as_json()


def show_written(corpus: Corpus, output: Output) -> None:
    info = corpus.info
    documents = "1 document" if info.num_documents == 1 else f"{info.num_documents:,} documents"
    output.result(f"Corpus of {info.num_tokens:,} tokens in {documents}: {_size(corpus)} → {corpus.path}")
    output.document(corpus_document(corpus))


def _size(corpus: Corpus) -> str:
    return megabytes(corpus.num_bytes) if corpus.num_bytes >= 100_000 else f"{corpus.num_bytes:,} bytes"


def corpus_table(corpus: Corpus) -> Table:
    info = corpus.info
    table = Table(title=f"Corpus {corpus.path}", title_justify="left", show_header=False)
    for row in (
        ("documents", f"{info.num_documents:,}"),
        ("tokens", f"{info.num_tokens:,}"),
        ("tokenizer", f"{info.vocab_size:,} ids, digest {info.tokenizer_digest[:12]}"),
        ("format", str(info.format_version)),
        ("size", _size(corpus)),
    ):
        table.add_row(*row)
    return table


def ngram_table(ngrams: list[NgramRecord]) -> Table:
    table = Table(title="N-grams", title_justify="left")
    for column in ("size", "occurrences", "different", "of these repeated", "occurrences of each, mean"):
        table.add_column(column, justify="right")
    for row in ngrams:
        table.add_row(
            str(row.ngram_size),
            *(f"{number:,}" for number in (row.num_occurrences, row.num_distinct, row.num_repeated)),
            f"{row.mean_occurrences:.2f}",
        )
    return table
