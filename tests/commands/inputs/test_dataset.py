"""Loading samples: what each source and column becomes, in which order, and how each mistake is named."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentences import Said
from waiting import HANG_S

from commands.inputs import dataset
from commands.inputs.dataset import Columns, EvalTask, Sample, load_samples, summarization_prompt
from runtime.util.errors import SpecDecError, UsageError

ROOT = Path(__file__).parents[3]
ROWS: list[dict[str, Any]] = [
    {"id": f"a{i}", "category": "news" if i % 2 else "code", "article": f"Text {i}.", "highlights": f"Sum {i}."}
    for i in range(12)
]


def load(
    name: str | Path,
    *,
    eval_task: EvalTask = "summarize",
    dataset_dir: Path | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    columns: Columns = Columns(),  # noqa: B008  # frozen
) -> list[Sample]:
    return load_samples(
        str(name), eval_task=eval_task, dataset_dir=dataset_dir, max_samples=max_samples, seed=seed, columns=columns
    )


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_sample(row: dict[str, Any]) -> Sample:
    return Sample(row["id"], row["category"], row["article"], row["highlights"])


def by_number(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: int(sample.id[1:]))


def write_jsonl(directory: Path) -> Path:
    return write(directory / "d.jsonl", json_lines(ROWS))


def write_json(directory: Path) -> Path:
    return write(directory / "d.json", json.dumps(ROWS, indent=2))


def write_json_lines_as_json(directory: Path) -> Path:
    return write(directory / "d.json", json_lines(ROWS))


def write_csv(directory: Path) -> Path:
    lines = ["id,category,article,highlights", *(",".join(row.values()) for row in ROWS)]
    return write(directory / "d.csv", "\ufeff" + "\r\n".join(lines) + "\r\n")


def write_parquet(directory: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), directory / "d.parquet")
    return directory / "d.parquet"


@pytest.mark.parametrize("writer", [write_jsonl, write_json, write_json_lines_as_json, write_csv, write_parquet])
def test_every_file_kind_gives_the_same_samples_in_the_same_order(
    tmp_path: Path, writer: Callable[[Path], Path]
) -> None:
    samples = load(writer(tmp_path), seed=5)
    assert by_number(samples) == [as_sample(row) for row in ROWS]
    assert samples == load(write_jsonl(tmp_path), seed=5)


def test_max_samples_takes_the_first_of_the_same_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path)
    assert load(path, max_samples=5) == load(path)[:5]
    assert len(load(path, max_samples=100)) == len(ROWS)


@pytest.mark.parametrize("max_samples", [0, -3])
def test_fewer_than_one_sample_is_wrong_usage(tmp_path: Path, max_samples: int, said: Said) -> None:
    with pytest.raises(UsageError) as error:
        load(write_jsonl(tmp_path), max_samples=max_samples)
    said(error, "1", max_samples)


def test_demo_keeps_the_order_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path)
    monkeypatch.setattr(dataset, "_demo_file", lambda: path)
    assert load("demo", seed=3) == [as_sample(row) for row in ROWS]
    assert load("demo", max_samples=2, seed=4) == [as_sample(row) for row in ROWS[:2]]


@pytest.mark.parametrize(
    ("text_column", "reference_column"),
    [
        ("article", "highlights"),
        ("prompt", "reference"),
        ("text", "summary"),
        ("document", "output"),
        ("input", "summary"),
    ],
)
def test_summarize_accepts_the_usual_column_names(tmp_path: Path, text_column: str, reference_column: str) -> None:
    path = write(tmp_path / "d.jsonl", json_lines([{text_column: "T", reference_column: "R"}]))
    assert load(path) == [Sample("1", None, "T", "R")]


def test_code_completion_uses_prompt_and_solution_unchanged(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n    ", "canonical_solution": "    return 1\n"}
    path = write(tmp_path / "d.jsonl", json_lines([row]))
    expected = Sample("HumanEval/0", None, "def f():\n    ", "    return 1\n")
    assert load(path, eval_task="code_completion") == [expected]


def test_summarization_prompt_is_that_of_tensorrt_llm() -> None:
    assert summarization_prompt("  It did n't rain .\n") == "It didn't rain .\n TL;DR:"


def test_text_that_looks_like_another_type_stays_text(tmp_path: Path) -> None:
    csv_path = write(tmp_path / "d.csv", "id,category,article,highlights\n007,1e3,NA,2024-01-01 00:00:00\n")
    json_path = write(
        tmp_path / "d.jsonl", '{"id": "007", "category": "1e3", "article": "NA", "highlights": "2024-01-01 00:00:00"}'
    )
    expected = [Sample("007", "1e3", "NA", "2024-01-01 00:00:00")]
    assert load(csv_path) == expected
    assert load(json_path) == expected


def test_missing_ids_and_categories_become_row_numbers_and_none(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"article": "A", "highlights": "R", "category": ""},
        {"article": "B", "highlights": "R", "id": 7},
    ]
    samples = load(write(tmp_path / "d.jsonl", json_lines(rows)))
    assert sorted(samples, key=lambda sample: sample.id) == [Sample("1", None, "A", "R"), Sample("7", None, "B", "R")]


def test_csv_cells_may_hold_line_ends_and_long_articles(tmp_path: Path) -> None:
    article = "first, line\nsecond " + "x" * 200_000
    path = write(tmp_path / "d.csv", f'article,highlights\n"{article}",R\n')
    assert load(path) == [Sample("1", None, article, "R")]


@pytest.mark.parametrize("writer", [write_jsonl, write_parquet])
def test_changed_file_of_the_same_size_and_time_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[[Path], Path]
) -> None:
    path = writer(tmp_path)
    assert by_number(load(path))[0].text == "Text 0."
    before = path.stat()
    monkeypatch.setitem(ROWS[0], "article", "Text X.")
    writer(tmp_path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert by_number(load(path))[0].text == "Text X."


@pytest.mark.parametrize(("column", "value"), [("article", " \n"), ("article", None), ("highlights", 5)])
def test_row_without_text_is_named_by_its_place_in_the_file(
    tmp_path: Path, column: str, value: object, said: Said
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[8][column] = value
    reason = "is not text" if value is None or value == 5 else "is empty"
    with pytest.raises(SpecDecError) as error:
        load(write(tmp_path / "d.jsonl", "\n" + json_lines(rows)))
    said(error, f"`{column}`", "10", reason)
    with pytest.raises(SpecDecError) as error:
        load(write(tmp_path / "d.json", json.dumps(rows)))
    said(error, f"`{column}`", "9", reason)


@pytest.mark.parametrize("blank", ["\r\n\n", "  \n", "\ufeff\n"])
def test_blank_lines_before_a_csv_header_are_no_header(blank: str, tmp_path: Path, said: Said) -> None:
    """pandas and `datasets` skip them too; line numbers count them."""
    assert [one.text for one in load(write(tmp_path / "d.csv", f"{blank}article,highlights\nA,R\n"))] == ["A"]
    with pytest.raises(SpecDecError) as error:
        load(write(tmp_path / "d.csv", f"{blank}article,highlights\nA,R,S\n"))
    said(error, str(blank.count("\n") + 2), "3", "2")


def test_null_parquet_cell_is_named_by_its_row(tmp_path: Path, said: Said) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"article": ["A", "B", None], "highlights": ["R", "R", "R"]})
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(SpecDecError) as error:
        load(tmp_path / "d.parquet")
    said(error, "`article`", "3", "None")


def test_missing_columns_name_those_found_and_those_wanted(tmp_path: Path, said: Said) -> None:
    path = write(tmp_path / "d.jsonl", json_lines([{"id": "1", "body": "A", "highlights": "R"}]))
    with pytest.raises(SpecDecError) as raised:
        load(path)
    said(raised, "`id`", "`body`", "`highlights`", "`article`", "`prompt`", "`text`")
    path = write(tmp_path / "d.jsonl", json_lines([{"prompt": "A", "highlights": "R"}]))
    with pytest.raises(SpecDecError) as raised:
        load(path, eval_task="code_completion")
    said(raised)
    said(raised, "`canonical_solution`")


def test_columns_of_any_name_can_be_named(tmp_path: Path, said: Said) -> None:
    path = write(tmp_path / "xsum.jsonl", json_lines([{"body": "A", "summary_gt": "R", "article": "no", "y": "S"}]))
    with pytest.raises(SpecDecError) as raised:
        load(path)
    said(raised, "`summary_gt`", "`--reference-column`")
    (sample,) = load(path, columns=Columns("body", "summary_gt"))
    assert (sample.text, sample.reference) == ("A", "R")
    (sample,) = load(path, columns=Columns(reference="y"))
    assert (sample.text, sample.reference) == ("no", "S")
    with pytest.raises(SpecDecError) as raised:
        load(path, columns=Columns(text="title"))
    said(raised, "`title`", "`body`", "`--text-column`")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("d.jsonl", '{"article": "A", "highlights": "R"}\n{"article": \n', "2; 13"),
        ("d.jsonl", '{"article": "A", "highlights": "R"}\n\n"text"\n', "3"),
        ("d.json", '[\n{"article": "A"},\n{"article" "B"}]', "3; 12"),
        ("d.json", '[{"article": "A"}, 5]', "2; 5"),
        ("d.json", "[]", ""),
        ("d.csv", "article,highlights\n", ""),
        ("d.csv", " \n", "d.csv"),  # no header
        ("d.csv", ",,\n", "d.csv"),
        ("d.csv", "article,highlights\nA,R\n,R\n", "`article`; 2"),
        ("d.csv", "article,highlights\nA,R\nB,R,extra\n", "3; 2"),
        ("d.csv", "article,highlights\nA\n", "2; 1"),
        ("d.csv", "article,article\nA,R\n", ""),
        ("d.csv", 'article,highlights\nA,"R\n', "2; CSV"),
        ("d.csv", b"article,highlights\nA,caf\xe9\n", "2; 24"),
        ("d.jsonl", b'{"article": "\xff"}', "1; 13"),
        ("d.jsonl", "", ""),
        ("d.parquet", "article,highlights", ""),
        ("d.parquet", "", ""),
        ("d.parquet", "PAR1 and no more", ""),
        ("d.parquet", "PAR1 and no more PAR1", ""),
        ("d.xml", "<a/>", ""),
        ("missing.jsonl", None, ""),
        ("missing.parquet", None, ""),
    ],
)
def test_file_that_cannot_be_read_is_an_error_with_its_path(
    tmp_path: Path, file: str, content: str | bytes | None, message: str, said: Said
) -> None:
    path = tmp_path / file if content is None else write(tmp_path / file, content)
    with pytest.raises(SpecDecError) as error:
        load(path)
    said(error, file, *message.split("; "))


@pytest.mark.parametrize("name", ["a/b/c", "no such thing", "", "x" * 5000 + "/y/z", "ünï", "nul\0"])
def test_name_that_is_neither_file_nor_hub_id_is_an_error_with_a_hint(name: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        load(name)
    said(raised)
    said(raised, "`--dataset-dir`", "`demo`")


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """No network and nothing cached: what `datasets` does with HF_HUB_OFFLINE=1 and an empty HF_HOME."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


