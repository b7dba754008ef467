"""Output tokens by step: the kind of each output token, its text, and how many tokens came from each step.

All of it follows from the counts of each step (`per_step_drafted`, `per_step_accepted`) and the output's length,
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
    """One output token, its text, and its origin. `step` counts from 0."""

    text: str
    kind: TokenKind
    step: int
    is_forced: bool = False
    """True if the form of the output allowed no other."""


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last` of every request that has them (counted from 1), and the tokens they made."""

    first: int
    last: int
    num_steps: int
    num_tokens: int


def token_kinds(per_step_drafted: Seq[int], per_step_accepted: Seq[int], num_tokens: int) -> list[list[TokenKind]]:
    """The kinds of an output's `num_tokens` tokens, step by step.

    A step makes its accepted tokens and one of the target's own; the last may end among the accepted ones. Drafts of
    3, 0 and 2 tokens of which 1, 0 and 2 were accepted make [accepted, recovered], [plain], [accepted, accepted,
    bonus], and without the bonus token where `num_tokens` is 5.
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
    """Tokens of each step of each request, added up over requests for ranges of equally many steps."""
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
    """A piece for each output token; joined they are the output's text, or its ids where there is no tokenizer."""
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
    """Places in an output, from `first` on, of tokens that its form forced."""
    places: set[int] = set()
    for i in range(first, len(output)):
        if i not in places:
            num_forced = len(matcher.forced([*prompt, *output[:i]], []))
            places.update(range(i, min(i + num_forced, len(output))))
    return places


def all_pieces(tokenizer: Tokenizer | None, sequences: Seq[Sequence]) -> list[list[Piece]]:
    return [output_pieces(sequence, tokenizer) for sequence in sequences]


def token_texts(tokenizer: Tokenizer, tokens: list[int], text: str, before: Seq[int] = ()) -> list[str]:
    """Text that each token adds to `text`, the decoding of the tokens after those `before`, or the start of it.

    A character that several tokens make comes with the last of them. Special tokens add nothing.
    """
    added = texts_after(tokenizer, before)
    texts = list(map(added.add, tokens))
    texts[-1:] = [last + added.end() for last in texts[-1:]]
    pieces, start = [], 0
    for piece in texts:
        pieces.append(text[start : start + len(piece)])
        start += len(piece)
    return pieces
