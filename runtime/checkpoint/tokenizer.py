"""The tokenizer as an engine keeps it: the state of transformers' tokenizer, opened without transformers.

Importing transformers takes longer than a short answer. `build` saves the state that transformers' tokenizer hands to
the `tokenizers` package, if this package gives the same tokens and texts from it. The saved state is used as long as
the tokenizer's files do not change.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from runtime.checkpoint.config import Count, as_json, parse
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json, write_json
from runtime.util.panics import panics_held

SAVED = "saved_tokenizer.json"
# Files that a tokenizer is read from: if one of them changes, the saved tokenizer is outdated.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
)  # fmt: skip
# Several spaces, spaces before words and marks, other alphabets, and characters of several tokens.
PROBES = ("", " ", "def f(w, h):\n    return w", "  It's , and don't .  1,234.50 ", "Ünï©ode 漢字 🙂🙂", "<s> </s>")


TEMPLATE_DIR = "additional_chat_templates"
"""Subdirectory with a tokenizer's further chat templates, beside the default template: `tool_use.jinja` and others."""


def template_files(directory: Path) -> list[Path]:
    """The files of the templates in `TEMPLATE_DIR`, by name."""
    return sorted(path for path in (directory / TEMPLATE_DIR).glob("*.jinja") if path.is_file())


class AddedToken(Protocol):
    """A token outside the learned vocabulary."""

    special: bool


class Tokenizer(Protocol):
    """Interface of a tokenizer; transformers' tokenizers have it."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def __call__(
        self,
        text: str,
        /,
        *,
        add_special_tokens: bool = ...,
        truncation: bool = ...,
        max_length: int | None = ...,
        verbose: bool = ...,
    ) -> Mapping[str, Any]: ...

    def decode(
        self, tokens: list[int], /, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, token: int, /) -> Any: ...


class SavedTokenizer:
    """A tokenizer that works as in transformers, without importing it, for one text at a time and unpadded."""

    eos_token_id: int | None

    def __init__(self, state: str, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(state)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_id = eos_token_id

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        return self._tokenizer

    @cached_property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    def __call__(
        self,
        text: str,
        /,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        verbose: bool = True,
    ) -> Mapping[str, Any]:
        """The text's tokens under `input_ids`; truncation keeps the text's end."""
        if not truncation or max_length is None:
            return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        return {"input_ids": last_tokens(self._tokenizer, text, max_length, add_special_tokens=add_special_tokens)}

    def decode(
        self, tokens: list[int], /, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of tokens, without any clean-up of spaces."""
        assert not clean_up_tokenization_spaces
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, token: int, /) -> str | None:
        return self._tokenizer.id_to_token(token)


@contextmanager
def panics_told() -> Iterator[None]:
    """SpecDecError if the `tokenizers` package panics within the block, which raises no `Exception`: for example for a
    text on which one of the tokenizer's expressions takes too many steps.
    """
    try:
        with panics_held():
            yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _failed(error) from None


@contextmanager
def failures_told() -> Iterator[None]:
    """SpecDecError if the `tokenizers` package panics or raises a bare `Exception` within the block: for example for an
    unknown word, if the tokenizer has no token for unknown words.
    """
    try:
        with panics_told():
            yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise _failed(error) from None


def _failed(error: BaseException) -> SpecDecError:
    return SpecDecError(
        f"the tokenizer fails: {str(error).partition(chr(10))[0][:200]}",
        hint="name another tokenizer, or correct its tokenizer.json",
    )


def token_ids(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    """The tokens of a text; SpecDecError if the tokenizer fails on it."""
    with failures_told():
        ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def last_tokens(
    tokenizer: tokenizers.Tokenizer, text: str, max_length: int, *, add_special_tokens: bool = True
) -> list[int]:
    """The last tokens of a text, at most `max_length` with its start and end tokens, as `tokenizers` truncates. The
    tokenizer's own setting of truncation is left alone, since settings hold for all threads.
    """
    num_special = tokenizer.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
    encoding = tokenizer.encode(text, add_special_tokens=False)
    encoding.truncate(max(max_length - num_special, 0), direction="left")
    return list(tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids)


@dataclass(frozen=True)
class _Saved:
    """Content of the saved file. `files` is a digest of the files that the tokenizer was read from."""

    files: str
    eos_token_id: Count | None
    state: str


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Save the tokenizer's state beside its files, if the `tokenizers` package alone gives the same with it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        saved = SavedTokenizer(backend.to_str(), tokenizer.eos_token_id)
        with panics_told():
            is_same = _is_same(saved, tokenizer)
        if is_same:
            record = _Saved(_files_digest(directory), saved.eos_token_id, backend.to_str())
            write_json(directory / SAVED, as_json(record))


def find_saved_tokenizer(directory: Path) -> SavedTokenizer | None:
    """An engine's saved tokenizer; None without one, or if its files changed. SpecDecError if it is damaged."""
    if not (directory / SAVED).is_file():
        return None
    saved = parse(_Saved, read_json(directory / SAVED), str(directory / SAVED))
    if saved.files != _files_digest(directory):
        return None
    try:
        with panics_told():
            return SavedTokenizer(saved.state, saved.eos_token_id)
    except SpecDecError:
        raise
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise SpecDecError(
            f"`{directory / SAVED}` is not a tokenizer: {error}", hint="build it again", code="engine"
        ) from None


def _files_digest(directory: Path) -> str:
    paths = [directory / name for name in TOKENIZER_FILES]
    return digest(f"{path.name} {file_digest(path)}" for path in paths if path.is_file())


def _is_same(saved: SavedTokenizer, tokenizer: Any) -> bool:
    """True if both tokenizers give the same tokens for `PROBES`, truncated or not, and the same texts for tokens."""

    def answers(one: Tokenizer) -> list[Any]:
        found: list[Any] = [one.eos_token_id, one.get_vocab()]
        found += [(i, token.special) for i, token in sorted(one.added_tokens_decoder.items())]
        for text in PROBES:
            for special in (True, False):
                ids = one(text, add_special_tokens=special, verbose=False)["input_ids"]
                texts = [
                    one.decode(ids[i:], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                    for i in range(len(ids))
                    for skip in (True, False)
                ]
                cut = one(text, truncation=True, max_length=5)["input_ids"]
                found += [ids, texts, cut, [one.convert_ids_to_tokens(i) for i in ids]]
        return found

    return answers(saved) == answers(tokenizer)
