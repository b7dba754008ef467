"""A corpus finds what a brute-force search of its documents finds, and a file that is not whole is an error."""

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from sentences import Said
from strength import examples

from commands.options.hints import hint_of
from runtime.core.request import Request, Sequence
from runtime.drafters.ngram import CorpusLookup
from runtime.text import corpus as corpus_module
from runtime.text.corpus import Corpus, merge_corpora, suffix_array, write_corpus
from runtime.util.errors import SpecDecError

# Their order as numbers is not that of their bytes.
TOKENS = [0, 1, 2, 255, 256, 65_536, 100_000]
VOCAB_SIZE = 100_001
Documents = list[list[int]]


def make(path: Path, documents: Documents, *, tokenizer: str = "t", vocab_size: int = VOCAB_SIZE) -> Corpus:
    write_corpus(path, documents, vocab_size=vocab_size, tokenizer_digest=tokenizer, replace=True)
    return Corpus.open(path)


def followers(documents: Documents, ngram: list[int]) -> Counter[int]:
    """Tokens after each occurrence."""
    n = len(ngram)
    return Counter(d[i + n] for d in documents for i in range(len(d) - n) if d[i : i + n] == ngram)


def frequent(counts: Counter[int]) -> list[tuple[int, int]]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(token, count) for token, count in ordered if count * 8 >= counts.total()]


def brute_continuation(documents: Documents, ngram: list[int], max_len: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while len(found) < max_len and (best := frequent(followers(documents, ngram))):
        found.append(best[0])
        ngram = [*ngram, best[0][0]]
    return found


def assert_finds_what_is_there(
    corpus: Corpus, documents: Documents, tail: list[int], max_size: int, min_size: int, max_len: int
) -> None:
    sizes = [n for n in range(min_size, min(max_size, len(tail)) + 1) if followers(documents, tail[-n:])]
    match = corpus.longest_match(tail, max_size, min_size)
    assert (match is not None) == bool(sizes)
    if match is not None:
        ngram = tail[-match.ngram_size :]
        assert match.ngram_size == max(sizes)
        assert match.num_occurrences == followers(documents, ngram).total()
        assert corpus.continuation(match, max_len) == brute_continuation(documents, ngram, max_len)


@given(
    documents=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12), min_size=1, max_size=8),
    tail=st.lists(st.sampled_from(TOKENS), max_size=8),
    max_size=st.integers(1, 6),
    min_size=st.integers(1, 3),
    max_len=st.integers(0, 6),
)
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_lookup_equals_brute_force(
    documents: Documents, tail: list[int], max_size: int, min_size: int, max_len: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    corpus = make(tmp_path_factory.getbasetemp() / "any.corpus", documents)
    assert_finds_what_is_there(corpus, documents, tail, max_size, min_size, max_len)


@given(documents=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=30), min_size=1, max_size=6))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_suffixes_are_sorted_by_their_bytes_and_then_as_they_come(documents: Documents) -> None:
    tokens = np.concatenate([np.array([*document, -1], dtype="<i4") for document in documents])

    def suffix(start: int) -> tuple[bytes, int]:
        end = start + tokens[start:].tolist().index(-1) + 1
        return tokens[start:end].tobytes(), start

    expected = sorted(np.flatnonzero(tokens >= 0).tolist(), key=suffix)
    assert suffix_array(tokens).tolist() == expected


def test_merged_corpus_is_the_corpus_of_all_documents(tmp_path: Path) -> None:
    a, b = [[1, 2, 3], [2, 3]], [[1, 2, 4]]
    make(tmp_path / "a", a)
    make(tmp_path / "b", b)
    merge_corpora(tmp_path / "ab", [Corpus.open(tmp_path / "a"), Corpus.open(tmp_path / "b")], replace=False)
    make(tmp_path / "whole", a + b)
    assert (tmp_path / "ab").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("documents", "wrong"), [([], ""), ([[1], []], "2"), ([[1], [2, 9, 10]], "2; 9"), ([[1], [2, -1]], "2; 9; -1")]
)
def test_what_cannot_be_in_a_corpus_is_an_error_and_leaves_nothing(
    documents: Documents, wrong: str, tmp_path: Path, said: Said
) -> None:
    with pytest.raises(SpecDecError) as raised:
        write_corpus(tmp_path / "c", documents, vocab_size=9, tokenizer_digest="", replace=False)
    assert raised.value.hint
    said(raised, *wrong.split("; "))
    assert list(tmp_path.iterdir()) == []


