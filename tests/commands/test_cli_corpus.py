"""`specdec corpus`: whole or nothing on disk, what is in a corpus, and what n-gram lookup finds in it."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPT, PROMPTS, Result, Specdec, assert_valid, each, ids_of, tree
from sentences import Said
from test_cli_errors import assert_one_clear_error
from transformers import PreTrainedTokenizerFast

from runtime.text.corpus import Corpus
from runtime.text.text import tokenizer_digest

TEXT = "The dog looked for the ball in the park, and the dog looked for the ball under the bed."
TRACES = [
    {"prompt_ids": [5, 6, 7], "output_ids": [8, 9], "category": "a"},
    {"prompt": "The dog", "output": " had a ball."},
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The current directory, with `tok`, `text.txt`, `texts.jsonl` and `traces.jsonl`."""
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "text.txt").write_text(TEXT + "\nOne day\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "One day"}\n{"text": "The dog", "id": 5}\n')
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in TRACES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


CREATE = "corpus create --tokenizer-dir tok --output c "


def documents(path: str | Path) -> list[list[int]]:
    return [document.tolist() for document in Corpus.open(Path(path)).documents()]


def test_corpus_holds_the_tokens_of_texts_and_traces(
    specdec: Specdec, directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    arguments = shlex.split(CREATE + "--traces traces.jsonl --text=text.md --text texts.jsonl --json")
    arguments[arguments.index("--tokenizer-dir")] = "--tokenizer_dir"
    (directory / "text.txt").rename(directory / "text.md")
    document = specdec(*arguments).document
    assert_valid("corpus", document)
    texts = ["The dog had a ball.", TEXT + "\nOne day\n", "One day", "The dog"]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[1:]]
    dog = tokenizer("The dog")["input_ids"] + tokenizer(" had a ball.", add_special_tokens=False)["input_ids"]
    assert documents("c") == [[5, 6, 7, 8, 9], dog, *expected]
    assert document["tokenizer_digest"] == tokenizer_digest(tokenizer)
    assert (document["num_documents"], document["vocab_size"]) == (5, 300)
    assert document["num_tokens"] == sum(map(len, documents("c")))
    assert document["size_bytes"] == Path("c").stat().st_size


def test_stats_count_ngrams_as_brute_force_does(specdec: Specdec, directory: Path) -> None:
    specdec(*shlex.split(CREATE + "--traces traces.jsonl --text text.txt --text texts.jsonl"))
    document = specdec("corpus", "stats", "c", "--json").document
    assert_valid("corpus", document)
    for n, row in enumerate(document["ngrams"], 1):
        counts = Counter(tuple(d[i : i + n]) for d in documents("c") for i in range(len(d) - n + 1))
        expected = (n, counts.total(), len(counts), sum(count > 1 for count in counts.values()))
        keys = ("ngram_size", "num_occurrences", "num_distinct", "num_repeated")
        assert tuple(row[key] for key in keys) == expected
        assert row["mean_occurrences"] == pytest.approx(counts.total() / len(counts))
    shown = specdec("corpus", "stats", "c").stdout
    for value in (f"{document['num_tokens']:,}", document["tokenizer_digest"][:12], "documents"):
        assert value in shown


def damage(directory: Path, name: str = "old", share: float = 0.9) -> None:
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: int(len(data) * share)])


