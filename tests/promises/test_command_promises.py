"""Promises of what answers: the Python API, batches of a file and the records of a server, on one tiny model.

- the API: outputs in the order of their prompts; without a seed each call draws one; a piece has what its tokens have
- batches: a result is determined by its request, the model and `--random-seed`, and by nothing beside it; what it cost
  is the sum of its answers; each result's place in the file is where its line is
- servers: a prompt counts once, however many answers it has
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from commands.batch.answering import BatchModel, Outcome, OwnCrew, model_digest
from commands.batch.dispatch import _MAX_LOST, NotAnswered, answer_all
from commands.batch.flags import BatchDefaults
from commands.batch.lines import BatchRequest, Place, open_results
from commands.serve.protocol.replies import usage
from runtime.core.params import SamplingParams
from runtime.core.request import Request, Sequence
from runtime.llm import LLM
from runtime.loop.serving import Progress, RequestHandle, ServeRequest

# --- the API ---


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Iterator[LLM]:
    with LLM(llama_engine_dir) as opened:
        yield opened


def test_calls_without_a_seed_draw_one_each_and_with_one_the_same(llm: LLM) -> None:
    def tokens(**params: Any) -> list[list[int]]:
        found = llm.generate([[5, 6, 7], [5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True, **params))
        return [output.token_ids for output in found]

    first, second = tokens(), tokens()
    assert first != second and first[0] != first[1]
    assert tokens(seed=3) == tokens(seed=3) != tokens(seed=4)
    one, other = tokens(seed=3)
    assert one == other  # the same prompt with the same seed


def test_a_piece_has_the_log_probabilities_of_its_own_tokens(llm: LLM, llama: PreTrainedModel) -> None:
    """Hugging Face's model has the same. Drafts make pieces of several tokens."""
    prompt = [5, 6, 7, 8] * 4
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    from runtime.drafters.specs import NgramDrafter

    generated, pieces = list(prompt), 0
    for piece in llm.stream([prompt], params, drafter=NgramDrafter()):
        assert piece.logprobs is not None and [one.token for one in piece.logprobs] == piece.token_ids
        generated += piece.token_ids
        pieces += 1
        with torch.no_grad():
            logits = llama(torch.tensor([generated])).logits[0, -len(piece.token_ids) - 1 : -1].log_softmax(-1)
        for row, one in zip(logits, piece.logprobs, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-3)
    assert pieces > 1


# --- batches ---


@pytest.fixture
def answers(llm: LLM) -> Callable[..., dict[str, Outcome]]:
    def answer(requests: list[BatchRequest], **defaults: Any) -> dict[str, Outcome]:
        model = BatchModel(llm, llm.session(), ("m",), BatchDefaults(max_output_len=8, **defaults))
        try:
            crew: Any = OwnCrew(model)
            return {one.id: one for one in answer_all(crew, iter(requests), lambda *_: pytest.fail("gave up"))}
        finally:
            model.close()

    return answer


def batch_request(number: int, **body: Any) -> BatchRequest:
    given = {"prompt": [5 + number % 3, 6, 7], "temperature": 1.0, "ignore_eos": True} | body
    return BatchRequest(f"batch_req_{number}", f"request {number}", "POST", "/v1/completions", given)


def test_result_is_determined_by_its_request_the_model_and_the_seed(answers: Callable[..., Any]) -> None:
    requests = [
        batch_request(i, **({"seed": 3} if i % 3 == 0 else {}), **({"n": 2} if i == 4 else {})) for i in range(7)
    ]
    lines = {number: outcome.line for number, outcome in answers(requests).items()}
    shuffled = random.Random(0).sample(requests, len(requests))
    assert {number: outcome.line for number, outcome in answers(shuffled).items()} == lines
    assert answers(requests[3:4])[requests[3].id].line == lines[requests[3].id]
    other = {number: outcome.line for number, outcome in answers(requests, random_seed=1).items()}
    for i, request in enumerate(requests):
        assert (other[request.id] == lines[request.id]) == (i % 3 == 0), "a seed of the request's own, or the command's"
    texts = [json.loads(lines[requests[i].id])["response"]["body"]["choices"][0]["text"] for i in (1, 2, 4, 5)]
    assert len(set(texts)) == 4


