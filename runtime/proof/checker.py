"""Checks answers against an engine, at the speed of a prompt: an answer is one long draft, computed in one pass.

The engine gives the same bits for a token in a prompt and in a step. So at every position of an answer the check
computes the token that the engine would have chosen, by the request's own sampler (its seed's noise, penalties, the
grammar's mask), and finds the first token of the answer that differs. If bits may differ, an answer is checked within
rounding. If a drafter's probabilities took part in its draws, or another engine gave it, it is checked by likelihood.
A finding names its rule.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.grammar import CompiledGrammar
from runtime.core.limits import check_vocabulary
from runtime.core.params import Grammar
from runtime.core.request import Request, Sequence
from runtime.core.sampling import NoValidToken, choose_all
from runtime.core.stats import FinishReason
from runtime.core.thinking_budget import Thinking
from runtime.engine.engine import Engine
from runtime.loop.lossless.check import is_chosen_within, rounding_of
from runtime.proof.long_drafts import LongDraft, LongDrafts, in_groups
from runtime.proof.receipts import Read
from runtime.proof.records import Finding, Fingerprint, Receipt, Relation, Rule, differences, in_words, relation_of
from runtime.text.call_formats import named_reasoning_format
from runtime.text.text import StopWords
from runtime.text.thinking_tags import thinking_of
from runtime.util.errors import SpecDecError

MOST_DEVIATIONS = 4.5
"""Standard deviations below its expectation at which a sampled answer is unlikely, as 3 in a million true ones."""
LEAST_AGREEMENT = 0.8
"""A greedy answer is unlikely if a smaller share of its tokens are this engine's choices."""


class _Refused(Exception):
    """A receipt cannot be checked, for the reason in the sentence."""


@dataclass(kw_only=True)
class _Case(LongDraft):
    """An answer that is being checked."""

    read: Read
    receipt: Receipt
    relation: Relation
    rule: Rule
    end: int
    """Number of tokens after which the engine ends the output, or else the output's own number of tokens."""
    end_reason: FinishReason | None
    """Reason why the engine ends there; None if it would go on, and a further row gives its next token."""
    finding: Finding | None = None
    num_ties: int = 0
    logprob: float = 0.0
    expected: float = 0.0
    variance: float = 0.0
    num_agreeing: int = 0

    def found(self, finding: Finding) -> None:
        """Keep the finding of the first wrong token; later tokens are not looked at."""
        self.finding, self.is_over = finding, True


