"""Budgets for thinking: how many tokens a model may think before the end of its thinking is forced.

Like a grammar, the rule is part of the target's distribution: which token is forced or forbidden at a position depends
on the output's tokens before and on nothing else, so drafts change no text. For example, with a budget of 3 and the end
tag `</think>` as tokens 7 and 8, the output of a prompt that has opened thinking is at most `a b c 7 8`, then the
answer.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Thinking:
    """Tags of a model's thinking, as they appear in the texts that `piece` gives for each token."""

    name: str
    """Name of the format of reasoning."""
    open: str
    closes: tuple[str, ...]
    """Texts that end thinking: the first that appears ends it."""
    end_tokens: tuple[int, ...]
    """Tokens that are forced once the budget is spent."""
    again: tuple[tuple[int, ...], int] | None
    """Tokens before a token that would open thinking again, and this token; None if no single token can do that."""
    piece: Callable[[int], str] = field(compare=False)
    """Text of a token, with a character for each of its bytes."""
    is_open_after: Callable[[Seq[int]], bool] = field(compare=False)
    """True for a prompt that has opened thinking, so that the output begins with it."""

    @cached_property
    def ends(self) -> Callable[[int], NDArray[np.int8]]:
        """Function from a number of ids to `bytes_missing` of each of these tokens, computed once."""
        return cache(lambda num_ids: np.array([bytes_missing(self.piece(i)) for i in range(num_ids)], np.int8))


def bytes_missing(piece: str) -> int:
    """Number of bytes that the last character of a token lacks. For a token that consists of a character's later bytes,
    their number, negative.
    """
    later = next((n for n, one in enumerate(reversed(piece)) if not 0x80 <= ord(one) < 0xC0), len(piece))
    if later == len(piece):
        return -later
    first = ord(piece[-1 - later])
    length = 4 if 0xF0 <= first < 0xF8 else 3 if 0xE0 <= first < 0xF0 else 2 if 0xC0 <= first < 0xE0 else 1
    return max(length - 1 - later, 0)


class Rule(NamedTuple):
    """Rule for the token at a position; None in a field stands for no such rule."""

    forced: int | None = None
    """Token that must come."""
    forbidden: int | None = None
    """Token that may not come."""
    unfinished: NDArray[np.bool_] | None = None
    """Ids of tokens that may not come, because a character that they begin or continue would end too late."""


@dataclass(frozen=True)
class _State:
    """State of an output: whether it is thinking, and the number of tokens that it has thought."""

    is_open: bool
    num_thought: int = 0
    has_closed: bool = False
    text: str = ""
    """End of the text, in which a tag may have begun."""
    last: tuple[int, ...] = ()
    """The last tokens since thinking was opened or closed."""
    num_forced: int = 0
    """Tokens of the forced end so far."""
    missing: int = 0
    """Bytes that the last character lacks."""


