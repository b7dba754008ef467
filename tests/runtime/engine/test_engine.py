"""Logits equal Hugging Face's whatever the K/V cache did, and a rejected draft leaves no trace."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from calls import calls_within
from sentences import Said
from tiny import eager_logits, forward, hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel
from waiting import HANG_S

import runtime
from runtime.core.batch import Row
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig, resolve_device
from runtime.loop import orchestrator, scheduler
from runtime.loop.step import judge
from runtime.util.errors import SpecDecError, UsageError

# float32 against float32: the logits are of the order of 10, and sums are taken in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
PRODUCT = Path(runtime.__file__).parent
DRAFT_LEN = 6
A = list(range(3, 16))


def start(tokens: list[int], request_id: int = 0) -> Sequence:
    return Sequence.start(Request(request_id, tuple(tokens), 60))


def logits_of(engine: Engine, sequences: list[Sequence], drafts: list[list[int]]) -> list[Tensor]:
    """Per sequence the (draft_len + 1, vocab) logits that a step would verify its draft with."""
    logits = forward(engine, sequences, drafts)
    for sequence in sequences:
        sequence.num_computed = len(sequence.tokens)
    return logits


def assert_equals_hf(model: PreTrainedModel, logits: Tensor, tokens: list[int], draft: list[int]) -> None:
    expected = eager_logits(model, tokens + draft)[len(tokens) - 1 :]
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def compute_and_release(engine: Engine, tokens: list[int]) -> None:
    sequence = start(tokens)
    assert engine.admit(sequence)
    logits_of(engine, [sequence], [[]])
    engine.release(sequence)


class Onlooker:
    """A thread of Python's that runs only when another gives way. It notes whether that was in the middle of a step."""

    def __init__(self, engine: Engine) -> None:
        self._step: Any = engine._step
        self._number, self._is_in_step, self._is_over = 0, False, False
        self.has_run_in_step = False

    def step(self, *inputs: Any) -> Any:
        """The engine's own."""
        self._number += 1
        self._is_in_step = True
        try:
            return self._step(*inputs)
        finally:
            self._is_in_step = False

    def __enter__(self) -> "Onlooker":
        self._thread, self._interval_s = Thread(target=self._look), sys.getswitchinterval()
        sys.setswitchinterval(1000.0)  # nobody is made to give way
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()
        sys.setswitchinterval(self._interval_s)

    def _look(self) -> None:
        """Twice in one step: it gives way itself between the two."""
        while not self._is_over:
            number = self._number if self._is_in_step else None
            time.sleep(0.0001)
            self.has_run_in_step |= self._is_in_step and number == self._number


