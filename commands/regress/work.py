"""Work of `regress`: reads old answers, compares them with the new engine, and shows the differences."""

import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from commands.options.engine_choice import EngineChoice
from commands.options.sessions import engines_made, open_engine
from commands.output.documents.records import measured_head
from commands.output.documents.settings import EngineRecord
from commands.output.html.page import page, with_bits, write_page
from commands.output.output import Output, number, percent
from commands.regress.document import RegressAnswer, RegressDocument, RegressPosition, RegressTotal
from commands.regress.flags import RegressOptions
from commands.summarize.rouge import rouge_scores
from runtime.checkpoint.bundle import read_bundle
from runtime.llm import LLM
from runtime.proof.receipts import num_lines
from runtime.proof.records import in_words
from runtime.proof.regress import Compared, Comparison, OldAnswer, check_has_answers, generate_new, read_old_answers
from runtime.text.text import decode, output_text, stop_words_of, text_or_ids
from runtime.text.traces import read_trace
from runtime.util.errors import SpecDecError

_MOST_SHOWN, _MOST_IN_PAGE, _MOST_IN_DOCUMENT = 20, 200, 10_000
_NUM_TOGETHER = 256
"""Answers in memory at a time."""


@dataclass
class Regressed:
    """Counts so far, and the parts of the answers that documents and pages show."""

    has_kl: bool
    """True if the new engine's probabilities are compared with an old engine's."""
    is_whole: bool
    """True if all tokens of an answer are compared, instead of only those up to the first change."""
    answers: list[RegressAnswer] = field(default_factory=list)
    num_answers: int = 0
    num_not_compared: int = 0
    places: "array[int]" = field(default_factory=lambda: array("q"))
    """Position of the first token that differs, for each answer that changes."""
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    """Logits of the new engine between its token and the old one at these positions, where they are known."""
    shown: list[tuple[int, Compared]] = field(default_factory=list)
    """The first answers that change, with their indices in `answers`."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """New and old texts, for ROUGE."""
    num_of_other_models: int = 0
    """Answers that were compared although another model with the same tokenizer gave them."""
    other_model: str = ""
    """Digest of the first such model's architecture."""
    wall_s: float = 0.0
    new_answers_s: float = 0.0

    def add(self, one: Compared) -> None:
        self.num_answers += 1
        self.num_not_compared += one.problem is not None
        if one.place is not None:
            self.places.append(one.place)
            if one.gap is not None:
                self.gaps.append(one.gap)
        if len(self.answers) < _MOST_IN_DOCUMENT:
            self.answers.append(self._answer(one))
            if one.has_diverged and len(self.shown) < _MOST_IN_PAGE:
                self.shown.append((len(self.answers) - 1, one))

    def _answer(self, one: Compared) -> RegressAnswer:
        num_tokens, is_done = len(one.output), one.problem is None and bool(one.output)
        problem = one.problem
        if problem is not None and one.old.where not in problem:
            problem = f"{one.old.where} cannot be compared: {problem}"
        return RegressAnswer(
            where=one.old.where,
            problem=problem,
            num_tokens=num_tokens,
            place=one.place,
            old_token=None if one.place is None else one.output[one.place],
            new_token=one.new_token,
            gap=one.gap,
            agreement=one.num_agreeing / num_tokens if is_done and self.is_whole else None,
            mean_kl=one.kl / num_tokens if is_done and self.has_kl else None,
            new_ids=one.new_output,
        )


def compare_answers(options: RegressOptions, choice: EngineChoice, output: Output) -> None:
    """Compare, show and write; exits with 1 if an answer cannot be compared, or if more answers diverge than may."""
    check_has_answers(options.traces)  # before an engine is built for it
    with ExitStack() as stack:
        made = stack.enter_context(engines_made(choice, output))
        llm = stack.enter_context(open_engine(made))
        old = None if options.against is None else stack.enter_context(LLM(read_bundle(options.against)))
        if old is not None:
            _check_pair(old, llm, output)
        comparison = Comparison(llm.engine, None if old is None else old.engine, until_change=options.until_change)
        found = Regressed(has_kl=old is not None, is_whole=not options.until_change)
        compared = comparison.compare(_asked(llm, options.traces))
        with output.progress("comparing", num_lines(options.traces)) as advance:
            start = time.perf_counter()
            while some := list(islice(compared, _NUM_TOGETHER)):
                compared_s = time.perf_counter()
                found.wall_s += compared_s - start
                if options.new_answers:
                    generate_new(llm.engine, [one for one in some if one.has_diverged])
                    found.new_answers_s += time.perf_counter() - compared_s
                for one in some:
                    found.add(one)
                    if (other := _other_model(one, llm)) is not None:
                        found.num_of_other_models += 1
                        found.other_model = found.other_model or other
                    if options.new_answers and one.problem is None and llm.tokenizer is not None:
                        texts = one.new_output or list(one.output), list(one.output)
                        found.texts.append((_text(llm, one, texts[0]), _text(llm, one, texts[1])))
                    advance(1)
                start = time.perf_counter()
        if num := found.num_of_other_models:
            of = "answer is another model's" if num == 1 else "answers are other models'"
            first = f"architecture {in_words(found.other_model)}, here {llm.fingerprint.architecture}"
            output.warning(f"{num:,} {of}, with the same tokenizer: {first}")
        document = _document(llm, old, options, comparison, found)
        _show(document, llm, output)
        if options.report is not None:
            write_page(options.report, regress_page(document, found.shown, llm), output)
    output.document(document.as_json())
    if not document.passed:
        raise typer.Exit(1)


