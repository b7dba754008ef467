"""`check`, `regress`, `fingerprint` and `predict`, and the receipts that commands and Python write for them."""

import json
import os
import platform
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from command_line import NGRAM, PROMPTS, Specdec, assert_valid, each
from rich.console import Console
from sentences import Said
from shared import MakeEngineDir, shared_engine
from tiny import make_model, repetitive_prompt

from commands.batch.dispatch import check_same_bits
from commands.schema.schemas import schema_of
from runtime.checkpoint.config import Mapping, QuantConfig, SelfDraft, parse
from runtime.core.params import GrammarKind
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import GrammarDrafter
from runtime.kernels import library
from runtime.proof.fingerprint import layers_of_all_ranks
from runtime.proof.records import Fingerprint, ids_digest
from runtime.text.trace_lines import line_digest
from specdec_cli import LLM, KVCacheConfig, NgramDrafter, SamplingParams, SelfDrafter, SpecDecError, SuffixDrafter

SAMPLED = ["--temperature", 1.2, "--random-seed", 5]
FORMS = {
    "json_schema": {"type": "boolean"},
    "regex": "[a-d ]{4,30}",
    "grammar": 'start: "dog" | "ball" /[a-z]+/',
    "choice": ["the dog", "the ball"],
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sealed(row: dict[str, Any]) -> str:
    """The line of a receipt that was changed by whoever also writes its digests anew."""
    row |= {f"{name}_digest": ids_digest(row[f"{name}_ids"]) for name in ("prompt", "output") if row[f"{name}_ids"]}
    return json.dumps(row | {"digest": line_digest(row)}) + "\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--ngram-config", NGRAM, *SAMPLED, "--num-return-sequences", 3, "--top-p", 0.9, "--min-p", 0.01],
        ["--grammar-config", "8", *SAMPLED, "--json-schema", json.dumps(SCHEMA), "--max-output-len", 40],
    ],
)
def test_receipts_of_a_run_are_exact(
    specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, flags: list[object]
) -> None:
    path = tmp_path / "receipts.jsonl"
    flags = [*each("--input-text", PROMPTS[:2]), "--max-output-len", 24, *flags]
    run = specdec("run", "--engine-dir", llama_engine_dir, *flags, "--receipts", path, "--json").document
    rows = rows_of(path)
    assert [row["output_ids"] for row in rows] == [one["output_ids"] for one in run["requests"]]
    schema = schema_of("receipt")
    for row in rows:
        jsonschema.validate(row, schema)
    document = specdec("check", path, llama_engine_dir, "--json").document  # the engine as the last word
    assert_valid("check", document)
    total = document["total"]
    assert (
        document["passed"] and total["verdicts"] == {"exact": len(rows)} and total["relations"] == {"same": len(rows)}
    )


def test_a_changed_receipt_is_named_with_its_token(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path) -> None:
    """The terminal, the document and the page name it, beside a line that is none."""
    path, page = tmp_path / "receipts.jsonl", tmp_path / "check.html"
    where = ["--engine-dir", llama_engine_dir]
    specdec("run", *where, *each("--input-text", PROMPTS[:2]), *SAMPLED, "--max-output-len", 20, "--receipts", path)
    rows = rows_of(path)
    place, token = 7, rows[0]["output_ids"][7]
    rows[0]["output_ids"][place] = token + 1
    path.write_text(sealed(rows[0]) + '{"cut": \n' + path.read_text().splitlines()[1])
    result = specdec("check", path, *where, "--report", page)
    assert result.exit_code == 1 and "1 wrong, 1 not checked, 1 exact" in result.stdout
    named = rf"line 1 of .*\s+place +{place}\s+answer's token +{token + 1}\s+engine's token +{token}\s"
    assert re.search(named, result.stdout)
    assert "line 2 of" in result.stdout and "not JSON" in result.stdout
    text = page.read_text()
    assert f'<data value="{token + 1}" data-path="/findings/0/token">{token + 1}</data>' in text
    assert "<script" not in text and 'class="t recovered"' in text
    document = json.loads(specdec("check", path, *where, "--json").stdout)
    assert_valid("check", document)
    assert [(one["verdict"], one["place"]) for one in document["findings"]] == [("wrong", place), ("not_checked", None)]


