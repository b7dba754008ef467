"""Several drafters: for each sequence the first draft that is found (`FirstOf`), or the draft that promises most
(`BestOf`).

In `BestOf`, lookups cost little, and all lookups run that may have the best draft (`Leads`). A lookup's draft is sent
as it is if its drafts with a match of that length have so far yielded more tokens per second than the other lookups'
drafts and than a model's. Otherwise the model drafts. A copy of the target verifies a lookup's tokens in its own steps,
several in one step: tokens that it would have drafted itself need not be computed one by one. Behind the model's last
token lookups continue, as if its tokens had been generated, as far as that pays.

The draft is chosen before a model draws anything, from tokens that were generated and drafted before: in each step the
model draws by other numbers (`Sampler.draft_uniform`). If a lookup has drawn its tokens, they are sent without
comparison, since their number may depend on the tokens themselves.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from runtime.core.request import Draft, Sequence
from runtime.drafters.acceptance_stats import MODEL_PRIOR, AcceptanceStats, Leads
from runtime.drafters.protocol import CompositeDrafter, Drafter, Suggest, ask, check_drafts, look_ahead, rank_of_match

_CONTEXT_STEP = 64
_LONGER = -1


class FirstOf(CompositeDrafter):
    """Asks each drafter for the sequences for which all drafters before it proposed nothing.

    So a drafter is not asked at every step, and may find several new tokens when it is asked: all of ours allow that.
    """

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = [Draft([])] * len(sequences)
        for member in self.members:
            empty = [i for i, draft in enumerate(drafts) if not draft.tokens]
            for i, draft in zip(empty, ask(member, [sequences[i] for i in empty], max_draft_len), strict=True):
                drafts[i] = draft
        return drafts

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        drafts = (look_ahead(member, sequence, drafted, max_draft_len) for member in self.members)
        return next((draft for draft in drafts if draft.tokens), Draft([]))


class LongestMatch(CompositeDrafter):
    """Asks every drafter, and takes for each sequence the draft that `rank_of_match` ranks highest: the draft with the
    longest match. Of equal matches the first drafter's is taken.

    A draft whose tokens were drawn from a distribution is taken whatever the other drafters found.
    """

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        proposed = [ask(member, sequences, max_draft_len) for member in self.members]
        return [max(drafts, key=rank_of_match) for drafts in zip(*proposed, strict=True)]


class AcceptsHints(Protocol):
    """Interface of a self-draft copy (`runtime.drafters.draft_target`). It is declared here because this module must
    not import an engine.
    """

    def ask(self, suggest: Suggest) -> None: ...

    @property
    def steps_per_token(self) -> float: ...


@dataclass(frozen=True)
class DraftingModel:
    """A drafter whose every token costs time; its drafts have at most `max_draft_len` tokens."""

    drafter: Drafter
    max_draft_len: int
    step_s: Callable[[int, int], float]
    """Function (batch size, context length) -> seconds for one more token of every draft."""
    copy: AcceptsHints | None = None
    """Self-draft copy among the members, if it verifies suggestions."""
    at_once: bool = False
    """True if a single step drafts all tokens."""

    @property
    def steps_per_token(self) -> float:
        if self.at_once:
            return 0.0
        return 1.0 if self.copy is None else self.copy.steps_per_token


@dataclass(frozen=True)
class _Found:
    """A lookup's draft for a sequence, and what a step is expected to yield with it: tokens, and tokens per second."""

    draft: Draft
    expected_tokens: float
    rate: float

    @property
    def rank(self) -> tuple[bool, bool, float]:
        is_drawn = self.draft.probs is not None
        return is_drawn, bool(self.draft.tokens), 0.0 if is_drawn else self.rate