def _check_pair(old: LLM, llm: LLM, output: Output) -> None:
    """SpecDecError for engines whose token ids stand for different texts; a warning for engines of two models."""
    hint = "compare two engines of one model"
    sizes = [one.bundle.config.vocab_size for one in (old, llm)]
    if sizes[0] != sizes[1]:
        raise SpecDecError(f"the engines have vocabularies of different sizes: {sizes[0]} and {sizes[1]}", hint=hint)
    theirs, ours = old.fingerprint, llm.fingerprint
    if None not in (theirs.tokenizer, ours.tokenizer) and theirs.tokenizer != ours.tokenizer:
        raise SpecDecError(f"the engines have two tokenizers: {theirs.tokenizer} and {ours.tokenizer}", hint=hint)
    if theirs.architecture != ours.architecture:
        architectures = f"architecture {theirs.architecture}, here {ours.architecture}"
        output.warning(f"the old engine is another model's: {architectures}")


def _other_model(one: Compared, llm: LLM) -> str | None:
    """Digest of the architecture of the model that gave a compared answer; None if it is this engine's model."""
    if one.problem is not None or one.old.receipt is None:
        return None
    theirs = one.old.receipt.fingerprint.architecture
    return None if theirs == llm.fingerprint.architecture else theirs


def _asked(llm: LLM, path: Path) -> Iterator[Compared]:
    """Each answer of the file, ready to be compared. An answer that cannot be compared has a `problem`."""
    vocab_size, checker = llm.bundle.config.vocab_size, llm.checker()
    for old in read_old_answers(path, partial(read_trace, tokenizer=llm.tokenizer, vocab_size=vocab_size)):
        if old.problem is not None:
            yield Compared.refused(old, old.problem)
        elif (problem := _other_tokenizer(old, llm)) is not None:
            yield Compared.refused(old, problem)
        elif (foreign := max(*old.prompt, *old.output)) >= vocab_size:
            problem = f"{old.where} has a token id outside the vocabulary of {vocab_size}: {foreign}"
            yield Compared.refused(old, problem)
        else:
            try:
                yield Compared.of(old, old.request(checker.request, llm.end_ids))
            except SpecDecError as error:
                yield Compared.refused(old, f"{old.where} cannot be compared: {error.message}")


def _other_tokenizer(old: OldAnswer, llm: LLM) -> str | None:
    """The problem of a receipt from another tokenizer, whose ids stand for other texts; None for this engine's."""
    theirs = None if old.receipt is None else old.receipt.fingerprint.tokenizer
    if theirs is None or llm.tokenizer is None or theirs == (ours := llm.fingerprint.tokenizer):
        return None
    return f"{old.where} is of another tokenizer: {in_words(theirs)}, here {ours}"


def _document(
    llm: LLM, old: LLM | None, options: RegressOptions, comparison: Comparison, found: Regressed
) -> RegressDocument:
    num_done, num_diverged = found.num_answers - found.num_not_compared, len(found.places)
    positions, has_kl, is_whole = comparison.positions, found.has_kl, found.is_whole
    num_tokens, most, has_new = sum(positions.num), options.most_diverged, options.new_answers
    news, olds = [new for new, _ in found.texts], [old_text for _, old_text in found.texts]
    return RegressDocument(
        **measured_head("regress"),
        traces=str(options.traces),
        engine=EngineRecord.of(llm.bundle),
        old_engine=None if old is None else EngineRecord.of(old.bundle),
        max_diverged=most,
        passed=bool(num_done) and not found.num_not_compared and (most is None or num_diverged <= most * num_done),
        total=RegressTotal(
            num_answers=found.num_answers,
            num_not_compared=found.num_not_compared,
            num_diverged=num_diverged,
            diverged=num_diverged / num_done if num_done else None,
            num_tokens=num_tokens,
            agreement=sum(positions.num_agreeing) / num_tokens if num_tokens and is_whole else None,
            mean_kl=sum(positions.kl) / num_tokens if has_kl and num_tokens else None,
            median_place=statistics.median(found.places) if found.places else None,
            median_gap=statistics.median(found.gaps) if found.gaps else None,
            num_equal_new=num_done - num_diverged if has_new else None,
            rouge=rouge_scores(news, olds) if news else None,
            wall_s=found.wall_s,
            new_answers_s=found.new_answers_s if has_new else None,
        ),
        positions=[
            RegressPosition(num_answers=num, agreement=agreeing / num, mean_kl=kl / num if has_kl else None)
            for num, agreeing, kl in zip(positions.num, positions.num_agreeing, positions.kl, strict=True)
            if is_whole
        ],
        answers=found.answers,
        num_answers_left_out=found.num_answers - len(found.answers),
    )


