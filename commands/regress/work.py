"""Work of `regress`: reads old answers, compares them with the new engine, and shows what differs."""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
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
from runtime.core.request import Request
from runtime.llm import LLM
from runtime.proof.regress import Compared, Comparison, OldAnswer, generate_new, read_old_answers
from runtime.text.text import decode, output_text, stop_words_of
from runtime.text.traces import read_trace
from runtime.util.errors import SpecDecError

_MOST_SHOWN, _MOST_IN_PAGE = 20, 200


def compare_answers(options: RegressOptions, choice: EngineChoice, output: Output) -> None:
    """Compare, show and write; exit 1 if more answers diverge than may."""
    with ExitStack() as stack:
        made = stack.enter_context(engines_made(choice, output))
        llm = stack.enter_context(open_engine(made))
        old = None if options.against is None else stack.enter_context(LLM(read_bundle(options.against)))
        if old is not None and old.bundle.config.vocab_size != llm.bundle.config.vocab_size:
            raise SpecDecError(
                f"the engines have vocabularies of different sizes: {old.bundle.config.vocab_size} and "
                f"{llm.bundle.config.vocab_size}",
                hint="compare two engines of one model",
            )
        comparison = Comparison(llm.engine, None if old is None else old.engine)
        start = time.perf_counter()
        compared = _compare(llm, comparison, options.traces, output)
        wall_s = time.perf_counter() - start
        diverged = [one for one in compared if one.has_diverged]
        new_answers_s = None
        if options.new_answers:
            start = time.perf_counter()
            generate_new(llm.engine, diverged)
            new_answers_s = time.perf_counter() - start
        document = _document(llm, old, options, comparison, compared, (wall_s, new_answers_s))
        _show(document, llm, compared, output)
        if options.report is not None:
            write_page(options.report, regress_page(document, compared, llm))
            output.result(f"report written: {options.report}")
    output.document(document.as_json())
    if not document.passed:
        raise typer.Exit(1)


def _compare(llm: LLM, comparison: Comparison, path: Path, output: Output) -> list[Compared]:
    """Each answer of the file beside the new engine, in order; those that cannot be compared have a `problem`."""
    vocab_size = llm.bundle.config.vocab_size
    reader = partial(read_trace, tokenizer=llm.tokenizer, vocab_size=vocab_size)
    olds = list(read_old_answers(path, reader))
    if not olds:
        raise SpecDecError(f"the file has no answers: {path}", hint="give another file")
    checker = llm.checker()
    refused: dict[int, Compared] = {}

    def asked() -> Iterator[tuple[OldAnswer, Request]]:
        for place, old in enumerate(olds):
            problem = old.problem
            if problem is None and max(*old.prompt, *old.output) >= vocab_size:
                foreign = max(*old.prompt, *old.output)
                problem = f"{old.where} has a token id outside the vocabulary of {vocab_size}: {foreign}"
            if problem is None:
                try:
                    yield old, old.request(checker.request, llm.end_ids)
                    continue
                except SpecDecError as error:
                    problem = f"{old.where} cannot be compared: {error.message}"
            refused[place] = Compared(Request(0, (), 1), (), 1, old=old, problem=problem)

    found = []
    with output.progress("comparing", len(olds)) as advance:
        for one in comparison.compare(asked()):
            found.append(one)
            advance(1)
    in_order = iter(found)
    return [refused[place] if place in refused else next(in_order) for place in range(len(olds))]


def _document(
    llm: LLM,
    old: LLM | None,
    options: RegressOptions,
    comparison: Comparison,
    compared: list[Compared],
    seconds: tuple[float, float | None],
) -> RegressDocument:
    done = [one for one in compared if one.problem is None]
    diverged = [one for one in done if one.has_diverged]
    share = len(diverged) / len(done) if done else None
    positions, has_kl = comparison.positions, comparison.old is not None
    num_tokens, gaps = sum(positions.num), [one.gap for one in diverged if one.gap is not None]
    most = options.most_diverged
    return RegressDocument(
        **measured_head("regress"),
        traces=str(options.traces),
        engine=EngineRecord.of(llm.bundle),
        old_engine=None if old is None else EngineRecord.of(old.bundle),
        max_diverged=most,
        passed=bool(done) and len(done) == len(compared) and (most is None or len(diverged) <= most * len(done)),
        total=RegressTotal(
            num_answers=len(compared),
            num_not_compared=len(compared) - len(done),
            num_diverged=len(diverged),
            diverged=share,
            num_tokens=num_tokens,
            agreement=sum(positions.num_agreeing) / num_tokens if num_tokens else None,
            mean_kl=sum(positions.kl) / num_tokens if has_kl and num_tokens else None,
            median_place=statistics.median(one.place for one in diverged if one.place is not None)
            if diverged
            else None,
            median_gap=statistics.median(gaps) if gaps else None,
            num_equal_new=len(done) - len(diverged) if options.new_answers else None,
            rouge=_rouge(llm, done) if options.new_answers else None,
            wall_s=seconds[0],
            new_answers_s=seconds[1],
        ),
        positions=[
            RegressPosition(num_answers=num, agreement=agreeing / num, mean_kl=kl / num if has_kl else None)
            for num, agreeing, kl in zip(positions.num, positions.num_agreeing, positions.kl, strict=True)
        ],
        answers=[_answer(one, has_kl=has_kl) for one in compared],
    )


def _answer(one: Compared, *, has_kl: bool) -> RegressAnswer:
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
        agreement=one.num_agreeing / num_tokens if is_done else None,
        mean_kl=one.kl / num_tokens if is_done and has_kl else None,
        new_ids=one.new_output,
    )


def _rouge(llm: LLM, done: list[Compared]) -> dict[str, float] | None:
    if llm.tokenizer is None or not done:
        return None
    olds = [_text(llm, one, list(one.output)) for one in done]
    news = [_text(llm, one, one.new_output or list(one.output)) for one in done]
    return rouge_scores(news, olds)


def _text(llm: LLM, one: Compared, output: list[int]) -> str:
    return output_text(llm.tokenizer, output, stop_words_of(one.request), one.request.prompt_tokens) or ""


def _show(document: RegressDocument, llm: LLM, compared: list[Compared], output: Output) -> None:
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
    kl = "" if total.mean_kl is None else f", KL {total.mean_kl:.3g}"
    output.result(f"of {total.num_tokens:,} tokens the new engine chooses {percent(total.agreement)}{kl}")
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


def regress_page(document: RegressDocument, compared: list[Compared], llm: LLM) -> str:
    """A page with old and new texts side by side."""
    data = document.as_json()
    diverged = [one for one in compared if one.has_diverged][:_MOST_IN_PAGE]
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
        places=[place for place, one in enumerate(compared) if one.has_diverged][:_MOST_IN_PAGE],
        texts=[_texts(one, llm) for one in diverged],
    )


def _texts(one: Compared, llm: LLM) -> dict[str, Any]:
    """The prompt, the common beginning, and how the old and the new answer go on."""
    assert one.place is not None
    prompt, same = list(one.request.prompt_tokens), list(one.output[: one.place])
    new = (
        one.new_output[one.place :]
        if one.new_output is not None
        else [one.new_token]
        if one.new_token is not None
        else []
    )

    def text(tokens: list[int], before: list[int]) -> str:
        return " ".join(map(str, tokens)) if llm.tokenizer is None else decode(llm.tokenizer, tokens, before)

    before = [*prompt, *same]
    return {
        "prompt": text(prompt, []),
        "same": text(same, prompt),
        "old": text(list(one.output[one.place :]), before),
        "new": text(new, before),
        "is_whole": one.new_output is not None,
    }