def test_other_threads_run_while_a_long_prompt_is_computed(
    llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's /health does not wait for a step."""
    prompt = Row([1] * 4000, 0, [1] * 1000, 1)  # all in one block: nobody looks at what is computed
    with Engine.open(llama_engine_dir) as engine, Onlooker(engine) as onlooker:
        monkeypatch.setattr(engine, "_step", onlooker.step)
        until = time.monotonic() + HANG_S
        while not onlooker.has_run_in_step and time.monotonic() < until:
            engine.time_step([prompt])
    assert onlooker.has_run_in_step


@pytest.mark.parametrize(
    "num_shared",
    [
        pytest.param(8, id="two full blocks"),
        pytest.param(10, id="two full blocks and half of the third"),
        pytest.param(13, id="three full blocks and the tail"),
        pytest.param(3, id="a part of the first block"),
    ],
)
@pytest.mark.parametrize("is_held", [False, True], ids=["released", "held"])
def test_logits_after_block_reuse_equal_hf(
    num_shared: int, is_held: bool, llama_engine_dir: Path, llama: PreTrainedModel
) -> None:
    engine = Engine.open(llama_engine_dir)
    compute_and_release(engine, A)
    holder = start([*A, 9])  # while it runs, A's blocks may be copied but not overwritten
    if is_held:
        assert engine.admit(holder)
    tokens = [*A[:num_shared], 28, 29, 30, 31, 28]
    sequence = start(tokens)
    assert engine.admit(sequence)
    # What the holder took over is its own: of the tail block nothing is found while it runs.
    assert sequence.num_computed == (min(num_shared, 12) if is_held else num_shared)
    draft = [5, 6, 7]
    (logits,) = logits_of(engine, [sequence], [draft])
    assert_equals_hf(llama, logits, tokens, draft)
    if is_held:
        (logits,) = logits_of(engine, [holder], [[8]])
        assert_equals_hf(llama, logits, holder.tokens, [8])


def test_logits_of_a_prompt_computed_in_chunks_equal_hf(make_engine: Any) -> None:
    """Longer than twice the chunk of 512, beside a short one; with a sliding window across the chunks' border."""
    model = make_model("gemma3", sliding_window=100, max_position_embeddings=1400)
    engine = make_engine(model, max_input_len=1200, max_seq_len=1310, tokens_per_block=16)
    sequences = [start(repetitive_prompt(0, 1100), 0), start(repetitive_prompt(1, 600), 1), start(A, 2)]
    for sequence in sequences:
        assert engine.admit(sequence)
    engine.compute_context(sequences[0], 300)
    assert [s.num_computed for s in sequences] == [300, 0, 0]
    drafts = [[5, 6], [], [7]]
    for sequence, draft, logits in zip(sequences, drafts, logits_of(engine, sequences, drafts), strict=True):
        assert_equals_hf(model, logits, sequence.tokens, draft)


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 2), (40, 2)], ids=str)
def test_a_step_calls_at_most_eight_functions(lengths: tuple[int, ...], llama_engine_dir: Path) -> None:
    """And no room below calls the engine back, so that a step reads from the top down."""
    with Engine.open(llama_engine_dir) as engine:
        sequences = [start(A + list(range(3, 3 + length)), i) for i, length in enumerate(lengths)]
        assert all(engine.admit(sequence) for sequence in sequences)
        rows = [Row(s.tokens, 0, s.block_table, 1) for s in sequences]
        engine.step(rows)  # what is done once is done
        calls = calls_within(PRODUCT, lambda: engine.step(rows))
    functions = {name for _, name, _ in calls}
    assert {"Engine._forward", "pack", "PackagedStep.__call__"} <= functions  # the whole way is seen
    assert len(functions | {"Engine.step"}) <= 8
    own = PRODUCT / "engine"
    assert not [call for call in calls if call[2].is_relative_to(own) and not call[0].is_relative_to(own)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_rejected", range(DRAFT_LEN + 1))
@pytest.mark.parametrize("is_released", [False, True], ids=["kept", "released"])
def test_rejected_draft_leaves_no_trace(
    num_rejected: int, is_released: bool, llama_engine_dir: Any, llama: PreTrainedModel
) -> None:
    """Blocks of 4 and prompts of 5 to 8 tokens: the rejected part begins and ends at every offset of a block."""
    for prompt_len in (5, 6, 7, 8):
        prompt = repetitive_prompt(prompt_len, prompt_len, llama.config.vocab_size)
        right = hf_greedy(llama, prompt, DRAFT_LEN)
        num_accepted = DRAFT_LEN - num_rejected
        draft = Draft(right[:num_accepted] + [(token + 1) % llama.config.vocab_size for token in right[num_accepted:]])

        engine, sequence = Engine.open(llama_engine_dir), start(prompt)
        assert engine._blocks.admit(sequence, 40) == []
        (verdict,) = judge(engine, [sequence], [draft])
        assert verdict.num_accepted == num_accepted
        sequence.commit(draft, verdict)
        assert sequence.tokens == prompt + right[: num_accepted + 1] + ([] if num_rejected else sequence.tokens[-1:])
        if is_released:
            engine.release(sequence)
            assert engine.admit(sequence)
        assert sequence.num_computed == len(sequence.tokens) - 1
        (logits,) = logits_of(engine, [sequence], [[7, 8]])

        fresh, again = Engine.open(llama_engine_dir), start(sequence.tokens)
        assert fresh.admit(again) and again.num_computed == 0
        torch.testing.assert_close(logits, logits_of(fresh, [again], [[7, 8]])[0], **TOLERANCE)
        assert_equals_hf(llama, logits, sequence.tokens, [7, 8])


def test_cache_that_memory_cannot_hold_is_an_error_with_the_numbers(
    llama_engine_dir: Any, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A block of the tiny Llama: 4 tokens x 2 layers x 2 K/V heads x (8 + 8) x 4 bytes = 1024 bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(max_tokens=999 * 4)).close()
    with pytest.raises(SpecDecError) as raised:
        Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(max_tokens=1000 * 4))
    said(raised, "4000", "1.0")


def test_devices_that_do_not_exist_are_wrong_usage(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    assert resolve_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(UsageError) as raised:
        resolve_device("cpu", 1)
    said(raised, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(UsageError) as raised:
        resolve_device("cuda", 2)
    said(raised, "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SpecDecError) as raised:
        resolve_device("cuda", 0)
    said(raised)


REQUEST_ERRORS = [
    pytest.param([], 5, (3,), id="empty prompt"),
    pytest.param([5] * 97, 5, (96, 97), id="prompt too long"),
    pytest.param([5] * 96, 65, (160, 96, 65), id="prompt and output too long"),
    pytest.param([5] * 4, 0, (1, 0), id="nothing to generate"),
    pytest.param([5, 10_000], 5, (10000,), id="token id too large"),
    pytest.param([5, -1], 5, (-1,), id="token id negative"),
]


@pytest.mark.parametrize(("prompt", "max_new_tokens", "quoted"), REQUEST_ERRORS)
def test_request_the_engine_cannot_serve_is_an_error(
    prompt: list[int], max_new_tokens: int, quoted: tuple[int, ...], llama_engine_dir: Any, said: Said
) -> None:
    engine = Engine.open(llama_engine_dir)
    engine.check_request(Request(3, (5,) * 96, 64))  # just fits
    with pytest.raises(SpecDecError) as raised:
        engine.check_request(Request(3, tuple(prompt), max_new_tokens))
    said(raised, *quoted)


@pytest.mark.parametrize("loop", [orchestrator, scheduler])
def test_closed_engine_says_so(loop: Any, llama_engine_dir: Path, said: Said) -> None:
    engine = Engine.open(llama_engine_dir)
    sequence = start(A)
    assert engine.admit(sequence)
    steps = loop.generate(engine, [Request(1, (3, 4, 5), 9)], NgramLookup(2))
    next(steps)
    engine.close()
    engine.close()
    uses: list[Callable[[], object]] = [
        lambda: next(steps),
        lambda: list(loop.generate(engine, [Request(2, (3, 4, 5), 9)])),
        lambda: judge(engine, [sequence], [Draft([])]),
        lambda: engine.admit(start(A, 3)),
        lambda: engine.occupy_cache(range(1, 2)),
    ]
    for use in uses:
        with pytest.raises(SpecDecError) as raised:
            use()
        said(raised)
    engine.release(sequence)
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
