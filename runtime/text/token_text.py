"""Decodes tokens to text: the bytes of each token, joined and read as UTF-8.

A character may be spread over several tokens, each with some of its bytes. Text is therefore decoded from the tokens'
bytes, one token after the other. However the tokens are grouped, the texts of the groups add up to the same text.
`tokenizers` decodes Llama 2's byte tokens in runs, and turns a run that is not valid UTF-8 into U+FFFD alone.
"""

import codecs
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from runtime.checkpoint.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # the text of bytes that are not UTF-8
_MAX_PENDING = 3  # most bytes of an unfinished character
_CONTEXT = 16  # number of tokens before a token with which it is decoded, where tokens do not stand for bytes
_SPACE = "▁"


class Texts(Protocol):
    """Decodes tokens that come one after the other."""

    def add(self, token: int) -> str:
        """Text that this token adds. A character is returned with the token that completes it."""

    def end(self) -> str:
        """Text for the bytes of an incomplete last character."""


def texts_after(tokenizer: Tokenizer, before: Seq[int], num_before: int | None = None) -> Texts:
    """A decoder for the tokens after the first `num_before` of `before` (None: after all of `before`). If those end in
    the middle of a character, the decoder's first text is the whole character.
    """
    num_before = len(before) if num_before is None else num_before
    of_token = token_bytes(tokenizer)
    if of_token is None:
        return _InContext(tokenizer, list(before[max(num_before - _CONTEXT, 0) : num_before]))
    return _OfBytes(of_token, before, num_before)


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens of a vocabulary by their names, such as `</s>`."""
    added = tokenizer.added_tokens_decoder
    return {str(tokenizer.convert_ids_to_tokens(i)): i for i, token in added.items() if token.special}


class TokenBytes:
    """The bytes of each token, none for a special token. `drops_space`: the whole text loses a leading space."""

    def __init__(self, tokenizer: Tokenizer, bytes_of: Callable[[str], bytes], *, drops_space: bool) -> None:
        self.drops_space = drops_space
        special = {token: b"" for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        name_of = tokenizer.convert_ids_to_tokens
        self._known: dict[int, bytes] = special
        self._find: Callable[[int], bytes] = lambda token: bytes_of(str(name_of(token) or ""))

    def __call__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found


_of_tokenizers: "WeakKeyDictionary[Tokenizer, TokenBytes | None]" = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The tokens' bytes; None for a tokenizer whose tokens form text in another way, such as BERT's."""
    if tokenizer not in _of_tokenizers:
        _of_tokenizers[tokenizer] = _token_bytes(tokenizer)
    return _of_tokenizers[tokenizer]


def _token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The tokens' bytes, if the decoder's steps are those of GPT-2's byte alphabet or of SentencePiece."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    match state.get("decoders", [state]):
        case [{"type": "ByteLevel"}]:
            return TokenBytes(tokenizer, _byte_level, drops_space=False)
        case [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, *steps]:
            kinds = [step["type"] for step in steps if step["type"] != "Strip"]
            strips = [step for step in steps if step["type"] == "Strip"]
            is_known = kinds in (["ByteFallback", "Fuse"], ["Fuse"]) and strips in ([], [_STRIPS_ONE])
            if is_known:
                bytes_of = _byte_fallback if "ByteFallback" in kinds else _sentence_piece
                return TokenBytes(tokenizer, bytes_of, drops_space=bool(strips))
    return None


_STRIPS_ONE: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@cache
def _alphabet() -> dict[str, int]:
    """GPT-2's character of each byte: its own if printable, otherwise the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    """Bytes of a token in GPT-2's alphabet; an added token with other characters stands for its own text."""
    alphabet = _alphabet()
    found = [alphabet.get(character) for character in token]
    return bytes(one for one in found if one is not None) if None not in found else token.encode()


def _sentence_piece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _byte_fallback(token: str) -> bytes:
    """The byte of a token such as `<0xE4>`; the bytes of any other token as in SentencePiece."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return _sentence_piece(token)


def whole_text(tokenizer: Tokenizer, tokens: Seq[int], *, with_special: bool) -> str:
    """The tokenizer's text of tokens, with special tokens or without, decoded all at once."""
    skips = not with_special
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skips, clean_up_tokenization_spaces=False))


class _OfBytes:
    """Decoder that joins the bytes of tokens."""

    def __init__(self, bytes_of: TokenBytes, before: Seq[int], num_before: int) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last, i = b"", num_before
        while i and len(last) <= _MAX_PENDING:
            i -= 1
            last = bytes_of(before[i]) + last
        self._decoder.decode(last[-_MAX_PENDING:])
        self._shown_before = self._decoder.getstate()[0].decode("utf-8", "replace")
        self._drops_space = bytes_of.drops_space and not last

    def add(self, token: int) -> str:
        data = self._bytes_of(token)
        if self._drops_space and data:
            self._drops_space = False
            data = data.removeprefix(b" ")
        return self._own(self._decoder.decode(data))

    def end(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """The text of these tokens alone, without the U+FFFD of a character that began before them."""
        if text:
            text, self._shown_before = text.removeprefix(self._shown_before), ""
        return text


class _InContext:
    """Decoder that uses the tokenizer, which decodes each token together with the tokens before it."""

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer, self._before, self._pending = tokenizer, before, list[int]()

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._before, self._pending = [*self._before, *self._pending][-_CONTEXT:], []
        return text

    def end(self) -> str:
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        shown, together = self._decode(self._before), self._decode([*self._before, *self._pending])
        return together[len(shown if together.startswith(shown) else shown.rstrip(REPLACEMENT)) :]

    def _decode(self, tokens: list[int]) -> str:
        return whole_text(self._tokenizer, tokens, with_special=False)
