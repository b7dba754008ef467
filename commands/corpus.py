"""`specdec corpus create`, `merge` and `stats`: text or traces become a file that n-gram lookup drafts from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.options.shared import INPUT, OUTPUT, Json, Quiet
from commands.output import Output, check_output_files, megabytes
from runtime.errors import SpecDecError, UsageError

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from runtime.corpus import Corpus

_MAX_NGRAM_SIZE = 4
_OutputFile = Annotated[Path, typer.Option("--output", help="Corpus file to write.", rich_help_panel=OUTPUT)]
_Force = Annotated[
    bool, typer.Option("--force", help="Replace the output file if it is a corpus.", rich_help_panel=OUTPUT)
]


def create(
    output_file: _OutputFile,
    tokenizer_dir: Annotated[
        Path,
        typer.Option(
            help="Tokenizer of the model the corpus is for: an engine, checkpoint or model directory.",
            rich_help_panel=INPUT,
        ),
    ],
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts with outputs, as `--output-traces` writes them; each is a document. Repeatable.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help=".txt, a document, or .jsonl with a document's `text` on each line. Repeatable.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    force: _Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a corpus of texts, or of what a model has answered before.

    `run` and `summarize` draft from it with `--ngram-corpus`.
    """
    inputs = [*(traces or []), *(text or [])]
    if not inputs:
        raise UsageError("a corpus is made of traces or text", hint="`--traces FILE`, `--text FILE` or several of them")
    for path in text or []:
        if path.suffix.lower() not in (".txt", ".jsonl"):
            raise UsageError(f"unknown kind of text file: {path}", hint="use `.txt` or `.jsonl`")
    _check_output_file(output_file, inputs, replace=force)
    from commands.inputs.traces import read_traces
    from runtime.corpus import Corpus, write_corpus
    from runtime.text import open_tokenizer, tokenizer_digest, tokenizer_vocab_size

    tokenizer = open_tokenizer(tokenizer_dir)
    vocab_size = tokenizer_vocab_size(tokenizer)
    documents: list[list[int]] = []
    for path in traces or []:
        documents += [[*t.prompt_tokens, *t.output_tokens] for t in read_traces(path, tokenizer, vocab_size)]
    for path in text or []:
        documents += _read_texts(path, tokenizer)
    write_corpus(
        output_file, documents, vocab_size=vocab_size, tokenizer_digest=tokenizer_digest(tokenizer), replace=force
    )
    _show_written(Corpus.open(output_file), Output(json, quiet))


def merge(
    inputs: Annotated[list[Path], typer.Argument(metavar="FILE", help="Corpora with the same tokenizer.")],
    output_file: _OutputFile,
    force: _Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make one corpus of several."""
    if len(inputs) < 2:
        raise UsageError(f"there is nothing to merge it with: {inputs[0]}", hint="name two corpora or more")
    _check_output_file(output_file, inputs, replace=force)
    from runtime.corpus import Corpus, merge_corpora

    merge_corpora(output_file, [Corpus.open(path) for path in inputs], replace=force)
    _show_written(Corpus.open(output_file), Output(json, quiet))


def stats(
    corpus_file: Annotated[Path, typer.Argument(metavar="FILE", help="A corpus.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what is in a corpus, and how often its n-grams repeat: what does not repeat cannot be found again."""
    from runtime.config import as_json
    from runtime.corpus import Corpus

    output = Output(json, quiet)
    corpus = Corpus.open(corpus_file)
    corpus.check_content()
    ngrams = [
        as_json(counts) | {"mean_occurrences": counts.num_occurrences / counts.num_distinct}
        for counts in corpus.ngram_counts(_MAX_NGRAM_SIZE)
        if counts.num_distinct
    ]
    output.result(_corpus_table(corpus))
    output.result(_ngram_table(ngrams))
    output.document(_record(corpus) | {"ngrams": ngrams})


def _check_output_file(path: Path, inputs: list[Path], *, replace: bool) -> None:
    """SpecDecError unless the file can be written, and is new or, with `replace`, a corpus."""
    from runtime.corpus import is_corpus

    check_output_files([path], inputs)
    if not path.exists():
        return
    if not replace:
        raise SpecDecError(f"output file exists: {path}", hint="`--force` replaces it")
    if not path.is_file() or not is_corpus(path):
        raise SpecDecError(
            f"output file is something other than a corpus: {path}",
            hint="`--force` replaces only what specdec wrote; choose another name or remove this one",
        )


def _read_texts(path: Path, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The tokens of each document of a text file."""
    from commands.inputs.prompts import check_text
    from runtime.reading import read_json_lines, read_utf8, shown
    from runtime.text import encode_text

    content = read_utf8(path)
    texts = [(content, str(path))]
    if path.suffix.lower() == ".jsonl":
        texts = []
        for number, row in read_json_lines(content, path):
            if "text" not in row:
                raise SpecDecError(
                    f"line {number} of {path} has no `text`, it has: {shown(sorted(row))}",
                    hint='write {"text": "..."}; traces are given with `--traces`',
                )
            where = f"line {number} of {path}"
            texts.append((check_text(row["text"], f"`text` on {where}"), where))
    documents = []
    for document, where in texts:
        documents.append(encode_text(tokenizer, document))
        if not documents[-1]:
            raise SpecDecError(f"the tokenizer makes nothing of the text: {where}", hint="leave it out")
    return documents


def _show_written(corpus: "Corpus", output: Output) -> None:
    info = corpus.info
    output.result(
        f"Corpus of {info.num_tokens:,} tokens in {info.num_documents:,} {_plural(info.num_documents, 'document')}: "
        f"{_size(corpus)} → {corpus.path}"
    )
    output.document(_record(corpus))


def _size(corpus: "Corpus") -> str:
    return megabytes(corpus.num_bytes) if corpus.num_bytes >= 100_000 else f"{corpus.num_bytes:,} bytes"


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def _record(corpus: "Corpus") -> dict[str, Any]:
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


def _corpus_table(corpus: "Corpus") -> "Table":
    from rich.table import Table

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


def _ngram_table(ngrams: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

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
