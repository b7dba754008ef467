"""Promises of receipts, on the exact model of `scripts/campaigns`, whose engine opens within a millisecond.

Whatever was asked, drafted and found in a cache, and whoever was in the batch:

- an untouched receipt passes: by tokens, or by likelihood where a draft's probabilities took part in the draws
- a changed one does not, and is found at its place: another token, two tokens exchanged, one more, one less, another
  seed, temperature, penalty, budget, end id or reason of the end, unless every token would be the same
- a bad line is one sentence of its own, and the lines beside it are checked
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lookups import MAKE_DRAFTER
from strength import draws
from torch import Tensor

from runtime.checkpoint.config import BuildConfig
from runtime.core.batch import Row
from runtime.core.kv_cache import BlockManager
from runtime.core.params import SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.core.sampling import NoValidToken, Sampler
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.proof.checker import Checker
from runtime.proof.fingerprint import fingerprint_of
from runtime.proof.receipts import Read, read_receipts, read_row, receipt_of
from runtime.proof.records import Finding, Receipt, differences, relation_of
from runtime.proof.regress import read_old_answers
from runtime.text.trace_lines import Trace
from runtime.util import thread_turns
from runtime.util.errors import RequestError
from scripts.campaigns.oracle import CheckedEngine, ExactModel, has_ended

VOCAB_SIZE, MAX_DRAFT_LEN = 12, 4
MODELS = [ExactModel(1, VOCAB_SIZE), ExactModel(1, VOCAB_SIZE, num_before=3, is_recurrent=True)]
LOOPS = [orchestrator.generate, scheduler.generate]
DRAFTERS: list[Callable[[], Drafter] | None] = [None, *MAKE_DRAFTER.values()]


class CheckingEngine(CheckedEngine):
    """An engine for checks, whose rows have logits after many tokens: here the answers say whether they are right."""

    def step(self, rows: Seq[Row], *, by_copy: bool = False) -> list[Tensor]:
        return Engine.step(self, rows, by_copy=by_copy)


def engine_of(
    model: ExactModel, max_batch_size: int = 3, max_num_tokens: int = 512, kind: type[CheckedEngine] = CheckedEngine
) -> CheckedEngine:
    build = BuildConfig("none", max_batch_size, 60, 100 + MAX_DRAFT_LEN, MAX_DRAFT_LEN, 4, "draft_tokens_external")
    engine = kind(model, build, KVCacheConfig(), max_num_tokens)
    engine.config = replace(engine.config, batch_invariant=True)  # as a compiled engine's
    return engine


def checker_of(model: ExactModel, **settings: int) -> Checker:
    engine = engine_of(model, kind=CheckingEngine, **settings)

    def no_form(form: object) -> Any:
        raise AssertionError("there is none")

    return Checker(engine, None, fingerprint_of(engine, None), no_form)


def sampling_of(draw: random.Random) -> SamplingConfig:
    """Any sampling: half of all is greedy, and most has something beside the temperature."""
    return SamplingConfig(
        temperature=draw.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=draw.choice([0, 0, 5]),
        top_p=draw.choice([1.0, 0.8]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.3]),
        no_repeat_ngram_size=draw.choice([0, 0, 4]),
        bad_words=draw.choice([(), ((3,), (4, 5))]),
        random_seed=draw.randrange(2**63),
        penalize_prompt=draw.random() < 0.5,
        logit_bias=draw.choice([(), ((2, -1.5), (6, 0.5))]),
        min_tokens=draw.choice([0, 0, 6]),
        allowed_token_ids=draw.choice([None, None, (0, 1, 2, 5, 6, 7, 9, 10)]),
    )


def requests_of(draw: random.Random, num: int) -> list[Request]:
    """Prompts that share beginnings, `n` of some, ends in some."""
    beginning = draw.choices(range(VOCAB_SIZE), k=draw.randrange(1, 12))
    made: list[Request] = []
    while len(made) < num:
        prompt = (*beginning, *draw.choices(range(VOCAB_SIZE), k=draw.randrange(4)))
        ends = frozenset(draw.sample(range(VOCAB_SIZE), draw.choice([0, 1])))
        template = Request(0, prompt, draw.randrange(6, 30), ends, sampling=sampling_of(draw))
        made += [template.with_prompt(len(made) + i, prompt, i) for i in range(draw.choice([1, 1, 3]))]
    return made


def answered(model: ExactModel, number: int, drafter: Drafter | None, num: int = 6) -> list[Sequence]:
    """Finished sequences: of one of both loops, in a cache that is shared."""
    draw, finished = random.Random(number), dict[int, Sequence]()
    loop, engine = LOOPS[number % 2], engine_of(model)
    with_error: list[RequestError] = []
    try:
        for sequence, _ in loop(engine, requests_of(draw, num), drafter, MAX_DRAFT_LEN):
            if sequence.finish_reason is not None:
                finished[sequence.request.id] = sequence
    except RequestError as error:  # bans left a request no token: what the others came to counts
        with_error.append(error)
    return list(finished.values())


def reads_of(model: ExactModel, sequences: list[Sequence]) -> list[Read]:
    """Receipts, written and read."""
    fingerprint = fingerprint_of(engine_of(model), None)
    rows = [json.loads(receipt_of(one, fingerprint).line) for one in sequences]
    return [read_row(row, f"line {number}", {}) for number, row in enumerate(rows, 1)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(2 * len(DRAFTERS)))
def test_untouched_answers_are_exact(number: int) -> None:
    model, make = MODELS[number % 2], DRAFTERS[number // 2]
    sequences = answered(model, number, None if make is None else make())
    reads = reads_of(model, sequences)
    findings = list(checker_of(model, max_batch_size=1 + number % 4, max_num_tokens=5 + number).check(reads))
    assert reads and [one.verdict for one in findings] == ["exact"] * len(reads), findings
    assert {one.rule for one in findings} == {"tokens"}


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    """And once for a conversation, whose next prompt has the answer before in it."""
    model, prompt = MODELS[0], tuple(i % VOCAB_SIZE for i in range(40))
    template = Request(0, prompt, 12, sampling=SamplingConfig(temperature=1.0, random_seed=1))
    finished = list[Sequence]()

    def answer(requests: list[Request]) -> None:
        stepped = [one for one, _ in scheduler.generate(engine_of(model), requests)]
        finished.extend({one.request.id: one for one in stepped}.values())

    answer([template.with_prompt(i, prompt, i) for i in range(5)])
    answer([template.with_prompt(9, tuple(finished[0].tokens))])
    checker, num_computed = checker_of(model), 0
    step = checker.engine.step

    def counted(rows: Seq[Row], **how: Any) -> list[Tensor]:
        nonlocal num_computed
        num_computed += sum(len(row.tokens) for row in rows)
        return step(rows, **how)

    checker.engine.step = counted  # type: ignore[method-assign]
    assert [one.verdict for one in checker.check(reads_of(model, finished))] == ["exact"] * 6
    assert num_computed <= 40 + 6 * 12


def test_a_check_takes_room_from_a_generation_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation goes on afterwards, from its tokens; the fingerprint has room too."""
    monkeypatch.setattr(thread_turns, "_IDLE_S", 0.0)
    model, prompt = MODELS[0], tuple(i % VOCAB_SIZE for i in range(40))
    request = Request(0, prompt, 30)
    (expected,) = {id(one): one for one, _ in scheduler.generate(engine_of(model), [request])}.values()
    checker = checker_of(model)
    checker.engine._blocks = BlockManager(20, 4, reuse=True)  # 76 tokens
    steps = scheduler.generate(checker.engine, [request])
    sequence, _ = next(steps)
    assert fingerprint_of(checker.engine, None) == checker.fingerprint
    next(steps)
    assert [one.verdict for one in checker.check(reads_of(model, [expected] * 2))] == ["exact"] * 2
    for _ in steps:
        pass
    assert sequence.tokens == expected.tokens


