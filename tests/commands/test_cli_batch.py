"""`specdec batch`: a line for each request, the same bytes with any drafter and after any kill, and clear errors."""

import fcntl
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import PROMPTS, Result, Specdec, draft_model, tree
from gate import Gate
from sentences import Said
from waiting import wait_until

from runtime.drafters.ngram import NgramLookup
from scripts.campaigns import forks

Row = dict[str, Any]
Batch = Callable[..., Result]
URL, CHAT_URL = "/v1/completions", "/v1/chat/completions"


def openai(custom_id: str, url: str = URL, **body: Any) -> Row:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def requests(number: int = 24) -> list[Row]:
    """Greedy and sampled ones of different lengths, and two that cannot be answered."""
    rows = [
        openai(
            f"request {i} ü", prompt=f"{PROMPTS[i % len(PROMPTS)]} {i}", max_tokens=8 + i % 9,
            temperature=0 if i % 3 else 0.9, ignore_eos=True,
        )
        for i in range(number)
    ]  # fmt: skip
    rows[4]["body"]["n"] = 3
    rows[5]["body"]["temperature"] = -1
    rows[7]["body"]["prompt"] = "dog " * 200
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(row: Row) -> list[str]:
    assert row["error"] is None and row["response"]["status_code"] == 200, row
    return [choice["text"] for choice in row["response"]["body"]["choices"]]


@pytest.fixture
def batch(specdec: Specdec, llama_engine_dir: Path, tmp_path: Path) -> Batch:
    """`batch(rows, …)`: the results go to `results.jsonl` in `tmp_path`, unless the file is named."""

    def call(rows: list[Row] | None, *arguments: object, output: str = "results.jsonl") -> Result:
        if rows is not None:
            write(tmp_path / "requests.jsonl", rows)
        files = {"-i": tmp_path / "requests.jsonl", "-o": tmp_path / output}
        files = [part for flag, path in files.items() if flag not in arguments for part in (flag, path)]
        return specdec("batch", *files, "--engine-dir", llama_engine_dir, *arguments)

    return call


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, llama_engine_dir: Path) -> bytes:
    """The results of `requests()`, by a process that nothing happened to, without a drafter."""
    forks.import_all()
    directory = tmp_path_factory.mktemp("undisturbed")
    write(directory / "requests.jsonl", requests())
    assert finish(start(arguments(llama_engine_dir), directory), directory) == 0
    assert tree(directory) == ["errors", "requests.jsonl", "results.jsonl"]
    return (directory / "results.jsonl").read_bytes()


def arguments(engine_dir: Path, *others: object) -> list[object]:
    return ["batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--engine-dir", engine_dir, *others]


def start(arguments: list[object], directory: Path, gate: Gate | None = None) -> int:
    """A process of the command in a directory, where its errors are too. It stands still at a gate that is given.

    Automatic lengths would ask the drafter at the gate only while drafts pay, by what steps take.
    """
    arguments += ["--ngram-config", "4,2", "--draft-len-mode", "fixed"] if gate else []
    prepare = partial(gate.hold, NgramLookup) if gate else lambda: None
    with (directory / "errors").open("wb") as errors:
        return forks.start(arguments, directory, errors.fileno(), prepare=prepare)


def finish(process: int, directory: Path) -> int:
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 130), (directory / "errors").read_text()
    return code


def wait_for(is_so: Callable[[], bool], process: int) -> None:
    """Or for the end of the process."""
    wait_until(lambda: is_so() or os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)


