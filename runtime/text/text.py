"""Texts and tokens: the tokenizer, the ids that end an output, stop words, and text that arrives in pieces."""

import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import tokenizers

from runtime.checkpoint.bundle import Bundle, check_tokenizer_files, is_engine_dir, read_bundle
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.checksums import CONFIG
from runtime.checkpoint.generation_config import as_end_ids, read_end_ids
from runtime.checkpoint.gguf.reader import is_gguf, templates_as_one
from runtime.checkpoint.resolve import refuse_sentencepiece, resolve_tokenizer
from runtime.checkpoint.tekken import is_tekken_alone, make_tekken_tokenizer
from runtime.checkpoint.tokenizer import (
    PROBES,
    Tokenizer,
    failures_told,
    find_saved_tokenizer,
    last_tokens,
    panics_told,
    save_tokenizer,
    token_ids,
)
from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.text.chat_templates import chat_templates
from runtime.text.token_text import Texts, special_token_ids, texts_after, token_bytes, whole_text
from runtime.util.digests import digest
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError
from runtime.util.files import read_json
from runtime.util.locks import quiet_transformers

_PLAIN = "The quick brown fox jumps over 12 lazy dogs"
_NAME_THE_MODELS = "name the tokenizer of the model, or give none, and the engine's own is used"
_MISTRALS = {"mistral", "mistral3", "ministral", "pixtral", "voxtral"}


