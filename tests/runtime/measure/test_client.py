"""The client's reading of streams as several servers write them, by a clock that counts its own readings."""

import asyncio
import ssl
from itertools import count
from typing import Any

import pytest
from openai_server import DONE, Reply, event, running

from runtime.measure.benchmark.client import Answer, Client, certificates_for

Chunk = dict[str, Any]


def text(said: str, **more: Any) -> Chunk:
    return {"choices": [{"index": 0, "text": said, "finish_reason": None}], **more}


def end(said: str = "", **more: Any) -> Chunk:
    return {"choices": [{"index": 0, "text": said, "finish_reason": "length"}], **more}


def usage(num_prompt: int | None, num_output: int | None) -> Chunk:
    return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": 12}}


def ask(*chunks: Chunk) -> Answer:
    """Result of a stream of these: it is asked for at 0, and chunk i is read at i + 1."""
    pieces = [(0.0, event(chunk)) for chunk in chunks]

    async def read(url: str) -> Answer:
        readings = count()
        answer = Answer(0.0)
        async with Client(url, None, 30, lambda: float(next(readings))) as client:
            await client.ask("completions", {"max_tokens": 8}, answer)
        return answer

    with running(lambda asked: Reply([*pieces, (0.0, DONE)])) as server:
        return asyncio.run(read(server.url))


def test_a_chunk_that_only_says_why_it_ended_sets_no_time() -> None:
    """Nor one with the usage: five tokens from 1 to 3 take half a second each, whatever comes afterwards."""
    answer = ask(text(" a"), text(" b c"), text(" d e"), text(""), end(), {"choices": [], **usage(7, 5)})
    assert (answer.ttft_s, answer.latency_s, answer.tpot_s) == (1.0, 3.0, 0.5)
    assert (answer.text, answer.finish_reason) == (" a b c d e", "length")


def test_an_end_id_alone_is_the_first_token() -> None:
    answer = ask(text(""), end(), {"choices": [], **usage(7, 1)})
    assert (answer.ttft_s, answer.latency_s, answer.num_tokens) == (2.0, 2.0, 1)


TIMINGS = {"cache_n": 3, "prompt_n": 4, "predicted_n": 5, "predicted_ms": 1.0}


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([text(" a", usage=None), end(" b", usage=None), {"choices": [], **usage(7, 5)}], id="openai"),
        pytest.param([text(" a"), end(" b"), {"choices": None, **usage(7, 5)}], id="no choices"),
        pytest.param([text(" a"), text(" b"), end(**usage(7, 5))], id="with the reason"),
        pytest.param([text(" a", **usage(7, 0)), text(" b", **usage(7, 2)), end(**usage(7, 5))], id="every chunk"),
        pytest.param(
            [text(" a", **usage(7, 1)), end(" b", **usage(7, 2)), {"choices": [], **usage(7, 5)}], id="every, and all"
        ),
        pytest.param([text(" a", **usage(7, None)), end(" b"), usage(None, 5)], id="counts apart"),
        pytest.param([text(" a"), text(" b"), end(timings=TIMINGS)], id="llama.cpp without usage"),
        pytest.param(
            [text(" a"), end(" b"), {"choices": [], **usage(7, 5), "timings": TIMINGS | {"cache_n": 0}}], id="llama.cpp"
        ),
    ],
)
def test_usage_is_read_wherever_it_stands(chunks: list[Chunk]) -> None:
    answer = ask(*chunks)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_tokens) == (7, 5, 5)
    assert answer.piece_times == [1.0, 2.0]


@pytest.mark.parametrize("told", [{}, {"usage": None}, {"usage": {}}, usage(None, None), {"timings": None}])
def test_without_counts_the_chunks_with_text_are_counted(told: Chunk) -> None:
    answer = ask(text("", **told), text(" a", **told), text(" b", **told), end(**told))
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_tokens) == (None, None, 2)


@pytest.mark.parametrize("address", ["https://here", "HTTPS://here", "here"])
def test_all_but_plain_http_is_held_to_certificates(address: str) -> None:
    assert certificates_for(address).verify_mode == ssl.CERT_REQUIRED and certificates_for(address).check_hostname
    assert certificates_for("http://https").verify_mode == ssl.CERT_NONE