def test_every_request_has_its_result_in_order(undisturbed: bytes) -> None:
    rows = [json.loads(line) for line in undisturbed.splitlines()]
    assert [row["custom_id"] for row in rows] == [request["custom_id"] for request in requests()]
    assert len({row["id"] for row in rows}) == len(rows)
    for row, request in zip(rows, requests(), strict=True):
        assert set(row) == {"id", "custom_id", "response", "error"}
        if row["error"] is None:
            assert len(texts(row)) == request["body"].get("n", 1)
            assert row["response"]["body"]["usage"]["completion_tokens"] == request["body"]["max_tokens"] * len(
                texts(row)
            )
    failed = {row["custom_id"]: row for row in rows if row["error"] is not None}
    assert sorted(failed) == ["request 5 ü", "request 7 ü"]
    assert failed["request 5 ü"]["error"]["param"] == "temperature"
    assert failed["request 7 ü"]["error"]["code"] == "context_length_exceeded"
    for row in failed.values():
        assert row["response"]["status_code"] == 400 and row["response"]["body"] == {"error": row["error"]}


def test_lines_of_different_owners_have_keys_and_values_of_their_own(
    batch: Batch, specdec: Specdec, tmp_path: Path
) -> None:
    """Lines without a `cache_salt` are one owner, and so are those with the same."""
    rows = [openai(f"{i}", prompt="The dog", max_tokens=3) for i in range(6)]
    for i, salt in ((1, "a"), (2, "b"), (3, "a"), (4, None)):
        rows[i]["body"]["cache_salt"] = salt
    assert batch(rows, "--kv-cache-dir", tmp_path / "kv").exit_code == 0
    (engine,) = specdec("cache", "list", "--kv-cache-dir", tmp_path / "kv", "--json").document["kv"]["engines"]
    assert engine["num_owners"] == 3


@pytest.mark.parametrize(
    ("row", "status", "message"),
    [
        (openai("a", "/v1/embeddings", input="x"), 404, "POST; /v1/embeddings"),
        (openai("a", prompt="x", model="gpt-4"), 404, "`gpt-4`"),
        (openai("a", prompt="x", stream=True), 400, "`stream`"),
        (openai("a") | {"body": [1]}, 400, "list"),
    ],
)
def test_a_request_that_fails_has_its_error_and_the_next_is_answered(
    row: Row, status: int, message: str, batch: Batch, tmp_path: Path, said: Said
) -> None:
    result = batch([row, openai("b", prompt="The dog", max_tokens=3)])
    assert result.exit_code == 0
    said(result, "1", "2")
    failed, answered = results(tmp_path / "results.jsonl")
    assert failed["response"]["status_code"] == status
    said(failed["error"]["message"], *message.split("; "))
    assert texts(answered)


def test_auto_drafts_the_answers_of_earlier_lines(batch: Batch, tmp_path: Path) -> None:
    """Four of twelve equal lines run at once, all that the engine takes; the others take two steps each.

    The lookup alone has no pool, which would draft the answers of earlier lines too.
    """
    rows = [openai(f"{i}", prompt=PROMPTS[0], max_tokens=22, temperature=0, ignore_eos=True) for i in range(12)]
    steps = {}
    for name, pool in (("SUFFIX", ["--ngram-pool", "private"]), ("AUTO", [])):
        flags = [*pool, "--spec-decode-algo", name, "--spec-decode-max-draft-len", 10]
        flags += ["--draft-len-mode", "fixed", "--json"]
        document = batch(rows, *flags, output=f"{name}.jsonl").document
        steps[name] = document["num_generated_tokens"] / document["tokens_per_step"]
        assert len({tuple(texts(row)) for row in results(tmp_path / f"{name}.jsonl")}) == 1
    assert round(steps["AUTO"]) <= round(steps["SUFFIX"] / 3 + 2 * 8)


@pytest.mark.parametrize("torn", [b"", b'{"id":"batch_req_0","custom_id":"request 9', b"\0" * 50])
def test_a_torn_line_is_done_again(torn: bytes, batch: Batch, undisturbed: bytes, tmp_path: Path) -> None:
    """Tear a line as a power failure does; a line that follows a torn one is not believed either."""
    lines = undisturbed.splitlines(keepends=True)
    after = lines[20] if torn.startswith(b"\0") else b""
    partial = tmp_path / "results.jsonl.partial"
    partial.write_bytes(b"".join(reversed(lines[:7])) + torn + (b"\n" + after if after else b""))
    result = batch(requests(), "--json")
    assert result.document["num_done_before"] == 7
    assert (tmp_path / "results.jsonl").read_bytes() == undisturbed
    assert not partial.exists()


