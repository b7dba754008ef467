"""What the `corpus` commands print: a corpus's record, and tables of it and of its n-grams."""

from typing import Any

from rich.table import Table

from commands.output import Output, megabytes
from runtime.corpus import Corpus


def show_written(corpus: Corpus, output: Output) -> None:
    info = corpus.info
    output.result(
        f"Corpus of {info.num_tokens:,} tokens in {info.num_documents:,} {_plural(info.num_documents, 'document')}: "
        f"{_size(corpus)} → {corpus.path}"
    )
    output.document(record(corpus))


def _size(corpus: Corpus) -> str:
    return megabytes(corpus.num_bytes) if corpus.num_bytes >= 100_000 else f"{corpus.num_bytes:,} bytes"


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def record(corpus: Corpus) -> dict[str, Any]:
    info = corpus.info
    return {
        "corpus": str(corpus.path),
        "format_version": info.format_version,
        "num_documents": info.num_documents,
        "num_tokens": info.num_tokens,
        "vocab_size": info.vocab_size,
        "tokenizer_digest": info.tokenizer_digest,
        "size_bytes": corpus.num_bytes,
    }


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


def ngram_table(ngrams: list[dict[str, Any]]) -> Table:
    table = Table(title="N-grams", title_justify="left")
    for column in ("size", "occurrences", "different", "of these repeated", "occurrences of each, mean"):
        table.add_column(column, justify="right")
    for row in ngrams:
        table.add_row(
            str(row["ngram_size"]),
            *(f"{row[key]:,}" for key in ("num_occurrences", "num_distinct", "num_repeated")),
            f"{row['mean_occurrences']:.2f}",
        )
    return table
