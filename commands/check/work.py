"""Work of `check`: reads receipts, checks them in groups, and shows the findings."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import typer
from markupsafe import Markup
from rich.table import Table

from commands.check.document import CheckDocument, CheckTotal
from commands.check.flags import CheckOptions
from commands.options.engine_choice import EngineChoice
from commands.options.sessions import engines_made, open_engine
from commands.output.documents.records import measured_head
from commands.output.documents.settings import EngineRecord
from commands.output.html.page import page, with_bits, write_page
from commands.output.output import Output, number
from runtime.llm import LLM
from runtime.proof.receipts import Answers, Read, lines_of, num_lines, read_receipts
from runtime.proof.records import (
    Finding,
    Fingerprint,
    Receipt,
    Relation,
    Rule,
    Verdict,
    differences,
    ids_digest,
    in_words,
)
from runtime.text.text import text_or_ids
from runtime.text.traces import read_traces
from runtime.util.errors import SpecDecError

_MOST_SHOWN, _MOST_IN_PAGE, _MOST_IN_DOCUMENT = 20, 200, 10_000
_TOLD: dict[Relation, str] = {
    "other_machine": "bits differ, so these answers are checked within rounding",
    "faulty": "the same weights, precision, version and processor give other bits here: one of the two is faulty",
    "other_engine": "another engine of the model: its answers are checked by likelihood",
}
_RULES: dict[Rule, str] = {"tokens": "by tokens", "rounding": "within rounding", "likelihood": "by likelihood"}


@dataclass
class Checked:
    """Counts of a check, and the answers that did not pass: wrong, unlikely, or not checked."""

    fingerprint: Fingerprint
    """Fingerprint of this engine."""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    relations: Counter[Relation] = field(default_factory=Counter)
    rules: Counter[Rule] = field(default_factory=Counter)
    num_tokens: int = 0
    wall_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    shown: list[tuple[Finding, Receipt | None]] = field(default_factory=list)
    """The findings that the page shows, the first 200, with their receipts."""
    num_left_out: int = 0
    differences: dict[Relation, list[str]] = field(default_factory=dict)
    """Differences, by relation, between this engine and the engine of the first receipt that shows a difference."""

    def add(self, finding: Finding, read: Read) -> None:
        self.verdicts[finding.verdict] += 1
        if finding.relation is not None:
            self.relations[finding.relation] += 1
            if read.receipt is not None and not self.differences.get(finding.relation):
                self.differences[finding.relation] = differences(read.receipt.fingerprint, self.fingerprint)
        if finding.rule is not None:
            self.rules[finding.rule] += 1
        self.num_tokens += finding.num_tokens
        if finding.passed:
            return
        if len(self.shown) < _MOST_IN_PAGE:
            self.shown.append((finding, read.receipt))
        if len(self.findings) < _MOST_IN_DOCUMENT:
            self.findings.append(finding)
        else:
            self.num_left_out += 1

    @property
    def num_answers(self) -> int:
        return self.verdicts.total()

    def has_passed(self, *, allow_other_engine: bool) -> bool:
        is_other = self.relations["faulty"] or (self.relations["other_engine"] and not allow_other_engine)
        return not (is_other or self.findings)


def check_receipts(options: CheckOptions, choice: EngineChoice, output: Output) -> None:
    """Check receipts, print and write the findings; exits with 1 unless all answers pass. SpecDecError if the files
    have no receipt, before an engine is built or opened.
    """
    if all(next(lines_of(path), None) is None for path in options.receipts):
        raise SpecDecError(
            f"there is no receipt in: {options.receipts[0]}", hint="`run --receipts FILE` writes receipts"
        )
    with engines_made(choice, output) as made, open_engine(made) as llm:
        checked = _check(llm, options, output)
        document = _document(llm, options, checked)
        _show(document, checked, output)
        if options.report is not None:
            write_page(options.report, check_page(document, checked.shown, llm), output)
    output.document(document.as_json())
    if not document.passed:
        raise typer.Exit(1)


def _check(llm: LLM, options: CheckOptions, output: Output) -> Checked:
    answers = {} if options.answers is None else _answers(options.answers, llm)
    checked, checker = Checked(llm.fingerprint), llm.checker(options.rule)
    total = sum(map(num_lines, options.receipts))
    reads: list[Read] = []  # receipts that were given to the checker, and have no finding yet

    def on_their_way() -> Iterator[Read]:
        for read in chain.from_iterable(read_receipts(path, answers) for path in options.receipts):
            reads.append(read)
            yield read

    start = time.perf_counter()
    with output.progress("checking", total) as advance:
        for finding in checker.check(on_their_way()):
            checked.add(finding, reads.pop(0))
            wrong = sum(checked.verdicts[one] for one in ("wrong", "unlikely", "not_checked"))
            advance(1, f"{wrong:,} wrong" if wrong else "")
    checked.wall_s = time.perf_counter() - start
    return checked


def _answers(path: Path, llm: LLM) -> Answers:
    """Token ids of answers by their digests, from a file."""
    traces = read_traces(path, llm.tokenizer, llm.bundle.config.vocab_size)
    return {
        (ids_digest(one.prompt_tokens), ids_digest(one.output_tokens)): (one.prompt_tokens, one.output_tokens)
        for one in traces
    }


def _document(llm: LLM, options: CheckOptions, checked: Checked) -> CheckDocument:
    return CheckDocument(
        **measured_head("check"),
        files=[str(path) for path in options.receipts],
        engine=EngineRecord.of(llm.bundle),
        fingerprint=llm.fingerprint,
        passed=checked.has_passed(allow_other_engine=options.allow_other_engine),
        total=CheckTotal(
            num_answers=checked.num_answers,
            num_tokens=checked.num_tokens,
            verdicts=dict(checked.verdicts),
            relations=dict(checked.relations),
            wall_s=checked.wall_s,
            tokens_per_second=checked.num_tokens / checked.wall_s if checked.wall_s else None,
        ),
        engine_differences=next(filter(None, checked.differences.values()), []),
        findings=checked.findings,
        num_findings_left_out=checked.num_left_out,
    )


def _show(document: CheckDocument, checked: Checked, output: Output) -> None:
    for relation, told in _TOLD.items():
        if num := checked.relations[relation]:
            differing = "; ".join(checked.differences.get(relation, []))
            output.warning(f"{num:,} receipt{'' if num == 1 else 's'}: {told} ({differing})")
    if document.findings:
        table = Table("answer", "place", "answer's token", "engine's token", "probability", "rank", "gap", "why")
        for finding in document.findings[:_MOST_SHOWN]:
            table.add_row(*_row(finding))
        output.result(table)
    num_more = len(document.findings) + document.num_findings_left_out - _MOST_SHOWN
    if num_more > 0:
        output.result(f"and {num_more:,} more: `--json` has them")
    verdicts = ", ".join(f"{count:,} {verdict.replace('_', ' ')}" for verdict, count in checked.verdicts.most_common())
    rules = ", ".join(f"{count:,} {_RULES[rule]}" for rule, count in checked.rules.most_common())
    speed = number(document.total.tokens_per_second, 0)
    output.result(
        f"{checked.num_answers:,} answers of {checked.num_tokens:,} tokens in {checked.wall_s:.2f} s, {speed} tokens/s"
        + (f", checked {rules}" if rules else "")
    )
    output.result(f"{verdicts}; fingerprint {document.fingerprint.name}")


def _row(finding: Finding) -> list[str]:
    def shown(value: object) -> str:
        return "-" if value is None else str(value)

    probability = "-" if finding.probability is None else f"{finding.probability:.3g}"
    answer = finding.where if finding.name is None else f"{finding.where} ({in_words(finding.name)})"
    reason = _without_place(finding.reason or "", finding.where)
    tokens = [shown(finding.place), shown(finding.token), shown(finding.engine_token)]
    return [answer, *tokens, probability, shown(finding.rank), number(finding.gap), reason]


def _without_place(reason: str, where: str) -> str:
    """`reason` as it stands in the row of `where`: "line 1 of a.jsonl is not JSON" as "it is not JSON"."""
    for long, short in ((f"`{where}: ", "`"), (f"`{where}` ", "it "), (f" on {where}", ""), (f"{where} ", "it ")):
        if long in reason:
            return reason.replace(long, short, 1)
    return reason


_DEFINITIONS = {
    "exact": "every token is the one that the engine chooses, bit for bit",
    "within rounding": "every token is the engine's, or as near to it as rounding on another machine may move it",
    "likely": "the tokens have probabilities like the engine's own; for draws by a drafter's probabilities",
    "probability": "that the engine gives to the answer's token, after temperature, penalties and cuts",
    "rank": "1 for the token with the largest score",
    "gap": "logits between the engine's token and the answer's, with the noise of sampling",
}


def check_page(document: CheckDocument, shown: list[tuple[Finding, Receipt | None]], llm: LLM) -> str:
    """An HTML page that shows each wrong answer with its first wrong token."""
    data = document.as_json()
    verdict = "all answers pass" if document.passed else "not all answers pass"
    return page(
        "check.html",
        data,
        f"{with_bits(data['engine'])}, {document.total.num_answers:,} answers checked: {verdict}",
        cards={
            "This engine": data["fingerprint"] | {"instructions": " ".join(document.fingerprint.instructions)},
            "Files": {"receipts": ", ".join(document.files)},
            "Versions": {"specdec": document.specdec_version},
        },
        definitions=_DEFINITIONS,
        texts=[_texts(finding, receipt, llm) for finding, receipt in shown],
    )


def _texts(finding: Finding, receipt: Receipt | None, llm: LLM) -> dict[str, Any] | None:
    """The prompt, and the answer in three parts: before, at and after its first wrong token."""
    if receipt is None or receipt.prompt_ids is None or receipt.output_ids is None or finding.place is None:
        return None
    vocab_size = llm.bundle.config.vocab_size
    prompt = [token for token in receipt.prompt_ids if token < vocab_size]
    output = [min(token, vocab_size - 1) for token in receipt.output_ids]
    place = finding.place

    text = partial(text_or_ids, llm.tokenizer)
    before = [*prompt, *output[:place]]
    return {
        "prompt": text(prompt, []),
        "before": text(output[:place], prompt),
        "token": text(output[place : place + 1], before) or Markup("&empty;"),
        "engine": "(the end)" if finding.engine_token is None else text([finding.engine_token], before),
        "after": text(output[place + 1 :], [*before, *output[place : place + 1]]),
    }