def test_ctrl_c_keeps_what_is_done(undisturbed: bytes, llama_engine_dir: Path, tmp_path: Path, batch: Batch) -> None:
    rows = [*requests(), openai("long", prompt="dog", max_tokens=100, ignore_eos=True)]
    write(tmp_path / "requests.jsonl", rows)
    partial, gate = tmp_path / "results.jsonl.partial", Gate(tmp_path, num_steps=40)
    process = start(arguments(llama_engine_dir), tmp_path, gate)
    wait_for(lambda: gate.is_reached, process)
    os.kill(process, signal.SIGINT)
    assert finish(process, tmp_path) == 130
    num_done = partial.read_bytes().count(b"\n")
    told = [line for line in (tmp_path / "errors").read_text().splitlines() if "interrupted" in line]
    assert 0 < num_done < 25
    assert told == [f"warning: interrupted: {num_done} of 25 requests are done, and the same command goes on"]
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert batch(None, "--json").document["num_done_before"] == num_done
    assert (tmp_path / "results.jsonl").read_bytes().startswith(undisturbed)


def test_failures_from_before_a_resumption_are_counted(batch: Batch, tmp_path: Path) -> None:
    """Two of four requests name another model. Half of the requests, or all, have a result when the command resumes."""
    rows = [openai(f"{i}", prompt="dog", max_tokens=2) for i in range(4)]
    for row in rows[::2]:
        row["body"]["model"] = "other"
    batch(rows[:2])
    result = batch(rows, "--json")
    assert (result.document["num_done_before"], result.document["num_failed"]) == (2, 2)
    assert "2 of 4 requests failed" in result.stderr
    assert sum(row["error"] is not None for row in results(tmp_path / "results.jsonl")) == 2


def test_requests_may_be_added(batch: Batch, undisturbed: bytes, tmp_path: Path) -> None:
    assert batch(requests()[:10]).exit_code == 0
    assert batch(requests(), "--json").document["num_done_before"] == 10
    assert (tmp_path / "results.jsonl").read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("rows", "flags", "reason"),
    [
        (requests()[:9], [], "10; 'request 9 ü"),
        ([openai("request 0 ü", prompt="x"), *requests()[1:]], [], "1; 'request 0 ü"),
        (requests(), ["--temperature", 0.5], ""),
    ],
)
def test_results_of_another_job_are_refused(
    rows: list[Row], flags: list[object], reason: str, batch: Batch, undisturbed: bytes, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "results.jsonl.partial").write_bytes(undisturbed)
    result = batch(rows, *flags)
    assert result.exit_code == 1 and result.stderr.count("\n") == 2
    said(result, *reason.split("; "))
    assert (tmp_path / "results.jsonl.partial").read_bytes() == undisturbed
    assert tree(tmp_path) == ["requests.jsonl", "results.jsonl.partial"]


@pytest.mark.parametrize("name", ["results.jsonl", "results.jsonl.partial"])
def test_a_file_of_something_else_is_left_alone(name: str, batch: Batch, tmp_path: Path, said: Said) -> None:
    (tmp_path / name).write_text("my notes\n")
    result = batch(requests())
    assert result.exit_code == 1
    said(result, "1")
    assert (tmp_path / name).read_text() == "my notes\n"


