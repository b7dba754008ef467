"""What the `corpus` commands print: a line of what was written, and tables of a corpus and of its n-grams."""

from rich.table import Table

from commands.documents.corpus import NgramRecord, corpus_document
from commands.output import Output, megabytes
from runtime.corpus import Corpus


def show_written(corpus: Corpus, output: Output) -> None:
    info = corpus.info
    output.result(
        f"Corpus of {info.num_tokens:,} tokens in {info.num_documents:,} {_plural(info.num_documents, 'document')}: "
        f"{_size(corpus)} → {corpus.path}"
    )
    output.document(corpus_document(corpus))


def _size(corpus: Corpus) -> str:
    return megabytes(corpus.num_bytes) if corpus.num_bytes >= 100_000 else f"{corpus.num_bytes:,} bytes"


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


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
