"""Drafts from old answers: the answer to the same prompt, or to a similar one, is a draft from the first token on.

An answer is found by the whole prompt, else by the prompt's last 64 tokens, else by its pieces: two fifths of them must
agree (`runtime.core.old_answers`). The model verifies the answer, so an outdated answer does no harm: with another
model or temperature fewer of its tokens are accepted. If the output departs from the answer, drafting continues where
the output's last tokens occur in the answer (`PredictionLookup`).

An owner's answers are found by the owner's requests alone (`Request.cache_salt`).
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import Protocol

from runtime.checkpoint.config import MAX_DRAFT_LEN
from runtime.core.old_answers import Answer, Marks
from runtime.core.request import Draft, Sequence
from runtime.drafters.acceptance_stats import MODEL_PRIOR, AcceptanceStats
from runtime.drafters.prediction import PredictionLookup
from runtime.drafters.protocol import CompositeDrafter, Drafter, ask, knows

MAX_TOKENS, MAX_OWNERS = 1_000_000, 4096
_COMMON = 4
"""Number of prompts beyond which a piece that they share is ignored, such as a piece of a chat template."""
_LEAST_SHARE = 0.4
"""Least share of a prompt's pieces, common pieces left out, that a similar prompt has too."""
_LEAST_PIECES = 4
"""Least number of pieces that a similar prompt shares."""
_SAME, _LIKE = 0, 1
"""Numbers under which statistics are kept: of answers to the same request, and of other answers."""

_FOLLOWED = 2
"""Tokens of an answer in a row in the output, after which the answer is followed."""

_Key = tuple[bytes, bytes]
"""Digests of a prompt and of the way in which its tokens are chosen."""


class AnswerDisk(Protocol):
    """Answers on disk, from earlier processes and from other processes."""

    def read(self, owner: str | None, after: int) -> tuple[list[Answer], int]:
        """Answers that were written after number `after`, oldest first, and the number of the last."""

    def write(self, owner: str | None, answer: Answer) -> None:
        """Write an answer later; it replaces an answer with the same prompt and way."""


class _Shelf:
    """The answers of one owner, by their marks."""

    def __init__(self) -> None:
        self.last_read = 0
        """Number of the last answer that was read from disk."""
        self._answers: dict[bytes, dict[bytes, Answer]] = {}
        """Answers by prompt and way, the most recent last."""
        self._prompts: dict[bytes, dict[bytes, None]] = {}
        """Prompts by mark: by their end, or by a piece."""

    @property
    def keys(self) -> list[_Key]:
        return [(prompt, way) for prompt, answers in self._answers.items() for way in answers]

    def get(self, key: _Key) -> Answer | None:
        return self._answers.get(key[0], {}).get(key[1])

    def put(self, answer: Answer) -> None:
        marks = answer.marks
        if marks.prompt not in self._answers:
            for mark in _ends_and_pieces(marks):
                self._prompts.setdefault(mark, {})[marks.prompt] = None
        self._answers.setdefault(marks.prompt, {})[marks.way] = answer

    def remove(self, answer: Answer) -> None:
        marks = answer.marks
        del self._answers[marks.prompt][marks.way]
        if self._answers[marks.prompt]:
            return
        del self._answers[marks.prompt]
        for mark in _ends_and_pieces(marks):
            del self._prompts[mark][marks.prompt]
            if not self._prompts[mark]:
                del self._prompts[mark]

    def find(self, marks: Marks) -> Answer | None:
        """The answer to this prompt, else to a prompt with the same end, else to a similar prompt. Among several, the
        answer whose tokens were chosen in the same way, else the last.
        """
        prompt: bytes | None = marks.prompt
        if prompt not in self._answers:
            ends = self._prompts.get(marks.tail)
            prompt = next(reversed(ends)) if ends else self._prompt_like(marks)
        answers = self._answers.get(prompt) if prompt is not None else None
        return None if answers is None else answers.get(marks.way) or next(reversed(answers.values()))

    def _prompt_like(self, marks: Marks) -> bytes | None:
        """The prompt that shares most pieces with the marks, not counting pieces that more than four prompts have; None
        if it shares too few.
        """
        shared, num_telling = Counter[bytes](), 0
        for piece in marks.each_piece():
            prompts = self._prompts.get(piece, {})
            if len(prompts) <= _COMMON:
                num_telling += 1
                shared.update(prompts.keys())
        prompt, num_shared = max(shared.items(), key=lambda one: one[1], default=(None, 0))
        return prompt if num_shared >= max(_LEAST_SHARE * num_telling, _LEAST_PIECES) else None


def _ends_and_pieces(marks: Marks) -> list[bytes]:
    """The mark of a prompt's end (16 bytes), if there is one, and the marks of its pieces (8 bytes each)."""
    return [*filter(None, [marks.tail]), *marks.each_piece()]


def _key_of(answer: Answer) -> _Key:
    return answer.marks.prompt, answer.marks.way