def test_changed_and_damaged_lines_are_told_as_sentences(
    specdec: Specdec, llama_engine_dir: Path, make_engine_dir: MakeEngineDir, tmp_path: Path, said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of `check`'s table, and warnings of `regress`, which compares none of these lines."""
    wide = partial(Console, width=1000, highlight=False, markup=False)
    monkeypatch.setattr("commands.output.output._console", lambda *, stderr, width: wide(stderr=stderr))
    path, where = tmp_path / "receipts.jsonl", ["--engine-dir", llama_engine_dir]
    specdec("run", *where, "--input-text", PROMPTS[0], "--max-output-len", 8, "--receipts", path)
    (row,) = rows_of(path)
    good, ours = path.read_text(), row["fingerprint"]["architecture"]
    edited, without = ({**row, "name": "edited"}, {k: v for k, v in row.items() if k != "digest"})
    bad = {
        json.dumps(edited): f"it has changed since it was written, its digest should be {line_digest(edited)}, "
        f"and is: '{row['digest']}'",
        json.dumps(without): f"it has lost its digest, which should be: {row['digest']}",
        sealed(row | {"output_ids": [-5]}).strip(): "`output_ids` must be at least 0: -5",
        sealed(row | {"prompt_ids": []}).strip(): "`prompt_ids` holds no token id",
        '{"a": "\x01"}': "it is not JSON at column 8: it is cut or damaged",
        "[" * 100_000: "it has brackets too deep to read: it is cut or damaged",
        "9" * 5_000: "it has a number too long to read: it is cut or damaged",
    }
    other = row | {"fingerprint": row["fingerprint"] | {"architecture": "other"}}
    of_other_model = {sealed(other).strip(): f"it is of another model: architecture other, here {ours}"}
    path.write_text(good + "".join(f"{line}\n" for line in bad | of_other_model))
    result = specdec("check", path, *where)
    shown = " ".join(result.stdout.split())
    assert f"{len(bad) + 1} not checked, 1 exact" in shown
    assert [one for one in (bad | of_other_model).values() if one not in shown] == []
    elsewhere = row | {"fingerprint": row["fingerprint"] | {"logits": "0" * 16, "processor": "Z80"}}
    path.write_text(sealed(other) + sealed(elsewhere))
    shown = " ".join(specdec("check", path, *where).stderr.split())
    assert "1 receipt: bits differ, so these answers are checked within rounding (processor Z80, here" in shown
    path.write_text(good + "".join(f"{line}\n" for line in bad))
    result = specdec("regress", "--traces", path, *where)
    assert result.exit_code == 1 and "0 of 1 answers change" in result.stdout
    shown = " ".join(result.stderr.split()).replace(f" of {path}", "")
    for number, one in enumerate(bad.values(), 2):
        assert one.removeprefix("it ") in shown.replace(f" on line {number}", "").replace(f"`line {number}: ", "`")
    path.write_text(good + sealed(row | {"fingerprint": row["fingerprint"] | {"tokenizer": "other"}}))
    result = specdec("regress", "--traces", path, *where)
    shown = " ".join(result.stderr.split())
    assert result.exit_code == 1 and f"line 2 of {path} is of another tokenizer: other, here" in shown
    path.write_text(good + sealed(other))
    result = specdec("regress", "--traces", path, *where)
    assert result.exit_code == 0 and "0 of 2 answers change" in result.stdout
    assert f"1 answer is another model's, with the same tokenizer: architecture other, here {ours}" in result.stderr
    foreign = [{"end_ids": [10**9]}, {"sampling": row["sampling"] | {"allowed_token_ids": [10**9]}}]
    path.write_text(good + "".join(sealed(row | one) for one in foreign))
    for result in (specdec("regress", "--traces", path, *where), specdec("check", path, *where)):
        shown = " ".join((result.stderr + result.stdout).split())
        assert "0 of 1 answers change" in shown or "2 not checked, 1 exact" in shown
        assert shown.count("has a token id outside the vocabulary of") == 2
    path.write_text(good + sealed(other))
    smaller = make_engine_dir(make_model("llama", vocab_size=row["fingerprint"]["vocab_size"], num_hidden_layers=1))
    result = specdec("regress", "--traces", path, *where, "--against", smaller)
    assert result.exit_code == 0 and "the old engine is another model's: architecture" in result.stderr
    path.write_bytes(bytes(range(256)) * 50)
    result = specdec("regress", "--traces", path, *where)
    assert result.exit_code == 1
    said(result)


def test_batches_and_python_write_receipts_too(specdec: Specdec, self_draft_engine_dir: Path, tmp_path: Path) -> None:
    """A batch's results have them, whole after an interruption; an `LLM` gives them with any drafter."""
    requests, results, path = (tmp_path / name for name in ("requests.jsonl", "results.jsonl", "receipts.jsonl"))
    body = {
        "prompt": "The dog",
        "max_tokens": 12,
        "n": 2,
        "temperature": 1.1,
        "stop": ["ball"],
        "logit_bias": {"40": 2},
    }
    requests.write_text("".join(json.dumps(body | {"seed": seed}) + "\n" for seed in range(3)))
    where = ["--engine-dir", self_draft_engine_dir]
    arguments = ["batch", "-i", requests, "-o", results, *where, "--ngram-config", NGRAM, "--receipts", path, "--quiet"]
    assert specdec(*arguments).exit_code == 0
    written = path.read_bytes()
    assert [row["name"] for row in rows_of(path)] == [f"line-{i}" for i in (1, 1, 2, 2, 3, 3)]
    path.unlink()
    assert specdec(*arguments).exit_code == 0 and path.read_bytes() == written
    params = SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=16, receipt=True)
    with LLM(self_draft_engine_dir) as llm, (tmp_path / "python.jsonl").open("w") as file:
        for drafter in (None, NgramDrafter(), SuffixDrafter(), SelfDrafter(4), SelfDrafter(4, use_logits=True)):
            for result in llm.generate(["The dog", "One day"], params, drafter=drafter):
                file.writelines(json.dumps(output.receipt) + "\n" for output in result.outputs)
        pieces = [piece.receipt for piece in llm.stream("The dog", params) if piece.finish_reason]
        assert [one.verdict for one in llm.check_receipts([one or {} for one in pieces])] == ["exact"] * 2
    document = specdec("check", results, path, tmp_path / "python.jsonl", *where, "--json").document
    assert document["total"]["verdicts"] == {"exact": 6 + 6 + 16, "likely": 4}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["states", "split", pytest.param("8 bits", marks=pytest.mark.slow), "forms"])