def with_info(**changes: object) -> Callable[[Path], None]:
    """Other metadata; None takes a key out."""

    def edit(path: Path) -> None:
        info = json.loads(_metadata(path)["specdec_corpus"]) | changes
        info = {key: value for key, value in info.items() if value is not None}
        save_file(load_file(path), path, metadata={"specdec_corpus": json.dumps(info)})

    return edit


def _metadata(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["__metadata__"]


def without_tokens(path: Path) -> None:
    tensors, metadata = load_file(path), _metadata(path)
    del tensors["tokens"]
    save_file(tensors, path, metadata=metadata)


def as_floats(path: Path) -> None:
    tensors, metadata = load_file(path), _metadata(path)
    save_file(tensors | {"tokens": tensors["tokens"].astype(np.float32)}, path, metadata=metadata)


def flip_a_bit(path: Path, part: str) -> None:
    data = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(data[:8], "little")
    data[header_end + json.loads(data[8:header_end])[part]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def cut(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return damage


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda path: path.unlink(), ""),
        (lambda path: path.write_text("some text, long enough for a header"), ""),
        (lambda path: save_file({"a": np.zeros(3)}, path), ""),
        (cut(0.02), ""),
        (cut(0.999), ""),
        (with_info(format_version=99), "2; 99"),
        (with_info(num_tokens=7), ""),
        (with_info(info_digest=None), ""),
        (with_info(num_documents="x"), "'x'"),
        (lambda p: save_file(load_file(p), p, metadata={"specdec_corpus": "{"}), ""),
        (without_tokens, "`tokens`"),
        (as_floats, "`tokens`"),
        (lambda path: flip_a_bit(path, "tokens"), ""),
        (lambda path: flip_a_bit(path, "suffix_array"), ""),
    ],
)
def test_damaged_corpus_is_an_error_that_names_it(
    damage: Callable[[Path], None], wrong: str, tmp_path: Path, said: Said
) -> None:
    path = tmp_path / "the.corpus"
    make(path, [[1, 2, 3, 4, 5] * 100])
    damage(path)
    with pytest.raises(SpecDecError) as raised:
        Corpus.open(path)
    said(raised, *wrong.split("; "), path)
    said(hint_of(raised.value), "specdec corpus create")


def test_what_changes_while_nobody_may_know_is_found_when_it_is_read_whole(tmp_path: Path, said: Said) -> None:
    """Opened once, the file is not read again; a disk may lose a bit without the file's times becoming others."""
    path = tmp_path / "c"
    make(path, [[1, 2, 3]])
    corpus = Corpus.open(path)
    stat = os.stat(path)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    corpus.check_is_the_same()
    with pytest.raises(SpecDecError) as error:
        corpus.check_content()
    said(error)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 16)


def written_over(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))  # later than the file was opened, by any clock