def and_twin(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """The damage, and a copy beside it."""

    def both(directory: Path) -> None:
        change(directory)
        shutil.copy(directory / "old", directory / "twin")

    return both


def change_last_byte(directory: Path) -> None:
    data = bytearray((directory / "old").read_bytes())
    data[-1] ^= 1
    (directory / "old").write_bytes(data)


def other_format(directory: Path) -> None:
    data = (directory / "old").read_bytes()
    (directory / "old").write_bytes(data.replace(b'format_version\\": 2', b'format_version\\": 7'))


# In a directory with `tok`, `other`, `old` (a corpus), `foreign` (one of the tokenizer `other`) and the texts.
MISTAKES: list[tuple[str, int, tuple[str, ...], Callable[[Path], Any] | None]] = [
    (CREATE, 2, ("a corpus is made from traces or text, and none are given", "`--traces FILE`"), None),
    (CREATE + "--text text.csv", 2, ("a table is no document: text.csv", "`.jsonl`"),
     lambda d: (d / "text.csv").write_text("a")),
    (CREATE + "--text texts", 1, ("cannot read the file (Is a directory): texts",), lambda d: (d / "texts").mkdir()),
    (CREATE + "--text texts.jsonl", 1, ("line 1 of texts.jsonl has no `text`", "['prompt']"),
     lambda d: (d / "texts.jsonl").write_text('{"prompt": "a"}\n')),
    (CREATE + "--text texts.jsonl", 1, ("`text` on line 2 of texts.jsonl is empty: ''",),
     lambda d: (d / "texts.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')),
    (CREATE + "--text text.txt", 1, ("not UTF-8", "text.txt"), lambda d: (d / "text.txt").write_bytes(b"\xff")),
    (CREATE + "--traces traces.jsonl", 1, ("outside the vocabulary of 300: 300",),
     lambda d: (d / "traces.jsonl").write_text('{"prompt_ids": [1], "output_ids": [300]}')),
    (CREATE.replace(" c ", " old ") + "--text text.txt", 1, ("output file exists: old", "`--force`"), None),
    (CREATE.replace(" c ", " traces.jsonl ") + "--text text.txt --force", 1,
     ("something other than a corpus: traces.jsonl",), None),
    (CREATE.replace(" c ", " text.txt ") + "--text text.txt --force", 2,
     ("the output would overwrite an input: text.txt",), None),
    (CREATE.replace(" c ", " /proc/c ") + "--text text.txt", 1, ("cannot write the file", "/proc/c"), None),
    ("corpus merge --output c old", 2, ("a merge needs two corpora or more, and there is one: old",), None),
    ("corpus merge --output old old old --force", 2, ("would overwrite an input: old",), None),
    ("corpus merge --output c old text.txt", 1, ("this is not a corpus", "text.txt"), None),
    ("corpus merge --output c old foreign", 1, ("different tokenizers: old and foreign",), None),
    ("corpus merge --output c old twin", 1, ("damaged or cut off", ": old"), and_twin(damage)),
    ("corpus merge --output c old twin", 1, ("its content has changed: old",), and_twin(change_last_byte)),
    ("corpus merge --output c old twin", 1, ("cannot read (it reads 2): 7",), and_twin(other_format)),
    ("corpus stats none", 1, ("there is no such corpus: none", "`specdec corpus create`"), None),
]  # fmt: skip


@pytest.mark.parametrize(("command", "exit_code", "words", "change"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistake_is_one_clear_error_and_leaves_nothing(
    command: str, exit_code: int, words: tuple[str, ...], change: Callable[[Path], Any] | None, specdec: Specdec,
    directory: Path, other_tokenizer: PreTrainedTokenizerFast, said: Said,
) -> None:  # fmt: skip
    other_tokenizer.save_pretrained(directory / "other")
    assert specdec(*shlex.split(CREATE.replace(" c ", " old ") + "--text text.txt")).exit_code == 0
    foreign = CREATE.replace(" c ", " foreign ").replace("tok ", "other ")
    assert specdec(*shlex.split(foreign + "--text text.txt")).exit_code == 0
    if change:
        change(directory)
    before = {path: (directory / path).read_bytes() for path in tree(directory) if (directory / path).is_file()}
    result = specdec(*shlex.split(command))
    assert_one_clear_error(result, exit_code, words)
    if "different tokenizers" in result.stderr:
        said(result)
    after = {path: (directory / path).read_bytes() for path in tree(directory) if (directory / path).is_file()}
    assert after == before


def test_answers_given_before_are_drafted_from_a_corpus_of_them(
    run: Callable[..., Result], specdec: Specdec, directory: Path, llama_engine_dir: Path
) -> None:
    """All of each answer after its first tokens is in the corpus, so that nearly every draft is accepted whole."""
    flags = ["--max-output-len", 30, "--end-id", 299]
    first = run(*each("--input-text", PROMPTS), *flags, "--output-traces", "t.jsonl", "--json").document
    create = ["corpus", "create", "--output", "c", "--tokenizer-dir", llama_engine_dir, "--traces", "t.jsonl"]
    assert specdec(*create).exit_code == 0
    ngram = ["--ngram-config", "[4,3,[0]]"]
    corpus = ["--ngram-corpus", "c", "--min-matching-ngram-size", 3]
    with_corpus = run(*each("--input-text", PROMPTS), *flags, *ngram, *corpus, "--json").document
    without = run(*each("--input-text", PROMPTS), *flags, *ngram, "--json").document
    assert_valid("run", with_corpus)
    assert ids_of(with_corpus) == ids_of(without) == ids_of(first)
    assert with_corpus["settings"]["ngram_config"]["corpus"] == "c"
    assert with_corpus["total"]["tokens_per_step"] > 3 > 2 > without["total"]["tokens_per_step"]


def test_corpus_of_another_tokenizer_is_refused_before_the_engine_is_opened(
    specdec: Specdec, directory: Path, other_tokenizer: PreTrainedTokenizerFast,
    llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch, said: Said,
) -> None:  # fmt: skip
    other_tokenizer.save_pretrained(directory / "other")
    specdec(*shlex.split(CREATE.replace("tok ", "other ") + "--text text.txt"))
    monkeypatch.setattr("runtime.engine.engine.Engine.open", lambda *_, **__: pytest.fail("the engine was opened"))
    inputs = ["--input-text", PROMPT]
    ngram = ["--ngram-config", "[4,2,[0]]", "--ngram-corpus", "c"]
    result = specdec("run", "--engine-dir", llama_engine_dir, *inputs, *ngram)
    assert_one_clear_error(
        result, 1, ("the corpus was made with another tokenizer: c", "`specdec corpus create --tokenizer-dir`")
    )
    said(result)