def test_costs_of_a_result_are_those_of_its_answers(answers: Callable[..., Any]) -> None:
    for num in (1, 3):
        (outcome,) = answers([batch_request(0, n=num)]).values()
        told = json.loads(outcome.line)["response"]["body"]["usage"]
        assert outcome.counts.num_generated_tokens == told["completion_tokens"] == 8 * num
        assert told["prompt_tokens"] == 3 and told["total_tokens"] == 3 + 8 * num


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), order=st.randoms(use_true_random=False))
def test_results_are_read_from_where_they_were_written(
    lengths: list[int], order: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Results come in any order, from two processes, and end in the order of the requests."""
    path = tmp_path_factory.mktemp("results") / "results.jsonl"
    places = [Place(f"batch_req_{i}", f"request {i}", i + 1, 0, 0) for i in range(len(lengths))]
    lines = [
        json.dumps({"id": place.id, "custom_id": place.custom_id, "text": "é" * length}, separators=(",", ":")).encode()
        for place, length in zip(places, lengths, strict=True)
    ]
    numbers = order.sample(range(len(lengths)), len(lengths))
    half = len(numbers) // 2
    for part in (numbers[:half], numbers[half:]):
        with open_results(path, places) as results:
            for i in part:
                results.append(places[i].id, lines[i], is_error=False)
            if not results.missing:
                results.finish()
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines)


def test_results_are_of_one_tokenizer(llama_engine_dir: Path, llama_dir: Path, tmp_path: Path) -> None:
    """Each of its files counts: another tokenizer makes other prompts, and other texts."""
    import shutil

    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for path in llama_dir.glob("*token*"):
        shutil.copy(path, directory)
    first = model_digest(llama_engine_dir, directory)
    assert model_digest(llama_engine_dir, directory) == first
    for path in sorted(directory.iterdir()):
        before = path.read_text()
        path.write_text(before + " ")
        assert model_digest(llama_engine_dir, directory) != first, path.name
        path.write_text(before)
    (directory / "chat_template.jinja").write_text("x")
    assert model_digest(llama_engine_dir, directory) != first


class Dying:
    """Workers of which one that has a certain request dies, each time."""

    num_free = 3

    def __init__(self, deadly: str) -> None:
        self.deadly, self.sent, self.num_asked = deadly, list[BatchRequest](), dict[str, int]()

    def send(self, request: BatchRequest) -> None:
        self.sent.append(request)
        self.num_free -= 1
        self.num_asked[request.id] = self.num_asked.get(request.id, 0) + 1
        assert self.num_asked[request.id] < 50, "asked again for ever"

    def receive(self) -> list[Any]:
        sent, self.sent = self.sent, []
        self.num_free += len(sent)
        is_dead = any(request.id == self.deadly for request in sent)
        return [NotAnswered(one.id, "died", is_lost=True) if is_dead else Outcome(one.id, b"answered") for one in sent]


@pytest.mark.parametrize("deadly", [0, 3, 6])
def test_request_that_ends_its_workers_is_given_up_alone(deadly: int) -> None:
    requests = [batch_request(i) for i in range(7)]
    crew = Dying(requests[deadly].id)
    gave_up: list[str] = []

    def give_up(request: BatchRequest, failure: str) -> Outcome:
        gave_up.append(request.id)
        return Outcome(request.id, b"failed", is_error=True)

    outcomes = {one.id: one.line for one in answer_all(crew, iter(requests), give_up)}
    assert gave_up == [requests[deadly].id] and len(outcomes) == 7
    assert all(line == b"answered" for number, line in outcomes.items() if number != requests[deadly].id)
    assert max(crew.num_asked.values()) <= _MAX_LOST + 3


# --- servers ---


@given(prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4), n=st.integers(1, 4), data=st.data())
def test_a_prompt_counts_once_however_many_answers_it_has(prompts: list[int], n: int, data: st.DataObject) -> None:
    handles = []
    for length in prompts:
        cached = data.draw(st.integers(0, length))
        for _ in range(n):
            handle = RequestHandle(ServeRequest(Request(0, (1,) * length, 9)), Sequence.start(Request(0, (1,), 9)))
            handle.progress = Progress(num_tokens=data.draw(st.integers(0, 9)), num_cached_tokens=cached)
            handles.append(handle)
    found = usage(handles, len(prompts))
    assert found["prompt_tokens"] == sum(prompts)
    assert found["completion_tokens"] == sum(handle.progress.num_tokens for handle in handles)
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"]
    first = [handles[i * n].progress.num_cached_tokens for i in range(len(prompts))]
    assert found["prompt_tokens_details"]["cached_tokens"] == sum(first) <= sum(prompts)


def test_requests_of_a_run_number_the_answers_of_each_prompt(llm: LLM) -> None:
    from commands.inputs.prompts import Prompt
    from commands.run.flags import RunInputs
    from commands.run.work import _make_requests

    params = SamplingParams(n=3, max_tokens=4, seed=0)
    setup: Any = SimpleNamespace(llm=llm, params=params)
    prompts = [Prompt(None, (5, 6)), Prompt(None, (7, 8))]
    of_each, requests = _make_requests(setup, prompts, RunInputs(), SimpleNamespace(logits_file=None), None)  # type: ignore[arg-type]
    assert [request.id for request in requests] == list(range(6))
    assert [request.return_index for request in requests] == [0, 1, 2] * 2
    assert [prompt.ids for prompt in of_each] == [(5, 6)] * 3 + [(7, 8)] * 3
    assert [request.prompt_tokens for request in requests] == [(5, 6)] * 3 + [(7, 8)] * 3
    assert replace(requests[0], id=1, return_index=1) == requests[1]