class BestOf(CompositeDrafter):
    """Lookups and models. `iteration_s` is as in `AdaptiveDrafter`; the target's vocabulary has `vocab_size` ids."""

    def __init__(
        self,
        lookups: Iterable[Drafter],
        models: Iterable[DraftingModel],
        iteration_s: Callable[[int, int, float], float],
        vocab_size: int,
    ) -> None:
        self.models = list(models)
        super().__init__([*lookups, *(model.drafter for model in self.models)])
        self._iteration_s, self._vocab_size = iteration_s, vocab_size
        self._stats = AcceptanceStats()
        """Counts of the members by number, and of models' drafts that a lookup has lengthened (`_LONGER`)."""
        self._leads = Leads(len(self.lookups))
        self._found_now: dict[int, _Found] = {}
        """Drafts that lookups found in the current step, by request, while models draft."""
        for model in self.models:
            if model.copy is not None:
                model.copy.ask(self._suggest)

    @property
    def lookups(self) -> list[Drafter]:
        """The members before the models, which may have been wrapped."""
        return self.members[: len(self.members) - len(self.models)]

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        for sequence in sequences:
            self._stats.learn(sequence)
            self._leads.learn(sequence)
        found = self._look_up(sequences, max_draft_len)
        drafts = [one.draft for one in found]
        self._found_now = {sequence.request.id: one for sequence, one in zip(sequences, found, strict=True)}
        asked: list[list[int]] = [[] for _ in self.models]
        for i, (sequence, one) in enumerate(zip(sequences, found, strict=True)):
            number = self._better_model(sequence, one, len(sequences))
            if number is not None:
                asked[number].append(i)
        for number, (model, rows) in enumerate(zip(self.models, asked, strict=True), len(self.lookups)):
            longest = min(max_draft_len, model.max_draft_len)
            proposed = self.members[number].propose([sequences[i] for i in rows], longest) if rows else []
            for i, draft in zip(rows, proposed, strict=True):
                self._stats.remember(sequences[i], draft.tokens, MODEL_PRIOR, number)
                if draft.tokens:
                    drafts[i] = self._go_on(sequences[i], draft, model, len(sequences), max_draft_len)
        self._found_now = {}
        return drafts

    def forget(self, request_id: int) -> None:
        self._stats.forget(request_id)
        self._leads.forget(request_id)
        self._found_now.pop(request_id, None)  # of a step that failed
        super().forget(request_id)

    def _look_up(self, sequences: list[Sequence], max_draft_len: int) -> list[_Found]:
        """The best draft that the lookups found for each sequence; of equally good drafts, the first lookup's."""
        found: list[list[tuple[int, _Found]]] = [[] for _ in sequences]
        for number, lookup in enumerate(self.lookups):
            rows = [i for i, sequence in enumerate(sequences) if self._leads.looks(number, sequence)]
            drafts = lookup.propose([sequences[i] for i in rows], max_draft_len) if rows else []
            check_drafts(drafts, len(rows), max_draft_len, self._vocab_size)  # before a model reads them
            for i, draft in zip(rows, drafts, strict=True):
                found[i].append((number, self._weigh(sequences[i], draft, number, len(sequences))))
        best = []
        for sequence, ones in zip(sequences, found, strict=True):
            number, one = max(ones, key=lambda one: one[1].rank, default=(0, _Found(Draft([]), 1.0, 0.0)))
            self._leads.remember(sequence, number, [(number, one.draft) for number, one in ones])
            best.append(one)
        return best

    def _weigh(self, sequence: Sequence, draft: Draft, number: int, batch_size: int) -> _Found:
        """The draft with what it should yield, by how earlier drafts of this lookup with this match were accepted."""
        self._stats.remember(sequence, draft.tokens, draft.match_len, number)
        survivals = self._stats.survivals(sequence, draft.match_len, len(draft.tokens), number)
        expected_tokens = 1 + sum(survivals)
        rate = expected_tokens / self._iteration_s(batch_size, _context_len(sequence), len(draft.tokens))
        weighed = Draft(draft.tokens, draft.probs, draft.match_len, None if draft.probs is not None else survivals)
        return _Found(weighed, expected_tokens, rate)

    def _suggest(self, sequence: Sequence, drafted: list[int]) -> list[int]:
        """Tokens that the self-draft copy should verify behind the tokens that it has drafted: no more than are likely
        to be right, since a step with more tokens takes longer.
        """
        if not drafted:
            found = self._found_now[sequence.request.id]
            return found.draft.tokens[: math.ceil(found.expected_tokens - 1)]
        most = max(sequence.max_draft_len - len(drafted), 0)
        for number, lookup in enumerate(self.lookups):
            draft = look_ahead(lookup, sequence, drafted, most)
            if draft.tokens:
                expected_tokens = self._stats.expected_tokens(sequence, draft.match_len, len(draft.tokens), number)
                return draft.tokens[: math.ceil(expected_tokens - 1)]
        return []

    def _go_on(
        self, sequence: Sequence, draft: Draft, model: DraftingModel, batch_size: int, max_draft_len: int
    ) -> Draft:
        """The model's draft, followed by as many tokens as pay of the draft that a lookup finds behind it, by the
        longest match.

        Nothing is appended to tokens that were drawn from a distribution: the number of tokens sent would then depend
        on the drawn tokens.
        """
        num_drafted, most = len(draft.tokens), min(max_draft_len, sequence.max_draft_len)
        if draft.probs is not None or num_drafted >= most:
            return draft
        ahead = [look_ahead(lookup, sequence, draft.tokens, most - num_drafted) for lookup in self.lookups]
        behind = max(ahead, key=lambda one: one.match_len, default=Draft([]))
        if not behind.tokens:
            return draft
        longer = [*draft.tokens, *behind.tokens]
        self._stats.remember(sequence, longer, behind.match_len, _LONGER)
        expected, context_len = 1.0, _context_len(sequence)
        drafting_s = max(num_drafted * model.steps_per_token, 1.0) * model.step_s(batch_size, context_len)
        best_len, best_rate = num_drafted, 0.0
        survivals = self._stats.survivals(sequence, behind.match_len, len(longer), _LONGER)
        for n, survives in enumerate(survivals, 1):
            expected += survives
            rate = expected / (self._iteration_s(batch_size, context_len, n) + drafting_s)
            if n >= num_drafted and rate > best_rate:
                best_len, best_rate = n, rate
        return draft if best_len == num_drafted else Draft(longer[:best_len])

    def _better_model(self, sequence: Sequence, found: _Found, batch_size: int) -> int | None:
        """The model whose draft yields most tokens per second; None if the lookups' draft yields as many."""
        if not self.models or found.draft.probs is not None:
            return None
        rates = [self._model_rate(i, sequence, batch_size) for i in range(len(self.models))]
        best = max(rates)
        return None if found.draft.tokens and found.rate >= best else rates.index(best)

    def _model_rate(self, number: int, sequence: Sequence, batch_size: int) -> float:
        """Tokens per second that the model's draft is expected to yield. Drafting takes fewer steps if a copy verifies
        several suggested tokens in one step.
        """
        model, context_len = self.models[number], _context_len(sequence)
        num_drafted = min(model.max_draft_len, max(sequence.max_draft_len, 1))
        place = len(self.lookups) + number
        expected_tokens = self._stats.expected_tokens(sequence, MODEL_PRIOR, num_drafted, place)
        num_steps = max(num_drafted * model.steps_per_token, 1.0)
        seconds = self._iteration_s(batch_size, context_len, num_drafted)
        return expected_tokens / (seconds + num_steps * model.step_s(batch_size, context_len))


def _context_len(sequence: Sequence) -> int:
    """The context's length in whole 64 tokens, so that costs need not be looked up anew at every step."""
    return len(sequence.tokens) // _CONTEXT_STEP * _CONTEXT_STEP
