"""`specdec bench` against a server whose times, tokens and faults are known."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import Result, Specdec, assert_valid, tree
from openai_server import DONE, Asked, Piece, Reply, Script, Server, as_json, event, failure, models, running
from sentences import Said
from waiting import HANG_S, wait_until

Bench = Callable[..., Result]
METRICS = {
    "num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 3, "acceptance_rate": 0.375,
    "accepted_per_position": [2, 1, 0, 0],
    "tokens_per_step": 2.5,
}  # fmt: skip

DOCUMENT_METRICS = ("ttft", "tpot", "itl", "e2el")
VLLM_KEYS = (
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput input_lens output_lens ttfts itls start_times generated_texts errors "
    "max_output_tokens_per_s max_concurrent_requests spec_decode_acceptance_rate spec_decode_acceptance_length "
    "spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens "
    "spec_decode_per_position_acceptance_rates"
)


def chunk(text: str | None, finish_reason: str | None = None, *, chat: bool = False) -> dict[str, Any]:
    said = {"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""}
    return {"id": "x", "choices": [{"index": 0, "finish_reason": finish_reason, **said}], "usage": None}


def usage(num_prompt: int = 7, num_output: int = 5, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
    return {"id": "x", "choices": [], "usage": counts, **more}


def stream(waits: list[float], *, chat: bool = False, **more: Any) -> list[Piece]:
    """Five tokens in as many chunks as there are waits."""
    role = [(0.0, event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))] if chat else []
    last = len(waits) - 1
    texts = [(wait, event(chunk(f" t{i}", "length" if i == last else None, chat=chat))) for i, wait in enumerate(waits)]
    return [*role, *texts, (0.0, event(usage(**more))), (0.0, DONE)]


def script(answer: Callable[[Asked], Reply | None], metrics: Callable[[], str] | None = None) -> Script:
    """Models, perhaps counters, and this answer to whatever is asked."""

    def reply(asked: Asked) -> Reply | None:
        if asked.path == "/v1/models":
            return models("first", "second")
        if asked.path == "/metrics":
            return Reply([(0.0, metrics().encode())], 200, "text/plain") if metrics else failure(404, "no metrics")
        return answer(asked)

    return reply


def steady(asked: Asked) -> Reply:
    """The first token after 60 ms, then one every 20 ms."""
    return Reply(stream([0.06, 0.02, 0.02, 0.02, 0.02], chat="chat" in asked.path))


@pytest.fixture
def bench(specdec: Specdec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`bench(server, …)`: four prompts sent to it."""
    for variable in ("SPECDEC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(4)))

    def call(server: Server | str, *arguments: object) -> Result:
        own = {str(argument) for argument in arguments} & {"--dataset", "--input-file"}
        source = [] if own else ["--input-file", prompts]
        url = server if isinstance(server, str) else server.url
        return specdec("bench", "--base-url", url, *source, *arguments)

    return call


def test_times_are_those_of_the_server(bench: Bench, tmp_path: Path) -> None:
    """No piece came before the server had sent it, and no request was sent after it came; the rest is numpy's.

    That each piece has its own time is `tests/runtime/measure/test_client.py`'s matter.
    """
    waits = [[0.05 + 0.03 * i, *[0.02 + 0.005 * i] * 4] for i in range(6)]

    def answer(asked: Asked) -> Reply:
        return Reply(stream(waits[int(asked.body["prompt"])]))

    (tmp_path / "six.txt").write_text("".join(f"{i}\n" for i in range(6)))
    arguments = ["--input-file", tmp_path / "six.txt", "--num-warmups", 0, "--metric-percentiles", "50,90", "--json"]
    with running(script(answer)) as server:
        document = bench(server, *arguments).document
        asked = sorted(server.generations(), key=lambda one: int(one.body["prompt"]))
    ttfts, gaps = np.array(document["ttfts"]), np.array(document["itls"])
    latencies = ttfts + gaps.sum(axis=1)
    assert gaps.shape == (6, 4)
    for ttft, latency, one in zip(ttfts, latencies, asked, strict=True):
        assert one.sent_s[0] - one.start_s <= ttft <= latency <= document["duration"]
        assert one.sent_s[4] - one.start_s <= latency
    values = {"ttft": ttfts, "tpot": gaps.sum(axis=1) / 4, "itl": gaps.flatten(), "e2el": latencies}
    for name, seconds in values.items():
        assert document[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(seconds)), name
        assert document[f"median_{name}_ms"] == pytest.approx(1e3 * np.median(seconds)), name
        assert document[f"p90_{name}_ms"] == pytest.approx(1e3 * np.percentile(seconds, 90)), name
    assert document["generated_texts"] == [" t0 t1 t2 t3 t4"] * 6


def test_what_is_asked_is_what_was_said(bench: Bench) -> None:
    with running(script(steady)) as server:
        arguments = ["--output-len", 9, "--ignore-eos", "--api-key", "sesame", "--extra-body", '{"speculative": false}']
        result = bench(server, *arguments, "--num-warmups", 2, "--json")
        bodies = [one.body for one in server.generations()]
        keys = {one.headers.get("authorization") for one in server.asked}
    assert bodies[0] == bodies[1] and "prompt" not in bodies[0]["prompt"]  # the warm-ups, of a prompt of their own
    assert sorted(body["prompt"] for body in bodies[2:]) == [f"prompt {i}" for i in range(4)]
    for body in bodies:
        body.pop("prompt")
        assert body == {
            "model": "first", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9,
            "temperature": 0.0, "ignore_eos": True, "speculative": False,
        }  # fmt: skip
    assert keys == {"Bearer sesame"}
    assert "sesame" not in result.stdout + result.stderr


def test_keys_are_those_of_vllm_bench_serve(bench: Bench) -> None:
    """The keys that vLLM 0.11 writes with `--save-detailed --percentile-metrics ttft,tpot,itl,e2el`."""
    summaries = [f"{what}_{name}_ms" for what in ("mean", "median", "std", "p99") for name in DOCUMENT_METRICS]
    reply = Reply(stream([0.01] * 3, metrics={"speculative_decoding": METRICS}))
    with running(script(lambda asked: reply)) as server:
        document = bench(server, "--goodput", "ttft:2000", "tpot:1000", "--json").document
    assert {*VLLM_KEYS.split(), *summaries} <= set(document)
    assert_valid("bench", document)
    assert document["request_rate"] == "inf" and document["settings"]["goodput"] == {"ttft": 2000.0, "tpot": 1000.0}
    assert document["request_goodput"] == pytest.approx(document["request_throughput"])
    assert (document["input_lens"], document["output_lens"]) == ([7] * 4, [5] * 4)
    assert document["spec_decode_source"] == "responses"
    assert document["tokens_per_step"] == 2.5 and document["spec_decode_draft_tokens"] == 32


def test_counters_before_and_after_tell_of_speculation(bench: Bench) -> None:
    """A server that answers nothing of it, and counts for Prometheus: what was counted before is not of this run."""
    served = [0]

    def answer(asked: Asked) -> Reply:
        served[0] += 1
        return Reply(stream([0.01] * 2))

    def metrics() -> str:
        return (
            f"vllm:spec_decode_num_drafts_total {100 + 2 * served[0]}\n"
            f"vllm:spec_decode_num_draft_tokens_total {500 + 8 * served[0]}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {300 + 3 * served[0]}\n"
        )

    with running(script(answer, metrics)) as server:
        document = bench(server, "--json").document
    assert document["spec_decode_source"] == "prometheus"
    assert document["spec_decode_num_drafts"] == 8 and document["spec_decode_draft_tokens"] == 32
    assert document["spec_decode_accepted_tokens"] == 12
    assert document["tokens_per_step"] == 20 / (20 - 12)


def test_no_more_are_under_way_than_allowed(bench: Bench) -> None:
    """No answer begins before as many are asked for."""

    def together(number: int) -> Script:
        return script(lambda asked: Reply(stream([0.06, 0.02]), begins_when=lambda: server.most_open >= number))

    with running(together(2)) as server:
        limited = bench(server, "--num-prompts", 4, "--concurrency", 2, "--num-warmups", 0, "--json").document
        assert (server.most_open, limited["max_concurrent_requests"]) == (2, 2)
    assert sorted(limited["queue_times"])[2] >= 0.08  # two waited for the other two
    with running(together(4)) as server:
        free = bench(server, "--num-prompts", 4, "--num-warmups", 0, "--json").document
        assert (server.most_open, free["max_concurrent_requests"]) == (4, 4)


def test_requests_are_sent_at_their_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleeps until its own; by a clock that all but stands still they sleep just so long. None is sent before."""
    from runtime.measure.benchmark import load_generator
    from runtime.measure.benchmark.load_generator import arrival_times

    planned, slept = arrival_times(4, 20, seed=4), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(load_generator, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": sleep})))
    looks = itertools.count()
    monkeypatch.setattr(load_generator, "time", SimpleNamespace(perf_counter=lambda: 5.0 + 1e-9 * next(looks)))
    with running(script(steady)) as server:
        arguments = ["--request-rate", 20, "--seed", 4, "--num-warmups", 0, "--json"]
        assert bench(server, *arguments).exit_code == 0
        prompts = [one.body["prompt"] for one in server.generations()]
    assert slept == pytest.approx(planned, abs=1e-6) and planned[1] > 0.001
    assert len(set(prompts)) == 4


def test_prompts_come_from_datasets_and_files(bench: Bench, tmp_path: Path) -> None:
    spec_bench = tmp_path / "question.jsonl"
    spec_bench.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["Say it.", "Again."]}) + "\n")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"prompt_ids": [3, 4]}) + "\n")
    with running(script(steady)) as server:

        def sent(*arguments: object) -> list[Any]:
            server.asked.clear()
            assert bench(server, *arguments, "--num-warmups", 0).exit_code == 0
            return [one.body.get("prompt", one.body.get("messages")) for one in server.generations()]

        assert sent("--dataset", spec_bench) == ["Say it."]
        assert sent("--dataset", spec_bench, "--endpoint", "chat") == [[{"role": "user", "content": "Say it."}]]
        assert sent("--input-file", mixed, "--endpoint", "chat") == [[{"role": "user", "content": "Hi"}]]
        assert sent("--input-file", ids) == [[3, 4]]
        assert all(prompt.endswith("TL;DR:") for prompt in sent("--dataset", "demo", "--num-prompts", 3))
        random = sent("--dataset", "random", "--num-prompts", 5, "--input-len", 12, "--seed", 1)
        assert [len(prompt.split()) for prompt in random] == [12] * 5 and len(set(random)) == 5
        assert sorted(sent("--dataset", "random", "--num-prompts", 5, "--input-len", 12, "--seed", 1)) == sorted(random)


def closed_port() -> str:
    with running(script(steady)) as server:
        return server.url


ONE = event(chunk(" a"))


def garbled(*pieces: bytes, **more: Any) -> Callable[[Asked], Reply]:
    return lambda asked: Reply([(0.0, piece) for piece in pieces], **more)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda asked: failure(401, "Incorrect API key"), ("refuses the API key", "401", "Incorrect", "--api-key")),
        (lambda asked: Reply([(0.0, b"<h1>Bad gateway</h1>")], 502, "text/html"), ("502", "Bad gateway")),
        (garbled(ONE, b"data: {half\n\n", DONE), ("not JSON", "{half")),
        (garbled(ONE, event({"choices": [{"text": 5}]}), DONE), ("text that is none", "5")),
        (garbled(ONE, event({"choices": [], "usage": {"completion_tokens": "5"}}), DONE), ("no count", "'5'")),
        (garbled(ONE, event({"error": {"message": "out of memory"}}), DONE), ("broke off", "out of memory")),
        (garbled(ONE), ("ended before", "[DONE]")),
        (garbled(ONE, is_cut=True), ("closed", "body")),
        (lambda asked: as_json({"choices": [{"text": "all"}]}), ("text/event-stream", "application/json")),
    ],
)  # fmt: skip
def test_a_server_that_answers_wrongly_is_one_clear_error(
    answer: Callable[[Asked], Reply], words: tuple[str, ...], bench: Bench, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    with running(script(answer)) as server:
        result = bench(server, "--report", tmp_path / "report.html", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert tree(tmp_path) == before


REPLY = Reply(stream([0.01] * 2))
UNCOUNTED = [(0.0, event(chunk(" a"))), (0.0, event(chunk(" b", "length"))), (0.0, DONE)]
HALF_COUNTED = event(chunk(" a", "length") | {"usage": {"prompt_tokens": None, "completion_tokens": 3}})


@pytest.mark.parametrize(
    ("answer", "flags", "words"),
    [
        (lambda asked: Reply(UNCOUNTED), [], ()),
        (lambda asked: Reply([(0.0, HALF_COUNTED), (0.0, DONE)]), [], ()),
        (lambda asked: REPLY, ["--num-prompts", 6], ("6", "4")),
        (
            lambda asked: failure(500, "<script>") if asked.body["prompt"] == "prompt 3" else REPLY,
            ["--model", "<b>m</b>"], ("1", "4", "500"),
        ),
    ],
    ids=["no usage", "half of it", "prompts that repeat", "one failure"],
)  # fmt: skip
def test_what_is_odd_is_told_beside_the_numbers(
    answer: Callable[[Asked], Reply], flags: list[object], words: tuple[str, ...], bench: Bench, tmp_path: Path,
    said: Said,
) -> None:  # fmt: skip
    with running(script(answer)) as server:
        result = bench(server, *flags, "--report", tmp_path / "report.html", "--json")
    document = result.document
    assert (
        document["failed"] == ("1" in words) and document["completed"] == document["num_prompts"] - document["failed"]
    )
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<b>m" not in page
    said(result, *words)


@pytest.mark.parametrize(
    ("reply", "flags", "words"),
    [
        (script(lambda asked: failure(404, "gone")), ["--model", "third"], ("third", "`--model`")),
        (lambda asked: as_json({"models": []}), [], ()),
        (lambda asked: models(), [], ("`--model`",)),
        (script(lambda asked: failure(503, "queue full")), ["--num-warmups", 0], ("503",)),
        (script(lambda asked: Reply([(0.0, b"x" * 100_000)] * 2000, 500, "text/plain")), [], ("500",)),
    ],
    ids=["another model", "no list of models", "no model", "every failure", "an endless failure"],
)
def test_a_server_that_cannot_be_measured_is_one_error(
    reply: Script, flags: list[object], words: tuple[str, ...], bench: Bench, said: Said
) -> None:
    with running(reply) as server:
        result = bench(server, *flags)
        assert all(len(asked.sent_s) < 500 for asked in server.generations())
    assert result.exit_code == 1 and len(result.stderr) < 500
    said(result, *words)


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [('{"messages": [{"role": "user", "content": "Hi"}]}', "completions"), ('{"prompt_ids": [1]}', "chat")],
)
def test_prompts_that_the_endpoint_does_not_take_are_named(
    line: str, endpoint: str, specdec: Specdec, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    result = specdec("bench", "--input-file", tmp_path / "prompts.jsonl", "--endpoint", endpoint)
    assert result.exit_code == 1
    said(result, "prompt 1")


def test_the_key_is_that_of_serve_before_that_of_openais_clients(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(script(steady)) as server:
        for name, value in (("OPENAI_API_KEY", "theirs"), ("SPECDEC_API_KEY", "ours")):
            monkeypatch.setenv(name, value)
            assert bench(server, "--num-prompts", 1, "--num-warmups", 0).exit_code == 0
        assert [asked.headers["authorization"] for asked in server.generations()] == ["Bearer theirs", "Bearer ours"]


def test_a_server_that_is_not_there_is_one_clear_error(bench: Bench, said: Said) -> None:
    for arguments in ([], ["--model", "m"]):
        result = bench(closed_port(), *arguments)
        assert result.exit_code == 1 and "`--base-url`" in result.stderr
        said(result)
        assert result.stderr.count("\n") == 2


def test_a_stream_without_an_end_is_broken_off(bench: Bench, said: Said) -> None:
    endless = Reply([(0.0, event(chunk(" word" * 1000)))] * 20_000)
    with running(script(lambda asked: endless)) as server:
        result = bench(server, "--output-len", 3)
        (asked,) = server.generations()
    assert result.exit_code == 1
    said(result, "4060000")
    assert asked.is_broken_off and len(asked.sent_s) < 5000


def test_a_server_that_hangs_is_given_up(bench: Bench, said: Said) -> None:
    with running(script(lambda asked: Reply([(0.0, ONE), (HANG_S, DONE)]))) as server:
        result = bench(server, "--timeout", 0.2)
    assert result.exit_code == 1
    said(result)


def test_a_kept_connection_that_the_server_closes_costs_no_request(bench: Bench) -> None:
    """Servers close one that nobody has used for some seconds, it may be while a request is on its way."""
    answer = script(lambda asked: Reply(stream([0.01] * 2)), metrics=lambda: "vllm:num_requests_running 0\n")
    with running(lambda asked: None if asked.num_before else answer(asked)) as server:
        document = bench(server, "--concurrency", 2, "--json").document
        assert any(asked.num_before for asked in server.generations())
        metrics = [asked for asked in server.asked if asked.path == "/metrics"]
        assert sum(not asked.num_before for asked in metrics) == 2  # before and after the requests
        assert any(asked.num_before for asked in metrics)
    assert (document["completed"], document["failed"]) == (4, 0)


def test_a_server_that_never_answers_is_asked_twice(bench: Bench) -> None:
    with running(script(lambda asked: None)) as server:
        result = bench(server, "--num-warmups", 0)
        assert len(server.generations()) == 2 * 4
    assert result.exit_code == 1 and "disconnected" in result.stderr


def test_a_signal_ends_it_and_every_request(process_environment: dict[str, str]) -> None:
    slow = Reply([(0.05, event(chunk(" a")))] * 4000)
    with running(script(lambda asked: slow)) as server:
        command = [sys.executable, "-m", "specdec_cli", "bench", "--base-url", server.url, "--num-warmups", "0"]
        process = subprocess.Popen(
            [*command, "--dataset", "random", "--num-prompts", "3"],
            env=process_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        wait_until(lambda: sum(bool(asked.sent_s) for asked in server.generations()) == 3)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=HANG_S)
        wait_until(lambda: not server.num_open)
    assert (process.returncode, stdout) == (143, "") and "Traceback" not in stderr
    assert all(asked.is_broken_off for asked in server.generations())


def test_after_ctrl_c_what_had_been_answered_is_shown(
    process_environment: dict[str, str], tmp_path: Path, said: Said
) -> None:
    def answer(asked: Asked) -> Reply:
        return Reply([(0.05, ONE)] * 4000) if asked.body["prompt"] == "slow" else Reply(stream([0.01] * 3))

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fast\nfast too\nslow\n")
    with running(script(answer)) as server:
        command = [sys.executable, "-m", "specdec_cli", "bench", "--base-url", server.url, "--num-warmups", "0"]
        process = subprocess.Popen(
            [*command, "--json", "--concurrency", "1", "--input-file", str(prompts)],
            env=process_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        wait_until(lambda: len(server.generations()) == 3 and server.generations()[2].sent_s)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    document = json.loads(stdout)
    assert process.returncode == 130 and "Traceback" not in stderr
    said(next(line for line in stderr.splitlines() if "interrupted" in line), "2", "3")
    assert (document["completed"], document["failed"], document["output_lens"]) == (2, 0, [5, 5])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--request-rate 0", ("--request-rate", "more than 0")),
        ("--base-url localhost:8000", ("no HTTP address", "localhost:8000")),
        ("--goodput speed:5", ("no", "speed:5")),
        ("--extra-body [1]", ("--extra-body", "[1]")),
        ("--metric-percentiles 50,101", ("--metric-percentiles", "101")),
        ("--input-len 5", ("--input-len", "random")),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_before_anything_is_sent(
    arguments: str, words: tuple[str, ...], specdec: Specdec, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a prompt\n")
    result = specdec("bench", "--input-file", prompts, *arguments.split())
    assert result.exit_code == 2 and result.stderr.count("\n") == 2
    for word in words:
        assert word in result.stderr, result.stderr