@pytest.mark.parametrize(
    ("name", "hub_id"), [("ccdv/cnn_dailymail", "ccdv/cnn_dailymail"), ("openai_humaneval", "openai/openai_humaneval")]
)
def test_unreachable_hub_names_the_dataset_and_what_to_pass_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, hub_id: str, said: Said
) -> None:
    offline(monkeypatch, tmp_path)
    with pytest.raises(SpecDecError) as raised:
        load(name)
    said(raised, hub_id, "`--dataset-dir`", "`demo`")


class Hub:
    """Stands in for `datasets.load_dataset`: records the calls, and answers each with the next outcome."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_hub_dataset_is_read_in_its_configuration_or_from_its_parquet_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dataset is a script."""
    import datasets

    script = RuntimeError("Dataset scripts are no longer supported, but found cnn_dailymail.py")
    hub = Hub(datasets.Dataset.from_list(ROWS), script, datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    for _ in range(2):
        assert by_number(load("ccdv/cnn_dailymail", seed=1)) == [as_sample(row) for row in ROWS]
    assert hub.calls[0] == (("ccdv/cnn_dailymail", "3.0.0"), {"split": "test"})
    export = "hf://datasets/ccdv/cnn_dailymail@refs/convert/parquet/3.0.0/test/*.parquet"
    assert hub.calls[2] == (("parquet",), {"data_files": {"test": export}, "split": "test"})


def test_hub_failures_are_told_apart(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    import datasets

    failures = (
        datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist"),
        ConnectionError("Couldn't reach"),
        ValueError('Unknown split "test".\nShould be one of'),
        RuntimeError(),
    )
    for failure in failures:
        monkeypatch.setattr(datasets, "load_dataset", Hub(failure))
        with pytest.raises(SpecDecError) as error:
            load("a/b")
        said(error, "a/b")


def test_dataset_dir_replaces_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, tmp_path / "cache")
    copy = tmp_path / "ccdv" / "cnn_dailymail"
    write(copy / "train.jsonl", json_lines(ROWS[:1]))
    write(copy / "test.jsonl", json_lines(ROWS[1:]))
    above = load("ccdv/cnn_dailymail", dataset_dir=tmp_path)
    itself = load("ccdv/cnn_dailymail", dataset_dir=copy)
    assert by_number(above) == [as_sample(row) for row in ROWS[1:]]
    assert itself == above


def test_dataset_dir_may_be_a_copy_of_a_repository_with_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path / "cache")
    copy = tmp_path / "copy"
    configs = "".join(
        f"- config_name: {config}\n  data_files:\n  - split: test\n    path: {config}/test.csv\n"
        for config in ("1.0.0", "3.0.0")
    )
    write(copy / "README.md", f"---\nconfigs:\n{configs}---\n")
    write(copy / "1.0.0" / "test.csv", "article,highlights\nold,R\n")
    write(copy / "3.0.0" / "test.csv", "article,highlights\nnew,R\n")
    assert [sample.text for sample in load("ccdv/cnn_dailymail", dataset_dir=copy)] == ["new"]