def test_draws_by_a_drafts_probabilities_are_checked_by_likelihood() -> None:
    """And said so; another temperature makes the same answers unlikely, and a token that cannot be drawn is named."""
    model = MODELS[0]
    draft_engine = engine_of(ExactModel(2, VOCAB_SIZE, sharpness=2.0))
    drafter = DraftModel(draft_engine, VOCAB_SIZE, use_logits=True)
    sampling = SamplingConfig(temperature=1.0, top_k=0)
    requests = [Request(i, (1, 2, i), 60, sampling=replace(sampling, random_seed=i)) for i in range(8)]
    steps = scheduler.generate(engine_of(model), requests, drafter, MAX_DRAFT_LEN)
    reads = reads_of(model, [one for one, _ in steps if one.finish_reason is not None])
    receipts = [one.receipt for one in reads if one.receipt is not None]
    assert {one.drawn for one in receipts} == {"by_probabilities"}
    findings = list(checker_of(model).check(reads))
    assert [(one.verdict, one.rule) for one in findings] == [("likely", "likelihood")] * 8, findings
    colder = [Read("", replace(one, sampling=replace(one.sampling, temperature=0.3))) for one in receipts]
    assert {one.verdict for one in checker_of(model).check(colder)} == {"unlikely"}
    cut = [Read("", replace(one, sampling=replace(one.sampling, top_k=2))) for one in receipts]
    for finding in checker_of(model).check(cut):
        assert (finding.verdict, finding.probability, finding.rank) == ("wrong", 0, None)