def _text(llm: LLM, one: Compared, output: list[int]) -> str:
    return output_text(llm.tokenizer, output, stop_words_of(one.request), one.request.prompt_tokens) or ""


def _show(document: RegressDocument, llm: LLM, output: Output) -> None:
    total = document.total
    table = Table(
        "answer", "unchanged", "old token", "new token", "gap", "agreement", "KL", title="Answers that change"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    shown = [one for one in document.answers if one.place is not None or one.problem is not None]
    for one in shown[:_MOST_SHOWN]:
        if one.problem is not None:
            output.warning(one.problem)
            continue
        assert one.place is not None and one.old_token is not None
        tokens = [_token_text(llm, token) for token in (one.old_token, one.new_token)]
        kl = "-" if one.mean_kl is None else f"{one.mean_kl:.2g}"
        table.add_row(
            one.where, f"{one.place:,} of {one.num_tokens:,}", *tokens, number(one.gap), percent(one.agreement), kl
        )
    if table.row_count:
        output.result(table)
    if len(shown) > _MOST_SHOWN:
        output.result(f"and {len(shown) - _MOST_SHOWN:,} more: `--json` has them")
    done = total.num_answers - total.num_not_compared
    output.result(
        f"{total.num_diverged:,} of {done:,} answers change ({percent(total.diverged)}), in {total.wall_s:.2f} s"
    )
    if document.max_diverged is not None and total.diverged is not None and total.diverged > document.max_diverged:
        output.result(f"more than `--max-diverged` allows: {percent(document.max_diverged)}")
    kl = "" if total.mean_kl is None else f", KL {total.mean_kl:.3g}"
    if document.positions:
        output.result(f"of {total.num_tokens:,} tokens the new engine chooses {percent(total.agreement)}{kl}")
    else:
        output.result(f"{total.num_tokens:,} tokens compared, up to each answer's first change")
    if total.num_diverged:
        output.result(
            f"the first change is at token {number(total.median_place, 0)}, gap {number(total.median_gap)} (medians)"
        )
    if total.rouge is not None:
        scores = ", ".join(f"{name} {value:.1f}" for name, value in total.rouge.items())
        output.result(f"new answers beside the old ones: {scores}")


def _token_text(llm: LLM, token: int | None) -> str:
    if token is None:
        return "-"
    return str(token) if llm.tokenizer is None else repr(decode(llm.tokenizer, [token]))


_DEFINITIONS = {
    "change": "an answer in which the new engine would choose another token somewhere",
    "agreement": "share of the old tokens that the new engine chooses after the same text",
    "gap": "logits of the new engine between its own token and the old one, where the answers part",
    "KL": "mean divergence of the new engine's probabilities from the old one's, in nats",
}


def regress_page(document: RegressDocument, shown: list[tuple[int, Compared]], llm: LLM) -> str:
    """An HTML page with old and new texts side by side; `shown` has the answers and their indices in the document."""
    data = document.as_json()
    return page(
        "regress.html",
        data,
        f"{with_bits(data['engine'])}: {document.total.num_diverged:,} of {document.total.num_answers:,} answers "
        "change",
        cards={
            "New engine": data["engine"],
            "Old engine": data["old_engine"] or {},
            "Answers": {"traces": data["traces"]},
        },
        definitions=_DEFINITIONS,
        places=[place for place, _ in shown],
        texts=[_texts(one, llm) for _, one in shown],
    )


def _texts(one: Compared, llm: LLM) -> dict[str, Any]:
    """The prompt, the beginning that both answers share, and the rest of the old and of the new answer."""
    assert one.place is not None
    prompt, same = list(one.request.prompt_tokens), list(one.output[: one.place])
    new = [] if one.new_token is None else [one.new_token]
    if one.new_output is not None:
        new = one.new_output[one.place :]
    text = partial(text_or_ids, llm.tokenizer)
    before = [*prompt, *same]
    return {
        "prompt": text(prompt, []),
        "same": text(same, prompt),
        "old": text(list(one.output[one.place :]), before),
        "new": text(new, before),
        "is_whole": one.new_output is not None,
    }
