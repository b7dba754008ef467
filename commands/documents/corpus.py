"""The JSON document of `specdec corpus create`, `merge` and `stats`."""

from typing import Annotated, Any

from pydantic import Field

from commands.documents.records import Record, absent
from runtime.config import Count, Size
from runtime.corpus import CORPUS_FORMAT_VERSION, Corpus, NgramCounts


class NgramRecord(Record):
    """The n-grams of one size."""

    ngram_size: Size
    num_occurrences: Size
    num_distinct: Size
    num_repeated: Count = Field(description="of the distinct ones, those that occur more than once")
    mean_occurrences: Annotated[float, Field(ge=1)]


class CorpusDocument(Record):
    """What `specdec corpus create`, `merge` and `stats` print with `--json`."""

    corpus: str
    format_version: Annotated[int, Field(ge=CORPUS_FORMAT_VERSION, le=CORPUS_FORMAT_VERSION)]
    num_documents: Size
    num_tokens: Size
    vocab_size: Size
    tokenizer_digest: str = Field(pattern="^[0-9a-f]{64}$")
    size_bytes: Size
    ngrams: Annotated[list[NgramRecord], Field(min_length=1, max_length=4)] = absent("of sizes 1 to 4, in stats")


def ngram_record(counts: NgramCounts) -> NgramRecord:
    return NgramRecord(
        ngram_size=counts.ngram_size,
        num_occurrences=counts.num_occurrences,
        num_distinct=counts.num_distinct,
        num_repeated=counts.num_repeated,
        mean_occurrences=counts.num_occurrences / counts.num_distinct,
    )


def corpus_document(corpus: Corpus, ngrams: list[NgramRecord] | None = None) -> dict[str, Any]:
    """`ngrams` are those of `stats`."""
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