def test_results_that_another_process_writes_are_refused(batch: Batch, tmp_path: Path, said: Said) -> None:
    with (tmp_path / "results.jsonl.partial").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = batch(requests())
    assert result.exit_code == 1
    said(result)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ('{"prompt": "a"}\n{', "2"),
        ('{"prompt": "a"\n{"prompt": "b"}', "line 1"),
        ('{"prompt": "a"}\n{"prompt": "caf\udce9"}', "line 2; byte 16; 0xe9"),
        ('{"custom_id": "a", "prompt": "x"}\n\n{"custom_id": "a", "prompt": "y"}', "1; 3; `custom_id`; 'a"),
        ('{"url": "/v1/completions", "body": {}}', "`custom_id`; 1"),
        ('{"custom_id": 7, "url": "/v1/completions", "body": {}}', "`custom_id`; 1; 7"),
        ('{"custom_id": "a", "body": {}}', "`url`; 1"),
        ('{"custom_id": "", "prompt": "x"}', "`custom_id`; 1"),
        ('{"custom_id": "a"}', "1; `body`; `prompt`"),
        ('{"custom_id": "\\ud800", "prompt": "x"}', "`custom_id`; 1"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_is_done(
    text: str, error: str, batch: Batch, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "requests.jsonl").write_text(text, errors="surrogateescape")
    result = batch(None)
    assert result.exit_code == 1 and result.stderr.count("\n") == 2
    said(result, *error.split("; "))
    assert tree(tmp_path) == ["requests.jsonl"]


def test_a_line_without_an_end_is_refused_at_once(batch: Batch, tmp_path: Path, said: Said) -> None:
    """A terabyte of nothing behind a request: it takes no space on the disk, and would take all memory."""
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a"}\n')
    os.truncate(tmp_path / "requests.jsonl", 10**12)
    result = batch(None)
    assert result.exit_code == 1
    said(result, "line 2", "64 MB")


@pytest.mark.parametrize(
    ("flags", "exit_code", "error"),
    [
        (["--temperature", "-1"], 2, "0"),
        (["--checkpoint-dir", "x"], 2, "`--checkpoint-dir`; x"),
        (["--mode", "orchestrator"], 2, ""),
        (["--ngram-config", "11,2"], 1, "10"),
        (["-o", "requests.jsonl"], 2, ""),
        (["-o", "none/results.jsonl"], 1, ""),
        (["-i", "none"], 1, ""),
        (["-i", "/dev/null"], 1, ""),
        (["--thinking-token-budget", "3"], 2, ""),
    ],
)
def test_wrong_usage_is_told(
    flags: list[str], exit_code: int, error: str, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    result = batch([{"prompt": "a"}], *flags)
    assert result.exit_code == exit_code
    said(result, *error.split("; "))
    assert result.stderr.count("\n") == 2 and tree(tmp_path) == ["requests.jsonl"]


def test_drafts_that_choose_samples_have_to_be_the_same_in_every_run(
    batch: Batch, draft_engine_dir: Path, said: Said
) -> None:
    flags = draft_model(draft_engine_dir, "[4,[0],[0],True]")
    result = batch([{"prompt": "a"}], *flags, "--draft-len-mode", "auto")
    assert result.exit_code == 2
    said(result)


_FAILS = """
from runtime.core.request import Draft

class FailsForOne:
    def propose(self, sequences, max_draft_len):
        if any(sequence.request.max_new_tokens == 13 for sequence in sequences):
            raise RuntimeError("thirteen")
        return [Draft([])] * len(sequences)

    def forget(self, request_id): ...
"""


def test_a_request_that_breaks_its_step_fails_alone(batch: Batch, current_directory: Path, tmp_path: Path) -> None:
    """Requests that were in the step with it are asked again."""
    (current_directory / "failing.py").write_text(_FAILS)
    rows = [openai(f"{i}", prompt=f"dog {i}", max_tokens=13 if i == 5 else 6) for i in range(12)]
    assert batch(rows, "--drafter", "failing:FailsForOne").exit_code == 0
    found = results(tmp_path / "results.jsonl")
    assert [row["custom_id"] for row in found if row["error"]] == ["5"]
    assert found[5]["response"]["status_code"] == 500 and "thirteen" in found[5]["error"]["message"]
    assert batch(rows, output="without.jsonl").exit_code == 0
    without = results(tmp_path / "without.jsonl")
    assert [texts(row) for row in found if not row["error"]] == [texts(row) for i, row in enumerate(without) if i != 5]
