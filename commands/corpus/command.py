"""`specdec corpus create`, `merge` and `stats`: text or traces become a file that n-gram lookup drafts from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.options.expand import expand_groups
from commands.output.help import INPUT, OUTPUT, option
from commands.output.output import Output, check_output_files, check_readable
from runtime.checkpoint.resolve import resolve_tokenizer
from runtime.text.trace_lines import check_text
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.reading import check_opens, read_json_lines, read_utf8, shown

if TYPE_CHECKING:
    from runtime.checkpoint.tokenizer import Tokenizer

_MAX_NGRAM_SIZE = 4
_TABLES = (".csv", ".json", ".npy", ".parquet", ".tsv")


@dataclass(frozen=True, kw_only=True)
class CorpusInputs:
    """Inputs of a corpus."""

    tokenizer_dir: Annotated[
        Path,
        option(
            INPUT, "Tokenizer of the model the corpus is for: an engine, checkpoint or model directory, or a GGUF file."
        ),
    ]
    traces: Annotated[
        list[Path] | None,
        option(INPUT, "Prompts with outputs, as written by `--output-traces`; each is a document. Repeatable."),
    ] = None
    text: Annotated[
        list[Path] | None,
        option(INPUT, "A document: .txt, .md, .py, …; or .jsonl with a document's `text` on each line. Repeatable."),
    ] = None

    def paths(self) -> list[Path]:
        """Paths of the traces and texts. UsageError if no path is given, or if a path is a table, such as
        `.csv`, which holds rows and no text.
        """
        paths = [*(self.traces or []), *(self.text or [])]
        if not paths:
            raise UsageError(
                "a corpus is made from traces or text, and none are given",
                hint="give `--traces FILE`, `--text FILE` or several of these flags",
            )
        for path in self.text or []:
            if path.suffix.lower() in _TABLES:
                check_opens(path)
                hint = "write its texts to a `.jsonl` file, as `text` on each line"
                raise UsageError(f"a table is no document: {path}", hint=hint)
        return paths


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """Output file of a corpus."""

    output_file: Annotated[Path, option(OUTPUT, "Corpus file to write.", "--output")]
    force: Annotated[bool, option(OUTPUT, "Replace the output file if it is a corpus.", "--force")] = False

    def check(self, inputs: list[Path]) -> None:
        """SpecDecError unless the file can be written. An existing file is overwritten only with `--force`, and only if
        it is a corpus.
        """
        from runtime.text.corpus import is_corpus

        path = self.output_file
        check_output_files([path], inputs)
        if not path.exists():
            return
        if not self.force:
            raise SpecDecError(f"output file exists: {path}", hint="`--force` replaces it")
        if not path.is_file() or not is_corpus(path):
            raise SpecDecError(
                f"output file is something other than a corpus: {path}",
                hint="`--force` replaces only specdec's own output; choose another name or remove this one",
            )


@expand_groups
def create(inputs: CorpusInputs, corpus_file: CorpusFile, output: Output) -> None:
    """Make a corpus from texts, or from a model's earlier answers.

    Other commands draft from it with `--ngram-corpus`.
    """
    paths = inputs.paths()
    corpus_file.check(paths)
    resolve_tokenizer(inputs.tokenizer_dir)
    check_readable(paths)

    from commands.corpus.document import show_written
    from runtime.text.corpus import Corpus, write_corpus
    from runtime.text.text import open_tokenizer, tokenizer_digest, tokenizer_vocab_size
    from runtime.text.traces import read_traces

    tokenizer = open_tokenizer(inputs.tokenizer_dir)
    vocab_size, digest = tokenizer_vocab_size(tokenizer), tokenizer_digest(tokenizer)
    documents: list[list[int]] = []
    for path in inputs.traces or []:
        documents += [[*t.prompt_tokens, *t.output_tokens] for t in read_traces(path, tokenizer, vocab_size)]
    for path in inputs.text or []:
        documents += _read_texts(path, tokenizer)
    output_file = corpus_file.output_file
    write_corpus(output_file, documents, vocab_size=vocab_size, tokenizer_digest=digest, replace=corpus_file.force)
    show_written(Corpus.open(output_file), output)


@expand_groups
def merge(
    inputs: Annotated[list[Path], typer.Argument(metavar="FILE", help="Corpora with the same tokenizer.")],
    corpus_file: CorpusFile,
    output: Output,
) -> None:
    """Merge several corpora into one."""
    if len(inputs) < 2:
        raise UsageError(
            f"a merge needs two corpora or more, and there is one: {inputs[0]}", hint="name two corpora or more"
        )
    corpus_file.check(inputs)
    resolved = [path.resolve() for path in inputs]
    twice = next((path for path in inputs if resolved.count(path.resolve()) > 1), None)
    if twice is not None:
        raise UsageError(f"the corpora name one file twice: {twice}", hint="name each once")
    from commands.corpus.document import show_written
    from runtime.text.corpus import Corpus, merge_corpora

    merge_corpora(corpus_file.output_file, [Corpus.open(path) for path in inputs], replace=corpus_file.force)
    show_written(Corpus.open(corpus_file.output_file), output)


@expand_groups
def stats(corpus_file: Annotated[Path, typer.Argument(metavar="FILE", help="A corpus.")], output: Output) -> None:
    """Show a corpus's size, and how often its n-grams repeat. Only repeated n-grams give drafts."""
    from commands.corpus.document import corpus_document, corpus_table, ngram_record, ngram_table
    from runtime.text.corpus import Corpus

    corpus = Corpus.open(corpus_file)
    ngrams = [ngram_record(counts) for counts in corpus.ngram_counts(_MAX_NGRAM_SIZE) if counts.num_distinct]
    output.result(corpus_table(corpus))
    output.result(ngram_table(ngrams))
    output.document(corpus_document(corpus, ngrams))


def _read_texts(path: Path, tokenizer: "Tokenizer") -> list[list[int]]:
    """The tokens of each document of a text file."""
    from runtime.text.text import encode_text

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
            raise SpecDecError(f"the tokenizer finds no tokens in the text: {where}", hint="leave it out")
    return documents