@pytest.mark.parametrize("damage", [cut_to_nothing, written_over])
def test_writing_over_a_corpus_in_the_middle_of_a_lookup_is_no_matter(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs in a fork: reading what is mapped and no longer there ends a process."""
    corpus, encode = make(tmp_path / "c", [[1, 2, 3] * 5000]), corpus_module._encode

    def damage_and_encode(tokens: list[int]) -> bytes:
        damage(tmp_path / "c")
        return encode(tokens)

    monkeypatch.setattr(corpus_module, "_encode", damage_and_encode)
    if not (child := os.fork()):
        found = corpus.longest_match([1, 2], 2)
        os._exit(found is None or corpus.continuation(found, 3) != [(3, 5000), (1, 4999), (2, 4999)])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All corpora are too large to be read into memory."""
    monkeypatch.setattr(corpus_module, "_MAX_BYTES_COPIED", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("step", "damage"),
    [
        ("_encode", written_over),
        ("bisect_left", cut_to_nothing),
        ("takewhile", written_over),
        ("groupby", cut_to_nothing),
    ],
)
def test_writing_over_a_large_corpus_in_the_middle_of_a_lookup_is_an_error(
    step: str, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the match, or of what follows, are gone. Runs in a fork: no signal may end the process."""
    corpus, do = make(tmp_path / "c", [[1, 2, 3] * 5000, [1, 2, 4] * 5000]), getattr(corpus_module, step)

    def damage_and_do(*given: Any, **named: Any) -> Any:
        damage(tmp_path / "c")
        return do(*given, **named)

    monkeypatch.setattr(corpus_module, step, damage_and_do)
    if not (child := os.fork()):
        try:
            match = corpus.longest_match([1, 2], 2)
            assert match is not None
            corpus.continuation(match, 3)
        except SpecDecError as error:
            os._exit("was written over while it was read" not in error.message)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("step", "damage", "max_bytes_copied"),
    [
        ("_open_file", cut_to_nothing, 0),
        ("_read_info", written_over, 0),
        ("file_digest", cut_to_nothing, 2**20),
        ("_content_ranges", written_over, 2**20),
    ],
)
def test_writing_over_a_corpus_that_is_being_opened_is_an_error(
    step: str, damage: Callable[[Path], None], max_bytes_copied: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:  # fmt: skip
    """Each of its steps may just have been done."""
    monkeypatch.setattr(corpus_module, "_MAX_BYTES_COPIED", max_bytes_copied)
    path = make(tmp_path / "c", [[1, 2, 3] * 5000]).path
    done = getattr(corpus_module, step)

    def do_and_damage(*given: object) -> object:
        result = done(*given)
        damage(path)
        return result

    monkeypatch.setattr(corpus_module, step, do_and_damage)
    with pytest.raises(SpecDecError) as raised:
        Corpus.open(path)
    said(raised, path)


class CountingBuffer:
    """A buffer, or a slice of a buffer, that counts the items that are read from it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.num_read = buffer, 0

    def __len__(self) -> int:
        return len(self.buffer)

    def __getitem__(self, index: Any) -> Any:
        self.num_read += len(range(*index.indices(len(self.buffer)))) if isinstance(index, slice) else 1
        return self.buffer[index]


def test_lookup_reads_little_of_a_text_of_frequent_tokens(tmp_path: Path) -> None:
    """Bisections of 200,000 rows, for one to three sizes. Times are in `bench/corpus.py`."""
    rng = random.Random(0)
    documents = [[int(rng.paretovariate(0.5)) % 5000 for _ in range(1000)] for _ in range(200)]
    corpus = make(tmp_path / "c", documents)
    corpus._rows, corpus._bytes = rows, text = CountingBuffer(corpus._rows), CountingBuffer(corpus._bytes)  # type: ignore[assignment]
    for i in range(500):
        corpus.longest_match(documents[i % 200][: i + 20], 8)
    assert 0 < rows.num_read / 500 < 100
    assert 0 < text.num_read / 500 < 100 * 36


def start(tokens: list[int], max_new_tokens: int = 100, end_ids: tuple[int, ...] = ()) -> Sequence:
    return Sequence(Request(0, tuple(tokens), max_new_tokens, frozenset(end_ids)), list(tokens))


@given(
    documents=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12), min_size=1, max_size=8),
    tokens=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=8),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    max_draft_len=st.integers(0, 6),
    max_new_tokens=st.integers(1, 9),
    end_ids=st.sampled_from([(), (2,), (0, 256)]),
)
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_draft_equals_brute_force(
    documents: Documents, tokens: list[int], sizes: tuple[int, int], max_draft_len: int, max_new_tokens: int,
    end_ids: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    corpus = make(tmp_path_factory.getbasetemp() / "draft.corpus", documents)
    min_size, max_size = sizes[0], sum(sizes)
    drafter = CorpusLookup(corpus, max_size, min_matching_ngram_size=min_size)
    (draft,) = drafter.propose([start(tokens, max_new_tokens, end_ids)], max_draft_len)
    found = [n for n in range(min_size, min(max_size, len(tokens)) + 1) if followers(documents, tokens[-n:])]
    expected: list[int] = []
    if found:
        draft_len = min(max_draft_len, max_new_tokens - 1)
        expected = [token for token, _ in brute_continuation(documents, tokens[-max(found) :], draft_len)]
    ends = [i for i, token in enumerate(expected) if token in end_ids]
    assert draft.tokens == (expected[: ends[0]] if ends else expected)
    assert draft.probs is None