class Checker:
    """An opened engine that checks answers, in their order, several at a time. `compiled` compiles the grammars of
    outputs. All answers are checked by `rule`, or, if it is None, by the rule that fits each receipt.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        fingerprint: Fingerprint,
        compiled: Callable[[Grammar], CompiledGrammar],
        rule: Rule | None = None,
    ) -> None:
        self.engine, self.fingerprint = engine, fingerprint
        self._tokenizer, self._compiled, self._rule = tokenizer, compiled, rule

    def check(self, reads: Iterable[Read]) -> Iterator[Finding]:
        """A finding for each line that was read, in their order."""
        cases = map(self._prepare, reads)
        for group in in_groups(cases, self.engine, lambda one: one.num_rows if isinstance(one, _Case) else 0):
            LongDrafts(self.engine, self._judge).compute([one for one in group if isinstance(one, _Case)])
            for one in group:
                yield one if isinstance(one, Finding) else _finding_of(one)

    def _prepare(self, read: Read) -> _Case | Finding:
        """The case of a receipt, or a finding with the reason why it cannot be checked."""
        receipt = read.receipt
        relation = None if receipt is None else relation_of(receipt.fingerprint, self.fingerprint)
        name = None if receipt is None else receipt.name
        try:
            if receipt is None or relation is None:
                raise _Refused(read.problem or f"{read.where} has no receipt")
            return self._case(read, receipt, relation)
        except (_Refused, SpecDecError) as error:
            reason = error.message if isinstance(error, SpecDecError) else str(error)
            reason = reason if read.where in reason else f"{read.where} cannot be checked: {reason}"
            return Finding(where=read.where, name=name, verdict="not_checked", relation=relation, reason=reason)

    def _case(self, read: Read, receipt: Receipt, relation: Relation) -> _Case:
        if relation == "other_model":
            raise _Refused(f"{read.where} is of {_other_model(receipt.fingerprint, self.fingerprint)}")
        assert receipt.prompt_ids is not None and receipt.output_ids is not None
        output, vocab_size = receipt.output_ids, self.engine.config.vocab_size
        request = self.request(receipt)
        foreign = next((i for i in output if i >= vocab_size), None)
        if foreign is not None:
            raise _Refused(f"{read.where} has a token id outside the vocabulary of {vocab_size}: {foreign}")
        end, end_reason = _end_of(request, output)
        return _Case(
            request,
            output,
            end + (end_reason is None),
            read=read,
            receipt=receipt,
            relation=relation,
            rule=self._rule or _rule_of(receipt, relation, is_invariant=self.engine.config.batch_invariant),
            end=end,
            end_reason=end_reason,
        )

    def request(self, receipt: Receipt) -> Request:
        """The request that was answered; SpecDecError if this engine cannot answer such a request."""
        stop_check = None
        if receipt.stop_words:
            if self._tokenizer is None:
                raise SpecDecError("it has stop words, and the engine has no tokenizer")
            if not all(receipt.stop_words):
                raise SpecDecError("a stop word has no letters: ''")
            stop_check = StopWords(receipt.stop_words, self._tokenizer, receipt.sampling)
        request = Request(
            0,
            receipt.prompt_ids or (),
            receipt.max_new_tokens,
            frozenset(receipt.end_ids),
            stop_check,
            receipt.sampling,
            receipt.return_index,
            grammar=None if receipt.grammar is None else self._compiled(receipt.grammar),
            thinking=self._thinking(receipt),
            label=receipt.name,
        )
        check_vocabulary(request, vocab_size := self.engine.config.vocab_size)
        if (foreign := max(receipt.end_ids, default=0)) >= vocab_size:
            raise SpecDecError(f"end_ids has a token id outside the vocabulary of {vocab_size}: {foreign}")
        return request

    def _thinking(self, receipt: Receipt) -> Thinking | None:
        if receipt.thinking is None or (form := named_reasoning_format(receipt.thinking)) is None:
            return None
        if self._tokenizer is None:
            raise SpecDecError("it has a budget for thinking, and the engine has no tokenizer")
        return thinking_of(form, self._tokenizer)

    def _judge(self, cases: Seq[_Case], all_logits: Seq[Tensor]) -> None:
        """Judge the next rows of each case."""
        by_tokens = [i for i, case in enumerate(cases) if case.rule != "likelihood"]
        asked = [cases[i].positions(cases[i].num_judged, all_logits[i]) for i in by_tokens]
        for i, chosen in zip(by_tokens, choose_all(asked), strict=True):
            self._judge_tokens(cases[i], chosen, all_logits[i])
        for i, case in enumerate(cases):
            if case.rule == "likelihood":
                self._judge_likelihood(case, all_logits[i])

    def _judge_tokens(self, case: _Case, chosen: Iterator[int], logits: Tensor) -> None:
        place, first = case.num_judged, case.num_judged
        while case.finding is None and place < first + len(logits):
            try:
                token = next(chosen)
            except NoValidToken as error:
                case.found(
                    _finding_of(case, verdict="wrong", place=place, token=case.token_at(place), reason=error.message)
                )
                return
            if place >= case.end or token != case.output[place]:
                row = logits[place - first]
                if not (case.rule == "rounding" and self._is_tie(case, place, row, token)):
                    case.found(_wrong(case, place, row, token))
                    return
                case.num_ties += 1
                # The kernels choose no further than a token that is not the draft's.
                rest = logits[place - first + 1 :]
                chosen = choose_all([case.positions(place + 1, rest)])[0] if len(rest) else chosen
            place += 1

    def _is_tie(self, case: _Case, place: int, row: Tensor, token: int) -> bool:
        """True if rounding may decide between the answer's token and the engine's."""
        other = case.token_at(place)
        if other is None:
            return False
        rounding = rounding_of(self.engine.config, row)
        margin = case.margin(place, row, token, other)
        if margin is not None:
            return margin <= 2 * rounding  # each of the two may be off
        return is_chosen_within(case.sampler, case.prefix(place), row, other, rounding)

    def _judge_likelihood(self, case: _Case, logits: Tensor) -> None:
        for place, row in enumerate(logits, case.num_judged):
            prefix = case.prefix(place)
            try:
                probs = _probs(case, prefix, row)
            except NoValidToken as error:
                case.found(_finding_of(case, verdict="wrong", place=place, reason=error.message))
                return
            if place >= case.end or not probs[case.output[place]] > 0:
                case.found(_wrong(case, place, row, int(probs.argmax())))
                return
            token, logs = case.output[place], torch.log(probs.clamp_min(1e-300))
            mean = float((probs * logs).sum())
            case.logprob += float(logs[token])
            case.expected += mean
            case.variance += float((probs * (logs - mean) ** 2).sum())
            case.num_agreeing += int(probs.argmax()) == token


def _other_model(theirs: Fingerprint, ours: Fingerprint) -> str:
    if theirs.architecture != ours.architecture:
        return differences(theirs, ours)[0]
    return f"another tokenizer: {in_words(theirs.tokenizer)}, here {ours.tokenizer}"


def _rule_of(receipt: Receipt, relation: Relation, *, is_invariant: bool) -> Rule:
    if receipt.drawn == "by_probabilities" or relation == "other_engine":
        return "likelihood"
    is_exact = relation == "same" and is_invariant and receipt.fingerprint.batch_invariant
    return "tokens" if is_exact else "rounding"


def _end_of(request: Request, output: Seq[int]) -> tuple[int, FinishReason | None]:
    """Number of tokens after which the engine ends the output, and why; all and None if it would go on."""
    sequence = Sequence(request, list(request.prompt_tokens))
    for num_tokens, token in enumerate(output, 1):
        sequence.tokens.append(token)
        if (reason := sequence.reason_to_finish()) is not None:
            return num_tokens, reason
    return len(output), None


def _probs(case: _Case, prefix: list[int], row: Tensor) -> Tensor:
    """Probabilities [vocab] of the next token; for a greedy request, float64 from its scores."""
    if case.sampler.is_greedy:
        return case.sampler.scores(prefix, row).double().softmax(-1)
    return case.sampler.probs(prefix, row)


def _wrong(case: _Case, place: int, row: Tensor, token: int) -> Finding:
    """The finding that the answer's token at `place` is not the engine's `token`, or that the answer ends before it."""
    prefix, other = case.prefix(place), case.token_at(place)
    if other is None:
        return _finding_of(
            case, verdict="wrong", place=place, engine_token=token, reason="the answer ends where the engine goes on"
        )
    scores = case.sampler.scores(prefix, row)
    is_possible = bool(scores[other] > -math.inf)
    return _finding_of(
        case,
        verdict="wrong",
        place=place,
        token=other,
        engine_token=token,
        probability=float(_probs(case, prefix, row)[other]),
        rank=1 + int((scores > scores[other]).sum()) if is_possible else None,
        gap=case.margin(place, row, token, other),
        reason="the engine chooses another token" if is_possible else "the engine can never choose this token here",
    )


def _finding_of(case: _Case, **found: object) -> Finding:
    """A finding about a case: with the fields in `found`, or, without them, the result of its tokens and its end."""
    common = Finding(
        where=case.read.where,
        name=case.receipt.name,
        verdict="exact",
        rule=case.rule,
        relation=case.relation,
        num_tokens=len(case.output),
        num_ties=case.num_ties,
    )
    if found:
        return replace(common, **found)  # type: ignore[arg-type]
    if case.rule == "likelihood":
        common = _by_likelihood(case, common)
    if case.problem is not None:
        return replace(common, verdict="not_checked", reason=f"{case.read.where} cannot be checked: {case.problem}")
    if case.finding is not None:
        return replace(case.finding, agreement=common.agreement, deviations=common.deviations)
    wrong_end = _wrong_end(case)
    if wrong_end is not None:
        return replace(common, verdict="wrong", reason=wrong_end, place=case.end, token=case.token_at(case.end))
    if case.read.problem is not None:
        return replace(common, verdict="not_checked", reason=case.read.problem)
    return replace(common, verdict="within_rounding") if case.num_ties else common


def _by_likelihood(case: _Case, common: Finding) -> Finding:
    num_judged = max(min(case.num_judged, case.end), 1)
    agreement = case.num_agreeing / num_judged
    deviations = (case.logprob - case.expected) / math.sqrt(case.variance) if case.variance > 0 else 0.0
    is_likely = agreement >= LEAST_AGREEMENT if case.sampler.is_greedy else deviations >= -MOST_DEVIATIONS
    return replace(
        common,
        verdict="likely" if is_likely else "unlikely",
        agreement=agreement,
        deviations=None if case.sampler.is_greedy else deviations,
        reason=None if is_likely else "the answer is not what this engine gives, by its probabilities",
    )


def _wrong_end(case: _Case) -> str | None:
    """A sentence about the end of an answer whose tokens are right; None if the end is right too."""
    if case.end < len(case.output):
        return f"the answer goes on where the engine ends ({case.end_reason})"
    if case.end_reason != case.receipt.finish_reason:
        return f"the answer ends by {case.end_reason}, and its receipt says: {case.receipt.finish_reason}"
    return None
