"""Numbers that are not finite stay with the request that has them: no draft and no neighbour changes another's output.

One token's embedding is NaN, infinite or huge, and free blocks are full of such numbers. Who reads that token fails, by
name; all others get what they get alone from a clean engine.
"""

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sentences import Said
from shared import MakeEngineDir
from strength import is_full
from test_batch_invariance import COMPILED, MAX_LEN, Guessing, build_model
from tiny import VOCAB_SIZE
from torch import Tensor

from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.engine.engine import Engine
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import RequestError

POISON = 7  # a token
KINDS = {"NaN": torch.nan, "infinite": torch.inf, "minus infinite": -torch.inf, "huge": None}
# In one step a compiled engine computes the same bits in any company; without the kernels only float32 is close enough.
ENGINES = [
    *(pytest.param(("aot", *one.values), marks=one.marks) for one in COMPILED),
    ("none", "float32"),
    pytest.param(("none", "float32 FP8"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest, make_engine_dir: MakeEngineDir) -> Iterator[Engine]:
    """The models of `test_batch_invariance`."""
    compiler, name = request.param
    with Engine.open(build_model(name, compiler, make_engine_dir)) as opened:
        yield opened


def embeddings(engine: Engine) -> Tensor:
    """(vocab, hidden) what the opened engine reads."""
    weights: dict[str, Tensor] = getattr(engine._step, "weights", None) or dict(engine._step.named_parameters())
    named = [weight for name, weight in weights.items() if "embed_tokens" in name]
    # A program's have other names; of two dimensions are the taps of convolutions too, which are few.
    return max(named or [weight for weight in weights.values() if weight.ndim == 2], key=torch.numel)


def worst(dtype: torch.dtype, bad: float) -> float:
    """Number nearest to `bad` that a pool of this dtype can hold."""
    if dtype == torch.int8:
        return 127
    if dtype == torch.float8_e4m3fn:  # it knows no infinity
        return torch.finfo(dtype).max if math.isfinite(bad) else math.nan
    return bad


@contextmanager
def poisoned(engine: Engine, kind: str, *, wholly: bool) -> Iterator[None]:
    """The embedding of `POISON`, or one number of it, and whatever blocks hold that are nobody's."""
    row = embeddings(engine).data[POISON]
    clean, value = row.clone(), KINDS[kind]
    bad = torch.finfo(row.dtype).max if value is None else value
    row[slice(None) if wholly else 3] = bad
    engine.clear_cache()
    for pool in (*engine._pool.keys, *engine._pool.values, *engine._pool.scales):
        pool.fill_(worst(pool.dtype, bad))
    yield
    row.copy_(clean)
    engine.clear_cache()


def answer(
    engine: Engine, requests: list[Request], drafter: Guessing | None, loop: object
) -> tuple[dict[int, Sequence], str]:
    """Sequences that were answered, and what was said of one that was not."""
    generate = scheduler.generate if loop == "leader" else orchestrator.generate
    done: dict[int, Sequence] = {}
    try:
        for sequence, _ in generate(engine, requests, drafter):  # type: ignore[arg-type]
            if sequence.finish_reason is not None:
                done[sequence.request.id] = sequence
    except RequestError as error:
        return done, error.message
    return done, ""


def make_requests(seed: int, num_requests: int) -> list[Request]:
    """Some with the poisonous token in their prompt, and some that begin like others."""
    rng = random.Random(seed)
    start = [rng.randrange(8, VOCAB_SIZE) for _ in range(40)]
    requests = []
    for i in range(num_requests):
        prompt = [*start[: rng.choice([0, 16, 35])], *(rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randint(1, 60)))]
        if rng.random() < 0.3:
            prompt[rng.randrange(len(prompt))] = POISON
        sampling = rng.choice([GREEDY, SamplingConfig(top_k=0, random_seed=seed)])
        requests.append(Request(i, tuple(prompt), rng.randint(1, 12), sampling=sampling, keep_logits=True))
    return requests


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loop", ["leader", "orchestrator"])
def test_poison_stays_with_who_reads_it(engine: Engine, loop: str) -> None:
    @settings(
        max_examples=1000 if is_full() else 2 if engine.config.build_config.compiler == "none" else 8, deadline=None
    )
    @given(
        seed=st.integers(0, 10_000),
        num_requests=st.integers(1, 5),
        kind=st.sampled_from(sorted(KINDS)),
        wholly=st.booleans(),
        chunk=st.sampled_from([5, 16, 512]),
        threads=st.sampled_from([1, 2]),
    )
    def stays(seed: int, num_requests: int, kind: str, wholly: bool, chunk: int, threads: int) -> None:
        requests = make_requests(seed, num_requests)
        engine.max_num_tokens = MAX_LEN
        clean: dict[int, Sequence] = {}
        for request in requests:
            engine.clear_cache()
            clean |= answer(engine, [request], None, "leader")[0]
        engine.max_num_tokens = chunk
        torch.set_num_threads(threads)
        drafter = Guessing({i: s.output_tokens for i, s in clean.items()}, seed, (POISON,))
        with poisoned(engine, kind, wholly=wholly):
            done, said = answer(engine, requests, drafter, loop)
            torch.set_num_threads(1)
        # The last token of an output is never read.
        readers = [r.id for r in requests if POISON in (*r.prompt_tokens, *clean[r.id].output_tokens[:-1])]
        engine._blocks.check_integrity()
        for request in requests:
            if request.id not in readers:
                sequence, alone = done[request.id], clean[request.id]
                assert sequence.output_tokens == alone.output_tokens
                if engine.config.batch_invariant:
                    assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))
        if kind != "huge":
            assert sorted(done) == [r.id for r in requests if r.id not in readers]
            # Of several the one that came to it first: with prompts in chunks not always the first request.
            first = [f"request {i}: the model's logits are NaN or infinite" for i in readers]
            assert said.startswith(tuple(first)) if readers else not said

    stays()