def edits_of(receipt: Receipt, draw: random.Random) -> Iterator[Receipt]:
    """The receipt with one thing changed; by whoever also writes its digests anew."""
    output = list(receipt.output_ids or ())
    place = draw.randrange(len(output))
    other = draw.choice([token for token in range(VOCAB_SIZE) if token != output[place]])
    exchanged = list(output)
    if place + 1 < len(output):
        exchanged[place : place + 2] = reversed(exchanged[place : place + 2])
    ids = [[*output[:place], other, *output[place + 1 :]], exchanged, [*output, other], output[:-1]]
    for edited in ids:
        if edited != output:
            yield replace(receipt, output_ids=tuple(edited))
    sampling = receipt.sampling
    yield replace(receipt, sampling=replace(sampling, random_seed=sampling.random_seed ^ 1))
    yield replace(receipt, sampling=replace(sampling, temperature=0.0 if sampling.temperature else 1.0))
    yield replace(receipt, sampling=replace(sampling, repetition_penalty=1.7))
    yield replace(receipt, return_index=receipt.return_index + 1)
    yield replace(receipt, max_new_tokens=max(receipt.max_new_tokens - 2, 1))
    yield replace(receipt, end_ids=(output[place],))
    yield replace(receipt, prompt_ids=(*(receipt.prompt_ids or ()), 0))
    yield replace(receipt, finish_reason="length" if receipt.finish_reason != "length" else "end_id")


def own_output(model: ExactModel, request: Request) -> list[int]:
    """The model's own output, from the text alone: no engine, cache, batch or loop."""
    sampler = Sampler(request.sampling, request.prompt_tokens, request.return_index, None, request.end_ids)
    tokens = list(request.prompt_tokens)
    while True:
        tokens.append(sampler.choose(tokens, model.logits(tokens)[0]))
        if has_ended(request, tokens):
            return tokens[len(request.prompt_tokens) :]


def request_of(receipt: Receipt) -> Request:
    return Request(
        0,
        receipt.prompt_ids or (),
        receipt.max_new_tokens,
        frozenset(receipt.end_ids),
        sampling=receipt.sampling,
        return_index=receipt.return_index,
    )


@pytest.mark.parametrize("number", range(draws(8, 2)))
def test_a_changed_answer_is_found_at_its_place(number: int) -> None:
    model, draw = MODELS[0], random.Random(number)
    reads = reads_of(model, answered(model, number, None))
    edited = [edit for one in reads if one.receipt is not None for edit in edits_of(one.receipt, draw)]
    findings = list(checker_of(model).check(Read(str(i), one) for i, one in enumerate(edited)))
    num_found = 0
    for receipt, finding in zip(edited, findings, strict=True):
        told = list(receipt.output_ids or ())
        try:
            own = own_output(model, request_of(receipt))
        except NoValidToken as error:  # bans leave no token
            assert finding.verdict == "wrong" and finding.place == error.position - len(receipt.prompt_ids or ())
            continue
        if own == told:  # another seed that draws the same, or the reason of the end alone
            is_other_end = finding.reason is not None and "its receipt says" in finding.reason
            assert finding.verdict == ("wrong" if is_other_end else "exact"), (finding, receipt)
            continue
        num_found += 1
        pairs = itertools.zip_longest(own, told)
        expected = next(i for i, (a, b) in enumerate(pairs) if a != b)
        assert finding.verdict == "wrong" and finding.place == expected, (finding, receipt)
    assert num_found > len(edited) / 2


