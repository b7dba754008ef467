"""Drafts of a model with another tokenizer, translated through text (universal assisted generation, arXiv 2502.05202,
its variant that compares tokens).

The sequence's text is encoded in the draft model's tokens, and the drafted text in the target's. Both tokenizers split
text at single spaces between words, so encoding starts again at the beginning of the last word: a token that ends there
may change with the text behind it. The target verifies the result like any draft, by its own tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from runtime.checkpoint.tokenizer import Tokenizer, token_ids
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.draft_target import DraftModel
from runtime.text.text import encode_text
from runtime.text.token_text import Texts, texts_after, token_bytes


@dataclass
class _Written:
    """A text in a tokenizer's tokens. `ends` has the text's length up to the end of each token."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def num_before(self, place: int) -> int | None:
        """Number of tokens whose text ends at this position or before; None if a token crosses the position."""
        num = sum(end <= place for end in self.ends)
        return num if (self.ends[num - 1] if num else 0) == place else None


@dataclass
class _Translated:
    """A request's text in the tokens of both tokenizers. `texts` continues where `text` ends."""

    texts: Texts
    draft_request: Request
    text: str = ""
    own: _Written = field(default_factory=_Written)
    draft: _Written = field(default_factory=_Written)


class TranslatedDraftModel:
    """Greedy drafts of `model`, whose tokenizer is `draft_tokenizer`, translated into tokens of `tokenizer`."""

    def __init__(self, model: DraftModel, draft_tokenizer: Tokenizer, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer, self.draft_tokenizer = model, tokenizer, draft_tokenizer
        end_id = draft_tokenizer.eos_token_id
        self._end_ids = frozenset() if end_id is None else frozenset({end_id})
        self._translated: dict[int, _Translated] = {}

    def check_request(self, request: Request) -> None:
        """SpecDecError if the draft engine has no room for the prompt; without room for the output drafts end."""
        prompt = self._begin(request).draft.tokens
        self.model.check_request(replace(request.with_prompt(request.id, prompt), max_new_tokens=1))

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        translated = [self._followed(sequence) for sequence in sequences]
        there = [Sequence(one.draft_request, list(one.draft.tokens)) for one in translated]
        drafted = [draft.tokens for draft in self.model.propose(there, max_draft_len)]
        tokens = map(self._in_own_tokens, translated, drafted)
        return [Draft(t[: min(max_draft_len, s.max_draft_len)]) for t, s in zip(tokens, sequences, strict=True)]

    def forget(self, request_id: int) -> None:
        self._translated.pop(request_id, None)
        self.model.forget(request_id)

    def _begin(self, request: Request) -> _Translated:
        made = _Translated(texts_after(self.tokenizer, []), request)
        self._read(made, request.prompt_tokens)
        self._write_anew(made)
        # The draft model drafts as long as its engine has room, whatever the request's budget is.
        engine, prompt = self.model.engine, tuple(made.draft.tokens)
        room = min(engine.config.build_config.max_request_len, engine.num_cache_tokens) - len(prompt)
        salt = request.cache_salt
        made.draft_request = Request(request.id, prompt, max(room, 1), self._end_ids, cache_salt=salt)
        return made

    def _followed(self, sequence: Sequence) -> _Translated:
        """The sequence in both tokenizers' tokens, updated to its present tokens."""
        request = sequence.request
        one = self._translated.get(request.id)
        if one is None:
            one = self._translated[request.id] = self._begin(request)
        start = len(one.text)
        self._read(one, sequence.tokens[len(one.own.tokens) :])
        self._write(one, start)
        return one

    def _read(self, one: _Translated, tokens: Seq[int]) -> None:
        for token in tokens:
            one.text += one.texts.add(token)
            one.own.tokens.append(token)
            one.own.ends.append(len(one.text))

    def _write(self, one: _Translated, known: int) -> None:
        """Encode the new part of the text; the first `known` characters were encoded before."""
        place = _last_word(one.text, known)
        num_kept = None if place is None else one.draft.num_before(place)
        if place is None or num_kept is None:
            self._write_anew(one)
        else:
            kept = _Written(one.draft.tokens[:num_kept], one.draft.ends[:num_kept])
            one.draft = self._read_back(kept, _encode_within(self.draft_tokenizer, one.text[place:]) or [], place)

    def _write_anew(self, one: _Translated) -> None:
        tokens = token_ids(self.draft_tokenizer, one.text, verbose=False)
        while tokens and tokens[-1] in self._end_ids:  # as some tokenizers close a text
            tokens = tokens[:-1]
        one.draft = self._read_back(_Written(), tokens, 0)

    def _read_back(self, kept: _Written, tokens: Seq[int], place: int) -> _Written:
        texts, ends = texts_after(self.draft_tokenizer, kept.tokens), []
        for token in tokens:
            place += len(texts.add(token))
            ends.append(place)
        return _Written([*kept.tokens, *tokens], [*kept.ends, *ends])

    def _in_own_tokens(self, one: _Translated, drafted: list[int]) -> list[int]:
        """The drafted text in the target's tokens; empty if the target has no tokens for it."""
        texts = texts_after(self.draft_tokenizer, one.draft.tokens)
        added = "".join(map(texts.add, drafted))
        if not added:
            return []
        place = _last_word(one.text, len(one.text))
        num_before = None if place is None else one.own.num_before(place)
        if place is not None and num_before is not None:
            there = one.own.tokens[num_before:]
            again = _encode_within(self.tokenizer, one.text[place:] + added) or []
            if again[: len(there)] == there:
                return again[len(there) :]
        return _encode_within(self.tokenizer, added) or []


def _last_word(text: str, end: int) -> int | None:
    """Position before `end` of the last single space between two words; None if there is no such space."""
    place = text.rfind(" ", 0, end)
    while place > 0:
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace() and place + 1 < len(text):
            return place
        place = text.rfind(" ", 0, place)
    return None


def _encode_within(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The tokens of a text that continues another text; None if it begins within a word and the tokenizer puts a space
    before every text.
    """
    of_token = token_bytes(tokenizer)
    if of_token is None or not of_token.drops_space:
        return encode_text(tokenizer, text)
    if not text.startswith(" "):
        return None
    return encode_text(tokenizer, text[1:])
