"""Corpora of a server: texts that clients add by name, in which drafts for their requests are looked up.

A corpus belongs to the owner that added it, as keys and values do (`Request.cache_salt`). All clients may name the
corpora that the server was started with. If a request names several corpora, they are searched as one index, so that
the continuation that is most frequent in all of them is drafted. Corpora are kept in memory alone; each client may have
a limited number of limited size.
"""

import uuid
from collections import OrderedDict
from collections.abc import Sequence as Seq
from pathlib import Path
from threading import Lock

import numpy as np

from commands.serve.errors import HTTPError
from runtime.loop.compatibility import check_corpus
from runtime.text.corpus import Array, Corpus

MOST_TOKENS, MOST_TOKENS_OF_CLIENT, MOST_OF_CLIENT = 10_000_000, 2_000_000, 64
_MOST_INDICES = 16
"""Number of indices over several corpora that are kept: the most recently used."""
Owner = str | None
_SERVER = "the server"
"""Owner of the corpora that all clients may name."""


class Corpora:
    """The corpora of all owners; `vocab_size` and `tokenizer`, a digest, are the model's."""

    def __init__(self, vocab_size: int, tokenizer: str) -> None:
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._lock = Lock()
        self._corpora: dict[Owner, dict[str, Corpus]] = {}
        self._client_of: dict[Owner, Owner] = {}
        """The client that each owner belongs to: one API key has an owner for each `cache_salt`."""
        self._indices: OrderedDict[tuple[int, ...], tuple[tuple[Corpus, ...], Corpus]] = OrderedDict()
        """Indices over several corpora, by the ids of these corpora. Beside each index stand the corpora themselves."""

    def open(self, name: str, path: Path, tokenizer: object) -> None:
        """Open a corpus file for all clients. SpecDecError if the file is no corpus, or if it was made with another
        tokenizer.
        """
        corpus = Corpus.open(path)
        check_corpus(corpus, tokenizer, self._vocab_size)  # type: ignore[arg-type]
        self._corpora.setdefault(_SERVER, {})[name] = corpus

    def add(self, owners: Seq[Owner], name: str | None, documents: Seq[Seq[int]]) -> tuple[str, int]:
        """Add a corpus of these documents, lists of token ids. It belongs to the first of `owners`; the last is the
        client. Returns the corpus's name, made up if none is given, and its number of tokens. HTTPError for documents
        without tokens, a name that is taken, or a corpus for which there is no room.
        """
        owner, client = owners[0], owners[-1]
        name = uuid.uuid4().hex if name is None else name
        num_tokens = sum(map(len, documents))
        if not num_tokens:
            raise HTTPError(400, "the documents have no tokens", param="documents", code="empty_corpus")
        with self._lock:
            self._client_of[owner] = client
            self._check_room(owner, name, num_tokens)
        corpus = Corpus.of(name, [one for one in documents if len(one)], self._vocab_size, self._tokenizer)
        with self._lock:
            self._check_room(owner, name, num_tokens)  # another corpus may have got the name or the room meanwhile
            self._client_of[owner] = client  # the last corpus may have been removed meanwhile
            self._corpora.setdefault(owner, {})[name] = corpus
        return name, num_tokens

    def _check_room(self, owner: Owner, name: str, num_tokens: int) -> None:
        own = self._of(owner)
        if name in own or name in self._of(_SERVER):
            raise HTTPError(400, f"there is a corpus of this name: {name}", param="corpus_id", code="corpus_exists")
        clients = [corpora for them, corpora in self._corpora.items() if them != _SERVER]
        client = self._client_of[owner]
        of_client = [corpora for them, corpora in self._corpora.items() if self._client_of.get(them, _SERVER) == client]
        if sum(map(len, of_client)) >= MOST_OF_CLIENT:
            what = f"a client has at most {MOST_OF_CLIENT} corpora: remove one"
            raise HTTPError(400, what, param="corpus_id", code="too_many_corpora")
        num_own = sum(map(_num_tokens, of_client))
        what = ""
        if num_own + num_tokens > MOST_TOKENS_OF_CLIENT:
            whole = f"{num_own:,} and {num_tokens:,} of this one"
            what = f"a client's corpora have at most {MOST_TOKENS_OF_CLIENT:,} tokens: {whole}"
        elif sum(map(_num_tokens, clients)) + num_tokens > MOST_TOKENS:  # not how many others have
            what = f"the corpora of all clients have at most {MOST_TOKENS:,} tokens: no room for {num_tokens:,} more"
        if what:
            raise HTTPError(400, what, param="documents", code="corpus_too_large")

    def remove(self, owner: Owner, name: str) -> None:
        """Remove an owner's corpus; HTTPError if there is none of this name. Requests that are being answered go on
        drafting from it.
        """
        with self._lock:
            corpus = self._corpora.get(owner, {}).pop(name, None)
            if corpus is None:
                raise _unknown(name, "corpus_id")
            if not self._corpora[owner]:
                del self._corpora[owner], self._client_of[owner]
            for key in [key for key, (members, _) in self._indices.items() if corpus in members]:
                del self._indices[key]

    def num_tokens(self, owner: Owner) -> dict[str, int]:
        """Numbers of tokens of an owner's corpora, and of the corpora that all clients have."""
        return {name: corpus.info.num_tokens for name, corpus in (self._of(_SERVER) | self._of(owner)).items()}

    def find(self, owners: Seq[Owner], names: Seq[str]) -> Corpus:
        """An index over the named corpora. Each name is looked up with the owners in order, and then among the corpora
        that all clients may name. HTTPError for an unknown name.
        """
        found = tuple(self._one(owners, name) for name in dict.fromkeys(names))
        if len(found) == 1:
            return found[0]
        key = tuple(sorted(map(id, found)))
        known = self._indices.get(key)
        if known is None:
            documents: list[Array] = [np.asarray(one) for corpus in found for one in corpus.documents()]
            known = found, Corpus.of(" and ".join(names), documents, self._vocab_size, self._tokenizer)
        with self._lock:
            self._indices[key] = known
            self._indices.move_to_end(key)
            if len(self._indices) > _MOST_INDICES:
                self._indices.popitem(last=False)
        return known[1]

    def _one(self, owners: Seq[Owner], name: str) -> Corpus:
        for owner in (*owners, _SERVER):
            if (corpus := self._of(owner).get(name)) is not None:
                return corpus
        raise _unknown(name, "speculative")

    def _of(self, owner: Owner) -> dict[str, Corpus]:
        return self._corpora.get(owner, {})


def _num_tokens(corpora: dict[str, Corpus]) -> int:
    return sum(corpus.info.num_tokens for corpus in list(corpora.values()))


def _unknown(name: str, param: str) -> HTTPError:
    return HTTPError(400, f"there is no corpus of this name: {name}", param=param, code="corpus_not_found")