def test_restored_caches_states_splits_and_forms_give_exact_receipts(
    kind: str, make_engine_dir: MakeEngineDir, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each engine finds on disk what the engine before it computed of the prompts, and has room for little of it. The
    answers, drafted or not, are checked in pieces of 7 tokens by an engine that finds nothing.
    """
    forms: list[dict[str, Any]] = [{}]
    drafters: list[DrafterSpec | None] = [None, NgramDrafter(4, 2)]
    prompts = [repetitive_prompt(seed, length) for seed, length in ((0, 70), (1, 34), (0, 80))]
    match kind:
        case "states":
            engine_dir, drafters[0] = make_engine_dir(make_model("lfm2"), self_draft=SelfDraft("int8")), SelfDrafter(3)
        case "split":
            engine_dir = request.getfixturevalue("split_engine_dir")
        case "8 bits":
            engine_dir = make_engine_dir(make_model("gemma3"), kv_cache="INT8")
        case _:
            engine_dir, drafters[0] = request.getfixturevalue("llama_engine_dir"), GrammarDrafter(4)
            assert FORMS.keys() == set(get_args(GrammarKind))
            forms = [{name: form} for name, form in FORMS.items()]
    num = 8 if kind == "split" else 20  # a step of two ranks takes long on a busy machine
    params = [
        SamplingParams(temperature=one, seed=2, n=2, frequency_penalty=one / 4, max_tokens=num, receipt=True, **form)
        for form in forms
        for one in ((1.2,) if form else (0.0, 1.2))
    ]
    asked = [(prompt, one) for prompt in prompts for one in params]
    receipts, counts = [], []
    for drafter in drafters:
        with LLM(engine_dir, kv_cache=KVCacheConfig(max_tokens=200, disk_dir=tmp_path)) as llm:
            results = llm.generate(*map(list, zip(*asked, strict=True)), drafter=drafter)
            receipts += [output.receipt or {} for result in results for output in result.outputs]
            counts.append(llm.engine.prompt_tokens)
    assert counts[1].num_on_disk > 0
    with LLM(engine_dir, max_num_tokens=7) as llm:
        *findings, none, text = llm.check_receipts([*receipts, None, "[]"], "tokens")  # type: ignore[list-item]
    assert [(one.verdict, one.reason) for one in (none, text)] == [
        ("not_checked", f"receipt {len(receipts) + 1} has no receipt: None"),
        ("not_checked", f"receipt {len(receipts) + 2} has no receipt: '[]'"),
    ]
    assert [one.verdict for one in findings] == ["exact"] * 2 * 2 * len(asked)
    if kind == "split":  # it adds in another order than a whole one, which is as another machine
        with LLM(make_engine_dir(make_model("llama"))) as llm:
            found = llm.check_receipts(receipts)
            assert {(one.relation, one.rule, one.passed) for one in found} == {("other_machine", "rounding", True)}
            config = llm.engine.config
        for size in (1, 2, 4):
            heads = [replace(one, num_kv_heads=max(one.num_kv_heads // size, 1)) for one in config.layers]
            split = replace(config, layers=tuple(heads), mapping=Mapping(size, size))
            assert layers_of_all_ranks(split) == config.layers


@pytest.fixture
def answers(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Greedy traces, and receipts of samples."""
    traces, receipts = tmp_path / "traces.jsonl", tmp_path / "receipts.jsonl"
    run = ["run", "--engine-dir", llama_engine_dir, *each("--input-text", PROMPTS[:3]), "--max-output-len", 20]
    specdec(*run, "--output-traces", traces)
    specdec(*run, *SAMPLED, "--receipts", receipts)
    return traces, receipts


@pytest.fixture(scope="module")
def int4_engine_dir(llama_dir: Path, shared: Path) -> Path:
    """The model of `llama_engine_dir` in four bits."""
    return shared_engine(shared / "engines", llama_dir, precision=QuantConfig("int4", 16))


def test_regress_is_what_generating_again_says(
    specdec: Specdec, answers: tuple[Path, Path], llama_engine_dir: Path, int4_engine_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An equal engine changes nothing; another one changes each answer where its own leaves the old one."""
    monkeypatch.setattr("runtime.proof.regress._NUM_UNTIL_CHANGE", 5)
    page = tmp_path / "regress.html"
    flags = ["--engine-dir", int4_engine_dir, "--against", llama_engine_dir, "--new-answers", "--report", page]
    for path, params in zip(answers, ({"temperature": 0}, {"temperature": 1.2, "seed": 5}), strict=True):
        regress = ["regress", "--traces", path, "--max-diverged", "0"]
        assert specdec(*regress, llama_engine_dir).exit_code == 0
        failed = specdec(*regress, "--engine-dir", int4_engine_dir)
        assert failed.exit_code == 1 and "more than `--max-diverged` allows: 0.0 %" in failed.stdout
        document = specdec("regress", "--traces", path, *flags, "--json").document
        assert_valid("regress", document)
        with LLM(int4_engine_dir) as llm:
            own = [one.token_ids for one in llm.generate(PROMPTS[:3], SamplingParams(max_tokens=20, **params))]
        for answer, row, tokens in zip(document["answers"], rows_of(path), own, strict=True):
            pairs = enumerate(zip(row["output_ids"], tokens, strict=False))
            place = next((i for i, (old, new) in pairs if old != new), None)
            assert (answer["place"], answer["new_ids"]) == (place, None if place is None else tokens)
        total = document["total"]
        assert total["num_diverged"] > 0 and total["mean_kl"] > 0
        until_change = ["--engine-dir", int4_engine_dir, "--until-change", "--json"]
        short = specdec("regress", "--traces", path, *until_change).document
        assert_valid("regress", short)
        assert [one["place"] for one in short["answers"]] == [one["place"] for one in document["answers"]]
        ends = [
            len(row["output_ids"]) if one["place"] is None else one["place"] + 1
            for one, row in zip(short["answers"], rows_of(path), strict=True)
        ]
        assert short["total"]["num_tokens"] == sum(ends) and short["total"]["agreement"] is None
    assert 'class="t accepted"' in page.read_text()


def test_fingerprints_are_of_the_bits(
    specdec: Specdec, llama_engine_dir: Path, self_draft_engine_dir: Path, int4_engine_dir: Path, tmp_path: Path
) -> None:
    """The same of two builds of one model, and of 1 and 2 threads; another of other weights, or of kernels for other
    instructions, which is said.
    """
    path = tmp_path / "fingerprint.json"
    document = specdec("fingerprint", llama_engine_dir, "--json").document
    assert_valid("fingerprint", document)
    torch.set_num_threads(2)
    try:
        assert specdec("fingerprint", llama_engine_dir, "--quiet").stdout.strip() == document["name"]
    finally:
        torch.set_num_threads(1)
    processor, _, kernels = document["fingerprint"]["processor"].rpartition(" for ")
    flags, sets = set(library._processor_flags()), library.INSTRUCTION_SETS[platform.machine()]
    best = next(one.name for one in sets if one.needed <= flags)
    assert kernels == best or "SPECDEC_TEST_MARCH" in os.environ
    lesser = document["fingerprint"] | {"logits": "0" * 16, "processor": f"{processor} for lesser"}
    path.write_text(json.dumps(lesser))
    result = specdec("fingerprint", llama_engine_dir, "--expect", path)
    named = f"other bits: processor {processor} for lesser, here {processor} for {kernels}; bits fp_0000"
    assert result.exit_code == 1 and named in result.stdout
    path.write_text(json.dumps(document))
    same = specdec("fingerprint", "--engine-dir", self_draft_engine_dir, "--expect", path)
    assert same.exit_code == 0 and same.stdout.splitlines()[0] == document["name"] and "the same bits" in same.stdout
    other = specdec("fingerprint", "--engine-dir", int4_engine_dir, "--expect", path)
    assert other.exit_code == 1 and "other bits: weights" in other.stdout and "quantization none, here" in other.stdout


def test_workers_with_other_bits_share_no_batch(
    specdec: Specdec, llama_engine_dir: Path, int4_engine_dir: Path, capfd: pytest.CaptureFixture[str], said: Said
) -> None:
    ours, theirs = (
        parse(Fingerprint, specdec("fingerprint", "--engine-dir", one, "--json").document["fingerprint"], "")
        for one in (llama_engine_dir, int4_engine_dir)
    )
    check_same_bits("here:1", replace(ours, torch="another"), ours, allow_mixed=False)  # of the same bits
    with pytest.raises(SpecDecError) as error:
        check_same_bits("there:2", theirs, ours, allow_mixed=False)
    differing = (theirs.logits, ours.logits, ours.processor, theirs.processor)
    said(error.value, "there:2", theirs.name, ours.name, varying=differing)
    check_same_bits("there:2", theirs, ours, allow_mixed=True)
    assert "warning: workers give different bits, there:2" in capfd.readouterr().err


def test_predict_reads_another_machines_costs(
    specdec: Specdec, answers: tuple[Path, Path], llama_engine_dir: Path, tmp_path: Path
) -> None:
    """Steps whose tokens are free pay for every accepted token: as many times as there are tokens in a step."""
    costs = json.loads((llama_engine_dir / "config.json").read_text())
    flat = [one | {"seconds": 1000.0} for one in costs["step_costs"]]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"step_costs": flat, "host_s": 0.0}))
    document = specdec("predict", "--traces", answers[0], "--costs", path, "--json").document
    assert_valid("predict", document)
    none = next(one for one in document["predicted"] if not one["flags"])
    best = document["predicted"][0]
    assert none["speedup"] == 1 and document["pays"]
    assert best["speedup"] == pytest.approx(best["tokens_per_step"], rel=0.01)  # a lookup takes nothing beside them


@pytest.mark.parametrize(
    ("command", "text"), [("check MODEL FILE", ""), ("regress MODEL --traces FILE", ""),
                          ("regress MODEL --traces FILE", '{"some": "data"}\n')],
)  # fmt: skip
def test_a_file_without_answers_is_refused_before_an_engine_is_built(
    command: str, text: str, specdec: Specdec, llama_dir: Path, tmp_path: Path, said: Said
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    words = command.replace("MODEL", str(llama_dir)).replace("FILE", str(path)).split()
    result = specdec(*words, "--no-cache", "--compiler", "none")
    assert result.exit_code == 1
    assert result.stderr.startswith("error:")  # no phase of a build is named before it
    said(result, path)


def test_mistakes(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, said: Said) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    where = ["--engine-dir", llama_engine_dir]
    for arguments in (
        ["check", "nowhere.jsonl", *where],
        ["check", empty, *where],
        ["check", llama_engine_dir],
        ["check", empty, llama_engine_dir, *where],
        ["check", empty, "./no-model"],
        ["regress", "--traces", empty, *where],
        ["regress", "--traces", empty, *where, "--max-diverged", "2 of 3"],
        ["fingerprint", *where, "--expect", empty],
        ["predict", "--traces", empty, "--costs", llama_engine_dir / "tokenizer.json"],
        ["run", *where, "--receipt-ids", "digests", "a"],
        ["fingerprint", *where, "--expect", deep],
        ["regress", "--traces", empty, *where, "--until-change", "--against", llama_engine_dir],
    ):
        result = specdec(*arguments)
        assert result.exit_code in (1, 2)
        said(result)