def load_tokenizer(directory: Path, pretrained_config: dict[str, Any] | None) -> Tokenizer:
    """transformers' tokenizer for a directory or a GGUF file; SpecDecError if there is none.

    Long prompts are truncated at the front. Without the model's configuration, the tokenizer's own files have to name
    its class.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    directory = resolve_tokenizer(directory)
    made: Any = None
    if is_gguf(directory):
        from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer

        made = make_gguf_tokenizer(directory)
    elif is_tekken_alone(directory):
        made = make_tekken_tokenizer(directory, templates_as_one(chat_templates(directory)))
    if made is not None:
        made.truncation_side = "left"
        return cast(Tokenizer, made)
    if pretrained_config is not None and (model_type := pretrained_config["model_type"]) not in CONFIG_MAPPING:
        raise SpecDecError(
            f"transformers does not know this model type: {model_type}", hint="install the transformers of the build"
        )
    try:
        config = None if pretrained_config is None else _config_for_tokenizer(directory, pretrained_config)
        with quiet_transformers(), panics_told():
            tokenizer = AutoTokenizer.from_pretrained(
                directory, config=config, truncation_side="left", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many kinds; each means: no usable tokenizer here
        if "trust_remote_code" in str(error):
            raise SpecDecError(
                f"the tokenizer needs Python code of its own (`auto_map`), which specdec does not run: {directory}",
                hint="name a tokenizer that transformers has a class for",
                code="tokenizer_is_code",
            ) from None
        refuse_sentencepiece(directory)
        reason = " ".join(str(error).split())
        file = directory / "tokenizer.json"
        raise SpecDecError(  # the package `tokenizers` raises a plain Exception, about this file
            f"no usable tokenizer in: {file if type(error) is Exception and file.is_file() else directory}",
            hint=f"name another; transformers said: {reason}",
            code="bad_tokenizer",
            reason=reason,
        ) from error
    if pretrained_config is not None and pretrained_config["model_type"] in _MISTRALS:
        _warn_of_first_pattern(tokenizer, directory)
    if isinstance(backend := getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        backend.no_truncation()  # the first call would do both, perhaps while other threads encode
        backend.no_padding()
    return cast(Tokenizer, tokenizer)


def _warn_of_first_pattern(tokenizer: Any, directory: Path) -> None:
    """Warn if transformers splits words by the faulty pattern of Mistral's first tokenizer files. Call it for Mistral's
    models only: in a directory that specdec wrote, transformers takes every model for a Mistral.
    """
    if getattr(getattr(tokenizer, "backend_tokenizer", None), "fix_mistral_regex", None) is False:
        warnings.warn(
            f"the tokenizer splits texts by a pattern that Mistral has corrected since: {directory}; "
            "`fix_mistral_regex` in its tokenizer_config.json, set to true, corrects it",
            SpecDecWarning,
            stacklevel=3,
        )


def _config_for_tokenizer(directory: Path, pretrained_config: dict[str, Any]) -> Any:
    """The configuration from which transformers chooses the tokenizer's class: the model's type, and the class names in
    the model's configuration.

    The model's other keys are left out, since they need not be valid to read a text. If the tokenizer's own files name
    a class, the model's configuration class is not used: it would import model code, which takes a third of the time
    for opening an engine.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = directory / "tokenizer_config.json"
    named = read_json(own) if own.is_file() else {}
    is_named = named.get("tokenizer_class") is not None and "auto_map" not in named
    kind = PreTrainedConfig if is_named else CONFIG_MAPPING[pretrained_config["model_type"]]
    config = kind.__new__(kind)  # without values, which would be checked
    config.model_type = pretrained_config["model_type"]  # type: ignore[misc]
    for name in ("tokenizer_class", "model_name"):
        if isinstance(value := pretrained_config.get(name), str):
            setattr(config, name, value)
    return config


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a directory (an engine, checkpoint or model, or a tokenizer alone), or in a GGUF file."""
    config: dict[str, Any] = {}
    if (directory / CONFIG).is_file():
        config = read_json(directory / CONFIG)
        if is_engine_dir(directory):
            check_tokenizer_files(read_bundle(directory))
        elif "format_version" in config:
            open_checkpoint(directory)
        config = config.get("pretrained_config", config)
    return load_tokenizer(directory, config if isinstance(config.get("model_type"), str) else None)


def check_tokenizer_fits(tokenizer: Tokenizer, directory: Path, own: Tokenizer | None, vocab_size: int) -> None:
    """Compare a tokenizer that the user named for a model with the model's `own`, if there is one.

    SpecDecError for ids beyond the model's `vocab_size` that `own` does not have (Gemma's has such ids, for images),
    and for a tokenizer that loses letters of a plain text which `own` keeps. A warning if an id or a text has another
    meaning than for the model, and, without `own`, for special tokens beyond the vocabulary.
    """
    words, added = _words_of(tokenizer), tokenizer.added_tokens_decoder
    own_words = {} if own is None else _words_of(own)
    past = sorted(i for i in words if i >= vocab_size and words[i] != own_words.get(i))
    is_special = all(i in added and added[i].special for i in past)
    if past and not (own is None and is_special):
        raise SpecDecError(
            f"the tokenizer is another model's, its ids go up to {past[-1]}, and the model has {vocab_size} ids, "
            f"from 0 on: {directory}",
            hint=_NAME_THE_MODELS,
        )
    if own is not None and _letters_kept(own) and not _letters_kept(tokenizer):
        raise SpecDecError(
            f"the tokenizer is another model's, it has no tokens for {_PLAIN!r}: {directory}", hint=_NAME_THE_MODELS
        )
    differing = sorted(i for i in words.keys() & own_words.keys() if words[i] != own_words[i])
    if past:
        found = f"it has special tokens past the model's {vocab_size} ids, id {past[0]} {words[past[0]]!r}"
    elif own is None:
        return
    elif differing:
        found = f"{len(differing)} of {len(words)} ids are other words, id {differing[0]} {words[differing[0]]!r} for "
        found += f"{own_words[differing[0]]!r}"
    elif texts := [text for text in PROBES if token_ids(own, text) != token_ids(tokenizer, text)]:
        found = f"a text becomes other ids than by the model's own, {max(texts, key=len)!r}"
    else:
        return
    warnings.warn(f"the tokenizer is not the model's, {found}: {directory}", SpecDecWarning, stacklevel=3)


def _letters_kept(tokenizer: Tokenizer) -> bool:
    """True if decoding the tokens of a plain text gives back its letters and digits, whatever their case."""
    try:
        text = whole_text(tokenizer, encode_text(tokenizer, _PLAIN), with_special=False)
    except SpecDecError:
        return False
    return re.sub("[^a-z0-9]", "", text.casefold()) == re.sub("[^a-z0-9]", "", _PLAIN.casefold())


def _words_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Token texts by id. SentencePiece writes a token of two spaces as `▁▁`, and a GGUF file as two spaces: both give
    the same text.
    """
    return {i: word.replace("▁", " ") for word, i in tokenizer.get_vocab().items()}


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A digest that is equal for two tokenizers whose ids all have the same meaning."""
    vocabulary = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return digest(f"{i} {token}" for i, token in vocabulary)


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the highest id."""
    return max(tokenizer.get_vocab().values()) + 1


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text of any length, without the tokens that mark a text's start or end."""
    return token_ids(tokenizer, text, add_special_tokens=False, verbose=False)