@pytest.mark.parametrize("in_splits", [True, False])
def test_directory_of_save_to_disk_is_read(tmp_path: Path, in_splits: bool) -> None:
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    if in_splits:
        saved = datasets.DatasetDict({"train": saved.select([0]), "test": saved})
    saved.save_to_disk(str(tmp_path / "saved"))
    expected = [as_sample(row) for row in ROWS]
    assert by_number(load("ccdv/cnn_dailymail", dataset_dir=tmp_path / "saved")) == expected
    assert by_number(load(tmp_path / "saved")) == expected


def test_directory_with_splits_other_than_test_names_them(tmp_path: Path, said: Said) -> None:
    for split in ("train", "validation"):
        write(tmp_path / "d" / f"{split}.jsonl", json_lines(ROWS))
    with pytest.raises(SpecDecError) as error:
        load("a/b", dataset_dir=tmp_path / "d")
    said(error, "`test`", "['train', 'validation']")


def test_dataset_dir_missing_or_without_data_is_an_error(tmp_path: Path, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        load("a/b", dataset_dir=tmp_path / "gone")
    said(error, "gone")
    (tmp_path / "bare").mkdir()
    with pytest.raises(SpecDecError) as error:
        load("a/b", dataset_dir=tmp_path / "bare")
    said(error, "bare")


def test_dataset_dir_with_demo_or_a_file_is_wrong_usage(tmp_path: Path, said: Said) -> None:
    for name in ("demo", str(write_jsonl(tmp_path))):
        with pytest.raises(UsageError) as error:
            load(name, dataset_dir=tmp_path)
        said(error)


def test_loading_prints_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    for directory in ("tmp", "home", "d"):
        (tmp_path / directory).mkdir()
    write_parquet(tmp_path)
    write_jsonl(tmp_path / "d")
    code = (
        "import sys; from commands.inputs.dataset import load_samples\n"
        "assert not {'datasets', 'numpy', 'torch'} & set(sys.modules)\n"
        "for name in sys.argv[1:]:\n"
        "    samples = load_samples(name, eval_task='summarize', dataset_dir=None, max_samples=3, seed=0)\n"
        "    assert len(samples) == 3"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d.parquet"), str(tmp_path / "d")],
        cwd=ROOT, env=environment, text=True, capture_output=True, timeout=HANG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    left = [path for parent in ("tmp", "home") for path in (tmp_path / parent).rglob("*") if path.is_file()]
    assert left == []


def test_questions_take_the_first_turn_and_need_no_reference(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question_id": 5, "category": "math", "turns": ["a?", "b?"], "reference": ["A", "B"]},
        {"question_id": 6, "turns": ["c?"]},
        {"question_id": 7, "turns": ["d?"], "reference": [["D", "the D"], ["E"]]},
    ]
    path = write(tmp_path / "d.jsonl", json_lines(rows))
    samples = sorted(load(path, eval_task="question"), key=lambda sample: sample.id)
    assert samples == [Sample("5", "math", "a?", "A"), Sample("6", None, "c?", None), Sample("7", None, "d?", "D")]


def test_questions_of_speed_bench_are_read_once_their_texts_are_fetched(tmp_path: Path, said: Said) -> None:
    """Rows as published (`turns`, some a mark) and as NVIDIA's `prepare.py` writes them (`messages`)."""
    published: dict[str, Any] = {"question_id": "0" * 32, "category": "coding", "sub_category": "x", "source": "y"}
    messages = [{"role": "user", "content": "a?"}, {"role": "user", "content": "b?"}]
    path = write(tmp_path / "qualitative.jsonl", json_lines([{**published, "messages": messages}]))
    assert load(path, eval_task="question") == [Sample("0" * 32, "coding", "a?", None)]
    mark = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n"
    write(path, json_lines([{**published, "turns": ["a?"]}, {**published, "turns": [mark + "You are {role_name}."]}]))
    with pytest.raises(SpecDecError) as error:
        load(path, eval_task="question")
    said(error, "line 2")
    write(path, json_lines([{"messages": [{"role": "system", "content": "Be brief."}, *messages]}]))
    with pytest.raises(SpecDecError) as error:
        load(path, eval_task="question")
    said(error, "`messages`", "line 1")


@pytest.mark.parametrize("turns", [[], [3], None, [""]])
def test_question_without_text_is_an_error(tmp_path: Path, turns: object, said: Said) -> None:
    path = write(tmp_path / "d.jsonl", json_lines([{"turns": turns}]))
    with pytest.raises(SpecDecError) as error:
        load(path, eval_task="question")
    said(error, "`turns`", "1")