class ThinkingBudget:
    """The budget of one output. Calls may pass any tokens, but are fastest if they go on from the previous ones."""

    def __init__(self, thinking: Thinking, budget: int, prompt: Seq[int], vocab_size: int | None = None) -> None:
        """`vocab_size` is given if the output has a grammar, and is its number of ids. A grammar allows no tag in the
        middle of a character, so the end of thinking then waits for the character's last byte. None without a grammar.
        """
        self._thinking, self._budget, self._start = thinking, budget, len(prompt)
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._states = [_State(thinking.is_open_after(prompt))]
        self._longest_tag = max(map(len, (thinking.open, *thinking.closes)))
        self._num_last = max(len(thinking.end_tokens), len(thinking.again[0]) if thinking.again else 0)

    def rules(self, prefix: Seq[int], draft_tokens: Seq[int]) -> list[Rule]:
        """The rule after `prefix`, which includes the prompt, and after each token of a draft that follows it."""
        first = len(prefix) - self._start
        self._follow([*prefix[self._start :], *draft_tokens])
        return [self._rule(state) for state in self._states[first : first + len(draft_tokens) + 1]]

    def num_legal(self, prefix: Seq[int], draft_tokens: Seq[int]) -> int:
        """Number of a draft's tokens before the first that is forbidden or is not the forced token."""
        for i, (token, rule) in enumerate(zip(draft_tokens, self.rules(prefix, draft_tokens), strict=False)):
            is_late = rule.unfinished is not None and token < len(rule.unfinished) and rule.unfinished[token]
            if is_late or rule.forbidden == token or rule.forced not in (None, token):
                return i
        return len(draft_tokens)

    def forced(self, prefix: Seq[int], drafted: Seq[int]) -> list[int]:
        """The tokens that must follow `prefix` and a draft: the rest of the end tag, or none."""
        self.rules(prefix, drafted)
        state = self._states[len(prefix) - self._start + len(drafted)]
        return list(self._thinking.end_tokens[self._place(state) :]) if self._is_forcing(state) else []

    def _follow(self, output: list[int]) -> None:
        num_kept = len(self._tokens)
        while self._tokens[:num_kept] != output[:num_kept]:  # by a draft's length at most
            num_kept -= 1
        del self._tokens[num_kept:], self._states[num_kept + 1 :]
        for token in output[num_kept:]:
            self._states.append(self._after(self._states[-1], token))
            self._tokens.append(token)

    def _is_forcing(self, state: _State) -> bool:
        return state.is_open and state.num_thought >= self._budget

    def _place(self, state: _State) -> int:
        """Number of tokens of the end tag that are there already, whether forced or begun by the model itself."""
        end, last = self._thinking.end_tokens, state.last
        if state.num_forced:
            return state.num_forced
        return next(n for n in range(min(len(end) - 1, len(last)), -1, -1) if last[len(last) - n :] == end[:n])

    def _rule(self, state: _State) -> Rule:
        if self._is_forcing(state):
            return Rule(self._thinking.end_tokens[self._place(state)])
        if self._vocab_size is not None and state.is_open and (left := self._budget - state.num_thought) <= 3:
            ends = self._thinking.ends(self._vocab_size)
            return Rule(unfinished=np.where(ends < 0, state.missing + ends, ends) >= left)
        again = self._thinking.again
        is_spent = state.has_closed and not state.is_open and state.num_thought >= self._budget
        if is_spent and again is not None and state.last[len(state.last) - len(again[0]) :] == again[0]:
            return Rule(forbidden=again[1])
        return Rule()

    def _after(self, state: _State, token: int) -> _State:
        end = self._thinking.end_tokens
        if self._is_forcing(state) and token == end[place := self._place(state)]:
            if place + 1 == len(end):
                return _State(False, state.num_thought, has_closed=True, last=end)
            return replace(state, num_forced=place + 1)
        piece = self._thinking.piece(token)
        missing = bytes_missing(piece)
        text, is_open, has_turned = state.text + piece, state.is_open, False
        while (found := self._first_tag(text, is_open=is_open)) is not None:
            start, tag = found
            is_kept = is_open and self._thinking.open.startswith(tag)  # as gpt-oss's `<|channel|>`
            text, is_open, has_turned = text[start + (0 if is_kept else len(tag)) :], not is_open, True
        return _State(
            is_open,
            state.num_thought + (state.is_open and is_open),
            state.has_closed or (state.is_open and not is_open),
            text[max(len(text) - self._longest_tag + 1, 0) :],
            () if has_turned else (*state.last, token)[-self._num_last :],
            missing=max(state.missing + missing, 0) if missing < 0 else missing,
        )

    def _first_tag(self, text: str, *, is_open: bool) -> tuple[int, str] | None:
        """The first tag that turns thinking on or off, and its position; None without a tag."""
        tags = self._thinking.closes if is_open else (self._thinking.open,)
        return min(((place, tag) for tag in tags if (place := text.find(tag)) >= 0), default=None)