def find_tokenizer(directory: Path, pretrained_config: dict[str, Any]) -> Tokenizer | None:
    """The engine's tokenizer, opened without transformers if it was saved for that; None if there is none."""
    if saved := find_saved_tokenizer(directory):
        return saved
    if any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")):
        return load_tokenizer(directory, pretrained_config)
    return None


def tokenizer_of_engine(bundle: Bundle) -> Tokenizer | None:
    """The engine's own tokenizer; None if it has none, and with a warning if it cannot be read. SpecDecError if its
    files have changed since the engine was built.
    """
    check_tokenizer_files(bundle)
    return _readable_tokenizer(bundle.directory, bundle.config.pretrained_config, Path(bundle.given))


def find_own_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The engine's own tokenizer, to compare another with; None if it has none that can be read."""
    try:
        return find_tokenizer(bundle.directory, bundle.config.pretrained_config)
    except SpecDecError:
        return None


def cache_tokenizer(directory: Path, pretrained_config: dict[str, Any], final_directory: Path) -> None:
    """Save an engine's tokenizer so that `find_tokenizer` opens it without transformers, if it gives the same tokens
    that way.

    A tokenizer that cannot be loaded is left as it is; the warning names the directory under its final name.
    """
    if tokenizer := _readable_tokenizer(directory, pretrained_config, final_directory):
        save_tokenizer(tokenizer, directory)


def _readable_tokenizer(directory: Path, pretrained_config: dict[str, Any], named: Path) -> Tokenizer | None:
    """The tokenizer from `find_tokenizer`; None, with a warning, if it cannot be read: ids need none."""
    try:
        return find_tokenizer(directory, pretrained_config)
    except SpecDecError as error:
        if error.code == "engine":  # the saved tokenizer is damaged
            raise
        why = f"{error.message} ({error.hint})".replace(str(directory), str(named))
        warnings.warn(f"the engine takes token ids only: {why}", SpecDecWarning, stacklevel=3)
        return None


def word_tokens(tokenizer: Tokenizer, name: str, word: str) -> list[int]:
    """The tokens of a single word; UsageError if it has none."""
    tokens = token_ids(tokenizer, word, add_special_tokens=False)
    if not tokens or not decode(tokenizer, tokens, encode_text(tokenizer, "a")):
        raise UsageError(
            f"{name} has a word that the tokenizer turns into no tokens: {word!r}",
            hint="leave it out",
            field=name,
        )
    return tokens


def bad_word_tokens(tokenizer: Tokenizer, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban for each word: at the start of a text, and after a space."""
    variants = [tuple(word_tokens(tokenizer, "bad_words", text)) for word in words for text in (word, f" {word}")]
    return tuple(dict.fromkeys(variants))


def find_end_ids(engine_dir: Path, pretrained_config: dict[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    """The model's end ids: from generation_config.json, otherwise from config.json, otherwise from the tokenizer."""
    if (ids := read_end_ids(engine_dir)) is not None:
        return ids
    own = pretrained_config.get("eos_token_id")
    if own is None and tokenizer is not None:
        own = tokenizer.eos_token_id
    return frozenset() if own is None else as_end_ids(own, engine_dir)


def encode(
    prompt: str | Seq[int], tokenizer: Tokenizer | None, max_length: int | None = None
) -> tuple[list[int], bool]:
    """The tokens of a prompt given as text or ids, and whether only its last `max_length` were kept. UsageError for any
    other kind of prompt, and for text that cannot be written as UTF-8; SpecDecError for text without a tokenizer.
    """
    if not isinstance(prompt, str):
        _check_ids(prompt)
        kept = list(prompt)[-max_length:] if max_length else list(prompt)
        return kept, len(kept) < len(prompt)
    if tokenizer is None:
        raise SpecDecError(
            "the engine has no tokenizer for a prompt of text",
            hint="name a tokenizer, or give token ids",
            code="no_tokenizer",
        )
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"a prompt has half a pair of surrogates: {prompt[:100]!r}", hint="leave it out", field="prompt"
        ) from None
    ids = token_ids(tokenizer, prompt, verbose=False)
    if max_length is None or len(ids) <= max_length:
        return ids, False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        with failures_told():
            return last_tokens(backend, prompt, max_length), True
    return token_ids(tokenizer, prompt, truncation=True, max_length=max_length), True


