"""Grammars of outputs: compiled for a vocabulary by llguidance, and which tokens may come next in a text.

A grammar is part of the target's distribution, like a bias of minus infinity: what it allows at a position depends on
the tokens before and on nothing else, so drafts change no text. An end id is allowed where the text is whole, and
nowhere else. Where nothing can follow, the output ends without one.

Compiling and each position are bounded: the one in symbols, states and bytes, the other in lexer steps.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SpecDecError, UsageError
from runtime.params import Grammar

if TYPE_CHECKING:  # a request without a grammar does not wait for it
    from llguidance import LLMatcher, LLTokenizer

_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Style of Python's `json.dumps`: keys and marks are known then. `x-guidance` of a schema changes it."""
_MOST_COMPILED = 64
_MOST_FORCED_BYTES = 1 << 14
"""Longer text that has only one continuation is of a grammar that never ends, or whose every step is slow."""
_MOST_LEXER_FUEL = 100_000
"""llguidance's measure of a grammar's size: 130 KB of a schema's names. Of the million that it allows a step can take a
second, for which all other requests wait.
"""
_MOST_ITEMS_IN_ROW, _MOST_ITEMS = 10_000, 250_000
"""Items of Earley's parser after one byte, and in a step, which takes 12 ms then. An object of 1,000 optional values
has 4,000 after its brace.
"""
_MOST_STEP_S = 0.05
"""Seconds of a core for a position's mask, 20 times what forms of real tools take: each token of an ambiguous grammar
is slower than the one before, in however few items.
"""
_SLOW = "its steps take too long, as an ambiguous grammar's do"
_ENDLESS = "it never ends, or only after a very long text"
_MOST_REASON = 200


