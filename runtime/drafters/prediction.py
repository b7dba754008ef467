"""Drafts from a predicted output: the text that the user expects, such as a file of which a few lines will change.

The prediction is followed token by token from its start. Where the output differs from it, the output's last tokens are
searched in the prediction, and the occurrence nearest to the point where the two parted is followed. After a changed
line, most of the rest is as predicted.
"""

from dataclasses import dataclass

from runtime.core.request import Draft, Sequence
from runtime.drafters.lookup import cut_at_end_id

_SHORTEST, _LONGEST = 2, 8
"""Least number of the output's last tokens that must be found again in the prediction after the output left it, and the
number beyond which a longer match counts no more.
"""
_SHORTEST_COPY = 4
"""The same least number for a text of which parts may be copied."""
_WINDOW = 32
"""Number of tokens ahead within which a single token counts as found, right after the output left the prediction."""
_MAX_GUESSES = 2
"""Steps in a row that draft as if a single token had been replaced, though no match was found."""


@dataclass
class _Place:
    """Position of a request in the prediction: the expected next token, and the confidence in it."""

    next: int = 0
    num_seen: int = 0
    """Number of generated tokens that were compared."""
    num_matched: int = 0
    """Number of tokens in a row that were as predicted."""
    num_guesses: int = 0


class PredictionLookup:
    """Looks up a predicted output, for all requests that expect this output.

    With `is_whole` false the text is not a prediction, but a text of which the output may copy parts: drafts begin when
    the output has begun to copy, and no token counts as predicted.
    """

    def __init__(self, prediction: list[int], *, is_whole: bool = True) -> None:
        self.prediction, self._is_whole = prediction, is_whole
        self._shortest = _SHORTEST if is_whole else _SHORTEST_COPY
        self._places: dict[int, _Place] = {}
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(self._shortest, len(prediction) + 1):
            self._ends.setdefault(tuple(prediction[end - self._shortest : end]), []).append(end)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._follow(sequence, max_draft_len) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        self._places.pop(request_id, None)

    def _follow(self, sequence: Sequence, max_draft_len: int) -> Draft:
        place = self._places.setdefault(
            sequence.request.id, _Place(num_guesses=0 if self._is_whole else _MAX_GUESSES + 1)
        )
        self._move(place, sequence.output_tokens)
        if place.num_guesses > _MAX_GUESSES:
            return Draft([])
        draft_len = min(max_draft_len, sequence.max_draft_len)
        draft = self.prediction[place.next : place.next + draft_len]
        draft = cut_at_end_id(draft, sequence.request.end_ids)
        return Draft(draft, match_len=place.num_matched, num_predicted=len(draft) if self._is_whole else 0)

    def _move(self, place: _Place, output: list[int]) -> None:
        """Follow the new tokens through the prediction; if they differ, search where to continue."""
        has_left = False
        for token in output[place.num_seen :]:
            is_expected = place.next < len(self.prediction) and self.prediction[place.next] == token
            place.num_matched = place.num_matched + 1 if is_expected else 0
            has_left |= not is_expected
            place.next = min(place.next + 1, len(self.prediction))
        place.num_seen = len(output)
        if place.num_matched >= self._shortest:
            place.num_guesses = 0
        elif has_left or place.num_guesses:
            self._look_up(place, output)

    def _look_up(self, place: _Place, output: list[int]) -> None:
        found = [(self._match_len(end, output), end) for end in self._ends.get(tuple(output[-self._shortest :]), ())]
        if found:
            place.num_matched, place.next = max(found, key=lambda one: (one[0], -abs(one[1] - place.next)))
            place.num_guesses = 0
            return
        place.num_guesses += 1
        ahead = self.prediction[place.next : place.next + _WINDOW]
        if place.num_guesses == 1 and output[-1] in ahead:
            place.next += ahead.index(output[-1]) + 1

    def _match_len(self, end: int, output: list[int]) -> int:
        """Number of the output's last tokens that precede `end` in the prediction."""
        n = self._shortest
        while n < min(_LONGEST, end, len(output)) and self.prediction[end - n - 1] == output[-n - 1]:
            n += 1
        return n


class CopiedTexts:
    """Looks up texts of which outputs may copy parts: each request has a text of its own, or none."""

    def __init__(self) -> None:
        self._lookups: dict[int, PredictionLookup] = {}

    def add(self, request_id: int, tokens: list[int]) -> None:
        """Have this request look up in these tokens, until it is forgotten."""
        self._lookups[request_id] = PredictionLookup(tokens, is_whole=False)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        found = [self._lookups.get(sequence.request.id) for sequence in sequences]
        return [
            Draft([]) if lookup is None else lookup.propose([sequence], max_draft_len)[0]
            for lookup, sequence in zip(found, sequences, strict=True)
        ]

    def forget(self, request_id: int) -> None:
        self._lookups.pop(request_id, None)