def _check_ids(prompt: Any) -> None:
    """UsageError unless the prompt is a sequence of integers."""
    is_sequence = isinstance(prompt, Seq) and not isinstance(prompt, bytes)
    if not is_sequence or any(type(one) is bool or not isinstance(one, int | Integral) for one in prompt):
        raise UsageError(
            f"a prompt must be a text or token ids: {str(prompt)[:100]}",
            hint="write token ids as `[1, 2, 3]`",
            field="prompt",
        )


def decode(tokenizer: Tokenizer, tokens: Seq[int], before: Seq[int] = ()) -> str:
    """The exact text of tokens, without end ids and other special tokens.

    It is the text that these tokens add after the tokens `before` them: decoded alone, SentencePiece's tokens would
    lose their leading space. A character that begins in `before` and ends in the tokens is part of the text.
    """
    texts = texts_after(tokenizer, before)
    return "".join(map(texts.add, tokens)) + texts.end()


def text_or_ids(tokenizer: Tokenizer | None, tokens: Seq[int], before: Seq[int] = ()) -> str:
    """The text as from `decode`, or the ids themselves if there is no tokenizer."""
    return " ".join(map(str, tokens)) if tokenizer is None else decode(tokenizer, tokens, before)


@dataclass(frozen=True)
class StopWords:
    """Ends an output at a stop word, however its text is divided into tokens (a `StopCheck` of requests)."""

    words: tuple[str, ...]
    tokenizer: Tokenizer
    sampling: SamplingConfig = GREEDY
    """The request's parameters: in the first `min_tokens` tokens of an output no stop word ends it."""

    def __call__(self, tokens: list[int], num_prompt_tokens: int) -> bool:
        """True if the last token completed a stop word."""
        if len(tokens) - num_prompt_tokens <= self.sampling.min_tokens:
            return False
        start = self._window_start(tokens, num_prompt_tokens)
        texts = texts_after(self.tokenizer, tokens, start)
        *earlier, last = map(texts.add, tokens[start:])
        before = "".join(earlier)
        return self.find(before + last, len(before)) is not None

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Start and end of the first stop word that ends after the first `start` characters."""
        found = ((text.find(word, max(start - len(word) + 1, 0)), len(word)) for word in self.words)
        return min(((i, i + length) for i, length in found if i >= 0), default=None)

    def _window_start(self, tokens: list[int], num_prompt_tokens: int) -> int:
        """Index of the first token of a window that may contain a stop word and the character before it. A token has at
        least one byte of text, unless it is special; special tokens are not counted.
        """
        start, num_missing = len(tokens), self._longest_bytes + 4
        while start > num_prompt_tokens and num_missing:
            start -= 1
            num_missing -= self._has_text(tokens[start])
        return start

    def _has_text(self, token: int) -> bool:
        of_token = token_bytes(self.tokenizer)
        return token not in self._special_ids if of_token is None else bool(of_token(token))

    @cached_property
    def _longest_bytes(self) -> int:
        return max(len(word.encode()) for word in self.words)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)


@dataclass
class TextStream:
    """Turns a growing output into text, piece by piece; never shows half a character or part of a stop word."""

    tokenizer: Tokenizer
    stop_words: StopWords | None = None
    before: Seq[int] = ()
    """The prompt's tokens."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are shown, each with its text."""
    shows_stop: bool = False
    """True if the text keeps the stop word that ends it."""
    starts: list[int] = field(default_factory=list, init=False)
    """Start of each token's characters in the text."""
    _texts: Texts = field(init=False)
    _num_decoded: int = field(default=0, init=False)
    _num_shown: int = field(default=0, init=False)
    _held_back: str = field(default="", init=False)
    _is_whole: bool = field(default=False, init=False)
    _is_cut: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._texts = texts_after(self.tokenizer, self.before)

    @classmethod
    def of_request(cls, tokenizer: Tokenizer, request: Request, shown: Mapping[int, str] | None = None) -> "TextStream":
        """Stream for a request's output. Special tokens in `shown` are shown, and all that the request wants."""
        own: dict[int, str] = {}
        if request.shows_special_tokens:
            hidden = frozenset() if request.shows_stop else request.end_ids
            own = {i: text for text, i in special_token_ids(tokenizer).items() if i not in hidden}
        shown = own | dict(shown or {})
        return cls(tokenizer, stop_words_of(request), request.prompt_tokens, shown, request.shows_stop)

    @property
    def num_begun(self) -> int:
        """Number of tokens whose text was shown at least in part. Once the output has ended it is the number of all
        tokens, except those that a stop word cut off.
        """
        if self._is_whole and not self._is_cut:
            return len(self.starts)
        return bisect_left(self.starts, self._num_shown)

    def next_piece(self, output_tokens: Seq[int], *, finished: bool) -> str:
        for token in output_tokens[len(self.starts) :]:
            self.starts.append(self._num_decoded)
            mark = self.shown.get(token)
            self._take(self._texts.add(token) if mark is None else self._texts.end() + mark)
        if finished and not self._is_whole:
            self._is_whole = True
            self._take(self._texts.end())
        piece = "" if self._is_cut else self._without_stop_word()
        self._held_back = self._held_back[len(piece) :]
        self._num_shown += len(piece)
        return piece

    def _take(self, text: str) -> None:
        self._num_decoded += len(text)
        self._held_back += text

    def _without_stop_word(self) -> str:
        """The part of the text that may be shown: nothing that is, or may become, a stop word."""
        text = self._held_back
        if self.stop_words is None:
            return text
        found = self.stop_words.find(text, self._unstopped)
        if found is not None:
            self._is_cut = True
            return text[: found[1] if self.shows_stop else found[0]]
        return text if self._is_whole else text[: len(text) - self._num_of_stop_word(text)]

    @property
    def _unstopped(self) -> int:
        """Number of characters held back that belong to the first `min_tokens` tokens, in which no stop word ends."""
        least = self.stop_words.sampling.min_tokens if self.stop_words else 0
        if not least:
            return 0
        end = self.starts[least] if len(self.starts) > least else self._num_decoded
        return max(end - self._num_shown, 0)

    def _num_of_stop_word(self, text: str) -> int:
        """Number of characters at the end that may be the beginning of a stop word."""
        words = self.stop_words.words if self.stop_words else ()
        return max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)


def token_starts(tokenizer: Tokenizer, tokens: Seq[int]) -> list[int]:
    """Position in the text where the characters of each token begin."""
    stream = TextStream(tokenizer)
    stream.next_piece(tokens, finished=True)
    return stream.starts


def output_text(
    tokenizer: Tokenizer | None, tokens: list[int], stop_words: StopWords | None, before: Seq[int] = ()
) -> str | None:
    """The text of an output behind the prompt `before`, without end ids and without the text after a stop word. None
    without a tokenizer.
    """
    if tokenizer is None:
        return None
    if stop_words is None:
        return decode(tokenizer, tokens, before)
    return TextStream(tokenizer, stop_words, before).next_piece(tokens, finished=True)


def stop_words_of(request: Request) -> StopWords | None:
    return request.stop_check if isinstance(request.stop_check, StopWords) else None


def sequence_text(tokenizer: Tokenizer | None, sequence: Sequence) -> str | None:
    """The text of a sequence's output, as its request wants it; None without a tokenizer."""
    if tokenizer is None:
        return None
    return TextStream.of_request(tokenizer, sequence.request).next_piece(sequence.output_tokens, finished=True)