class CompiledGrammar:
    """A grammar for a vocabulary of `vocab_size` ids, and the text's start in it."""

    def __init__(self, start: "LLMatcher", vocab_size: int, eos_tokens: Seq[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_tokens = [token for token in eos_tokens if token < vocab_size]
        self._start = start

    def start(self) -> "LLMatcher":
        return self._start.deep_copy()


class Mask:
    """Tokens that may come next at a position. `indices` are those of them, or of the others, that are fewer."""

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self.allowed = allowed
        num_allowed = int(np.count_nonzero(allowed))
        self.forbids = 2 * num_allowed > len(allowed)
        """True if the indices are those of forbidden tokens."""
        self.indices = np.flatnonzero(~allowed if self.forbids else allowed)


_workers: list[ThreadPoolExecutor] = []


def _start_worker() -> None:
    _workers[:] = [ThreadPoolExecutor(1, "specdec-masks")]


_start_worker()
if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_start_worker)


@dataclass(frozen=True)
class _Ahead:
    """Masks after a prefix and a draft that are being computed in a thread."""

    prefix: Seq[int]
    num_tokens: int
    draft_tokens: list[int]
    masks: "Future[list[Mask | None]]"

    def is_of(self, prefix: Seq[int], draft_tokens: Seq[int]) -> bool:
        return self.prefix is prefix and self.num_tokens == len(prefix) and self.draft_tokens == list(draft_tokens)


class Matcher:
    """State of one request's output in its grammar. Calls may pass any tokens, but are fastest if they go on from the
    previous ones; the prompt is no part of the text. One thread may call it, whatever `compute_ahead` has begun.
    """

    def __init__(self, grammar: CompiledGrammar, num_prompt_tokens: int, end_ids: frozenset[int]) -> None:
        self.error: str | None = None
        """Reason why the last position that was asked for allows nothing."""
        self._grammar, self._num_prompt_tokens = grammar, num_prompt_tokens
        self._end_ids, self._ends = end_ids, sorted(end_ids)
        self._matcher = grammar.start()
        self._tokens: list[int] = []
        self._is_slow = False
        self._last: tuple[list[int], bytes, bool, Mask] | None = None
        """The last position and its mask: an output's end is looked for before its next token is chosen, and within a
        text masks do not change."""
        self._ahead: _Ahead | None = None

    def compute_ahead(self, prefix: Seq[int], draft_tokens: Seq[int]) -> None:
        """Begin to compute what `allowed` is about to be asked for, in a thread, beside a step of the target.

        These tokens must not change meanwhile. Most of it needs no interpreter lock.
        """
        self._wait()
        masks = _workers[0].submit(self._allowed, prefix, draft_tokens)
        self._ahead = _Ahead(prefix, len(prefix), list(draft_tokens), masks)

    def allowed(self, prefix: Seq[int], draft_tokens: Seq[int]) -> list[Mask | None]:
        """(vocab,) masks after `prefix`, and after each token of a draft; None beyond the end or an illegal token.

        Nobody asks for tokens there: the end is the output's, and the target rejects what is illegal.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            masks = ahead.masks.result()
            if ahead.is_of(prefix, draft_tokens):
                return masks
        return self._allowed(prefix, draft_tokens)

    def _allowed(self, prefix: Seq[int], draft_tokens: Seq[int]) -> list[Mask | None]:
        self.error = None
        masks: list[Mask | None] = [None] * (len(draft_tokens) + 1)
        if not self._follow(prefix):
            if self._matcher.is_error():
                masks[0] = self._nothing(_reason(self._matcher.get_error()))
            elif not self._matcher.is_stopped():
                masks[0] = self._nothing("the text so far does not match it")
            return masks
        for i, token in enumerate([*draft_tokens, None]):
            if self._matcher.is_error():  # which is stopped too
                masks[i] = self._nothing(_reason(self._matcher.get_error()))
                break
            if self._matcher.is_stopped():
                break
            masks[i] = self._mask()
            if self.error is not None or token is None or token in self._end_ids or not self._consume([token]):
                break
        return masks

    def is_over(self, tokens: Seq[int]) -> bool:
        """True if nothing can follow these tokens."""
        self._wait()
        if not self._follow(tokens) or self._matcher.is_error():
            return False
        if self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        allowed = self._mask().allowed.copy()
        allowed[self._ends] = False
        return not allowed.any() and self.error is None

    def num_legal(self, prefix: Seq[int], draft_tokens: Seq[int]) -> int:
        """Number of a draft's tokens before the first that cannot come, or that nothing can precede."""
        self._wait()
        if not self._follow(prefix):
            return 0
        for i, token in enumerate(draft_tokens):
            if token in self._end_ids:
                return i + self._matcher.is_accepting()
            if self._matcher.is_stopped() or not self._consume([token]):
                return i
        return len(draft_tokens)

    def forced(self, prefix: Seq[int], drafted: Seq[int]) -> list[int]:
        """Tokens that must come after `prefix` and a draft; none where there is a choice."""
        self._wait()
        if not self._follow([*prefix, *drafted]) or self._matcher.is_stopped() or self._matcher.is_accepting():
            return []
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def _wait(self) -> None:
        """Let what is computed ahead be done: nobody has asked for it."""
        if self._ahead is not None:
            self._ahead.masks.exception()
            self._ahead = None

    def _follow(self, tokens: Seq[int]) -> bool:
        """Stand after these tokens; False if the grammar does not allow them all."""
        if self._matcher.is_error():  # from which there is no way back
            self._matcher, self._tokens = self._grammar.start(), []
        output = list(tokens[self._num_prompt_tokens :])
        num_kept = len(self._tokens)
        while self._tokens[:num_kept] != output[:num_kept]:  # by a draft's length at most
            num_kept -= 1
        if num_kept < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - num_kept)
            del self._tokens[num_kept:]
        return self._consume(output[num_kept:])

    def _consume(self, tokens: list[int]) -> bool:
        with self._watched(len(tokens)):
            num_taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        self._tokens += tokens[:num_taken]
        return num_taken == len(tokens)

    @contextmanager
    def _watched(self, num_tokens: int) -> Iterator[None]:
        """Time of this thread alone: a busy machine ends no request."""
        start = thread_time()
        yield
        self._is_slow |= thread_time() - start > _MOST_STEP_S * max(num_tokens, 1)

    def _mask(self) -> Mask:
        """Tokens that may come next."""
        if self._last is not None and self._last[0] == self._tokens:
            return self._last[-1]
        with self._watched(1):
            bits, is_whole = self._matcher.compute_bitmask(), self._matcher.is_accepting()
        if self._is_slow:
            return self._nothing(_SLOW)
        if self._matcher.is_error():
            return self._nothing(_reason(self._matcher.get_error()))
        if self._last is not None and self._last[1:3] == (bits, is_whole):
            mask = self._last[-1]
        else:
            mask = self._read_mask(bits, is_whole=is_whole)
        if not mask.forbids and len(mask.indices) == 1 and self._forces_too_much():
            return self._nothing(_ENDLESS)
        self._last = list(self._tokens), bits, is_whole, mask
        return mask

    def _read_mask(self, bits: bytes, *, is_whole: bool) -> Mask:
        packed = np.frombuffer(bits, np.uint8)
        allowed = np.unpackbits(packed, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        allowed[self._grammar.eos_tokens] = False
        allowed[self._ends] = is_whole
        return Mask(allowed)

    def _forces_too_much(self) -> bool:
        return len(self._matcher.compute_ff_bytes()) > _MOST_FORCED_BYTES

    def _nothing(self, reason: str) -> Mask:
        self.error = reason
        return Mask(np.zeros(self._grammar.vocab_size, np.bool_))


class Grammars:
    """Compiler of grammars for a tokenizer and a model, which keeps the last ones. Threads may share it."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        """`tokenizer` as `runtime.tokenizer.Tokenizer`, or None."""
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, sorted(end_ids)
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """UsageError for a grammar that is none, that no text matches, or that is too large; SpecDecError for a
        tokenizer whose tokens are not known to stand for bytes.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compile(grammar)
                self._compiled[grammar] = found
                if len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._read_vocabulary()
        limits = LLParserLimits(
            initial_lexer_fuel=_MOST_LEXER_FUEL,
            max_items_in_row=_MOST_ITEMS_IN_ROW,
            step_max_items=_MOST_ITEMS,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(vocabulary, _written(grammar), log_level=0, limits=limits)
        except Exception as error:  # the GBNF converter's and llguidance's are derived from nothing else
            raise _refused(grammar, str(error)) from None
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        matcher.compute_bitmask()  # before forced bytes, which would be computed while other threads wait
        if matcher.is_error():
            raise _refused(grammar, "no text matches it")
        if len(matcher.compute_ff_bytes()) > _MOST_FORCED_BYTES:
            raise _refused(grammar, _ENDLESS)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return CompiledGrammar(matcher, self._vocab_size, vocabulary.eos_tokens)

    def prepare(self) -> None:
        """Read the vocabulary, for which other threads wait: 1 s for 128,000 tokens."""
        with self._lock:
            self._read_vocabulary()

    def special_tokens(self) -> dict[str, int]:
        """Tokens that stand for no text of a grammar, by name; SpecDecError as for a grammar."""
        with self._lock:
            vocabulary = self._read_vocabulary()
        added = self._tokenizer.added_tokens_decoder
        names = {token: str(self._tokenizer.convert_ids_to_tokens(token)) for token in added}
        return {name: token for token, name in names.items() if vocabulary.is_special_token(token)}

    def _read_vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            if self._tokenizer is None:
                raise SpecDecError(
                    "grammars need a tokenizer, and the engine has none", hint="name one", code="no_tokenizer"
                )
            try:
                tokenizer = self._tokenizer.backend_tokenizer
                if tokenizer.padding is not None or tokenizer.truncation is not None:
                    tokenizer = copy(tokenizer)
                    tokenizer.no_padding()
                    tokenizer.no_truncation()
                size = max(self._vocab_size, max(self._tokenizer.get_vocab().values()) + 1)
                self._vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._end_ids or None)
            except Exception as error:  # as above, and tokenizers that have no `tokenizers` behind them
                raise SpecDecError(
                    f"grammars cannot be used with this tokenizer, whose tokens are not known as bytes: {error}",
                    hint="leave the grammar out, or name a tokenizer that has a tokenizer.json",
                ) from None
        return self._vocabulary


def _written(grammar: Grammar) -> str:
    """llguidance's own form."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_schema":
            _check_references(json.loads(grammar.text))
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(
                f"start: CHOICE\nCHOICE: {choices}"
            )  # a rule would have an item for each
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(_with_characters(grammar.text)))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _with_characters(text: str) -> str:
    """A grammar in GBNF with the characters that it writes by number, which llguidance's converter reads wrongly."""
    if "::=" not in text:
        return text

    def character(found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3] or "0", 16)
        return chr(code) if 0x7F < code < 0x110000 and not 0xD800 <= code < 0xE000 else found[0]

    return re.sub(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|.)", character, text)


def _check_references(schema: Any) -> None:
    """Refuse an `$id` beside a `$ref` below the root: from 2019-09 on, as llguidance reads every schema, it is what the
    `$ref` is relative to, and before it means nothing.
    """
    if not isinstance(schema, dict) or "json-schema.org/draft/20" in str(schema.get("$schema")):
        return
    left = list(schema.values())
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str) and isinstance(value.get("$id"), str):
                raise ValueError(
                    f"an $id beside a $ref ({value['$ref']}), of which drafts differ; $schema names none since 2019-09"
                )
            left += [part for key, part in value.items() if key not in ("const", "enum", "default", "examples")]
        elif isinstance(value, list):
            left += value


def _refused(grammar: Grammar, why: str) -> UsageError:
    return UsageError(
        f"{grammar.kind} cannot be used: {_reason(why)}",
        hint="docs/structured-output.md has what is supported",
    )


def _reason(text: str) -> str:
    """The reason in one line, of a bounded length: of what `regex` says its last one, of others the first."""
    found = re.search("^error: (.+)$", text, re.MULTILINE)
    line = found[1] if found else text.replace("<non-verbose/>", "").strip().partition("\n")[0]
    return line if len(line) <= _MOST_REASON else f"{line[:_MOST_REASON]}..."