def test_a_bad_line_is_a_sentence_and_the_others_are_checked(tmp_path: Path) -> None:
    model = MODELS[0]
    fingerprint = fingerprint_of(engine_of(model), None)
    rows = [receipt_of(one, fingerprint).as_json() for one in answered(model, 0, None)]
    good = json.dumps(rows[0])

    def changed(**values: Any) -> str:
        row = {name: value for name, value in (rows[0] | values).items() if name != "digest"}
        return json.dumps(row | {"digest": ""})

    def written(**values: Any) -> str:
        return replace(read_row(rows[0], "", {}).receipt or Receipt(), **values).line.strip()  # type: ignore[call-arg]

    bad = {
        "is not JSON": good[: len(good) // 2],
        "has no receipt": '{"a": 1}',
        "has changed since it was written": changed(),
        "cannot read": changed(format_version=9),
        "unknown key": changed(more=1),
        "lacks the key": json.dumps({"fingerprint": {}, "format_version": 1}),
        "outside the vocabulary": written(output_ids=(1, VOCAB_SIZE)),
        "half of a surrogate pair": changed(name="\ud800"),
        "digests of token ids alone": written(prompt_ids=None, output_ids=None),
        "another model": written(fingerprint=replace(fingerprint, architecture="other")),
        "another tokenizer": written(fingerprint=replace(fingerprint, tokenizer="\x1b[2J" + 10_000 * "x")),
        "longer than the": written(prompt_ids=(1,) * 200),
    }
    path = tmp_path / "receipts.jsonl"
    path.write_text("\ufeff" + "".join(f"{good}\n{line}\n" for line in bad.values()), encoding="utf-8")
    findings = list(checker_of(model).check(read_receipts(path)))
    assert [one.verdict for one in findings[::2]] == ["exact"] * len(bad)
    for said, finding in zip(bad, findings[1::2], strict=True):
        assert not finding.passed and finding.reason is not None and said in finding.reason, (said, finding)
        assert finding.where in finding.reason and finding.reason.isprintable() and len(finding.reason) < 300
    old = list(read_old_answers(path, lambda row, where: Trace((), ())))
    assert [one.where for one in old] == [one.where for one in findings]
    assert {one.receipt for one in old[::2]} == {read_row(rows[0], "", {}).receipt}


def test_receipts_of_digests_are_checked_with_ids_from_elsewhere() -> None:
    model = MODELS[0]
    sequences = answered(model, 1, None)
    fingerprint = fingerprint_of(engine_of(model), None)
    receipts = [receipt_of(one, fingerprint, form="digests") for one in sequences]
    answers = {
        (one.prompt_digest, one.output_digest): (s.request.prompt_tokens, tuple(s.output_tokens))
        for one, s in zip(receipts, sequences, strict=True)
    }
    reads = [read_row(one.as_json(), "a line", answers) for one in receipts]
    findings: list[Finding] = list(checker_of(model).check(reads))
    assert findings and {one.verdict for one in findings} == {"exact"}


class Faulty(ExactModel):
    """One logit of the last bit is another."""

    def _logits(self, *states: Any) -> Tensor:
        logits = super()._logits(*states)
        logits[0, 0] = torch.nextafter(logits[0, 0], torch.tensor(9.0))
        return logits


def test_another_engine_is_told() -> None:
    """Other bits from the same weights are a fault, here in the last bit of a logit; other weights another engine."""
    model = MODELS[0]
    reads = reads_of(model, answered(model, 2, None))
    checker = checker_of(Faulty(model.seed, VOCAB_SIZE))
    findings = list(checker.check(reads))
    assert {(one.relation, one.rule) for one in findings} == {("faulty", "rounding")}
    assert all(one.passed for one in findings)  # it changes no token
    other = replace(checker.fingerprint, weights="other")
    others = [Read("", replace(one.receipt, fingerprint=other)) for one in reads if one.receipt is not None]
    assert {(one.relation, one.rule) for one in checker.check(others)} == {("other_engine", "likelihood")}
    short = engine_of(model)  # its requests have at most 34 tokens, of which 29 are fixed
    short.config = replace(short.config, build_config=replace(short.config.build_config, max_seq_len=34))
    theirs, ours = fingerprint_of(short, None), fingerprint_of(engine_of(model), None)
    assert relation_of(theirs, ours) == "other_machine" and "fixed tokens 29, here 48" in differences(theirs, ours)
