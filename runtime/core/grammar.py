"""Grammars of outputs: compiled for a vocabulary by llguidance, and the tokens that may come next in a text.

A grammar is part of the target's distribution, like a bias of minus infinity. The tokens that it allows at a position
depend on the tokens before and on nothing else, so drafts change no text. An end id is allowed if the text is complete,
and nowhere else. If nothing can follow, the output ends without an end id.

Time and memory are limited: for compiling by a grammar's symbols, states and bytes, and for each position by lexer
steps.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from threading import Lock, stack_size
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from runtime.core.form_prover import FormProver, FormRefused, FormsBusy
from runtime.core.forms import ENDLESS, MOST_FORCED_BYTES, check_forced_text, reason, start_of, written
from runtime.core.params import Grammar
from runtime.util.errors import SpecDecError, UsageError

if TYPE_CHECKING:  # a request without a grammar does not wait for it
    from llguidance import LLMatcher, LLTokenizer

_MOST_COMPILED, _MOST_COMPILED_BYTES, _MOST_REFUSED = 64, 256 << 20, 128
"""Numbers of compiled grammars and of their bytes that are kept, and number of refused grammars that are remembered."""
MOST_COMPILING, _MOST_SLOW = 32, 8
"""Grammars that threads may wait for at once: in all, and of those that take more than `_QUICK_S` of a core."""
_QUICK_S = 0.05
_MOST_LIVE_BYTES = 1 << 30
"""Bytes of all grammars of running requests."""
_STACK_BYTES = 16 << 20
_MOST_STEP_S = 0.05
"""Seconds of a core for a position's mask, 20 times the time for the grammars of real tools. Each token of an ambiguous
grammar is slower than the one before, even with few items.
"""
_STACK_LOCK = Lock()
_SLOW = "its steps take too long, as an ambiguous grammar's do"


class CompiledGrammar:
    """A grammar compiled for a vocabulary of `vocab_size` ids, from the notation `form`.

    It is kept as a matcher of `num_bytes` bytes at the start of a text; each output copies that matcher (`start`).
    """

    def __init__(
        self, form: Grammar, start: "LLMatcher", vocab_size: int, eos_tokens: Seq[int], num_bytes: int = 0
    ) -> None:
        self.form, self.vocab_size, self.num_bytes = form, vocab_size, num_bytes
        self.eos_tokens = [token for token in eos_tokens if token < vocab_size]
        self._start = start

    def start(self) -> "LLMatcher":
        return self._start.deep_copy()


class Mask:
    """Tokens that may come next. `indices` are the allowed or the forbidden tokens, whichever list is shorter."""

    def __init__(self, allowed: NDArray[np.bool_]) -> None:
        self.allowed = allowed
        num_allowed = int(np.count_nonzero(allowed))
        self.forbids = 2 * num_allowed > len(allowed)
        """True if `indices` are the forbidden tokens."""
        self.indices = np.flatnonzero(~allowed if self.forbids else allowed)


_workers: dict[str, ThreadPoolExecutor] = {}


def _start_workers() -> None:
    _workers.update(
        masks=ThreadPoolExecutor(1, "specdec-masks"),
        quick=ThreadPoolExecutor(1, "specdec-forms"),
        slow=ThreadPoolExecutor(1, "specdec-slow-forms"),
    )


_start_workers()
if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_start_workers)


@dataclass(frozen=True)
class _Ahead:
    """Masks after a prefix and a draft that a thread is computing."""

    prefix: Seq[int]
    num_tokens: int
    draft_tokens: list[int]
    masks: "Future[list[Mask | None]]"

    def is_of(self, prefix: Seq[int], draft_tokens: Seq[int]) -> bool:
        return self.prefix is prefix and self.num_tokens == len(prefix) and self.draft_tokens == list(draft_tokens)


class Matcher:
    """State of a request's output in its grammar. The prompt is no part of the text. Calls may pass any tokens, but are
    fastest if they continue the previous call's. One thread at a time may call it, even while `compute_ahead` is
    working.
    """

    def __init__(self, grammar: CompiledGrammar, num_prompt_tokens: int, end_ids: frozenset[int]) -> None:
        self.kind = grammar.form.kind
        """The parameter of `SamplingParams` that the grammar comes from; `lark` for tool calls."""
        self.error: str | None = None
        """Reason why nothing is allowed at the last position."""
        self._grammar, self._num_prompt_tokens = grammar, num_prompt_tokens
        self._end_ids, self._ends = end_ids, sorted(end_ids)
        self._matcher = grammar.start()
        self._tokens: list[int] = []
        self._is_slow = False
        self._last: tuple[list[int], bytes, bool, Mask] | None = None
        """The last position and its mask. The end of an output is looked for before its next token is chosen, so each
        mask is asked for twice.
        """
        self._ahead: _Ahead | None = None

    def compute_ahead(self, prefix: Seq[int], draft_tokens: Seq[int]) -> None:
        """Begin to compute the masks that `allowed` will soon be asked for, in a thread beside the target's step. These
        tokens must not change meanwhile. Most of the work does not hold the interpreter lock.
        """
        self._wait()
        masks = _workers["masks"].submit(self._allowed, prefix, draft_tokens)
        self._ahead = _Ahead(prefix, len(prefix), list(draft_tokens), masks)

    def allowed(self, prefix: Seq[int], draft_tokens: Seq[int]) -> list[Mask | None]:
        """Masks [vocab] after `prefix`, and after each token of a draft; None after the text's end or after a forbidden
        token. Those positions need no mask: the output has ended, or the target rejects the token.
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
                masks[0] = self._nothing(reason(self._matcher.get_error()))
            elif not self._matcher.is_stopped():
                masks[0] = self._nothing("the text so far does not match it")
            return masks
        for i, token in enumerate([*draft_tokens, None]):
            if self._matcher.is_error():  # which is stopped too
                masks[i] = self._nothing(reason(self._matcher.get_error()))
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
        """Number of a draft's tokens before the first that the grammar forbids."""
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
        """Tokens that the grammar forces after `prefix` and a draft; an empty list where it leaves a choice."""
        self._wait()
        if not self._follow([*prefix, *drafted]) or self._matcher.is_stopped() or self._matcher.is_accepting():
            return []
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def _wait(self) -> None:
        """Wait for masks that are being computed ahead and that nobody has asked for."""
        if self._ahead is not None:
            self._ahead.masks.exception()
            self._ahead = None

    def _follow(self, tokens: Seq[int]) -> bool:
        """Move to the position behind these tokens; False if the grammar forbids one of them."""
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
        """Context that notes if the computation in it was slow, after which no token is allowed. The thread's own
        processor time is measured: a busy machine ends no request.
        """
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
            return self._nothing(reason(self._matcher.get_error()))
        if self._last is not None and self._last[1:3] == (bits, is_whole):
            mask = self._last[-1]
        else:
            mask = self._read_mask(bits, is_whole=is_whole)
        is_only = not mask.forbids and len(mask.indices) == 1
        if is_only and len(self._matcher.compute_ff_bytes()) > MOST_FORCED_BYTES:
            return self._nothing(ENDLESS)
        self._last = list(self._tokens), bits, is_whole, mask
        return mask

    def _read_mask(self, bits: bytes, *, is_whole: bool) -> Mask:
        packed = np.frombuffer(bits, np.uint8)
        allowed = np.unpackbits(packed, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        allowed[self._grammar.eos_tokens] = False
        allowed[self._ends] = is_whole
        return Mask(allowed)

    def _nothing(self, reason: str) -> Mask:
        self.error = reason
        return Mask(np.zeros(self._grammar.vocab_size, np.bool_))


class Grammars:
    """Compiler of grammars for a tokenizer and a model. It keeps the last grammars, and threads may share it."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int], *, proves: bool = False) -> None:
        """`tokenizer` is a `runtime.checkpoint.tokenizer.Tokenizer`, or None. With `proves`, each grammar is first
        compiled within limits in a process of its own; without it a stranger's grammar can take all memory.
        """
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, sorted(end_ids)
        self._proves = proves
        self._prover: FormProver | None = None
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._live: WeakSet[CompiledGrammar] = WeakSet()
        self._num_compiling = self._num_slow = 0
        self.while_compiling: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context manager that a thread enters for as long as it waits for a grammar."""

    def close(self) -> None:
        """End the process in which grammars are compiled first."""
        with self._lock:
            if self._prover is not None:
                self._prover.close()

    def check(self, grammar: Grammar) -> None:
        """Raise the errors of `compiled` for a grammar that cannot be used; nothing is kept."""
        with self._lock:
            why = self._refused.get(grammar)
            vocabulary = self._read_vocabulary()
        try:
            if why is not None:
                raise FormRefused(why)
            if self._prover is None:
                _start_here(vocabulary, grammar)
            else:
                with self.while_compiling():
                    self._prover.prove(grammar.kind, grammar.text)
        except FormRefused as refused:
            raise _refused(grammar, str(refused)) from None

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar. UsageError if it is invalid, matches no text or is too large; FormsBusy if too many are
        being compiled; SpecDecError without a tokenizer, or if the bytes of its tokens are not known.
        """
        with self._lock:
            if (why := self._refused.get(grammar)) is not None:
                raise _refused(grammar, why)
            self._read_vocabulary()
            found, is_new = self._compiled.get(grammar), grammar not in self._compiled
            if found is None:
                if self._num_compiling >= MOST_COMPILING:
                    raise FormsBusy
                self._num_compiling += 1
                found = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
        if not found.done():
            with self.while_compiling():
                if is_new:
                    self._compile_for(found, grammar)
                found.exception()
        return found.result()

    def _compile_for(self, waiting: "Future[CompiledGrammar]", grammar: Grammar) -> None:
        """Compile a grammar for all threads that wait for it; keep it, or the reason why it cannot be used."""
        compiled: CompiledGrammar | None = None
        error: BaseException | None = None
        why: str | None = None
        try:
            compiled = self._compile(grammar)
        except FormRefused as refused:
            why = str(refused)
            error = _refused(grammar, why)
        except BaseException as other:
            error = other
        with self._lock:
            self._num_compiling -= 1
            if compiled is not None:
                self._live.add(compiled)
            else:
                self._compiled.pop(grammar, None)
            if why is not None:
                self._refused[grammar] = why
            self._forget_oldest()
        if compiled is not None:
            waiting.set_result(compiled)
        else:
            waiting.set_exception(error)

    def _forget_oldest(self) -> None:
        while len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        done = [one for one in self._compiled.values() if one.done() and one.exception() is None]
        num_bytes = sum(one.result().num_bytes for one in done)
        while len(self._compiled) > _MOST_COMPILED or (num_bytes > _MOST_COMPILED_BYTES and len(self._compiled) > 1):
            _, oldest = self._compiled.popitem(last=False)
            num_bytes -= oldest.result().num_bytes if oldest in done else 0

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._read_vocabulary()
        if self._prover is None:
            start = _start_here(vocabulary, grammar)
            return CompiledGrammar(grammar, start, self._vocab_size, vocabulary.eos_tokens)
        proof = self._prover.prove(grammar.kind, grammar.text)
        is_slow = proof.seconds > _QUICK_S
        with self._lock:
            if is_slow and self._num_slow >= _MOST_SLOW:
                raise FormsBusy
            if proof.num_bytes + sum(one.num_bytes for one in self._live) > _MOST_LIVE_BYTES:
                raise FormsBusy
            self._num_slow += is_slow
        try:
            start = _start_aside("slow" if is_slow else "quick", vocabulary, proof.written)
        finally:
            with self._lock:
                self._num_slow -= is_slow
        return CompiledGrammar(grammar, start, self._vocab_size, vocabulary.eos_tokens, proof.num_bytes)

    def prepare(self) -> None:
        """Read the vocabulary, for which other threads wait: 1 s for 128,000 tokens."""
        with self._lock:
            self._read_vocabulary()

    def special_tokens(self) -> dict[str, int]:
        """Special tokens by name. No text in a grammar stands for them. SpecDecError as in `compiled`."""
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
                    "grammars need a tokenizer, and the engine has none", hint="name a tokenizer", code="no_tokenizer"
                )
            try:
                tokenizer = self._tokenizer.backend_tokenizer
                if tokenizer.padding is not None or tokenizer.truncation is not None:
                    tokenizer = copy(tokenizer)
                    tokenizer.no_padding()
                    tokenizer.no_truncation()
                size = max(self._vocab_size, max(self._tokenizer.get_vocab().values()) + 1)
                state, end_ids = tokenizer.to_str(), self._end_ids or None
                if self._proves:  # which reads it at the same time
                    self._prover = FormProver(state, size, end_ids)
                    self._prover.start()
                self._vocabulary = LLTokenizer(state, n_vocab=size, eos_token=end_ids)
            except SpecDecError:
                raise
            except Exception as error:  # llguidance's, and of tokenizers that have no `tokenizers` behind them
                raise SpecDecError(
                    f"grammars cannot be used with this tokenizer, whose tokens are not known as bytes: {error}",
                    hint="leave the grammar out, or name a tokenizer that has a tokenizer.json",
                ) from None
        return self._vocabulary


def _start_here(vocabulary: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
    """The start of a text in a grammar, computed in this process; FormRefused for a grammar that cannot be used."""
    try:
        start = start_of(vocabulary, written(grammar.kind, grammar.text))
        check_forced_text(start)
    except Exception as error:  # the GBNF converter's and llguidance's are derived from nothing else
        raise FormRefused(str(error)) from None
    return start


def _start_aside(worker: str, vocabulary: "LLTokenizer", form: str) -> "LLMatcher":
    """The start of a grammar that is known to be valid, computed in a thread with the stack that this may need."""
    with _STACK_LOCK:
        before = stack_size(_STACK_BYTES)
        start = _workers[worker].submit(start_of, vocabulary, form)
        stack_size(before)
    return start.result()


def _refused(grammar: Grammar, why: str) -> UsageError:
    return UsageError(
        f"{grammar.name} cannot be used: {reason(why)}",
        hint="docs/structured-output.md lists the supported features",
        field=grammar.kind,
    )