def test_weights_that_turn_bad_fail_all_and_leave_nothing_behind(engine: Engine, said: Said) -> None:
    """Once they are good again, and what was computed by them is forgotten."""
    requests = [Request(i, tuple(range(8 + i, 30)), 6) for i in range(3)]
    engine.clear_cache()
    expected, _ = answer(engine, requests, None, "leader")
    table = embeddings(engine).data
    kept = table.clone()
    table.fill_(torch.nan)
    engine.clear_cache()
    for loop in ("leader", "orchestrator"):
        done, failure = answer(engine, requests, None, loop)
        assert not done
        said(failure, "0", "22")
    table.copy_(kept)
    engine.clear_cache()
    done, failure = answer(engine, requests, None, "leader")
    assert {i: s.output_tokens for i, s in done.items()} == {i: s.output_tokens for i, s in expected.items()}
    assert not failure and len(done) == 3


def test_fork_of_the_process_leaves_its_requests_alone(engine: Engine) -> None:
    """Both write into the same blocks, each in memory of its own."""
    engine.clear_cache()
    engine.max_num_tokens = MAX_LEN
    mine, others = (Request(0, tuple(range(first, 31)), 20) for first in (3, 9))
    expected, _ = answer(engine, [mine], None, "leader")
    engine.clear_cache()
    before, after = os.pipe()
    child = os.fork()
    if child == 0:  # what it raises must not go on as a second test run
        os.read(before, 1)
        engine.clear_cache()
        done, _ = answer(engine, [others], None, "leader")
        os._exit(0 if done else 1)
    output: list[int] = []
    for sequence, new_tokens in scheduler.generate(engine, [mine]):
        if not output:
            os.write(after, b"x")
            assert os.waitpid(child, 0)[1] == 0
        output = sequence.output_tokens
        assert new_tokens
    assert output == expected[0].output_tokens
