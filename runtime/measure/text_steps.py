"""Output tokens by step: the kind of each output token, its text, and the number of tokens from each step.

Everything follows from the counts of each step (`per_step_drafted`, `per_step_accepted`) and the output's length,
because only the last step can be cut short.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.grammar import Matcher
from runtime.core.request import Sequence
from runtime.text.text import sequence_text
from runtime.text.token_text import texts_after

TokenKind = Literal["accepted", "recovered", "bonus", "plain"]
TOKEN_KINDS: dict[TokenKind, str] = {
    "accepted": "drafted, and kept",
    "recovered": "the target's own in place of the first drafted token that was not kept",
    "bonus": "the target's own after a draft that was kept whole",
    "plain": "of a step without a draft",
}


@dataclass(frozen=True)
class Piece:
    """An output token, its text, and its origin. `step` counts from 0."""

    text: str
    kind: TokenKind
    step: int
    is_forced: bool = False
    """True if the output's grammar allowed no other token."""


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last` (counted from 1) of all requests that have them, and the tokens of these steps."""

    first: int
    last: int
    num_steps: int
    num_tokens: int


def token_kinds(per_step_drafted: Seq[int], per_step_accepted: Seq[int], num_tokens: int) -> list[list[TokenKind]]:
    """The kinds of an output's `num_tokens` tokens, step by step.

    A step gives its accepted tokens and a token of the target's own; the last step may end among the accepted tokens.
    Drafts of 3, 0 and 2 tokens, of which 1, 0 and 2 were accepted, give [accepted, recovered], [plain], [accepted,
    accepted, bonus]; if `num_tokens` is 5, the bonus token is missing.
    """
    kinds: list[list[TokenKind]] = []
    for num_drafted, num_accepted in zip(per_step_drafted, per_step_accepted, strict=True):
        own: TokenKind = "plain" if num_drafted == 0 else "bonus" if num_accepted == num_drafted else "recovered"
        step: list[TokenKind] = ["accepted"] * num_accepted
        kinds.append([*step, own])
    num_cut = sum(map(len, kinds)) - num_tokens
    assert 0 <= num_cut <= 1, f"{num_tokens} tokens do not come from these steps"
    if num_cut:
        kinds[-1].pop()
    return kinds


def tokens_over_time(steps: Seq[Seq[int]], max_ranges: int) -> list[StepRange]:
    """Numbers of steps and tokens of all requests, for at most `max_ranges` ranges of equally many steps (the last may
    be shorter). `steps` has the number of tokens of each step, by request.
    """
    longest = max(map(len, steps), default=0)
    width = max(1, -(-longest // max_ranges))
    ranges = []
    for start in range(0, longest, width):
        made = [tokens for request in steps for tokens in request[start : start + width]]
        ranges.append(StepRange(start + 1, min(start + width, longest), len(made), sum(made)))
    return ranges


def tokens_per_step(sequence: Sequence) -> list[int]:
    """Number of tokens of each step of a finished request."""
    return [len(step) for step in _kinds_of(sequence)]


def _kinds_of(sequence: Sequence) -> list[list[TokenKind]]:
    stats = sequence.stats
    return token_kinds(stats.per_step_drafted, stats.per_step_accepted, sequence.num_generated)


def output_pieces(sequence: Sequence, tokenizer: Tokenizer | None) -> list[Piece]:
    """A piece for each output token. Joined they are the output's text, or its ids if there is no tokenizer."""
    tokens = sequence.output_tokens
    if tokenizer is None:
        texts = [f" {token}" if i else str(token) for i, token in enumerate(tokens)]
    else:
        texts = token_texts(tokenizer, tokens, sequence_text(tokenizer, sequence) or "", sequence.request.prompt_tokens)
    kinds = [(kind, number) for number, step in enumerate(_kinds_of(sequence)) for kind in step]
    matcher = sequence.sampler.matcher
    forced = set() if matcher is None else forced_places(matcher, sequence.request.prompt_tokens, tokens)
    return [
        Piece(text, kind, number, i in forced)
        for i, (text, (kind, number)) in enumerate(zip(texts, kinds, strict=True))
    ]


def forced_places(matcher: Matcher, prompt: Seq[int], output: Seq[int], first: int = 0) -> set[int]:
    """Indices, from `first` on, of the output's tokens that the grammar of `matcher` forced."""
    places: set[int] = set()
    for i in range(first, len(output)):
        if i not in places:
            num_forced = len(matcher.forced([*prompt, *output[:i]], []))
            places.update(range(i, min(i + num_forced, len(output))))
    return places


def all_pieces(tokenizer: Tokenizer | None, sequences: Seq[Sequence]) -> list[list[Piece]]:
    return [output_pieces(sequence, tokenizer) for sequence in sequences]


def token_texts(tokenizer: Tokenizer, tokens: list[int], text: str, before: Seq[int] = ()) -> list[str]:
    """Text that each token adds to `text`, which is the decoding of the tokens after `before`, or the start of it. A
    character made by several tokens comes with the last of them. Special tokens add nothing.
    """
    added = texts_after(tokenizer, before)
    texts = list(map(added.add, tokens))
    texts[-1:] = [last + added.end() for last in texts[-1:]]
    pieces, start = [], 0
    for piece in texts:
        pieces.append(text[start : start + len(piece)])
        start += len(piece)
    return pieces