class Answers:
    """The answers of all owners, at most `max_tokens` tokens in all: the least recently used are removed first. With a
    `disk` they outlive the process, and answers of other processes are found.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, disk: AnswerDisk | None = None) -> None:
        self.max_tokens, self._disk = max_tokens, disk
        self.num_tokens = 0
        self._shelves = OrderedDict[str | None, _Shelf]()
        """Shelves of the owners that asked most recently."""
        self._oldest = OrderedDict[tuple[str | None, _Key], Answer]()

    def clear(self) -> None:
        """Forget all answers of this process."""
        self.num_tokens = 0
        self._shelves.clear()
        self._oldest.clear()

    def find(self, owner: str | None, marks: Marks) -> Answer | None:
        """The owner's answer that fits these marks best; None if no answer fits."""
        shelf = self._shelf(owner)
        if self._disk is not None:
            written, shelf.last_read = self._disk.read(owner, shelf.last_read)
            for one in written:
                self._put(owner, one)
        answer = shelf.find(marks)
        if answer is not None:
            self._oldest.move_to_end((owner, _key_of(answer)))
        return answer

    def add(self, owner: str | None, answer: Answer) -> None:
        """Keep an answer, unless the kept answer is a continuation of it."""
        before = self._shelf(owner).get(_key_of(answer))
        if before is not None and before.tokens.startswith(answer.tokens):
            answer = before
        self._put(owner, answer)
        if self._disk is not None:
            self._disk.write(owner, answer)

    def _shelf(self, owner: str | None) -> _Shelf:
        """The owner's shelf; the least recently used shelf makes room for a new one."""
        if owner not in self._shelves:
            if len(self._shelves) >= MAX_OWNERS:
                first = next(iter(self._shelves))
                for key in self._shelves[first].keys:
                    self._remove(first, key)
                del self._shelves[first]
            self._shelves[owner] = _Shelf()
        self._shelves.move_to_end(owner)
        return self._shelves[owner]

    def _put(self, owner: str | None, answer: Answer) -> None:
        if answer.num_tokens > self.max_tokens:
            return
        key = _key_of(answer)
        self._remove(owner, key)
        self._shelf(owner).put(answer)
        self._oldest[owner, key] = answer
        self.num_tokens += answer.num_tokens
        while self.num_tokens > self.max_tokens:
            self._remove(*next(iter(self._oldest)))

    def _remove(self, owner: str | None, key: _Key) -> None:
        answer = self._oldest.pop((owner, key), None)
        if answer is not None:
            self._shelves[owner].remove(answer)
            self.num_tokens -= answer.num_tokens


@dataclass
class _Followed:
    """A request, and how far it has followed an old answer; `lookup` is None if no answer was found."""

    sequence: Sequence
    marks: Marks
    lookup: PredictionLookup | None
    source: int
    draft: Draft = field(default_factory=lambda: Draft([]))
    num_tokens: int = -1
    """Number of tokens of the sequence that the draft continues."""

    def look_up(self, sequence: Sequence) -> Draft:
        """The tokens of the answer that come next for the sequence."""
        if self.lookup is not None and self.num_tokens != len(sequence.tokens):
            (draft,) = self.lookup.propose([sequence], MAX_DRAFT_LEN)
            is_whole = self.source == _SAME and draft.match_len == sequence.num_generated
            self.draft = Draft(draft.tokens, match_len=MODEL_PRIOR if is_whole else draft.match_len)
            self.num_tokens = len(sequence.tokens)
        return self.draft


class AnswerLookup:
    """Drafts old answers, and keeps the answers of requests when they end."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._followed: dict[int, _Followed] = {}
        self._stats = AcceptanceStats()

    def knows(self, sequence: Sequence) -> bool:
        """True if an old answer has tokens that come next."""
        followed = self._followed.get(sequence.request.id) or self._begin(sequence)
        return bool(followed.look_up(sequence).tokens)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._propose(sequence, max_draft_len) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        self._stats.forget(request_id)
        followed = self._followed.pop(request_id, None)
        if followed is not None and followed.sequence.error is None:
            answer = Answer.of(followed.sequence, followed.marks)
            if answer is not None:
                self.answers.add(followed.sequence.request.cache_salt, answer)

    def _begin(self, sequence: Sequence) -> _Followed:
        request = sequence.request
        marks = Marks.of(request)
        answer = self.answers.find(request.cache_salt, marks)
        is_same = answer is not None and _key_of(answer) == (marks.prompt, marks.way)
        lookup = None if answer is None else PredictionLookup(answer.ids())
        followed = _Followed(sequence, marks, lookup, _SAME if is_same else _LIKE)
        self._followed[request.id] = followed
        return followed

    def _propose(self, sequence: Sequence, max_draft_len: int) -> Draft:
        if not self.knows(sequence):
            return Draft([])
        followed = self._followed[sequence.request.id]
        draft = followed.look_up(sequence).cut(min(max_draft_len, sequence.max_draft_len))
        self._stats.learn(sequence)
        self._stats.remember(sequence, draft.tokens, draft.match_len, followed.source)
        survivals = self._stats.survivals(sequence, draft.match_len, len(draft.tokens), followed.source)
        return replace(draft, survivals=survivals)


class AnswersFirst(CompositeDrafter):
    """Old answers for sequences that follow one, and another drafter for other sequences. While fewer than two tokens
    in a row are the answer's, its draft is sent only if the other drafter finds nothing.
    """

    def __init__(self, first: Drafter, others: Drafter) -> None:
        super().__init__([first, others])

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        first, others = self.members
        known = [i for i, sequence in enumerate(sequences) if knows(first, sequence)]
        if not known:
            return others.propose(sequences, max_draft_len)
        drafts = [Draft([])] * len(sequences)
        for i, draft in zip(known, ask(first, [sequences[i] for i in known], max_draft_len), strict=True):
            drafts[i] = draft
        rest = [i for i, draft in enumerate(drafts) if not draft.tokens or draft.match_len < _FOLLOWED]
        for i, draft in zip(rest, ask(others, [sequences[i] for i in rest], max_draft_len), strict=True):
            drafts[i] = draft if draft.tokens else drafts[i]
        return drafts
