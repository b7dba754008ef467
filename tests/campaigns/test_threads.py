"""Several engines, threads and runs in one process: the same outputs, and an error where two cannot share."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import Said
from shared import MakeEngineDir
from tiny import make_model
from transformers import LlamaForCausalLM, PreTrainedModel
from waiting import HANG_S

from runtime.checkpoint.config import BuildConfig
from runtime.core.params import SamplingConfig
from runtime.core.request import Request
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import SpecDecError
from scripts.campaigns.cases import TARGET, VOCAB_SIZE
from scripts.campaigns.oracle import CheckedEngine, ExactModel, one_by_one

LOOPS: list[Any] = [orchestrator, scheduler]


def make_engine(model: ExactModel = TARGET, max_tokens: int | None = None) -> CheckedEngine:
    build = BuildConfig("aot", 4, 64, 110, 6, 4, "draft_tokens_external")
    return CheckedEngine(model, build, KVCacheConfig(max_tokens=max_tokens), 32)


def make_requests(first: int, number: int = 8) -> list[Request]:
    return [
        Request(i, tuple((i * j) % VOCAB_SIZE for j in range(3 + i % 20)), 20, sampling=SamplingConfig(top_k=i % 3))
        for i in range(first, first + number)
    ]


def outputs(steps: Iterator[Any]) -> dict[int, list[int]]:
    return {s.request.id: s.output_tokens for s, _ in steps if s.finish_reason is not None}


def expected(requests: list[Request]) -> dict[int, list[int]]:
    return {request.id: one_by_one(TARGET, request) for request in requests}


def test_runs_that_take_turns_on_one_engine_have_their_own_outputs() -> None:
    """One of each loop; there is room for both."""
    engine = make_engine()
    first, second = make_requests(0), make_requests(100)
    runs = [loop.generate(engine, one, NgramLookup(2), 4) for loop, one in zip(LOOPS, (first, second), strict=True)]
    found: dict[int, list[int]] = {}
    while runs:
        for run in list(runs):
            if (step := next(run, None)) is None:
                runs.remove(run)
            elif step[0].finish_reason is not None:
                found[step[0].request.id] = step[0].output_tokens
    assert found == expected(first) | expected(second)
    engine.check_books()


@pytest.mark.parametrize("loop", LOOPS)
def test_run_without_room_beside_another_takes_it_and_the_other_goes_on(loop: Any) -> None:
    engine = make_engine(max_tokens=40)
    request, other = Request(0, (1, 2, 3), 30), Request(1, (4, 5, 6), 37)
    holder = scheduler.generate(engine, [request])
    next(holder)
    assert outputs(loop.generate(engine, [other])) == expected([other])
    assert outputs(holder) == expected([request])
    engine.check_books()


@pytest.mark.parametrize("loop", LOOPS)
def test_engine_that_drafts_for_itself_ends_in_an_error_or_in_its_own_output(loop: Any, said: Said) -> None:
    too_small = []
    for max_tokens in (40, 80, None):
        engine = make_engine(max_tokens=max_tokens)
        request = Request(0, (1, 2, 3), 30)
        try:
            found = outputs(loop.generate(engine, [request], DraftModel(engine, VOCAB_SIZE, use_logits=False), 4))
            assert found == expected([request])
        except SpecDecError as error:
            too_small.append(max_tokens)
            said(error)
        engine.check_books()
    assert 40 in too_small and None not in too_small


def test_engines_of_one_directory_in_threads_have_the_outputs_of_one(llama_engine_dir: Path) -> None:
    """Engines that read the same files of weights."""
    requests = [Request(i, (5 + i, 9, 5 + i, 9, 5 + i), 12) for i in range(4)]
    with Engine.open(llama_engine_dir) as engine:
        alone = outputs(scheduler.generate(engine, requests))
    found: dict[int, dict[int, list[int]]] = {}

    def run(number: int) -> None:
        with Engine.open(llama_engine_dir) as engine:
            found[number] = outputs(LOOPS[number % 2].generate(engine, requests, NgramLookup(2), 4))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), alone)


def test_models_opened_in_threads_are_whole(make_engine_dir: MakeEngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves all of its models without tied weights when two are made at once."""
    tie_weights = PreTrainedModel.tie_weights
    monkeypatch.setattr(PreTrainedModel, "tie_weights", tie_weights)  # whatever comes of it, other tests have it
    engine_dir = make_engine_dir(make_model("llama", tie_word_embeddings=True))
    failures: list[SpecDecError] = []

    def open_some() -> None:
        for _ in range(5):
            try:
                Engine.open(engine_dir).close()
            except SpecDecError as error:
                failures.append(error)

    threads = [threading.Thread(target=open_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert PreTrainedModel.tie_weights is tie_weights
    assert torch.get_default_dtype() == torch.float32


def test_a_users_thread_loads_models_beside_ours(
    make_engine_dir: MakeEngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock of theirs. The user's construction ends in ours, as far as they are let: what each put back then
    would be the other's, and every model with tied embeddings incomplete from then on."""
    tied = make_model("llama", tie_word_embeddings=True)
    engine_dir = make_engine_dir(tied, compiler="none")
    tied.save_pretrained(tmp_path)
    tie_weights, construct = PreTrainedModel.tie_weights, LlamaForCausalLM.__init__
    monkeypatch.setattr(PreTrainedModel, "tie_weights", tie_weights)  # whatever comes of it, other tests have it
    users_is_in, ours_is_in, users_is_out = threading.Event(), threading.Event(), threading.Event()

    def constructed(self: LlamaForCausalLM, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        if threading.current_thread() is users:
            users_is_in.set()
            ours_is_in.wait(1)  # in vain, if one is made after the other
        else:
            ours_is_in.set()
            users_is_out.wait(1)

    loaded: list[Any] = []

    def load() -> None:
        loaded.append(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
        users_is_out.set()

    monkeypatch.setattr(LlamaForCausalLM, "__init__", constructed)
    users = threading.Thread(target=load)
    users.start()
    assert users_is_in.wait(HANG_S)
    Engine.open(engine_dir).close()
    users.join()
    assert PreTrainedModel.tie_weights is tie_weights and torch.get_default_dtype() is torch.float32
    (model,) = loaded
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.dtype is torch.bfloat16
    assert LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.isfinite().all()
