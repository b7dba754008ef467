"""Reading prompts: each file kind as TensorRT-LLM's run.py takes it, each mistake named by its place."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentences import Said
from strength import examples

from commands.inputs.prompts import Prompt, read_prompts
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def npy(array: Any, path: Path) -> Path:
    np.save(path, array)
    return path


def texts(*values: str) -> list[Prompt]:
    return [Prompt(value, None) for value in values]


def ids(*rows: list[int]) -> list[Prompt]:
    return [Prompt(None, tuple(row)) for row in rows]


def test_input_texts_become_prompts_in_order_unchanged() -> None:
    assert read_prompts([" Hello\n", "How are you?"], None) == texts(" Hello\n", "How are you?")


def test_either_texts_or_a_file_are_given(tmp_path: Path, said: Said) -> None:
    for texts_given, file in (([], None), (["Hello"], write(tmp_path / "in.txt", "a\n"))):
        with pytest.raises(UsageError) as error:
            read_prompts(texts_given, file)
        said(error)


@pytest.mark.parametrize(("text", "value"), [("  \n", "2"), ("caf\udce9", "3")])
def test_input_text_that_is_none_is_named_by_its_place(text: str, value: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        read_prompts(["Hello", text], None)
    said(error, value)


@pytest.mark.parametrize(
    "content", ["one\n two \nthree\n", "one\n two \nthree", "one\r\n two \r\nthree\r\n", "\ufeffone\n two \nthree"]
)
def test_txt_holds_one_prompt_a_line_without_its_line_end(tmp_path: Path, content: str) -> None:
    assert read_prompts([], write(tmp_path / "in.txt", content)) == texts("one", " two ", "three")


def test_txt_lines_end_at_line_feeds_and_not_at_other_unicode_separators(tmp_path: Path) -> None:
    line = "a\u2028b\x0bc\x85d"
    assert read_prompts([], write(tmp_path / "in.txt", f"{line}\n")) == texts(line)


@pytest.mark.parametrize(("content", "line"), [("a\n\nb\n", 2), ("a\nb\n\n", 3), ("a\n  \nb", 2)])
def test_blank_txt_lines_are_left_out_and_named(tmp_path: Path, content: str, line: int, said: Said) -> None:
    with pytest.warns(SpecDecWarning) as warned:
        assert read_prompts([], write(tmp_path / "in.txt", content)) == texts("a", "b")
    said(warned, line, "in.txt")


def test_standard_input_is_one_prompt_or_one_a_line(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    def say(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    say("zwei\nZeilen \u00fc\n".encode())
    assert read_prompts(["a", "-"], None) == texts("a", "zwei\nZeilen \u00fc")
    say(b"one\ntwo\n")
    assert read_prompts([], Path("-")) == texts("one", "two")
    say(b"ab\xff")
    with pytest.raises(SpecDecError) as error:
        read_prompts(["-"], None)
    said(error)
    say(b"")
    with pytest.raises(SpecDecError) as error:
        read_prompts(["-"], None)
    said(error, "1")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("in.txt", "\n \n", "in.txt"),
        ("in.txt", "\ufeff", "in.txt"),
        ("in.txt", b"abc\nd\xff\n", "2; 5"),
        ("in.csv", b"abc\nd\xff\n", "2; 5"),
        ("in.jsonl", b"abc\nd\xff\n", "2; 5"),
        ("in.txt", b"\xef\xbb\xbfa\xff", "1; 4"),  # the byte order mark counts
        ("in.csv", "", "in.csv"),
        ("in.csv", "1\n\n2\n", "2"),
        ("in.csv", '1\n"2\n', "2; CSV"),
        ("in.csv", '1,2,3\n4\r\n 5, "6" \n', "3; 2"),
        ("in.csv", "1,9223372036854775808\n", "2; 9223372036854775808; 1"),
        ("in.jsonl", " \n\n", "in.jsonl"),
        *((f"in.{suffix}", None, f"in.{suffix}") for suffix in ("txt", "csv", "jsonl", "npy")),
    ],
)
def test_what_cannot_be_read_is_named_by_its_place(
    tmp_path: Path, file: str, content: str | bytes | None, message: str, said: Said
) -> None:
    if content is not None:
        write(tmp_path / file, content)
    with pytest.raises(SpecDecError) as error:
        read_prompts([], tmp_path / file)
    said(error, *message.split("; "))


def test_directory_is_no_file(tmp_path: Path, said: Said) -> None:
    (tmp_path / "in.txt").mkdir()
    with pytest.raises(SpecDecError) as error:
        read_prompts([], tmp_path / "in.txt")
    said(error)


def test_unknown_suffix_is_wrong_usage_and_lists_the_known_ones(tmp_path: Path, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        read_prompts([], write(tmp_path / "in.md", "a"))
    said(raised, "in.md", "`.csv`", "`.jsonl`", "`.npy`", "`.txt`")


@pytest.mark.parametrize("name", ["nothing", "directory"])
def test_a_path_that_is_no_file_is_told_before_its_suffix(name: str, tmp_path: Path, said: Said) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(SpecDecError) as raised:
        read_prompts([], tmp_path / name)
    said(raised, "cannot read", name)


def test_suffix_case_does_not_matter(tmp_path: Path) -> None:
    assert read_prompts([], write(tmp_path / "IN.TXT", "a")) == texts("a")


def test_csv_rows_are_ragged_token_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", '1,2,3\n4\r\n 5,"6"\n9223372036854775807\n')
    assert read_prompts([], path) == ids([1, 2, 3], [4], [5, 6], [2**63 - 1])


@pytest.mark.parametrize("cell", ["-1", "1.5", "x", "", "1e3", "1_000", "٣", "+4", "1 2", "1;2", "9" * 5000])
def test_csv_cell_that_is_no_token_id_is_named_by_row_and_column(tmp_path: Path, cell: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        read_prompts([], write(tmp_path / "in.csv", f"7\n8,9,{cell}\n"))
    said(raised, "2", "3", "in.csv")
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16, np.uint64, ">i4"])
def test_npy_rows_are_prompts_of_python_ints(tmp_path: Path, dtype: Any) -> None:
    prompts = read_prompts([], npy(np.array([[1, 2], [3, 0]], dtype=dtype), tmp_path / "in.npy"))
    assert prompts == ids([1, 2], [3, 0])
    assert all(type(token) is int for prompt in prompts for token in prompt.ids or ())


def test_one_dimensional_npy_is_one_prompt(tmp_path: Path) -> None:
    assert read_prompts([], npy(np.array([5, 6, 7]), tmp_path / "in.npy")) == ids([5, 6, 7])


def test_npy_negative_pad_id_is_taken_off_before_ids_are_checked(tmp_path: Path, said: Said) -> None:
    path = npy(np.array([[1, 2], [3, -1]]), tmp_path / "in.npy")
    assert read_prompts([], path, pad_id=-1) == ids([1, 2], [3])
    with pytest.raises(SpecDecError) as error:
        read_prompts([], path)
    said(error, "2", "-1")


@pytest.mark.parametrize(
    ("array", "value"),
    [
        *((np.zeros((2, 2), dtype=dtype), "in.npy") for dtype in ("float32", "bool", "datetime64[s]", "U3", "i4,i4")),
        *((np.ones(shape, dtype=int), "1") for shape in ((), (1, 1, 1))),
        *((np.ones(shape, dtype=int), "in.npy") for shape in ((0,), (0, 3), (2, 0))),
        (np.array([[1, 0], [0, 0]]), "2"),  # a row of pad ids alone
    ],
    ids=lambda value: f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else value,
)
def test_npy_array_that_holds_no_prompts_is_named(array: Any, value: str, tmp_path: Path, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        read_prompts([], npy(array, tmp_path / "in.npy"), pad_id=0)
    said(error, value)


def test_npy_pickle_is_refused_and_not_run(tmp_path: Path, said: Said) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "in.npy"
    np.save(path, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(SpecDecError) as error:
        read_prompts([], path)
    said(error)
    assert not (tmp_path / "sprung").exists()


def test_npy_cut_short_or_of_another_kind_is_an_error(tmp_path: Path, said: Said) -> None:
    whole = npy(np.arange(8), tmp_path / "in.npy").read_bytes()
    huge = io.BytesIO()
    archive = io.BytesIO()
    np.savez(archive, ids=np.array([1]))
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(huge, header)
    for content in (b"", whole[:5], whole[:-3], huge.getvalue(), archive.getvalue()):
        with pytest.raises(SpecDecError) as error:
            read_prompts([], write(tmp_path / "in.npy", content))
        said(error)


def test_jsonl_takes_prompts_and_prompt_ids_and_passes_over_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '{"prompt": "Zeile\\n1", "id": 3}\r\n\n{"prompt_ids": [0, 5]}\n{"prompt": "x"}')
    assert read_prompts([], path) == [*texts("Zeile\n1"), *ids([0, 5]), *texts("x")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "2; 15"),
        ("[1, 2]", "2; [1, 2]"),
        ("{}", "2; `prompt`; `prompt_ids`; `messages`"),
        ('{"prompt": "a", "prompt_ids": [1]}', "2; `prompt`; `prompt_ids`; `messages`"),
        ('{"prompt": 5}', "`prompt`; 2; 5"),
        ('{"prompt": null}', "`prompt`; 2; None"),
        ('{"prompt": " "}', "`prompt`; 2"),
        ('{"prompt": "\\ud800"}', "`prompt`; 2"),
        ('{"prompt_ids": "12"}', "`prompt_ids`; 2"),
        ('{"prompt_ids": []}', "`prompt_ids`; 2"),
        ('{"prompt_ids": [1, true]}', "2; `prompt_ids`"),
        ('{"prompt_ids": [1.0]}', "1; 1.0; `prompt_ids`; 2"),
        ('{"prompt_ids": [-4]}', "1; -4; `prompt_ids`; 2"),
        ('{"prompt_ids": [' + "9" * 5000 + "]}", "2"),
        ("[" * 100_000, "2"),
        ('{"messages": "hello"}', "`messages`; 2"),
        ('{"messages": [{"role": "user"}]}', "`messages`; 2"),
    ],
)
def test_jsonl_mistake_is_named_by_its_line(tmp_path: Path, line: str, message: str, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        read_prompts([], write(tmp_path / "in.jsonl", f'{{"prompt": "ok"}}\n{line}\n'))
    said(error, *message.split("; "))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), min_size=1, max_size=5))
def test_csv_and_jsonl_give_back_the_ids_written(tmp_path: Path, rows: list[list[int]]) -> None:
    as_csv = "\n".join(",".join(map(str, row)) for row in rows)
    as_jsonl = "\n".join(json.dumps({"prompt_ids": row}) for row in rows)
    assert read_prompts([], write(tmp_path / "in.csv", as_csv)) == ids(*rows)
    assert read_prompts([], write(tmp_path / "in.jsonl", as_jsonl)) == ids(*rows)


NPY_HEADER = b"\x93NUMPY\x01\x00"


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    suffix=st.sampled_from([".txt", ".csv", ".jsonl", ".npy"]),
    content=st.one_of(
        st.binary(max_size=60),
        st.text(alphabet='0123456789,"[]{}:\n\r\\ pround_is', max_size=60).map(str.encode),
        st.binary(max_size=60).map(lambda data: NPY_HEADER + bytes([len(data), 0]) + data),
    ),
)
@example(suffix=".npy", content=NPY_HEADER + b"\x30\x00{'descr': 'O', 'fortran_order': 0, 'shape': (1,)}  ")
@example(suffix=".csv", content=b"1\x00,2")
def test_any_bytes_give_prompts_or_an_error_of_ours(tmp_path: Path, suffix: str, content: bytes) -> None:
    try:
        prompts = read_prompts([], write(tmp_path / f"in{suffix}", content))
    except SpecDecError as error:
        assert str(error)
    else:
        assert prompts
        assert all((prompt.text is None) != (prompt.ids is None) for prompt in prompts)
        assert all(prompt.text or prompt.ids for prompt in prompts)


def test_category_of_a_line_is_kept_and_must_be_text(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "a", "category": "b"}, {"prompt_ids": [1], "category": ""}, {"prompt_ids": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.category for prompt in read_prompts([], path)] == ["b", None, None]
    path.write_text('{"prompt": "a", "category": ["b"]}')
    with pytest.raises(SpecDecError) as error:
        read_prompts([], path)
    said(error, "`category`", "1")
